// Functions of the dashboard's page that need no document; `node --test`, started by tests/unit/test_page_static.py.

import assert from "node:assert/strict";
import { test } from "node:test";

import * as format from "./format.js";
import { nearest } from "./curves.js";
import { layFlow } from "./charts.js";
import { isOld } from "./flow.js";
import { Segments, phaseShares, useWords } from "./lanes.js";
import { search, smooth } from "./learning.js";
import { EmbeddedSource, filterWords, matcher } from "./source.js";
import { overlayValue } from "./sample.js";
import { findSettings } from "./setup.js";
import { toggleWord } from "./samples.js";

test("numbers have three significant digits, counts commas, undefined is no zero", () => {
  const cases = { 0: "0", 0.8123: "0.812", 12.345: "12.3", 1234: "1,234", 12_400: "12.4 k", 1_300_000: "1.30 M", 7.5e-8: "7.5e-8" };
  for (const [value, text] of Object.entries(cases)) assert.equal(format.num(Number(value)), text);
  assert.equal(format.num(-0.5), "-0.5");
  for (const value of [null, undefined, NaN, Infinity]) assert.equal(format.num(value), "—");
  assert.equal(format.count(999_999), "999,999");
  assert.equal(format.count(1_300_000), "1.30 M");
  assert.equal(format.percent(0.62), "62 %");
  assert.equal(format.percent(7e-5), "< 0.1 %");
  assert.equal(format.percent(0), "0 %");
});

test("durations and sizes", () => {
  const cases = [[0.0004, "0.4 ms"], [0.035, "35 ms"], [2.1, "2.1 s"], [41 * 60, "41 min"], [11_520, "3.2 h"], [null, "—"]];
  for (const [value, text] of cases) assert.equal(format.duration(value), text);
  assert.equal(format.bytes(1536), "1.5 KiB");
  assert.equal(format.bytes(12), "12 bytes");
});

test("control and bidirectional characters stand as escapes, line feeds and joiners stay", () => {
  assert.equal(format.visible("a\x1b[31mb\u202ec\u2066\u0000"), "a\\x1b[31mb\\u202ec\\u2066\\x00");
  assert.equal(format.visible("\ud800 \u{e0041}"), "\\ud800 \\u{e0041}");
  assert.equal(format.visible("line\n\ttab 👩‍💻 שלום ﷺ"), "line\n\ttab 👩‍💻 שלום ﷺ");
  assert.equal(format.visible(format.visible("\u2028")), "\\u2028");
  assert.equal(format.oneLine(""), "∅ empty");
  for (let code = 0; code < 0x2100; code++) {
    const shown = format.visible(String.fromCodePoint(code));
    assert.ok(!/[\p{Cc}\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]/u.test(shown.replace(/[\n\t]/, "")), code.toString(16));
  }
});

test("the use of all GPUs of a process, not of its first", () => {
  const devices = [{ utilisation: 0.87 }, { utilisation: 0.13 }, { utilisation: null }];
  assert.equal(useWords({ devices, cpu_share: 1 }), "GPU 50 % of 2");
  assert.equal(useWords({ devices: [devices[2], devices[0]], cpu_share: 1 }), "GPU 87 %");
  assert.equal(useWords({ devices: [], cpu_share: 1.5 }), "CPU 150 %");
});

test("links come back as they were written", () => {
  const hash = format.link("samples", "", { filter: 'reward=<0.5 text="a & b"', none: "" });
  assert.deepEqual(format.parseLink(hash), { page: "samples", value: "", query: { filter: 'reward=<0.5 text="a & b"' } });
  assert.deepEqual(format.parseLink("#sample=22664&t=120-180"), { page: "sample", value: "22664", query: { t: "120-180" } });
  assert.equal(format.parseLink("").page, "overview");
  assert.deepEqual(format.tokenRange("180-120"), [120, 180]);
  assert.deepEqual(format.tokenRange("7"), [7, 7]);
  assert.equal(format.tokenRange("x"), null);
});

