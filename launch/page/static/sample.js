// One sample: conversation, tokens with overlays, its place in the ledger, timings, its group.

import { clock, count, duration, joinWords, link, num, percent, shade, tokenRange, versions } from "./format.js";
import { button, choice, el, empty, panel, sampleLink, tableOf, taskLink, textBlock } from "./dom.js";

const NEXT_TOKENS = 2_000;
const ROLES = ["system", "user", "assistant", "tool", "prompt", "response"];
const OVERLAYS = {
  probability: { column: "logprob", words: "darker violet: less probable" },
  entropy: { column: "entropy", words: "darker: more entropy" },
  version: { column: "version", words: "every other version underlined" },
  mask: { column: "mask", words: "dimmed: not trained" },
  advantage: { column: "advantage", words: "teal above 0, orange below" },
  weight: { column: "weight", words: "teal above 1, orange below" },
  difference: { column: "train_logprob", words: "train minus rollout log-prob: teal above 0, orange below" },
};
const NOT_RECORDED = "not recorded: learner.record.trained";
const RECORDED = { entropy: "entropy", train_logprob: "train log-prob", advantage: "advantage", weight: "weight" };
const MOST_TOKEN_ROWS = 500;

/** The value that an overlay shows of a token. */
export function overlayValue(tokens, overlay, place) {
  if (overlay === "difference") {
    const [train, rollout] = [tokens.train_logprob[place], tokens.logprob[place]];
    return train == null || rollout == null ? null : train - rollout;
  }
  return tokens[OVERLAYS[overlay].column]?.[place] ?? null;
}

/** Numbers of a token by name, as text. */
function numbersOf(tokens, place) {
  const { id, logprob, version, from } = tokens;
  const recorded = Object.keys(RECORDED).filter((name) => tokens[name]?.length);
  return {
    place: String(from + place),
    id: String(id[place]),
    probability: num(logprob[place] == null ? null : Math.exp(logprob[place])),
    "log-prob": num(logprob[place]),
    version: version[place] == null ? "—" : `v${version[place]}`,
    ...Object.fromEntries(recorded.map((name) => [RECORDED[name], num(tokens[name][place])])),
  };
}

function title(tokens, place) {
  const known = Object.entries(numbersOf(tokens, place)).filter(([, text]) => text !== "—");
  return joinWords(...known.map((words) => words.join(" ")), tokens.mask[place] === 0 && "masked");
}

class Tokens {
  shown = 0; // tokens so far
  text = el("pre.tokens", { dir: "auto", "aria-label": "tokens of the response" });
  readout = el("p.readout", { "aria-live": "polite" });
  note = el("span.mute");
  more = button("", () => this.next());

  constructor({ source, replace }, sample, range) {
    Object.assign(this, { source, replace, sample, range, tokens: { ...sample.tokens }, overlay: "probability" });
    const over = ({ target }) => {
      if (target.dataset.place) this.readout.textContent = title(this.tokens, Number(target.dataset.place));
    };
    const names = Object.keys(OVERLAYS);
    const recorded = names.filter((name) => this.tokens[OVERLAYS[name].column]?.length);
    const absent = names.filter((name) => !recorded.includes(name)).join(", ");
    const overlays = choice(recorded, this.overlay, (name) => this.paint(name), "overlay");
    const body = [el("div.bar", overlays, this.note), this.text, this.readout, this.more];
    const note = "select some: the address quotes them";
    this.root = panel("Tokens", { note }, body, absent && el("p.mute", `${absent}: ${NOT_RECORDED}`));
    for (const name of ["pointerover", "focusin"]) this.text.addEventListener(name, over);
    for (const name of ["pointerup", "keyup"]) this.text.addEventListener(name, () => this.quote());
    this.text.addEventListener("keydown", (event) => {
      const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (by && !event.shiftKey) this.move(by);
    });
    this.add();
  }

  add() {
    const { tokens } = this;
    let version = this.shown ? tokens.version[this.shown - 1] : null;
    for (let place = this.shown; place < tokens.id.length; place++) {
      if (tokens.version[place] !== version && tokens.version[place] != null) {
        version = tokens.version[place];
        this.text.append(el("b.version", `v${version}`));
      }
      const attributes = { "data-place": place, tabindex: place === this.shown ? 0 : -1 };
      this.text.append(el("span", attributes, tokens.text[place] || "∅"));
    }
    this.shown = tokens.id.length;
    this.spans = [...this.text.querySelectorAll("span")];
    this.more.hidden = tokens.from + this.shown >= tokens.total;
    this.more.textContent = `next tokens (${count(tokens.total - this.shown)} left)`;
    this.paint(this.overlay);
  }

