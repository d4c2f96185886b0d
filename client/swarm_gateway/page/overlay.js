// What is drawn above the nodes: chains of answers, links of the chosen node, marks of what has just changed.
import { FRESH_MS } from "./swarm.js";

const MOST_CHAINS = 40; // of others, drawn thin
const MOST_LINKS = 8;
const ROUND_MS = 1600; // of the dot on a chain

/** One drawing of it. `c`: a canvas context; `map`: the SwarmMap, for its places, scales and colors. */
export class Overlay {
  constructor(c, map) {
    this.c = c;
    this.map = map;
  }

  draw() {
    const { c } = this;
    this.#drawFresh(c);
    const mine = this.map.mine();
    let others = 0;
    for (const answer of this.map.swarm.answers.values())
      if (answer.id !== mine && others++ < MOST_CHAINS) this.#drawChain(c, answer, false);
    if (this.map.swarm.answers.has(mine)) this.#drawChain(c, this.map.swarm.answers.get(mine), true);
    for (const peer of new Set([this.map.selected, this.map.hovered]))
      if (this.map.lanes.places.has(peer)) this.#drawLinks(c, peer);
  }

  /** Who has just joined, left or moved: a frame that fades, and the place that is empty now. */
  #drawFresh(c) {
    const frame = (place, color, at, dashed) => {
      if (!place) return;
      c.globalAlpha = this.map.still.matches ? 1 : Math.max(0, 1 - (this.map.swarm.now() - at) / FRESH_MS);
      c.strokeStyle = c.fillStyle = color;
      c.lineWidth = 2;
      c.setLineDash(dashed ? [4, 4] : []);
      const [x, y, w, t] = this.map.rect(place);
      c.strokeRect(x, y, w, t);
      c.setLineDash([]);
      c.lineWidth = 1;
      c.globalAlpha = 1;
    };
    for (const [peer, { at }] of this.map.swarm.gone) frame(this.map.before.get(peer), this.map.color.left, at, true);
    for (const [peer, { kind, at, ghost }] of this.map.swarm.fresh) {
      frame(this.map.lanes.places.get(peer), this.map.color[kind], at, false);
      if (ghost) frame(ghost, this.map.color.moved, at, true);
    }
  }

  #drawChain(c, answer, mine) {
    const places = answer.chain.map((hop) => ({
      ...hop,
      row: (this.map.lanes.places.get(hop.peer) ?? this.map.before.get(hop.peer))?.row,
    }));
    const path = places.filter((hop) => hop.row !== undefined);
    if (!path.length) return;
    c.strokeStyle = this.map.color.chain;
    c.globalAlpha = mine ? 1 : 0.3;
    c.lineWidth = mine ? 2.5 : 1;
    if (mine && answer.waiting) {
      c.globalAlpha = 0.5;
      c.setLineDash([2, 5]);
    }
    c.beginPath();
    c.moveTo(this.map.x(path[0].start), this.map.y(path[0].row));
    for (const hop of path) {
      c.lineTo(this.map.x(hop.start), this.map.y(hop.row));
      c.lineTo(this.map.x(hop.end), this.map.y(hop.row));
    }
    c.stroke();
    c.setLineDash([]);
    if (mine) {
      if (!answer.waiting && !this.map.still.matches) this.#drawPulse(c, path);
      for (let i = 1; i < path.length; i++)
        this.#tag(
          c,
          this.map.x(path[i].start),
          (this.map.y(path[i - 1].row) + this.map.y(path[i].row)) / 2,
          this.map.swarm.link(path[i - 1].peer, path[i].peer),
        );
    }
    c.globalAlpha = c.lineWidth = 1;
  }

  /** A dot that runs along the chain, once in 1.6 s: not to scale. */
  #drawPulse(c, path) {
    const points = path.flatMap((hop) => [
      [this.map.x(hop.start), this.map.y(hop.row)],
      [this.map.x(hop.end), this.map.y(hop.row)],
    ]);
    const lengths = points.slice(1).map(([x, y], i) => Math.hypot(x - points[i][0], y - points[i][1]));
    let left = ((this.map.swarm.now() % ROUND_MS) / ROUND_MS) * lengths.reduce((a, b) => a + b, 0);
    let i = 0;
    while (i < lengths.length - 1 && left > lengths[i]) left -= lengths[i++];
    const part = lengths[i] ? left / lengths[i] : 0;
    const [[x0, y0], [x1, y1]] = [points[i], points[i + 1]];
    c.fillStyle = this.map.color["chain-ink"];
    c.beginPath();
    c.arc(x0 + (x1 - x0) * part, y0 + (y1 - y0) * part, 4, 0, 2 * Math.PI);
    c.fill();
  }

  #tag(c, x, y, ms) {
    if (!Number.isFinite(ms)) return;
    const text = `${ms < 10 ? ms.toFixed(1) : Math.round(ms)} ms`;
    c.lineWidth = 1;
    c.font = `10px ${this.map.mono}`;
    const w = c.measureText(text).width + 8;
    const left = Math.min(Math.max(x - w + 3, 2), this.map.width - w - 2); // names begin right of a boundary
    c.fillStyle = this.map.color.panel;
    c.fillRect(left, y - 7, w, 14);
    c.strokeRect(left, y - 7, w, 14);
    c.fillStyle = this.map.color.ink;
    c.textBaseline = "middle";
    c.fillText(text, left + 4, y + 0.5);
  }

  #drawLinks(c, peer) {
    const place = this.map.lanes.places.get(peer);
    const [x, y, w, t] = this.map.rect(place);
    c.strokeStyle = this.map.color.ink;
    c.lineWidth = 2;
    c.strokeRect(x, y, w, t);
    c.lineWidth = 1;
    const links = [...this.map.swarm.nodes.get(peer).links].filter(
      ([other, ms]) => Number.isFinite(ms) && this.map.lanes.places.has(other),
    );
    for (const [other, ms] of links.sort((a, b) => a[1] - b[1]).slice(0, MOST_LINKS)) {
      const there = this.map.lanes.places.get(other);
      c.globalAlpha = 0.4;
      c.beginPath();
      c.moveTo(...this.map.middle(place));
      c.lineTo(...this.map.middle(there));
      c.stroke();
      c.globalAlpha = 1;
      this.#tag(c, this.map.x(there.end) - 6, this.map.figuresAt(there), ms);
    }
  }
}
