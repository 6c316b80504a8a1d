// Elements. Text enters by text nodes alone, and every string is escaped on the way (`visible`).

import { inUnit, link, samplesLink, visible } from "./format.js";

/** `el("td.warn", {title: "…", onclick: f}, "text", child, …)`; null and false children are left out. */
export function el(name, attributes, ...children) {
  const [tag, ...classes] = name.split(".");
  const element = document.createElement(tag);
  if (classes.length) element.className = classes.join(" ");
  if (attributes?.constructor !== Object) children.unshift(attributes);
  else for (const [key, value] of Object.entries(attributes)) setAttribute(element, key, value);
  for (const child of children.flat(Infinity)) {
    if (child != null && child !== false) element.append(child instanceof Node ? child : visible(child));
  }
  return element;
}

function setAttribute(element, key, value) {
  if (value == null || value === false) return;
  if (key.startsWith("on")) element.addEventListener(key.slice(2), value);
  else if (key === "href" && !value.startsWith("#")) throw new Error(`links lead to pages of this run alone: ${value}`);
  else element.setAttribute(key, value === true ? "" : visible(value));
}

/** A panel with a heading; `note` stands beside it, `tools` at its end. */
export function panel(title, { note, tools = [], size, label = title } = {}, ...children) {
  const header = el("header", el("h2", title), note && el("span.mute", note), el("span.gap"), tools);
  return el(size ? `section.${size}` : "section", { "aria-label": label }, header, children);
}

/** A number of the row of facts on top of a page, as the server has it. */
export function fact({ name, value, unit, note, status, metric }) {
  const words = value != null && ["steps", "tokens/s", "cores"].includes(unit) && el("small", ` ${unit}`);
  const mark = MARK[status] && unit !== "check" && el(`b.${status}`, { title: status }, ` ${MARK[status]}`);
  const title = metric ? el("a", { href: link("learning", "", { q: metric }) }, name) : name;
  const number = el("dd", inUnit(value, unit), words, mark);
  return el(`div.fact.${status}`, el("dt", title), number, el("small", note || " "));
}

/** A request that was refused, in the server's words. */
export function failure(problem) {
  return el("p.badly", { role: "alert" }, problem.message);
}

/** Replace what a place shows, unless the reader is in it with the keyboard. */
export function renew(host, ...children) {
  if (!host.contains(document.activeElement)) host.replaceChildren(...children);
}

/** A text of the run as it is. */
export function textBlock(text) {
  return el("pre", { dir: "auto" }, text === "" ? "∅ empty" : (text ?? "—"));
}

/** The samples of a task. */
export function taskLink(task, text = `task ${task}`) {
  return el("a", { href: samplesLink(`task=${task}`) }, text);
}

/** The page of a sample. */
export function sampleLink(seq) {
  return el("a", { href: link("sample", seq) }, `#${seq}`);
}

/** What stands where nothing is yet: what would fill it, and the command. */
export function empty(text, command) {
  return el("p.empty", text, command ? el("code", command) : null);
}

const MARK = { ok: "✓", warn: "△", bad: "✕" };
const SEARCH_MS = 200; // from the last key to the search
const QUANTITY = /^(?:[-−]?[\d.,]+(?:e-?\d+)?(?: (?:[kMG%]|ms|s|min|h|[KMGT]iB|bytes))?|—)$/;

/** A table; a row may be `{cells, onclick, class}`. A column whose first cell is a quantity is set to the right. */
export function table(head, rows, { caption, hidden } = {}) {
  const first = rows[0]?.cells ?? rows[0] ?? [];
  const isNumber = (cell) => (typeof cell === "string" ? QUANTITY.test(cell) : cell?.matches?.(".number"));
  const right = first.map(isNumber);
  const tag = (name, place) => (right[place] ? `${name}.number` : name);
  const line = (row) => {
    const { cells, ...attributes } = Array.isArray(row) ? { cells: row } : row;
    const { onclick } = attributes;
    const onkeydown = ({ key, target, currentTarget }) => key === "Enter" && target === currentTarget && onclick();
    if (onclick) Object.assign(attributes, { tabindex: 0, onkeydown });
    const cell = (item, place) => (item instanceof HTMLTableCellElement ? item : el(tag("td", place), item ?? "—"));
    return el("tr", attributes, cells.map(cell));
  };
  const names = head.map((name, place) => el(tag("th", place), { scope: "col" }, name));
  const parts = [caption && el("caption.hidden", caption), el("thead", el("tr", names)), el("tbody", rows.map(line))];
  return el(hidden ? "table.hidden" : "table", parts);
}

/** A table by its columns, `{name: (item) => cell}`, with a line for each item; `row` gives attributes of a line. */
export function tableOf(columns, items, { row, ...options } = {}) {
  const line = (item, place) => ({ cells: Object.values(columns).map((cell) => cell(item)), ...row?.(item, place) });
  return table(Object.keys(columns), items.map(line), options);
}

/** A panel over the whole width with a table, which scrolls. */
export function tablePanel(title, note, columns, items) {
  return panel(title, { note, size: "wide12" }, el("div.scroll", tableOf(columns, items, { caption: title })));
}

export function button(text, onclick, attributes = {}, ...children) {
  return el("button", { type: "button", onclick, ...attributes }, text, ...children);
}

/** A button that asks the server for something once, and then says how it went. */
export function commandButton(text, ask) {
  return button(text, async ({ target }) => {
    target.disabled = true;
    const done = () => `${text}: done`;
    target.textContent = await ask().then(done, (problem) => problem.message);
    target.disabled = false;
  });
}

/** A field that calls `changed` a moment after the last key. */
export function searchField(label, placeholder, value, changed) {
  let timer;
  const later = () => (clearTimeout(timer), (timer = setTimeout(changed, SEARCH_MS)));
  return el("input", { type: "search", "aria-label": label, placeholder, value, oninput: later });
}

/** A row of buttons of which one is pressed. */
export function choice(names, chosen, pick, label) {
  const group = el("span.choice", { role: "group", "aria-label": label });
  const draw = (current) => {
    const item = (name) => button(name, () => (draw(name), pick(name)), { "aria-pressed": String(name === current) });
    group.replaceChildren(...names.map(item));
  };
  draw(chosen);
  return group;
}
