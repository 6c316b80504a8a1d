// The queue and the streams of docs/wire.md: leases, publishing until stored, single messages, rows. Knows no engine.

import { randomBytes } from "node:crypto";
import { EventEmitter, once } from "node:events";
import { createInbox, headers as natsHeaders } from "@nats-io/transport-node";
import { message } from "./wire.mjs";

const ANSWER_MS = 5000;
export const LEASE_WAIT_MS = 1000;
const LEASE_GRACE_MS = 500;
const LOOK_EVERY_MS = 2000; // how old our knowledge of the task floor and of fences may be
const INCURABLE = new Set([10054, 10071, 10164]); // too large; another message stands where this one was to stand

class Refused extends Error {
  constructor(subject, { err_code: code, description }) {
    super(`${subject}: ${description} (${code})`);
    this.code = code;
  }
}

export const sleep = (ms) => new Promise((resolve) => setTimeout(resolve, ms));
export const now = () => performance.now();

export function log(event, fields = {}) {
  const said = Object.entries(fields).map(([name, value]) => `${name}=${value}`);
  console.error([new Date().toISOString(), event, ...said].join(" "));
}

/** Wait for an event at most so long. */
export async function wait(emitter, event, ms) {
  await once(emitter, event, { signal: AbortSignal.timeout(Math.max(1, Math.ceil(ms))) }).catch(() => {});
}

export class Bus {
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

/** One waiting worker: a subject of its own, and at most one request at the server. */
export class Slot {
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

export class Lease {
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

  nak(delayMs = 0) {
    this.bus.say(this.reply, delayMs ? `-NAK ${JSON.stringify({ delay: delayMs * 1e6 })}` : "-NAK");
  }

  /** Tried for one lease; if the server never hears it, the task comes again, and what is made twice is a duplicate. */
  async ack() {
    for (const deadline = now() + this.config.lease_s * 1000; now() < deadline; await sleep(100)) {
      try {
        return void (await this.bus.request(this.reply, "+ACK"));
      } catch (error) {
        log("task not acknowledged yet", { task: this.id, error: error.message });
      }
    }
  }

  async fail(reason, actor, of) {
    const subject = `tm.${this.bus.run}.dead.report.${this.id}`;
    const task = BigInt(this.id);
    const report = message("report", { task, reason, actor, attempt: this.attempt });
    await this.bus.store(subject, report, { "Nats-Msg-Id": `report.${this.id}.${this.attempt}` });
    const { state } = await this.bus.api(`STREAM.INFO.TM_${this.bus.run}_DEAD`, { subjects_filter: subject });
    const attempts = state.subjects?.[subject] ?? 0;
    if (attempts < this.config.max_attempts) return this.nak();
    return this.bury(reason, attempts, actor, of);
  }

  /** `of`: the task, null when it could not be read. */
  async bury(reason, attempts, actor, of) {
    log("task is dead", { task: this.id, reason });
    const { prompt = "", reissues = 0, prompt_epoch = 0, offset = 0 } = of ?? {};
    const root = BigInt(of === null ? -1 : (of.reissue_of ?? this.id)); // the prompt's place: it may be issued again
    const dead = message("dead", { task: BigInt(this.id), reason, attempts, actor, prompt, root, reissues, prompt_epoch, offset });
    const headers = { "Nats-Msg-Id": `dead.${this.id}`, "Nats-Expected-Last-Subject-Sequence": "0" };
    try {
      await this.bus.store(`tm.${this.bus.run}.dead.task.${this.id}`, dead, headers);
    } catch (error) {
      if (error.code !== 10071 && error.code !== 10164) throw error; // else it is dead already
    }
    await this.ack();
  }
}

/** Which tasks need no work: those below the floor, and those of a learner that was replaced. */
export class Needless {
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