  async next() {
    const answer = await this.source.get("tokens", { seq: this.sample.seq, from: this.shown, n: NEXT_TOKENS });
    for (const [name, column] of Object.entries(answer))
      if (Array.isArray(column)) this.tokens[name] = [...this.tokens[name], ...column];
    this.add();
  }

  /** Take tokens until the quoted ones are there. */
  async reach() {
    while (this.range?.[1] >= this.shown && this.shown < this.tokens.total && this.source.live) await this.next();
  }

  paint(overlay) {
    this.overlay = overlay;
    this.note.textContent = OVERLAYS[overlay].words;
    this.text.dataset.overlay = overlay;
    const first = this.tokens.version[0] ?? 0;
    this.spans.forEach((span, place) => {
      const value = overlayValue(this.tokens, overlay, place);
      const level = overlay === "version" ? (value - first) % 2 : overlay === "mask" ? 0 : shade(overlay, value);
      const quoted = this.range && place >= this.range[0] && place <= this.range[1];
      const classes = [level > 0 ? `s${level}` : level < 0 ? `sm${-level}` : ""];
      if (this.tokens.mask[place] === 0) classes.push("masked");
      if (quoted) classes.push("quoted");
      span.className = classes.join(" ");
    });
  }

  /** Put the tokens that the reader has selected into the address. */
  quote() {
    const selection = getSelection();
    if (!selection.rangeCount || selection.isCollapsed || !this.text.isConnected) return;
    const range = selection.getRangeAt(0);
    if (!this.text.contains(range.commonAncestorContainer)) return;
    const places = this.spans.filter((span) => range.intersectsNode(span)).map((span) => span.dataset.place);
    const ends = [...new Set([places[0], places.at(-1)])];
    if (places.length) this.replace(link("sample", this.sample.seq, { t: ends.join("-") }));
  }

  move(by) {
    const place = Math.max(0, Math.min(this.spans.length - 1, Number(document.activeElement.dataset.place) + by));
    this.spans[place].tabIndex = 0;
    this.spans[place].focus();
  }
}

/** A part of the conversation; what the server has cut comes by "show next". */
function textPart(source, seq, { text, cut, field }) {
  const shown = textBlock(text);
  if (!cut) return shown;
  let from = text.length;
  const next = button("", async () => {
    const answer = await source.get("text", { seq, field, from });
    shown.append(el("span", answer.text));
    from += answer.text.length;
    label(answer.cut);
  });
  const label = (left) => {
    next.hidden = !left;
    next.textContent = `show next (${count(left)} characters left)`;
  };
  label(cut);
  return [shown, next];
}

function turn(source, seq, message, folded) {
  const role = ROLES.includes(message.role) ? message.role : "other";
  const part = (kind, name, text) => text && el(`div.field.${kind}`, el("b", name), textBlock(text));
  const fields = part(message.fields?.includes("tool_calls") ? "call" : "plain", "fields", message.fields);
  const reasoning = part("reasoning", "reasoning", message.reasoning);
  const body = el("div", reasoning, textPart(source, seq, message), fields);
  const gutter = el("b.role", message.role);
  if (!folded) return el(`div.turn.${role}`, gutter, body);
  const length = count(message.text.length + (message.cut || 0));
  return el(`details.turn.${role}`, el("summary", gutter, el("span.mute", ` ${length} characters`)), body);
}

function conversation(source, sample) {
  const messages = [...(sample.messages ?? [])];
  // A transcript has the response as its last turn.
  if (sample.response && !sample.turns?.length) messages.push({ role: "response", ...sample.response });
  const lastUser = messages.findLastIndex((message) => ["user", "prompt"].includes(message.role));
  const folded = (role, place) => role === "system" || (messages.length > 6 && place < lastUser - 4);
  const turns = messages.map((message, place) => turn(source, sample.seq, message, folded(message.role, place)));
  const has = {
    tools: messages.some((message) => message.role === "tool" || message.fields?.includes("tool_calls")),
    reasoning: messages.some((message) => message.reasoning),
  };
  const box = el("div.conversation", turns);
  const hide = (name) => {
    const press = ({ target }) => target.setAttribute("aria-pressed", String(box.classList.toggle(`no-${name}`)));
    return button(`hide ${name}`, press, { "aria-pressed": "false" });
  };
  const switches = Object.keys(has).filter((name) => has[name]);
  return [switches.length > 0 && el("p.bar", switches.map(hide)), box];
}

