// The gateway's HTTP interface as this page uses it. Owns the key (for this tab only) and how errors read.
import { label } from "./dom.js";
import { events } from "./sse.js";

const KEY = "swarm.key";

export const apiKey = {
  get: () => sessionStorage.getItem(KEY) ?? "",
  set: (value) => (value ? sessionStorage.setItem(KEY, value) : sessionStorage.removeItem(KEY)),
};

/** `status`: of HTTP, 0 if the gateway was not reached. `retryAfter`: seconds, or null. */
export class Failure extends Error {
  constructor(status, message, retryAfter = null) {
    super(message);
    this.status = status;
    this.retryAfter = retryAfter;
  }
}

async function failure(response) {
  let message = `The gateway answered ${response.status}.`;
  try {
    const body = await response.json();
    message = label(body?.error?.message ?? body?.detail ?? message, 2000) || message;
  } catch {
    // not JSON: the status says it
  }
  const after = Number.parseFloat(response.headers.get("retry-after"));
  return new Failure(response.status, message, Number.isFinite(after) ? after : null);
}

/** A response with a good status. Paths are relative, so the page also works behind a prefix. */
export async function request(path, { body, signal, accept = "application/json" } = {}) {
  const headers = { accept };
  if (apiKey.get()) headers.authorization = `Bearer ${apiKey.get()}`;
  if (body !== undefined) headers["content-type"] = "application/json";
  let response;
  try {
    response = await fetch(path, {
      method: body === undefined ? "GET" : "POST",
      body: body === undefined ? undefined : JSON.stringify(body),
      headers,
      signal,
      cache: "no-store",
      credentials: "omit",
      redirect: "error",
    });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Failure(0, "The gateway does not answer. Is it still running?");
  }
  if (!response.ok) throw await failure(response);
  return response;
}

export async function modelNames() {
  const { data } = await (await request("v1/models")).json();
  return (Array.isArray(data) ? data : []).map((model) => String(model.id)).slice(0, 200);
}

/** Yields the chunks of a streamed chat completion. An error inside the stream is thrown as a Failure. `onId`: called
 *  with the answer's id in the swarm's figures. */
export async function* chatChunks(body, signal, onId) {
  const response = await request("v1/chat/completions", { body, signal, accept: "text/event-stream" });
  onId(label(response.headers.get("x-swarm-answer"), 100));
  for await (const { data } of events(response)) {
    if (data === "[DONE]") return;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new Failure(200, label(chunk.error.message ?? chunk.error, 2000));
    yield chunk;
  }
}
