// Samples, newest first: filter, histogram, list, preview, a group side by side, and prompts that teach nothing.

import { clock, count, link, num, oneLine, samplesLink, versions } from "./format.js";
import { button, el, empty, failure, panel, sampleLink, tableOf, taskLink, textBlock } from "./dom.js";
import { histogram } from "./charts.js";
import { filterWords } from "./source.js";

const PAGE = 100;
const CHIPS = ["status=truncated", "status=failed", "lag=>=1", "reward=0", "kind=eval", "fate=dropped"];
const NOT_OF_HISTOGRAM = ["reward", "text", "fate", "version", "step"]; // its axis, and words that it does not know
const COLUMNS_OF_SAMPLE = {
  sample: (row) => `#${row.seq}`,
  stored: (row) => clock(row.stored_s),
  task: (row) => (row.task == null ? "—" : `${row.task}.${row.index}`),
  reward: (row) => num(row.reward),
  lag: (row) => count(row.lag),
  versions: (row) => versions(row.versions),
  tokens: (row) => count(row.tokens),
  status: (row) => row.status ?? "—",
  outcome: (row) => (row.kind === "eval" ? "evaluation" : row.fate || "—"),
  response: (row) => el("td.text", { dir: "auto" }, row.response == null ? "—" : oneLine(row.response)),
};

/** The filter without, or with, a word: a bin or a chip that is pressed again is taken away. */
export function toggleWord(filter, word) {
  const name = word.slice(0, word.indexOf("="));
  const others = filterWords(filter).filter(([other]) => other !== name);
  const had = filterWords(filter).some(([other, value]) => `${other}=${value}` === word);
  const kept = others.map(([other, value]) => (/\s/.test(value) ? `${other}="${value}"` : `${other}=${value}`));
  return [...kept, ...(had ? [] : [word])].join(" ");
}

/** The members of a group beside each other, best first. */
function groupCards({ members, prompt, label }) {
  const sorted = [...members].sort((a, b) => (b.reward ?? -Infinity) - (a.reward ?? -Infinity));
  const same = new Set(members.map((member) => member.reward)).size === 1 && members.length > 1;
  const card = ({ seq, reward, versions: made, tokens, status, response, cut }) => {
    const words = `${versions(made)} · ${count(tokens)} tokens · ${status}`;
    const header = el("header", sampleLink(seq), el("b.reward", num(reward)), el("span.mute", words));
    return el("article", header, textBlock(response), cut > 0 && el("small.mute", `${count(cut)} characters more`));
  };
  return el(
    "div",
    el("p.prompt", { dir: "auto" }, prompt || "∅ empty"),
    label != null && label !== "" && el("p", el("span.mute", "label "), String(label)),
    same && el("p.warned", "△ all rewards are equal: the group gives no gradient"),
    el("div.cards", sorted.map(card)),
  );
}

/** Prompts of which no held sample has the highest reward, and those of which all have it. */
function promptsPanel({ wrong = [], right = [] }) {
  const columns = {
    task: ({ task }) => taskLink(task),
    samples: (item) => count(item.count),
    "best reward": (item) => num(item.reward),
    prompt: (item) => el("td.text", { dir: "auto" }, oneLine(item.prompt ?? "")),
  };
  const half = (title, items) => {
    const lines = tableOf(columns, items);
    const body = items.length ? el("div.scroll", lines) : empty("None among the samples that are held.");
    return el("div.wide6", el("h3", `${title} (${count(items.length)})`), body);
  };
  const halves = el("div.grid", half("never the highest reward", wrong), half("always the highest reward", right));
  const note = "of the held samples; the hardest first";
  return panel("Hardest and solved prompts", { note, size: "wide12" }, halves);
}

class SamplesView {
  rows = [];
  next = null; // where older samples begin
  place = -1; // of the chosen row
  fresh = 0; // samples that came since the list was read
  chips = el("span.chips");
  error = el("p.badly", { role: "alert", hidden: true });
  bins = el("div");
  list = el("div.scroll");
  note = el("p.mute");
  pane = el("div", empty("Choose a sample."));
  more = button("older", () => this.load(this.next, true));
  news = button("", () => this.load(), { class: "news", hidden: true });
  hardest = button("hardest prompts", () => this.grid.lastChild.scrollIntoView(), { hidden: true });

  constructor({ source, go, replace, query }) {
    Object.assign(this, { source, go, replace, filter: query.filter ?? "" });
    const field = (type, label, placeholder, enter) => {
      const input = el("input", { type, "aria-label": label, placeholder, size: type === "text" && 14 });
      input.addEventListener("change", () => enter(input.value));
      return input;
    };
    const example = 'reward=<0.5 lag=>=1 status=truncated task=57 text="some words"';
    this.search = field("search", "filter of samples", example, (text) => this.setFilter(text));
    this.search.value = this.filter;
    const places = "#123, 10m, v7, step 80";
    const when = field("text", "go to sequence, time, version or step", places, (text) => this.travel(text));
    const bar = el("div.bar", this.search, when);
    const samples = { note: "newest first", size: "wide8", tools: [this.news, this.hardest] };
    const left = panel("Samples", samples, bar, this.chips, this.error, this.bins, this.list, this.note, this.more);
    this.preview = panel("Preview", { note: "j, k move; Enter opens", size: "wide4" }, this.pane);
    this.preview.classList.add("preview");
    this.root = el("div.page.samples", (this.grid = el("div.grid", left, this.preview)));
  }

