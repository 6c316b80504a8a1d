// Which process does what, when: a lane per process, queues, hosts and devices.

import { bytes, count, duration, joinWords, link, num, percent, samplesLink } from "./format.js";
import { button, commandButton, el, empty, fact, panel, table, tableOf, tablePanel } from "./dom.js";
import { Lanes, PHASES, SILENT_S } from "./lanes.js";

const TABLE_EVERY_MS = 5_000;
const MOST_ROWS = 300;
const SPANS = { "1 min": 60, "10 min": 600, "1 h": 3_600 };
const STATES = { working: "works (shade: version)", waiting: "waits", updating: "takes weights" };
const MEANING = { ...STATES, draining: "drains", down: "is gone" };
const COLUMNS = {
  process: ({ lane, log, log_name: name }) =>
    name ? el("a", { href: link("setup", "", { log: name }), title: log }, lane) : lane,
  host: (lane) => lane.host,
  phase: ({ silent_s: silent, phase, waits_for: awaited }) => {
    if (silent > SILENT_S) return el("td.warned", `silent for ${duration(silent)}`);
    return phase + (awaited ? ` (${awaited})` : "");
  },
  version: ({ role, version, newest }) => {
    if (version == null) return "—";
    const behind = role === "engine" ? newest - version : 0;
    return behind > 0 ? el("td.warned", `v${version}, ${count(behind)} behind`) : `v${version}`;
  },
  "tokens/s": (lane) => num(lane.tokens_per_second),
  CPU: (lane) => percent(lane.cpu_share),
  memory: (lane) => bytes(lane.memory_bytes),
  devices: ({ devices }) => el("td", devices.length ? devices.map(deviceLine) : "CPU"),
  restarts: (lane) => count(lane.restarts ?? 0),
  trouble: (lane) => lane.trouble || lane.note || "—",
  load: (lane) => {
    const load = Object.entries(lane.load ?? {}).map(([name, value]) => `${name} ${num(value)}`);
    return el("td.text", { title: load.join(", ") }, load.join(", "));
  },
};

/** An accelerator in a line: the begin of its UUID, and its use where the driver was asked. */
function deviceLine({ device, utilisation, memory_used_bytes: used, memory_bytes: all }) {
  const memory = [used, all].filter((size) => size != null).map(bytes);
  const words = joinWords(device.slice(0, 12), utilisation != null && percent(utilisation), memory.join(" of "));
  return el("div", { title: device }, words);
}

function legend() {
  const items = PHASES.map((phase) => el("span", el(`i.${phase}`), MEANING[phase]));
  return el("p.legend", items, el("span.mute", "│ push · Ctrl + wheel zooms, Shift + wheel moves"));
}

/** The desired processes of each host: one button sends the numbers that were changed, the other drains them all. */
function scaleForm(hosts, source) {
  const roles = Object.keys(hosts[0].desired);
  const row = ({ name, pool, running, desired }) => {
    const field = (role) =>
      el("input", { type: "number", min: 0, value: desired[role], "aria-label": `${role}s of ${name}` });
    const fields = roles.map(field);
    const scale = () => {
      const numbers = roles.map((role, place) => [role, Number(fields[place].value)]);
      const counts = Object.fromEntries(numbers.filter(([role, number]) => number !== desired[role]));
      return source.post("scale", { counts, host: name, pool }).then(() => Object.assign(desired, counts));
    };
    const drain = () => {
      for (const field of fields) field.value = 0;
      return scale();
    };
    const cell = (role, place) => el("td", fields[place], el("small", ` ${count(running[role])} running`));
    const buttons = el("span", commandButton("scale", scale), commandButton("drain", drain));
    return [name, pool || "—", ...roles.map(cell), buttons];
  };
  const head = ["host", "pool", ...roles.map((role) => `${role}s`), "desired numbers"];
  return el("div.scroll.scale", table(head, hosts.map(row), { caption: "Desired processes" }));
}

/** Engines by the samples that they made, the ones that are behind first: it is there after the end, too. */
function enginesPanel(engines) {
  const least = Math.min(...engines.map((engine) => engine.behind));
  const columns = {
    engine: ({ engine }) => el("a", { href: samplesLink(`engine=${engine}`) }, engine),
    "versions behind": ({ behind }) => el(behind >= least + 1 ? "td.number.warned" : "td.number", num(behind)),
    "most behind": (engine) => count(engine.most_behind),
    "newest version": ({ version }) => `v${version}`,
    samples: ({ samples }) => count(samples),
    tokens: ({ tokens }) => count(tokens),
  };
  const note = "how far its samples were behind the newest version when they were stored; mean and most";
  return tablePanel("Engines by their samples", note, columns, engines);
}

class FleetView {
  root = el("div.page");
  body = el("div.scroll");
  facts = el("dl.facts");

  constructor({ source, run, go }, fleet) {
    Object.assign(this, { run, go, lanes: fleet.lanes });
    const tools = Object.keys(SPANS).map((name) => button(name, () => this.show(SPANS[name])));
    const picture = panel("Processes", { note: "newest at the right", size: "wide12", tools });
    this.chart = new Lanes(picture, { label: "phases of the processes", pick: (...place) => this.open(...place) });
    picture.append(legend());
    const note = fleet.lanes.length > MOST_ROWS && `the first ${MOST_ROWS} of ${fleet.lanes.length}`;
    const operator = run().rights === "operator" && fleet.hosts?.length;
    const now = panel("Now", { note, size: "wide12" }, this.body, operator ? scaleForm(fleet.hosts, source) : null);
    this.root.append(this.facts, picture, now);
    if (fleet.engines?.length) this.root.append(enginesPanel(fleet.engines));
    this.update({ queue: fleet.queue });
    this.write();
    this.chart.set(fleet);
  }

  show(seconds) {
    this.chart.shift = 0;
    this.chart.zoom(seconds / this.chart.span);
  }

  open({ role, lane }, segment, push) {
    if (push?.step != null) this.go(link("batch", push.step));
    else if (["actor", "engine"].includes(role)) this.go(samplesLink(`${role}=${lane.id}`));
  }

  write() {
    this.written = performance.now();
    const newest = Math.max(...this.lanes.map((lane) => lane.version ?? -1));
    const lanes = this.lanes.slice(0, MOST_ROWS).map((lane) => ({ ...lane, newest }));
    if (lanes.length) this.body.replaceChildren(tableOf(COLUMNS, lanes, { caption: "Processes now" }));
    else if (this.run().mode === "live")
      this.body.replaceChildren(empty("Processes stand here from their first heartbeat on.", "tidemill up"));
    else this.body.replaceChildren(empty("The run has ended: no process sends heartbeats."));
  }

  update({ run, segments, pushes, processes, queue }) {
    this.lanes = processes ?? this.lanes;
    this.chart.add({ now_s: run?.now_s, segments, pushes, lanes: processes });
    if (queue) this.facts.replaceChildren(...queue.facts.map(fact));
    if (processes && performance.now() - this.written > TABLE_EVERY_MS) this.write();
  }
}

export async function fleetPage(context) {
  const [fleet] = await Promise.all([context.source.get("fleet"), context.known]);
  return new FleetView(context, fleet);
}
