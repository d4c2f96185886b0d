// Markdown to elements. marked finds the tokens; the elements are made here from text, so that HTML in an answer stays
// text, images are not loaded, and a link is one only with a harmless scheme.
import { copy, h } from "./dom.js";
import { lexer } from "./vendor/marked.js";

const MOST_CHARACTERS = 400_000; // longer texts are shown as they are
const DEEPEST = 24; // quotes and lists within each other
const SCHEMES = new Set(["http:", "https:", "mailto:"]);
const ENTITIES = {
  amp: "&",
  lt: "<",
  gt: ">",
  quot: '"',
  apos: "'",
  nbsp: "\u00a0",
  copy: "©",
  hellip: "…",
  mdash: "—",
  ndash: "–",
};

function decoded(text) {
  return text.replace(/&(?:#(\d{1,7})|#[xX]([0-9a-fA-F]{1,6})|(\w{2,8}));/g, (whole, decimal, hexadecimal, name) => {
    if (name) return Object.hasOwn(ENTITIES, name) ? ENTITIES[name] : whole;
    const code = decimal ? Number.parseInt(decimal, 10) : Number.parseInt(hexadecimal, 16);
    return code > 0 && code <= 0x10ffff && !(code >= 0xd800 && code < 0xe000) ? String.fromCodePoint(code) : whole;
  });
}

function link(token, children) {
  let url = null;
  try {
    url = new URL(decoded(String(token.href)));
  } catch {
    // relative or malformed: an answer has no pages of its own, so it stays text
  }
  if (!url || !SCHEMES.has(url.protocol)) return h("span", { class: "deadlink", title: "not a web link" }, ...children);
  return h(
    "a",
    { href: url.href, title: url.href, rel: "noopener noreferrer nofollow", target: "_blank" },
    ...children,
  );
}

function code(token) {
  const language = (token.lang ?? "").split(/\s/)[0].slice(0, 24);
  const button = h("button", { type: "button", class: "quiet small", text: "Copy", "aria-label": "Copy this code" });
  button.addEventListener("click", async () => {
    button.textContent = (await copy(token.text)) ? "Copied" : "Not copied";
    setTimeout(() => (button.textContent = "Copy"), 1500);
  });
  const body = h(
    "pre",
    { tabindex: "0", "aria-label": language ? `${language} code` : "code" },
    h("code", { text: token.text }),
  );
  return h(
    "div",
    { class: "code" },
    h("div", { class: "codehead" }, h("span", { text: language || "text" }), button),
    body,
  );
}

function table(token, depth) {
  const cell = (tag, item) =>
    h(
      tag,
      { class: item.align ? `align-${item.align}` : null, scope: tag === "th" ? "col" : null },
      ...many(item.tokens, depth),
    );
  return h(
    "div",
    { class: "wide", tabindex: "0", role: "group", "aria-label": "table" },
    h(
      "table",
      {},
      h("thead", {}, h("tr", {}, ...token.header.map((item) => cell("th", item)))),
      h("tbody", {}, ...token.rows.map((row) => h("tr", {}, ...row.map((item) => cell("td", item))))),
    ),
  );
}

function one(token, depth) {
  const inside = () => (token.tokens ? many(token.tokens, depth + 1) : [decoded(token.text ?? "")]);
  if (depth > DEEPEST) return token.raw ?? "";
  switch (token.type) {
    case "space":
    case "def":
      return null;
    case "paragraph":
      return h("p", {}, ...inside());
    case "heading":
      return h(`h${Math.min(6, token.depth + 2)}`, {}, ...inside()); // the page has its own h1 and h2
    case "text":
      return token.tokens ? h("span", {}, ...inside()) : decoded(token.text);
    case "escape":
      return token.text;
    case "strong":
      return h("strong", {}, ...inside());
    case "em":
      return h("em", {}, ...inside());
    case "del":
      return h("del", {}, ...inside());
    case "codespan":
      return h("code", { text: token.text });
    case "br":
      return h("br");
    case "hr":
      return h("hr");
    case "code":
      return code(token);
    case "blockquote":
      return h("blockquote", {}, ...inside());
    case "checkbox":
      return token.checked ? "☑ " : "☐ ";
    case "list":
      return h(
        token.ordered ? "ol" : "ul",
        { start: token.ordered && token.start !== 1 ? String(token.start) : null },
        ...token.items.map((item) => h("li", {}, ...many(item.tokens, depth + 1))),
      );
    case "table":
      return table(token, depth + 1);
    case "link":
      return link(token, inside());
    case "image":
      return link(token, [`[image: ${token.text || token.href}]`]);
    default:
      return token.raw ?? ""; // html among them
  }
}

const many = (tokens, depth) => tokens.map((token) => one(token, depth)).filter((item) => item !== null);

function tokens(text) {
  try {
    return lexer(text, { gfm: true, breaks: false });
  } catch (error) {
    if (!(error instanceof RangeError || error instanceof Error)) throw error;
    return null; // nested too deep for the parser
  }
}

/** Shows a growing text in `root`. Blocks that later text cannot change are parsed once. */
export class MarkdownView {
  constructor(root) {
    this.root = root;
    this.settled = 0; // characters of the text whose elements stay
    this.kept = 0; // elements that stay
  }

  #plain(text) {
    this.root.replaceChildren(h("p", { class: "plain", text }));
    this.settled = this.kept = 0;
  }

  /** `done`: no more comes, so the whole text is parsed once more (a link may be defined below its use). */
  show(source, done = false) {
    const text = source.replace(/\r\n?/g, "\n");
    if (text.length > MOST_CHARACTERS) return this.#plain(text);
    if (done) this.settled = this.kept = 0;
    const found = tokens(text.slice(this.settled));
    if (!found) return this.#plain(text);
    while (this.root.childNodes.length > this.kept) this.root.lastChild.remove();
    this.root.append(...many(found, 0));
    if (!done) this.#settle(text, found);
  }

  #settle(text, found) {
    const stays = found.slice(0, -3); // the last block and what it may still join
    const raw = stays.map((token) => token.raw).join("");
    if (!raw || !text.startsWith(raw, this.settled)) return;
    this.settled += raw.length;
    this.kept += many(stays, 0).length;
  }
}
