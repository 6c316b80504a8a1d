// A Tidemill actor: leases tasks, asks engines, scores, publishes, settles. Everything it does is said in docs/wire.md, step by step.
//
//   TASKS --lease--> n x engine --> reward --> SAMPLES      settled when all n are stored
//                       |             +-- fails: a report in DEAD, and the task is handed back (the last report makes it dead)
//                       +-- no engine: the task is handed back
//
// Keeps nothing: what it holds when it is killed goes to another actor when the lease runs out, and what is made twice counts once.

import { EventEmitter, once } from "node:events";
import { hostname } from "node:os";
import { parseArgs } from "node:util";
import { connect } from "@nats-io/transport-node";
import { Bus, Lease, LEASE_WAIT_MS, log, Needless, now, sleep, Slot, wait } from "./bus.mjs";
import { checkSample, cut, decodeTask, encodeSample, headersOf, json, manifest, messageId, subjectOf, token } from "./wire.mjs";

const HEARTBEAT_MS = 1000;
const DEAD_AFTER_MS = 5000; // an engine whose row is not written for so long is gone
const REST_MS = 500; // pause for an engine that broke a request, doubled with each in a row
const REST_LIMIT_MS = 10_000;
const MAX_DELIVERIES = 50;
const STATUS = { stop: "completed", length: "truncated" };
const NOT_IN_TIME = 75;

class NoEngine extends Error {} // not the task's fault
class EngineAway extends Error {} // it does not serve now: ask another

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
    const known = this.known.get(found.subject) ?? { inFlight: 0, failures: 0, restUntilMs: 0 };
    try {
      this.known.set(found.subject, Object.assign(known, { row: JSON.parse(found.string()), heardMs: now() }));
    } catch {
      this.known.delete(found.subject); // deleted by a foreign tool, or not understood
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
    const headers = { "content-type": "application/json" };
    const signal = AbortSignal.timeout(timeoutMs);
    answer = await fetch(`${engine.row.address}/generate`, { method: "POST", headers, body: json(body), signal });
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
    this.maxHeld = config.max_samples_in_flight === "auto" ? 64 : config.max_samples_in_flight;
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
    for (const lease of this.leases.keys()) lease.nak(LEASE_WAIT_MS);
  }

  async leaseAll(kind) {
    const slot = new Slot(this.bus, kind);
    while (!this.draining) {
      if (this.held >= this.maxHeld) {
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
      return this.burying(lease, error.message, null);
    }
    if (lease.deliveries > MAX_DELIVERIES) return this.burying(lease, `delivered ${lease.deliveries} times, never acknowledged`, task);
    return this.hold(lease, task.group_size, () => this.work(lease, task)); // not awaited: the next lease need not wait for it
  }

  burying(lease, reason, of) {
    this.hold(lease, 1, () => lease.bury(reason, lease.deliveries, this.id, of));
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
      await lease.fail(`${reasons.length} of ${task.group_size} samples: ${failed.message}`, this.id, task);
    } else if (reasons.length) {
      this.counters.tasks_handed_back += 1;
      log("task returned to the queue", { task: lease.id, reason: reasons[0].message });
      lease.nak(this.draining ? 0 : 1000);
    } else {
      await lease.ack();
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
  if (!Object.hasOwn(rewards, config.reward)) {
    throw new Error(`actor.reward: want ${Object.keys(rewards).join(" or ")}, got ${config.reward}`);
  }
  if ((config.sample_shards ?? 1) > 1) throw new Error(`bus.sample_shards: want 1, got ${config.sample_shards}`);
  actor = new Actor(bus, id, config);
  log("working", { run: bus.run, id, reward: config.reward });
  const live = `$KV.TM_${bus.run}_live.actor.${token(id)}`;
  let stored = Promise.resolve();
  const beat = () => {
    if (bus.connected) stored = bus.request(live, JSON.stringify(actor.row())).catch(() => {}); // the next one has all that this one had
  };
  const beating = setInterval(beat, HEARTBEAT_MS);
  await actor.run();
  clearInterval(beating);
  await stored; // a row under way could be stored behind its own removal
  if (bus.connected) {
    await bus.api(`STREAM.PURGE.KV_TM_${bus.run}_live`, { filter: live }).catch((error) => log("live row not removed", { error }));
  }
  log("drained", actor.counters);
  process.exit(0);
}

/** Told twice, or not drained in time. */
async function leave(actor) {
  actor?.giveUp();
  if (actor?.bus.connected) await Promise.race([actor.bus.nc.flush(), sleep(10_000)]);
  process.exit(actor ? NOT_IN_TIME : 0);
}

main().catch((error) => {
  console.error(`actor: ${error.message}`);
  process.exit(1);
});
