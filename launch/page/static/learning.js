// Curves of every metric with their healthy ranges, runs over each other, and the lag of the trained tokens.

import { addPoint, inUnit, joinWords, judge, link, samplesLink } from "./format.js";
import { button, choice, el, empty, panel, searchField } from "./dom.js";
import { HeatMap } from "./charts.js";
import { Curves } from "./curves.js";

const MOST_FOUND = 48; // tiles of a search
const AT_ONCE = 60; // names in one request
const RUN_DASHES = { prob: [6, 3], ok: [2, 3], mute: [8, 3, 2, 3] };
const SMOOTHING = { raw: 0, smooth: 0.8, smoother: 0.95 };

/** Names that a search finds: words that all occur, or a regular expression. */
export function search(metrics, text) {
  const words = text.toLowerCase().split(/\s+/).filter(Boolean);
  let pattern = null;
  try {
    pattern = new RegExp(text, "i");
  } catch {
    // not a regular expression (yet): the words decide
  }
  const fits = ({ name, meaning, peers }) =>
    pattern?.test(name) || words.every((word) => `${name} ${meaning} ${peers}`.toLowerCase().includes(word));
  return metrics.filter(fits).map((metric) => metric.name);
}

/** An exponential mean of the points, corrected for its beginning; holes stay. */
export function smooth(points, factor) {
  if (!factor) return points;
  let [sum, weight] = [0, 0];
  return points.map(([step, value]) => {
    if (value == null) return [step, value];
    sum = factor * sum + (1 - factor) * value;
    weight = factor * weight + (1 - factor);
    return [step, sum / weight];
  });
}

class Tile {
  points = [];
  others = []; // [name of a run, its points]
  status = el("span.mute");
  newest = el("output");

  constructor(metric, page) {
    Object.assign(this, { metric, page });
    const { name, group, meaning, unit, healthy, healthy_words } = metric;
    this.root = panel(name, { tools: [this.status, this.newest] });
    this.root.classList.add("tile");
    this.root.querySelector("h2").title = joinWords(meaning, unit, healthy_words && `healthy: ${healthy_words}`);
    this.line = { name: "this run", hue: group === "reward" || name.includes("reward") ? "reward" : "version" };
    const pick = (step) => page.go(link("batch", step));
    this.chart = new Curves(this.root, { label: name, band: healthy, pick });
  }

  /** Points of an answer, and of the events behind it that came first. */
  set(points, others) {
    const last = points.at(-1)?.[0] ?? Infinity;
    const newer = this.points.filter(([step]) => step > last);
    Object.assign(this, { points: [...points, ...newer], others });
    this.draw();
  }

  push(step, value) {
    this.points = addPoint(this.points, step, value);
    this.draw();
  }

  draw() {
    const factor = SMOOTHING[this.page.smoothing];
    const hues = Object.keys(RUN_DASHES);
    const others = this.others.map(([name, points], place) => {
      const hue = hues[place % hues.length];
      return { name, hue, dash: RUN_DASHES[hue], points: smooth(points, factor) };
    });
    this.chart.log = this.page.log;
    this.chart.set([{ ...this.line, points: smooth(this.points, factor) }, ...others]);
    const newest = this.points.findLast((point) => point[1] != null)?.[1];
    this.newest.textContent = inUnit(newest, this.metric.unit === "share" ? "share" : "");
    const { mark, tone, text } = judge(this.points, ...(this.metric.healthy ?? []));
    this.status.className = tone ?? "";
    this.status.textContent = this.status.title = `${mark} ${text}`;
    this.root.classList.toggle("warned", tone === "warn");
  }
}

/** Share of the trained tokens by step and lag; steps come by events. */
function lagMap(lags, go) {
  const note = "share of a step's tokens, by steps between sampling and training; click a cell: its step";
  const host = panel("Lag of trained tokens", { note, size: "wide12" });
  const pick = ([first, last], row) => {
    const filter = `step=${first} lag=${row === "over" ? ">15" : row}`;
    go(first === last ? samplesLink(filter) : link("batch", last));
  };
  const { steps: columns = [], lags: rows = [], shares = [] } = lags ?? {};
  const map = new HeatMap(host, { label: "share of the trained tokens by step and lag", columns, rows, shares, pick });
  const add = (step, values, place) => {
    if (map.columns.at(-1)?.[1] >= step || !map.rows.length) return;
    const column = map.rows.map((row) => values[`offpolicy/lag_share/${row}`]?.[place] ?? 0);
    map.set({ columns: [...map.columns, [step, step]], shares: [...map.shares, column] });
  };
  return { host, add };
}

