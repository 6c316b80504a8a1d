// A Tidemill actor: leases tasks, asks engines, scores, publishes, settles. Everything it does is said in docs/wire.md, step by step.
//
//   TASKS --lease--> n x engine --> reward --> SAMPLES      settled when all n are stored
//                       |             +-- fails: a report in DEAD, and the task is handed back (the last report makes it dead)
//                       +-- no engine: the task is handed back
//
// Keeps nothing: what it holds when it is killed goes to another actor when the lease runs out, and what is made twice counts once.

import { randomBytes } from "node:crypto";
import { EventEmitter, once } from "node:events";
import { hostname } from "node:os";
import { parseArgs } from "node:util";
import { connect, createInbox, headers as natsHeaders } from "@nats-io/transport-node";
import { checkSample, cut, decodeTask, encodeSample, headersOf, json, manifest, message, messageId, score, subjectOf, token } from "./wire.mjs";

const ANSWER_MS = 5000;
const LEASE_WAIT_MS = 1000;
const LEASE_GRACE_MS = 500;
const LOOK_EVERY_MS = 2000; // how old our knowledge of the task floor and of fences may be
const HEARTBEAT_MS = 1000;
const DEAD_AFTER_MS = 5000; // an engine whose row is not written for so long is gone
const REST_MS = 500; // pause for an engine that broke a request, doubled with each in a row
const REST_LIMIT_MS = 10_000;
const MAX_DELIVERIES = 50;
const INCURABLE = new Set([10054, 10071, 10164]); // too large; another message stands where this one was to stand
const STATUS = { stop: "completed", length: "truncated" };
const NOT_IN_TIME = 75;

class NoEngine extends Error {} // not the task's fault
class EngineAway extends Error {} // it does not serve now: ask another
class Refused extends Error {
  constructor(subject, { err_code: code, description }) {
    super(`${subject}: ${description} (${code})`);
    this.code = code;
  }
}

const sleep = (ms) => new Promise((resolve) => setTimeout(resolve, ms));
const now = () => performance.now();
const log = (event, fields = {}) =>
  console.error([new Date().toISOString(), event, ...Object.entries(fields).map(([name, value]) => `${name}=${value}`)].join(" "));

/** Wait for an event at most so long. */
async function wait(emitter, event, ms) {
  await once(emitter, event, { signal: AbortSignal.timeout(Math.max(1, Math.ceil(ms))) }).catch(() => {});
}

// --- rewards: (response, label, status) -> number

const rewards = {
  /** The share of positions that are right, the end counted as one of them. */
  digits(response, label, status) {
    const [got, want] = [[...response], [...String(label)]]; // by characters, not by UTF-16 units
    const right = want.filter((character, place) => got[place] === character).length;
    const ended = status === "completed" && got.length === want.length;
    return (right + (ended ? 1 : 0)) / (Math.max(got.length, want.length) + 1);
  },
  /** 1 when the response is the label, or one of the labels. */
  exact(response, label) {
    return [label].flat().some((each) => String(each).trim() === response.trim()) ? 1 : 0;
  },
};

// --- the bus

class Bus {
  constructor(nc, run) {
    this.nc = nc;
    this.run = run;
    this.events = new EventEmitter().setMaxListeners(0);
    this.connected = true;
    this.watch();
  }

  async watch() {
    for await (const { type } of this.nc.status()) {
      if (type !== "disconnect" && type !== "reconnect") continue;
      this.connected = type === "reconnect";
      log(`bus: ${type}`);
      this.events.emit(type);
    }
  }

  /** Store a message, tried for ever under its id; its sequence. Throws Refused for what no retry can cure. */
  async store(subject, payload, fields) {
    for (;;) {
      while (!this.connected) await wait(this.events, "reconnect", 60_000); // else the client would keep every try, and send them all
      try {
        const answer = await this.request(subject, payload, fields);
        if (answer.data.length) return told(subject, answer).seq;
      } catch (error) {
        if (INCURABLE.has(error.code) || this.nc.isClosed()) throw error;
      }
      await sleep(20 + Math.random() * 180); // no answer does not mean not stored; full (10077) means wait
    }
  }

