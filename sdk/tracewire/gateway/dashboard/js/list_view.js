// The list of traces: a page of submissions, kept up to date by lifecycle events, with the live end of those that run.

import { api } from "./api.js";
import { clock, duration, el, setText, shown } from "./dom.js";
import { inFrame, whileInView } from "./frames.js";

const STATES = ["queued", "running", "paused", "finished", "stopped", "cancelled", "expired", "rejected", "failed"];
const PAGE = 50;
/** How many rows the page holds before the oldest leave. */
const MOST_ROWS = 500;
/** How many characters of a trace's end its row shows. */
const TAIL = 160;
const BY_EVENT = { queued: "queued", accepted: "running", restarted: "running", paused: "paused", resumed: "running" };
const RUNNING = new Set(["queued", "running", "paused"]);

/** What a lifecycle event makes of a trace. */
function changed(trace, event) {
  if (event.type === "final") {
    Object.assign(trace, { state: event.status, ended_at: event.time, error: event.error });
    if (event.tokens ?? event.usage) trace.tokens = event.tokens ?? event.usage.completion_tokens;
  } else {
    trace.state = BY_EVENT[event.type] ?? trace.state;
    trace.engine = event.engine || trace.engine;
  }
}

/** One trace in the list. */
class Row {
  constructor(trace, view) {
    this.view = view;
    this.trace = trace;
    this.tail = "";
    const href = `#/trace/${encodeURIComponent(trace.id)}`;
    this.box = el("input", { type: "checkbox", "aria-label": `Select ${trace.id}`, onchange: () => view.selected() });
    this.badge = el("span", { class: "badge" });
    this.text = el("div");
    this.count = el("td", { class: "number" });
    this.element = el(
      "tr",
      {},
      el("td", {}, this.box),
      el("th", { scope: "row" }, el("a", { href, text: trace.id })),
      el("td", {}, this.badge),
      el("td", { text: trace.model }),
      el("td", { text: trace.client }),
      el("td", {}, el("time", { text: clock(trace.queued_at), title: new Date(trace.queued_at * 1000).toLocaleString() })),
      this.count,
      el("td", { class: "tail" }, this.text),
    );
    this.draw = () => this.drawNow();
    this.unwatch = whileInView(this.element, (inView) => {
      this.inView = inView;
      this.follow();
    });
    inFrame(this.draw);
  }

  /** Follow the end of the text while the row is in view. What runs no more is followed to its final, and not again. */
  follow() {
    if (!this.inView) {
      this.stream?.stop();
      this.stream = null;
    } else if (!this.stream && RUNNING.has(this.trace.state)) {
      // Text that was missed meanwhile would be missing in the middle.
      this.anew = true;
      const fields = { content: "text", since: "recent" };
      this.stream = this.view.connection.follow(this.trace.id, fields, (event) => this.take(event), () => (this.stream = null));
    }
  }

  take(event) {
    if (event.type === "restarted") this.anew = true;
    if (event.type !== "output" || event.invoke || event.choice) return;
    if (this.anew) this.tail = "";
    this.anew = false;
    this.tail = (this.tail + event.text).slice(-TAIL);
    this.tokens = event.index + event.token_ids.length;
    inFrame(this.draw);
  }

  /** Take a lifecycle event in. */
  change(event) {
    changed(this.trace, event);
    this.follow();
    inFrame(this.draw);
  }

  drawNow() {
    const { trace } = this;
    setText(this.badge, trace.state);
    this.badge.dataset.state = trace.state;
    const tokens = trace.tokens ?? this.tokens;
    setText(this.count, tokens === undefined || tokens === null ? "" : shown(tokens));
    const took = trace.ended_at ? `after ${duration(trace.ended_at - trace.queued_at)}` : "";
    const ended = trace.error ? `${trace.error} ${took}` : took;
    setText(this.text, RUNNING.has(trace.state) ? this.tail : this.tail || ended);
    this.text.classList.toggle("hint", !this.tail);
  }

  remove() {
    this.unwatch();
    this.inView = false;
    this.follow();
    this.element.remove();
  }
}

