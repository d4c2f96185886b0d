// The chat: conversations, asking, stopping, trying again. Owns which conversation is on the screen.
import { AnswerReader, emptyAnswer, forRequest } from "./answer.js";
import { chatChunks } from "./api.js";
import { byId, h } from "./dom.js";
import { MessageView } from "./message.js";
import { conversations, deleteConversation, newConversation, saveConversation } from "./store.js";

const TITLE_CHARACTERS = 48;
const SLOWEST_REDRAW = 10; // a redraw may take a tenth of the time: long answers are drawn less often
const SAVE_EVERY_MS = 3000;

export class Chat {
  /** `body`: () => the settings' part of a request; `model`: () => its name; `needKey`: async, true if one was given;
   *  `answering`: told true when one asks, then the answer's id as well, and false when the answer has ended. */
  constructor({ body, model, needKey, answering }) {
    Object.assign(this, { body, model, needKey, answering });
    this.log = byId("log");
    this.input = byId("ask");
    this.writing = null; // {stop: AbortController}
    this.chat = conversations()[0] ?? newConversation();
    byId("composer").addEventListener("submit", (event) => {
      event.preventDefault();
      this.ask();
    });
    byId("new").addEventListener("click", () => this.open(newConversation(this.chat.system)));
    byId("stop").addEventListener("click", () => this.stop());
    this.input.addEventListener("input", () => this.#size());
    this.input.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        this.ask();
      }
    });
    document.addEventListener("keydown", (event) => {
      if (event.key === "Escape" && this.writing && !document.querySelector("dialog[open]")) this.stop();
    });
    window.addEventListener("storage", () => this.#list()); // another tab
    this.open(this.chat, false);
  }

  open(chat, focus = true) {
    this.stop();
    this.chat = chat;
    this.#draw();
    this.#list();
    if (focus) this.input.focus();
  }

  setSystem(text) {
    this.chat.system = text;
    if (this.chat.messages.length) saveConversation(this.chat);
    byId("system-mark").hidden = !text;
  }

  stop() {
    this.writing?.stop.abort();
  }

  ask() {
    const text = this.input.value;
    if (!text.trim() || this.writing) return;
    this.input.value = "";
    this.#size();
    this.#add({ ...emptyAnswer(), role: "user", content: text });
    this.#write();
  }

  #add(message) {
    this.chat.messages.push(message);
    this.chat.title ||= message.content.trim().replace(/\s+/g, " ").slice(0, TITLE_CHARACTERS);
    saveConversation(this.chat);
    return this.#append(message);
  }

  #append(message) {
    byId("welcome").hidden = true;
    const view = new MessageView(message, {
      retry: (of) => this.#again(this.chat.messages.indexOf(of)),
      edit: (of, text) => {
        if (this.writing) return;
        of.content = text;
        this.#again(this.chat.messages.indexOf(of) + 1);
      },
      result: (of, callId, text) => this.#result(of, callId, text),
      answered: (of, callId) =>
        this.chat.messages.slice(this.chat.messages.indexOf(of)).some((other) => other.callId === callId),
    });
    this.log.append(view.root);
    this.#toEnd(true);
    return view;
  }

  /** Writes the answer again that follows the first `count` messages; later ones go. */
  #again(count) {
    if (this.writing || count < 1) return;
    this.chat.messages.length = count;
    this.#draw();
    this.#write();
  }

  /** A tool's result; the model goes on when every call of the message has one. */
  #result(message, callId, text) {
    if (this.writing) return false;
    this.#add({ ...emptyAnswer(), role: "tool", content: text, callId });
    const given = new Set(this.chat.messages.map((other) => other.callId));
    if (message.calls.every((call) => given.has(call.id))) this.#write();
    return true;
  }

  async #write() {
    const chat = this.chat;
    const message = emptyAnswer();
    const system = chat.system ? [{ role: "system", content: chat.system }] : [];
    const messages = [...system, ...chat.messages.map(forRequest)];
    const view = this.#add(message);
    const reader = new AnswerReader(message);
    this.writing = { stop: new AbortController() };
    this.#busy(true);
    this.answering(true);
    const draw = this.#drawing(view, reader, chat);
    try {
      const body = {
        ...this.body(),
        model: this.model(),
        messages,
        stream: true,
        stream_options: { include_usage: true },
      };
      await this.#stream(body, reader);
    } catch (error) {
      if (error.name === "AbortError") message.error = message.content || message.reasoning ? "" : "Stopped.";
      else
        message.error = error.retryAfter
          ? `${error.message} Try again in ${Math.ceil(error.retryAfter)} s.`
          : error.message;
      if (error.name === "AbortError") reader.finish = "stopped";
    } finally {
      clearInterval(draw);
      this.writing = null;
      this.answering(false);
      message.note = reader.first === null ? "" : reader.figures() + (reader.finish === "stopped" ? " · stopped" : "");
      view.show(true);
      if (!chat.deleted) saveConversation(chat);
      this.#busy(false);
      this.#toEnd();
      byId("said").textContent =
        message.error || (reader.finish === "stopped" ? "Stopped." : "The answer is complete.");
    }
  }

  async #stream(body, reader) {
    const { signal } = this.writing.stop;
    for (;;) {
      try {
        const chunks = chatChunks(body, signal, (id) => this.answering(true, id));
        for await (const chunk of chunks) reader.take(chunk);
        return;
      } catch (error) {
        if (error.status !== 401 || !(await this.needKey(error.message))) throw error;
      }
    }
  }

  #drawing(view, reader, chat) {
    let next = 0;
    let saved = performance.now();
    return setInterval(() => {
      const now = performance.now();
      if (now < next) return;
      reader.message.note = reader.figures();
      view.show(false);
      this.#toEnd();
      if (now - saved > SAVE_EVERY_MS) {
        saveConversation(chat);
        saved = performance.now();
      }
      next = performance.now() + SLOWEST_REDRAW * (performance.now() - now);
    }, 33);
  }

  #busy(on) {
    byId("send").hidden = on;
    byId("stop").hidden = !on;
    this.log.setAttribute("aria-busy", String(on));
    this.#list();
  }

  /** Stays at the end if the reader is there: who has scrolled up is left in peace. */
  #toEnd(always = false) {
    const box = byId("scroll");
    if (always || box.scrollHeight - box.scrollTop - box.clientHeight < 160) box.scrollTop = box.scrollHeight;
  }

  #size() {
    this.input.style.height = "auto";
    this.input.style.height = `${Math.min(this.input.scrollHeight + 2, 220)}px`;
  }

  #draw() {
    this.log.replaceChildren();
    byId("welcome").hidden = this.chat.messages.length > 0;
    byId("system-mark").hidden = !this.chat.system;
    for (const message of this.chat.messages) this.#append(message);
  }

  #list() {
    const items = conversations().map((chat) => {
      const open = h("button", {
        type: "button",
        class: "open",
        text: chat.title,
        title: chat.title,
        "aria-current": chat.id === this.chat.id ? "true" : null,
      });
      open.addEventListener("click", () => {
        if (chat.id !== this.chat.id) this.open(chat);
      });
      const remove = h("button", {
        type: "button",
        class: "quiet small remove",
        text: "×",
        "aria-label": `Delete “${chat.title}”`,
      });
      remove.addEventListener("click", () => {
        deleteConversation(chat.id);
        if (chat.id === this.chat.id) this.chat.deleted = true; // its answer may still be ending
        if (chat.id === this.chat.id) this.open(conversations()[0] ?? newConversation());
        else this.#list();
      });
      return h("li", {}, open, remove);
    });
    byId("conversations").replaceChildren(...items);
  }
}
