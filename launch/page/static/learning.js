// Curves of every metric with their healthy ranges, runs over each other, and the lag of the trained tokens.

import { inUnit, judge, link } from "./format.js";
import { button, choice, el, empty, panel } from "./dom.js";
import { HeatMap } from "./charts.js";
import { Curves } from "./curves.js";

const SHOWN = {
  reward: ["data/reward_mean", "train/reward_std", "data/reward/*", "eval/*", "train/zero_variance_group_share"],
  policy: [
    "train/entropy",
    "train/grad_norm",
    "train/kl_reference",
    "train/ppo_clip_fraction",
    "train/sft_loss",
    "critic/explained_variance",
  ],
  "off-policy": [
    "offpolicy/lag_mean",
    "offpolicy/k3",
    "offpolicy/ess",
    "offpolicy/weight_mean",
    "offpolicy/rejected_tokens",
  ],
  numerics: [
    "offpolicy/fresh_logprob_diff_abs",
    "offpolicy/fresh_k3",
    "offpolicy/pearson",
    "train/skipped_minibatches",
  ],
  data: [
    "train/response_length_mean",
    "train/truncated_share",
    "train/tokens_per_second",
    "train/wait_share",
    "train/step_seconds",
    "train/mfu",
  ],
};
const MOST_FOUND = 48; // tiles of a search
const AT_ONCE = 60; // names in one request
const RUN_STYLES = [
  ["prob", [6, 3]],
  ["ok", [2, 3]],
  ["mute", [8, 3, 2, 3]],
];
const SMOOTHING = { raw: 0, smooth: 0.8, smoother: 0.95 };

/** Names that a list of names and beginnings (`eval/*`) takes, in its order. */
export function chooseNames(all, wanted) {
  const fits = (pattern) =>
    pattern.endsWith("*")
      ? all.filter((name) => name.startsWith(pattern.slice(0, -1)))
      : all.filter((name) => name === pattern);
  return [...new Set(wanted.flatMap(fits))];
}

/** Names that a search finds: words that all occur, or a regular expression. */
export function search(metrics, text) {
  const words = text.toLowerCase().split(/\s+/).filter(Boolean);
  let pattern = null;
  try {
    pattern = new RegExp(text, "i");
  } catch {
    // not a regular expression (yet): the words decide
  }
  const fits = ({ name, meaning }) =>
    pattern?.test(name) || words.every((word) => `${name} ${meaning ?? ""}`.toLowerCase().includes(word));
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
  constructor(metric, page) {
    this.metric = metric;
    this.page = page;
    this.points = [];
    this.others = new Map();
    this.status = el("span.mute");
    this.newest = el("output");
    this.root = panel(metric.name, { tools: [this.status, this.newest], label: metric.name });
    this.root.classList.add("tile");
    const words = [metric.meaning, metric.unit, metric.healthy_words && `healthy: ${metric.healthy_words}`];
    this.root.querySelector("h2").title = words.filter(Boolean).join(" · ");
    const hue = metric.group === "reward" || metric.name.includes("reward") ? "reward" : "version";
    this.line = { name: "this run", hue };
    this.chart = new Curves(this.root, {
      label: metric.name,
      band: metric.healthy,
      pick: (step) => page.go(link("batch", step)),
    });
  }

  set(points) {
    this.points = points;
    this.draw();
  }

  push(step, value) {
    const last = this.points.at(-1);
    if (last && last[0] >= step) this.points = this.points.filter((point) => point[0] !== step);
    this.points.push([step, value]);
    if (this.points.length > 2_000) this.points.splice(0, 1);
    this.draw();
  }

  draw() {
    const factor = SMOOTHING[this.page.smoothing];
    const others = [...this.others].map(([name, points], place) => {
      const [hue, dash] = RUN_STYLES[place % RUN_STYLES.length];
      return { name, hue, dash, points: smooth(points, factor) };
    });
    this.chart.log = this.page.log;
    this.chart.set([{ ...this.line, points: smooth(this.points, factor) }, ...others]);
    this.newest.textContent = inUnit(
      this.points.findLast((point) => point[1] != null)?.[1],
      this.metric.unit === "share" ? "share" : "",
    );
    const { mark, tone, text } = judge(this.points, ...(this.metric.healthy ?? []));
    this.status.className = tone ?? "";
    this.status.textContent = `${mark} ${text}`;
    this.root.classList.toggle("warned", tone === "warn");
  }
}

