// Who does what, when: a lane per process, queues, hosts and devices.

import { bytes, count, link, num } from "./format.js";
import { button, el, empty, panel, table } from "./dom.js";
import { Lanes, PHASES } from "./lanes.js";

const TABLE_EVERY_MS = 5_000;
const MOST_ROWS = 300;
const MEANING = {
  working: "works (shade: version)",
  waiting: "waits",
  updating: "takes weights",
  draining: "drains",
  down: "is gone",
};

function legend() {
  const items = PHASES.map((phase) => el("span", {}, el(`i.${phase}`), MEANING[phase]));
  return el("p.legend", {}, items, el("span.mute", {}, "│ push · Ctrl + wheel zooms, Shift + wheel moves"));
}

function processRows(lanes) {
  const load = (lane) =>
    Object.entries(lane.load ?? {})
      .map(([name, value]) => `${name} ${num(value)}`)
      .join(", ");
  return lanes
    .slice(0, MOST_ROWS)
    .map((lane) => [
      lane.lane,
      lane.host,
      lane.phase + (lane.waits_for ? ` (${lane.waits_for})` : ""),
      lane.version == null ? "—" : `v${lane.version}`,
      lane.tokens_per_second == null ? "—" : num(lane.tokens_per_second),
      el("td.text", { title: load(lane) }, load(lane)),
      bytes(lane.memory_bytes),
      (lane.devices ?? []).join(" ") || "CPU",
      count(lane.restarts ?? 0),
      lane.trouble || lane.note || "—",
    ]);
}

function scaleForm(hosts, source) {
  const line = (host, role, wanted) => {
    const field = el("input", { type: "number", min: 0, value: wanted, "aria-label": `${role} on ${host.name}` });
    const send = (event) =>
      source.post("scale", { counts: { [role]: Number(field.value) }, host: host.name, pool: host.pool }).then(
        () => (event.target.textContent = "set"),
        (error) => (event.target.textContent = error.message),
      );
    return el("label", {}, `${host.name}: ${role} `, field, button("scale", send));
  };
  return el(
    "p.bar",
    {},
    hosts.flatMap((host) => Object.entries(host.desired ?? {}).map(([role, wanted]) => line(host, role, wanted))),
  );
}

function queueFacts(queue = {}) {
  const fact = (name, value, note) =>
    el("div.fact", {}, el("dt", {}, name), el("dd", {}, value), el("small", {}, note));
  return [
    fact("tasks waiting", count(queue.waiting), "in the queue"),
    fact("tasks leased", count(queue.leased), "with actors"),
    fact("samples stored", count(queue.stream_messages), "in the stream"),
    fact("stream", bytes(queue.stream_bytes), queue.full || "has room"),
  ];
}

export async function fleetPage({ source, run, go }) {
  const root = el("div.page");
  const fleet = await source.get("fleet");
  const operator = run().rights === "operator";
  let lanes = fleet.lanes;
  let written = performance.now();
  const spans = { "1 min": 60, "10 min": 600, "1 h": 3_600 };
  const facts = el("dl.facts", {}, queueFacts(fleet.queue));
  const buttons = Object.keys(spans).map((name) =>
    button(name, () => ((chart.shift = 0), chart.zoom(spans[name] / chart.span))),
  );
  const picture = panel("Processes", { note: "newest at the right", size: "wide12", tools: buttons });
  const chart = new Lanes(picture, {
    label: "phases of the processes",
    pick: (row, segment, push) => {
      if (push?.step != null) go(link("batch", push.step));
      else if (row.role === "actor") go(link("samples", "", { filter: `actor=${row.lane.id}` }));
      else if (row.role === "engine") go(link("samples", "", { filter: `engine=${row.lane.id}` }));
    },
  });
  picture.append(legend());
  const list = panel("Now", {
    note: lanes.length > MOST_ROWS ? `the first ${MOST_ROWS} of ${lanes.length}` : "",
    size: "wide12",
  });
  const body = el("div.scroll");
  list.append(body);
  if (operator && fleet.hosts?.length) list.append(scaleForm(fleet.hosts, source));
  root.append(facts, picture, list);

  function write() {
    written = performance.now();
    const head = [
      "process",
      "host",
      "phase",
      "version",
      "tokens/s",
      "load",
      "memory",
      "devices",
      "restarts",
      "trouble",
    ];
    body.replaceChildren(
      lanes.length
        ? table(head, processRows(lanes), { caption: "Processes now" })
        : run().mode === "live"
          ? empty("Processes stand here from their first heartbeat on.", "tidemill up")
          : empty("The run has ended: no process sends heartbeats."),
    );
  }
  write();
  chart.set(fleet);

  function update(event) {
    lanes = event.processes ?? lanes;
    chart.add({ now_s: event.run?.now_s, segments: event.segments, pushes: event.pushes, lanes: event.processes });
    if (event.queue) facts.replaceChildren(...queueFacts(event.queue));
    if (event.processes && performance.now() - written > TABLE_EVERY_MS) write();
  }
  return { root, update };
}
