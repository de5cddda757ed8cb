// What this tab remembers: the key and the name of its user. And what the browser remembers: the theme.

import { themeChanged } from "./theme.js";

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

export function applyTheme() {
  const theme = settings.theme;
  if (theme === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
  themeChanged();
}

matchMedia("(prefers-color-scheme: dark)").addEventListener("change", themeChanged);
