// Which tokens of a trace are shown: all that there are, or those up to a place that a person chooses or plays.

import { el, setText } from "./dom.js";

/** The longest wait between two tokens that are played, and the pace where the times are not known, in seconds. */
const LONGEST_WAIT_S = 0.5;
const UNKNOWN_WAIT_S = 0.05;

export class Scrubber {
  /** `onmove()` is called when the place changes. */
  constructor(onmove) {
    this.onmove = onmove;
    this.at = null;
    this.length = 0;
    this.playing = null;
    this.slider = el("input", { type: "range", min: "0", step: "1", "aria-label": "Shown tokens", class: "wide" });
    this.slider.addEventListener("input", () => this.move(Number(this.slider.value)));
    this.button = el("button", { type: "button", onclick: () => this.toggle() }, "Play");
    this.end = el("button", { type: "button", onclick: () => this.move(this.length) }, "Latest");
    this.label = el("output", { class: "hint count" });
    this.element = el("div", { class: "row scrubber" }, this.button, this.slider, this.end, this.label);
  }

  /** Up to and without which token to show. */
  get limit() {
    return this.at ?? this.length;
  }

  update(choice) {
    this.choice = choice;
    this.length = choice?.length ?? 0;
    if (this.at !== null && this.at > this.length) this.at = this.length;
    this.slider.max = this.length;
    this.slider.value = this.limit;
    this.slider.setAttribute("aria-valuetext", `${this.limit} of ${this.length} tokens`);
    this.end.disabled = this.at === null;
    this.button.disabled = !this.length;
    setText(this.button, this.playing ? "Stop" : "Play");
    setText(this.label, `${this.limit} of ${this.length} tokens`);
  }

  move(at) {
    this.stop();
    this.place(at);
  }

  place(at) {
    this.at = at >= this.length ? null : at;
    this.update(this.choice);
    this.onmove();
  }

  toggle() {
    if (this.playing) {
      this.stop();
      this.update(this.choice);
      return;
    }
    if (this.at === null) this.at = 0;
    this.playing = setTimeout(() => this.next(), 0);
    this.update(this.choice);
  }

  next() {
    const at = this.at + 1;
    const wait = this.wait(at);
    this.playing = at < this.length ? setTimeout(() => this.next(), wait * 1000) : null;
    this.place(at);
  }

  /** How long after the token before it this token came. */
  wait(index) {
    const times = this.choice.times;
    const known = times[index] && times[index - 1];
    return known ? Math.max(0, Math.min(LONGEST_WAIT_S, times[index] - times[index - 1])) : UNKNOWN_WAIT_S;
  }

  stop() {
    clearTimeout(this.playing);
    this.playing = null;
  }
}
