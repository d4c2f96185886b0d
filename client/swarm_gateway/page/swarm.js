// What is known of the swarm: nodes, coverage, answers, and what happened. Pure: events in, state out; `feed.js` brings
// them. Everything in it was said by strangers, so it is checked and bounded here, once, for all views.
import { label, number } from "./dom.js";

const MOST_LAYERS = 10_000;
const MOST_NODES = 20_000;
const MOST_ANSWERS = 200;
const MOST_HOPS = 256;
const MOST_LINKS = 2_000; // of one node
const MOST_EVENTS = 200;
const MANY = 4; // so many joining at once are one line
export const FRESH_MS = 8000; // how long a change stays marked

function span(start, end, layers) {
  const whole = Number.isInteger(start) && Number.isInteger(end);
  return whole && start >= 0 && end > start && end <= layers ? [start, end] : [null, null];
}

function node(raw, layers) {
  const peer = label(raw?.peer, 100);
  if (!peer) return null;
  const [start, end] = span(raw.start, raw.end, layers);
  const capacity = number(raw.kv_capacity_tokens);
  return {
    peer,
    start,
    end,
    name: label(raw.name) || `…${peer.slice(-6)}`,
    state: label(raw.state, 12),
    layerMs: number(raw.layer_ms, NaN),
    capacity,
    used: capacity > 0 ? Math.min(1, Math.max(0, 1 - number(raw.kv_free_tokens) / capacity)) : 0,
    sessions: number(raw.sessions),
    region: label(raw.region, 24),
    version: label(raw.version, 16),
    dtype: label(raw.dtype, 12),
    pinned: raw.pinned === true,
    age: number(raw.age_s),
    links: new Map(
      Object.entries(raw.links ?? {})
        .slice(0, MOST_LINKS)
        .map(([other, ms]) => [other, number(ms, NaN)]),
    ),
  };
}

function answer(raw, layers) {
  const chain = (Array.isArray(raw?.chain) ? raw.chain : []).slice(0, MOST_HOPS).map((hop) => {
    const [start, end] = span(hop?.start, hop?.end, layers);
    return { peer: label(hop?.peer, 100), start, end };
  });
  return {
    id: label(raw?.id, 100),
    chain: chain.filter((hop) => hop.start !== null),
    tokens: number(raw?.tokens),
    rate: number(raw?.tokens_per_second, NaN),
    strategy: label(raw?.strategy, 24),
    waiting: raw?.state === "waiting",
    repairs: (Array.isArray(raw?.repairs) ? raw.repairs : []).slice(-50).map((text) => label(text, 200)),
  };
}

const layersOf = ({ start, end }) => (start === null ? "no layers" : `${start}–${end}`);
const list = (value) => (Array.isArray(value) ? value : []);

export class Swarm {
  constructor(now = () => performance.now()) {
    this.now = now;
    this.events = []; // newest first: {time: Date, kind, text}
    this.clear();
  }

  clear() {
    this.model = "";
    this.layers = 0;
    this.nodes = new Map();
    this.gone = new Map(); // peer -> {node, at}: of late
    this.fresh = new Map(); // peer -> {kind: "joined" | "moved", at, from}
    this.coverage = [];
    this.missing = [];
    this.answers = new Map();
    this.observed = 0;
  }

  /** `event`: overview, change or answer, with its data. True if it was one. */
  apply(event, data) {
    if (data === null || typeof data !== "object") return false;
    if (event === "overview") this.#overview(data);
    else if (event === "change" && this.layers) this.#change(data);
    else if (event === "answer" && this.layers) this.#answer(data);
    else return false;
    this.forget();
    return true;
  }

  name(peer) {
    return this.nodes.get(peer)?.name ?? this.gone.get(peer)?.node.name ?? `…${peer.slice(-6)}`;
  }

  /** Milliseconds between two nodes as either has measured, or NaN. */
  link(from, to) {
    return this.nodes.get(from)?.links.get(to) ?? this.nodes.get(to)?.links.get(from) ?? NaN;
  }

