// One WebSocket for all streams of the page. It opens again by itself, and each stream goes on at its position.

import { Problem, socketAddress } from "./api.js";

const FIRST_WAIT_MS = 200;
const LONGEST_WAIT_MS = 4000;
/** How long a stream waits at least that the gateway could not open just now, or that its key has no room for. */
const AGAIN_MS = 1000;

/**
 * A stream of events. `onevent` gets each event once, in order; `onover` gets null, or the problem that ended it. `onopen`
 * is called each time the gateway has opened the stream: no event from then on is missed.
 */
class Stream {
  constructor(connection, order, onevent, onover, onopen) {
    this.connection = connection;
    this.order = order;
    this.onevent = onevent;
    this.onover = onover;
    this.onopen = onopen;
    this.position = order.since;
    this.id = null;
    this.timer = null;
  }

  stop() {
    this.connection.stop(this);
  }
}

export class Connection {
  /** `onstate` gets `connecting`, `open` or `reconnecting`. */
  constructor(onstate) {
    this.onstate = onstate;
    this.socket = null;
    this.streams = new Set();
    this.byId = new Map();
    this.lastId = 0;
    this.wait = FIRST_WAIT_MS;
    this.timer = null;
    this.closed = false;
    addEventListener("online", () => this.hurry());
    document.addEventListener("visibilitychange", () => this.hurry());
  }

  open() {
    this.closed = false;
    clearTimeout(this.timer);
    const socket = new WebSocket(...socketAddress());
    this.socket = socket;
    socket.onopen = () => {
      this.wait = FIRST_WAIT_MS;
      this.onstate("open");
      for (const stream of this.streams) this.begin(stream);
    };
    socket.onmessage = (message) => {
      for (const one of JSON.parse(message.data)) this.take(one);
    };
    socket.onclose = () => {
      if (this.socket !== socket) return;
      this.socket = null;
      this.byId.clear();
      if (this.closed) return;
      this.onstate("reconnecting");
      this.timer = setTimeout(() => this.open(), this.wait * (0.75 + Math.random() / 2));
      this.wait = Math.min(LONGEST_WAIT_MS, this.wait * 2);
    };
  }

  /** Close, and open again with the key of now. */
  restart() {
    this.close();
    this.onstate("connecting");
    this.open();
  }

  close() {
    this.closed = true;
    clearTimeout(this.timer);
    const socket = this.socket;
    this.socket = null;
    this.byId.clear();
    socket?.close();
  }

  hurry() {
    if (this.socket || this.closed || document.hidden) return;
    this.wait = FIRST_WAIT_MS;
    this.open();
  }

  /** Follow a trace: `fields` are those of the order, such as `{content: "text"}`. */
  follow(trace, fields, onevent, onover) {
    return this.add({ do: "follow", trace, since: "start", ...fields }, onevent, onover);
  }

  /** Follow the lifecycle events of all traces. */
  watch(onevent, onover, onopen) {
    return this.add({ do: "watch", since: "now" }, onevent, onover, onopen);
  }

  add(order, onevent, onover, onopen = () => {}) {
    const stream = new Stream(this, order, onevent, onover, onopen);
    this.streams.add(stream);
    this.begin(stream);
    return stream;
  }

  begin(stream) {
    clearTimeout(stream.timer);
    if (this.socket?.readyState !== WebSocket.OPEN || !this.streams.has(stream)) return;
    // A new id each time: what still comes for the last one is left out.
    if (stream.id !== null) this.byId.delete(stream.id);
    stream.id = ++this.lastId;
    this.byId.set(stream.id, stream);
    this.socket.send(JSON.stringify({ ...stream.order, id: stream.id, since: stream.position }));
  }

  stop(stream) {
    clearTimeout(stream.timer);
    if (!this.streams.delete(stream)) return;
    if (this.byId.delete(stream.id) && this.socket?.readyState === WebSocket.OPEN) {
      this.socket.send(JSON.stringify({ do: "stop", id: stream.id }));
    }
  }

  take(message) {
    const stream = this.byId.get(message.id);
    if (!stream) return;
    if (message.open) {
      stream.onopen();
    } else if (message.event) {
      stream.position = message.position;
      stream.onevent(message.event);
    } else if (message.over) {
      this.byId.delete(stream.id);
      const { status, retry_after: seconds } = message.error ?? {};
      if (status === 503 || (status === 429 && seconds !== undefined)) {
        stream.timer = setTimeout(() => this.begin(stream), Math.max(AGAIN_MS, 1000 * (seconds ?? 0)));
        return;
      }
      this.streams.delete(stream);
      stream.onover(message.error ? new Problem(message.error) : null);
    }
  }
}