  request(subject, payload, fields = {}) {
    const headers = natsHeaders();
    for (const [name, value] of Object.entries(fields)) headers.set(name, value);
    return this.nc.request(subject, payload, { headers, timeout: ANSWER_MS });
  }

  async api(verb, body = {}) {
    return told(verb, await this.request(`$JS.API.${verb}`, JSON.stringify(body)));
  }

  /** One message of a stream (`{seq, next_by_subj}` or `{last_by_subj}`), null when there is none. */
  async read(stream, wanted) {
    const found = await this.request(`$JS.API.DIRECT.GET.${stream}`, JSON.stringify(wanted));
    if (found.headers?.get("Status") === "404" || found.headers?.code === 404) return null;
    if (!found.headers?.get("Nats-Sequence")) throw new Error(`${stream}: want a message or 404, got ${found.headers?.code}`);
    return found;
  }

  async row(bucket, key) {
    const found = await this.read(`KV_TM_${this.run}_${bucket}`, { last_by_subj: `$KV.TM_${this.run}_${bucket}.${key}` });
    return found?.data.length ? found.json() : null;
  }

  say(subject, payload) {
    if (this.connected) this.nc.publish(subject, payload);
  }
}

function told(subject, answer) {
  const fields = answer.json();
  if (fields.error) throw new Refused(subject, fields.error);
  return fields;
}

// --- tasks

/** One waiting worker: a subject of its own, and at most one request at the server. */
class Slot {
  constructor(bus, kind) {
    this.bus = bus;
    this.inbox = createInbox();
    this.subject = `$JS.API.CONSUMER.MSG.NEXT.TM_${bus.run}_TASKS.${kind === "eval" ? "eval" : "rollout"}`;
    bus.nc.subscribe(this.inbox, { callback: (error, found) => this.arrived(error ? null : found) });
  }

  /** The next task's message; null when none came, or there is no bus. */
  next() {
    return new Promise((resolve) => {
      const timer = setTimeout(() => this.waiting?.(null), LEASE_WAIT_MS + LEASE_GRACE_MS);
      this.waiting = (found) => {
        this.waiting = null;
        clearTimeout(timer);
        resolve(found);
      };
      const request = JSON.stringify({ batch: 1, expires: LEASE_WAIT_MS * 1e6 });
      if (this.bus.connected) this.bus.nc.publish(this.subject, request, { reply: this.inbox });
    });
  }

  arrived(found) {
    const isTask = found?.reply?.startsWith("$JS.ACK.");
    if (this.waiting) this.waiting(isTask ? found : null);
    else if (isTask) this.bus.say(found.reply, "-NAK"); // nobody waits any more
  }
}

class Lease {
  constructor(bus, found, config) {
    const fields = found.reply.split(".");
    [this.deliveries, this.id] = fields.slice(fields.length === 9 ? 4 : 6).map(Number);
    this.bus = bus;
    this.config = config;
    this.reply = found.reply;
    this.bytes = found.data;
    this.epoch = Number(found.headers?.get("Tm-Epoch") || -1);
    this.attempt = randomBytes(6).toString("hex"); // new for each lease
  }

  keep() {
    this.renewing = setInterval(() => this.bus.say(this.reply, "+WPI"), (this.config.lease_s * 1000) / 3);
  }

  release() {
    clearInterval(this.renewing);
  }

  handBack(delayMs = 0) {
    this.bus.say(this.reply, delayMs ? `-NAK ${JSON.stringify({ delay: delayMs * 1e6 })}` : "-NAK");
  }

  /** Tried for one lease; if the server never hears it, the task comes again, and what is made twice is a duplicate. */
  async settle() {
    for (const deadline = now() + this.config.lease_s * 1000; now() < deadline; await sleep(100)) {
      try {
        return void (await this.bus.request(this.reply, "+ACK"));
      } catch (error) {
        log("task not settled yet", { task: this.id, error: error.message });
      }
    }
  }

