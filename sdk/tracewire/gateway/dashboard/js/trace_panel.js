// One trace: its text, plots, heat map, marks and controls. A page has one of them, or several side by side.

import { Scale } from "./colours.js";
import { numberOf } from "./choice.js";
import { Buttons, LiveParameters } from "./controls.js";
import { announce, clock, duration, el, newId, quoted, setText, shown } from "./dom.js";
import { afterDrawing, inFrame, notInFrame, paced, whileInView } from "./frames.js";
import { HeatMap } from "./heat_map.js";
import { Plot } from "./plots.js";
import { Scrubber } from "./scrubber.js";
import { onTheme } from "./theme.js";
import { TokenText, markLabel, textMarks } from "./token_text.js";
import { TraceState } from "./trace_state.js";

/** How often plots and heat maps are drawn that grow, in milliseconds. */
const SLOW_MS = 120;
/** How many plots are open at first, and how many entries of the history are shown. */
const FIRST_PLOTS = 3;
const HISTORY = 40;

export class TracePanel {
  /**
   * `connection` follows the trace and `api` controls it. `href` is where the trace's name leads, if anywhere.
   * `onclose()` is called by the button that a panel among several has; without it, there is none.
   */
  constructor(id, { connection, api, href = null, onclose = null }) {
    this.id = id;
    this.connection = connection;
    this.api = api;
    this.state = new TraceState(id);
    this.key = "0.0";
    this.picked = null;
    this.colour = undefined;
    this.scale = new Scale();
    this.scaled = 0;
    this.plots = new Map();
    this.isOver = false;
    this.several = onclose !== null;
    this.build(href, onclose);
    this.draw = () => this.drawNow();
    this.scrollHistory = () => {
      this.history.scrollTop = this.history.scrollHeight;
    };
    this.drawSlowly = paced(() => inFrame(this.slow), SLOW_MS);
    this.slow = () => this.drawSlow();
    this.unwatch = whileInView(this.element, (inView) => (inView ? this.open() : this.rest()));
    this.forget = onTheme(() => this.retheme());
    this.readLive();
  }

  build(href, onclose) {
    const pick = (index) => this.pick(index);
    this.status = el("span", { class: "badge" });
    this.about = el("p", { class: "hint about" });
    this.buttons = new Buttons(this.id, this.api);
    this.live = new LiveParameters(this.id, this.api);
    this.text = new TokenText(pick, () => this.changed());
    this.scrubber = new Scrubber(() => this.changed());
    this.heat = new HeatMap(pick);
    this.problem = el("p", { class: "error", role: "alert", hidden: true });
    this.choices = this.select("Choice", () => this.choose(this.choices.value));
    this.colours = this.select("Colour by", () => this.colourBy(this.colours.value));
    this.colourKey = el("span", { class: "scale" }, el("span"), el("span", { class: "ramp" }), el("span"));
    this.plotMenu = this.select("Add a plot", () => this.addPlot(this.plotMenu.value));
    this.plotArea = el("div", { class: "plots" });
    this.heatMenu = this.select("Heat map", () => this.showHeat());
    this.heatScale = this.select("Colours", () => this.showHeat());
    this.heatScale.append(el("option", { value: "" }, "one scale"), el("option", { value: "row" }, "a scale for each row"));
    this.history = el("ol", { class: "history" });
    this.values = el("details", { class: "values" }, el("summary", {}, "Values at the token"), (this.table = el("div")));
    this.values.addEventListener("toggle", () => this.drawValues());
    const heading = newId("trace");
    const close = onclose && el("button", { type: "button", class: "quiet", onclick: onclose, "aria-label": `Close ${this.id}`, title: "Close" }, "×");
    const title = el("h2", { id: heading }, el(href ? "a" : "span", { class: "name", href, text: this.id }));
    this.plotSection = el("section", { "aria-label": "Plots", hidden: true }, el("div", { class: "row" }, el("h3", { text: "Plots" }), this.plotMenu.parentElement), this.plotArea);
    this.heatSection = el("section", { "aria-label": "Layers by tokens", hidden: true }, el("div", { class: "row" }, this.heatMenu.parentElement, this.heatScale.parentElement), this.heat.element);
    this.element = el(
      "article",
      { class: "panel", "aria-labelledby": heading },
      el("header", {}, el("div", { class: "row" }, title, this.status, el("span", { class: "grow" }), this.buttons.element, close), this.about, this.problem),
      el(
        "div",
        { class: "columns" },
        el(
          "section",
          { class: "main", "aria-label": "Text" },
          el("div", { class: "row tools" }, this.choices.parentElement, this.colours.parentElement, this.colourKey),
          this.text.element,
          this.scrubber.element,
        ),
        el("div", { class: "side" }, this.live.element, el("section", { "aria-label": "History" }, el("h3", { text: "History" }), this.history)),
      ),
      this.plotSection,
      this.heatSection,
      this.values,
    );
    this.choices.parentElement.hidden = true;
  }

