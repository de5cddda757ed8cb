// A form that starts a trace.

import { api } from "./api.js";
import { el, newId, setText } from "./dom.js";
import { arrayOf } from "./npy.js";

const CONTROLS = "input, textarea, select";

function field(label, control, hint = "") {
  control.id ||= newId("field");
  if (!hint) return el("label", { class: "field" }, label, control);
  const id = newId("hint");
  control.setAttribute("aria-describedby", id);
  return el("div", { class: "field" }, el("label", { for: control.id, text: label }), control, el("span", { class: "hint", id, text: hint }));
}

const number = (name, value, more = {}) => el("input", { type: "number", name, value, step: "any", ...more });
const text = (name, value = "") => el("input", { type: "text", name, value, spellcheck: "false" });
const check = (name, label, checked = false) => el("label", { class: "check" }, el("input", { type: "checkbox", name, checked }), label);

export class StartView {
  constructor() {
    this.models = el("select", { name: "model", required: true });
    this.prompt = el("textarea", { name: "prompt", rows: "5", spellcheck: "false", required: true });
    this.file = el("input", { type: "file", name: "direction", accept: ".npy,.json" });
    this.problem = el("p", { class: "error", role: "alert", hidden: true });
    this.button = el("button", { type: "submit", class: "primary" }, "Start");
    this.reason = el("span", { class: "hint" });
    this.form = el(
      "form",
      { class: "start", novalidate: true },
      el("h1", { text: "Start a trace" }),
      field("Model", this.models),
      field("Prompt", this.prompt),
      el(
        "div",
        { class: "fields" },
        field("Most tokens", number("max_tokens", "128", { min: "1" })),
        field("Temperature", number("temperature", "0.8", { min: "0" })),
        field("Seed", number("seed", "", { placeholder: "any" })),
        field("Trace id", el("input", { type: "text", name: "trace_id", placeholder: "a new one", spellcheck: "false" })),
      ),
      check("ignore_eos", "Go on behind the end-of-text token"),
      el(
        "fieldset",
        {},
        el("legend", { text: "Watch" }),
        check("lens", "Logit lens at each layer", true),
        check("norms", "Norm of the residual stream at each layer"),
      ),
      el(
        "fieldset",
        {},
        el("legend", { text: "Steer" }),
        field("Direction", this.file, "An .npy file, or a list of numbers in JSON, of the model's hidden size. Without one, nothing is steered."),
        el(
          "div",
          { class: "fields" },
          field("Location", text("at", "residual(4)")),
          field("Live parameter", text("live_name", "alpha")),
          field("First value", number("live_value", "0")),
        ),
        check("project", "Probe the projection onto the direction, too", true),
      ),
      el(
        "details",
        {},
        el("summary", { text: "More, in JSON" }),
        field("Further interventions", el("textarea", { name: "interventions", rows: "3", spellcheck: "false" }), 'A list, such as [{"do": "probe", "name": "norm", "at": "residual(2)", "reduce": "norm"}].'),
        field("Further live parameters", el("textarea", { name: "live", rows: "2", spellcheck: "false" }), 'An object, such as {"beta": 1.0}.'),
      ),
      this.problem,
      el("div", { class: "row" }, this.button, this.reason),
    );
    this.form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.submit();
    });
    this.element = this.form;
    const refusal = api.refusal("submit");
    this.button.disabled = Boolean(refusal);
    setText(this.reason, refusal ?? "");
    this.load();
  }

  async load() {
    try {
      const { data } = await api.engines();
      const names = [...new Set(data.map((one) => one.model))].sort();
      this.models.replaceChildren(...names.map((name) => el("option", { value: name }, name)));
      if (!names.length) this.fail("No engine is running.", "model");
    } catch (problem) {
      this.fail(problem.message);
    }
  }

  fail(message, name = null) {
    this.problem.hidden = false;
    setText(this.problem, message);
    const control = name && this.form.elements.namedItem(name);
    if (!control) return;
    control.setAttribute("aria-invalid", "true");
    control.focus();
  }

  /** The request that the form stands for. Throws an error with the `field` that is wrong. */
  async body() {
    const given = this.form.elements;
    const value = (name) => given.namedItem(name).value.trim();
    const checked = (name) => given.namedItem(name).checked;
    const sampling = { max_tokens: Number(value("max_tokens")), temperature: Number(value("temperature")) };
    if (value("seed")) sampling.seed = Number(value("seed"));
    if (checked("ignore_eos")) sampling.ignore_eos = true;
    const interventions = [];
    const live = parsed(value("live"), "live", {});
    if (this.file.files.length) {
      const vector = await arrayOf(this.file.files[0]).catch((error) => wrong("direction", error.message));
      const at = value("at");
      live[value("live_name")] = Number(value("live_value"));
      interventions.push({ do: "steer", at, vector, scale: { live: value("live_name") } });
      if (checked("project")) interventions.push({ do: "probe", name: "projection", at, weight: vector });
    }
    if (checked("norms")) interventions.push({ do: "probe", name: "norm", at: "residual(*)", reduce: "norm" });
    if (checked("lens")) interventions.push({ do: "logit_lens", name: "lens", at: "residual(*)", top_k: 3 });
    interventions.push(...parsed(value("interventions"), "interventions", []));
    // The prompt's white space counts.
    const body = { model: value("model"), prompt: this.prompt.value, sampling, interventions, live, token_strings: true };
    if (value("trace_id")) body.trace_id = value("trace_id");
    return body;
  }

  async submit() {
    this.problem.hidden = true;
    for (const one of this.form.querySelectorAll(CONTROLS)) one.removeAttribute("aria-invalid");
    this.button.disabled = true;
    try {
      const { id } = await api.submit(await this.body());
      location.hash = `#/trace/${encodeURIComponent(id)}`;
    } catch (error) {
      const name = error.field?.replace(/^sampling\./, "").replace(/[[.].*$/, "");
      this.fail(error.field ? `${error.field}: ${error.message.replace(`${error.field}: `, "")}` : error.message, name);
    } finally {
      this.button.disabled = Boolean(api.refusal("submit"));
    }
  }

  remove() {
    this.element.remove();
  }
}

function wrong(name, message) {
  throw Object.assign(new Error(message), { field: name });
}

function parsed(given, name, usual) {
  if (!given) return usual;
  try {
    const value = JSON.parse(given);
    if (Array.isArray(value) === Array.isArray(usual) && typeof value === "object" && value) return value;
  } catch {
    // Said below.
  }
  return wrong(name, Array.isArray(usual) ? "expected a list in JSON" : "expected an object in JSON");
}
