// A trace in a notebook's output: the dashboard's panel in a shadow root, fed and controlled by the kernel.

import { announcer, el } from "./dom.js";
import { style } from "./style.js";
import { setThemeRoot, themeChanged } from "./theme.js";
import { TracePanel } from "./trace_panel.js";

/** What the kernel has sent to all views of a trace. A kernel that runs a cell takes no orders. */
class Log {
  /** `whole` is whether the log begins with the first event. */
  constructor(whole) {
    this.events = [];
    this.whole = whole;
    this.end = null;
    this.readers = new Set();
  }

  take({ over, error }, body) {
    if (body) this.events.push(...body);
    if (over) this.end = { error };
    for (const read of [...this.readers]) read();
  }
}

/** Logs by the output's key. */
const logs = new Map();

const parsed = (buffers) => (buffers?.length ? JSON.parse(new TextDecoder().decode(buffers[0])) : null);

function initialize({ model }) {
  const log = new Log(!model.get("pushed"));
  logs.set(model.get("key"), log);
  model.on("msg:custom", (message, buffers) => message.view === "*" && log.take(message, parsed(buffers)));
}

/** One view's link to the kernel: the streams that it follows, and its calls. */
class Kernel {
  constructor(model) {
    this.model = model;
    this.log = logs.get(model.get("key"));
    // A page that was loaded anew has other views. `crypto.randomUUID` needs HTTPS.
    this.view = Math.random().toString(36).slice(2);
    this.last = 0;
    this.streams = new Map();
    this.calls = new Map();
    this.take = (message, buffers) => message.view === this.view && this.receive(message, buffers);
    model.on("msg:custom", this.take);
  }

  order(what, fields) {
    const id = ++this.last;
    this.model.send({ do: what, view: this.view, id, ...fields });
    return id;
  }

  receive({ id, error, over }, buffers) {
    const body = parsed(buffers);
    const stream = this.streams.get(id);
    const call = this.calls.get(id);
    if (call) {
      this.calls.delete(id);
      if (error) call.reject(new Error(error));
      else call.resolve(body);
    } else if (stream && over) {
      this.streams.delete(id);
      stream.onover(error ? new Error(error) : null);
    } else if (stream) {
      for (const [position, event] of body) {
        stream.position = position;
        stream.onevent(event);
      }
    }
  }

  // --- as the dashboard's connection ----------------------------------------------------------------------------------

  follow(trace, { since }, onevent, onover) {
    return this.log.whole ? this.readLog(since, onevent, onover) : this.orderFollow(since, onevent, onover);
  }

  /** Read what was sent to all views, and go on reading. */
  readLog(since, onevent, onover) {
    const { log } = this;
    let at = since === "start" ? 0 : log.events.findIndex(([position]) => position === since) + 1;
    const stream = { position: since, stop: () => log.readers.delete(read) };
    const read = () => {
      for (; at < log.events.length && log.readers.has(read); at++) {
        stream.position = log.events[at][0];
        onevent(log.events[at][1]);
      }
      if (log.end && log.readers.delete(read)) onover(log.end.error ? new Error(log.end.error) : null);
    };
    log.readers.add(read);
    // The caller has the stream by then.
    queueMicrotask(read);
    return stream;
  }

  /** Have the kernel send the events to this view: the page was opened after the first of them. */
  orderFollow(since, onevent, onover) {
    const id = this.order("follow", { since });
    const stop = () => this.streams.delete(id) && this.order("stop", { stream: id });
    const stream = { position: since, onevent, onover, stop };
    this.streams.set(id, stream);
    return stream;
  }

  // --- as the dashboard's API -----------------------------------------------------------------------------------------

  call(what, fields = {}) {
    const id = this.order(what, fields);
    return new Promise((resolve, reject) => this.calls.set(id, { resolve, reject }));
  }

  live() {
    return this.call("live");
  }

  steer(trace, values) {
    return this.call("steer", { values });
  }

  pause() {
    return this.call("pause");
  }

  resume() {
    return this.call("resume");
  }

  cancel() {
    return this.call("cancel");
  }

  refusal() {
    return null;
  }

  close() {
    for (const stream of [...this.streams.values()]) stream.stop();
    this.model.off("msg:custom", this.take);
  }
}

/** `light` or `dark`, as the notebook is; null where only the system tells. */
function scheme() {
  const { jpThemeLight, vscodeThemeKind } = document.body.dataset;
  if (jpThemeLight) return jpThemeLight === "true" ? "light" : "dark";
  if (vscodeThemeKind) return vscodeThemeKind.endsWith("light") ? "light" : "dark";
  return null;
}

/** Keep a view in the notebook's colours. Returns a function that ends this. */
function followTheme(host) {
  const apply = () => {
    const found = scheme();
    if (found) host.dataset.theme = found;
    else delete host.dataset.theme;
    themeChanged();
  };
  const observer = new MutationObserver(apply);
  observer.observe(document.body, { attributeFilter: ["data-jp-theme-light", "data-vscode-theme-kind"] });
  const system = matchMedia("(prefers-color-scheme: dark)");
  system.addEventListener("change", apply);
  apply();
  return () => {
    observer.disconnect();
    system.removeEventListener("change", apply);
  };
}

/** Hide the static rendering that stands beside a live view. Returns a function that shows it again. */
function hideStatic(key) {
  const beside = `[data-tracewire="${CSS.escape(key)}"]`;
  const rule = el("style", { text: `${beside}, .jp-OutputArea-child:has(${beside}) { display: none !important; }` });
  document.head.append(rule);
  return () => rule.remove();
}

function render({ model, el: output }) {
  const host = el("div", { class: "tracewire-view", "data-lm-suppress-shortcuts": "true" });
  const sheet = new CSSStyleSheet();
  sheet.replaceSync(style);
  const root = host.attachShadow({ mode: "open" });
  root.adoptedStyleSheets = [sheet];
  const frame = el("div", { class: "frame" });
  announcer.element = el("p", { class: "unseen", role: "status" });
  root.append(frame, announcer.element);
  // Keys belong to the panel, and not to the notebook's shortcuts.
  host.addEventListener("keydown", (event) => event.stopPropagation());
  output.append(host);
  setThemeRoot(frame);
  const unfollow = followTheme(host);
  const showStatic = hideStatic(model.get("key"));
  const kernel = new Kernel(model);
  const panel = new TracePanel(model.get("trace_id"), { connection: kernel, api: kernel });
  frame.append(panel.element);
  return () => {
    panel.remove();
    kernel.close();
    unfollow();
    showStatic();
  };
}

export default { initialize, render };
