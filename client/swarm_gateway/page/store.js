// What this browser keeps: conversations, settings and the theme, in localStorage. Whatever is there is checked when
// read, as an older page or another program may have written it.

const PREFIX = "swarm.chat.";
const MOST_CONVERSATIONS = 200;

function read(key) {
  try {
    return JSON.parse(localStorage.getItem(key));
  } catch {
    return null;
  }
}

/** False if the browser does not let us: private windows, or no space even after old conversations went. */
function write(key, value) {
  for (;;) {
    try {
      localStorage.setItem(key, JSON.stringify(value));
      return true;
    } catch {
      const oldest = conversations()
        .filter((chat) => PREFIX + chat.id !== key)
        .pop();
      if (!oldest) return false;
      localStorage.removeItem(PREFIX + oldest.id);
    }
  }
}

const isText = (value) => typeof value === "string";

function message(item) {
  if (!item || !["user", "assistant", "tool"].includes(item.role) || !isText(item.content)) return null;
  return {
    role: item.role,
    content: item.content,
    reasoning: isText(item.reasoning) ? item.reasoning : "",
    calls: Array.isArray(item.calls)
      ? item.calls.filter((call) => isText(call?.name) && isText(call?.arguments) && isText(call?.id))
      : [],
    callId: isText(item.callId) ? item.callId : "",
    note: isText(item.note) ? item.note : "",
    error: isText(item.error) ? item.error : "",
  };
}

function conversation(value) {
  if (!value || !isText(value.id) || !Array.isArray(value.messages)) return null;
  const messages = value.messages.map(message);
  if (messages.includes(null)) return null;
  return {
    id: value.id,
    messages,
    title: isText(value.title) ? value.title : "Conversation",
    system: isText(value.system) ? value.system : "",
    updated: Number.isFinite(value.updated) ? value.updated : 0,
  };
}

/** Newest first. */
export function conversations() {
  const found = [];
  for (let i = 0; i < localStorage.length; i++) {
    const key = localStorage.key(i);
    const chat = key.startsWith(PREFIX) ? conversation(read(key)) : null;
    if (chat && PREFIX + chat.id === key) found.push(chat);
  }
  return found.sort((a, b) => b.updated - a.updated);
}

export function newConversation(system = "") {
  return {
    id: crypto.getRandomValues(new Uint32Array(2)).join("-"),
    title: "",
    system,
    updated: Date.now(),
    messages: [],
  };
}

export function saveConversation(chat) {
  chat.updated = Date.now();
  const saved = write(PREFIX + chat.id, chat);
  for (const old of conversations().slice(MOST_CONVERSATIONS)) localStorage.removeItem(PREFIX + old.id);
  return saved;
}

export const deleteConversation = (id) => localStorage.removeItem(PREFIX + id);
export const setting = (name) => read(`swarm.${name}`);
export const saveSetting = (name, value) => write(`swarm.${name}`, value);
