// A heat map of rows, such as layers, by tokens. Its canvas has the size of what is in view; the scroll bar is the page's.

import { Scale, palette } from "./colours.js";
import { numberOf } from "./choice.js";
import { inFrame } from "./frames.js";
import { el, quoted, setText, shown } from "./dom.js";

const ROW = 20;
const NUMBER_WIDTH = 14;
const LENS_WIDTH = 74;
const LABELS = 40;
const FOOT = 18;
const FONT = "11px ui-monospace, Menlo, Consolas, monospace";

export class HeatMap {
  /** `onpick(index)` is called for the token under the pointer; null for none. */
  constructor(onpick) {
    this.onpick = onpick;
    this.canvas = el("canvas", { role: "img", "aria-label": "Heat map" });
    this.spacer = el("div", { class: "spacer" });
    this.scroller = el(
      "div",
      { class: "heat-scroll", tabindex: "0", role: "region", "aria-label": "Heat map of layers by tokens" },
      this.canvas,
      this.spacer,
    );
    this.least = el("span");
    this.most = el("span");
    this.key = el("span", { class: "scale" }, this.least, el("span", { class: "ramp" }), this.most);
    this.legend = el("span", { class: "hint sampled", text: "the layer’s first token is the sampled one" });
    this.read = el("output", { class: "hint read" });
    this.element = el("div", { class: "heat" }, this.scroller, el("div", { class: "row" }, this.key, this.legend, this.read));
    this.scroller.addEventListener("scroll", () => this.paint());
    this.scroller.addEventListener("keydown", (event) => this.keyDown(event));
    this.canvas.addEventListener("pointermove", (event) => this.hover(event));
    this.canvas.addEventListener("pointerleave", () => this.leave());
    this.resize = new ResizeObserver(() => this.paint());
    this.resize.observe(this.scroller);
    this.repaint = () => this.paint();
    this.row = null;
    this.picked = null;
    this.show(null, null, false);
  }

  /** Show another heat map of a choice. With `byRow`, each row has colours of its own range. */
  show(choice, heat, byRow) {
    this.choice = choice;
    this.heat = heat;
    this.byRow = byRow;
    this.scales = [];
    this.scaled = 0;
    this.limit = 0;
    this.epoch = choice?.epoch;
    /** Whether cells have words: those of a lens, or those that heads attend to. */
    this.hasWords = false;
    this.isLens = false;
  }

  get cell() {
    return this.hasWords ? LENS_WIDTH : NUMBER_WIDTH;
  }

  /** Draw up to and without the token `limit`. */
  draw(limit) {
    if (!this.heat) return;
    if (this.epoch !== this.choice.epoch) this.show(this.choice, this.heat, this.byRow);
    const scroller = this.scroller;
    const follows = scroller.scrollLeft + scroller.clientWidth >= scroller.scrollWidth - 2 * this.cell;
    for (; this.scaled < this.choice.length; this.scaled++) this.take(this.choice.heatColumn(this.heat, this.scaled));
    this.limit = limit;
    this.rows = this.heat.members.length;
    this.spacer.style.width = `${LABELS + limit * this.cell}px`;
    this.spacer.style.height = `${this.rows * ROW + FOOT}px`;
    if (follows) scroller.scrollLeft = scroller.scrollWidth;
    this.paint();
  }

  take(column) {
    column.forEach((item, row) => {
      const best = this.choice.best(item);
      if (best) this.hasWords = true;
      if (best && best.position === undefined) this.isLens = true;
      const at = this.byRow ? row : 0;
      (this.scales[at] ??= new Scale()).take(best ? best.value : numberOf(item));
    });
  }

  paint() {
    if (!this.heat || !this.rows) return;
    const [width, height] = [this.scroller.clientWidth, this.rows * ROW + FOOT];
    const ratio = devicePixelRatio;
    if (this.canvas.width !== Math.round(width * ratio) || this.canvas.height !== Math.round(height * ratio)) {
      this.canvas.width = Math.round(width * ratio);
      this.canvas.height = Math.round(height * ratio);
      this.canvas.style.width = `${width}px`;
      this.canvas.style.height = `${height}px`;
    }
    const colours = palette();
    const ctx = this.canvas.getContext("2d");
    ctx.setTransform(ratio, 0, 0, ratio, 0, 0);
    ctx.clearRect(0, 0, width, height);
    ctx.font = FONT;
    ctx.textBaseline = "middle";
    const left = this.scroller.scrollLeft;
    const from = Math.floor(left / this.cell);
    const until = Math.min(this.limit, Math.ceil((left + width - LABELS) / this.cell));
    ctx.save();
    ctx.beginPath();
    ctx.rect(LABELS, 0, width - LABELS, height);
    ctx.clip();
    for (let index = from; index < until; index++) this.paintColumn(ctx, index, LABELS + index * this.cell - left, colours);
    ctx.restore();
    ctx.fillStyle = colours.muted;
    ctx.textAlign = "right";
    for (let row = 0; row < this.rows; row++) ctx.fillText(this.label(row), LABELS - 6, this.top(row) + ROW / 2);
    const scale = this.scales[this.byRow && this.row !== null ? this.row : 0];
    this.legend.hidden = !this.isLens;
    const rows = this.hasWords && !this.isLens ? "heads" : "layers";
    this.scroller.setAttribute("aria-label", `Heat map of ${rows} by tokens`);
    const oneKey = scale && (!this.byRow || this.row !== null);
    setText(this.least, oneKey ? shown(scale.low) : "low");
    setText(this.most, oneKey ? shown(scale.high) : "high");
    this.key.classList.toggle("diverges", Boolean(scale?.diverges));
    this.canvas.setAttribute("aria-label", `Heat map of ${this.heat.name}: ${this.rows} rows by ${this.limit} tokens`);
  }

