// One sample: conversation, tokens with overlays, its place in the ledger, timings, its group.

import { clock, count, duration, link, num, percent, shade, tokenRange, versions } from "./format.js";
import { button, choice, el, empty, panel, table } from "./dom.js";

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

/** The value that an overlay shows of a token. */
export function overlayValue(tokens, overlay, place) {
  if (overlay === "difference") {
    const [train, rollout] = [tokens.train_logprob[place], tokens.logprob[place]];
    return train == null || rollout == null ? null : train - rollout;
  }
  return tokens[OVERLAYS[overlay].column]?.[place] ?? null;
}

function title(tokens, place) {
  const columns = [
    ["entropy", "entropy"],
    ["train_logprob", "train log-prob"],
    ["advantage", "advantage"],
    ["weight", "weight"],
  ];
  const logprob = tokens.logprob[place];
  const words = [`token ${tokens.from + place}`, `id ${tokens.id[place]}`];
  if (logprob != null) words.push(`p ${num(Math.exp(logprob))}`, `log-prob ${num(logprob)}`);
  if (tokens.version[place] != null) words.push(`v${tokens.version[place]}`);
  if (tokens.mask[place] === 0) words.push("masked");
  for (const [column, name] of columns)
    if (tokens[column]?.[place] != null) words.push(`${name} ${num(tokens[column][place])}`);
  return words.join(" · ");
}

class Tokens {
  constructor(source, sample, range) {
    this.source = source;
    this.sample = sample;
    this.range = range;
    this.tokens = { ...sample.tokens };
    this.overlay = "probability";
    this.shown = 0;
    this.text = el("pre.tokens", { dir: "auto", "aria-label": "tokens of the response" });
    this.readout = el("p.readout", { "aria-live": "polite" });
    this.note = el("span.mute");
    this.more = button("next tokens", () => this.next());
    const recorded = (name) => this.tokens[OVERLAYS[name].column]?.length;
    this.switch = choice(Object.keys(OVERLAYS).filter(recorded), "probability", (name) => this.paint(name), "overlay");
    const absent = Object.keys(OVERLAYS).filter((name) => !recorded(name));
    this.absent = absent.length ? el("p.mute", {}, `${absent.join(", ")}: ${NOT_RECORDED}`) : null;
    const over = (event) => event.target.dataset.place && this.show(Number(event.target.dataset.place));
    this.text.addEventListener("pointerover", over);
    this.text.addEventListener("focusin", over);
    this.add();
  }

  elements() {
    return [el("div.bar", {}, this.switch, this.note), this.text, this.readout, this.more, this.absent].filter(Boolean);
  }

