// One step from its samples to rows, micro-batches and ranks.

import { count, duration, link, num, percent } from "./format.js";
import { button, el, empty, panel, table } from "./dom.js";
import { BatchRows } from "./charts.js";

export async function batchPage({ source, run, go, value }) {
  const root = el("div.page");
  const newest = run().step;
  const step = value === "" ? newest : Number(value);
  const field = el("input", { type: "number", min: 1, value: step, "aria-label": "step" });
  field.addEventListener("change", () => go(link("batch", field.value)));
  const walk = (by) => go(link("batch", Math.max(1, step + by)));
  const bar = el(
    "p.bar",
    {},
    el("h2", {}, "Batch of step"),
    button("‹", () => walk(-1), { "aria-label": "step before" }),
    field,
    button("›", () => walk(1), { "aria-label": "step after" }),
  );
  root.append(bar);
  const key = (event) => {
    if (event.key === "j") walk(1);
    else if (event.key === "k") walk(-1);
  };
  if (!step) {
    root.append(empty("The first batch stands here when a step has been trained."));
    return { root, key };
  }
  let batch;
  try {
    batch = await source.get("batch", { step });
  } catch (problem) {
    root.append(el("p.badly", { role: "alert" }, problem.message));
    return { root, key };
  }
  const fact = (name, text, note = " ") =>
    el("div.fact", {}, el("dt", {}, name), el("dd", {}, text), el("small", {}, note));
  root.append(
    el(
      "dl.facts",
      {},
      fact("filled", percent(batch.fill), "of the rows' tokens"),
      fact("padding", percent(batch.padding)),
      fact("samples", count(batch.samples), `${count(batch.groups?.length)} groups`),
      fact("shared prompts", count(batch.shared_tokens), "tokens computed once"),
      fact("time", duration(batch.seconds), batch.slowest_rank == null ? " " : `slowest: rank ${batch.slowest_rank}`),
    ),
  );
  const rows = panel("Rows", {
    note: "grey: prompt, blue: response (lighter: older version), hatched: padding; click a piece for its sample",
    size: "wide12",
  });
  if (batch.words) rows.append(el("p.mute", {}, batch.words));
  new BatchRows(rows, {
    label: `rows of step ${step}`,
    ranks: batch.ranks,
    pick: (piece) => go(link("sample", piece.seq)),
  });
  root.append(rows);
  if (batch.groups?.length) {
    const groups = panel("Groups", { size: "wide12" });
    const lines = batch.groups.map((group) => [
      el("a", { href: link("samples", "", { filter: `task=${group.task}` }) }, `task ${group.task}`),
      count(group.samples),
      num(group.reward_mean),
      group.zero ? "△ none: all rewards are equal" : "✓",
    ]);
    groups.append(
      el(
        "div.scroll",
        {},
        table(["task", "samples", "mean reward", "signal"], lines, { caption: "Groups of the step" }),
      ),
    );
    root.append(groups);
  }
  return { root, key };
}
