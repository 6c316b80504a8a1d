// Samples, newest first: filter, histogram, list, preview, a group side by side, and prompts that teach nothing.

import { clock, count, link, num, oneLine, versions } from "./format.js";
import { button, el, empty, panel, table } from "./dom.js";
import { histogram } from "./charts.js";
import { filterWords } from "./source.js";

const PAGE = 100;
const CHIPS = ["status=truncated", "status=failed", "lag=>=1", "reward=0", "kind=eval", "fate=dropped"];

/** The filter without, or with, a word: a bin or a chip that is pressed again is taken away. */
export function toggleWord(filter, word) {
  const name = word.slice(0, word.indexOf("="));
  const others = filterWords(filter).filter(([other]) => other !== name);
  const had = filterWords(filter).some(([other, value]) => `${other}=${value}` === word);
  const kept = others.map(([other, value]) => (/\s/.test(value) ? `${other}="${value}"` : `${other}=${value}`));
  return [...kept, ...(had ? [] : [word])].join(" ");
}

/** The members of a group beside each other, best first. */
export function groupCards(group) {
  const members = [...group.members].sort((a, b) => (b.reward ?? -Infinity) - (a.reward ?? -Infinity));
  const same = new Set(members.map((member) => member.reward)).size === 1 && members.length > 1;
  return [
    el("p.prompt", { dir: "auto" }, group.prompt || "∅ empty"),
    group.label == null || group.label === "" ? null : el("p", {}, el("span.mute", {}, "label "), String(group.label)),
    same ? el("p.warned", {}, "△ all rewards are equal: the group gives no gradient") : null,
    el(
      "div.cards",
      {},
      members.map((member) =>
        el(
          "article",
          {},
          el(
            "header",
            {},
            el("a", { href: link("sample", member.seq) }, `#${member.seq}`),
            el("b.reward", {}, num(member.reward)),
            el("span.mute", {}, `${versions(member.versions)} · ${count(member.tokens)} tokens · ${member.status}`),
          ),
          el("pre", { dir: "auto" }, member.response || "∅ empty"),
          member.cut ? el("small.mute", {}, `${count(member.cut)} characters more`) : null,
        ),
      ),
    ),
  ].filter(Boolean);
}

function promptRows(prompts) {
  return prompts.map((item) => [
    el("a", { href: link("samples", "", { filter: `task=${item.task}` }) }, `task ${item.task}`),
    count(item.count),
    num(item.reward),
    el("td.text", { dir: "auto" }, oneLine(item.prompt ?? "")),
  ]);
}

