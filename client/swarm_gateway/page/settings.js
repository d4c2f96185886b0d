// The settings dialog: how answers are sampled. Owns which fields there are, their bounds, and their place in a request.
import { byId, h } from "./dom.js";
import { saveSetting, setting } from "./store.js";

// name in the request, label, lowest, highest, step, whole numbers only. Empty fields are not sent.
const NUMBERS = [
  ["temperature", "Temperature", 0, 2, 0.05, false],
  ["top_p", "Top p", 0.01, 1, 0.01, false],
  ["min_p", "Min p", 0, 1, 0.01, false],
  ["max_tokens", "Max tokens", 1, 1_000_000, 1, true],
  ["seed", "Seed", 0, 2 ** 31 - 1, 1, true],
  ["frequency_penalty", "Frequency penalty", -2, 2, 0.1, false],
  ["presence_penalty", "Presence penalty", -2, 2, 0.1, false],
  ["repetition_penalty", "Repetition penalty", 0.1, 2, 0.05, false],
];
const MOST_STOPS = 4; // as OpenAI's API has it

function json(text, what, right) {
  let value;
  try {
    value = JSON.parse(text);
  } catch (error) {
    throw new Error(`${what} is not JSON: ${error.message}`);
  }
  if (!right(value)) throw new Error(`${what} must be ${what === "Tools" ? "a list" : "an object"}.`);
  return value;
}

const isObject = (value) => value !== null && typeof value === "object" && !Array.isArray(value);

/** The part of a request that `fields` (name -> text) mean. Throws a sentence for the person who typed them. */
export function sampling(fields) {
  const body = {};
  for (const [name, title, lowest, highest, , whole] of NUMBERS) {
    const text = (fields[name] ?? "").trim();
    if (!text) continue;
    const value = Number(text);
    if (!Number.isFinite(value) || value < lowest || value > highest || (whole && !Number.isInteger(value)))
      throw new Error(`${title} must be ${whole ? "a whole number" : "a number"} from ${lowest} to ${highest}.`);
    body[name] = value;
  }
  const stops = (fields.stop ?? "").split("\n").filter((line) => line !== "");
  if (stops.length > MOST_STOPS) throw new Error(`At most ${MOST_STOPS} stop strings.`);
  if (stops.length) body.stop = stops;
  if ((fields.schema ?? "").trim()) {
    const schema = json(fields.schema, "The JSON schema", isObject);
    body.response_format = { type: "json_schema", json_schema: { name: "answer", schema, strict: true } };
  }
  if ((fields.tools ?? "").trim()) body.tools = json(fields.tools, "Tools", Array.isArray);
  return body;
}

/** `values()`: the fields; `system`: of the conversation on screen, through `getSystem` and `setSystem`. */
export class Settings {
  constructor({ getSystem, setSystem }) {
    this.dialog = byId("settings");
    this.form = this.dialog.querySelector("form");
    this.fields = isObject(setting("sampling")) ? setting("sampling") : {};
    this.getSystem = getSystem;
    this.setSystem = setSystem;
    byId("numbers").replaceChildren(
      ...NUMBERS.map(([name, title, min, max, step, whole]) =>
        h(
          "label",
          { class: "field" },
          h("span", { text: title }),
          h("input", {
            name,
            type: "number",
            min,
            max,
            step,
            inputmode: whole ? "numeric" : "decimal",
            placeholder: "model’s",
          }),
        ),
      ),
    );
    this.form.addEventListener("submit", (event) => this.#save(event));
    byId("settings-open").addEventListener("click", () => this.open());
    byId("settings-reset").addEventListener("click", () => {
      for (const input of this.form.elements) if (input.name && input.name !== "system") input.value = "";
    });
    byId("settings-cancel").addEventListener("click", () => this.dialog.close());
    this.#mark();
  }

  open() {
    for (const input of this.form.elements)
      if (input.name) input.value = input.name === "system" ? this.getSystem() : String(this.fields[input.name] ?? "");
    byId("settings-error").textContent = "";
    this.dialog.showModal();
  }

  body() {
    return sampling(this.fields);
  }

  #save(event) {
    event.preventDefault();
    const fields = {};
    for (const input of this.form.elements) if (input.name && input.value) fields[input.name] = input.value;
    const { system = "", ...others } = fields;
    try {
      sampling(others);
    } catch (error) {
      byId("settings-error").textContent = error.message;
      return;
    }
    this.fields = others;
    saveSetting("sampling", others);
    this.setSystem(system);
    this.#mark();
    this.dialog.close();
  }

  #mark() {
    const count = Object.keys(this.fields).length;
    byId("settings-count").textContent = count ? String(count) : "";
    byId("settings-open").setAttribute("aria-label", count ? `Settings, ${count} changed` : "Settings");
  }
}
