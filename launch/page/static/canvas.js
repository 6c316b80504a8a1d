// A canvas in a panel: size, theme, one draw per frame, pointer and keyboard, and words for those who cannot see it.

import { visible } from "./format.js";
import { el, table } from "./dom.js";

const ARROWS = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
const LARGEST_STEP = 10; // places that an arrow moves with Shift
const FRAME_MS = 8; // of the 16 of a frame
const WORDS_EVERY_MS = 5_000; // the hidden table is written this often at most

const colours = new Map();
const waiting = new Set(); // charts to be drawn
const unwritten = new Set(); // charts whose hidden table is old
const charts = new Set();
let probe = null;
let observers = null;

/** A colour of app.css as it is in the current theme: `ink("version")`. */
export function ink(name) {
  if (!colours.has(name)) {
    if (!probe) document.body.append((probe = el("i", { hidden: true })));
    probe.style.color = `var(--${name})`;
    colours.set(name, getComputedStyle(probe).color);
  }
  return colours.get(name);
}

/** Draw everything anew: the theme has changed. */
export function redrawAll() {
  colours.clear();
  for (const chart of charts) chart.redraw();
}

/** Draw what waits until the frame's share is used up; the rest in the next frame, and then the hidden tables. */
function drawWaiting() {
  for (const chart of waiting) chart.width ||= chart.canvas.clientWidth; // all, before one of them changes something
  const ends = performance.now() + FRAME_MS;
  for (const chart of waiting) {
    waiting.delete(chart);
    if (chart.width) chart.drawNow(); // else once it is laid out
    if (performance.now() > ends) break;
  }
  if (waiting.size) requestAnimationFrame(drawWaiting);
  else setTimeout(writeTables);
}

function writeTables() {
  if (waiting.size) return;
  for (const chart of unwritten) chart.write();
  unwritten.clear();
}

/** Watch size and place: asking for them lays the page out again, and what is out of sight is not drawn. */
function watch(chart) {
  observers ??= [
    new ResizeObserver((seen) => seen.forEach(({ target, contentRect }) => target.chart.resize(contentRect.width))),
    new IntersectionObserver((seen) => seen.forEach(({ target, isIntersecting }) => target.chart.see(isIntersecting)), {
      rootMargin: "100%",
    }),
  ];
  chart.host.chart = chart.canvas.chart = chart;
  observers[0].observe(chart.host);
  observers[1].observe(chart.canvas);
  charts.add(chart);
}

/** Base of the charts: they `draw`, and may have `words`, `hover(x, y)`, `pick(x, y)` and `move(dx, dy)`. */
export class Chart {
  width = 0; // known once it is laid out

  constructor(host, { height, label, says = false }) {
    Object.assign(this, { host, height, label, written: -Infinity });
    this.canvas = el("canvas", { role: "img", "aria-label": label, tabindex: 0 });
    this.canvas.style.height = `${height}px`; // before it is drawn: what is out of sight takes its room
    host.append(this.canvas);
    if (says) host.append((this.readout = el("p.readout", { "aria-live": "polite" })));
    this.context = this.canvas.getContext("2d");
    watch(this);
    const leave = () => this.hover?.(null, null);
    const handlers = {
      pointermove: (event) => this.hover?.(event.offsetX, event.offsetY),
      pointerleave: leave,
      blur: leave,
      click: (event) => this.pick?.(event.offsetX, event.offsetY),
      keydown: (event) => this.key(event),
    };
    for (const [name, handler] of Object.entries(handlers)) this.canvas.addEventListener(name, handler);
  }

  key(event) {
    const arrow = ARROWS[event.key];
    if (arrow && this.move) {
      event.preventDefault();
      this.move(...arrow.map((by) => by * (event.shiftKey ? LARGEST_STEP : 1)));
    } else if (event.key === "Enter") this.pick?.(null, null);
  }

  /** Words about what is under the pointer or the cursor. */
  say(text) {
    this.readout.textContent = visible(text);
  }

