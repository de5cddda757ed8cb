// Numbers as colours. A scale has eight steps on each side of its middle; the style sheet has the colours of the steps.

import { onTheme, themeRoot } from "./theme.js";

export const STEPS = 8;

/** The next round number that is not below a positive size. */
export function niceAbove(size) {
  if (!(size > 0) || !Number.isFinite(size)) return 1;
  const power = 10 ** Math.floor(Math.log10(size));
  for (const factor of [1, 1.5, 2, 3, 4, 5, 6, 8]) if (factor * power >= size) return factor * power;
  return 10 * power;
}

/**
 * A range of numbers that grows in round steps, so that it changes seldom while numbers arrive.
 * A range with numbers of both signs is symmetric about 0 and has two colours. Another one has one colour.
 */
export class Scale {
  constructor() {
    this.least = Infinity;
    this.most = -Infinity;
    this.low = 0;
    this.high = 1;
    this.diverges = false;
  }

  /** Take a number in. Returns whether the range has changed. */
  take(value) {
    if (typeof value !== "number" || !Number.isFinite(value)) return false;
    if (value >= this.least && value <= this.most) return false;
    this.least = Math.min(this.least, value);
    this.most = Math.max(this.most, value);
    const before = `${this.low} ${this.high} ${this.diverges}`;
    this.diverges = this.least < 0 && this.most > 0;
    if (this.diverges) {
      this.high = niceAbove(Math.max(-this.least, this.most));
      this.low = -this.high;
    } else {
      const width = niceAbove(Math.max(this.most - this.least, Math.abs(this.most) * 1e-3, 1e-9));
      const unit = width / 4;
      this.low = Math.floor(this.least / unit) * unit;
      this.high = Math.max(this.low + width, Math.ceil(this.most / unit) * unit);
    }
    return before !== `${this.low} ${this.high} ${this.diverges}`;
  }

  /** The step of a number: from -8 to 8 where the range diverges, else from 0 to 8; null for no number. */
  step(value) {
    if (typeof value !== "number" || !Number.isFinite(value)) return null;
    if (this.diverges) return Math.round(Math.max(-1, Math.min(1, value / this.high)) * STEPS);
    return Math.round(Math.max(0, Math.min(1, (value - this.low) / (this.high - this.low))) * STEPS);
  }
}

/** The class of a token with a step. */
export const stepClass = (step) => (step === null || step === 0 ? "t" : step > 0 ? `t p${step}` : `t n${-step}`);

let cached = null;
onTheme(() => (cached = null));

/** The colours of the theme in use, for what draws on a canvas: by the names of the style sheet's variables. */
export function palette() {
  if (cached) return cached;
  // A property may hold `light-dark(...)`. As the colour of an element it is resolved.
  const probe = document.createElement("span");
  themeRoot().append(probe);
  const read = (name) => {
    probe.style.color = `var(--${name})`;
    return getComputedStyle(probe).color;
  };
  const names = ["text", "muted", "line", "surface", "sunken", "accent", "pos", "neg", "mark"];
  const found = Object.fromEntries(names.map((name) => [name, read(name)]));
  found.series = [1, 2, 3, 4, 5, 6].map((number) => read(`series${number}`));
  found.steps = {};
  for (let step = -STEPS; step <= STEPS; step++) {
    found.steps[step] = mixed(found.surface, step < 0 ? found.neg : found.pos, Math.abs(step) / STEPS);
  }
  probe.remove();
  return (cached = found);
}

function mixed(from, to, part) {
  const channels = (colour) => colour.match(/\d+/g).slice(0, 3).map(Number);
  const [a, b] = [channels(from), channels(to)];
  return `rgb(${a.map((value, index) => Math.round(value + (b[index] - value) * part)).join(" ")})`;
}