class LearningView {
  root = el("div.page");
  curves = el("div");
  tiles = new Map();
  smoothing = "raw";
  log = false;

  constructor({ source, go, replace, query }, { metrics, shown: first, lags, series }) {
    Object.assign(this, { source, go, replace, metrics, first, series });
    this.compared = new Set((query.runs ?? "").split(",").filter(Boolean));
    const placeholder = "search any metric: words or a regular expression";
    this.search = searchField("search metrics", placeholder, query.q, () => this.changed());
    this.lag = lagMap(lags, go);
    this.runs = el("span.chips");
    const smoothings = choice(Object.keys(SMOOTHING), "raw", (smoothing) => this.redraw({ smoothing }), "smoothing");
    const scales = choice(["linear", "log"], "linear", (name) => this.redraw({ log: name === "log" }), "scale");
    this.root.append(el("div.bar", this.search, smoothings, scales, this.runs), this.curves, this.lag.host);
  }

  redraw(changes) {
    Object.assign(this, changes);
    for (const tile of this.tiles.values()) tile.draw();
  }

  runSwitch(name) {
    const box = el("input", { type: "checkbox", checked: this.compared.has(name) });
    box.addEventListener("change", () => {
      this.compared[box.checked ? "add" : "delete"](name);
      this.changed();
    });
    return el("label.chip", box, ` ${name}`);
  }

  changed() {
    this.replace(link("learning", "", { q: this.search.value, runs: [...this.compared].join(",") }));
    return this.show();
  }

  /** Names by heading: the groups of the first look, or what the search finds. */
  groups() {
    const text = this.search.value.trim();
    if (!text) return this.first;
    const hits = search(this.metrics, text);
    return [[`${hits.length} of ${this.metrics.length} metrics`, hits.slice(0, MOST_FOUND)]];
  }

  /** Show the tiles of the groups, then ask for their points. */
  show() {
    const searched = this.search.value.trim();
    const byName = new Map(this.metrics.map((metric) => [metric.name, metric]));
    const groups = this.groups().filter(([, names]) => searched || names.length);
    const shown = groups.flatMap(([, names]) => names);
    const loading = this.load(shown); // asked for first: the tiles are built meanwhile
    this.tiles = new Map(shown.map((name) => [name, new Tile(byName.get(name), this)]));
    const tiles = (names) => names.map((name) => this.tiles.get(name).root);
    const section = ([group, names]) => el("section.group", el("h3", group), el("div.tiles", tiles(names)));
    const sections = groups.map(section);
    const all = button(`all ${this.metrics.length} metrics`, () => ((this.search.value = "."), this.show()));
    if (!this.metrics.length) sections.splice(0, Infinity, empty("Curves come with the first trained step."));
    else if (!searched) sections.push(el("p", all));
    this.curves.replaceChildren(...sections);
    return loading;
  }

  async load(names) {
    const runs = [...this.compared];
    for (let from = 0; from < names.length; from += AT_ONCE) {
      const part = names.slice(from, from + AT_ONCE);
      const get = (run) => this.source.get("series", { names: part.join(","), run }).catch(() => ({ series: {} }));
      const first = this.series && part.every((name) => this.series.series[name]) && this.series;
      this.series = null; // later answers are newer
      const [own, ...others] = await Promise.all([first || get(), ...runs.map(get)]);
      for (const name of part) {
        const lines = runs.map((run, place) => [run, others[place].series[name] ?? []]);
        this.tiles.get(name)?.set(own.series[name] ?? [], lines);
      }
    }
  }

  update({ points }) {
    points?.steps.forEach((step, place) => {
      for (const [name, tile] of this.tiles) {
        const value = points.values[name]?.[place];
        if (value !== undefined) tile.push(step, value);
      }
      this.lag.add(step, points.values, place);
    });
  }
}

export async function learningPage(context) {
  const { source, query } = context;
  const [{ metrics, shown }, lags, series] = await Promise.all([
    source.get("metrics"),
    source.get("lags").catch(() => null),
    query.q ? null : source.get("series", { first: 1 }).catch(() => null),
  ]);
  const page = new LearningView(context, { metrics, shown, lags, series });
  // Switches of the other runs: the bus is asked for their names, which no curve waits for.
  const add = ({ runs }) => page.runs.append(...runs.filter((run) => !run.this).map((run) => page.runSwitch(run.name)));
  source.get("runs").then(add, () => null);
  await page.show();
  return page;
}