  async fail(reason, actor, prompt) {
    const subject = `tm.${this.bus.run}.dead.report.${this.id}`;
    const task = BigInt(this.id);
    const report = message("report", { task, reason, actor, attempt: this.attempt });
    await this.bus.store(subject, report, { "Nats-Msg-Id": `report.${this.id}.${this.attempt}` });
    const { state } = await this.bus.api(`STREAM.INFO.TM_${this.bus.run}_DEAD`, { subjects_filter: subject });
    const attempts = state.subjects?.[subject] ?? 0;
    if (attempts < this.config.max_attempts) return this.handBack();
    return this.bury(reason, attempts, actor, prompt);
  }

  async bury(reason, attempts, actor, prompt) {
    log("task is dead", { task: this.id, reason });
    const dead = message("dead", { task: BigInt(this.id), reason, attempts, actor, prompt });
    const headers = { "Nats-Msg-Id": `dead.${this.id}`, "Nats-Expected-Last-Subject-Sequence": "0" };
    try {
      await this.bus.store(`tm.${this.bus.run}.dead.task.${this.id}`, dead, headers);
    } catch (error) {
      if (error.code !== 10071 && error.code !== 10164) throw error; // else it is dead already
    }
    await this.settle();
  }
}

/** Which tasks need no work: those below the floor, and those of a learner that was replaced. */
class Needless {
  constructor(bus) {
    this.bus = bus;
    this.floor = 0;
    this.fences = []; // [sequence, epoch], in order
    this.lookedMs = -Infinity;
  }

  async holds(lease) {
    if (now() - this.lookedMs > LOOK_EVERY_MS) {
      this.lookedMs = now();
      await this.look().catch((error) => log("task floor unknown", { error: error.message })); // then with what we knew
    }
    return lease.id <= this.floor || this.fences.some(([seq, epoch]) => seq < lease.id && epoch > lease.epoch);
  }

  async look() {
    const { run } = this.bus;
    this.floor = (await this.bus.row("run", "task_floor"))?.floor ?? this.floor;
    for (;;) {
      const seq = (this.fences.at(-1)?.[0] ?? 0) + 1;
      const found = await this.bus.read(`TM_${run}_TASKS`, { seq, next_by_subj: `tm.${run}.task.fence` });
      if (!found) return;
      this.fences.push([Number(found.headers.get("Nats-Sequence")), Number(found.headers.get("Tm-Epoch"))]);
    }
  }
}

// --- engines

/** The engines of the run, from their live rows as they are written. */
class Engines {
  constructor(bus) {
    this.events = new EventEmitter().setMaxListeners(0);
    this.known = new Map();
    this.closing = false;
    bus.nc.subscribe(`$KV.TM_${bus.run}_live.engine.*`, { callback: (error, found) => error || this.heard(found) });
  }

  heard(found) {
    if (found.data.length) {
      const known = this.known.get(found.subject) ?? { inFlight: 0, failures: 0, restUntilMs: 0 };
      this.known.set(found.subject, Object.assign(known, { row: found.json(), heardMs: now() }));
    } else {
      this.known.delete(found.subject);
    }
    this.events.emit("change");
  }

  /** One that serves the version, the least busy; waited for, and taken: `inFlight` is one more. Throws NoEngine. */
  async take(minVersion, untilMs) {
    for (;;) {
      const able = [...this.known.values()].filter(
        ({ row, heardMs, restUntilMs }) =>
          row.address && row.phase === "serving" && row.version >= minVersion && now() - heardMs < DEAD_AFTER_MS && restUntilMs <= now(),
      );
      if (able.length) {
        const best = able.reduce((least, each) => (each.inFlight < least.inFlight ? each : least));
        best.inFlight += 1; // here: of several that one event wakes, each must see the one before
        return best;
      }
      if (this.closing || now() >= untilMs) throw new NoEngine(`no engine that serves version ${minVersion} or newer`);
      await wait(this.events, "change", untilMs - now());
    }
  }

  closeDown() {
    this.closing = true;
    this.events.emit("change");
  }

