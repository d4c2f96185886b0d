// Which row of the map a node's bar is in. A bar keeps its row while its layers stay, so that the picture is calm.

export class Lanes {
  constructor() {
    this.rows = []; // of arrays: the peer at each layer, or undefined
    this.places = new Map(); // peer -> {row, start, end}
  }

  /** Brings the rows to these nodes: items of {peer, start, end}. First fit, the lowest start first. */
  update(nodes) {
    const here = new Map(nodes.filter((item) => item.start !== null).map((item) => [item.peer, item]));
    for (const [peer, place] of this.places) {
      const item = here.get(peer);
      if (!item || item.start !== place.start || item.end !== place.end) this.#clear(peer, place);
    }
    const fresh = [...here.values()].filter((item) => !this.places.has(item.peer));
    fresh.sort((a, b) => a.start - b.start || b.end - a.end || (a.peer < b.peer ? -1 : 1));
    for (const item of fresh) this.#place(item);
    while (this.rows.length && this.rows.at(-1).every((peer) => peer === undefined)) this.rows.pop();
  }

  at(row, layer) {
    return this.rows[row]?.[layer];
  }

  #clear(peer, { row, start, end }) {
    for (let layer = start; layer < end; layer++) this.rows[row][layer] = undefined;
    this.places.delete(peer);
  }

  #place({ peer, start, end }) {
    let row = this.rows.findIndex((used) => {
      for (let layer = start; layer < end; layer++) if (used[layer] !== undefined) return false;
      return true;
    });
    if (row < 0) {
      row = this.rows.length;
      this.rows.push(new Array(end));
    }
    for (let layer = start; layer < end; layer++) this.rows[row][layer] = peer;
    this.places.set(peer, { row, start, end });
  }
}
