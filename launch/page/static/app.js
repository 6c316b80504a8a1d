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

const PAGES = {
  overview: overviewPage,
  flow: flowPage,
  learning: learningPage,
  fleet: fleetPage,
  samples: samplesPage,
  batch: batchPage,
  sample: samplePage,
};
const TABS = Object.keys(PAGES).filter((name) => name !== "sample");
const RETRY_MS = 1_000;
const THEMES = ["auto", "light", "dark"];
const STALE = ["silent", "full", "ended"];

class App {
  constructor(source) {
    const get = async (...query) => {
      const answer = await source.get(...query);
      this.answers?.push(answer);
      return answer;
    };
    this.source = Object.assign(Object.create(source), { get });
    this.run = null;
    this.answers = null; // those of a reload, of which the earliest is where the events go on
    this.page = null;
    this.early = null; // events that came while a page was fetching
    this.lostSince = null;
    this.received = performance.now();
    this.header = el("header.top");
    this.alert = el("p.alert", { role: "alert", hidden: true });
    this.main = el("main", { tabindex: -1 });
    document.body.replaceChildren(
      el("a.skip", { href: "#overview", onclick: (event) => this.skip(event) }, "to the content"),
      this.header,
      this.alert,
      this.main,
    );
    this.build();
    const { exported } = source;
    if (exported) {
      const words = `exported by Tidemill ${exported.version}, ${clock(exported.time_s)}`;
      document.body.append(el("footer.mute", [words, ...(exported.truncated ?? [])].join(" · left out: ")));
    }
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redrawAll);
    addEventListener("hashchange", () => this.open());
    addEventListener("keydown", (event) => this.key(event));
  }

  build() {
    this.name = el("h1");
    this.chip = el("span.state");
    this.progress = el("span.progress");
    this.age = el("span.mute.age");
    this.tabs = el(
      "nav",
      { "aria-label": "pages" },
      TABS.map((name) => el("a", { href: link(name), "data-page": name }, name[0].toUpperCase() + name.slice(1))),
    );
    this.theme = button("", () => this.setTheme(THEMES[(THEMES.indexOf(this.chosen) + 1) % THEMES.length]));
    this.header.append(this.name, this.chip, this.progress, this.age, this.tabs, this.theme);
    this.setTheme(recall("tidemill-theme") ?? "auto");
  }

  setTheme(name) {
    this.chosen = name;
    keep("tidemill-theme", name);
    document.documentElement.dataset.theme = name;
    this.theme.textContent = { auto: "◐", light: "○", dark: "●" }[name];
    this.theme.title = `theme: ${name}`;
    this.theme.setAttribute("aria-label", `theme: ${name}`);
    redrawAll();
  }

  skip(event) {
    event.preventDefault();
    this.main.focus();
  }

  start() {
    // The events begin before the answers, so that none is missed between them.
    this.early = [];
    this.source.subscribe({
      apply: (event) => this.apply(event),
      opened: () => this.opened(),
      lost: () => this.lost(),
    });
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
    for (const tab of this.tabs.children) {
      const current = tab.dataset.page === name || (name === "sample" && tab.dataset.page === "samples");
      if (current) tab.setAttribute("aria-current", "page");
      else tab.removeAttribute("aria-current");
    }
    const turn = (this.turn = (this.turn ?? 0) + 1);
    this.early ??= [];
    this.opening = true;
    this.main.setAttribute("aria-busy", "true");
    let opened;
    try {
      opened = await PAGES[name]({
        source: this.source,
        known: this.known,
        run: () => this.run,
        value,
        query,
        go: (hash) => (location.hash = hash),
        replace: (hash) => history.replaceState(null, "", hash),
      });
    } catch (problem) {
      if (problem.status === undefined) console.error(problem); // a mistake of the page itself
      opened = { root: failure(problem) };
    }
    if (turn !== this.turn) return; // another page was asked for meanwhile
    const same = this.shown === name;
    this.shown = name;
    this.page = opened;
    this.opening = false;
    this.main.replaceChildren(opened.root);
    this.main.removeAttribute("aria-busy");
    if (!same) scrollTo(0, 0);
    opened.shown?.();
    this.follow();
  }

  key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (/^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName)) {
      if (event.key === "Escape") event.target.blur();
      return;
    }
    if (event.key === "/" && this.page?.search) {
      event.preventDefault();
      this.page.search.focus();
    } else if (/^[1-9]$/.test(event.key) && TABS[event.key - 1]) location.hash = link(TABS[event.key - 1]);
    else if (event.key !== "Enter" || event.target === document.body || event.target === this.main)
      this.page?.key?.(event);
  }
}

function set(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/** A choice of the reader; an exported file may have no storage. */
function recall(name) {
  try {
    return localStorage.getItem(name);
  } catch {
    return null;
  }
}

function keep(name, value) {
  try {
    localStorage.setItem(name, value);
  } catch {
    // the choice lasts until the page is closed
  }
}

new App(openSource()).start();