  rest(engine) {
    if (engine.restUntilMs > now()) return; // one death breaks many requests, and counts once
    engine.restUntilMs = now() + Math.min(REST_MS * 2 ** engine.failures++, REST_LIMIT_MS);
  }
}

/** One request to one engine; what an engine tells of a response. */
async function ask(engine, task, body, timeoutMs) {
  let answer;
  try {
    const request = { method: "POST", headers: { "content-type": "application/json" }, body: json(body), signal: AbortSignal.timeout(timeoutMs) };
    answer = await fetch(`${engine.row.address}/generate`, request);
  } catch (error) {
    const Kind = error.cause?.code === "ECONNREFUSED" || error.name === "TimeoutError" ? EngineAway : Error;
    throw new Kind(`${engine.row.id}: ${error.cause?.message ?? error.message}`);
  }
  const text = await answer.text();
  if (answer.ok) return JSON.parse(text);
  const reason = `${engine.row.id}: HTTP ${answer.status}: ${text.slice(0, 500)}`;
  if ([408, 429, 502, 503, 504].includes(answer.status)) throw new EngineAway(reason);
  throw Object.assign(new Error(reason), { hopeless: answer.status < 500 });
}

function requestOf(task, index, rid, leftMs) {
  const { seed, ...params } = task.sampling;
  const body = { rid, input_ids: task.prompt_tokens, sampling_params: params, return_logprob: true };
  if (seed !== null) body.sampling_params = { ...params, sampling_seed: BigInt(seed) + BigInt(index) };
  if (task.min_version > 0) Object.assign(body, { min_version: task.min_version, min_version_timeout_s: (0.9 * leftMs) / 1000 });
  return body;
}

function sampleOf(task, lease, index, answer, { actor, engine, queuedMs, generatingMs }) {
  const meta = answer.meta_info;
  const finish = meta.finish_reason?.type;
  if (!STATUS[finish]) throw new Error(`${engine}: broke off after ${answer.output_ids.length} tokens: finish ${finish}`);
  const { run, kind, prompt, label, metadata, sampling, group_size } = task;
  return {
    ...{ run, task: lease.id, index, group_size, attempt: lease.attempt, kind, prompt, label, metadata, sampling, actor, engine },
    tokens: [...task.prompt_tokens, ...answer.output_ids],
    response_length: answer.output_ids.length,
    response: answer.text,
    rollout_log_probs: meta.output_token_logprobs.map(([logProb]) => logProb),
    loss_mask: answer.output_ids.map(() => 1), // a single turn: the model sampled all of it
    spans: meta.weight_versions.map(({ version, start, end }) => [Number(version), end - start]),
    reward: 0,
    status: STATUS[finish],
    timings: { queued_s: queuedMs / 1000, generating_s: generatingMs / 1000, tools_s: 0, reward_s: 0 },
    finish_reason: finish,
    created_s: Date.now() / 1000,
  };
}

// --- the actor

class Actor {
  constructor(bus, id, config) {
    this.bus = bus;
    this.id = id;
    this.config = config;
    this.reward = rewards[config.reward];
    this.engines = new Engines(bus);
    this.needless = new Needless(bus);
    this.leases = new Map(); // lease -> number of its samples that are not done
    this.events = new EventEmitter();
    this.draining = false;
    this.counters = { samples_published: 0, tokens_generated: 0, tasks_done: 0, tasks_handed_back: 0, failures: 0, requests_aborted: 0 };
  }

  get held() {
    return [...this.leases.values()].reduce((sum, count) => sum + count, 0);
  }

  /** Work until told to drain, and until what is held is stored, handed back or failed. */
  async run() {
    await Promise.all(["train", "eval"].map((kind) => this.leaseAll(kind)));
    while (this.leases.size) await once(this.events, "change");
  }

  drain() {
    log("draining", { held: this.held });
    this.draining = true;
    this.engines.closeDown();
    this.events.emit("change");
  }

  /** Not drained in time: others shall have what is held, once no request of ours can be waiting for a task any more. */
  giveUp() {
    for (const lease of this.leases.keys()) lease.handBack(LEASE_WAIT_MS);
  }

