// Curves over steps with healthy bands, intervals, outliers and a crosshair that all of them share.

import { axisRange, count, firstFrom, num, ticks, visible } from "./format.js";
import { Chart, drawSegment, ink, writeText } from "./canvas.js";

export const LEFT = 58;
export const BOTTOM = 20;
export const RIGHT = 10;
const TOP = 10;

// The step under the pointer, shared by all curves of a page.
const crosshair = { step: null, readers: new Set() };

function moveCrosshair(step) {
  if (crosshair.step === step) return;
  crosshair.step = step;
  for (const reader of crosshair.readers) reader.redraw();
}

/** Curves over steps. A line: `{name, hue, dash, points: [[step, value|null], …], area: [[step, low, high], …]}`. */
export class Curves extends Chart {
  lines = [];
  marks = []; // steps of pushes
  log = false;

  constructor(host, { height = 110, label, band, pick }) {
    super(host, { height, label });
    Object.assign(this, { band, onPick: pick });
    crosshair.readers.add(this);
  }

  left() {
    crosshair.readers.delete(this);
  }

  set(lines) {
    this.lines = lines;
    this.redraw();
  }

  scales(width, height) {
    const all = this.lines.flatMap((line) => line.points);
    const values = all.map((point) => point[1]).filter((value) => value != null && (!this.log || value > 0));
    const areas = this.lines.flatMap((line) => line.area ?? []).flatMap((area) => area.slice(1));
    const [low, high] = axisRange(this.log ? values.map(Math.log10) : values, this.log ? [] : areas);
    let [first, last] = [Infinity, -Infinity];
    for (const [step] of all) [first, last] = [Math.min(first, step), Math.max(last, step)];
    if (first === last) [first, last] = [first - 1, last + 1];
    const x = (step) => LEFT + ((step - first) / (last - first)) * (width - LEFT - RIGHT);
    const y = (value) => {
      const place = this.log ? Math.log10(value) : value;
      return height - BOTTOM - ((place - low) / (high - low)) * (height - BOTTOM - TOP);
    };
    const step = (px) => first + ((px - LEFT) / (width - LEFT - RIGHT)) * (last - first);
    return { x, y, step, low, high, first, last };
  }

  draw(g, width, height) {
    if (!this.lines.some((line) => line.points.length))
      return writeText(g, "no values yet", width / 2, height / 2, { align: "center" });
    const scales = this.scales(width, height);
    this.stepAt = scales.step;
    this.drawAxes(g, width, height, scales);
    g.save();
    g.beginPath();
    g.rect(LEFT, TOP - 3, width - LEFT - RIGHT + 3, height - BOTTOM - TOP + 6);
    g.clip();
    const outliers = [];
    for (const line of this.lines) this.drawLine(g, line, scales, outliers);
    g.restore();
    this.drawOutliers(g, outliers, width);
    return this.drawCrosshair(g, width, height, scales);
  }

  drawAxes(g, width, height, { x, y, low, high, first, last }) {
    if (this.band && !this.log) {
      const [least, most] = this.band;
      const top = most == null ? TOP : Math.max(TOP, Math.min(height - BOTTOM, y(most)));
      const bottom = least == null ? height - BOTTOM : Math.min(height - BOTTOM, Math.max(TOP, y(least)));
      g.globalAlpha = 0.13;
      g.fillStyle = ink("ok");
      g.fillRect(LEFT, top, width - LEFT - RIGHT, Math.max(0, bottom - top));
      g.globalAlpha = 1;
    }
    g.lineWidth = 1;
    g.strokeStyle = ink("line");
    for (const value of ticks(low, high, Math.min(6, height / 26))) {
      const place = Math.round(y(this.log ? 10 ** value : value)) + 0.5;
      drawSegment(g, LEFT, place, width - RIGHT, place);
      writeText(g, num(this.log ? 10 ** value : value), LEFT - 6, place, { align: "right", width: LEFT - 8 });
    }
    for (const step of ticks(first, last, Math.max(3, width / 60)).filter(Number.isInteger)) {
      writeText(g, num(step), Math.min(x(step), width - RIGHT - 8), height - 8, { align: "center" });
    }
    g.strokeStyle = ink("version");
    g.globalAlpha = 0.5;
    const marks = this.marks.filter((step) => first <= step && step <= last);
    for (const step of marks) drawSegment(g, x(step), height - BOTTOM, x(step), height - BOTTOM + 4);
    g.globalAlpha = 1;
  }