  select(label, onchange) {
    const made = el("select", { onchange });
    el("label", { class: "inline" }, label, made);
    return made;
  }

  // --- events ---------------------------------------------------------------------------------------------------------

  open() {
    this.inView = true;
    this.changed();
    if (this.stream || this.isOver) return;
    const fields = { arrays: "small", since: this.position ?? "start" };
    this.stream = this.connection.follow(this.id, fields, (event) => this.take(event), (problem) => this.over(problem));
  }

  /** Out of view, a panel reads nothing, and goes on later where it was. */
  rest() {
    this.inView = false;
    notInFrame(this.draw);
    if (!this.stream) return;
    this.position = this.stream.position;
    this.stream.stop();
    this.stream = null;
  }

  take(event) {
    this.state.apply(event);
    if (event.type === "gap") this.readLive();
    if (event.type === "steered" && !this.several) announce(event.changes.map((one) => `Steered: ${markLabel(one)}`).join("; "));
    if (event.type === "final") announce(`The trace ${this.id} ended as ${event.status}.`);
    this.changed();
  }

  over(problem) {
    this.stream = null;
    this.isOver = true;
    if (problem) {
      this.problem.hidden = false;
      setText(this.problem, problem.message);
    }
    this.changed();
  }

  async readLive() {
    try {
      const { values } = await this.api.live(this.id);
      this.known = values;
      // The events that say so may have been trimmed.
      if (this.state.trimmed) Object.assign(this.state.live, values);
      this.changed();
    } catch {
      // Its events have the values, too.
    }
  }

  get choice() {
    return this.state.choices.get(this.key) ?? null;
  }

  get marks() {
    return textMarks(this.state.marks, this.key);
  }

  changed() {
    if (this.inView) inFrame(this.draw);
  }

  // --- drawing --------------------------------------------------------------------------------------------------------

  drawNow() {
    const { state, choice } = this;
    this.drawHead();
    if (choice && this.text.choice !== choice) this.text.show(choice);
    this.scrubber.update(choice);
    if (choice) {
      this.takeColours();
      this.text.draw(this.scrubber.limit, this.marks);
    }
    if (state.revision !== this.drawnRevision || this.known !== this.drawnKnown) {
      this.drawnRevision = state.revision;
      this.drawnKnown = this.known;
      this.drawEvents();
    }
    this.drawSlowly();
  }

  drawHead() {
    const { state } = this;
    setText(this.status, state.status);
    this.status.dataset.state = state.status;
    const parts = [state.model, state.engine && `on ${state.engine}`, `${state.tokens} tokens`];
    const times = this.choice?.times ?? [];
    const seconds = times.length > 1 ? times.at(-1) - times[0] : 0;
    if (seconds > 0) parts.push(`${shown(Number(((times.length - 1) / seconds).toPrecision(3)))} a second`, duration(seconds));
    if (state.attempt > 1) parts.push(`attempt ${state.attempt}`);
    setText(this.about, parts.filter(Boolean).map((part) => part.replaceAll(" ", "\u00a0")).join(" · "));
    this.buttons.update(state);
  }

