// Controls of a trace: its live parameters, pause and cancel.

import { niceAbove } from "./colours.js";
import { announce, el, newId, setText } from "./dom.js";

/** The least time between two changes that a slider sends, in milliseconds. */
const BETWEEN_MS = 80;

/** One live parameter. A number has a slider, a boolean a box, and any other value a field of JSON. */
class Parameter {
  constructor(name, value, send) {
    this.name = name;
    this.send = send;
    this.isNumber = typeof value === "number";
    this.held = false;
    const id = newId("live");
    this.element = el("div", { class: "parameter" });
    if (this.isNumber) {
      this.slider = el("input", { type: "range", id, step: "any" });
      this.field = el("input", { type: "number", step: "any", "aria-label": `${name}, as a number` });
      this.slider.addEventListener("input", () => this.set(Number(this.slider.value)));
      this.slider.addEventListener("keydown", (event) => this.key(event));
      this.field.addEventListener("change", () => this.field.value !== "" && this.set(Number(this.field.value)));
      this.element.append(el("label", { for: id, text: name }), this.slider, this.field);
    } else if (typeof value === "boolean") {
      this.field = this.box = el("input", { type: "checkbox", id, onchange: () => this.send(name, this.box.checked) });
      this.element.append(el("label", { for: id, text: name }), this.box);
    } else {
      this.field = el("input", { type: "text", id, spellcheck: "false", class: "wide" });
      const apply = el("button", { type: "button", onclick: () => this.setJson() }, "Set");
      this.element.append(el("label", { for: id, text: name }), this.field, apply);
      this.apply = apply;
    }
    this.show(value);
  }

  set(value) {
    this.held = true;
    this.value = value;
    this.fit(value);
    this.slider.value = this.field.value = value;
    this.send(this.name, value);
  }

  setJson() {
    try {
      this.send(this.name, JSON.parse(this.field.value));
    } catch {
      announce(`${this.name}: expected JSON, such as [0.5, 1]`);
      this.field.setAttribute("aria-invalid", "true");
    }
  }

  /** A slider without steps of its own moves by a fiftieth of its range. */
  key(event) {
    const sides = { ArrowLeft: -1, ArrowDown: -1, ArrowRight: 1, ArrowUp: 1 };
    if (!(event.key in sides) || event.ctrlKey || event.altKey || event.metaKey) return;
    event.preventDefault();
    const size = this.range / 50;
    const steps = Math.round(Number(this.slider.value) / size) + sides[event.key];
    this.set(Number(Math.max(-this.range, Math.min(this.range, steps * size)).toPrecision(12)));
  }

  fit(value) {
    const least = niceAbove(Math.max(10, 1.3 * Math.abs(value)));
    if (this.range >= Math.max(10, Math.abs(value))) return;
    this.range = least;
    this.slider.min = -least;
    this.slider.max = least;
  }

  /** Show the value that holds, unless the user is changing it. */
  show(value) {
    if (this.held || value === undefined) return;
    if (this.isNumber) {
      if (this.value === value) return;
      this.value = value;
      this.fit(value);
      this.slider.value = this.field.value = value;
    } else if (this.box) {
      this.box.checked = value;
    } else if (this.field.getRootNode().activeElement !== this.field) {
      const text = JSON.stringify(value);
      if (this.field.value !== text) this.field.value = text;
    }
  }

  /** Let the user change it, or say why not. */
  allow(refusal) {
    for (const one of [this.slider, this.field, this.apply]) {
      if (!one) continue;
      one.disabled = Boolean(refusal);
      one.title = refusal ?? "";
    }
  }
}

/** The live parameters of a trace. Of fast changes, only the latest waits for the one that is on its way. */
export class LiveParameters {
  /** `api` steers: `steer(id, values)` resolves to `{version}`. */
  constructor(id, api) {
    this.id = id;
    this.api = api;
    this.parameters = new Map();
    this.next = {};
    this.busy = false;
    this.version = 0;
    this.body = el("div", { class: "parameters" });
    this.error = el("p", { class: "error", role: "alert", hidden: true });
    this.reason = el("p", { class: "hint" });
    this.element = el("section", { class: "live", "aria-label": "Live parameters", hidden: true });
    this.element.append(el("h3", { text: "Live parameters" }), this.body, this.reason, this.error);
  }

  /** Show the values that hold. `version` is that of the last change among the trace's events. */
  update(values, version, refusal) {
    for (const [name, value] of Object.entries(values)) {
      let one = this.parameters.get(name);
      if (!one) {
        one = new Parameter(name, value, (which, wanted) => this.send(which, wanted));
        this.parameters.set(name, one);
        this.body.append(one.element);
      }
      if (!this.busy && version >= this.version) one.held = false;
      one.show(value);
      one.allow(refusal);
    }
    this.element.hidden = !this.parameters.size;
    setText(this.reason, refusal ?? "");
  }

  async send(name, value) {
    this.next[name] = value;
    if (this.busy) return;
    this.busy = true;
    try {
      while (Object.keys(this.next).length) {
        const values = this.next;
        this.next = {};
        const { version } = await this.api.steer(this.id, values);
        this.version = Math.max(this.version, version);
        this.fail(null);
        await new Promise((resolve) => setTimeout(resolve, BETWEEN_MS));
      }
    } catch (problem) {
      this.next = {};
      for (const one of this.parameters.values()) one.held = false;
      this.fail(problem.message);
    } finally {
      this.busy = false;
    }
  }

  fail(message) {
    this.error.hidden = message === null;
    setText(this.error, message ?? "");
  }
}

/** Pause, resume and cancel. */
export class Buttons {
  /** `api` has `pause`, `resume`, `cancel` and `refusal`. */
  constructor(id, api) {
    this.id = id;
    this.api = api;
    this.pause = el("button", { type: "button", onclick: () => this.act(this.isPaused ? "resume" : "pause") }, "Pause");
    this.cancel = el("button", { type: "button", class: "danger", onclick: () => this.act("cancel") }, "Cancel");
    this.error = el("span", { class: "error", role: "alert" });
    this.element = el("div", { class: "row buttons" }, this.pause, this.cancel, this.error);
  }

  async act(what) {
    try {
      await this.api[what](this.id, "");
      setText(this.error, "");
    } catch (problem) {
      setText(this.error, problem.message);
    }
  }

  update(state) {
    this.isPaused = state.status === "paused";
    setText(this.pause, this.isPaused ? "Resume" : "Pause");
    const refusal = state.isOver ? "The trace has ended." : this.api.refusal("steer");
    for (const one of [this.pause, this.cancel]) {
      one.disabled = Boolean(refusal);
      one.title = refusal ?? "";
    }
    this.element.classList.toggle("over", state.isOver);
  }
}
