// One message on the screen: text, reasoning, tool calls, figures and what can be done with it.
import { copy, h } from "./dom.js";
import { MarkdownView } from "./markdown.js";

function pretty(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text; // still being written, or not JSON
  }
}

export class MessageView {
  /** `actions`: {retry, edit, result}: called with the message, and `result` with the call's id and text as well. */
  constructor(message, actions) {
    this.message = message;
    this.actions = actions;
    this.reasoning = h("pre", { class: "reasoning" });
    this.summary = h("summary", { text: "Reasoning" });
    this.folded = h("details", { class: "thought", hidden: true }, this.summary, this.reasoning);
    this.body = h("div", { class: "body" });
    this.calls = h("div", { class: "calls" });
    this.error = h("p", { class: "error", role: "alert", hidden: true });
    this.note = h("span", { class: "note" });
    this.tools = h("span", { class: "tools" });
    this.foot = h("div", { class: "foot" }, this.note, this.tools);
    const who = { user: "You", assistant: "Model", tool: "Tool result" }[message.role];
    this.root = h(
      "article",
      { class: `message ${message.role}`, "aria-label": who },
      h("h3", { class: "who", text: who }),
      this.folded,
      this.body,
      this.calls,
      this.error,
      this.foot,
    );
    this.markdown = message.role === "assistant" ? new MarkdownView(this.body) : null;
    this.#buttons();
    this.show(true);
  }

  #buttons() {
    const button = (text, title, run) =>
      this.tools.append(
        h("button", { type: "button", class: "quiet small", text, "aria-label": title, on: { click: run } }),
      );
    if (this.message.role === "assistant") {
      const mark = async (event) => {
        const { target } = event;
        target.textContent = (await copy(this.message.content)) ? "Copied" : "Not copied";
        setTimeout(() => (target.textContent = "Copy"), 1500);
      };
      button("Copy", "Copy this answer", mark);
      button("Retry", "Write this answer again", () => this.actions.retry(this.message));
    } else if (this.message.role === "user") {
      button("Edit", "Edit this message and ask again", () => this.#edit());
    }
  }

  /** `done`: nothing more comes. */
  show(done) {
    const { message } = this;
    this.root.classList.toggle("writing", !done);
    if (this.markdown) this.markdown.show(message.content, done);
    else if (this.body.textContent !== message.content)
      this.body.replaceChildren(h("p", { class: "plain", text: message.content }));
    if (message.reasoning) {
      this.folded.hidden = false;
      this.summary.textContent = !done && !message.content ? "Reasoning…" : "Reasoning";
      this.reasoning.textContent = message.reasoning;
    }
    if (message.calls.length) this.calls.replaceChildren(...message.calls.map((call) => this.#call(call, done)));
    this.error.hidden = !message.error;
    this.error.textContent = message.error;
    this.note.textContent = message.note;
    this.tools.hidden = !done;
  }

  #call(call, done) {
    const shown = h(
      "div",
      { class: "call" },
      h("div", { class: "codehead" }, h("span", { text: `calls ${call.name || "…"}` })),
      h("pre", { tabindex: "0" }, h("code", { text: pretty(call.arguments) })),
    );
    if (!done || this.actions.answered(this.message, call.id)) return shown;
    const input = h("input", {
      type: "text",
      placeholder: "What the tool returned",
      "aria-label": `Result of ${call.name}`,
    });
    const form = h(
      "form",
      { class: "result" },
      input,
      h("button", { type: "submit", class: "small", text: "Give result" }),
    );
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      if (this.actions.result(this.message, call.id, input.value)) form.remove();
    });
    shown.append(form);
    return shown;
  }

  #edit() {
    const area = h("textarea", { rows: "3", "aria-label": "Your message" });
    area.value = this.message.content;
    const close = () => {
      form.replaceWith(this.body);
      this.foot.hidden = false;
      this.tools.querySelector("button").focus();
    };
    const form = h(
      "form",
      { class: "edit" },
      area,
      h(
        "div",
        { class: "row" },
        h("button", { type: "submit", text: "Ask again" }),
        h("button", { type: "button", class: "quiet", text: "Cancel", on: { click: close } }),
      ),
    );
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      if (area.value.trim()) this.actions.edit(this.message, area.value);
    });
    form.addEventListener("keydown", (event) => {
      if (event.key === "Escape") {
        event.stopPropagation();
        close();
      }
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing && event.target === area) {
        event.preventDefault();
        form.requestSubmit();
      }
    });
    this.body.replaceWith(form);
    this.foot.hidden = true;
    area.focus();
  }
}