/** A renderer of the environment: a module with `render(sample, host, el)`, under this page's policy. */
async function ownRendering(sample) {
  const host = el("div.own");
  try {
    const renderer = await import(`/static/renderer-${encodeURIComponent(sample.renderer)}.js`);
    await renderer.render(sample, host, el);
  } catch (problem) {
    host.replaceChildren(el("p.badly", `renderer ${sample.renderer}: ${problem.message}`));
  }
  return host;
}

function tokenTable(tokens) {
  const places = [...tokens.id.keys()].slice(0, MOST_TOKEN_ROWS);
  const columns = { token: (place) => el("td.text", JSON.stringify(tokens.text[place])) };
  for (const name of Object.keys(numbersOf(tokens, 0))) columns[name] = (place) => numbersOf(tokens, place)[name];
  const note = tokens.total > MOST_TOKEN_ROWS && `the first ${MOST_TOKEN_ROWS}`;
  return panel("Token table", { note }, el("div.scroll", tableOf(columns, places, { caption: "Tokens" })));
}

function facts({ timings = {}, sampling = {}, parts = {}, label, actor, engine, attempt, metadata }) {
  const value = (item) => (typeof item === "number" && !Number.isInteger(item) ? num(item) : item);
  const rows = [
    ...Object.entries(parts).map(([name, part]) => [`reward: ${name}`, num(part)]),
    ...Object.entries(timings).map(([name, seconds]) => [name.replace(/_s$/, ""), duration(seconds)]),
    ...Object.entries(sampling).map(([name, item]) => [name, value(item)]),
    ...Object.entries({ label, actor, engine, attempt, metadata: metadata === "{}" ? null : metadata }),
  ];
  const known = rows.filter(([, item]) => item != null && item !== "");
  return tableOf({ "": ([name]) => name, " ": ([, item]) => el("td.text", String(item)) }, known);
}

/** The other samples of its group. */
function neighbours({ seq, task, group_members: members = [] }) {
  const columns = {
    sample: (member) => sampleLink(member.seq),
    reward: ({ reward }) => num(reward),
    tokens: ({ tokens }) => count(tokens),
    status: ({ status }) => status,
  };
  const others = members.filter((member) => member.seq !== seq);
  const beside = el("p", taskLink(task, "side by side"));
  return others.length ? [el("h3", "Its group"), tableOf(columns, others), beside] : [];
}

function summary(sample) {
  const { logprob = [], mask = [] } = sample.tokens ?? {};
  const known = logprob.filter((value) => value != null);
  const mean = known.reduce((sum, value) => sum + value, 0) / known.length;
  return joinWords(
    `task ${sample.task}.${sample.index}`,
    sample.kind,
    versions(sample.versions),
    `lag ${sample.lag ?? "—"}`,
    `${count(sample.num_tokens)} tokens`,
    sample.finish_reason ? `${sample.status} (${sample.finish_reason})` : sample.status,
    `stored ${clock(sample.stored_s)}`,
    known.length > 0 && `perplexity ${num(Math.exp(-mean))}`,
    mask.includes(0) && `${percent(mask.filter(Boolean).length / mask.length)} trainable`,
  );
}

function headline({ seq, reward, fate }) {
  const { step, words = "its place in the ledger is unknown" } = fate ?? {};
  const trained = step != null && el("a", { href: link("batch", step) }, `step ${count(step)}`);
  const value = el("b.reward", `reward ${num(reward)}`);
  return el("div.headline", el("h2", `#${seq}`), value, el("span", words), trained);
}

export async function samplePage(context) {
  const { source, value, query, go } = context;
  const sample = await source.get("sample", value.includes(".") ? { task: value } : { seq: value });
  const talk = panel("Conversation", {}, sample.renderer && (await ownRendering(sample)), conversation(source, sample));
  const [left, right] = [el("div.wide8.stack", talk), el("div.wide4.stack")];
  right.append(panel("Facts", {}, facts(sample), neighbours(sample)));
  const error = sample.error && el("p.badly", { role: "alert" }, sample.error);
  const root = el("div.page", headline(sample), el("p.mute", summary(sample)), error, el("div.grid", left, right));
  const key = (event) => {
    const by = { j: -1, k: 1 }[event.key];
    if (by) go(link("sample", sample.seq + by));
  };
  if (!sample.tokens?.id?.length) {
    talk.append(empty("It has no response token."));
    return { root, key };
  }
  const tokens = new Tokens(context, sample, tokenRange(query.t));
  left.append(tokens.root);
  right.append(tokenTable(sample.tokens));
  await tokens.reach();
  return { root, key, shown: () => tokens.text.querySelector(".quoted")?.scrollIntoView({ block: "center" }) };
}
