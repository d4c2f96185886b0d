// Keeps a Swarm up to date from /swarm/events: connects, reconnects, and rests while nobody looks.
import { Failure, request } from "./api.js";
import { label } from "./dom.js";
import { events } from "./sse.js";

const FIRST_WAIT_MS = 1000;
const LONGEST_WAIT_MS = 15_000;

export class Feed {
  /** `onUpdate(event)` after every event that changed the swarm; `onStatus(text)`: "" while all is well. */
  constructor(swarm, { onUpdate, onStatus }) {
    Object.assign(this, { swarm, onUpdate, onStatus });
    this.stopping = null;
    this.model = null;
    document.addEventListener("visibilitychange", () => {
      if (document.hidden) this.stopping?.abort();
      else if (this.model !== null) this.start(this.model);
    });
  }

  start(model) {
    this.stopping?.abort();
    this.stopping = new AbortController();
    if (model !== this.model) {
      this.swarm.clear();
      this.onUpdate("overview");
    }
    this.model = model;
    this.#run(model, this.stopping.signal);
  }

  async #run(model, signal) {
    let wait = FIRST_WAIT_MS;
    while (!signal.aborted) {
      try {
        await this.#read(model, signal, () => (wait = FIRST_WAIT_MS));
        this.onStatus("The gateway closed the stream of figures; connecting again.");
      } catch (error) {
        if (signal.aborted) return;
        this.onStatus(
          error instanceof Failure && error.status === 401 ? "The swarm’s figures need the API key." : error.message,
        );
      }
      await new Promise((done) => setTimeout(done, wait));
      wait = Math.min(2 * wait, LONGEST_WAIT_MS);
    }
  }

  async #read(model, signal, onFirst) {
    const query = model ? `?model=${encodeURIComponent(model)}` : "";
    const response = await request(`swarm/events${query}`, { signal, accept: "text/event-stream" });
    for await (const { event, data } of events(response)) {
      if (signal.aborted) return;
      const found = JSON.parse(data);
      if (event === "error") throw new Error(label(found?.error?.message ?? "The swarm cannot be read.", 300));
      if (!this.swarm.apply(event, found)) continue;
      onFirst();
      this.onStatus("");
      this.onUpdate(event);
    }
  }
}
