// The frame of the page: state of the run, tabs, keyboard, and events for the page that is open.

import { clock, count, duration, link, parseLink } from "./format.js";
import { button, el, failure } from "./dom.js";
import { redrawAll } from "./canvas.js";
import { openSource } from "./source.js";
import { overviewPage } from "./overview.js";
import { flowPage } from "./flow.js";
import { learningPage } from "./learning.js";
import { fleetPage } from "./fleet.js";
import { samplesPage } from "./samples.js";
import { samplePage } from "./sample.js";
import { batchPage } from "./batch.js";
import { setupPage } from "./setup.js";

const OF_RUN = { overview: overviewPage, flow: flowPage, learning: learningPage, fleet: fleetPage };
const PAGES = { ...OF_RUN, samples: samplesPage, batch: batchPage, setup: setupPage, sample: samplePage };
const TABS = Object.keys(PAGES).filter((name) => name !== "sample");
const RETRY_MS = 1_000;
const THEMES = ["auto", "light", "dark"];
const STALE = ["silent", "full", "ended"];

class App {
  run = null;
  answers = null; // those of a reload, of which the earliest is where the events go on
  page = null;
  early = null; // events that came while a page was fetching
  lostSince = null;
  name = el("h1");
  chip = el("span.state");
  progress = el("span.progress");
  age = el("span.mute.age");
  alert = el("p.alert", { role: "alert", hidden: true });
  main = el("main", { tabindex: -1 });