  setFilter(text) {
    this.filter = this.search.value = text.trim();
    this.replace(samplesLink(this.filter));
    return this.show();
  }

  show() {
    return Promise.all([this.load(), this.drawBins()]);
  }

  drawChips() {
    const words = filterWords(this.filter).map(([name, value]) => `${name}=${value}`);
    const press = (word) => () => this.setFilter(toggleWord(this.filter, word));
    const chip = (word) => button(word, press(word), { "aria-pressed": String(words.includes(word)) });
    this.chips.replaceChildren(...[...new Set([...words, ...CHIPS])].map(chip));
  }

  /** The histogram of the samples that the other headers choose: its axis is the reward. */
  async drawBins() {
    const words = filterWords(this.filter);
    const others = words.filter(([name]) => !NOT_OF_HISTOGRAM.includes(name)).map((word) => word.join("="));
    const answer = await this.source.get("histogram", { filter: others.join(" ") }).catch(() => null);
    const reward = words.find(([name]) => name === "reward");
    const pick = (bin) => this.setFilter(toggleWord(this.filter, bin.filter));
    const chart = answer?.bins?.length && histogram(answer.bins, { picked: reward && `reward=${reward[1]}`, pick });
    this.bins.replaceChildren(...(chart ? [chart] : []));
  }

  async load(before = null, older = false) {
    this.drawChips();
    const query = { filter: this.filter, before, n: PAGE, texts: 1 };
    const answer = await this.source.get("samples", query).catch((problem) => this.refuse(problem));
    if (!answer) return;
    this.error.hidden = true;
    this.rows = older ? [...this.rows, ...answer.rows] : answer.rows;
    this.next = answer.next;
    this.more.hidden = !this.next;
    if (!older) {
      [this.place, this.fresh] = [-1, 0];
      this.news.hidden = true;
    }
    this.drawRows();
    const searched = answer.searched > answer.rows.length ? `, ${count(answer.searched)} searched` : "";
    this.note.textContent = `${count(this.rows.length)} shown${searched}${this.next ? "" : ", no older ones fit"}`;
    this.choose(Math.max(0, this.place), false);
  }

  refuse(problem) {
    this.error.textContent = problem.message;
    this.error.hidden = false;
  }

  drawRows() {
    const row = ({ seq }, index) => ({
      onclick: () => this.choose(index),
      ondblclick: () => this.go(link("sample", seq)),
    });
    if (this.rows.length) this.list.replaceChildren(tableOf(COLUMNS_OF_SAMPLE, this.rows, { caption: "Samples", row }));
    else if (this.filter) this.list.replaceChildren(empty("No sample fits this filter."));
    else this.list.replaceChildren(empty("Samples stand here as actors publish them: ", "tidemill tail --follow"));
  }

  choose(index, scroll = true) {
    const row = this.rows[index];
    if (!row) return;
    const lines = this.list.querySelectorAll("tbody tr");
    lines[this.place]?.removeAttribute("aria-selected");
    this.place = index;
    lines[index].setAttribute("aria-selected", "true");
    if (scroll) lines[index].scrollIntoView({ block: "nearest" });
    this.preview.classList.remove("broad");
    const open = el("a", { href: link("sample", row.seq) }, `open #${row.seq}`);
    const group = button("group side by side", () => this.showGroup(row));
    const prompt = el("pre.prompt", { dir: "auto" }, row.prompt ?? "");
    this.pane.replaceChildren(el("p", open, " ", group), prompt, textBlock(row.response));
  }

  async showGroup({ task }) {
    const cards = await this.source.get("group", { task }).then(groupCards, failure);
    const back = button("back", () => this.choose(this.place));
    this.preview.classList.add("broad");
    this.pane.replaceChildren(el("p", back), cards);
    back.focus();
  }

  /** Show the samples from a sequence, a time, a version, a step or a task on. */
  async travel(text) {
    const match = /^(#|v|step |task )?\s*(.+)$/.exec(text.trim());
    if (!match) return this.setFilter(this.filter);
    const kind = { "#": "seq", v: "version", "step ": "step", "task ": "task" }[match[1]] ?? "time";
    if (kind === "seq") return this.load(Number(match[2]) + 1);
    const answer = await this.source.get("find", { [kind]: match[2] }).catch((problem) => this.refuse(problem));
    return answer && this.load(answer.seq + 1);
  }

  addPrompts(prompts) {
    this.grid.append(promptsPanel(prompts));
    this.hardest.hidden = false;
  }

  update({ samples }) {
    this.fresh += samples?.new ?? 0;
    this.news.hidden = !this.fresh;
    this.news.textContent = `show ${count(this.fresh)} new`;
  }

  key({ key }) {
    if (key === "j") this.choose(this.place + 1);
    else if (key === "k") this.choose(this.place - 1);
    else if (key === "Enter" && this.rows[this.place]) this.go(link("sample", this.rows[this.place].seq));
  }
}

export async function samplesPage(context) {
  const page = new SamplesView(context);
  await page.show();
  const add = (prompts) => page.addPrompts(prompts);
  context.source.get("prompts").then(add, () => null); // fetched one by one, which the list does not wait for
  return page;
}
