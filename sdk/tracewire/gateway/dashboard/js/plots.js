// A plot for each scalar save, over the index of tokens, drawn by uPlot.

import { palette } from "./colours.js";
import { el, setText, shown } from "./dom.js";

const HEIGHT = 112;
const FONT = "11px system-ui, sans-serif";

export class Plot {
  /** `onpick(index)` is called for the token under the pointer; null for none. */
  constructor(name, number, onpick) {
    this.name = name;
    this.number = number;
    this.onpick = onpick;
    this.marks = [];
    this.value = el("output", { class: "value" });
    this.holder = el("div", { class: "plot-area" });
    this.element = el(
      "figure",
      { class: "plot", role: "group", "aria-label": `Plot of ${name}` },
      el("figcaption", {}, el("span", { class: "key" }), el("span", { class: "name", text: name }), this.value),
      this.holder,
    );
    this.element.querySelector(".key").classList.add(`series${(number % 6) + 1}`);
    this.chart = null;
    this.drawn = "";
    this.resize = new ResizeObserver(() => this.fit());
    this.resize.observe(this.holder);
  }

  make() {
    const colours = palette();
    const line = colours.series[this.number % 6];
    const axis = {
      stroke: colours.muted,
      font: FONT,
      grid: { stroke: colours.line, width: 1 },
      ticks: { show: false },
      gap: 4,
    };
    const options = {
      width: Math.max(80, this.holder.clientWidth),
      height: HEIGHT,
      padding: [6, 6, 0, 0],
      legend: { show: false },
      cursor: { y: false, points: { size: 7 }, drag: { setScale: false, x: false, y: false } },
      scales: { x: { time: false, range: (_, low, high) => [low ?? 0, Math.max(high ?? 1, (low ?? 0) + 1)] } },
      axes: [
        { ...axis, size: 22, incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 50000] },
        { ...axis, size: 46, values: (_, ticks) => ticks.map(shown), space: 26 },
      ],
      series: [{}, { stroke: line, width: 1.5, points: { show: false }, spanGaps: true }],
      hooks: { draw: [(chart) => this.drawMarks(chart)], setCursor: [(chart) => this.point(chart)] },
    };
    this.chart = new uPlot(options, [[0], [null]], this.holder);
    this.chart.over.addEventListener("mouseleave", () => this.onpick(null));
  }

  /** Draw a column up to and without the token `limit`, on an axis for `total` tokens. */
  draw(values, limit, total, marks) {
    if (!this.chart) this.make();
    const numbers = values.slice(0, limit);
    while (numbers.length < Math.max(1, total)) numbers.push(null);
    if (this.indices?.length !== numbers.length) this.indices = numbers.map((_, index) => index);
    this.marks = marks;
    this.quiet = true;
    this.chart.setData([this.indices, numbers]);
    this.quiet = false;
  }

  drawMarks(chart) {
    const { ctx, bbox } = chart;
    ctx.save();
    ctx.strokeStyle = palette().mark;
    ctx.lineWidth = devicePixelRatio;
    ctx.setLineDash([4 * devicePixelRatio, 3 * devicePixelRatio]);
    for (const mark of this.marks) {
      const x = Math.round(chart.valToPos(mark.index, "x", true)) + 0.5;
      if (x < bbox.left || x > bbox.left + bbox.width) continue;
      ctx.beginPath();
      ctx.moveTo(x, bbox.top);
      ctx.lineTo(x, bbox.top + bbox.height);
      ctx.stroke();
    }
    ctx.restore();
  }

  point(chart) {
    if (this.quiet) return;
    const index = chart.cursor.idx;
    if (index !== null && index !== undefined && chart.cursor.event) this.onpick(index);
  }

  /** Put the cursor on a token, and show its value, or the last one. */
  pick(index, limit) {
    if (!this.chart) return;
    const at = index ?? limit - 1;
    const value = this.chart.data[1][at];
    setText(this.value, value === null || value === undefined ? "–" : shown(value));
    this.quiet = true;
    const left = index === null ? -10 : this.chart.valToPos(index, "x");
    this.chart.setCursor({ left, top: 10 }, false);
    this.quiet = false;
  }

  fit() {
    const width = this.holder.clientWidth;
    if (this.chart && width > 0 && width !== this.chart.width) this.chart.setSize({ width, height: HEIGHT });
  }

  /** Take the colours of another theme. */
  retheme() {
    this.chart?.destroy();
    this.chart = null;
    this.indices = null;
  }

  remove() {
    this.resize.disconnect();
    this.chart?.destroy();
    this.element.remove();
  }
}
