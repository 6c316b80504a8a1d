// A lane per process over time: phases by hue and pattern, pushes as lines through all lanes.

import { bytes, clock, count, duration, firstFrom, insert, joinWords, num, percent, ticks, visible } from "./format.js";
import { Chart, hatch, drawSegment, ink, writeText } from "./canvas.js";

const ROW = 16;
const GROUP = 20; // height of a group's heading
const STACK = 46; // height of a group that is drawn as shares
const AXIS = 22;
const NAMES = 112;
const FACTS = 214; // right column; left out where the page is narrow
const NARROW_LANES = 700;
export const MOST_LANES = 80;
const KEPT_S = 3_600;
export const SILENT_S = 10; // without a heartbeat, which comes each second
const STEPS_S = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600];

export const PHASES = ["working", "waiting", "updating", "draining", "down"];
const PATTERN = { updating: "version", draining: "warn", down: "bad" };

/** Segments by lane in the order of time; a segment that comes again replaces the earlier one. */
export class Segments {
  lanes = new Map();

  add(segments) {
    for (const segment of segments) {
      if (!this.lanes.has(segment.lane)) this.lanes.set(segment.lane, []);
      insert(this.of(segment.lane), segment, (item) => item.begin_s);
    }
  }

  /** Forget what ended before `second`. */
  forget(second) {
    for (const [name, lane] of this.lanes) lane.splice(0, this.firstAfter(name, second));
  }

  of(lane) {
    return this.lanes.get(lane) ?? [];
  }

  /** The place of the first segment of a lane that ends behind `second`. */
  firstAfter(lane, second) {
    return firstFrom(this.of(lane), second, (segment) => segment.end_s ?? Infinity);
  }
}

/** Seconds of each phase in each of `bins` parts of a time, over several lanes: `[phase][bin]`. Pure. */
export function phaseShares(segments, lanes, begin, end, bins) {
  const sums = PHASES.map(() => new Float32Array(bins));
  const width = (end - begin) / bins;
  for (const lane of lanes) {
    const list = segments.of(lane);
    for (let place = segments.firstAfter(lane, begin); place < list.length && list[place].begin_s < end; place++) {
      const sum = sums[PHASES.indexOf(list[place].phase)] ?? sums[1];
      const [first, last] = [Math.max(begin, list[place].begin_s), Math.min(end, list[place].end_s ?? end)];
      for (let bin = Math.floor((first - begin) / width); bin < bins && begin + bin * width < last; bin++) {
        sum[bin] += Math.max(0, Math.min(last, begin + (bin + 1) * width) - Math.max(first, begin + bin * width));
      }
    }
  }
  return sums;
}

/** The lanes of a fleet. `set` takes what `/api/fleet` answers, `add` what `/events` brings. */
export class Lanes extends Chart {
  lanes = [];
  pushes = [];
  segments = new Segments();
  now = 0;
  span = 600; // seconds that are shown
  shift = 0; // seconds from their end to now
  place = null; // under the pointer
  opened = new Set(); // roles

  constructor(host, { label, pick }) {
    super(host, { height: 120, label, says: true });
    this.onPick = pick;
    this.canvas.addEventListener("wheel", (event) => this.wheel(event), { passive: false });
    this.canvas.addEventListener("keydown", (event) => {
      if (event.key === "+" || event.key === "-") this.zoom(event.key === "+" ? 0.7 : 1.4);
    });
  }

  set({ now_s, lanes, segments, pushes }) {
    this.segments = new Segments();
    this.pushes = [];
    this.lanes = lanes;
    const begin = Math.min(...segments.map((segment) => segment.begin_s), now_s);
    this.span = Math.max(20, Math.min(600, now_s - begin));
    this.add({ now_s, segments, pushes });
  }

  add({ now_s, segments = [], pushes = [], lanes }) {
    this.now = Math.max(this.now, now_s ?? 0);
    this.segments.add(segments);
    this.segments.forget(this.now - KEPT_S);
    this.pushes = [...this.pushes, ...pushes].slice(-400);
    if (lanes) this.lanes = lanes;
    this.arrange();
    this.redraw();
  }

  /** Put lanes under their roles; with more than 80 of them a role is one stack, and a click opens it. */
  arrange() {
    const many = this.lanes.length > MOST_LANES;
    this.rows = [];
    let y = 0;
    const add = (row) => {
      this.rows.push({ ...row, y });
      y += row.height;
    };
    for (const [role, lanes] of Map.groupBy(this.lanes, (lane) => lane.role)) {
      const collapsed = many && lanes.length > 4 && !this.opened.has(role);
      add({ height: GROUP, role, lanes, heading: true, collapsed });
      if (collapsed) add({ height: STACK, role, lanes, collapsed });
      else for (const lane of lanes) add({ height: ROW, role, lane });
    }
    this.height = y + AXIS;
  }