export class ListView {
  constructor(connection) {
    this.connection = connection;
    this.rows = new Map();
    this.next = null;
    this.state = el("select", { onchange: () => this.load() }, el("option", { value: "" }, "all"));
    this.state.append(...STATES.map((name) => el("option", { value: name }, name)));
    this.find = el("input", { type: "search", placeholder: "id", "aria-label": "Open a trace by its id" });
    this.open = el("button", { type: "button", disabled: true, onclick: () => this.sideBySide() }, "Side by side");
    this.more = el("button", { type: "button", hidden: true, onclick: () => this.page() }, "Show older traces");
    this.empty = el("p", { class: "empty", hidden: true });
    this.problem = el("p", { class: "error", role: "alert", hidden: true });
    this.body = el("tbody");
    this.all = el("input", { type: "checkbox", "aria-label": "Select all traces", onchange: () => this.selectAll() });
    const form = el("form", { class: "inline" }, this.find, el("button", { type: "submit" }, "Open"));
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      if (this.find.value.trim()) location.hash = `#/trace/${encodeURIComponent(this.find.value.trim())}`;
    });
    const head = ["Trace", "State", "Model", "Client", "Submitted", "Tokens", "Latest text"];
    this.element = el(
      "div",
      { class: "list" },
      el(
        "div",
        { class: "row" },
        el("h1", { text: "Traces" }),
        el("label", { class: "inline" }, "State", this.state),
        el("span", { class: "grow" }),
        form,
        this.open,
        el("a", { class: "button primary", href: "#/start" }, "Start a trace"),
      ),
      this.problem,
      el(
        "div",
        { class: "table", tabindex: "0", role: "region", "aria-label": "Table of traces" },
        el(
          "table",
          {},
          el("thead", {}, el("tr", {}, el("td", {}, this.all), ...head.map((name) => el("th", { scope: "col", text: name })))),
          this.body,
        ),
      ),
      this.empty,
      this.more,
    );
    /** Lifecycle events that the next frame draws. */
    this.events = [];
    /** For each list that is asked for, the events since then. */
    this.asked = new Set();
    this.draw = () => this.drawEvents();
    this.load();
    this.watch = connection.watch(
      (event) => {
        for (const events of this.asked) events.push(event);
        this.events.push(event);
        inFrame(this.draw);
      },
      (problem) => problem && this.fail(problem),
      () => this.refresh(),
    );
  }

  fail(problem) {
    this.problem.hidden = false;
    setText(this.problem, problem.message);
  }

  async load() {
    this.loads = (this.loads ?? 0) + 1;
    for (const row of this.rows.values()) row.remove();
    this.rows.clear();
    this.next = null;
    await this.page();
  }

  async page() {
    const filters = { limit: PAGE };
    if (this.state.value) filters.state = this.state.value;
    if (this.next) filters.before = this.next;
    let found;
    do {
      found = await this.ask(filters);
      if (!found) return;
      // A page without a trace has looked through many that do not fit, and the next one goes on.
      filters.before = found.next;
    } while (!found.data.length && found.next);
    for (const trace of found.data) if (!this.rows.has(trace.id)) this.body.append(this.row(trace).element);
    this.next = found.next ?? null;
    this.more.hidden = !this.next;
    this.tellEmpty();
  }

  /**
   * A page of the list, with the changes of its traces while it was on its way. Null if the gateway refuses it, which
   * the list shows, and if the list is read anew meanwhile.
   */
  async ask(filters) {
    const load = this.loads;
    const events = [];
    this.asked.add(events);
    try {
      const found = await api.traces(filters);
      if (load !== this.loads) return null;
      const byId = new Map(found.data.map((trace) => [trace.id, trace]));
      for (const event of events) if (byId.has(event.trace_id)) changed(byId.get(event.trace_id), event);
      this.problem.hidden = true;
      return found;
    } catch (problem) {
      this.fail(problem);
      return null;
    } finally {
      this.asked.delete(events);
    }
  }

  /** Read the first page again: the watch has opened, and does not have what happened before. */
  async refresh() {
    const filters = this.state.value ? { limit: PAGE, state: this.state.value } : { limit: PAGE };
    const found = await this.ask(filters);
    if (!found) return;
    let above = null;
    for (const trace of found.data) {
      const row = this.rows.get(trace.id) ?? this.row(trace);
      row.trace = trace;
      row.follow();
      inFrame(row.draw);
      if (!row.element.isConnected) above ? above.after(row.element) : this.body.prepend(row.element);
      above = row.element;
    }
    this.tellEmpty();
  }

  row(trace) {
    const row = new Row(trace, this);
    this.rows.set(trace.id, row);
    return row;
  }

  drawEvents() {
    const events = this.events;
    this.events = [];
    for (const event of events) this.take(event);
  }

  take(event) {
    const row = this.rows.get(event.trace_id);
    if (row) {
      row.change(event);
    } else if (event.type === "queued" && ["", "queued", "running"].includes(this.state.value)) {
      const { trace_id: id, model, client, time } = event;
      this.body.prepend(this.row({ id, model, client, state: "queued", queued_at: time, engine: "" }).element);
      while (this.rows.size > MOST_ROWS) {
        const id = this.body.lastElementChild.querySelector("a").textContent;
        this.rows.get(id).remove();
        this.rows.delete(id);
      }
      this.tellEmpty();
    }
  }

  tellEmpty() {
    this.empty.hidden = this.rows.size > 0;
    setText(this.empty, this.state.value ? `No trace is ${this.state.value}.` : "No trace was submitted in the last day.");
    this.selected();
  }

  get chosen() {
    return [...this.rows.values()].filter((row) => row.box.checked).map((row) => row.trace.id);
  }

  selected() {
    const count = this.chosen.length;
    this.open.disabled = count === 0;
    setText(this.open, count ? `Side by side (${count})` : "Side by side");
    this.open.title = count ? "" : "Select traces first.";
  }

  selectAll() {
    for (const row of this.rows.values()) row.box.checked = this.all.checked;
    this.selected();
  }

  sideBySide() {
    location.hash = `#/traces/${this.chosen.map(encodeURIComponent).join(",")}`;
  }

  remove() {
    this.watch.stop();
    this.loads++;
    for (const row of this.rows.values()) row.remove();
    this.element.remove();
  }
}