  drawEvents() {
    const { state } = this;
    const refusal = state.isOver ? "The trace has ended." : this.api.refusal("steer");
    const version = state.marks.at(-1)?.version ?? state.accepted?.live_version ?? 0;
    this.live.update(state.accepted ? state.live : { ...this.known, ...state.live }, version, refusal);
    const steered = state.marks.map((mark) => ({ time: mark.time, mark }));
    const entries = [...state.history, ...steered].sort((a, b) => a.time - b.time).slice(-HISTORY);
    this.history.replaceChildren(...entries.map((one) => this.entry(one)));
    afterDrawing(this.scrollHistory);
    if (state.choices.size > 1 && this.choices.options.length !== state.choices.size) {
      this.choices.parentElement.hidden = false;
      const options = [...state.choices].map(([key, one]) => el("option", { value: key }, `prompt ${one.invoke + 1}, choice ${one.choice + 1}`));
      this.choices.replaceChildren(...options);
      this.choices.value = this.key;
    }
  }

  entry({ time, text, mark }) {
    const made = el("li", {}, el("time", { text: time ? clock(time) : "" }), " ");
    if (!mark) {
      made.append(text);
      return made;
    }
    made.classList.add("steer");
    const changes = Object.entries(mark.values).map(([name, value]) => {
      const [from, to] = [mark.before[name], value].map((one) => (typeof one === "number" ? shown(one) : "…"));
      return `${name} ${from} → ${to}`;
    });
    made.append(el("b", { text: mark.by }), `: ${changes.join(", ")}`);
    const first = mark.first[this.key];
    if (first !== undefined) {
      made.append(", ", el("button", { type: "button", class: "link", onclick: () => this.goTo(first) }, `from token ${first}`));
    }
    return made;
  }

  goTo(index) {
    this.pick(Math.min(index, (this.choice?.length ?? 1) - 1));
    this.text.span(index)?.scrollIntoView({ block: "nearest" });
  }

  drawSlow() {
    const { choice } = this;
    if (!choice || !this.inView) return;
    this.fillMenus();
    const { limit, length } = this.scrubber;
    for (const [name, plot] of this.plots) {
      plot.draw(choice.columns.get(name)?.values ?? [], limit, length, this.marks);
      plot.pick(this.picked, limit);
    }
    this.heat.draw(limit);
    this.drawValues();
  }

  fillMenus() {
    const { choice } = this;
    const heats = choice.heats();
    const members = new Set(heats.flatMap((one) => one.members));
    const scalars = choice.scalars();
    const lone = scalars.filter((name) => !members.has(name));
    const signature = `${this.key} ${choice.columns.size} ${scalars.length}`;
    if (signature === this.menus) return;
    this.menus = signature;
    const options = (names) => names.map((name) => el("option", { value: name }, name));
    this.colours.replaceChildren(el("option", { value: "" }, "nothing"), ...options(scalars));
    if (this.colour === undefined && scalars.length) this.colourBy(lone[0] ?? scalars[0]);
    this.colours.value = this.colour ?? "";
    this.plotMenu.replaceChildren(el("option", { value: "" }, "choose a save"), ...options(scalars));
    if (!this.plots.size) for (const name of lone.slice(0, FIRST_PLOTS)) this.addPlot(name);
    this.plotSection.hidden = !scalars.length;
    const chosen = this.heatMenu.value;
    this.heatMenu.replaceChildren(...options(heats.map((one) => one.name)));
    if (chosen) this.heatMenu.value = chosen;
    this.heatSection.hidden = !heats.length;
    this.showHeat();
  }

  showHeat() {
    const heat = this.choice?.heats().find((one) => one.name === this.heatMenu.value);
    if (!heat) return;
    this.heat.show(this.choice, heat, this.heatScale.value === "row");
    this.heat.draw(this.scrubber.limit);
  }

