// The way of the samples, and the ledger in which every one of them has exactly one place.

import { clock, count, percent, samplesLink } from "./format.js";
import { button, choice, commandButton, el, panel, table, tablePanel } from "./dom.js";
import { Flow } from "./charts.js";

const TIMES = { "whole run": null, "last 10 min": "600" };
const FLOW_EVERY_MS = 5_000;
const CHECKED_FOR_S = 60; // the server checks no more often

/** The filter of the samples in a line of the ledger; empty where headers do not have it. */
function filterOf({ fate }) {
  if (fate === "eval") return "kind=eval";
  return fate === "trained" || fate.startsWith("dropped") ? `fate="${fate}"` : "";
}

function ledgerRows(flow) {
  const published = Math.max(1, flow.published ?? 0);
  return flow.ledger.map((line) => {
    const filter = filterOf(line);
    const tone = !line.samples ? "mute" : ["bad", "warn"].includes(line.tone) ? line.tone : "";
    const text = ({ bad: "✕ ", warn: "△ " }[tone] ?? "") + line.fate;
    const name = filter ? el("a", { href: samplesLink(filter) }, text) : text;
    return { cells: [name, count(line.samples), percent(line.samples / published)], class: tone };
  });
}

/** Whether a check would find something new: samples of a run that has ended do not change. */
export function isOld(audit, { mode, now_s }) {
  if (audit?.state === "running") return false;
  return audit?.state !== "checked" || (mode === "live" && !(now_s - audit.time_s < CHECKED_FOR_S));
}

function taskRows({ given_up: reasons = {}, ...numbers } = {}) {
  const given = Object.entries(reasons).map(([reason, value]) => [`given up: ${reason}`, value]);
  return [...Object.entries(numbers), ...given].map(([name, value]) => [name, count(value)]);
}

function deadTasks(dead, operator, source) {
  const decide = (task, word) => commandButton(word, () => source.post(word, { tasks: [task] }));
  const columns = {
    task: ({ task }) => String(task),
    reason: ({ reason }) => reason,
    attempts: ({ attempts }) => count(attempts),
    "last actor": ({ actor }) => actor,
    decision: ({ task, decision }) =>
      decision || (operator && el("span", decide(task, "requeue"), decide(task, "drop"))) || "—",
  };
  return tablePanel("Dead tasks", "given up after their attempts", columns, dead);
}

class FlowView {
  root = el("div.page");
  body = el("div");
  numbers = el("div");
  last = null; // seconds
  asked = performance.now();

  constructor({ source, run, go }, flow, dead) {
    Object.assign(this, { source, run, go, flow });
    const pick = (name) => ((this.last = TIMES[name]), this.ask());
    const tools = source.live ? [choice(Object.keys(TIMES), "whole run", pick, "time")] : [];
    const note = "width = samples; click a place for its samples";
    const way = panel("Way of the samples", { note, size: "wide12", tools });
    const label = "way of the samples from the task to their place in the ledger";
    this.chart = new Flow(way, { label, pick: (node) => this.open(node) });
    const ledger = panel("Ledger", { note: "every sample has one line, zeros stay", size: "wide8" }, this.body);
    const tasks = panel("Tasks", { size: "wide4" }, this.numbers);
    this.root.append(way, el("div.grid", ledger, tasks));
    if (dead.length) this.root.append(deadTasks(dead, run().rights === "operator", source));
    this.draw();
  }

  open(node) {
    const line = this.flow.ledger.find((item) => item.fate === node.id || item.fate === node.name);
    if (line && filterOf(line)) this.go(samplesLink(filterOf(line)));
  }

  async ask(query = {}) {
    this.asked = performance.now();
    this.flow = await this.source.get("flow", { last: this.last, ...query });
    this.draw();
  }

  draw() {
    const { flow } = this;
    this.chart.set(flow);
    const { balance } = flow;
    this.body.replaceChildren(
      table(["samples", "number", "share"], ledgerRows(flow), { caption: "Ledger" }),
      el(`p.${balance.tone}`, balance.text),
      this.audit(),
    );
    this.numbers.replaceChildren(table(["tasks", "number"], taskRows(flow.tasks), { caption: "Tasks" }));
  }

  audit() {
    const { tone, text, notes, time_s: time } = this.flow.audit;
    const check = (event) => this.ask({ check: 1 }).catch(({ message }) => (event.target.textContent = message));
    const old = this.source.live && isOld(this.flow.audit, this.run());
    const lines = [...notes, time && `checked ${clock(time)}`].map((note) => note && el("span.cure", note));
    return el(`p.audit.${tone}`, { role: "status" }, [text, " ", old && button("check now", check)], lines);
  }

  update({ flow }) {
    if (!flow) return null;
    if (this.last && performance.now() - this.asked > FLOW_EVERY_MS) return this.ask();
    this.flow = { ...this.flow, ...(this.last ? { audit: flow.audit } : flow) };
    return this.draw();
  }
}

export async function flowPage(context) {
  const { source, known } = context;
  const nothing = () => ({ dead: [] });
  const [flow, { dead }] = await Promise.all([source.get("flow"), source.get("dead").catch(nothing), known]);
  return new FlowView(context, flow, dead);
}
