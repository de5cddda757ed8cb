// The element whose style has the colours in use, and who is told when they change.

const listeners = new Set();
let root = document.documentElement;

/** The element whose custom properties are the colours. */
export const themeRoot = () => root;

/** Have another element's custom properties be the colours. */
export function setThemeRoot(element) {
  root = element;
  themeChanged();
}

/** Call `change` whenever the colours change. Returns a function that ends this. */
export function onTheme(change) {
  listeners.add(change);
  return () => listeners.delete(change);
}

/** Tell all listeners that the colours have changed. */
export function themeChanged() {
  for (const change of listeners) change();
}