  resize(width) {
    if (this.width && !this.canvas.isConnected) this.close(); // its page has been left
    else if (this.width !== width) {
      this.width = width;
      this.redraw();
    }
  }

  see(inSight) {
    this.hidden = !inSight;
    this.redraw();
  }

  redraw() {
    if (this.hidden) return;
    if (!waiting.size) requestAnimationFrame(drawWaiting);
    waiting.add(this);
  }

  drawNow() {
    const ratio = devicePixelRatio || 1;
    const size = [Math.round(this.width * ratio), Math.round(this.height * ratio)];
    if (this.canvas.width !== size[0] || this.canvas.height !== size[1]) [this.canvas.width, this.canvas.height] = size;
    this.canvas.style.height = `${this.height}px`;
    this.context.setTransform(ratio, 0, 0, ratio, 0, 0);
    this.context.clearRect(0, 0, this.width, this.height);
    this.context.font = "12px system-ui, 'Noto Sans', sans-serif";
    this.context.textBaseline = "middle";
    this.draw(this.context, this.width, this.height);
    if (this.words && performance.now() > this.written + WORDS_EVERY_MS) unwritten.add(this);
  }

  /** The numbers as a table that only assistive technology shows. */
  write() {
    this.written = performance.now();
    const { head, rows, summary } = this.words();
    this.canvas.setAttribute("aria-label", summary ? `${this.label}: ${summary}` : this.label);
    const numbers = table(head, rows, { caption: this.label, hidden: true });
    if (this.numbers) this.numbers.replaceWith(numbers);
    else this.host.append(numbers);
    this.numbers = numbers;
  }

  close() {
    observers[0].unobserve(this.host);
    observers[1].unobserve(this.canvas);
    charts.delete(this);
    waiting.delete(this);
    this.left?.();
  }
}

/** A chart made of places that can be pointed at and chosen: `areas` of `[x, y, width, height, thing]`. */
export class PlacesChart extends Chart {
  areas = [];
  place = -1;

  /** Note a place while drawing, with its outline where it is pointed at. */
  note(g, x, y, width, height, thing) {
    if (this.areas.length === this.place) {
      g.strokeStyle = ink("ink");
      g.strokeRect(x + 0.5, y + 0.5, Math.max(3, width - 1), height - 1);
    }
    this.areas.push([x, y, width, height, thing]);
  }

  point(place) {
    this.place = place;
    if (this.readout) this.say(this.areas[place] ? this.describe(this.areas[place][4]) : "");
    this.redraw();
  }

  hover(x, y) {
    this.point(x == null ? -1 : this.areas.findIndex(([l, t, w, h]) => x >= l && x <= l + w && y >= t && y < t + h));
  }

  move(dx, dy) {
    this.point(Math.max(0, Math.min(this.areas.length - 1, this.place + (dx || dy))));
  }

  pick() {
    if (this.areas[this.place]) this.onPick(this.areas[this.place][4]);
  }
}

/** A line in the current stroke. */
export function drawSegment(g, x0, y0, x1, y1) {
  g.beginPath();
  g.moveTo(x0, y0);
  g.lineTo(x1, y1);
  g.stroke();
}

/** Text in a canvas, cut to a width. */
export function writeText(g, text, x, y, { colour = "mute", align = "left", width = Infinity } = {}) {
  g.fillStyle = ink(colour);
  g.textAlign = align;
  let shown = text;
  while (shown.length > 1 && g.measureText(shown).width > width) shown = `${shown.slice(0, -2)}…`;
  g.fillText(shown, x, y);
}

const hatches = new Map();

/** A pattern of diagonal lines in a colour: a second mark beside the hue. */
export function hatch(g, name) {
  const colour = ink(name);
  if (!hatches.has(colour)) {
    const tile = el("canvas", { width: 6, height: 6 });
    const pen = Object.assign(tile.getContext("2d"), { strokeStyle: colour, lineWidth: 1.6 });
    for (const offset of [-6, 0, 6]) drawSegment(pen, offset, 6, offset + 6, 0);
    hatches.set(colour, tile);
  }
  return g.createPattern(hatches.get(colour), "repeat");
}
