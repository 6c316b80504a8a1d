// Messages of docs/wire.md as bytes and headers. Knows no connection and no engine.
//
// Integers of 64 bits are BigInt, both ways: msgpack's own numbers would turn into floats beyond 2^32, and lose digits beyond 2^53.

import { createHash } from "node:crypto";
import { decode, encode } from "@msgpack/msgpack";

const SCHEMA = 1;
const BIG = { useBigInt64: true };
const HEADER_RESERVE_BYTES = 1024;
const LOG_PROB_SLACK = 1e-5; // rounding of a probability of 1
const MIN_LOG_PROB = -700;
const MAX_REWARD = 1e6;
const MAX_SECONDS = 1e10;
const TASK_FIELDS = ["run", "epoch", "prompt", "prompt_tokens", "group_size", "sampling", "prompt_epoch", "offset"];
const SAMPLING = { temperature: 1, top_p: 1, top_k: -1, max_new_tokens: 128, stop: [], stop_token_ids: [], seed: null };
const TASK = { kind: "train", label: null, metadata: {}, min_version: 0 };

export const i4 = (values) => packed(values, 4, "setInt32");
export const f4 = (values) => packed(values, 4, "setFloat32");
export const u1 = (values) => Uint8Array.from(values);

/** Numbers as raw little-endian bytes, whatever this machine's own order is. */
function packed(values, size, set) {
  const view = new DataView(new ArrayBuffer(values.length * size));
  values.forEach((value, place) => view[set](place * size, value, true));
  return new Uint8Array(view.buffer);
}

function i4Values(bytes) {
  const view = new DataView(bytes.buffer, bytes.byteOffset, bytes.byteLength);
  return Array.from({ length: bytes.byteLength / 4 }, (_, place) => view.getInt32(place * 4, true));
}

/** The msgpack map of one message, `schema` and `type` in front. */
export const message = (type, fields) => encode({ schema: SCHEMA, type, ...fields }, BIG);

/** A task with its defaults, `prompt_tokens` as an array of numbers. Throws for what is not one. */
export function decodeTask(bytes) {
  const fields = decode(bytes, BIG);
  if (fields?.schema !== SCHEMA || fields.type !== "task") {
    throw new Error(`task: want schema ${SCHEMA} and type task, got ${fields?.schema} and ${fields?.type}`);
  }
  const missing = TASK_FIELDS.filter((name) => fields[name] === undefined);
  if (missing.length) throw new Error(`task: want ${missing.join(", ")}, which it has not`);
  const strange = Object.keys(fields.sampling).filter((name) => !(name in SAMPLING));
  if (strange.length) throw new Error(`task.sampling: want ${Object.keys(SAMPLING).join(", ")}, got ${strange.join(", ")}`);
  return { ...TASK, ...fields, sampling: { ...SAMPLING, ...fields.sampling }, prompt_tokens: i4Values(fields.prompt_tokens) };
}

/** A sample as it is kept here: plain arrays for `tokens`, `rollout_log_probs` and `loss_mask`. */
export function encodeSample(sample) {
  return message("sample", {
    ...sample,
    task: BigInt(sample.task),
    tokens: i4(sample.tokens),
    rollout_log_probs: f4(sample.rollout_log_probs),
    loss_mask: u1(sample.loss_mask),
  });
}

