// The page: its views by the address behind `#`, its key, its connection and its theme.

import { api } from "./api.js";
import { Connection } from "./connection.js";
import { announcer, el, setText } from "./dom.js";
import { ListView } from "./list_view.js";
import { RecordingView } from "./recording_view.js";
import { applyTheme, settings } from "./settings.js";
import { StartView } from "./start_view.js";
import { TracePanel } from "./trace_panel.js";

const main = document.getElementById("main");
announcer.element = document.getElementById("announce");
const indicator = document.getElementById("connection");
const WORDS = { connecting: "Connecting", open: "Live", reconnecting: "Reconnecting" };

const connection = new Connection((state) => {
  indicator.dataset.state = state;
  setText(indicator, WORDS[state]);
  if (state === "reconnecting") checkKey();
});

// --- views ------------------------------------------------------------------------------------------------------------

let view = null;

/** Several traces side by side, or one. */
class Traces {
  constructor(ids) {
    this.panels = ids.map((id) => this.panel(id, ids.length > 1));
    this.element = el("div", { class: ids.length > 1 ? "beside" : "single" }, ...this.panels.map((one) => one.element));
  }

  panel(id, several) {
    const href = `#/trace/${encodeURIComponent(id)}`;
    return new TracePanel(id, { connection, api, href, onclose: several ? () => this.close(id) : null });
  }

  close(id) {
    const left = this.panels.map((one) => one.id).filter((one) => one !== id);
    location.hash = left.length ? `#/traces/${left.map(encodeURIComponent).join(",")}` : "#/";
  }

  remove() {
    for (const one of this.panels) one.remove();
    this.element.remove();
  }
}

function route() {
  const [, name, rest = ""] = /^#\/(\w*)\/?(.*)$/.exec(location.hash) ?? ["", "", ""];
  const ids = rest.split(",").filter(Boolean).map(decodeURIComponent);
  view?.remove();
  view = null;
  let title = "Traces";
  if ((name === "trace" || name === "traces") && ids.length) {
    view = new Traces([...new Set(ids)]);
    title = ids.length > 1 ? `${ids.length} traces` : ids[0];
  } else if (name === "start") {
    view = new StartView();
    title = "Start a trace";
  } else if (name === "recording") {
    view = new RecordingView();
    title = "Open a recording";
  } else {
    view = new ListView(connection);
  }
  main.replaceChildren(view.element);
  document.title = `${title} · Tracewire`;
  for (const link of document.querySelectorAll("[data-view]")) {
    const here = link.dataset.view === (["start", "recording"].includes(name) ? name : "list") && !ids.length;
    if (here) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
}

// --- the key ----------------------------------------------------------------------------------------------------------

const dialog = document.getElementById("key-dialog");
const account = document.getElementById("account");
const keyInput = document.getElementById("key-input");
const nameInput = document.getElementById("name-input");

function askKey(reason = "") {
  if (dialog.open) return;
  keyInput.value = settings.key;
  nameInput.value = settings.name;
  setText(document.getElementById("key-reason"), reason);
  const rights = api.caller ? `This page acts as “${api.caller.name}”, with the rights ${api.caller.rights.join(", ")}.` : "";
  setText(document.getElementById("key-rights"), rights);
  dialog.showModal();
}

/** Ask the gateway who calls. Returns whether it knows. */
async function checkKey() {
  try {
    const caller = await api.whoAmI();
    setText(account, settings.name ? `${caller.name}/${settings.name}` : caller.name);
    return true;
  } catch (problem) {
    if (problem.status === 401) askKey(settings.key ? "The gateway does not know this key." : "The gateway asks for a key.");
    else if (problem.status === 403) askKey(problem.message);
    // Otherwise the gateway is away, or the key has reached a limit, and the connection tries on.
    return problem.status === 0 || problem.status === 429 || problem.status >= 500;
  }
}

async function begin() {
  if (!(await checkKey())) return;
  connection.restart();
  route();
}

account.addEventListener("click", () => askKey());
document.getElementById("key-cancel").addEventListener("click", () => dialog.close());
document.getElementById("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  settings.key = keyInput.value.trim();
  settings.name = nameInput.value.trim();
  dialog.close();
  begin();
});

// --- the theme --------------------------------------------------------------------------------------------------------

const theme = document.getElementById("theme");
theme.value = settings.theme;
theme.addEventListener("change", () => (settings.theme = theme.value));
applyTheme();

addEventListener("hashchange", () => {
  route();
  main.focus({ preventScroll: true });
  scrollTo(0, 0);
});
begin();