  async leaseAll(kind) {
    const slot = new Slot(this.bus, kind);
    while (!this.draining) {
      if (this.held >= this.config.max_samples_in_flight) {
        await once(this.events, "change");
        continue;
      }
      const began = now();
      const found = await slot.next();
      if (found && this.draining) this.bus.say(found.reply, "-NAK");
      else if (found) await this.admit(new Lease(this.bus, found, this.config));
      else if (now() - began < LEASE_WAIT_MS / 2) await sleep(LEASE_WAIT_MS / 2); // no queue yet: do not spin
    }
  }

  async admit(lease) {
    if (await this.needless.holds(lease)) return this.bus.say(lease.reply, "+ACK");
    let task;
    try {
      task = decodeTask(lease.bytes);
    } catch (error) {
      return this.burying(lease, error.message, "");
    }
    if (lease.deliveries > MAX_DELIVERIES) return this.burying(lease, `delivered ${lease.deliveries} times, never settled`, task.prompt);
    return this.hold(lease, task.group_size, () => this.work(lease, task)); // not awaited: the next lease need not wait for it
  }

  burying(lease, reason, prompt) {
    this.hold(lease, 1, () => lease.bury(reason, lease.deliveries, this.id, prompt));
  }

  hold(lease, samples, work) {
    this.leases.set(lease, samples);
    lease.keep();
    work()
      .catch((error) => log("task left to others", { task: lease.id, error: error.message }))
      .finally(() => {
        lease.release();
        this.leases.delete(lease);
        this.events.emit("change");
      });
  }

  /** Make and store all samples of a task, and tell the queue how it ended. */
  async work(lease, task) {
    const indexes = Array.from({ length: task.group_size }, (_, index) => index);
    const ends = await Promise.allSettled(indexes.map((index) => this.sample(lease, task, index).finally(() => this.done(lease))));
    const reasons = ends.filter(({ status }) => status === "rejected").map(({ reason }) => reason);
    const failed = reasons.find((reason) => !(reason instanceof NoEngine));
    if (failed) {
      this.counters.failures += reasons.length;
      log("task failed", { task: lease.id, reason: failed.message });
      await lease.fail(`${reasons.length} of ${task.group_size} samples: ${failed.message}`, this.id, task.prompt);
    } else if (reasons.length) {
      this.counters.tasks_handed_back += 1;
      log("task handed back", { task: lease.id, reason: reasons[0].message });
      lease.handBack(this.draining ? 0 : 1000);
    } else {
      await lease.settle();
      this.counters.tasks_done += 1;
    }
  }

  done(lease) {
    this.leases.set(lease, this.leases.get(lease) - 1);
    this.events.emit("change");
  }

  async sample(lease, task, index) {
    const sample = await this.generate(lease, task, index);
    this.counters.tokens_generated += sample.response_length;
    sample.reward = this.reward(sample.response, sample.label, sample.status);
    checkSample(sample);
    await this.publish(sample);
    this.counters.samples_published += 1;
  }

  /** One response, on whatever engine there is. Throws NoEngine, or why trying on is no use. */
  async generate(lease, task, index) {
    const began = now();
    const untilMs = began + this.config.generate_timeout_s * 1000;
    for (let broken = 0; ; ) {
      const engine = await this.engines.take(task.min_version, untilMs);
      const asked = now();
      const rid = `${lease.id}.${index}.${lease.attempt}.${asked.toFixed(3)}`;
      try {
        const answer = await ask(engine, task, requestOf(task, index, rid, untilMs - asked), Math.max(1, Math.ceil(untilMs - asked)));
        const times = { queuedMs: asked - began, generatingMs: now() - asked };
        const sample = sampleOf(task, lease, index, answer, { actor: this.id, engine: engine.row.id, ...times });
        checkSample(sample);
        engine.failures = 0;
        return sample;
      } catch (error) {
        log("request broken", { task: lease.id, index, error: error.message });
        if (error.hopeless) throw error;
        this.engines.rest(engine);
        if (error instanceof EngineAway) continue;
        this.counters.requests_aborted += 1;
        if (++broken >= this.config.retries) throw error;
      } finally {
        engine.inFlight -= 1;
      }
    }
  }