/** Throws naming the invariant that a sample breaks. (The learner knows the size of the vocabulary; an actor need not.) */
export function checkSample(sample) {
  const { tokens, response_length: length, rollout_log_probs: logProbs, loss_mask: mask, spans } = sample;
  const want = (holds, text) => {
    if (!holds) throw new Error(`sample ${messageId(sample)}: want ${text}`);
  };
  want(sample.index >= 0 && sample.index < sample.group_size, "0 <= index < group_size");
  want(length <= tokens.length, `response_length <= ${tokens.length}`);
  want(length === 0 || length < tokens.length, "a token of context before the response");
  want(logProbs.length === length && mask.length === length, `a log-prob and a mask for each of ${length} tokens`);
  want(tokens.every((id) => Number.isInteger(id) && id >= 0), "token ids >= 0");
  want(mask.every((each) => each === 0 || each === 1), "a mask of 0 and 1");
  want(logProbs.every((each) => each >= MIN_LOG_PROB && each <= LOG_PROB_SLACK), `log-probs from ${MIN_LOG_PROB} to 0`);
  want(logProbs.every((each, place) => mask[place] === 1 || each === 0), "log-prob 0 where the mask is 0");
  want(spans.every(([version, count]) => version >= 0 && count >= 1), "spans of version >= 0 and at least one token");
  want(spans.reduce((sum, [, count]) => sum + count, 0) === length, `spans that sum to ${length}`);
  const numbers = typeof sample.reward === "number" ? [sample.reward] : Object.values(sample.reward);
  want(numbers.length > 0 && [...numbers, score(sample.reward)].every((each) => Math.abs(each) <= MAX_REWARD), "a reward within +-1e6");
  const seconds = [...Object.values(sample.timings), sample.created_s];
  want(seconds.every((each) => Math.abs(each) <= MAX_SECONDS), "times within +-1e10 seconds");
}

/** The scalar that is trained on: the reward, or of a map its part `score`, else `reward`, else the sum. */
export function score(reward) {
  if (typeof reward === "number") return reward;
  return reward.score ?? reward.reward ?? Object.values(reward).reduce((sum, part) => sum + part, 0);
}

export const messageId = (sample) => `${sample.task}.${sample.index}.${sample.attempt}`;
export const token = (text) => text.replace(/[^A-Za-z0-9_-]/g, "_") || "_";
export const subjectOf = (sample) =>
  `tm.${sample.run}.sample.${sample.kind}.${oldest(sample) ?? "none"}.${token(sample.actor)}`;

export function headersOf(sample) {
  const newest = sample.spans.length ? Math.max(...sample.spans.map(([version]) => version)) : null;
  const sampled = sample.loss_mask.filter((each) => each === 1).length;
  return {
    "Nats-Msg-Id": messageId(sample),
    "Tm-Sample": [
      `group=${sample.group_size}`,
      `versions=${newest === null ? "none" : `${oldest(sample)}-${newest}`}`,
      `reward=${score(sample.reward)}`,
      `status=${sample.status}`,
      `tokens=${sample.response_length}`,
      ...(sampled === sample.response_length ? [] : [`sampled=${sampled}`]),
      ...(/^[\x21-\x7e]{1,200}$/.test(sample.engine) ? [`engine=${sample.engine}`] : []),
    ].join(" "),
  };
}

const oldest = (sample) => (sample.spans.length ? Math.min(...sample.spans.map(([version]) => version)) : null);

/** Pieces of a payload that is too large for one message; null when it fits. */
export function cut(payload, maxPayload) {
  const size = maxPayload - HEADER_RESERVE_BYTES;
  if (payload.length <= size) return null;
  return Array.from({ length: Math.ceil(payload.length / size) }, (_, part) => payload.subarray(part * size, (part + 1) * size));
}

/** What stands in the stream for a payload whose pieces are stored at `seqs`. */
export const manifest = (payload, seqs) =>
  message("parts", { seqs: seqs.map(BigInt), length: payload.length, sha256: createHash("sha256").update(payload).digest("hex") });

/** JSON with integers of any size (JSON.stringify refuses BigInt). */
export function json(value) {
  if (typeof value === "bigint") return `${value}`;
  if (Array.isArray(value)) return `[${value.map(json).join(",")}]`;
  if (value === null || typeof value !== "object") return JSON.stringify(value);
  return `{${Object.entries(value).map(([key, item]) => `${JSON.stringify(key)}:${json(item)}`).join(",")}}`;
}
