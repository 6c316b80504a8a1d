// Numbers, times, escapes and links as text. Pure: knows neither the document nor the run.

const MOST_POINTS = 1_600; // of a curve, before it is reduced again
const BUCKETS = 400;
const NUMBER = new Intl.NumberFormat("en-US");

/** How a number is shown; one that is undefined is `—`. */
const shown = (show) => (value) => (value == null || !Number.isFinite(value) ? "—" : show(value, Math.abs(value)));

/** A number with three significant digits: `12.4 k`, `0.812`, `7.5e-8`. */
export const num = shown((value, size) => {
  if (size === 0) return "0";
  if (size < 0.001) return value.toExponential(1).replace(".0e", "e");
  if (size >= 999_500_000) return `${(value / 1e9).toPrecision(3)} G`;
  if (size >= 999_500) return `${(value / 1e6).toPrecision(3)} M`;
  if (size >= 9_995) return `${(value / 1e3).toPrecision(3)} k`;
  if (size >= 999.5) return NUMBER.format(Math.round(value));
  return String(Number(value.toPrecision(3)));
});

/** A count: in full with commas below a million. */
export const count = shown((value, size) => (size < 1e6 ? NUMBER.format(Math.round(value)) : num(value)));

export const percent = shown((value) => (value > 0 && value < 0.001 ? "< 0.1 %" : `${num(value * 100)} %`));

/** A duration: `0.4 ms`, `35 ms`, `2.1 s`, `41 min`, `3.2 h`. */
export const duration = shown((seconds, size) => {
  if (size === 0) return "0 s";
  if (size < 0.9995) return `${Number((seconds * 1e3).toPrecision(2))} ms`;
  if (size < 99.5) return `${Number(seconds.toPrecision(2))} s`;
  if (size < 5_970) return `${Math.round(seconds / 60)} min`;
  return size < 172_800 ? `${Number((seconds / 3600).toPrecision(2))} h` : `${Math.round(seconds / 86_400)} days`;
});

const BYTES = ["bytes", "KiB", "MiB", "GiB", "TiB"];

export const bytes = shown((value) => {
  const power = Math.min(4, Math.floor(Math.log2(Math.max(1, value)) / 10));
  return power ? `${Number((value / 1024 ** power).toPrecision(3))} ${BYTES[power]}` : `${count(value)} bytes`;
});

/** A check that is neither true nor false is unknown. */
const check = (value) => (value == null ? "—" : value ? "✓ balance" : "✕ no balance");
const UNITS = { s: duration, bytes, share: percent, count, check };

/** A value in the unit that the server names. */
export function inUnit(value, unit) {
  return (UNITS[unit] ?? num)(value);
}

/** The clock of the reader: `14:02:33`, with the date where it is another day. */
export function clock(seconds, now = Date.now() / 1e3) {
  if (seconds == null) return "—";
  const date = new Date(seconds * 1e3);
  const text = date.toLocaleString("sv"); // 2026-12-01 14:02:33
  return date.toDateString() === new Date(now * 1e3).toDateString() ? text.slice(11) : text;
}

// Control characters but line feed and tab, characters that turn the direction of text, that are invisible or split
// lines, and halves of surrogate pairs. Joiners (U+200C, U+200D) stay: scripts and emoji need them.
const HIDDEN = new RegExp(
  "[\\u0000-\\u0008\\u000b-\\u001f\\u007f-\\u009f\\u00ad\\u061c\\u115f\\u180e\\u200b\\u200e\\u200f\\u2028-\\u202e" +
    "\\u2060-\\u206f\\ufeff\\ufff9-\\ufffb\\u{e0000}-\\u{e007f}\\ud800-\\udfff]",
  "gu",
);

/** Words with a dot between them; those that are false are left out. */
export function joinWords(...words) {
  return words.filter(Boolean).join(" · ");
}

/** Text in which control and bidirectional characters stand as `\x1b`, `\u202e`. */
export function visible(text) {
  return String(text).replace(HIDDEN, (char) => {
    const code = char.codePointAt(0);
    if (code < 0x100) return `\\x${code.toString(16).padStart(2, "0")}`;
    return code < 0x10000 ? `\\u${code.toString(16).padStart(4, "0")}` : `\\u{${code.toString(16)}}`;
  });
}

/** Text in one line: `⏎` for a line feed, `→` for a tab, `∅ empty` for none. */
export function oneLine(text) {
  return text === "" ? "∅ empty" : visible(text).replaceAll("\n", "⏎").replaceAll("\t", "→");
}

/** Versions of a sample's tokens: `v4`, `v4–5`. */
export function versions(range) {
  if (!range || range[0] == null || range[0] < 0) return "—";
  return range[0] === range[1] ? `v${range[0]}` : `v${range[0]}–${range[1]}`;
}

/** The hash of a page: `link("sample", 12, {t: "3-8"})` is `#sample=12&t=3-8`. */
export function link(page, value = "", query = {}) {
  const items = Object.entries(query).filter(([, item]) => item != null && item !== "");
  const text = items.map(([key, item]) => `&${key}=${encodeURIComponent(item)}`).join("");
  return `#${page}${value === "" ? "" : `=${encodeURIComponent(value)}`}${text}`;
}

/** The link to the samples that a filter chooses. */
export function samplesLink(filter) {
  return link("samples", "", { filter });
}