  add() {
    const { tokens } = this;
    let version = this.shown ? tokens.version[this.shown - 1] : null;
    for (let place = this.shown; place < tokens.id.length; place++) {
      if (tokens.version[place] !== version && tokens.version[place] != null) {
        version = tokens.version[place];
        this.text.append(el("b.version", {}, `v${version}`));
      }
      const text = tokens.text[place];
      const element = el(
        "span",
        { "data-place": place, tabindex: place === this.shown ? 0 : -1 },
        text === "" ? "∅" : text,
      );
      this.text.append(element);
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

  show(place) {
    this.readout.textContent = title(this.tokens, place);
  }

  /** Places of the first and last token of the reader's selection, or null. */
  selected() {
    const selection = getSelection();
    if (!selection.rangeCount || selection.isCollapsed) return null;
    const range = selection.getRangeAt(0);
    if (!this.text.contains(range.commonAncestorContainer)) return null;
    const places = this.spans.filter((span) => range.intersectsNode(span)).map((span) => Number(span.dataset.place));
    return places.length ? [places[0], places.at(-1)] : null;
  }

  move(by) {
    const place = Math.max(0, Math.min(this.spans.length - 1, Number(document.activeElement.dataset.place) + by));
    this.spans[place].tabIndex = 0;
    this.spans[place].focus();
  }
}

/** A part of the conversation; what the server has cut comes by "show next". */
function textPart(source, seq, part) {
  const text = el("pre", { dir: "auto" }, part.text || "∅ empty");
  if (!part.cut) return [text];
  let left = part.cut;
  const next = button("", async () => {
    const answer = await source.get("text", { seq, field: part.field, from: part.shown });
    text.append(el("span", {}, answer.text));
    part.shown += answer.text.length;
    left = answer.cut;
    next.hidden = !left;
    next.textContent = `show next (${count(left)} characters left)`;
  });
  next.textContent = `show next (${count(left)} characters left)`;
  part.shown ??= part.text.length;
  return [text, next];
}

function turn(source, seq, message, folded) {
  const role = ROLES.includes(message.role) ? message.role : "other";
  const part = (kind, name, text) =>
    text && el(`div.field.${kind}`, {}, el("b", {}, name), el("pre", { dir: "auto" }, text));
  const reasoning = part("reasoning", "reasoning", message.reasoning);
  const fields = part(message.fields?.includes("tool_calls") ? "call" : "plain", "fields", message.fields);
  const body = [reasoning || null, ...textPart(source, seq, message), fields || null];
  const gutter = el("b.role", {}, message.role);
  if (!folded) return el(`div.turn.${role}`, {}, gutter, el("div", {}, body));
  const length = count(message.text.length + (message.cut || 0));
  const line = el("summary", {}, gutter, el("span.mute", {}, ` ${length} characters`));
  return el(`details.turn.${role}`, {}, line, el("div", {}, body));
}

function conversation(source, sample) {
  const messages = [...(sample.messages ?? [])];
  // A transcript has the response as its last turn.
  if (sample.response && !sample.turns?.length) messages.push({ role: "response", ...sample.response });
  const lastUser = messages.findLastIndex((message) => ["user", "prompt"].includes(message.role));
  const turns = messages.map((message, place) =>
    turn(source, sample.seq, message, message.role === "system" || (messages.length > 6 && place < lastUser - 4)),
  );
  const has = {
    tools: messages.some((message) => message.role === "tool" || message.fields?.includes("tool_calls")),
    reasoning: messages.some((message) => message.reasoning),
  };
  const box = el("div.conversation", {}, turns);
  const hide = (name) =>
    button(
      `hide ${name}`,
      (event) => event.target.setAttribute("aria-pressed", String(box.classList.toggle(`no-${name}`))),
      { "aria-pressed": "false" },
    );
  const switches = Object.keys(has)
    .filter((name) => has[name])
    .map(hide);
  return [switches.length ? el("p.bar", {}, switches) : null, box].filter(Boolean);
}

/** A renderer of the environment: a module with `render(sample, host, el)`, under this page's policy. */
async function ownRendering(sample) {
  const host = el("div.own");
  try {
    const renderer = await import(`/static/renderer-${encodeURIComponent(sample.renderer)}.js`);
    await renderer.render(sample, host, el);
  } catch (problem) {
    host.replaceChildren(el("p.badly", {}, `renderer ${sample.renderer}: ${problem.message}`));
  }
  return host;
}

function tokenTable(tokens) {
  const recorded = ["entropy", "advantage", "weight", "train_logprob"].filter((name) => tokens[name]?.length);
  const head = [
    "place",
    "id",
    "token",
    "probability",
    "log-prob",
    "version",
    ...recorded.map((name) => name.replace("_", " ")),
  ];
  const rows = tokens.id
    .slice(0, 500)
    .map((token, place) => [
      String(tokens.from + place),
      String(token),
      el("td.text", {}, JSON.stringify(tokens.text[place])),
      tokens.logprob[place] == null ? "—" : num(Math.exp(tokens.logprob[place])),
      num(tokens.logprob[place]),
      tokens.version[place] == null ? "—" : `v${tokens.version[place]}`,
      ...recorded.map((name) => num(tokens[name][place])),
    ]);
  return el("div.scroll", {}, table(head, rows, { caption: "Tokens" }));
}

function facts(sample) {
  const times = Object.entries(sample.timings ?? {}).map(([name, value]) => [name.replace(/_s$/, ""), duration(value)]);
  const sampling = Object.entries(sample.sampling ?? {}).map(([name, value]) => [
    name,
    Number.isInteger(value) ? String(value) : typeof value === "number" ? num(value) : String(value),
  ]);
  const parts = Object.entries(sample.parts ?? {}).map(([name, value]) => [`reward: ${name}`, num(value)]);
  const made = [
    ["label", sample.label],
    ["actor", sample.actor],
    ["engine", sample.engine],
    ["attempt", sample.attempt],
    ["metadata", sample.metadata === "{}" ? null : sample.metadata],
  ];
  return [...parts, ...times, ...sampling, ...made]
    .filter(([, value]) => value != null && value !== "")
    .map(([name, value]) => [name, el("td.text", {}, String(value))]);
}

function summary(sample) {
  const words = [
    `task ${sample.task}.${sample.index}`,
    sample.kind,
    versions(sample.versions),
    `lag ${sample.lag ?? "—"}`,
    `${count(sample.num_tokens)} tokens`,
  ];
  words.push(
    sample.finish_reason ? `${sample.status} (${sample.finish_reason})` : sample.status,
    `stored ${clock(sample.stored_s)}`,
  );
  const logprobs = (sample.tokens?.logprob ?? []).filter((value) => value != null);
  if (logprobs.length)
    words.push(`perplexity ${num(Math.exp(-logprobs.reduce((sum, value) => sum + value, 0) / logprobs.length))}`);
  if (sample.tokens?.mask?.includes(0))
    words.push(`${percent(sample.tokens.mask.filter(Boolean).length / sample.tokens.mask.length)} trainable`);
  return words.filter(Boolean).join(" · ");
}

export async function samplePage({ source, value, query, go, replace }) {
  const sample = await source.get("sample", value.includes(".") ? { task: value } : { seq: value });
  const root = el("div.page");
  const fate = sample.fate ?? {};
  const step = fate.step == null ? null : el("a", { href: link("batch", fate.step) }, `step ${count(fate.step)}`);
  root.append(
    el(
      "div.headline",
      {},
      el("h2", {}, `#${sample.seq}`),
      el("b.reward", {}, `reward ${num(sample.reward)}`),
      el("span", {}, fate.words ?? "its place in the ledger is unknown"),
      step,
    ),
    el("p.mute", {}, summary(sample)),
  );
  if (sample.error) root.append(el("p.badly", { role: "alert" }, sample.error));
  const talk = panel("Conversation");
  if (sample.renderer) talk.append(await ownRendering(sample));
  talk.append(...conversation(source, sample));
  const side = panel("Facts");
  side.append(table(["", ""], facts(sample)));
  const members = (sample.group_members ?? []).filter((member) => member.seq !== sample.seq);
  if (members.length) {
    const rows = members.map((member) => [
      el("a", { href: link("sample", member.seq) }, `#${member.seq}`),
      num(member.reward),
      count(member.tokens),
      member.status,
    ]);
    side.append(
      el("h3", {}, "Its group"),
      table(["sample", "reward", "tokens", "status"], rows),
      el("p", {}, el("a", { href: link("samples", "", { filter: `task=${sample.task}` }) }, "side by side")),
    );
  }
  const [left, right] = [el("div.wide8.stack", {}, talk), el("div.wide4.stack", {}, side)];
  root.append(el("div.grid", {}, left, right));
  if (!sample.tokens?.id?.length) {
    talk.append(empty("It has no response token."));
    return { root };
  }
  const tokens = new Tokens(source, sample, tokenRange(query.t));
  const box = panel("Tokens", { note: "select some: the address quotes them" });
  box.append(...tokens.elements());
  const numbers = panel("Token table", { note: sample.num_tokens > 500 ? "the first 500" : "" });
  numbers.append(tokenTable(sample.tokens));
  left.append(box);
  right.append(numbers);
  while (tokens.range && tokens.range[1] >= tokens.shown && tokens.shown < tokens.tokens.total && source.live)
    await tokens.next();

  const select = () => {
    const range = tokens.selected();
    if (!range || !root.isConnected) return;
    const words = range[0] === range[1] ? `${range[0]}` : `${range[0]}-${range[1]}`;
    replace(link("sample", sample.seq, { t: words }));
  };
  tokens.text.addEventListener("pointerup", select);
  tokens.text.addEventListener("keyup", select);
  tokens.text.addEventListener("keydown", (event) => {
    const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (by && !event.shiftKey) tokens.move(by);
  });
  const key = (event) => {
    if (event.key === "j") go(link("sample", sample.seq - 1));
    else if (event.key === "k") go(link("sample", sample.seq + 1));
  };
  return { root, key, shown: () => tokens.text.querySelector(".quoted")?.scrollIntoView({ block: "center" }) };
}