  /** Show the last `seconds`, or those around the time at `x`. */
  zoom(factor, x) {
    const middle = x == null ? this.end : this.timeAt(x);
    const span = Math.max(2, Math.min(KEPT_S, this.span * factor));
    const end = middle + (this.end - middle) * (span / this.span);
    this.shift = Math.max(0, this.now - end);
    this.span = span;
    this.redraw();
  }

  wheel(event) {
    if (!event.ctrlKey && !event.shiftKey) return;
    event.preventDefault();
    if (event.ctrlKey) return this.zoom(event.deltaY > 0 ? 1.25 : 0.8, event.offsetX);
    this.shift = Math.max(0, this.shift - ((event.deltaY || event.deltaX) / 600) * this.span);
    return this.redraw();
  }

  draw(g, width) {
    if (!this.lanes.length) return writeText(g, "no process has sent a heartbeat in the last hour", 0, 12);
    const facts = width < NARROW_LANES ? 0 : FACTS;
    const right = width - facts - 6;
    this.end = this.now - this.shift;
    this.begin = this.end - this.span;
    this.timeAt = (x) => this.begin + ((x - NAMES) / (right - NAMES)) * this.span;
    const x = (time) => NAMES + ((time - this.begin) / this.span) * (right - NAMES);
    Object.assign(this, { x, right });
    for (const row of this.rows) {
      if (row.heading) this.drawHeading(g, row);
      else if (row.collapsed) this.drawStack(g, row);
      else this.drawLane(g, row, facts ? right : null);
    }
    this.drawPushes(g);
    const step = STEPS_S.find((seconds) => (seconds / this.span) * (right - NAMES) > 78) ?? 3_600;
    for (const time of ticks(Math.ceil(this.begin / step), Math.floor(this.end / step), 400).filter(Number.isInteger)) {
      writeText(g, clock(time * step), x(time * step), this.height - 9, { align: "center" });
    }
  }

  drawHeading(g, row) {
    const mark = this.lanes.length <= MOST_LANES ? "" : row.collapsed ? "▸ " : "▾ ";
    writeText(g, visible(`${mark}${row.role} (${row.lanes.length})`), 0, row.y + 12, { colour: "ink" });
  }

  drawLane(g, { y, lane }, facts) {
    const colour = lane.trouble ? "bad" : "mute";
    writeText(g, visible(lane.id), NAMES - 6, y + ROW / 2, { align: "right", width: NAMES - 8, colour });
    const list = this.segments.of(lane.lane);
    let [drawn, last] = [-1, ""];
    for (let place = this.segments.firstAfter(lane.lane, this.begin); place < list.length; place++) {
      const segment = list[place];
      if (segment.begin_s > this.end) break;
      const left = Math.max(NAMES, this.x(segment.begin_s));
      const right = Math.min(this.right, this.x(segment.end_s ?? this.now));
      if (right - drawn < 0.4 && segment.phase === last) continue; // thinner than a pixel, as its neighbour
      this.fill(g, segment.phase, segment.version);
      g.fillRect(left, y + 2, Math.max(0.5, right - left), ROW - 4);
      [drawn, last] = [right, segment.phase];
    }
    g.globalAlpha = 1;
    if (facts == null) return;
    const silent = lane.silent_s > SILENT_S && `silent ${duration(lane.silent_s)}`;
    const pace = lane.tokens_per_second ? `${num(lane.tokens_per_second)} tok/s` : lane.phase;
    const state = lane.trouble ? "△ trouble" : silent || pace;
    const version = lane.version != null && `v${lane.version}`;
    const words = [version, state, lane.restarts > 0 && `↻ ${lane.restarts}`, useWords(lane)];
    const text = visible(words.filter(Boolean).join("  "));
    writeText(g, text, facts + 10, y + ROW / 2, { colour, width: FACTS - 8 });
  }

  /** Working is solid, lighter for every other version; the rest by pattern, so that a hue alone decides nothing. */
  fill(g, phase, version) {
    g.globalAlpha = phase === "working" ? (version % 2 ? 0.62 : 0.95) : phase === "waiting" ? 0.35 : 1;
    g.fillStyle = PATTERN[phase] ? hatch(g, PATTERN[phase]) : ink(phase === "working" ? "version" : "mute");
    if (phase === "waiting") g.fillStyle = ink("line");
  }