test("reduced points keep spikes, holes and the order", () => {
  const points = Array.from({ length: 10_000 }, (_, step) => [step, step === 4_321 ? 99 : step === 7_000 ? null : Math.sin(step)]);
  const kept = format.reduce(points, 400);
  assert.ok(kept.length <= 1_200);
  assert.ok(kept.some((point) => point[1] === 99) && kept.some((point) => point[1] === null));
  assert.ok(kept.every((point, place) => !place || kept[place - 1][0] < point[0]));
});

test("an axis leaves outliers out, a constant has room", () => {
  const values = Array.from({ length: 200 }, (_, place) => Math.sin(place));
  assert.ok(format.axisRange([...values, 1_000])[1] < 2);
  assert.equal(format.axisRange([1, 2, 1_000])[1], 1_000);
  assert.deepEqual(format.axisRange([3, 3]), [1.5, 4.5]);
  assert.deepEqual(format.ticks(0, 1, 4), [0, 0.5, 1]);
});

test("the last ten steps decide about health", () => {
  const points = Array.from({ length: 30 }, (_, step) => [step, step < 5 ? 9 : 0.5]);
  assert.equal(format.judge(points, 0, 1).mark, "✓");
  assert.match(format.judge(points, 0, 1).text, /earlier/);
  points[29][1] = 2;
  assert.match(format.judge(points, 0, 1).text, /1 of the last 10/);
  const grows = Array.from({ length: 40 }, (_, step) => [step, step === 3 || step >= 22 ? 2 : 0.5]);
  assert.match(format.judge(grows, 0, 1).text, /^since step 22: 10 of the last 10/);
  assert.equal(format.judge(points, null, null).mark, "");
});

test("an item is put into its place, and replaces the one with its key", () => {
  const points = [[1, 5], [3, 6]];
  assert.deepEqual(format.addPoint(points, 2, 9), [[1, 5], [2, 9], [3, 6]]);
  assert.deepEqual(format.addPoint(points, 3, 0), [[1, 5], [2, 9], [3, 0]]);
  const long = Array.from({ length: 1_600 }, (_, step) => [step, 0]);
  const reduced = format.addPoint(long, 1_600, 7);
  assert.ok(reduced.length <= 1_600 && reduced.some(([, value]) => value === 7));
});

test("the nearest point of a curve", () => {
  const points = [[1, 0], [5, 0], [9, 0]];
  assert.deepEqual([0, 4, 6, 8, 99].map((step) => nearest(points, step)[0]), [1, 5, 5, 9, 9]);
  assert.equal(nearest([], 3), null);
});

test("bands of a flow are as wide as their numbers, and lie inside", () => {
  const nodes = [["a", 0, 100], ["b", 1, 90], ["c", 1, 10], ["d", 1, 0]].map(([id, column, value]) => ({ id, name: id, column, value }));
  const links = [["a", "b", 90], ["a", "c", 10], ["a", "d", 0]].map(([from, to, value]) => ({ from, to, value }));
  const { nodes: placed, bands } = layFlow(nodes, links, 800, 200);
  assert.equal(bands.length, 2);
  assert.ok(Math.abs(bands[0].size / bands[1].size - 9) < 1e-9);
  assert.ok(Object.values(placed).every((node) => node.y >= 0 && node.y + node.size <= 200));
  assert.equal(placed.d, undefined);
});

test("a segment that comes again replaces the earlier one, and shares add up to the time", () => {
  const segments = new Segments();
  segments.add([{ lane: "a", phase: "working", begin_s: 0, end_s: null }, { lane: "b", phase: "waiting", begin_s: 0, end_s: 10 }]);
  segments.add([{ lane: "a", phase: "working", begin_s: 0, end_s: 6 }, { lane: "a", phase: "down", begin_s: 6, end_s: null }]);
  assert.equal(segments.of("a").length, 2);
  const sums = phaseShares(segments, ["a", "b"], 0, 10, 5);
  const total = (sum) => sum.reduce((all, value) => all + value, 0);
  assert.deepEqual(sums.map(total).map(Math.round), [6, 10, 0, 0, 4]);
  segments.forget(7);
  assert.equal(segments.of("a").length, 1);
});