export async function learningPage({ source, go, replace, query }) {
  const root = el("div.page");
  const page = { go, smoothing: "raw", log: false };
  const [{ metrics }, lags, { runs }] = await Promise.all([
    source.get("metrics"),
    source.get("lags").catch(() => null),
    source.get("runs").catch(() => ({ runs: [] })),
  ]);
  const byName = new Map(metrics.map((metric) => [metric.name, metric]));
  const compared = new Set((query.runs ?? "").split(",").filter(Boolean));
  const tiles = new Map();
  const curves = el("div");
  const redraw = () => [...tiles.values()].forEach((tile) => tile.draw());

  const input = el("input", {
    type: "search",
    "aria-label": "search metrics",
    placeholder: "search any metric: words or a regular expression",
    value: query.q ?? "",
  });
  const bar = el(
    "div.bar",
    {},
    input,
    choice(Object.keys(SMOOTHING), "raw", (name) => ((page.smoothing = name), redraw()), "smoothing"),
    choice(["linear", "log"], "linear", (name) => ((page.log = name === "log"), redraw()), "scale"),
    runs.filter((run) => !run.this).map((run) => runSwitch(run.name)),
  );
  root.append(bar, curves);

  function runSwitch(name) {
    const box = el("input", { type: "checkbox", checked: compared.has(name) });
    box.addEventListener("change", () => {
      if (box.checked) compared.add(name);
      else compared.delete(name);
      remember();
      show();
    });
    return el("label.chip", {}, box, ` ${name}`);
  }

  const remember = () => replace(link("learning", "", { q: input.value, runs: [...compared].join(",") }));

  async function load(names) {
    for (let from = 0; from < names.length; from += AT_ONCE) {
      const part = names.slice(from, from + AT_ONCE).join(",");
      const answers = await Promise.all(
        [null, ...compared].map((run) => source.get("series", { names: part, run }).catch(() => ({ series: {} }))),
      );
      for (const name of part.split(",")) {
        const tile = tiles.get(name);
        if (!tile) continue;
        tile.others = new Map([...compared].map((run, place) => [run, answers[place + 1].series[name] ?? []]));
        tile.set(answers[0].series[name] ?? []);
      }
    }
  }

  /** Show the groups of the first look, or what the search finds. */
  async function show() {
    const text = input.value.trim();
    const all = metrics.map((metric) => metric.name);
    const found = text ? search(metrics, text) : [];
    const groups = text
      ? { [`${found.length} of ${all.length} metrics`]: found.slice(0, MOST_FOUND) }
      : Object.fromEntries(Object.entries(SHOWN).map(([group, names]) => [group, chooseNames(all, names)]));
    tiles.clear();
    const sections = [];
    for (const [group, names] of Object.entries(groups)) {
      if (!names.length && !text) continue;
      for (const name of names) tiles.set(name, new Tile(byName.get(name), page));
      sections.push(
        el(
          "section.group",
          {},
          el("h3", {}, group),
          el(
            "div.tiles",
            {},
            names.map((name) => tiles.get(name).root),
          ),
        ),
      );
    }
    if (!text)
      sections.push(
        el(
          "p",
          {},
          button(`all ${all.length} metrics`, () => ((input.value = "."), show())),
        ),
      );
    if (!all.length) sections.splice(0, sections.length, empty("Curves come with the first trained step."));
    curves.replaceChildren(...sections);
    await load([...tiles.keys()]);
  }
  let timer = 0;
  input.addEventListener("input", () => {
    clearTimeout(timer);
    timer = setTimeout(() => (remember(), show()), 200);
  });
  await show();

  const lag = panel("Lag of trained tokens", {
    note: "share of a step's tokens, by steps between sampling and training; click a cell: its step",
    size: "wide12",
  });
  root.append(lag);
  const heat = new HeatMap(lag, {
    label: "share of the trained tokens by step and lag",
    columns: lags?.steps ?? [],
    rows: lags?.lags ?? [],
    shares: lags?.shares ?? [],
    pick: ([first, last], row) =>
      go(
        first === last
          ? link("samples", "", { filter: `step=${first} lag=${row === "over" ? ">15" : row}` })
          : link("batch", last),
      ),
  });

  function addLags(step, values, place) {
    const shares = heat.rows.map((row) => values[`offpolicy/lag_share/${row}`]?.[place] ?? 0);
    if (heat.columns.at(-1)?.[1] >= step || !heat.rows.length) return;
    heat.set({ columns: [...heat.columns, [step, step]], rows: heat.rows, shares: [...heat.shares, shares] });
  }

  function update(event) {
    event.points?.steps.forEach((step, place) => {
      for (const [name, tile] of tiles) {
        const value = event.points.values[name]?.[place];
        if (value !== undefined) tile.push(step, value);
      }
      addLags(step, event.points.values, place);
    });
  }
  return { root, update, search: input };
}
