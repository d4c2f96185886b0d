// The swarm's side of the page: the map or the tables, the answers being written hop by hop, and what happened.
import { byId, clock, h, shown } from "./dom.js";
import { Feed } from "./feed.js";
import { SwarmMap } from "./map.js";
import { Swarm } from "./swarm.js";
import { SwarmTable } from "./table.js";
import { saveSetting, setting } from "./store.js";

const MOST_ANSWERS = 6; // shown hop by hop
const MOST_EVENTS = 60;

export class Panel {
  constructor() {
    this.swarm = new Swarm();
    this.asked = ""; // the id of this page's answer while it is being written
    this.last = null; // that answer as it was last seen
    this.map = new SwarmMap(byId("map"), this.swarm, {
      mine: () => this.mine(),
      onSelect: (peer) => this.#select(peer),
    });
    this.table = new SwarmTable(byId("tables"), this.swarm);
    this.feed = new Feed(this.swarm, {
      onUpdate: () => this.#update(),
      onStatus: (text) => (byId("feed").textContent = text),
    });
    for (const [id, isTable] of [
      ["as-map", false],
      ["as-table", true],
    ])
      byId(id).addEventListener("click", () => this.#view(isTable));
    this.#view(setting("view") === "table");
  }

  /** The gateway may have several models; the figures are one's. */
  watch(model) {
    this.feed.start(model);
  }

  /** `on`: this page waits for an answer, or it has ended. `id`: that answer's, once it is known. */
  answering(on, id = "") {
    this.asked = on ? id : "";
    if (on) this.last = null;
    this.#update();
  }

  recolor() {
    this.map.recolor();
  }

  /** The id of this page's answer in the swarm's figures, "" if it is not in them. */
  mine() {
    return this.swarm.answers.has(this.asked) ? this.asked : "";
  }

  #view(isTable) {
    this.isTable = isTable;
    saveSetting("view", isTable ? "table" : "map");
    byId("as-map").setAttribute("aria-pressed", String(!isTable));
    byId("as-table").setAttribute("aria-pressed", String(isTable));
    byId("map-view").hidden = isTable;
    byId("tables").hidden = !isTable;
    this.#update();
  }