  addPlot(name) {
    this.plotMenu.value = "";
    if (!name || this.plots.has(name)) return;
    const plot = new Plot(name, this.plots.size, (index) => this.pick(index));
    const remove = () => {
      plot.remove();
      this.plots.delete(name);
    };
    plot.element.firstChild.append(el("button", { type: "button", class: "quiet", onclick: remove, "aria-label": `Remove the plot of ${name}` }, "×"));
    this.plots.set(name, plot);
    this.plotArea.append(plot.element);
    this.changed();
  }

  choose(key) {
    this.key = key;
    this.scrubber.move(Infinity);
    this.scale = new Scale();
    this.scaled = 0;
    this.pick(null);
    this.changed();
  }

  // --- colours --------------------------------------------------------------------------------------------------------

  colourBy(name) {
    this.colour = name;
    this.colours.value = name;
    this.scale = new Scale();
    this.scaled = 0;
    this.coloured = null;
    this.changed();
  }

  /** Take new values into the scale of colours. If it has changed, or values came late, colour all tokens anew. */
  takeColours() {
    const { choice } = this;
    const values = this.colour ? choice.columns.get(this.colour)?.values : null;
    if (!values) {
      if (this.coloured !== "" && this.colour === "") this.text.recolour(null);
      this.coloured = "";
      this.colourKey.hidden = true;
      return;
    }
    const name = `${this.key} ${this.colour} ${choice.epoch}`;
    let anew = this.coloured !== name;
    if (anew) {
      this.scale = new Scale();
      this.scaled = 0;
    }
    for (; this.scaled < values.length; this.scaled++) anew = this.scale.take(values[this.scaled]) || anew;
    this.coloured = name;
    if (!anew) return;
    const { scale } = this;
    this.text.recolour((index) => scale.step(values[index]));
    this.colourKey.hidden = false;
    this.colourKey.classList.toggle("diverges", scale.diverges);
    setText(this.colourKey.firstChild, shown(scale.low));
    setText(this.colourKey.lastChild, shown(scale.high));
  }

  retheme() {
    for (const plot of this.plots.values()) plot.retheme();
    this.changed();
  }

  // --- the picked token -----------------------------------------------------------------------------------------------

  pick(index) {
    if (index === this.picked) return;
    this.picked = index;
    this.text.pick(index);
    this.heat.pick(index);
    inFrame((this.drawPick ??= () => this.showPick()));
  }

  showPick() {
    const { limit } = this.scrubber;
    for (const plot of this.plots.values()) plot.pick(this.picked, limit);
    this.drawValues();
  }

  /** The table of all that is known of the picked token, or of the last one. */
  drawValues() {
    const { choice } = this;
    const index = this.picked ?? this.scrubber.limit - 1;
    const text = choice?.texts[index];
    setText(this.values.firstChild, text === undefined ? "Values at the token" : `Values at token ${index}, ${quoted(text)}`);
    if (!this.values.open || text === undefined) return;
    const rows = Object.entries(this.state.liveAt(this.key, index)).map(([name, value]) => [`live ${name}`, summary(value, choice)]);
    for (const column of choice.sortedColumns()) rows.push([column.name, summary(column.values[index] ?? null, choice)]);
    const body = rows.map(([name, value]) => el("tr", {}, el("th", { scope: "row", text: name }), el("td", { text: value })));
    this.table.replaceChildren(el("table", {}, el("tbody", {}, ...body)));
  }

  remove() {
    this.rest();
    this.scrubber.stop();
    this.drawSlowly.stop();
    this.unwatch();
    this.forget();
    for (const plot of this.plots.values()) plot.remove();
    this.heat.remove();
    this.text.remove();
    this.element.remove();
  }
}

/** A value in one line. */
function summary(value, choice) {
  const number = numberOf(value);
  if (number !== undefined || value === null) return value === null ? "–" : shown(number);
  const ranked = choice.ranked(value);
  if (ranked) return ranked.map((one) => `${quoted(one.text)} ${shown(one.value)}`).join("   ");
  if (value?.shape) return `${value.dtype} [${value.shape.join(", ")}], ${value.nbytes} bytes`;
  const text = JSON.stringify(value);
  return text.length > 200 ? `${text.slice(0, 200)}…` : text;
}
