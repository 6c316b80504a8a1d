// The first page: is it learning, is it healthy, what limits it.

import { addPoint, clock, count, duration, joinWords, link, num, percent } from "./format.js";
import { el, empty, fact, panel, renew, table } from "./dom.js";
import { shareBars } from "./charts.js";
import { Curves } from "./curves.js";

const EVAL_HUES = ["ok", "prob", "version"];
const MOST_PUSHES = 400;

function limits({ limit = {}, waits = [], cost = {}, left_s }) {
  const hours = (value) => value != null && `${num(value)} GPU-hours`;
  const money = (value) => value != null && `${cost.currency ?? ""}${num(value)}`;
  const sum = (name, parts) => {
    const words = joinWords(...parts);
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
  const line = ({ now, level, sentence, cure, since_step: step, since_s: time, link: href, metric }) => {
    const since = ` ${now ? "since" : "earlier, from"} ${step == null ? clock(time) : `step ${count(step)}`}`;
    const page = href?.startsWith("#") ? href : link("learning", "", { q: metric });
    const words = [el("a", { href: page }, sentence), el("span.mute", since), cure && el("span.cure", cure)];
    return el(`li.${now ? level : "past"}`, el("b", level === "error" ? "✕ " : "△ "), words);
  };
  return el("ul.alarms", alarms.map(line));
}

function evaluationLines(evaluations) {
  return [...Map.groupBy(evaluations, (item) => item.set)].map(([set, scores], place) => {
    const items = scores.sort((a, b) => a.step - b.step);
    const points = items.map((item) => [item.step, item.mean]);
    const bounded = items.filter((item) => item.low != null && item.high != null);
    const area = bounded.map((item) => [item.step, item.low, item.high]);
    return { name: set, hue: EVAL_HUES[place % EVAL_HUES.length], points, area, dots: true };
  });
}

class OverviewView {
  root = el("div.page");
  facts = el("dl.facts");
  limit = el("div");
  alarms = el("div");

  constructor({ go }, data) {
    this.data = data;
    const note = "training; held-out sets with their intervals; ticks: pushes";
    const reward = panel("Reward", { note, size: "wide8" });
    const limit = panel("What limits it", { size: "wide4" }, this.limit);
    const alarms = panel("Attention", { note: "newest first", size: "wide12" }, this.alarms);
    const pick = (step) => go(link("batch", step));
    this.chart = new Curves(reward, { label: "mean reward of a step", height: 300, pick });
    this.root.append(this.facts, el("div.grid", reward, limit, alarms));
    this.rewards = { name: "reward", hue: "reward", points: data.reward?.points ?? [] };
    this.draw();
  }

  draw() {
    const { data, chart } = this;
    renew(this.facts, ...data.facts.map(fact));
    renew(this.limit, limits(data));
    renew(this.alarms, attention(data.alarms));
    chart.marks = data.pushes.map((push) => push.step);
    chart.set([this.rewards, ...evaluationLines(data.evaluations)]);
  }

  update({ run, overview, alarms = this.data.alarms, pushes = [], points, evaluations = [] }) {
    const { data, rewards } = this;
    const same = (old) => evaluations.some((item) => item.set === old.set && item.version === old.version);
    data.evaluations = [...data.evaluations.filter((item) => !same(item)), ...evaluations];
    data.pushes = [...data.pushes, ...pushes].slice(-MOST_PUSHES);
    const values = points?.values[data.reward?.metric] ?? [];
    values.forEach((value, place) => (rewards.points = addPoint(rewards.points, points.steps[place], value)));
    const old = data.alarms;
    Object.assign(data, run, overview, { alarms });
    if (overview || points || alarms !== old || evaluations.length) this.draw();
  }
}

export async function overviewPage(context) {
  return new OverviewView(context, await context.source.get("overview"));
}
