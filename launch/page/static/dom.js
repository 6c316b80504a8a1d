// Elements. Text enters by text nodes alone, and every string is escaped on the way (`visible`).

import { visible } from "./format.js";

/** `el("td.warn", {title: "…", onclick: f}, "text", child, …)`; null children are left out. */
export function el(name, attributes = {}, ...children) {
  const [tag, ...classes] = name.split(".");
  const element = document.createElement(tag);
  if (classes.length) element.className = classes.join(" ");
  if (attributes instanceof Node || typeof attributes !== "object" || attributes === null) {
    children.unshift(attributes);
  } else {
    for (const [key, value] of Object.entries(attributes)) setAttribute(element, key, value);
  }
  for (const child of children.flat()) {
    if (child != null) element.append(child instanceof Node ? child : visible(child));
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
export function panel(title, { note, tools = [], size = "", label } = {}) {
  const header = el("header", {}, el("h2", {}, title), note ? el("span.mute", {}, note) : null, el("span.gap"), tools);
  const section = el(`section${size ? `.${size}` : ""}`, { "aria-label": label ?? title }, header);
  return section;
}

/** What stands where nothing is yet: what would fill it, and the command. */
export function empty(text, command) {
  return el("p.empty", {}, text, command ? el("code", {}, command) : null);
}

const QUANTITY = /^(?:[-−]?[\d.,]+(?:e-?\d+)?(?: (?:[kMG%]|ms|s|min|h|[KMGT]iB|bytes))?|—)$/;

/** A table; a row may be `{cells, onclick, class}`. A column whose first cell is a quantity is set to the right. */
export function table(head, rows, { caption, hidden } = {}) {
  const first = rows[0]?.cells ?? rows[0] ?? [];
  const right = first.map((cell) => typeof cell === "string" && QUANTITY.test(cell));
  const line = (row) => {
    const { cells, ...attributes } = Array.isArray(row) ? { cells: row } : row;
    if (attributes.onclick) {
      attributes.tabindex = 0;
      attributes.onkeydown = (event) =>
        event.key === "Enter" && event.target === event.currentTarget && attributes.onclick(event);
    }
    return el(
      "tr",
      attributes,
      cells.map((cell, place) =>
        cell instanceof HTMLTableCellElement ? cell : el(right[place] ? "td.number" : "td", {}, cell ?? "—"),
      ),
    );
  };
  return el(
    hidden ? "table.hidden" : "table",
    {},
    caption ? el("caption.hidden", {}, caption) : null,
    el(
      "thead",
      {},
      el(
        "tr",
        {},
        head.map((name, place) => el(right[place] ? "th.number" : "th", { scope: "col" }, name)),
      ),
    ),
    el("tbody", {}, rows.map(line)),
  );
}

export function button(text, onclick, attributes = {}, ...children) {
  return el("button", { type: "button", onclick, ...attributes }, text, ...children);
}

/** A row of buttons of which one is pressed. */
export function choice(names, chosen, pick, label) {
  const group = el("span.choice", { role: "group", "aria-label": label });
  const draw = (current) =>
    group.replaceChildren(
      ...names.map((name) =>
        button(name, () => (draw(name), pick(name)), { "aria-pressed": String(name === current) }),
      ),
    );
  draw(chosen);
  return group;
}
