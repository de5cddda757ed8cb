// What this tab remembers: the key and the name of its user. And what the browser remembers: the theme.

const KEY = "tracewire.key";
const NAME = "tracewire.name";
const THEME = "tracewire.theme";

export const settings = {
  get key() {
    return sessionStorage.getItem(KEY) ?? "";
  },
  set key(text) {
    sessionStorage.setItem(KEY, text);
  },
  get name() {
    return localStorage.getItem(NAME) ?? "";
  },
  set name(text) {
    localStorage.setItem(NAME, text);
  },
  get theme() {
    return localStorage.getItem(THEME) ?? "auto";
  },
  set theme(text) {
    localStorage.setItem(THEME, text);
    applyTheme();
  },
};

const listeners = new Set();

/** Call `change` whenever the colours change. Returns a function that ends this. */
export function onTheme(change) {
  listeners.add(change);
  return () => listeners.delete(change);
}

export function applyTheme() {
  const theme = settings.theme;
  if (theme === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
  for (const change of listeners) change();
}

matchMedia("(prefers-color-scheme: dark)").addEventListener("change", applyTheme);
