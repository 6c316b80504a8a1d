// Charts of a run: heat map, flow of samples, histogram, shares, rows of a batch.

import { count, num, percent, ticks } from "./format.js";
import { button, el } from "./dom.js";
import { PlacesChart, hatch, ink, writeText } from "./canvas.js";
import { BOTTOM, LEFT, RIGHT } from "./curves.js";

/** Shares by column and row, opacity by the square root. `columns`: `[[first, last], …]`, `shares[column][row]`. */
export class HeatMap extends PlacesChart {
  constructor(host, { label, columns, rows, shares, pick }) {
    super(host, { height: 170, label, says: true });
    this.set({ columns, rows, shares, onPick: ([column, row]) => pick(column, row) });
  }

  set(changes) {
    Object.assign(this, changes);
    this.redraw();
  }

  draw(g, width, height) {
    this.areas = [];
    if (!this.columns.length) return writeText(g, "no step is trained yet", width / 2, height / 2, { align: "center" });
    const [cell, row] = [(width - LEFT - RIGHT) / this.columns.length, (height - BOTTOM) / this.rows.length];
    const style = { align: "right", width: LEFT - 6 };
    this.rows.forEach((name, place) =>
      writeText(g, name === "over" ? name : `lag ${name}`, LEFT - 6, (place + 0.5) * row, style),
    );
    this.shares.forEach((shares, column) =>
      shares.forEach((share, place) => {
        const [x, y] = [LEFT + column * cell, place * row];
        g.fillStyle = ink("version");
        g.globalAlpha = share ? 0.08 + 0.92 * Math.sqrt(share) : 0;
        g.fillRect(x, y + 1, Math.max(1, cell + 0.3), row - 2);
        g.globalAlpha = 1;
        this.note(g, x, y, cell, row, [this.columns[column], this.rows[place], share]);
      }),
    );
    for (const step of ticks(this.columns[0][0], this.columns.at(-1)[1], Math.max(2, width / 90))) {
      const column = this.columns.findIndex(([first, last]) => first <= step && step <= last);
      if (column >= 0) writeText(g, num(step), LEFT + (column + 0.5) * cell, height - 8, { align: "center" });
    }
    return undefined;
  }

  describe([[first, last], row, share]) {
    const steps = first === last ? `step ${count(first)}` : `steps ${count(first)} to ${count(last)}`;
    return `${steps} · lag ${row} · ${percent(share)} of the tokens`;
  }

  /** Places are column by column; the first move is to the newest one. */
  move(dx, dy) {
    const from = this.place < 0 ? this.areas.length - this.rows.length : this.place + dx * this.rows.length + dy;
    this.point(Math.max(0, Math.min(this.areas.length - 1, from)));
  }

  words() {
    const last = this.shares.at(-1) ?? [];
    const rows = this.rows.map((name, place) => [`lag ${name}`, percent(last[place])]);
    const summary = rows.map((row) => row.join(" ")).join(", ");
    return { head: ["lag", "share in the newest steps"], rows, summary };
  }
}

const NODE = 9;
const LAST = 170; // width of the last column
const NARROW = 620;

/** Places of a flow's nodes and bands: `{nodes: {id: {…, x, y, size}}, bands: [{…, y0, y1, size}]}`. Pure. */
export function layFlow(nodes, links, width, height) {
  const columns = [];
  for (const node of nodes) if (node.value || node.column === 0) (columns[node.column] ??= []).push({ ...node });
  const used = columns.filter(Boolean);
  const most = Math.max(1, ...used.map((column) => column.reduce((sum, node) => sum + node.value, 0)));
  const crowded = Math.max(...used.map((column) => column.length));
  const gap = Math.min(26, (height * 0.6) / crowded);
  const unit = (height - gap * crowded) / most;
  const placed = {};
  const pitch = used.length > 1 ? (width - LAST) / (used.length - 1) : width;
  used.forEach((column, place) => {
    let y = gap / 2;
    const room = place < used.length - 1 ? pitch : LAST;
    for (const node of column) {
      const size = Math.max(node.value ? 2 : 0, node.value * unit);
      placed[node.id] = { ...node, x: place * pitch, room, y, size, given: 0, taken: 0 };
      y += Math.max(placed[node.id].size, 2) + gap;
    }
  });
  const bands = [];
  for (const band of links) {
    const [from, to] = [placed[band.from], placed[band.to]];
    if (!band.value || !from || !to) continue;
    const size = Math.max(1.5, band.value * unit);
    bands.push({ ...band, source: from, target: to, y0: from.y + from.given, y1: to.y + to.taken, size });
    from.given += band.value * unit;
    to.taken += band.value * unit;
  }
  return { nodes: placed, bands };
}

