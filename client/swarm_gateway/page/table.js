// The same figures as the map, as tables: for screen readers, for copying, and for whoever likes figures.
import { h, shown } from "./dom.js";

const MOST_LINKS = 200; // rows
// heading, text of a cell, what it sorts by, is it a number
const COLUMNS = [
  ["Node", (n) => n.name, (n) => n.name.toLowerCase(), false],
  ["State", (n) => n.state + (n.pinned ? ", pinned" : ""), (n) => n.state, false],
  [
    "Layers",
    (n) => (n.start === null ? "–" : `${n.start}–${n.end}`),
    (n) => (n.start === null ? Infinity : n.start * 1e5 + n.end),
    true,
  ],
  ["ms/layer", (n) => shown(n.layerMs, 2), (n) => n.layerMs, true],
  ["Sessions", (n) => String(n.sessions), (n) => n.sessions, true],
  ["KV used", (n) => `${Math.round(100 * n.used)}%`, (n) => n.used, true],
  ["KV tokens", (n) => n.capacity.toLocaleString("en"), (n) => n.capacity, true],
  ["Nearest ms", (n) => shown(nearest(n)), (n) => nearest(n), true],
  ["Region", (n) => n.region || "–", (n) => n.region, false],
  ["Type", (n) => n.dtype || "–", (n) => n.dtype, false],
  ["Version", (n) => n.version || "–", (n) => n.version, false],
];

const nearest = (node) => [...node.links.values()].reduce((low, ms) => (ms < low ? ms : low), Infinity);

function compared(a, b) {
  if (typeof a === "string") return a < b ? -1 : Number(a > b);
  const [x, y] = [Number.isNaN(a) ? Infinity : a, Number.isNaN(b) ? Infinity : b];
  return x < y ? -1 : Number(x > y);
}

export class SwarmTable {
  constructor(root, swarm) {
    this.swarm = swarm;
    this.column = 2;
    this.up = true;
    this.rows = new Map(); // peer -> {row, texts}
    this.heads = COLUMNS.map(([title, , , isNumber], index) =>
      h(
        "th",
        { scope: "col", class: isNumber ? "figure" : null },
        h("button", { type: "button", class: "quiet", text: title, on: { click: () => this.#sort(index) } }),
      ),
    );
    this.body = h("tbody");
    this.links = h("tbody");
    const linkHeads = ["From", "To", "ms"].map((text) =>
      h("th", { scope: "col", class: text === "ms" ? "figure" : null, text }),
    );
    root.append(
      h(
        "div",
        { class: "wide", tabindex: "0", role: "group", "aria-label": "Nodes" },
        h(
          "table",
          { class: "figures", id: "nodes" },
          h("caption", { class: "offscreen", text: "Nodes" }),
          h("thead", {}, h("tr", {}, ...this.heads)),
          this.body,
        ),
      ),
      h("h3", { text: "Links" }),
      h(
        "div",
        { class: "wide short", tabindex: "0", role: "group", "aria-label": "Links" },
        h(
          "table",
          { class: "figures", id: "links" },
          h("caption", { class: "offscreen", text: "Links" }),
          h("thead", {}, h("tr", {}, ...linkHeads)),
          this.links,
        ),
      ),
    );
    this.#sort(2, true);
  }

  #sort(index, up = index === this.column ? !this.up : true) {
    this.column = index;
    this.up = up;
    this.heads.forEach((head, i) =>
      i === index ? head.setAttribute("aria-sort", up ? "ascending" : "descending") : head.removeAttribute("aria-sort"),
    );
    this.update();
  }

  /** After the swarm changed, while the table is on the screen. Touches only cells whose text is another. */
  update() {
    const key = COLUMNS[this.column][2];
    const sign = this.up ? 1 : -1;
    const nodes = [...this.swarm.nodes.values()].sort(
      (a, b) => sign * compared(key(a), key(b)) || (a.peer < b.peer ? -1 : 1),
    );
    for (const [peer, { row }] of this.rows)
      if (!this.swarm.nodes.has(peer)) {
        row.remove();
        this.rows.delete(peer);
      }
    let at = this.body.firstChild;
    for (const node of nodes) {
      const row = this.#row(node);
      if (row === at) at = at.nextSibling;
      else this.body.insertBefore(row, at);
    }
    this.#linkRows(nodes);
  }

  #row(node) {
    let entry = this.rows.get(node.peer);
    if (!entry) {
      const row = h(
        "tr",
        { title: node.peer },
        ...COLUMNS.map(([, , , isNumber], i) =>
          h(i ? "td" : "th", { class: isNumber ? "figure" : null, scope: i ? null : "row" }),
        ),
      );
      entry = { row, texts: [] };
      this.rows.set(node.peer, entry);
    }
    COLUMNS.forEach(([, text], i) => {
      const now = text(node);
      if (now !== entry.texts[i]) entry.row.cells[i].textContent = entry.texts[i] = now;
    });
    entry.row.className = this.swarm.fresh.get(node.peer)?.kind ?? "";
    return entry.row;
  }

  #linkRows(nodes) {
    const rows = [];
    for (const node of nodes)
      for (const [other, ms] of node.links) {
        if (rows.length >= MOST_LINKS) break;
        if (this.swarm.nodes.has(other)) rows.push([node.name, this.swarm.name(other), shown(ms)]);
      }
    const text = JSON.stringify(rows);
    if (text === this.linkText) return;
    this.linkText = text;
    this.links.replaceChildren(
      ...rows.map((cells) =>
        h("tr", {}, ...cells.map((cell, i) => h("td", { class: i === 2 ? "figure" : null, text: cell }))),
      ),
    );
  }
}