  /** The last row is at the top, as the model's last layer is. */
  top(row) {
    return (this.rows - 1 - row) * ROW;
  }

  label(row) {
    return /(\d*)$/.exec(this.heat.members[row])[1] || "0";
  }

  paintColumn(ctx, index, x, colours) {
    const column = this.choice.heatColumn(this.heat, index);
    const gap = 1;
    for (let row = 0; row < this.rows; row++) {
      const item = column[row] ?? null;
      const best = this.choice.best(item);
      const step = this.scales[this.byRow ? row : 0]?.step(best ? best.value : numberOf(item)) ?? null;
      ctx.fillStyle = step === null ? colours.sunken : colours.steps[step];
      ctx.fillRect(x, this.top(row), this.cell - gap, ROW - gap);
      if (best) {
        ctx.fillStyle = colours.text;
        ctx.textAlign = "left";
        ctx.fillText(fitting(best.text), x + 5, this.top(row) + ROW / 2);
        if (this.isLens && best.text === this.choice.texts[index] && best.text) {
          // The layer says what was sampled.
          ctx.fillStyle = colours.accent;
          ctx.fillRect(x, this.top(row), 3, ROW - gap);
        }
      }
    }
    if (index === this.picked) {
      ctx.strokeStyle = colours.text;
      ctx.lineWidth = 1.5;
      ctx.strokeRect(x - 0.5, 0.5, this.cell, this.rows * ROW - 1);
    }
    if (this.hasWords || index % 10 === 0) {
      ctx.fillStyle = colours.muted;
      ctx.textAlign = "left";
      const foot = this.hasWords ? fitting(this.choice.texts[index] ?? "") : String(index);
      ctx.fillText(foot, x + (this.hasWords ? 5 : 0), this.rows * ROW + FOOT / 2);
    }
  }

  place(event) {
    const box = this.canvas.getBoundingClientRect();
    const x = event.clientX - box.left;
    if (x < LABELS) return [null, null];
    const index = Math.floor((x - LABELS + this.scroller.scrollLeft) / this.cell);
    const row = this.rows - 1 - Math.floor((event.clientY - box.top) / ROW);
    return [index < this.limit ? index : null, row >= 0 && row < this.rows ? row : null];
  }

  hover(event) {
    const [index, row] = this.place(event);
    this.row = row;
    this.onpick(index);
    this.tell();
  }

  leave() {
    this.row = null;
    this.onpick(null);
  }

  keyDown(event) {
    const sides = { ArrowLeft: -1, ArrowRight: 1 };
    const ups = { ArrowUp: 1, ArrowDown: -1 };
    if (event.key in sides) {
      const next = this.picked === null ? this.limit - 1 : this.picked + sides[event.key];
      this.row ??= this.rows - 1;
      this.onpick(Math.max(0, Math.min(this.limit - 1, next)));
      this.reveal();
    } else if (event.key in ups && this.picked !== null) {
      this.row = Math.max(0, Math.min(this.rows - 1, (this.row ?? this.rows) + ups[event.key]));
    } else if (event.key === "Escape") {
      this.leave();
    } else return;
    event.preventDefault();
    this.tell();
    this.paint();
  }

  reveal() {
    const x = this.picked * this.cell;
    const view = this.scroller.clientWidth - LABELS;
    const left = this.scroller.scrollLeft;
    if (x < left) this.scroller.scrollLeft = x;
    else if (x + this.cell > left + view) this.scroller.scrollLeft = x + this.cell - view;
  }

  /** Outline a token's column, or none. */
  pick(index) {
    if (index === this.picked) return;
    this.picked = index;
    this.tell();
    inFrame(this.repaint);
  }

  tell() {
    if (!this.heat || this.picked === null || this.row === null) return setText(this.read, "");
    const item = this.choice.heatColumn(this.heat, this.picked)[this.row] ?? null;
    const best = this.choice.best(item);
    const where = best?.position === undefined ? "" : ` at position ${best.position}`;
    const value = best ? `${quoted(best.text)}${where} ${shown(best.value)}` : shown(numberOf(item) ?? null);
    setText(this.read, `${this.heat.name}, row ${this.label(this.row)}, token ${this.picked}: ${value}`);
  }

  remove() {
    this.resize.disconnect();
  }
}

/** A token that fits into a cell. */
function fitting(text) {
  const plain = text.replaceAll("\n", "↵").replaceAll("\t", "⇥").replace(/ {2,}/g, (run) => `␣${run.length}`).replace(/^ /, "·");
  return plain.length > 10 ? `${plain.slice(0, 9)}…` : plain;
}