  /** Published is what the server says is stored. */
  async publish(sample) {
    const payload = encodeSample(sample);
    const pieces = cut(payload, this.bus.nc.info.max_payload);
    if (!pieces) return this.bus.store(subjectOf(sample), payload, headersOf(sample));
    const seqs = [];
    for (const [number, piece] of pieces.entries()) {
      const id = { "Nats-Msg-Id": `${messageId(sample)}.chunk/${number}` };
      seqs.push(await this.bus.store(`tm.${sample.run}.part.${sample.kind}.${sample.task}`, piece, id));
    }
    const headers = { ...headersOf(sample), "Tm-Parts": `${pieces.length}` };
    return this.bus.store(`${subjectOf(sample)}.parts`, manifest(payload, seqs), headers);
  }

  /** What the live row says. */
  row() {
    const phase = this.draining ? "draining" : this.held ? "working" : "waiting";
    const who = { role: "actor", id: this.id, host: hostname(), pid: process.pid };
    const waits = { working: "", waiting: "a task", draining: `${this.held} samples` }[phase];
    return { ...who, phase, waits_for: waits, version: -1, epoch: 0, load: { ...this.counters, in_flight: this.held }, address: "" };
  }
}

/** The sections of the run's configuration that concern an actor, once the learner has written them. */
async function configOf(bus) {
  for (let waits = 0; ; waits++) {
    const config = await bus.row("run", "config").catch(() => null);
    if (config) return { ...config.bus, ...config.actor };
    if (waits % 20 === 0) log("waiting for the configuration of the run", { run: bus.run });
    await sleep(500);
  }
}

async function main() {
  const { values } = parseArgs({
    options: { bus: { type: "string" }, run: { type: "string" }, id: { type: "string" }, "drain-s": { type: "string", default: "30" } },
  });
  if (!values.bus || !values.run) throw new Error("usage: node actor.mjs --bus nats://host:port --run NAME [--id ID] [--drain-s 30]");
  const id = values.id ?? `js-${token(hostname())}-${process.pid}`;
  let actor = null;
  let signals = 0;
  const stop = () => {
    if (++signals > 1 || !actor) return void leave(actor);
    actor.drain();
    setTimeout(() => leave(actor), Number(values["drain-s"]) * 1000).unref();
  };
  for (const name of ["SIGTERM", "SIGINT"]) process.on(name, stop);

  log("connecting", { bus: values.bus });
  const nc = await connect({
    ...{ servers: values.bus, name: `actor ${id}`, waitOnFirstConnect: true },
    ...{ maxReconnectAttempts: -1, reconnectTimeWait: 200, reconnectJitter: 100, pingInterval: 5000 },
  });
  const bus = new Bus(nc, values.run);
  const config = await configOf(bus);
  if (!Object.hasOwn(rewards, config.reward)) throw new Error(`actor.reward: want ${Object.keys(rewards).join(" or ")}, got ${config.reward}`);
  actor = new Actor(bus, id, config);
  log("working", { run: bus.run, id, reward: config.reward });
  const live = `$KV.TM_${bus.run}_live.actor.${token(id)}`;
  const beating = setInterval(() => bus.say(live, JSON.stringify(actor.row())), HEARTBEAT_MS);
  await actor.run();
  clearInterval(beating);
  if (bus.connected) await bus.api(`STREAM.PURGE.KV_TM_${bus.run}_live`, { filter: live }).catch((error) => log("live row left behind", { error }));
  log("drained", actor.counters);
  process.exit(0);
}

/** Told twice, or not drained in time. */
async function leave(actor) {
  actor?.giveUp();
  if (actor?.bus.connected) await Promise.race([actor.bus.nc.flush(), sleep(1000)]);
  process.exit(actor ? NOT_IN_TIME : 0);
}

main().catch((error) => {
  console.error(`actor: ${error.message}`);
  process.exit(1);
});
