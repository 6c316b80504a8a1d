// The first page: is it learning, is it healthy, what limits it.

import { clock, count, duration, inUnit, link, num, percent } from "./format.js";
import { el, empty, panel, table } from "./dom.js";
import { shareBars } from "./charts.js";
import { Curves } from "./curves.js";

const MARK = { ok: "✓", warn: "△", bad: "✕", none: "" };
const EVAL_HUES = ["ok", "prob", "version"];
const OVERVIEW_EVERY_MS = 10_000;

function tiles(facts) {
  return facts.map((fact) => {
    const mark = MARK[fact.status] ?? "";
    const value = fact.unit === "check" ? (fact.value ? "✓ balance" : "✕ do not") : inUnit(fact.value, fact.unit);
    const unit =
      fact.value != null && ["steps", "tokens/s"].includes(fact.unit) ? el("small", {}, ` ${fact.unit}`) : null;
    const name = fact.metric ? el("a", { href: link("learning", "", { q: fact.metric }) }, fact.name) : fact.name;
    const status = mark && fact.unit !== "check" ? el(`b.${fact.status}`, { title: fact.status }, ` ${mark}`) : null;
    return el(
      `div.fact.${fact.status}`,
      {},
      el("dt", {}, name),
      el("dd", {}, value, unit, status),
      el("small", {}, fact.note || " "),
    );
  });
}

function limits({ limit, waits, cost = {}, left_s }) {
  const hours = (value) => (value == null ? null : `${num(value)} GPU-hours`);
  const money = (value) => (value == null ? null : `${cost.currency ?? ""}${num(value)}`);
  const spent = [hours(cost.gpu_hours), money(cost.money)].filter(Boolean).join(" · ");
  const ahead = [left_s == null ? null : duration(left_s), hours(cost.gpu_hours_left), money(cost.money_left)]
    .filter(Boolean)
    .join(" · ");
  const hue = { waiting: "mute", training: "ok" };
  return [
    limit?.words ? el("p.lead", {}, limit.words) : empty("Known after the first steps."),
    limit?.parts?.length ? shareBars(limit.parts.map((part) => ({ ...part, hue: hue[part.name] }))) : null,
    limit?.cure ? el("p.mute", {}, limit.cure) : null,
    waits?.length
      ? table(
          ["who waits", "for", "a step", "share"],
          waits.map((wait) => [wait.who, wait.for, duration(wait.seconds), percent(wait.share)]),
          { caption: "Waiting" },
        )
      : null,
    spent ? el("p", {}, el("span.mute", {}, "spent "), spent) : null,
    ahead ? el("p", {}, el("span.mute", {}, "to the end "), ahead) : null,
  ].filter(Boolean);
}

const since = (alarm) => (alarm.since_step == null ? clock(alarm.since_s) : `step ${count(alarm.since_step)}`);

/** Alarms in the order of the server, those of now with their cure. */
export function attention(alarms) {
  if (!alarms.length) return el("p.good", {}, "✓ nothing needs attention");
  return el(
    "ul.alarms",
    {},
    alarms.map((alarm) =>
      el(
        `li.${alarm.now ? alarm.level : "past"}`,
        {},
        el("b", {}, alarm.level === "error" ? "✕ " : "△ "),
        el(
          "a",
          { href: alarm.link?.startsWith("#") ? alarm.link : link("learning", "", { q: alarm.metric }) },
          alarm.sentence,
        ),
        el("span.mute", {}, ` ${alarm.now ? "since" : "earlier, from"} ${since(alarm)}`),
        alarm.cure ? el("span.cure", {}, alarm.cure) : null,
      ),
    ),
  );
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

export async function overviewPage({ source, go }) {
  const root = el("div.page");
  let data = await source.get("overview");
  const facts = el("dl.facts");
  const reward = panel("Reward", {
    note: "training; held-out sets with their intervals; ticks: pushes",
    size: "wide8",
  });
  const limit = panel("What limits it", { size: "wide4" });
  const body = el("div");
  limit.append(body);
  const alarms = panel("Attention", { note: "newest first", size: "wide12" });
  const list = el("div");
  alarms.append(list);
  root.append(facts, el("div.grid", {}, reward, limit, alarms));
  const chart = new Curves(reward, {
    label: "mean reward of a step",
    height: 300,
    pick: (step) => go(link("batch", step)),
  });

  const lines = () => [
    { name: "reward", hue: "reward", points: data.reward?.points ?? [] },
    ...evaluationLines(data.evaluations),
  ];
  const drawFacts = () => {
    facts.replaceChildren(...tiles(data.facts));
    body.replaceChildren(...limits(data));
  };
  const drawAll = () => {
    drawFacts();
    list.replaceChildren(attention(data.alarms));
    chart.marks = data.pushes.map((push) => push.step);
    chart.set(lines());
  };
  drawAll();

  let asked = performance.now();
  async function refetch() {
    asked = performance.now();
    data = await source.get("overview");
    drawAll();
  }

  function update(event) {
    Object.assign(data, event.run, event.overview);
    if (event.overview) drawFacts();
    if (event.alarms) {
      data.alarms = event.alarms;
      list.replaceChildren(attention(data.alarms));
    }
    for (const push of event.pushes ?? []) chart.marks.push(push.step);
    const rewards = event.points?.values[data.reward?.metric] ?? [];
    event.points?.steps.forEach((step, place) => rewards[place] !== undefined && chart.push(0, step, rewards[place]));
    if (event.evaluations?.length) {
      const known = new Map(
        [...data.evaluations, ...event.evaluations].map((item) => [`${item.set} ${item.version}`, item]),
      );
      data.evaluations = [...known.values()];
      chart.set([chart.lines[0], ...evaluationLines(data.evaluations)]);
    }
    if (event.points && !event.overview && performance.now() - asked > OVERVIEW_EVERY_MS) refetch();
  }
  return { root, update };
}
