// A recording of a trace, from a file: shown as the trace is, without its bus and its engine.

import { api } from "./api.js";
import { announce, el, setText } from "./dom.js";
import { TracePanel } from "./trace_panel.js";

/** How many events a panel takes before the page may draw. */
const AT_ONCE = 500;
const WHY = "This is a recording.";

/** The events of a recording, in place of a connection to the gateway. */
class Recorded {
  constructor(events) {
    this.events = events;
  }

  /** Hand the events over, from the place `since` on. */
  follow(_trace, { since }, onevent, onover) {
    const stream = { position: since === "start" ? 0 : since, timer: null, stop: () => clearTimeout(stream.timer) };
    const some = () => {
      const end = Math.min(stream.position + AT_ONCE, this.events.length);
      while (stream.position < end) onevent(this.events[stream.position++]);
      if (end < this.events.length) stream.timer = setTimeout(some, 0);
      else onover(null);
    };
    stream.timer = setTimeout(some, 0);
    return stream;
  }
}

/** What a recording answers where a panel would ask the gateway. */
const controls = { refusal: () => WHY, live: async () => ({ values: {} }) };

export class RecordingView {
  constructor() {
    this.file = el("input", { type: "file", accept: ".twrec", "aria-describedby": "recording-hint", onchange: () => this.open() });
    this.problem = el("p", { class: "error", role: "alert", hidden: true });
    this.about = el("p", { class: "hint" });
    this.place = el("div");
    this.element = el(
      "div",
      { class: "single" },
      el("h1", { text: "Open a recording" }),
      el("label", { class: "field" }, "File", this.file),
      el("p", { class: "hint", id: "recording-hint", text: "A file of tracewire record. The gateway reads it, and keeps nothing of it." }),
      this.problem,
      this.about,
      this.place,
    );
  }

  async open() {
    const [file] = this.file.files;
    if (!file) return;
    this.problem.hidden = true;
    this.panel?.remove();
    this.panel = null;
    setText(this.about, "Reading …");
    try {
      this.show(await api.readRecording(file));
    } catch (problem) {
      setText(this.about, "");
      this.problem.hidden = false;
      setText(this.problem, `${file.name}: ${problem.message}`);
    }
  }

  show(recording) {
    const made = new Date(recording.made_at * 1000).toLocaleString();
    const by = recording.made_by ? ` by ${recording.made_by}` : "";
    setText(this.about, `Recorded ${made}${by}${recording.complete ? "" : ", before the trace had ended"}.`);
    this.panel = new TracePanel(recording.trace_id, { connection: new Recorded(recording.events), api: controls });
    this.place.replaceChildren(this.panel.element);
    announce(`The recording of ${recording.trace_id} is open.`);
  }

  remove() {
    this.panel?.remove();
    this.element.remove();
  }
}