  #say(kind, text) {
    this.events.unshift({ time: new Date(), kind, text });
    this.events.length = Math.min(this.events.length, MOST_EVENTS);
  }

  #overview(data) {
    const again = this.layers > 0 && this.model === data.model;
    const before = this.nodes;
    this.layers = Math.min(MOST_LAYERS, Math.max(0, Math.trunc(number(data.num_layers))));
    this.model = label(data.model, 200);
    const found = list(data.nodes)
      .slice(0, MOST_NODES)
      .map((raw) => node(raw, this.layers))
      .filter(Boolean);
    this.nodes = new Map(found.map((item) => [item.peer, item]));
    if (again) {
      // after a lost connection: what happened meanwhile
      this.#joined(found.filter((item) => !before.has(item.peer)));
      this.#left([...before.values()].filter((item) => !this.nodes.has(item.peer)));
    } else {
      this.gone.clear();
      this.fresh.clear();
    }
    this.#common(data);
  }

  #change(data) {
    const left = list(data.left)
      .map((peer) => this.nodes.get(peer))
      .filter(Boolean);
    for (const item of left) this.nodes.delete(item.peer);
    this.#left(left);
    const joined = list(data.joined)
      .map((raw) => node(raw, this.layers))
      .filter(Boolean);
    for (const item of joined) if (this.nodes.size < MOST_NODES) this.nodes.set(item.peer, item);
    this.#joined(joined);
    const moved = [];
    for (const raw of list(data.moved)) {
      const item = this.nodes.get(raw?.peer);
      if (!item) continue;
      const from = { start: item.start, end: item.end };
      [item.start, item.end] = raw.to ? span(raw.to[0], raw.to[1], this.layers) : [null, null];
      this.fresh.set(item.peer, { kind: "moved", at: this.now(), from });
      moved.push(`${item.name} moves from ${layersOf(from)} to ${layersOf(item)}`);
    }
    this.#grouped("moved", moved, "nodes move to other layers");
    for (const raw of list(data.updated)) {
      const item = node(raw, this.layers);
      if (item && this.nodes.has(item.peer)) this.nodes.set(item.peer, item);
    }
    this.#common(data);
  }

  #joined(nodes) {
    for (const { peer } of nodes) {
      this.fresh.set(peer, { kind: "joined", at: this.now(), from: null });
      this.gone.delete(peer);
    }
    this.#grouped(
      "joined",
      nodes.map((item) => `${item.name} joins, ${layersOf(item)}`),
      "nodes join",
    );
  }

  #left(nodes) {
    for (const item of nodes) {
      this.gone.set(item.peer, { node: item, at: this.now() });
      this.fresh.delete(item.peer);
    }
    this.#grouped(
      "left",
      nodes.map((item) => `${item.name} is gone, ${layersOf(item)}`),
      "nodes are gone",
    );
  }

  #grouped(kind, texts, many) {
    if (texts.length > MANY) this.#say(kind, `${texts.length} ${many}`);
    else for (const text of texts) this.#say(kind, text);
  }

  #common(data) {
    this.observed = number(data.observed_at, this.observed);
    if (Array.isArray(data.coverage)) this.coverage = data.coverage.slice(0, this.layers).map((count) => number(count));
    if (Array.isArray(data.missing)) {
      const before = JSON.stringify(this.missing);
      this.missing = data.missing
        .slice(0, 1000)
        .filter((range) => Array.isArray(range) && span(range[0], range[1], this.layers)[0] !== null);
      const now = JSON.stringify(this.missing);
      if (now !== before)
        this.#say(
          this.missing.length ? "missing" : "whole",
          this.missing.length
            ? `No node serves ${this.missing
                .slice(0, 8)
                .map(([a, b]) => `${a}–${b}`)
                .join(", ")}`
            : "Every layer is served",
        );
    }
    if (Array.isArray(data.answers)) {
      const found = data.answers.slice(0, MOST_ANSWERS).map((raw) => answer(raw, this.layers));
      for (const item of found) this.#repairs(item);
      this.answers = new Map(found.map((item) => [item.id, item]));
    }
  }

  #answer(data) {
    const before = this.answers.get(label(data.id, 100));
    const item = answer(
      {
        ...(before && {
          tokens: before.tokens,
          tokens_per_second: before.rate,
          strategy: before.strategy,
          repairs: before.repairs,
          chain: before.chain,
        }),
        ...data,
      },
      this.layers,
    );
    if (!before && this.answers.size >= MOST_ANSWERS) return;
    this.#repairs(item);
    this.answers.set(item.id, item);
  }

  #repairs(item) {
    const known = this.answers.get(item.id)?.repairs.length ?? 0; // of many repairs the gateway keeps the latest
    item.repairs = item.repairs.map((text) => this.#named(text));
    for (const text of item.repairs.slice(known)) this.#say("repair", text);
  }

  /** A sentence of the gateway, which has the ends of peer ids, with names for them. */
  #named(text) {
    return text.replace(/[A-Za-z0-9]{8}(?= \[)/g, (end) => {
      for (const peer of [...this.nodes.keys(), ...this.gone.keys()]) if (peer.endsWith(end)) return this.name(peer);
      return end;
    });
  }

  /** Unmarks what is no longer new. */
  forget() {
    const old = this.now() - FRESH_MS;
    for (const marks of [this.gone, this.fresh]) for (const [peer, { at }] of marks) if (at < old) marks.delete(peer);
  }
}
