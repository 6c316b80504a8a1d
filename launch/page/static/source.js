// Where the numbers come from: the server, or the data of an exported file. Both have the same methods.

/** A refusal; `status` is 0 where the server did not answer. */
const refused = (status, sentence) => Object.assign(new Error(sentence), { status });

function path(name, query = {}) {
  const items = Object.entries(query).filter(([, value]) => value != null && value !== "");
  const text = items.map(([key, value]) => `${key}=${encodeURIComponent(value)}`).join("&");
  return `/api/${name}${text ? `?${text}` : ""}`;
}

async function ask(address, options) {
  const answer = await fetch(address, options).catch(() => null);
  if (!answer) throw refused(0, "the dashboard's server does not answer");
  const body = await answer.json().catch(() => ({}));
  if (!answer.ok) throw refused(answer.status, body.error ?? `answer ${answer.status} of the dashboard's server`);
  return body;
}

/** Answers of the server and its events. */
export class LiveSource {
  live = true;

  get(name, query) {
    return ask(path(name, query), { cache: "no-store" });
  }

  post(name, body) {
    const headers = { "Content-Type": "application/json" };
    return ask(`/do/${name}`, { method: "POST", headers, body: JSON.stringify(body) });
  }

  /** Call `apply(event)` for each event, `opened()` when the stream (re)opens, `lost()` when it breaks. */
  subscribe({ apply, opened, lost }) {
    const stream = new EventSource("/events");
    stream.onopen = opened;
    stream.onerror = lost;
    stream.onmessage = (message) => apply(JSON.parse(message.data));
  }
}

/** The data inside an exported file. Filters and pages of the samples are done here, over those that the file has. */
export class EmbeddedSource {
  live = false;

  constructor(data) {
    this.exported = data.exported;
    this.answers = data.answers;
  }

  async get(name, query = {}) {
    const answer = this.answers[path(name, query)] ?? this.searched[name]?.call(this, query);
    if (answer) return answer;
    throw refused(404, "not in this file: open the run with tidemill dashboard to see it");
  }

  histogram = () => this.answers["/api/histogram"];
  searched = { series: this.series, samples: this.samples, histogram: this.histogram, group: this.group };

  series({ names, first, run }) {
    const all = run ? null : this.answers["/api/series"];
    if (!all) return null;
    const shown = first && this.answers["/api/metrics"].shown.flatMap(([, chosen]) => chosen);
    const wanted = shown || names?.split(",") || Object.keys(all.series);
    return { ...all, series: Object.fromEntries(wanted.map((name) => [name, all.series[name]])) };
  }

  samples({ filter = "", before, n = 100 }) {
    const all = this.answers["/api/samples"];
    if (!all) return null;
    const fits = matcher(filter);
    const rows = all.rows.filter((row) => fits(row) && (!before || row.seq < Number(before)));
    const page = rows.slice(0, n);
    return { ...all, rows: page, next: rows.length > n ? page.at(-1).seq : null, searched: all.rows.length };
  }

  group({ task }) {
    const rows = (this.answers["/api/samples"]?.rows ?? []).filter((row) => row.task === Number(task));
    return rows.length ? { task: Number(task), prompt: rows[0].prompt, label: rows[0].label, members: rows } : null;
  }

  subscribe() {} // an exported run has no events
}

const RANGE = /^(<=|>=|<|>|=)?\s*(-?[\d.]+(?:e-?\d+)?)$/i;

function within(text, value) {
  const between = /^(-?[\d.]+)?\.\.(-?[\d.]+)?$/.exec(text);
  if (value == null) return false;
  if (between) return value >= Number(between[1] ?? -Infinity) && value <= Number(between[2] ?? Infinity);
  const [, sign = "=", number] = RANGE.exec(text) ?? [];
  if (number === undefined)
    throw refused(400, `filter: want a number, <, <=, >, >= and a number, or LOW..HIGH, got ${text}`);
  const other = Number(number);
  if (sign.startsWith("<")) return value < other || (sign === "<=" && value === other);
  if (sign.startsWith(">")) return value > other || (sign === ">=" && value === other);
  return value === other;
}

/** The words of a filter: `reward=<0.5 text="two words"` -> `[["reward", "<0.5"], ["text", "two words"]]`. */
export function filterWords(text) {
  return [...text.matchAll(/([a-z]+)[=:](?:"([^"]*)"|(\S*))/g)].map((match) => [match[1], match[2] ?? match[3]]);
}

/** A test of rows by the filter's words, as the server does it. */
export function matcher(text) {
  const words = filterWords(text);
  const states = words.filter(([name]) => name === "status").map(([, value]) => value);
  const test = (row, name, value) => {
    if (["reward", "lag", "tokens", "step", "seq"].includes(name)) return within(value, row[name]);
    if (name === "status") return states.includes(row.status);
    if (name === "task") return value === String(row.task) || value === `${row.task}.${row.index}`;
    if (name === "version")
      return row.versions != null && row.versions[0] <= Number(value) && Number(value) <= row.versions[1];
    if (name === "text") return `${row.prompt}\n${row.response}`.toLowerCase().includes(value.toLowerCase());
    if (name === "fate") return (row.fate ?? "unknown").includes(value);
    if (["kind", "actor", "engine"].includes(name)) return row[name] === value;
    throw refused(400, `filter: an exported file knows no word ${name}`);
  };
  return (row) => words.every(([name, value]) => test(row, name, value));
}

/** The source of this page: embedded data where the file has them. */
export function openSource() {
  const data = document.getElementById("exported");
  return data ? new EmbeddedSource(JSON.parse(data.textContent)) : new LiveSource();
}
