// Small helpers for making elements. Text only ever becomes text: nothing in this page parses HTML.

/** An element. `props`: `class`, `text`, `on` ({event: handler}), `data` (dataset), booleans and attributes. */
export function h(tag, props = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(props)) {
    if (value === undefined || value === null || value === false) continue;
    if (name === "text") element.textContent = value;
    else if (name === "class") element.className = value;
    else if (name === "on")
      for (const [event, handler] of Object.entries(value)) element.addEventListener(event, handler);
    else if (name === "data") Object.assign(element.dataset, value);
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

export const byId = (id) => document.getElementById(id);

/** What strangers named something: one line, no control or direction characters, at most `most` characters. */
export function label(value, most = 40) {
  const text = String(value ?? "")
    .replace(/[\p{Cc}\p{Cf}\p{Zl}\p{Zp}]/gu, "")
    .trim();
  return text.length > most ? text.slice(0, most - 1) + "…" : text;
}

export function number(value, otherwise = 0) {
  return typeof value === "number" && Number.isFinite(value) ? value : otherwise;
}

export function shown(value, digits = 1) {
  return Number.isFinite(value) ? value.toFixed(digits) : "–";
}

export function clock(date = new Date()) {
  return date.toLocaleTimeString([], { hour12: false });
}

/** True if the text is on the clipboard. Pages from plain http elsewhere have no clipboard interface, so the old way. */
export async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    const area = h("textarea", { class: "offscreen", readonly: true });
    area.value = text;
    const before = document.activeElement;
    document.body.append(area);
    area.select();
    const done = document.execCommand("copy");
    area.remove();
    before?.focus();
    return done;
  }
}
