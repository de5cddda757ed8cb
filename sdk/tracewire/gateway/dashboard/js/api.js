// The gateway's HTTP API.

import { settings } from "./settings.js";

/** Where the API is: one level above the dashboard, also behind a proxy's path. */
const BASE = new URL("..", document.baseURI);

/** An error as the gateway answers it: problem details. */
export class Problem extends Error {
  constructor(details) {
    super(details.detail ?? details.title ?? "the gateway gave no reason");
    this.status = details.status ?? 0;
    this.field = details.field ?? null;
  }
}

/** One request. Throws a `Problem`, whose status is 0 where the gateway cannot be reached. */
export async function request(method, path, body) {
  const headers = {};
  if (settings.key) headers.Authorization = `Bearer ${settings.key}`;
  const isFile = body instanceof Blob;
  if (body !== undefined) headers["Content-Type"] = isFile ? "application/octet-stream" : "application/json";
  let answer;
  try {
    answer = await fetch(new URL(path, BASE), { method, headers, body: isFile ? body : body && JSON.stringify(body) });
  } catch {
    throw new Problem({ detail: "the gateway cannot be reached" });
  }
  if (answer.ok) return answer.status === 204 ? null : answer.json();
  let details = {};
  try {
    details = await answer.json();
  } catch {
    // A proxy's page, say.
  }
  throw new Problem({ detail: `the gateway answered ${answer.status}`, ...details, status: answer.status });
}

const named = (fields) => (settings.name ? { ...fields, by: settings.name } : fields);
const path = (id, what = "") => `traces/${encodeURIComponent(id)}${what}`;

export const api = {
  /** The key that this page uses, once it is known. */
  caller: null,
  async whoAmI() {
    this.caller = await request("GET", "key");
    return this.caller;
  },
  /** Why this page may not do something, or null. */
  refusal(right) {
    if (!this.caller || this.caller.rights.includes(right)) return null;
    return `The key “${this.caller.name}” lacks the right “${right}”.`;
  },
  traces: (filters) => request("GET", `traces?${new URLSearchParams(filters)}`),
  live: (id) => request("GET", path(id, "/live")),
  engines: () => request("GET", "engines"),
  readRecording: (file) => request("POST", "recordings", file),
  submit: (body) => request("POST", "traces", body),
  steer: (id, values) => request("POST", path(id, "/steer"), named({ values })),
  pause: (id) => request("POST", path(id, "/pause"), named({})),
  resume: (id) => request("POST", path(id, "/resume"), named({})),
  cancel: (id, reason) => request("POST", path(id, "/cancel"), named({ reason })),
};

/** The address of the WebSocket, and the subprotocols that carry the key. */
export function socketAddress() {
  const address = new URL("ws", BASE);
  address.protocol = address.protocol.replace("http", "ws");
  const protocols = ["tracewire"];
  if (settings.key) {
    const bytes = new TextEncoder().encode(settings.key);
    const base64 = btoa(String.fromCharCode(...bytes));
    protocols.push(`tracewire.key.${base64.replaceAll("+", "-").replaceAll("/", "_").replaceAll("=", "")}`);
  }
  return [address.href, protocols];
}
