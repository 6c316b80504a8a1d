// The first page: is it learning, is it healthy, what limits it.

import { clock, count, duration, inUnit, link, num, percent } from "./format.js";
import { el, empty, fact, panel, table } from "./dom.js";
import { shareBars } from "./charts.js";
import { Curves } from "./curves.js";

const MARK = { ok: "✓", warn: "△", bad: "✕" };
const EVAL_HUES = ["ok", "prob", "version"];
const OVERVIEW_EVERY_MS = 10_000;

/** The value of a fact as text; a check that is neither true nor false is unknown. */
export function factText({ value, unit }) {
  if (value == null) return "—";
  if (unit === "check") return value ? "✓ balance" : "✕ no balance";
  return inUnit(value, unit);
}

function factTile(item) {
  const { unit, status, metric, name, note } = item;
  const words = item.value != null && ["steps", "tokens/s"].includes(unit) && el("small", ` ${unit}`);
  const mark = MARK[status] && unit !== "check" && el(`b.${status}`, { title: status }, ` ${MARK[status]}`);
  const title = metric ? el("a", { href: link("learning", "", { q: metric }) }, name) : name;
  return fact(title, [factText(item), words, mark], note, status);
}

function limits({ limit = {}, waits = [], cost = {}, left_s }) {
  const hours = (value) => value != null && `${num(value)} GPU-hours`;
  const money = (value) => value != null && `${cost.currency ?? ""}${num(value)}`;
  const sum = (name, parts) => {
    const words = parts.filter(Boolean).join(" · ");
    return words && el("p", el("span.mute", name), words);
  };
  const hue = (name) => (name.startsWith("waiting") ? "mute" : name === "training" ? "ok" : "version");
  const rows = waits.map((wait) => [wait.who, wait.for, duration(wait.seconds), percent(wait.share)]);
  return el(
    "div",
    limit.words ? el("p.lead", limit.words) : empty("Known after the first steps."),
    limit.parts?.length > 0 && shareBars(limit.parts.map((part) => ({ ...part, hue: hue(part.name) }))),
    limit.cure && el("p.mute", limit.cure),
    rows.length > 0 && table(["who waits", "for", "a step", "share"], rows, { caption: "Waiting" }),
    sum("spent ", [hours(cost.gpu_hours), money(cost.money)]),
    sum("to the end ", [left_s != null && duration(left_s), hours(cost.gpu_hours_left), money(cost.money_left)]),
  );
}

/** Alarms in the order of the server, those of now with their cure. */
function attention(alarms) {
  if (!alarms.length) return el("p.good", "✓ nothing needs attention");
  const line = (alarm) => {
    const since = alarm.since_step == null ? clock(alarm.since_s) : `step ${count(alarm.since_step)}`;
    const href = alarm.link?.startsWith("#") ? alarm.link : link("learning", "", { q: alarm.metric });
    return el(
      `li.${alarm.now ? alarm.level : "past"}`,
      el("b", alarm.level === "error" ? "✕ " : "△ "),
      el("a", { href }, alarm.sentence),
      el("span.mute", ` ${alarm.now ? "since" : "earlier, from"} ${since}`),
      alarm.cure && el("span.cure", alarm.cure),
    );
  };
  return el("ul.alarms", alarms.map(line));
}

function evaluationLines(evaluations) {
  const sets = [...new Set(evaluations.map((item) => item.set))];
  return sets.map((set, place) => {
    const items = evaluations.filter((item) => item.set === set).sort((a, b) => a.step - b.step);
    const points = items.map((item) => [item.step, item.mean]);
    const area = items
      .filter((item) => item.low != null && item.high != null)
      .map((item) => [item.step, item.low, item.high]);
    return { name: set, hue: EVAL_HUES[place % EVAL_HUES.length], points, area, dots: true };
  });
}

class OverviewView {
  root = el("div.page");
  facts = el("dl.facts");
  limit = el("div");
  alarms = el("div");
  asked = performance.now();

  constructor({ source, go }, data) {
    Object.assign(this, { source });
    const note = "training; held-out sets with their intervals; ticks: pushes";
    const reward = panel("Reward", { note, size: "wide8" });
    const limit = panel("What limits it", { size: "wide4" }, this.limit);
    const alarms = panel("Attention", { note: "newest first", size: "wide12" }, this.alarms);
    const pick = (step) => go(link("batch", step));
    this.chart = new Curves(reward, { label: "mean reward of a step", height: 300, pick });
    this.root.append(this.facts, el("div.grid", reward, limit, alarms));
    this.set(data);
  }

  set(data) {
    this.data = data;
    this.facts.replaceChildren(...data.facts.map(factTile));
    this.limit.replaceChildren(limits(data));
    this.alarms.replaceChildren(attention(data.alarms));
    this.chart.marks = data.pushes.map((push) => push.step);
    const rewards = { name: "reward", hue: "reward", points: data.reward?.points ?? [] };
    this.chart.set([rewards, ...evaluationLines(data.evaluations)]);
  }

  /** Ask again; events that come meanwhile may be newer than the answer. */
  async ask() {
    [this.asked, this.stale, this.early] = [performance.now(), false, []];
    try {
      this.set(await this.source.get("overview"));
    } catch (problem) {
      if (problem.status === undefined) throw problem; // else the frame says that nothing answers
    }
    const { early } = this;
    this.early = null;
    early.forEach((event) => this.apply(event));
  }

  apply({ alarms, pushes = [], points }) {
    if (alarms) this.alarms.replaceChildren(attention(alarms));
    for (const push of pushes) this.chart.marks.push(push.step);
    const rewards = points?.values[this.data.reward?.metric] ?? [];
    rewards.forEach((value, place) => this.chart.push(0, points.steps[place], value));
  }

  update(event) {
    if (this.early) this.early.push(event);
    else this.apply(event);
    if (event.evaluations?.length) this.asked = -Infinity;
    this.stale ||= Boolean(event.points || event.evaluations?.length || event.flow);
    if (!this.early && this.stale && performance.now() - this.asked > OVERVIEW_EVERY_MS) this.ask();
  }
}

export async function overviewPage(context) {
  return new OverviewView(context, await context.source.get("overview"));
}