/** The page, its value and its query that a hash names. */
export function parseLink(hash) {
  const items = [...new URLSearchParams(hash.replace(/^#/, ""))];
  const [page, value] = items.shift() ?? ["", ""];
  return { page: page || "overview", value, query: Object.fromEntries(items) };
}

/** First and last token that `t=120-180` or `t=120` names, or null. */
export function tokenRange(text) {
  const match = /^(\d+)(?:-(\d+))?$/.exec(text ?? "");
  if (!match) return null;
  const ends = [Number(match[1]), Number(match[2] ?? match[1])];
  return [Math.min(...ends), Math.max(...ends)];
}

/** Round numbers between two ends, about `wanted` of them. */
export function ticks(low, high, wanted) {
  if (!(high > low)) return [low];
  const raw = (high - low) / Math.max(1, wanted);
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((size) => size >= raw * (1 - 1e-9));
  const places = [];
  for (let index = Math.ceil(low / step - 1e-9); index * step <= high + step * 1e-9; index++) {
    places.push(Number((index * step).toPrecision(12)));
  }
  return places;
}

/** The place of the first item of an ordered list whose key is not below `value`. */
export function firstFrom(list, value, key) {
  let [low, high] = [0, list.length];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (key(list[middle]) < value) low = middle + 1;
    else high = middle;
  }
  return low;
}

/** Put an item into a list that is in the order of a key; it replaces the one with the same key. */
export function insert(list, item, key) {
  const place = firstFrom(list, key(item), key);
  const again = place < list.length && key(list[place]) === key(item);
  list.splice(place, again ? 1 : 0, item);
}

/** Put a point of a step into a curve; one that has grown is reduced. */
export function addPoint(points, step, value) {
  insert(points, [step, value], (point) => point[0]);
  return points.length > MOST_POINTS ? reduce(points, BUCKETS) : points;
}

/** Points in `buckets` parts of equally many, of each the least and the greatest value and a hole: spikes stay. */
export function reduce(points, buckets) {
  const size = Math.ceil(points.length / buckets);
  const kept = new Set();
  for (let start = 0; start < points.length; start += size) {
    const part = points.slice(start, start + size);
    const known = part.filter(([, value]) => value != null).sort((a, b) => a[1] - b[1]);
    for (const point of [known[0], known.at(-1), part.find(([, value]) => value == null)]) if (point) kept.add(point);
  }
  return [...kept].sort((a, b) => a[0] - b[0]);
}

/** Ends of a value axis: from the 2nd to the 98th percentile where values beyond them would flatten the rest. */
export function axisRange(values, include = []) {
  const sorted = values.filter(Number.isFinite).sort((a, b) => a - b);
  if (!sorted.length) return [0, 1];
  let [low, high] = [sorted[0], sorted.at(-1)];
  if (sorted.length >= 20) {
    const inner = [sorted[Math.floor(sorted.length * 0.02)], sorted[Math.ceil(sorted.length * 0.98) - 1]];
    const span = inner[1] - inner[0];
    if (span > 0 && high > inner[1] + 2 * span) high = inner[1] + 0.15 * span;
    if (span > 0 && low < inner[0] - 2 * span) low = inner[0] - 0.15 * span;
  }
  for (const value of include) [low, high] = [Math.min(low, value), Math.max(high, value)];
  if (low === 0 && high === 0) return [0, 1];
  if (low === high) return [low - (Math.abs(low) || 1) * 0.5, high + (Math.abs(high) || 1) * 0.5];
  return [low, high];
}

/** How a metric stands against its healthy range: the last ten steps decide, earlier ones are mentioned. */
export function judge(points, low, high) {
  if (low == null && high == null) return { mark: "", text: "" };
  const outside = ([, value]) => value != null && ((low != null && value < low) || (high != null && value > high));
  const recent = points.slice(-10).filter(outside).length;
  if (!recent) return { mark: "✓", tone: "ok", text: points.some(outside) ? "earlier outside" : "" };
  // Since the first step outside behind ten steps that were inside.
  let since = points.length;
  for (let place = since - 1; place >= 0 && since - place <= 10; place--) if (outside(points[place])) since = place;
  const text = `since step ${count(points[since][0])}: ${recent} of the last ${Math.min(10, points.length)} outside`;
  return { mark: "△", tone: "warn", text };
}

const SHADE_EDGES = {
  probability: [0.9, 0.5, 0.1, 0.01],
  entropy: [0.1, 0.5, 1, 2],
  advantage: [0.01, 0.3, 1, 2],
  difference: [0.01, 0.05, 0.2, 1],
  weight: [0.01, 0.05, 0.2, 0.7],
};

/** Place of a token's value on an overlay of five shades, from 0 (plain) to 4; negative for the other direction. */
export function shade(overlay, value) {
  if (value == null) return 0;
  const edges = SHADE_EDGES[overlay];
  if (overlay === "probability") return edges.filter((edge) => Math.exp(value) < edge).length;
  if (overlay === "entropy") return edges.filter((edge) => value > edge).length;
  const signed = overlay === "weight" ? Math.log(Math.max(value, 1e-9)) : value;
  const size = edges.filter((edge) => Math.abs(signed) >= edge).length;
  return signed < 0 ? -size : size;
}
