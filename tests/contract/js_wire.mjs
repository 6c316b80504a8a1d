// Run by test_js_wire.py beside the JavaScript actor's wire.mjs: a task on stdin (msgpack), what was made of it on stdout (JSON).

import { readFileSync } from "node:fs";
import { checkSample, cut, decodeTask, encodeSample, headersOf, json, manifest, subjectOf } from "./wire.mjs";

const task = decodeTask(readFileSync(0));
const { run, kind, prompt, label, metadata, sampling, group_size } = task;
const sample = {
  ...{ run, task: 2 ** 53 - 1, index: 1, group_size, attempt: "n0nce", kind, prompt, label, metadata, sampling },
  tokens: [...task.prompt_tokens, 7, 8, 9],
  response_length: 3,
  response: "tide – мельница 𝄞",
  rollout_log_probs: [-0.1, 0, -1e-40],
  loss_mask: [1, 0, 1],
  spans: [[3, 2], [4, 1]],
  reward: { score: 1, format: 0.25 },
  status: "completed",
  actor: "js.1",
  engine: "e1",
  timings: { queued_s: 0, generating_s: 0.5, tools_s: 0, reward_s: 1 },
  finish_reason: "stop",
  created_s: 1795000000.25,
};
const changes = {
  "as it is": {},
  index: { index: 2 },
  response_length: { response_length: 6 },
  "no context": { tokens: sample.tokens.slice(3) },
  rollout_log_probs: { rollout_log_probs: [-0.1, 0] },
  "rollout_log_probs[0]": { rollout_log_probs: [0.001, 0, -1] },
  "rollout_log_probs[1]": { rollout_log_probs: [-0.1, -0.5, -1] },
  "rollout_log_probs[2]": { rollout_log_probs: [-0.1, 0, -Infinity] },
  "loss_mask[1]": { loss_mask: [1, 2, 1] },
  "tokens[0]": { tokens: [-1, ...sample.tokens.slice(1)] },
  spans: { spans: [[3, 2]] },
  "spans of none": { spans: [[3, 3], [4, 0]] },
  reward: { reward: NaN },
  "reward beyond float32": { reward: 1e39 },
  "a part of the reward": { reward: { score: 1, length: -2e6 } },
  "the sum of the parts": { reward: { format: 7e5, length: 7e5 } },
  "no part": { reward: {} },
  "a log-prob of float32's end": { rollout_log_probs: [-3e38, 0, -1] },
  timings: { timings: { ...sample.timings, reward_s: Infinity } },
  created_s: { created_s: NaN },
};
const tried = Object.entries(changes).map(([name, change]) => {
  const changed = { ...sample, ...change };
  let reason = "";
  try {
    checkSample(changed);
  } catch (error) {
    reason = error.message;
  }
  return { name, reason, payload: Buffer.from(encodeSample(changed)).toString("hex") };
});
const payload = encodeSample(sample);
const pieces = cut(payload, 1024 + 100);
console.log(
  JSON.stringify({
    subject: subjectOf(sample),
    headers: headersOf(sample),
    tried,
    pieces: pieces.map((piece) => Buffer.from(piece).toString("hex")),
    manifest: Buffer.from(manifest(payload, pieces.map((_, number) => 2 ** 32 + number))).toString("hex"),
    seed: json({ seed: BigInt(sampling.seed) + 1n }),
  }),
);
