// Puts the page together: model choice, key, theme, and which parts a narrow screen shows.
import { apiKey, modelNames } from "./api.js";
import { Chat } from "./chat.js";
import { byId, h } from "./dom.js";
import { Panel } from "./panel.js";
import { Settings } from "./settings.js";
import { saveSetting, setting } from "./store.js";

const MODELS_AGAIN_MS = 5000; // while the gateway does not answer

const models = byId("models");
let chat = null;
const panel = new Panel();
const settings = new Settings({ getSystem: () => chat.chat.system, setSystem: (text) => chat.setSystem(text) });

/** Asks for the key; true if one was given. */
function needKey(message) {
  const dialog = byId("key");
  const input = byId("key-input");
  if (dialog.open) return Promise.resolve(false);
  byId("key-why").textContent = message;
  input.value = apiKey.get();
  dialog.returnValue = "";
  dialog.showModal();
  return new Promise((resolve) => {
    dialog.addEventListener(
      "close",
      () => {
        if (dialog.returnValue !== "ok") return resolve(false);
        apiKey.set(input.value.trim());
        resolve(true);
        if (!models.options.length) loadModels();
        else panel.watch(models.value);
      },
      { once: true },
    );
  });
}

async function loadModels() {
  try {
    const names = await modelNames();
    const before = setting("model");
    models.replaceChildren(...names.map((name) => h("option", { value: name, text: name })));
    if (names.includes(before)) models.value = before;
    byId("feed").textContent = names.length ? "" : "The gateway serves no model yet.";
    if (names.length) panel.watch(models.value);
    else setTimeout(loadModels, MODELS_AGAIN_MS);
  } catch (error) {
    byId("feed").textContent = error.message;
    if (error.status === 401) needKey(error.message);
    else setTimeout(loadModels, MODELS_AGAIN_MS);
  }
}

models.addEventListener("change", () => {
  saveSetting("model", models.value);
  panel.watch(models.value);
});

chat = new Chat({
  body: () => settings.body(),
  model: () => models.value,
  needKey,
  answering: (on, id) => panel.answering(on, id),
});

// The theme: as the system has it, or light, or dark.
const THEMES = ["system", "light", "dark"];
let theme = THEMES.includes(setting("theme")) ? setting("theme") : "system";
const dark = matchMedia("(prefers-color-scheme: dark)");
function paint() {
  document.documentElement.dataset.theme = theme === "system" ? (dark.matches ? "dark" : "light") : theme;
  const name = { system: "as the system", light: "light", dark: "dark" }[theme];
  byId("theme").replaceChildren(h("span", { text: "Theme: " }), theme === "system" ? "auto" : theme);
  byId("theme").setAttribute("aria-label", `Theme: ${name}. Press for the next.`);
  panel.recolor();
}
byId("theme").addEventListener("click", () => {
  theme = THEMES[(THEMES.indexOf(theme) + 1) % THEMES.length];
  saveSetting("theme", theme);
  paint();
});
dark.addEventListener("change", paint);
paint();

// On a narrow screen one part is seen at a time, and the conversations are a drawer.
function part(name) {
  document.body.dataset.part = name;
  for (const each of ["chat", "swarm"]) byId(`to-${each}`).setAttribute("aria-pressed", String(each === name));
  if (name === "swarm") panel.recolor();
}
for (const name of ["chat", "swarm"]) byId(`to-${name}`).addEventListener("click", () => part(name));
part("chat");
function listing(open) {
  document.body.classList.toggle("listing", open);
  byId("list-open").setAttribute("aria-expanded", String(open));
}
byId("list-open").addEventListener("click", () => {
  listing(!document.body.classList.contains("listing"));
  if (document.body.classList.contains("listing")) byId("new").focus();
});
byId("list").addEventListener("click", (event) => {
  if (!event.target.closest(".open, #new")) return;
  listing(false);
  part("chat");
});
byId("list").addEventListener("keydown", (event) => {
  if (event.key !== "Escape" || !document.body.classList.contains("listing")) return;
  event.stopPropagation(); // it does not stop the answer
  listing(false);
  byId("list-open").focus();
});
document.querySelector("main").addEventListener("pointerdown", (event) => {
  if (!event.target.closest("#list")) listing(false);
});
byId("key-cancel").addEventListener("click", () => byId("key").close());
for (const dialog of document.querySelectorAll("dialog"))
  dialog.addEventListener("click", (event) => {
    if (event.target === dialog) dialog.close();
  });

globalThis.swarmPage = { panel, swarm: panel.swarm }; // for the console and the tests
loadModels();
