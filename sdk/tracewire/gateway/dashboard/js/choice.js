// What one choice of a trace has put out: its tokens, and by saved name a column with a value for each token.

/** The number in a value: itself, or that of an array of one element. Else undefined. */
export function numberOf(value) {
  if (typeof value === "number") return value;
  if (typeof value === "boolean") return Number(value);
  if (Array.isArray(value) && value.length === 1) return numberOf(value[0]);
  return undefined;
}

/** Whether a value is an item of a logit lens. */
const isLens = (value) => isObject(value) && Array.isArray(value.token_ids) && Array.isArray(value.logits);
const isObject = (value) => value !== null && typeof value === "object" && !Array.isArray(value);
/** Whether a value stands for an array: a reference, or base64. */
const isArray = (value) => isObject(value) && ("digest" in value || "base64" in value);

/** The last row of an array of any rank: that of the last position. */
function lastRow(value) {
  while (Array.isArray(value) && Array.isArray(value[0])) value = value.at(-1);
  return value;
}

/** The best token of a lens at one place, as `{value, text}`. */
export function lensBest(item) {
  if (!isLens(item)) return null;
  const ids = lastRow(item.token_ids);
  const strings = item.token_strings ? lastRow(item.token_strings) : null;
  return { value: lastRow(item.logits)[0], id: ids[0], text: strings?.[0] ?? `#${ids[0]}` };
}

/** All tokens of a lens at one place, best first. */
export function lensTokens(item) {
  const [ids, logits] = [lastRow(item.token_ids), lastRow(item.logits)];
  const strings = item.token_strings ? lastRow(item.token_strings) : null;
  return ids.map((id, at) => ({ text: strings?.[at] ?? `#${id}`, value: logits[at] }));
}

/** The kind of a value: `number`, `lens`, `vector` (numbers, or lenses, in a row), or `other`. */
function kindOf(value) {
  if (numberOf(value) !== undefined) return "number";
  if (isLens(value)) return "lens";
  if (Array.isArray(value) && value.length <= 256 && value.length > 1) {
    if (value.every((one) => one === null || numberOf(one) !== undefined || isLens(one))) return "vector";
  }
  return "other";
}

/** A saved name's values, by the index of their token. */
class Column {
  constructor(name) {
    this.name = name;
    this.kind = null;
    this.values = [];
  }

  set(index, value) {
    if (this.kind === null && value !== null) this.kind = kindOf(value);
    while (this.values.length < index) this.values.push(null);
    this.values[index] = this.kind === "number" ? (numberOf(value) ?? null) : value;
  }
}

export class Choice {
  constructor(invoke, choice) {
    this.invoke = invoke;
    this.choice = choice;
    this.texts = [];
    this.times = [];
    this.columns = new Map();
    /** Grows with each event, so that a reader sees whether anything is new. */
    this.revision = 0;
    /** Grows when what is there has changed, and not only grown. */
    this.epoch = 0;
    this.finish = null;
  }

  get length() {
    return this.texts.length;
  }

  get text() {
    return this.texts.join("");
  }

  /** Take an output in. */
  add(output) {
    const count = output.token_ids.length;
    if (output.index < this.length) this.cut(output.index);
    this.texts.push(...tokenTexts(output, count));
    // The end of the text that was held back has no token of its own.
    if (!count && output.text && this.length) {
      this.texts[this.length - 1] += output.text;
      this.epoch++;
    }
    for (let at = 0; at < count; at++) this.times.push(output.time);
    if (output.delta) this.save(output.delta, count, this.length);
    if (output.finish_reason) this.finish = output.finish_reason;
    this.revision++;
  }

  /** Take saves in that belong to the `count` tokens before `end`. */
  save(delta, count, end) {
    for (const [name, value] of Object.entries(delta)) {
      if (isObject(value) && !isArray(value) && !isLens(value)) {
        const inner = Object.entries(value).map(([key, item]) => [`${name}.${key}`, item]);
        this.save(Object.fromEntries(inner), count, end);
        continue;
      }
      const column = this.column(name);
      const last = Math.max(0, end - 1);
      if (!Array.isArray(value) || (value.length > count && kindOf(value) === "vector")) {
        column.set(last, value);
        continue;
      }
      const first = Math.max(0, end - value.length);
      value.forEach((item, at) => column.set(first + at, item));
    }
  }

  column(name) {
    let column = this.columns.get(name);
    if (!column) this.columns.set(name, (column = new Column(name)));
    return column;
  }

  cut(length) {
    this.texts.length = this.times.length = length;
    for (const column of this.columns.values()) column.values.length = Math.min(column.values.length, length);
    this.epoch++;
  }

  /** Take a folded state in, in place of all that was there. */
  replace(state) {
    this.cut(0);
    this.columns.clear();
    const count = state.token_ids.length;
    const strings = state.token_strings;
    const whole = strings?.join("") === state.text ? strings : [state.text, ...Array(Math.max(0, count - 1)).fill("")];
    this.texts = count ? whole.slice(0, count) : [];
    this.times = Array(count).fill(0);
    for (const [name, value] of Object.entries(state.saves ?? {})) {
      const column = this.column(name);
      if (!Array.isArray(value)) column.set(Math.max(0, count - 1), value);
      else value.forEach((item, at) => column.set(Math.max(0, count - value.length) + at, item));
    }
    this.finish = state.finish_reason;
    this.revision++;
  }

  /** The names of the columns that have a number for each token, in the order of names. */
  scalars() {
    return sorted([...this.columns.values()].filter((one) => one.kind === "number").map((one) => one.name));
  }

  /** All columns, in the order of names. */
  sortedColumns() {
    return [...this.columns.values()].sort((a, b) => collator.compare(a.name, b.name));
  }

  /** What can be drawn as a heat map: columns with a row of values, and columns `name.0`, `name.1`, ... together. */
  heats() {
    const found = new Map();
    const families = new Map();
    for (const { name, kind } of this.columns.values()) {
      if (kind === "vector") found.set(name, { name, members: null });
      const [, family, row] = /^(.+)\.(\d+)$/.exec(name) ?? [];
      if (row !== undefined && (kind === "number" || kind === "lens")) {
        if (!families.has(family)) families.set(family, []);
        families.get(family).push(name);
      } else if (kind === "lens") found.set(name, { name, members: [name] });
    }
    for (const [name, members] of families) found.set(name, { name, members: sorted(members) });
    return [...found.values()].sort((a, b) => collator.compare(a.name, b.name));
  }

  /** The numbers and lenses that a heat map has for a token, one for each row. */
  heatColumn(heat, index) {
    if (heat.members) return heat.members.map((name) => this.columns.get(name).values[index] ?? null);
    return this.columns.get(heat.name).values[index] ?? [];
  }
}

const collator = new Intl.Collator("en", { numeric: true });
const sorted = (names) => names.sort(collator.compare);

/** The text of each token of an output. Where it cannot be told apart, the first token has all of it. */
function tokenTexts(output, count) {
  if (count === 0) return [];
  if (count === 1) return [output.text];
  if (output.token_strings?.join("") === output.text) return output.token_strings;
  return [output.text, ...Array(count - 1).fill("")];
}
