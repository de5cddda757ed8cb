// The state of one trace, folded from its events in order.

import { Choice } from "./choice.js";

export class TraceState {
  constructor(id) {
    this.id = id;
    this.choices = new Map();
    this.status = "queued";
    this.error = null;
    this.accepted = null;
    this.model = "";
    this.engine = "";
    this.attempt = 1;
    this.usage = null;
    this.ended = null;
    /** Values of live parameters by name, as far as they are known, and those with which the trace began. */
    this.live = {};
    this.firstLive = {};
    /** Changes of live parameters: `{version, by, time, values, before, first}`; `first` is by the choice's key. */
    this.marks = [];
    /** What happened beside outputs, as `{time, text, index}`. */
    this.history = [];
    this.warnings = [];
    /** Whether events were trimmed before they came here. */
    this.trimmed = false;
    /** Grows with each event that is not an output. */
    this.revision = 0;
  }

  static key(invoke, choice) {
    return `${invoke}.${choice}`;
  }

  choice(invoke, choice) {
    const key = TraceState.key(invoke, choice);
    let found = this.choices.get(key);
    if (!found) this.choices.set(key, (found = new Choice(invoke, choice, () => this.accepted)));
    return found;
  }

  get isOver() {
    return !["queued", "running", "paused", "waiting"].includes(this.status);
  }

  get tokens() {
    let count = 0;
    for (const choice of this.choices.values()) count += choice.length;
    return count;
  }

  apply(event) {
    if (event.type === "output") {
      this.choice(event.invoke, event.choice).add(event);
      if (this.status === "queued" || this.status === "waiting") this.set("running");
      return;
    }
    this.revision++;
    this[`on_${event.type}`]?.(event);
  }

  set(status) {
    this.status = status;
    this.revision++;
  }

  note(time, text) {
    this.history.push({ time, text, index: this.tokens });
  }

  on_accepted(event) {
    this.accepted = event;
    this.model = event.model;
    this.engine = event.engine;
    this.live = { ...event.live };
    this.firstLive = { ...event.live };
    this.set("running");
    this.note(event.accepted_at, `The engine ${event.engine} accepted the trace.`);
  }

  on_steered(event) {
    const first = {};
    for (const one of event.first) first[TraceState.key(one.invoke, one.choice)] = one.index;
    for (const change of event.changes) {
      const before = Object.fromEntries(Object.keys(change.values).map((name) => [name, this.live[name]]));
      this.marks.push({ ...change, before, first });
      Object.assign(this.live, change.values);
    }
  }

  on_paused(event) {
    this.set("paused");
    this.note(event.time, `${event.by} paused the trace.`);
  }

  on_resumed(event) {
    this.set("running");
    this.note(event.time, `${event.by} resumed the trace.`);
  }

  on_waiting(event) {
    this.set("waiting");
    this.note(event.time, `The trace waits: ${event.reason}`);
  }

  on_lagging(event) {
    this.note(event.time, `The engine slows the trace, since Redis is late: ${event.action}.`);
  }

  on_restarted(event) {
    this.attempt = event.attempt;
    this.marks = [];
    for (const choice of this.choices.values()) {
      choice.cut(0);
      choice.columns.clear();
      choice.revision++;
    }
    this.set("running");
    this.note(Date.now() / 1000, `Attempt ${event.attempt} begins: ${event.reason}`);
  }

  on_gap(event) {
    const { state } = event;
    state.invokes.forEach((invoke, number) => {
      invoke.forEach((choice, at) => this.choice(number, at).replace(choice));
    });
    if (state.accepted) this.on_accepted(state.accepted);
    this.trimmed = true;
    this.attempt = state.attempt;
    if (state.paused) this.set("paused");
    this.note(Date.now() / 1000, "Earlier events were trimmed; the state after them stands in their place.");
  }

  on_final(event) {
    this.error = event.error;
    this.usage = event.usage;
    this.ended = event.time;
    this.warnings = event.warnings ?? [];
    this.set(event.status);
    const reason = event.error?.message ? `: ${event.error.message}` : "";
    this.note(event.time, `The trace ended as ${event.status}${reason}.`.replace("..", "."));
  }

  /** The values of the live parameters that held for a token of a choice. */
  liveAt(key, index) {
    const live = { ...this.firstLive };
    for (const mark of this.marks) if ((mark.first[key] ?? Infinity) <= index) Object.assign(live, mark.values);
    return live;
  }
}
