// Elements from plain values. Text is only ever set as text: nothing here parses markup.

/** An element with attributes, listeners (`onclick`) and children. A value of null or false leaves an attribute out. */
export function el(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (key.startsWith("on")) made.addEventListener(key.slice(2), value);
    else if (key === "text") made.textContent = value;
    else if (key in made && typeof value === "boolean") made[key] = value;
    else made.setAttribute(key, value);
  }
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
}

/** Set an element's text, if it differs. */
export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

let lastId = 0;

/** An id that no other element has. */
export const newId = (prefix) => `${prefix}-${++lastId}`;

/** The element whose text screen readers say when it changes. */
export const announcer = { element: null };

/** Say something to screen readers. */
export function announce(text) {
  if (announcer.element) announcer.element.textContent = text;
}

/** A number for people: four significant digits. */
export function shown(value) {
  if (typeof value !== "number" || !Number.isFinite(value)) return value === null ? "not a number" : String(value);
  if (Number.isInteger(value) && Math.abs(value) < 1e6) return String(value);
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e6)) return value.toExponential(2);
  return String(Number(value.toPrecision(4)));
}

/** A token as a label: quoted, with its white space visible. */
export const quoted = (text) => JSON.stringify(text);

/** A duration in seconds for people. */
export function duration(seconds) {
  if (seconds < 10) return `${seconds.toFixed(1)} s`;
  if (seconds < 90) return `${Math.round(seconds)} s`;
  if (seconds < 5400) return `${Math.round(seconds / 60)} min`;
  return `${(seconds / 3600).toFixed(1)} h`;
}

/** A time of the day. */
export const clock = (seconds) => new Date(seconds * 1000).toLocaleTimeString([], { hour12: false });