  drawStack(g, row) {
    const bins = Math.max(1, Math.floor((this.right - NAMES) / 3));
    const end = Math.min(this.end, this.now);
    const names = row.lanes.map((lane) => lane.lane);
    const sums = phaseShares(this.segments, names, this.begin, end, bins);
    const whole = (this.span / bins) * row.lanes.length;
    for (let bin = 0; bin < bins; bin++) {
      let y = row.y + STACK - 4;
      PHASES.forEach((phase, place) => {
        const size = (sums[place][bin] / whole) * (STACK - 6);
        if (size <= 0) return;
        this.fill(g, phase, 0);
        g.fillRect(NAMES + bin * 3, y - size, 3, size);
        y -= size;
      });
    }
    g.globalAlpha = 1;
    const troubled = row.lanes.filter((lane) => lane.trouble || lane.phase === "down").length;
    const [text, colour] = troubled ? [`△ ${troubled} in trouble`, "bad"] : ["share of time", "mute"];
    writeText(g, text, NAMES - 6, row.y + STACK / 2, { align: "right", colour });
  }

  drawPushes(g) {
    g.strokeStyle = g.fillStyle = ink("version");
    g.lineWidth = 1;
    let free = NAMES;
    for (const push of this.pushes) {
      const place = this.x(push.time_s);
      if (place < NAMES || place > this.right) continue;
      g.globalAlpha = 0.45;
      drawSegment(g, Math.round(place) + 0.5, GROUP - 4, Math.round(place) + 0.5, this.height - AXIS);
      g.globalAlpha = 1;
      if (place < free) continue;
      writeText(g, `v${push.version}`, place + 2, 9, { colour: "version" });
      free = place + 44;
    }
  }

  find(x, y) {
    const row = this.rows?.find((item) => y >= item.y && y < item.y + item.height);
    if (!row || x > this.right) return { row };
    const time = this.timeAt(x);
    const push = this.pushes.find((item) => Math.abs(this.x(item.time_s) - x) < 3);
    const there = (item) => item.begin_s <= time && time <= (item.end_s ?? this.now);
    const segment = row.lane && this.segments.of(row.lane.lane).find(there);
    return { row, segment, push: y < GROUP || !segment ? push : null };
  }

  hover(x, y) {
    this.place = x == null ? null : [x, y];
    const { row, segment, push } = this.place ? this.find(x, y) : {};
    if (push) this.say(pushWords(push));
    else if (segment) this.say(segmentWords(segment, this.now));
    else this.say(row?.lane?.trouble ? `${row.lane.lane}: ${row.lane.trouble}` : "");
  }

  pick(x, y) {
    const { row, segment, push } = this.find(x ?? this.place?.[0], y ?? this.place?.[1]);
    if (row?.heading || row?.collapsed) {
      if (!this.opened.delete(row.role)) this.opened.add(row.role);
      this.arrange();
      this.redraw();
    } else if (segment || push) this.onPick?.(row, segment, push);
  }

  move(dx) {
    this.shift = Math.max(0, this.shift - (dx * this.span) / 10);
    this.redraw();
  }

  words() {
    const version = (lane) => (lane.version == null ? "—" : `v${lane.version}`);
    const rows = this.lanes.map((lane) => [lane.lane, lane.phase, version(lane), lane.trouble || "none"]);
    return { head: ["process", "phase", "version", "trouble"], rows, summary: `${rows.length} processes` };
  }
}

/** The mean use of the GPUs of a process that have a number, else that of the processor. */
export function useWords({ devices, cpu_share: cores }) {
  const shares = devices.map(({ utilisation }) => utilisation).filter((share) => share != null);
  const mean = shares.reduce((sum, share) => sum + share / shares.length, 0);
  if (!shares.length) return `CPU ${percent(cores)}`;
  return `GPU ${percent(mean)}${shares.length > 1 ? ` of ${shares.length}` : ""}`;
}

function pushWords({ version, seconds, stall_seconds: stall, bytes: size, engines }) {
  const time = `${duration(seconds)}, stall ${duration(stall)}`;
  return `push of v${version} · ${time} · ${bytes(size)} · ${count(engines)} engines`;
}

function segmentWords({ lane, phase, words, version, begin_s: begin, end_s: end }, now) {
  const time = [duration((end ?? now) - begin), `since ${clock(begin)}`];
  return joinWords(lane, phase, words, ...time, version != null && `v${version}`);
}
