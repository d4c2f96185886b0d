// One answer being written: reads the chunks of a chat completion into a message and measures it. Knows no elements.

/** What to send of a message: what the model has said and been told, without our notes. */
export function forRequest(message) {
  if (message.role === "tool") return { role: "tool", content: message.content, tool_call_id: message.callId };
  const item = { role: message.role, content: message.content };
  if (message.calls?.length)
    item.tool_calls = message.calls.map(({ id, name, arguments: text }) => ({
      id,
      type: "function",
      function: { name, arguments: text },
    }));
  return item;
}

export function emptyAnswer() {
  return { role: "assistant", content: "", reasoning: "", calls: [], callId: "", note: "", error: "" };
}

export class AnswerReader {
  constructor(message, now = () => performance.now()) {
    this.message = message;
    this.now = now;
    this.started = now();
    this.first = null;
    this.last = null;
    this.pieces = 0;
    this.usage = null;
    this.finish = "";
  }

  take(chunk) {
    if (chunk.usage) this.usage = chunk.usage;
    const choice = chunk.choices?.[0];
    if (!choice) return;
    if (choice.finish_reason) this.finish = choice.finish_reason;
    const { content, reasoning_content: reasoning, tool_calls: calls } = choice.delta ?? {};
    if (typeof content === "string") this.message.content += content;
    if (typeof reasoning === "string") this.message.reasoning += reasoning;
    for (const call of Array.isArray(calls) ? calls : []) this.#call(call);
    if (content || reasoning || calls?.length) {
      this.last = this.now();
      this.first ??= this.last;
      this.pieces += 1;
    }
  }

  #call(delta) {
    const index = Number.isInteger(delta.index) && delta.index >= 0 && delta.index < 128 ? delta.index : 0;
    while (this.message.calls.length <= index) this.message.calls.push({ id: "", name: "", arguments: "" });
    const call = this.message.calls[index];
    call.id ||= delta.id ?? "";
    call.name += delta.function?.name ?? "";
    call.arguments += delta.function?.arguments ?? "";
  }

  /** Tokens, or pieces of text until the gateway has said how many tokens they were. */
  get tokens() {
    return this.usage?.completion_tokens ?? this.pieces;
  }

  /** After the first token, so that the prompt's time does not count. NaN with fewer than two. */
  get tokensPerSecond() {
    const seconds = (this.last - this.first) / 1000;
    return this.tokens > 1 && seconds > 0 ? (this.tokens - 1) / seconds : NaN;
  }

  figures() {
    if (this.first === null) return `waiting ${((this.now() - this.started) / 1000).toFixed(1)} s`;
    const rate = this.tokensPerSecond;
    const parts = Number.isFinite(rate) ? [`${rate.toFixed(1)} tok/s`] : [];
    parts.push(`first token ${((this.first - this.started) / 1000).toFixed(2)} s`, `${this.tokens} tokens`);
    const cached = this.usage?.prompt_tokens_details?.cached_tokens;
    if (cached) parts.push(`${cached} of ${this.usage.prompt_tokens} prompt tokens cached`);
    if (this.finish === "length") parts.push("stopped at max tokens");
    return parts.join(" · ");
  }
}