  #update() {
    if (this.isTable) this.table.update();
    else this.map.update();
    this.#summary();
    this.#answers();
    this.#events();
  }

  #summary() {
    const { nodes, layers, missing, coverage, answers } = this.swarm;
    const rate = [...answers.values()].reduce((sum, answer) => sum + (answer.waiting ? 0 : answer.rate || 0), 0);
    const capacity = [...nodes.values()].reduce((sum, node) => sum + node.capacity, 0);
    const used = [...nodes.values()].reduce((sum, node) => sum + node.capacity * node.used, 0);
    const fewest = coverage.reduce((low, count) => Math.min(low, count), Infinity);
    const figures = layers
      ? [
          [nodes.size, "nodes"],
          [layers, "layers"],
          [Number.isFinite(fewest) ? fewest : 0, "min replicas"],
          [answers.size, "answers"],
          [shown(rate), "tok/s"],
          [capacity ? `${Math.round((100 * used) / capacity)}%` : "–", "KV used"],
        ]
      : [];
    byId("summary").replaceChildren(
      ...figures.map(([value, name]) => h("div", {}, h("dt", { text: name }), h("dd", { text: String(value) }))),
    );
    const text = !layers
      ? "no figures yet"
      : missing.length
        ? `layers ${missing.map((range) => range.join("–")).join(", ")} have no node`
        : `${nodes.size} nodes, every layer served`;
    const health = byId("health");
    if (health.textContent !== text) health.textContent = text;
    health.dataset.state = !layers ? "unknown" : missing.length ? "broken" : "good";
  }

  #answers() {
    const mine = this.mine();
    if (mine) {
      const now = this.swarm.answers.get(mine);
      const repair = now.repairs.at(-1);
      if (repair && repair !== this.last?.repairs.at(-1)) byId("said").textContent = `Repaired: ${repair}`; // for ears
      this.last = now;
    }
    const others = [...this.swarm.answers.values()].filter((answer) => answer.id !== mine);
    const shownFirst = this.last ? [[this.last, mine ? "Your answer" : "Your last answer"]] : [];
    const all = [
      ...shownFirst,
      ...others.filter((answer) => answer.id !== this.last?.id).map((answer) => [answer, "Another answer"]),
    ];
    const seen = all
      .slice(0, MOST_ANSWERS)
      .map(([answer, title]) => [
        answer,
        title,
        this.swarm.answers.has(answer.id),
        ...answer.chain.map((hop) => this.swarm.nodes.has(hop.peer)),
      ]);
    const key = JSON.stringify([seen, all.length]);
    if (key === this.answersShown) return;
    this.answersShown = key;
    byId("answers").replaceChildren(
      ...all.slice(0, MOST_ANSWERS).map(([answer, title]) => this.#answer(answer, title)),
    );
    byId("answers-more").textContent = all.length > MOST_ANSWERS ? `and ${all.length - MOST_ANSWERS} more` : "";
    byId("answers-none").hidden = all.length > 0;
  }

  #answer(answer, title) {
    const active = this.swarm.answers.has(answer.id);
    const figures = [
      `${answer.tokens} tokens`,
      Number.isFinite(answer.rate) ? `${shown(answer.rate)} tok/s` : "",
      answer.strategy,
    ].filter(Boolean);
    const state = !active ? "complete" : answer.waiting ? "waiting for a chain" : "writing";
    const hops = answer.chain.flatMap((hop, i) => {
      const ms = i ? this.swarm.link(answer.chain[i - 1].peer, hop.peer) : NaN;
      const node = this.swarm.nodes.get(hop.peer);
      const compute =
        node && Number.isFinite(node.layerMs) ? ` · ${shown(node.layerMs * (hop.end - hop.start))} ms` : "";
      return [
        i
          ? h(
              "li",
              { class: "link" },
              h("span", { class: "offscreen", text: "then over a link of " }),
              Number.isFinite(ms) ? `${shown(ms)} ms →` : "→",
            )
          : null,
        h(
          "li",
          { class: `hop ${node ? "" : "gone"}` },
          h("b", { text: this.swarm.name(hop.peer) }),
          h("span", { text: `${hop.start}–${hop.end}${compute}` }),
        ),
      ];
    });
    return h(
      "li",
      { class: `answer ${title === "Another answer" ? "" : "mine"}`, data: { state } },
      h(
        "div",
        { class: "answerhead" },
        h("b", { text: title }),
        h("span", { class: "state", text: state }),
        h("span", { class: "figures", text: figures.join(" · ") }),
      ),
      h("ol", { class: "hops" }, ...hops),
      answer.repairs.length
        ? h("ul", { class: "repairs" }, ...answer.repairs.slice(-5).map((text) => h("li", { text })))
        : null,
    );
  }

  #events() {
    const log = byId("events");
    const fresh = this.swarm.events.indexOf(this.newest);
    const added = this.swarm.events.slice(0, fresh < 0 ? MOST_EVENTS : fresh).reverse();
    this.newest = this.swarm.events[0];
    for (const { time, kind, text } of added)
      log.prepend(h("li", { data: { kind } }, h("time", { text: clock(time) }), h("span", { text })));
    while (log.childNodes.length > MOST_EVENTS) log.lastChild.remove();
    byId("events-none").hidden = log.childNodes.length > 0;
  }

  #select(peer) {
    const card = byId("node");
    const node = this.swarm.nodes.get(peer);
    if (!node) {
      card.replaceChildren(
        h("p", {
          class: "muted",
          text: "Point at a bar, or press the arrow keys on the map, for a node’s figures and links.",
        }),
      );
      return;
    }
    const figures = [
      ["layers", node.start === null ? "none" : `${node.start}–${node.end}`],
      ["ms/layer", shown(node.layerMs, 2)],
      ["sessions", node.sessions],
      ["KV used", `${Math.round(100 * node.used)}% of ${node.capacity.toLocaleString("en")}`],
      ["links", node.links.size],
      ["region", node.region],
      ["type", node.dtype],
      ["version", node.version],
    ];
    card.replaceChildren(
      h("p", {}, h("b", { text: node.name }), ` ${node.state}${node.pinned ? ", pinned" : ""}`),
      h(
        "dl",
        {},
        ...figures
          .filter(([, value]) => value !== "")
          .map(([name, value]) => h("div", {}, h("dt", { text: name }), h("dd", { text: String(value) }))),
      ),
    );
  }
}
