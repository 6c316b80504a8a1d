// How the run was set up: its settings, the changed ones first, and the newest lines of its logs.

import { bytes, count, link, visible } from "./format.js";
import { button, choice, el, failure, panel, searchField, tableOf } from "./dom.js";

const LOG_EVERY_MS = 2_000;
const SETTING = {
  setting: ({ path, meaning, changed }) => el(changed ? "b" : "span", { title: meaning }, path),
  value: ({ value }) => el("td.text", { dir: "auto" }, value),
  default: ({ default: usual, changed }) => el("td.text.mute", changed ? (usual ?? "none") : "the same"),
  meaning: ({ meaning }) => el("td.meaning", meaning),
};

/** Settings that have all words in their path, value or meaning; without words those that differ from their default. */
export function findSettings(settings, text) {
  const words = text.toLowerCase().split(/\s+/).filter(Boolean);
  const fits = ({ path, value, meaning }) =>
    words.every((word) => `${path} ${value} ${meaning}`.toLowerCase().includes(word));
  return words.length ? settings.filter(fits) : settings.filter(({ changed }) => changed);
}

class SetupView {
  root = el("div.page");
  found = el("div.scroll.settings");
  names = el("div.bar");
  text = el("pre.log", { dir: "ltr", tabindex: 0, "aria-label": "newest lines of the log" });
  note = el("p.mute");
  places = el("div");
  constructor({ source, replace, query }, { settings }) {
    Object.assign(this, { source, replace, settings, log: query.log ?? "" });
    this.search = searchField("search settings", "search any setting: words", query.q, () => this.changed());
    const all = button(`all ${settings.length} settings`, () => ((this.search.value = "."), this.changed()));
    const note = "changed ones are bold; values under known names of secrets are hidden";
    const logs = panel("Logs", { note: "newest lines" }, this.names, this.text, this.note, this.places);
    this.root.append(panel("Settings", { note }, el("div.bar", this.search, all), this.found), logs);
    this.draw();
  }

  changed() {
    this.replace(link("setup", "", { q: this.search.value, log: this.log }));
    this.draw();
  }

  draw() {
    const lines = findSettings(this.settings, this.search.value);
    this.found.replaceChildren(tableOf(SETTING, lines, { caption: "Settings" }));
  }

  /** The newest line is in sight; the page calls it once it is there, before which nothing has a height. */
  shown() {
    this.text.scrollTop = this.text.scrollHeight;
  }

  /** Show the newest lines, unless another log was asked for meanwhile. */
  async load() {
    const request = (this.request = this.source.get("logs", { name: this.log }));
    const answer = await request.catch((problem) => ({ problem }));
    if (request !== this.request) return null;
    Object.assign(this, { request: null, answered: performance.now() });
    if (answer.problem) return this.places.replaceChildren(failure(answer.problem));
    const { logs, name, lines, before_bytes: before, reason, elsewhere } = answer;
    const pick = (chosen) => ((this.log = chosen), this.changed(), this.load().then(() => this.shown()));
    if (this.listed !== logs.join()) this.names.replaceChildren(choice(logs, name, pick, "log"));
    this.listed = logs.join();
    const { scrollTop, clientHeight, scrollHeight } = this.text;
    const text = visible(lines?.join("\n") ?? "");
    this.text.hidden = !lines;
    if (this.text.textContent !== text) this.text.textContent = text; // else a selection stays
    if (scrollTop + clientHeight >= scrollHeight - 4) this.shown();
    this.note.textContent = lines ? `${bytes(before)} before these ${count(lines.length)} lines` : visible(reason);
    return this.places.replaceChildren(...otherLogs(elsewhere));
  }

  update() {
    return this.request || performance.now() - this.answered < LOG_EVERY_MS ? null : this.load();
  }
}

/** Processes whose logs this page cannot read, and where they are. */
function otherLogs(processes) {
  const columns = {
    process: ({ process }) => process,
    host: ({ host }) => host,
    "its log": ({ path }) => path || "in the output of the process that started it",
  };
  return processes.length ? [el("h3", "Other logs"), el("div.scroll", tableOf(columns, processes))] : [];
}

export async function setupPage(context) {
  const [config] = await Promise.all([context.source.get("config"), context.known]);
  const page = new SetupView(context, config);
  await page.load();
  return page;
}