/** The way of the samples as bands whose width is their number; where it is narrow, as bars below each other. */
export class Flow extends PlacesChart {
  constructor(host, { label, pick }) {
    super(host, { height: 260, label });
    Object.assign(this, { nodes: [], links: [], onPick: pick });
  }

  set({ nodes, links }) {
    Object.assign(this, { nodes, links });
    const bars = nodes.filter((node) => node.value).length;
    this.height = this.host.clientWidth < NARROW ? Math.max(60, 34 * bars) : 260;
    this.redraw();
  }

  draw(g, width, height) {
    this.areas = [];
    if (!this.nodes.some((node) => node.value))
      return writeText(g, "nothing is issued yet", width / 2, height / 2, { align: "center" });
    if (width < NARROW) return this.drawBars(g, width, height);
    const { nodes, bands } = layFlow(this.nodes, this.links, width, height);
    for (const band of bands) {
      const [x0, x1] = [band.source.x + NODE, band.target.x];
      const middle = (x0 + x1) / 2;
      g.globalAlpha = 0.26;
      g.fillStyle = ink(band.target.tone);
      g.beginPath();
      g.moveTo(x0, band.y0);
      g.bezierCurveTo(middle, band.y0, middle, band.y1, x1, band.y1);
      g.lineTo(x1, band.y1 + band.size);
      g.bezierCurveTo(middle, band.y1 + band.size, middle, band.y0 + band.size, x0, band.y0 + band.size);
      g.fill();
    }
    g.globalAlpha = 1;
    for (const node of Object.values(nodes)) {
      g.fillStyle = ink(node.tone);
      g.fillRect(node.x, node.y, NODE, Math.max(2, node.size));
      const [text, middle] = [`${node.name} ${count(node.value)}`, node.y + Math.max(6, node.size / 2)];
      writeText(g, text, node.x + NODE + 5, middle, { colour: "ink", width: node.room - NODE - 8 });
      this.note(g, node.x, node.y - 8, node.room, Math.max(20, node.size + 8), node);
    }
    return undefined;
  }

  drawBars(g, width, height) {
    const shown = this.nodes.filter((node) => node.value);
    const pitch = Math.min(34, height / shown.length);
    const most = Math.max(...shown.map((node) => node.value));
    shown.forEach((node, place) => {
      writeText(g, `${node.name} ${count(node.value)}`, 2, place * pitch + 9, { colour: "ink" });
      g.fillStyle = ink(node.tone);
      g.fillRect(2, place * pitch + 18, Math.max(2, (node.value / most) * (width - 4)), Math.max(3, pitch - 24));
      this.note(g, 0, place * pitch, width, pitch, node);
    });
  }

  words() {
    return { head: ["place", "samples"], rows: this.nodes.map((node) => [node.name, count(node.value)]) };
  }
}

/** A histogram whose bins are buttons: `[{low, high, exact, count, filter}]`. */
export function histogram(bins, { picked, pick }) {
  const most = Math.max(1, ...bins.map((bin) => bin.count));
  const bar = (bin) => {
    const range = bin.exact ? `exactly ${num(bin.low)}` : `${num(bin.low)} to ${num(bin.high)}`;
    const title = `reward ${range}: ${count(bin.count)} samples`;
    const height = el(bin.exact ? "i.exact" : "i");
    height.style.height = `${bin.count ? Math.max(2, (bin.count / most) * 56) : 0}px`;
    const label = el("span", bin.exact ? `=${num(bin.low)}` : num(bin.low));
    const attributes = { title, "aria-label": title, "aria-pressed": String(picked === bin.filter) };
    return button("", () => pick(bin), attributes, height, label);
  };
  return el("div.histogram", { role: "group", "aria-label": "rewards" }, bins.map(bar));
}