  constructor(source) {
    const get = async (...query) => {
      const answer = await source.get(...query);
      this.answers?.push(answer);
      return answer;
    };
    this.source = Object.assign(Object.create(source), { get });
    this.received = performance.now();
    const focus = (event) => (event.preventDefault(), this.main.focus());
    const tab = (name) => el("a", { href: link(name), "data-page": name }, name[0].toUpperCase() + name.slice(1));
    this.tabs = el("nav", { "aria-label": "pages" }, TABS.map(tab));
    this.theme = button("", () => this.setTheme(THEMES[(THEMES.indexOf(this.chosen) + 1) % THEMES.length]));
    const header = el("header.top", this.name, this.chip, this.progress, this.age, this.tabs, this.theme);
    const skip = el("a.skip", { href: "#overview", onclick: focus }, "to the content");
    document.body.replaceChildren(skip, header, this.alert, this.main);
    this.setTheme(remembered("tidemill-theme") ?? "auto");
    const { exported } = source;
    if (exported) {
      const words = `exported by Tidemill ${exported.version}, ${clock(exported.time_s)}`;
      document.body.append(el("footer.mute", [words, ...(exported.truncated ?? [])].join(" · left out: ")));
    }
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redrawAll);
    addEventListener("hashchange", () => this.open());
    addEventListener("keydown", (event) => this.key(event));
  }

  setTheme(name) {
    this.chosen = name;
    remembered("tidemill-theme", name);
    document.documentElement.dataset.theme = name;
    this.theme.textContent = { auto: "◐", light: "○", dark: "●" }[name];
    this.theme.title = this.theme.ariaLabel = `theme: ${name}`;
    redrawAll();
  }

  start() {
    // The events begin before the answers, so that none is missed between them.
    this.early = [];
    this.source.subscribe({ apply: (item) => this.apply(item), opened: () => this.opened(), lost: () => this.lost() });
    this.reload();
    setInterval(() => this.drawHeader(), 1_000);
  }

  /** Take everything again: at the start, and when an event was missed. */
  async reload() {
    const answers = (this.answers = []);
    this.known = this.source.get("run").then((run) => this.setRun(run));
    try {
      await Promise.all([this.known, this.open()]);
      if (answers !== this.answers) return; // reloaded again meanwhile
      [this.boot, this.at] = [answers[0].boot, Math.min(...answers.map((answer) => answer.at))];
      this.answers = this.lostSince = null;
      this.follow();
    } catch (problem) {
      if (answers !== this.answers) return;
      this.lost(problem.message);
      setTimeout(() => this.reload(), RETRY_MS);
    }
  }

  setRun(run) {
    this.run = { ...this.run, ...run };
    this.received = performance.now();
    this.drawHeader();
  }

  opened() {
    if (this.lostSince !== null || this.wasOpen) this.reload();
    this.wasOpen = true;
  }

  lost(words = "the dashboard's server does not answer") {
    this.lostSince ??= performance.now();
    this.lostWords = words;
    this.drawHeader();
  }

  apply(event) {
    if (this.early) return this.early.push(event);
    if (event.boot !== this.boot || event.from > this.at) return this.reload();
    if (event.at <= this.at) return null;
    this.at = event.at;
    this.lostSince = null;
    this.setRun({ ...event.run, rights: this.run.rights }); // an event is for all viewers: it knows no rights
    return this.page?.update?.(event);
  }

  /** Apply the events that came while answers were fetched. */
  follow() {
    if (this.answers || this.opening) return;
    const { early } = this;
    this.early = null;
    early.forEach((event) => this.apply(event));
    this.drawHeader();
  }

  drawHeader() {
    const { run } = this;
    const age = (performance.now() - this.received) / 1e3;
    document.body.classList.toggle("stale", this.lostSince !== null || STALE.includes(run?.state?.kind));
    if (this.lostSince !== null) {
      const since = (performance.now() - this.lostSince) / 1e3;
      this.say(`◌ ${this.lostWords}, for ${duration(Math.round(since))}; this page asks again every second`);
    } else if (run?.dead) this.say(`✕ ${run.dead.sentence}`, run.dead.cure);
    else if (run?.bus && !run.bus.connected) this.say(`◌ ${run.bus.words || "the bus does not answer"}`);
    else this.say("");
    if (!run) return;
    set(this.name, run.run);
    set(this.chip, `${run.state.symbol} ${run.state.words}`);
    this.chip.dataset.kind = this.lostSince === null ? run.state.kind : "silent";
    const steps = run.steps ? ` of ${count(run.steps)}` : "";
    set(this.progress, `step ${count(run.step)}${steps}${run.left_s ? ` · ${duration(run.left_s)} left` : ""}`);
    const old = run.mode === "live" && run.age_s != null ? `${duration(run.age_s + age)} old` : run.mode;
    set(this.age, old ?? "");
    document.title = `${run.state.symbol ?? ""} ${run.run} · Tidemill`;
  }

  say(text, cure) {
    if (this.said === text + cure) return;
    this.said = text + cure;
    this.alert.hidden = !text;
    this.alert.replaceChildren(...el("p", text, cure ? el("code", cure) : null).childNodes);
  }

  /** Show the page that the address names. */
  async open() {
    const { page, value, query } = parseLink(location.hash);
    const name = PAGES[page] ? page : "overview";
    const current = name === "sample" ? "samples" : name;
    for (const tab of this.tabs.children) tab.ariaCurrent = tab.dataset.page === current ? "page" : null;
    const opening = (this.opening = {});
    this.early ??= [];
    this.main.setAttribute("aria-busy", "true");
    const { source, known } = this;
    const go = (hash) => (location.hash = hash);
    const replace = (hash) => history.replaceState(null, "", hash);
    let opened;
    try {
      opened = await PAGES[name]({ source, known, run: () => this.run, value, query, go, replace });
    } catch (problem) {
      if (problem.status === undefined) console.error(problem); // a mistake of the page itself
      opened = { root: failure(problem) };
    }
    if (opening !== this.opening) return; // another page was asked for meanwhile
    const same = this.shown === name;
    Object.assign(this, { shown: name, page: opened, opening: null });
    this.main.replaceChildren(opened.root);
    this.main.removeAttribute("aria-busy");
    if (!same) scrollTo(0, 0);
    opened.shown?.();
    this.follow();
  }

  key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const { target } = event;
    if (target.tagName === "INPUT") {
      if (event.key === "Escape") target.blur();
    } else if (event.key === "/" && this.page?.search) {
      event.preventDefault();
      this.page.search.focus();
    } else if (/^[1-9]$/.test(event.key) && TABS[event.key - 1]) location.hash = link(TABS[event.key - 1]);
    else if (event.key !== "Enter" || target === document.body || target === this.main) this.page?.key?.(event);
  }
}

function set(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/** A choice of the reader, after it was set to `value` if there is one. An exported file may have no storage. */
function remembered(name, value) {
  try {
    if (value) localStorage.setItem(name, value);
    return localStorage.getItem(name);
  } catch {
    return value; // it lasts until the page is closed
  }
}

new App(openSource()).start();