  drawLine(g, line, { x, y, low, high }, outliers) {
    const colour = ink(line.hue);
    if (line.area?.length) {
      g.globalAlpha = 0.18;
      g.fillStyle = colour;
      g.beginPath();
      for (const [step, least] of line.area) g.lineTo(x(step), y(least));
      for (const [step, , most] of [...line.area].reverse()) g.lineTo(x(step), y(most));
      g.fill();
      g.globalAlpha = 1;
    }
    g.strokeStyle = g.fillStyle = colour;
    g.lineWidth = 1.5;
    g.setLineDash(line.dash ?? []);
    g.beginPath();
    let joined = false;
    line.points.forEach(([step, value], place) => {
      const known = value != null && !(this.log && value <= 0);
      if (known) {
        const scaled = this.log ? Math.log10(value) : value;
        if (scaled > high || scaled < low) outliers.push([x(step), scaled > high, value]);
        g[joined ? "lineTo" : "moveTo"](x(step), y(value));
        if (!joined && line.points[place + 1]?.[1] == null) g.fillRect(x(step) - 1.5, y(value) - 1.5, 3, 3);
      }
      joined = known;
    });
    g.stroke();
    g.setLineDash([]);
    if (line.dots)
      for (const [step, value] of line.points) if (value != null) g.fillRect(x(step) - 2, y(value) - 2, 4, 4);
  }

  /** The values of the spikes that the axis leaves out: the largest few that have room. */
  drawOutliers(g, outliers, width) {
    const written = [];
    for (const [x, above, value] of outliers.sort((a, b) => Math.abs(b[2]) - Math.abs(a[2]))) {
      const text = `${above ? "▲" : "▼"} ${num(value)}`;
      const size = g.measureText(text).width;
      const left = Math.min(x, width - RIGHT - size);
      if (written.length === 3) break;
      if (written.some((other) => Math.abs(other - left) < size + 10)) continue;
      written.push(left);
      writeText(g, text, left, above ? TOP : this.height - BOTTOM - 8);
    }
  }

  drawCrosshair(g, width, height, { x, y, first, last }) {
    const step = crosshair.step;
    if (step == null || step < first || step > last) return;
    g.strokeStyle = ink("mute");
    g.lineWidth = 1;
    drawSegment(g, x(step), TOP, x(step), height - BOTTOM);
    const texts = [`step ${count(step)}`];
    for (const line of this.lines) {
      const point = nearest(line.points, step);
      if (!point || point[1] == null) continue;
      g.fillStyle = ink(line.hue);
      g.beginPath();
      g.arc(x(point[0]), Math.max(TOP, Math.min(height - BOTTOM, y(point[1]))), 3, 0, 7);
      g.fill();
      texts.push((this.lines.length > 1 ? `${line.name} ` : "") + num(point[1]));
    }
    const text = visible(texts.join("  "));
    const size = g.measureText(text).width + 10;
    const left = Math.max(LEFT, Math.min(width - RIGHT - size, x(step) - size / 2));
    g.fillStyle = ink("panel");
    g.globalAlpha = 0.92;
    g.fillRect(left, 0, size, 17);
    g.globalAlpha = 1;
    writeText(g, text, left + 5, 9, { colour: "ink" });
  }

  hover(x) {
    if (x == null || !this.stepAt) return moveCrosshair(null);
    const step = this.stepAt(x);
    const points = this.lines.map((line) => nearest(line.points, step)).filter(Boolean);
    points.sort((a, b) => Math.abs(a[0] - step) - Math.abs(b[0] - step));
    return moveCrosshair(points[0]?.[0] ?? null);
  }

  move(dx) {
    const steps = this.lines[0]?.points.map((point) => point[0]) ?? [];
    const place = crosshair.step == null ? steps.length - 1 : steps.indexOf(crosshair.step) + dx;
    moveCrosshair(steps[Math.max(0, Math.min(steps.length - 1, place))] ?? null);
  }

  pick() {
    if (crosshair.step != null) this.onPick?.(crosshair.step);
  }

  words() {
    const line = this.lines[0] ?? { points: [] };
    const points = line.points.filter((point) => point[1] != null);
    const every = Math.ceil(points.length / 9);
    const chosen = points.filter((_, place) => (points.length - 1 - place) % every === 0);
    const rows = chosen.map(([step, value]) => [count(step), num(value)]);
    const summary = rows.length ? `newest ${rows.at(-1)[1]} at step ${rows.at(-1)[0]}` : "";
    return { head: ["step", this.label], rows, summary };
  }
}

/** The point whose step is nearest; points are in the order of steps. */
export function nearest(points, step) {
  const place = firstFrom(points, step, (point) => point[0]);
  const [before, after] = [points[place - 1], points[place]];
  if (!before || !after) return before ?? after ?? null;
  return step - before[0] <= after[0] - step ? before : after;
}
