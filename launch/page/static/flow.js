// The way of the samples, and the ledger in which every one of them has exactly one place.

import { clock, count, link, percent } from "./format.js";
import { button, choice, el, panel, table } from "./dom.js";
import { Flow } from "./charts.js";

const TIMES = { "whole run": "all", "last 10 min": "600" };
const FLOW_EVERY_MS = 5_000;

/** The filter of the samples in a line of the ledger; empty where headers do not have it. */
function filterOf({ fate }) {
  if (fate === "eval") return "kind=eval";
  return fate === "trained" || fate.startsWith("dropped") ? `fate="${fate}"` : "";
}

function ledgerRows(flow) {
  const published = Math.max(1, flow.published ?? 0);
  return flow.ledger.map((line) => {
    const filter = filterOf(line);
    const tone = line.samples && ["bad", "warn"].includes(line.tone) ? line.tone : line.samples ? "" : "mute";
    const mark = { bad: "✕ ", warn: "△ " }[tone] ?? "";
    const href = link("samples", "", { filter });
    const name = filter ? el("a", { href }, mark + line.fate) : mark + line.fate;
    const cells = [name, count(line.samples), percent(line.samples / published)];
    return { cells, class: tone };
  });
}

function auditWords(audit) {
  if (!audit || audit.state === "not yet") return el("p.mute", {}, "◌ not checked yet");
  if (audit.state === "running") return el("p.mute", {}, "◌ being checked");
  const fine = !audit.lost && !audit.twice && !audit.problems?.length;
  return el(
    `p.${fine ? "good" : "badly"}`,
    {},
    `${fine ? "✓" : "✕"} lost ${count(audit.lost)} · trained twice ${count(audit.twice)}`,
    el("span.mute", {}, ` checked up to sample #${audit.at_seq} at ${clock(audit.time_s)}`),
    (audit.problems ?? []).map((problem) => el("span.cure", {}, problem)),
  );
}

function taskRows(tasks) {
  const { given_up: reasons = {}, ...numbers } = tasks ?? {};
  const rows = Object.entries(numbers).map(([name, value]) => [name, count(value)]);
  return [...rows, ...Object.entries(reasons).map(([reason, value]) => [`given up: ${reason}`, count(value)])];
}

function deadRows(dead, operator, source) {
  return dead.map((task) => {
    const act = (name) => async (event) => {
      event.target.disabled = true;
      event.target.textContent = await source.post(name, { tasks: [task.task] }).then(
        () => "done",
        (error) => error.message,
      );
    };
    const tools =
      operator && !task.decision
        ? el("span", {}, button("requeue", act("requeue")), button("drop", act("drop")))
        : task.decision;
    return [task.task, task.reason, count(task.attempts), task.actor, tools || "—"];
  });
}

export async function flowPage({ source, run, go }) {
  const root = el("div.page");
  let [time, asked] = ["all", performance.now()];
  let flow = await source.get("flow");
  const pick = async (name) => {
    time = TIMES[name];
    flow = await source.get("flow", time === "all" ? {} : { last: time });
    draw();
  };
  const tools = source.live ? [choice(Object.keys(TIMES), "whole run", pick, "time")] : [];
  const way = panel("Way of the samples", {
    note: "width = samples; click a place for its samples",
    size: "wide12",
    tools,
  });
  const chart = new Flow(way, {
    label: "way of the samples from the task to their place in the ledger",
    pick: (node) => {
      const line = flow.ledger.find((item) => item.fate === node.id || item.fate === node.name);
      if (line && filterOf(line)) go(link("samples", "", { filter: filterOf(line) }));
    },
  });
  const ledger = panel("Ledger", { note: "every sample has one line, zeros stay", size: "wide8" });
  const tasks = panel("Tasks", { size: "wide4" });
  const body = el("div");
  const numbers = el("div");
  ledger.append(body);
  tasks.append(numbers);
  root.append(way, el("div.grid", {}, ledger, tasks));

  function draw() {
    chart.set(flow);
    const { balance } = flow;
    body.replaceChildren(
      table(["samples", "number", "share"], ledgerRows(flow), { caption: "Ledger" }),
      el(
        `p.${balance.ok ? "good" : "badly"}`,
        {},
        balance.ok ? `✓ balance: ${balance.words}` : `✕ ${balance.words} (difference ${count(balance.difference)})`,
      ),
      auditWords(flow.audit),
    );
    numbers.replaceChildren(table(["tasks", "number"], taskRows(flow.tasks), { caption: "Tasks" }));
  }
  draw();

  const dead = await source.get("dead").catch(() => ({ dead: [] }));
  if (dead.dead?.length) {
    const list = panel("Dead tasks", { note: "given up after their attempts", size: "wide12" });
    list.append(
      table(
        ["task", "reason", "attempts", "last actor", "decision"],
        deadRows(dead.dead, run().rights === "operator", source),
      ),
    );
    root.append(list);
  }

  async function update(event) {
    if (!event.flow) return;
    if (time === "all") flow = { ...flow, ...event.flow };
    else if (performance.now() - asked > FLOW_EVERY_MS) {
      asked = performance.now();
      flow = await source.get("flow", { last: time });
    } else return;
    draw();
  }
  return { root, update };
}
