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
/** Whether a value is an item of an attention pattern: the positions that heads attend to most, and their weights. */
const isPattern = (value) => isObject(value) && Array.isArray(value.positions) && Array.isArray(value.weights);
/** How many rows are made of one value at most. */
const MOST_ROWS = 256;
const isObject = (value) => value !== null && typeof value === "object" && !Array.isArray(value);
/** Whether a value stands for an array: a reference, or base64. */
const isArray = (value) => isObject(value) && ("digest" in value || "base64" in value);

/**
 * The rows of a value that has a row for each location, such as a layer: numbers, or lenses. Else null.
 * Where there is a row for each position before them, those of the last position.
 */
function rowsOf(value) {
  if (isLens(value)) {
    if (!Array.isArray(value.token_ids[0])) return null;
    const [ids, logits, strings] = [value.token_ids, value.logits, value.token_strings].map(lastRows);
    return ids.map((row, at) => ({ token_ids: row, logits: logits[at], token_strings: strings?.[at] }));
  }
  if (isPattern(value)) return headsOf(value);
  if (!Array.isArray(value) || value.length < 2 || value.length > MOST_ROWS) return null;
  if (Array.isArray(value[0]) && value[0].length > 1) return rowsOf(value.at(-1));
  return value.every((one) => one === null || numberOf(one) !== undefined || isLens(one)) ? value : null;
}

/** The rows of a pattern of one layer at one position, one for each head. Else null. */
function headsOf({ positions, weights }) {
  while (positions.length === 1 && Array.isArray(positions[0]?.[0])) [[positions], [weights]] = [positions, weights];
  if (!Array.isArray(positions[0]) || Array.isArray(positions[0][0]) || positions.length > MOST_ROWS) return null;
  return positions.map((row, at) => ({ positions: row, weights: weights[at] }));
}

/** Of an array of rank 3, the last part of rank 2. */
function lastRows(value) {
  while (Array.isArray(value?.[0]?.[0])) value = value.at(-1);
  return value;
}

/** The kind of a value: `number`, `lens`, `pattern` or `other`. */
function kindOf(value) {
  if (numberOf(value) !== undefined) return "number";
  if (isLens(value)) return "lens";
  return isPattern(value) ? "pattern" : "other";
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
  /** `accepted()` is the trace's event of that name, or null before it. */
  constructor(invoke, choice, accepted) {
    this.invoke = invoke;
    this.choice = choice;
    this.accepted = accepted;
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
      if (isObject(value) && !isArray(value) && !isLens(value) && !isPattern(value)) {
        const inner = Object.entries(value).map(([key, item]) => [`${name}.${key}`, item]);
        this.save(Object.fromEntries(inner), count, end);
        continue;
      }
      const last = Math.max(0, end - 1);
      if (!Array.isArray(value) || (value.length > count && rowsOf(value))) {
        this.put(name, last, value);
        continue;
      }
      const first = Math.max(0, end - value.length);
      value.forEach((item, at) => this.put(name, first + at, item));
    }
  }

  /** Set a token's value. A value with a row for each layer is a column `name.0`, `name.1`, ... for each. */
  put(name, index, value) {
    const rows = rowsOf(value);
    if (rows) rows.forEach((row, at) => this.column(`${name}.${at}`).set(index, row));
    else this.column(name).set(index, value);
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
      if (!Array.isArray(value)) this.put(name, Math.max(0, count - 1), value);
      else value.forEach((item, at) => this.put(name, Math.max(0, count - value.length) + at, item));
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

  /** The tokens of an item of a lens, or those that a head attends to, best first: `{value, text, position}`. Else null. */
  ranked(item) {
    if (isLens(item)) {
      return item.token_ids.map((id, at) => ({ value: item.logits[at], text: item.token_strings?.[at] ?? `#${id}` }));
    }
    if (!isPattern(item)) return null;
    // -1 fills the places for which there are too few positions.
    const there = item.positions.filter((position) => position >= 0);
    return there.map((position, at) => ({ value: item.weights[at], text: this.textAt(position), position }));
  }

  /** The first of `ranked`, or null. */
  best(item) {
    return this.ranked(item)?.[0] ?? null;
  }

  /** The token at a position of the prompt and the output together. */
  textAt(position) {
    const accepted = this.accepted();
    const prompt = accepted?.prompt_token_ids?.[this.invoke]?.length ?? 0;
    const strings = accepted?.prompt_token_strings?.[this.invoke];
    return (position < prompt ? strings?.[position] : this.texts[position - prompt]) ?? `@${position}`;
  }

  /** What can be drawn as heat maps: lenses, and columns `name.0`, `name.1`, ... together. */
  heats() {
    const found = new Map();
    for (const { name, kind } of this.columns.values()) {
      if (kind !== "number" && kind !== "lens" && kind !== "pattern") continue;
      const [, family] = /^(.+)\.\d+$/.exec(name) ?? (kind === "lens" ? [name, name] : []);
      if (family === undefined) continue;
      if (!found.has(family)) found.set(family, { name: family, members: [] });
      found.get(family).members.push(name);
    }
    for (const heat of found.values()) sorted(heat.members);
    return [...found.values()].sort((a, b) => collator.compare(a.name, b.name));
  }

  /** The numbers, lenses and patterns that a heat map has for a token, one for each row. */
  heatColumn(heat, index) {
    return heat.members.map((name) => this.columns.get(name)?.values[index] ?? null);
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
