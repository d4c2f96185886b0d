// The drawing of the swarm: coverage by layer on top, one bar a node over the layers it serves, chains across the bars.
// Two canvases: nodes are drawn once an update, what moves is drawn above them. All figures are in the table, too.
import { h, shown } from "./dom.js";
import { Lanes } from "./lanes.js";
import { Overlay } from "./overlay.js";

const SIDE = 10; // pixels left and right of the layers
const COVERAGE = 40; // pixels of the coverage strip
const AXIS = 22; // of the layer numbers
const TOP = COVERAGE + AXIS;
const HIGHEST_BAR = 46;
const TWO_LINES = 38; // bars at least so high have the figures below the name
const LOWEST_BAR = 4; // 1,000 nodes of an eighth of the model each are 125 rows
const FRAME_MS = 50;
const STEPS = [1, 2, 4, 5, 8, 10, 16, 20, 32, 50, 64, 100, 200, 500, 1000, 2000]; // of the layer numbers
const COLORS = [
  "bg",
  "ink",
  "muted",
  "line",
  "bar",
  "bar-load",
  "bar-idle",
  "chain",
  "chain-ink",
  "joined",
  "left",
  "moved",
  "missing",
  "cover",
  "panel",
];

export class SwarmMap {
  /** `root`: an empty element; `mine()`: the id of this page's answer, or ""; `onSelect(peer or "")`. */
  constructor(root, swarm, { mine, onSelect }) {
    Object.assign(this, { root, swarm, mine, onSelect });
    this.canvas = h("canvas", { tabindex: "0", role: "img", id: "map-canvas", "aria-describedby": "map-help" });
    this.above = h("canvas", { class: "above", "aria-hidden": "true" });
    this.root.append(this.canvas, this.above);
    this.lanes = new Lanes();
    this.before = new Map(); // peer -> its last place, for those that left or moved
    this.selected = "";
    this.hovered = "";
    this.still = matchMedia("(prefers-reduced-motion: reduce)");
    this.frame = 0;
    this.milliseconds = []; // that the last updates took
    new ResizeObserver(() => this.update()).observe(root);
    this.canvas.addEventListener("pointermove", (event) => this.#hover(this.#peerAt(event)));
    this.canvas.addEventListener("pointerleave", () => this.#hover(""));
    this.canvas.addEventListener("click", (event) => this.select(this.#peerAt(event)));
    this.canvas.addEventListener("keydown", (event) => this.#key(event));
    this.recolor();
  }

  /** After the theme changed. */
  recolor() {
    const style = getComputedStyle(document.documentElement);
    this.color = Object.fromEntries(COLORS.map((name) => [name, style.getPropertyValue(`--${name}`).trim()]));
    this.mono = style.getPropertyValue("--mono").trim() || "monospace";
    this.update();
  }

  /** After the swarm changed. */
  update() {
    const began = performance.now();
    this.before = new Map(
      [...this.before, ...this.lanes.places].filter(
        ([peer]) => this.swarm.nodes.has(peer) || this.swarm.gone.has(peer),
      ),
    );
    this.places0 = new Map(this.lanes.places);
    this.lanes.update([...this.swarm.nodes.values()]);
    for (const [peer, mark] of this.swarm.fresh)
      if (mark.kind === "moved" && mark.ghost === undefined) mark.ghost = this.places0.get(peer) ?? null;
    if (this.selected && !this.swarm.nodes.has(this.selected)) this.select("");
    this.#size();
    if (this.width > 0) {
      this.#drawNodes();
      this.#drawAbove();
    }
    this.milliseconds.push(performance.now() - began);
    if (this.milliseconds.length > 120) this.milliseconds.shift();
    this.#animate();
  }

  select(peer) {
    if (peer === this.selected) return;
    this.selected = peer;
    this.onSelect(peer || this.hovered);
    this.#drawAbove();
  }

  #hover(peer) {
    if (peer === this.hovered) return;
    this.hovered = peer;
    this.canvas.classList.toggle("over", Boolean(peer));
    this.onSelect(peer || this.selected);
    this.#drawAbove();
  }

  #key(event) {
    const steps = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1, Home: -Infinity, End: Infinity };
    if (event.key === "Escape" && this.selected) {
      event.stopPropagation();
      this.select("");
      return;
    }
    if (!(event.key in steps)) return;
    event.preventDefault();
    const order = [...this.lanes.places]
      .sort(([, a], [, b]) => a.start - b.start || a.row - b.row)
      .map(([peer]) => peer);
    if (!order.length) return;
    const at = order.indexOf(this.selected);
    this.select(order[at < 0 ? 0 : Math.min(order.length - 1, Math.max(0, at + steps[event.key]))]);
    const top = TOP + this.lanes.places.get(this.selected).row * this.bar;
    if (top < this.root.scrollTop || top + this.bar > this.root.scrollTop + this.root.clientHeight)
      this.root.scrollTop = top - this.root.clientHeight / 2;
  }

  #peerAt(event) {
    const box = this.canvas.getBoundingClientRect();
    const row = Math.floor((event.clientY - box.top - TOP) / this.bar);
    const layer = Math.floor(((event.clientX - box.left - SIDE) / (this.width - 2 * SIDE)) * this.swarm.layers);
    return row >= 0 && layer >= 0 ? (this.lanes.at(row, layer) ?? "") : "";
  }

  #size() {
    this.width = this.root.clientWidth;
    const rows = Math.max(1, this.lanes.rows.length);
    const room = Math.max(160, Math.min(window.innerHeight * 0.58, 620)) - TOP;
    this.bar = Math.max(LOWEST_BAR, Math.min(HIGHEST_BAR, Math.floor(room / rows)));
    const height = TOP + rows * this.bar + 6;
    const scale = Math.min(window.devicePixelRatio || 1, 2);
    for (const canvas of [this.canvas, this.above]) {
      const [w, t] = [Math.round(this.width * scale), Math.round(height * scale)];
      if (canvas.width !== w || canvas.height !== t) {
        canvas.width = w;
        canvas.height = t;
        canvas.style.width = `${this.width}px`;
        canvas.style.height = `${height}px`;
      }
      canvas.getContext("2d").setTransform(scale, 0, 0, scale, 0, 0);
    }
    this.height = height;
  }