export async function samplesPage({ source, go, replace, query }) {
  const root = el("div.page.samples");
  let [filter, rows, next, place, fresh] = [query.filter ?? "", [], null, -1, 0];
  const input = el("input", {
    type: "search",
    "aria-label": "filter of samples",
    placeholder: 'reward=<0.5 lag=>=1 status=truncated task=57 text="some words"',
    value: filter,
  });
  const chips = el("span.chips");
  const when = el("input", {
    type: "text",
    size: 14,
    "aria-label": "go to sequence, time, version or step",
    placeholder: "#123, 10m, v7, step 80",
  });
  const news = button("", () => load(), { class: "news", hidden: true });
  const error = el("p.badly", { role: "alert", hidden: true });
  const bins = el("div");
  const list = el("div.scroll");
  const note = el("p.mute");
  const more = button("older", () => load(next, true));
  const preview = panel("Preview", { note: "j, k move; Enter opens", size: "wide4" });
  const pane = el("div", {}, empty("Choose a sample."));
  preview.classList.add("preview");
  preview.append(pane);
  const left = panel("Samples", { note: "newest first", size: "wide8", tools: [news] });
  left.append(el("div.bar", {}, input, when), chips, error, bins, list, note, more);
  const prompts = panel("Prompts that teach nothing", {
    note: "all rewards of the held samples are equal",
    size: "wide12",
  });
  root.append(el("div.grid", {}, left, preview, prompts));

  function setFilter(text) {
    filter = input.value = text.trim();
    replace(link("samples", "", { filter }));
    return Promise.all([load(), drawBins()]);
  }

  function drawChips() {
    const words = filterWords(filter).map(([name, value]) => `${name}=${value}`);
    const all = [...new Set([...words, ...CHIPS])];
    chips.replaceChildren(
      ...all.map((word) =>
        button(word, () => setFilter(toggleWord(filter, word)), { "aria-pressed": String(words.includes(word)) }),
      ),
    );
  }

  /** The histogram of the samples that the other headers choose: its axis is the reward. */
  async function drawBins() {
    const words = filterWords(filter).filter(([name]) => !["reward", "text", "fate", "version", "step"].includes(name));
    const answer = await source
      .get("histogram", { filter: words.map((word) => word.join("=")).join(" ") })
      .catch(() => null);
    if (!answer?.bins?.length) return bins.replaceChildren();
    const reward = filterWords(filter).find(([name]) => name === "reward");
    const pick = (bin) => setFilter(toggleWord(filter, bin.filter));
    return bins.replaceChildren(histogram(answer.bins, { picked: reward && `reward=${reward[1]}`, pick }));
  }

  async function load(before = null, older = false) {
    drawChips();
    let answer;
    try {
      answer = await source.get("samples", { filter, before, n: PAGE, texts: 1 });
      error.hidden = true;
    } catch (problem) {
      error.textContent = problem.message;
      error.hidden = false;
      return;
    }
    rows = older ? [...rows, ...answer.rows] : answer.rows;
    next = answer.next;
    if (!older) {
      place = -1;
      fresh = 0;
      news.hidden = true;
    }
    drawRows();
    const searched = answer.searched > answer.rows.length ? `, ${count(answer.searched)} searched` : "";
    note.textContent = `${count(rows.length)} shown${searched}${next ? "" : ", no older ones fit"}`;
    more.hidden = !next;
    if (place < 0 && rows.length) choose(0, false);
  }

  function drawRows() {
    const lines = rows.map((row, index) => ({
      cells: [
        `#${row.seq}`,
        clock(row.stored_s),
        row.task == null ? "—" : `${row.task}.${row.index}`,
        num(row.reward),
        row.lag == null ? "—" : count(row.lag),
        versions(row.versions),
        count(row.tokens),
        row.status === "completed" ? row.fate || row.status : row.status,
        el("td.text", { dir: "auto" }, row.response == null ? "—" : oneLine(row.response)),
      ],
      onclick: () => choose(index),
      ondblclick: () => go(link("sample", row.seq)),
    }));
    const head = ["sample", "stored", "task", "reward", "lag", "versions", "tokens", "state", "response"];
    list.replaceChildren(
      rows.length
        ? table(head, lines, { caption: "Samples" })
        : empty(
            filter ? "No sample fits this filter." : "Samples stand here as actors publish them: ",
            filter ? null : "tidemill tail --follow",
          ),
    );
  }

  async function choose(index, scroll = true) {
    if (index < 0 || index >= rows.length) return;
    const lines = list.querySelectorAll("tbody tr");
    lines[place]?.removeAttribute("aria-selected");
    place = index;
    lines[place].setAttribute("aria-selected", "true");
    if (scroll) lines[place].scrollIntoView({ block: "nearest" });
    const row = rows[index];
    const head = el(
      "p",
      {},
      el("a", { href: link("sample", row.seq) }, `open #${row.seq}`),
      " ",
      button("group side by side", () => showGroup(row)),
    );
    pane.replaceChildren(
      head,
      el("pre.prompt", { dir: "auto" }, row.prompt ?? ""),
      el("pre", { dir: "auto" }, row.response == null ? "" : row.response || "∅ empty"),
    );
  }

  async function showGroup(row) {
    try {
      const group = await source.get("group", { task: row.task });
      preview.classList.add("broad");
      pane.replaceChildren(
        el(
          "p",
          {},
          button("back", () => (preview.classList.remove("broad"), choose(place))),
        ),
        ...groupCards(group),
      );
      pane.querySelector("button").focus();
    } catch (problem) {
      pane.replaceChildren(el("p.badly", {}, problem.message));
    }
  }

  async function travel(text) {
    const match = /^(#)?(v|step |task )?\s*(.+)$/.exec(text.trim());
    if (!match) return setFilter(filter);
    const kind = match[1] ? "seq" : ({ v: "version", "step ": "step", "task ": "task" }[match[2]] ?? "time");
    try {
      const seq = kind === "seq" ? Number(match[3]) : (await source.get("find", { [kind]: match[3] })).seq;
      return await load(seq + 1);
    } catch (problem) {
      error.textContent = problem.message;
      error.hidden = false;
      return null;
    }
  }

  input.addEventListener("change", () => setFilter(input.value));
  when.addEventListener("change", () => travel(when.value));
  await Promise.all([load(), drawBins()]);
  const held = await source.get("prompts").catch(() => null);
  if (held) {
    const half = (title, items) =>
      el(
        "div.wide6",
        {},
        el("h3", {}, `${title} (${count(items.length)})`),
        items.length
          ? el("div.scroll", {}, table(["task", "samples", "reward", "prompt"], promptRows(items)))
          : empty("None among the samples that are held."),
      );
    prompts.append(
      el(
        "div.grid",
        {},
        half("always the lowest reward", held.wrong ?? []),
        half("always the highest reward", held.right ?? []),
      ),
    );
  } else prompts.remove();

  function update(event) {
    fresh += event.samples?.new ?? 0;
    news.hidden = !fresh;
    news.textContent = `show ${count(fresh)} new`;
  }

  function key(event) {
    if (event.key === "j") choose(place + 1);
    else if (event.key === "k") choose(place - 1);
    else if (event.key === "Enter" && rows[place]) go(link("sample", rows[place].seq));
  }
  return { root, update, key, search: input };
}