test("metrics are found by words and patterns", () => {
  const names = ["data/reward_mean", "eval/x", "eval/y", "train/entropy"];
  const metrics = names.map((name) => ({ name, meaning: name === "train/entropy" ? "mean entropy of the policy" : "" }));
  assert.deepEqual(search(metrics, "policy mean"), ["train/entropy"]);
  assert.deepEqual(search(metrics, "^eval/[xy]$"), ["eval/x", "eval/y"]);
  assert.doesNotThrow(() => search(metrics, "("));
});

test("smoothing keeps holes and begins without bias", () => {
  assert.deepEqual(smooth([[1, 5], [2, null], [3, 5]], 0.9).map(([, value]) => value && Math.round(value)), [5, null, 5]);
});

test("filters: words, quotes, toggling, and the rows of an exported file", async () => {
  assert.deepEqual(filterWords('reward=<0.5 text="two words"'), [["reward", "<0.5"], ["text", "two words"]]);
  assert.equal(toggleWord("lag=1 reward=0", "reward=0"), "lag=1");
  assert.equal(toggleWord('text="a b" reward=0', "reward=1"), 'text="a b" reward=1');
  const row = { seq: 9, task: 3, index: 1, reward: 0.5, lag: 1, status: "completed", versions: [2, 4], fate: "trained", prompt: "x", response: "y" };
  for (const word of ["reward=0.5", "reward=0.2..0.8", "lag=>=1", "task=3", "task=3.1", "version=3", "fate=trained", "text=Y"]) assert.ok(matcher(word)(row), word);
  for (const word of ["reward=<0.5", "lag=0", "task=3.2", "version=5", "status=failed"]) assert.ok(!matcher(word)(row), word);
  assert.throws(() => matcher("reward=high")(row), /want a number/);
  const rows = Array.from({ length: 250 }, (_, place) => ({ ...row, seq: 250 - place, reward: place % 2 }));
  const source = new EmbeddedSource({ exported: {}, answers: { "/api/samples": { rows }, "/api/series": { series: { a: [[1, 2]], b: [] } } } });
  const page = await source.get("samples", { filter: "reward=1", n: 100 });
  assert.equal(page.rows.length, 100);
  const last = await source.get("samples", { filter: "reward=1", n: 100, before: page.next });
  assert.deepEqual([last.rows.length, last.next], [25, null]);
  assert.deepEqual((await source.get("series", { names: "a" })).series, { a: [[1, 2]] });
  await assert.rejects(source.get("batch", { step: 3 }), /not in this file/);
});

test("overlays: five shades, both directions, nothing where nothing is recorded", () => {
  const tokens = { logprob: [-0.01, -3, null], train_logprob: [-0.2, null, -1], weight: [] };
  assert.deepEqual(tokens.logprob.map((value) => format.shade("probability", value)), [0, 3, 0]);
  assert.ok(Math.abs(overlayValue(tokens, "difference", 0) + 0.19) < 1e-9);
  assert.equal(overlayValue(tokens, "difference", 1), null);
  assert.equal(overlayValue(tokens, "weight", 0), null);
  assert.ok(format.shade("advantage", -1.5) < 0 && format.shade("weight", 0.3) < 0 && format.shade("weight", 1) === 0);
});

test("a check of a run that goes on is old after a minute", () => {
  const checked = { state: "checked", time_s: 100 };
  const at = (now_s, mode = "live") => ({ mode, now_s });
  assert.ok(!isOld(checked, at(130)) && isOld(checked, at(161)) && !isOld(checked, at(9_999, "ended")));
  assert.ok(isOld({ state: "failed" }, at(0)) && isOld(undefined, at(0)) && !isOld({ state: "running" }, at(9_999)));
});

test("a balance that is not known is neither good nor bad", () => {
  assert.deepEqual([true, false, null].map((value) => format.inUnit(value, "check")), ["✓ balance", "✕ no balance", "—"]);
});

test("settings: the changed ones, or those that have all words", () => {
  const settings = [["learner.steps", "200", "Batches of the run", true], ["seed", "0", "Seed of the run", false]].map(
    ([path, value, meaning, changed]) => ({ path, value, meaning, changed }),
  );
  const found = (text) => findSettings(settings, text).map(({ path }) => path);
  assert.deepEqual([" ", "run SEED", "batches 200", "run", "none"].map(found), [["learner.steps"], ["seed"], ["learner.steps"], ["learner.steps", "seed"], []]);
});