  x(layer) {
    return SIDE + (layer / Math.max(1, this.swarm.layers)) * (this.width - 2 * SIDE);
  }

  /** Where chains run: along a bar's upper edge, so that its text stays readable; through the middle of low bars. */
  y(row) {
    return TOP + row * this.bar + (this.bar >= 15 ? 3 : this.bar / 2);
  }

  middle({ row, start, end }) {
    return [this.x((start + end) / 2), TOP + (row + 0.5) * this.bar];
  }

  /** The height of a bar's figures: right of them is room, right of the name there may be none. */
  figuresAt({ row }) {
    return TOP + (row + (this.bar >= TWO_LINES ? 0.62 : 0.5)) * this.bar;
  }

  rect({ row, start, end }) {
    const gap = this.bar >= 14 ? 3 : 1;
    return [
      this.x(start) + 1,
      TOP + row * this.bar + gap / 2,
      Math.max(2, this.x(end) - this.x(start) - 2),
      this.bar - gap,
    ];
  }

  #drawNodes() {
    const c = this.canvas.getContext("2d");
    c.clearRect(0, 0, this.width, this.height);
    if (!this.swarm.layers) return this.#summarize();
    this.#drawCoverage(c);
    const tall = this.bar >= 15;
    const chain = new Map(this.swarm.answers.get(this.mine())?.chain.map((hop) => [hop.peer, hop]));
    c.textBaseline = "middle";
    for (const [peer, place] of this.lanes.places) {
      const node = this.swarm.nodes.get(peer);
      const [x, y, w, t] = this.rect(place);
      const serves = node.state === "serving" || node.state === "leaving";
      c.fillStyle = serves ? this.color.bar : this.color["bar-idle"];
      c.fillRect(x, y, w, t);
      if (chain.has(peer)) {
        c.globalAlpha = 0.3;
        c.fillStyle = this.color.chain;
        c.fillRect(...this.rect({ ...chain.get(peer), row: place.row }));
        c.globalAlpha = 1;
      }
      c.fillStyle = this.color["bar-load"];
      const strip = tall ? 4 : t; // of the key-value cache's use
      if (node.used > 0 && serves) c.fillRect(x, y + t - strip, w * node.used, strip);
      if (node.state !== "serving") {
        c.setLineDash([3, 3]);
        c.strokeStyle = node.state === "leaving" || node.state === "draining" ? this.color.left : this.color.muted;
        c.strokeRect(x + 0.5, y + 0.5, w - 1, t - 1);
        c.setLineDash([]);
      }
      if (tall) this.#write(c, node, x, y, w, t);
    }
    this.#summarize();
  }

  #write(c, node, x, y, w, t) {
    const size = this.bar >= 26 ? 12 : 10;
    const most = Math.floor((w - 12) / (size * 0.62));
    if (most < 2) return;
    c.font = `${size}px ${this.mono}`;
    const name = node.state === "serving" ? node.name : `${node.name} ${node.state}`;
    const figures = `${shown(node.layerMs)} ms${node.sessions ? `  ${node.sessions}×` : ""}`;
    const cut = (text, room) => (text.length <= room ? text : `${text.slice(0, Math.max(room - 1, 1))}…`);
    c.fillStyle = this.color.ink;
    if (this.bar >= TWO_LINES) {
      c.fillText(cut(name, most), x + 6, y + 13);
      c.globalAlpha = 0.8;
      c.fillText(cut(figures, most), x + 6, y + 28);
      c.globalAlpha = 1;
      return;
    }
    const middle = y + (t - 4) / 2 + 1;
    const room = most - figures.length - 2;
    c.fillText(cut(name, room < 6 ? most : room), x + 6, middle);
    if (room < 6) return;
    c.globalAlpha = 0.8;
    c.textAlign = "right";
    c.fillText(figures, x + w - 6, middle);
    c.textAlign = "left";
    c.globalAlpha = 1;
  }

  #drawCoverage(c) {
    const { layers, coverage, missing } = this.swarm;
    const most = coverage.reduce((high, count) => Math.max(high, count), 1);
    const base = COVERAGE;
    c.fillStyle = this.color.cover;
    coverage.forEach((count, layer) => {
      const t = (count / most) * (COVERAGE - 14);
      c.fillRect(this.x(layer), base - t, Math.max(1, this.x(layer + 1) - this.x(layer) - (layers <= 100 ? 1 : 0)), t);
    });
    c.fillStyle = this.color.missing;
    for (const [start, end] of missing) c.fillRect(this.x(start), base - 26, this.x(end) - this.x(start), 26);
    c.font = `10px ${this.mono}`;
    c.textBaseline = "alphabetic";
    c.fillStyle = this.color.muted;
    c.fillText(`replicas per layer, most ${most}`, SIDE, 9);
    const step = STEPS.find((each) => (layers / each) * 34 < this.width) ?? 5000;
    c.textAlign = "center";
    c.strokeStyle = this.color.line;
    c.beginPath();
    for (let layer = 0; layer <= layers; layer += step) {
      const x = Math.round(this.x(layer)) + 0.5;
      c.moveTo(x, base + 15);
      c.lineTo(x, this.height);
      c.fillText(String(layer), Math.min(Math.max(x, SIDE + 4), this.width - SIDE - 4), base + 12);
    }
    c.stroke();
    c.textAlign = "left";
    c.fillStyle = this.color.bg;
    for (const [start, end] of missing)
      if (this.x(end) - this.x(start) > 60) c.fillText("no node", this.x(start) + 5, base - 9);
  }

  #summarize() {
    const { nodes, layers, missing } = this.swarm;
    const text = `${nodes.size} nodes over ${layers} layers; ${missing.length ? `layers ${missing.map((range) => range.join("–")).join(", ")} have none` : "every layer is served"}.`;
    if (this.canvas.getAttribute("aria-label") !== text) this.canvas.setAttribute("aria-label", text);
  }

  #drawAbove() {
    const c = this.above.getContext("2d");
    c.clearRect(0, 0, this.width, this.height);
    if (this.swarm.layers) new Overlay(c, this).draw();
  }

  #moving() {
    this.swarm.forget();
    return this.swarm.fresh.size + this.swarm.gone.size > 0 || this.swarm.answers.has(this.mine());
  }

  #animate() {
    if (this.frame || this.still.matches || !this.#moving() || document.hidden) return;
    this.frame = setTimeout(() => {
      this.frame = 0;
      if (this.root.offsetParent !== null) this.#drawAbove();
      if (this.root.offsetParent !== null) this.#animate();
    }, FRAME_MS);
  }
}
