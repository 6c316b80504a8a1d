// One step from its samples to rows, micro-batches and ranks.

import { count, inUnit, link, num } from "./format.js";
import { button, el, empty, fact, failure, panel, tableOf, tablePanel, taskLink } from "./dom.js";
import { BatchRows } from "./charts.js";

const ROWS_NOTE =
  "grey: prompt, blue: response (lighter: older version), hatched: padding; click a piece for its sample";

function stepBar(step, go, walk) {
  const field = el("input", { type: "number", min: 1, value: step, "aria-label": "step" });
  field.addEventListener("change", () => go(link("batch", field.value)));
  const before = button("‹", () => walk(-1), { "aria-label": "step before" });
  const after = button("›", () => walk(1), { "aria-label": "step after" });
  return el("p.bar", el("h2", "Batch of step"), before, field, after);
}

/** What made the step slow: its times and sizes beside those of the median step. */
function pacePanel({ pace, pace_words: words, slow }) {
  const columns = {
    "": ({ name }) => name,
    "this step": ({ value, unit }) => inUnit(value, unit),
    "median step": ({ usual, unit }) => inUnit(usual, unit),
  };
  const lines = tableOf(columns, pace, { caption: "Time of the step" });
  return panel("Time", { size: "wide12" }, el(slow ? "p.lead.warned" : "p.mute", words), lines);
}

function groupsPanel(groups) {
  const columns = {
    task: ({ task }) => taskLink(task),
    samples: ({ samples }) => count(samples),
    "mean reward": (group) => num(group.reward_mean),
    signal: ({ zero }) => (zero ? "△ none: all rewards are equal" : "✓"),
  };
  return tablePanel("Groups", "", columns, groups);
}

export async function batchPage({ source, known, run, go, value }) {
  await known;
  const step = value === "" ? run().step : Number(value);
  const walk = (by) => go(link("batch", Math.max(1, step + by)));
  const root = el("div.page", stepBar(step, go, walk));
  const key = (event) => {
    const by = { j: 1, k: -1 }[event.key];
    if (by) walk(by);
  };
  const page = { root, key };
  if (!step) root.append(empty("The first batch stands here when a step has been trained."));
  const batch = step && (await source.get("batch", { step }).catch((problem) => root.append(failure(problem))));
  if (!batch) return page;
  const rows = panel("Rows", { note: ROWS_NOTE, size: "wide12" }, batch.words && el("p.mute", batch.words));
  const pick = (piece) => go(link("sample", piece.seq));
  new BatchRows(rows, { label: `rows of step ${step}`, ranks: batch.ranks, pick });
  root.append(el("dl.facts", batch.facts.map(fact)));
  if (batch.pace?.length) root.append(pacePanel(batch));
  root.append(rows);
  if (batch.groups?.length) root.append(groupsPanel(batch.groups));
  return page;
}