/** Parts of a whole as bars in words: `[{name, share, text, hue}]`. */
export function shareBars(parts) {
  const most = Math.max(1e-9, ...parts.map((part) => part.share ?? 0));
  const line = ({ name, share, text, hue = "version" }) => {
    const bar = el(`i.${hue}`);
    bar.style.width = `${((share ?? 0) / most) * 100}%`;
    return el("div", el("span", name), el("span.bar", bar), el("span.number", text ?? percent(share)));
  };
  return el("div.shares", parts.map(line));
}

const MOST_PIECES = 40; // of a line: a piece must be wide enough for the pointer

/** A row with many pieces as several lines; its padding stands in the last one. */
function inLines(row) {
  const lines = [];
  for (let from = 0; from < row.pieces.length; from += MOST_PIECES) {
    const pieces = row.pieces.slice(from, from + MOST_PIECES);
    const tokens = pieces.reduce((sum, piece) => sum + (piece.prompt_tokens ?? 0) + piece.response_tokens, 0);
    lines.push({ pieces, tokens, padding: from + MOST_PIECES >= row.pieces.length ? row.padding : 0 });
  }
  return lines;
}

/** Rows of a step: tokens by version, padding hatched, ranks below each other. `ranks`: as `/api/batch` has them. */
export class BatchRows extends PlacesChart {
  constructor(host, { label, ranks, pick }) {
    const lines = (rank) => (batch) =>
      batch.rows.flatMap(inLines).map((row, place) => ({ ...row, rank, batch, first: !place }));
    const rows = ranks.flatMap((rank) => rank.micro_batches.flatMap(lines(rank)));
    super(host, { label, says: true, height: Math.min(12_000, rows.length * 16 + ranks.length * 20 + 4) });
    Object.assign(this, { rows, ranks, onPick: pick, describe: pieceWords });
    this.most = Math.max(1, ...rows.map((row) => row.tokens + row.padding));
    const pieces = rows.flatMap((row) => row.pieces);
    this.newest = Math.max(0, ...pieces.flatMap((piece) => piece.versions.map(([version]) => version)));
    this.redraw();
  }

  draw(g, width) {
    this.areas = [];
    const padding = hatch(g, "line");
    const scale = (width - LEFT - RIGHT) / this.most;
    let [y, rank] = [0, null];
    for (const row of this.rows) {
      if (row.rank !== rank) {
        rank = row.rank;
        const text = `rank ${rank.rank} · ${count(rank.tokens)} tokens · ${count(rank.padding)} padding`;
        writeText(g, text, 0, y + 10, { colour: "ink" });
        y += 20;
      }
      if (row.first) writeText(g, `mb ${row.batch.number}`, LEFT - 6, y + 8, { align: "right" });
      let x = LEFT;
      for (const piece of row.pieces) x = this.drawPiece(g, piece, x, y, scale);
      g.fillStyle = padding;
      g.fillRect(x, y + 2, row.padding * scale, 12);
      y += 16;
    }
  }

  drawPiece(g, piece, x, y, scale) {
    const begin = x;
    const part = (tokens, colour, alpha) => {
      g.globalAlpha = alpha;
      g.fillStyle = ink(colour);
      g.fillRect(x, y + 2, Math.max(0, tokens * scale), 12);
      x += tokens * scale;
    };
    part(piece.prompt_tokens ?? 0, "mute", piece.shared ? 0.2 : 0.5);
    for (const [version, tokens] of piece.versions)
      part(tokens, "version", Math.max(0.25, 1 - 0.25 * (this.newest - version)));
    g.globalAlpha = 1;
    g.fillStyle = ink("panel");
    g.fillRect(x - 0.6, y + 2, 0.6, 12);
    this.note(g, begin, y, x - begin, 16, piece);
    return x;
  }

  words() {
    const rows = this.ranks.map((rank) => [`rank ${rank.rank}`, count(rank.tokens), count(rank.padding)]);
    return { head: ["rank", "tokens", "padding"], rows };
  }
}

function pieceWords({ seq, task, index, prompt_tokens, response_tokens, shared, versions: spans }) {
  const prompt = `prompt ${count(prompt_tokens)}${shared ? " (computed once for its group)" : ""}`;
  const made = spans.map(([version, tokens]) => `v${version}: ${tokens}`).join(", ");
  return `sample #${seq} · task ${task}.${index} · ${prompt} + response ${count(response_tokens)} tokens · ${made}`;
}
