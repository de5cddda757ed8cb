// A choice's text, a span for each token. A long text is divided into blocks, and only a window of them is in the page.

import { stepClass } from "./colours.js";
import { el, shown } from "./dom.js";
import { afterDrawing } from "./frames.js";

/** A block ends at the first line break after this many tokens, or, without one, after the second number. */
const BLOCK = 128;
const LONGEST_BLOCK = 1024;
/** How many tokens the page holds of a choice at most, and how many more the buttons show. */
const WINDOW = 4096;

export class TokenText {
  /** `onpick(index)` is called for the token that the pointer or a key picks; null for none. `onmove()` asks to draw. */
  constructor(onpick, onmove) {
    this.onpick = onpick;
    this.onmove = onmove;
    this.earlier = el("button", { type: "button", class: "quiet more", hidden: true, onclick: () => this.showEarlier() });
    this.later = el("button", { type: "button", class: "quiet more", hidden: true, onclick: () => this.showLater() });
    this.body = el("div", { class: "tokens" });
    this.element = el(
      "div",
      { class: "text", tabindex: "0", role: "region", "aria-label": "Text" },
      this.earlier,
      this.body,
      this.later,
    );
    this.atEnd = true;
    this.scrollDown = () => {
      this.element.scrollTop = this.element.scrollHeight;
    };
    // A block that comes into view gets its real height only then.
    this.sizes = new ResizeObserver(() => this.atEnd && this.follows && afterDrawing(this.scrollDown));
    this.sizes.observe(this.body);
    this.element.addEventListener("scroll", () => this.scrolled(), { passive: true });
    this.element.addEventListener("keydown", (event) => this.key(event));
    this.body.addEventListener("pointerover", (event) => this.hover(event));
    this.element.addEventListener("pointerleave", () => this.onpick(null));
    this.show(null);
  }

  /** Show another choice, from its beginning. */
  show(choice, marks = [], colour = null) {
    this.choice = choice;
    this.marks = marks;
    /** The step of a token by its index, or null for no colours. */
    this.colour = colour;
    this.epoch = choice?.epoch;
    this.picked = null;
    this.first = 0;
    this.end = 0;
    this.follows = true;
    this.clear();
  }

  clear() {
    this.body.replaceChildren();
    this.blocks = [];
    this.end = this.first;
  }

  /** Draw up to and without the token `limit`. `marks` are `{index, label}` of this choice, in order. */
  draw(limit, marks) {
    if (!this.choice) return;
    const stays = this.epoch === this.choice.epoch && sameMarks(this.marks, marks, this.end);
    this.marks = marks;
    if (!stays) {
      this.epoch = this.choice.epoch;
      this.clear();
    }
    if (limit < this.end) this.cutTo(limit);
    if (this.follows && limit - this.first > WINDOW) this.moveTo(limit - WINDOW / 2);
    const until = Math.min(limit, this.first + WINDOW);
    const grown = until > this.end;
    if (grown) this.append(until);
    this.earlier.hidden = this.first === 0;
    this.later.hidden = limit <= this.end;
    this.earlier.textContent = `Show tokens before ${this.first}`;
    this.later.textContent = `Show tokens after ${this.end - 1}`;
    if (grown && this.atEnd && this.follows) afterDrawing(this.scrollDown);
  }

  scrolled() {
    const { scrollHeight, scrollTop, clientHeight } = this.element;
    this.atEnd = scrollHeight - scrollTop - clientHeight < 32;
  }

  moveTo(first) {
    this.first = Math.max(0, first);
    this.picked = null;
    this.clear();
  }

  showEarlier() {
    this.follows = false;
    this.moveTo(this.first - WINDOW / 2);
    this.onmove();
  }

  showLater() {
    const next = this.first + WINDOW / 2;
    this.follows = this.choice.length - next <= WINDOW;
    this.moveTo(next);
    this.onmove();
  }

  append(until) {
    let mark = this.marks.findIndex((one) => one.index >= this.end);
    let block = this.blocks.at(-1);
    let added = document.createDocumentFragment();
    for (let index = this.end; index < until; index++) {
      if (!block || block.closed) {
        block?.element.append(added);
        added = document.createDocumentFragment();
        block = { element: el("div", { class: "block" }), start: index, spans: [], closed: false };
        this.blocks.push(block);
        this.body.append(block.element);
      }
      for (; mark >= 0 && mark < this.marks.length && this.marks[mark].index === index; mark++) {
        const { label, brief } = this.marks[mark];
        added.append(el("span", { class: brief ? "mark brief" : "mark", text: brief ? "" : label, title: label }));
      }
      const text = this.choice.texts[index];
      const span = document.createElement("span");
      span.className = this.classOf(index);
      span.textContent = text;
      span.index = index;
      block.spans.push(span);
      added.append(span);
      const size = index + 1 - block.start;
      if ((size >= BLOCK && text.endsWith("\n")) || size >= LONGEST_BLOCK) {
        block.closed = true;
        if (!text.endsWith("\n")) block.element.classList.add("joined");
      }
    }
    block?.element.append(added);
    this.end = until;
  }

  remove() {
    this.sizes.disconnect();
  }

  cutTo(limit) {
    while (this.blocks.length && this.blocks.at(-1).start >= limit) this.blocks.pop().element.remove();
    const block = this.blocks.at(-1);
    if (block) {
      const kept = block.spans.slice(0, limit - block.start);
      const last = kept.at(-1);
      while (last && last.nextSibling) last.nextSibling.remove();
      block.spans = kept;
      block.closed = false;
    }
    this.end = Math.max(this.first, limit);
    if (limit < this.first) this.moveTo(limit - WINDOW / 2);
  }

  classOf(index) {
    const colour = this.colour ? stepClass(this.colour(index)) : "t";
    return index === this.picked ? `${colour} picked` : colour;
  }

  /** Colour the tokens anew, because the colours' meaning has changed. */
  recolour(colour) {
    this.colour = colour;
    for (const block of this.blocks) for (const span of block.spans) span.className = this.classOf(span.index);
  }

  span(index) {
    const block = this.blocks.findLast((one) => one.start <= index);
    return block?.spans[index - block.start];
  }

  /** Outline a token, or none. */
  pick(index) {
    if (index === this.picked) return;
    const before = this.picked;
    this.picked = index;
    for (const one of [before, index]) {
      const span = one === null ? null : this.span(one);
      if (span) span.className = this.classOf(one);
    }
  }

  hover(event) {
    const index = event.target.index;
    if (index !== undefined) this.onpick(index);
  }

  key(event) {
    const steps = { ArrowLeft: -1, ArrowRight: 1 };
    const last = this.end - 1;
    if (last < this.first || event.altKey || event.ctrlKey || event.metaKey) return;
    let next = null;
    if (event.key in steps) next = this.picked === null ? last : this.picked + steps[event.key];
    else if (event.key === "Home" && event.target === this.element) next = this.first;
    else if (event.key === "End" && event.target === this.element) next = last;
    else if (event.key === "Escape") return this.onpick(null);
    if (next === null) return;
    event.preventDefault();
    next = Math.max(this.first, Math.min(last, next));
    this.onpick(next);
    this.span(next)?.scrollIntoView({ block: "nearest" });
  }
}

/** Whether the marks before a token are the same in both lists. */
function sameMarks(one, other, end) {
  const drawn = (marks) => marks.filter((mark) => mark.index < end).map((mark) => `${mark.index} ${mark.brief} ${mark.label}`);
  return one === other || drawn(one).join("\n") === drawn(other).join("\n");
}

/** How many tokens may lie between two marks of one movement of a slider. */
const ONE_MOVEMENT = 8;

/**
 * The marks of a choice as its text and plots have them: `{index, label, brief}`, one for each token.
 * A movement of a slider makes many changes by one author. All but the last of them are brief.
 */
export function textMarks(marks, key) {
  const found = [];
  for (const mark of marks) {
    const index = mark.first[key];
    if (index === undefined) continue;
    const last = found.at(-1);
    if (last?.index === index && last.by === mark.by) {
      Object.assign(last.values, mark.values);
    } else {
      if (last && last.by === mark.by && index - last.index <= ONE_MOVEMENT) last.brief = true;
      found.push({ index, by: mark.by, values: { ...mark.values }, brief: false });
    }
  }
  for (const one of found) one.label = markLabel(one);
  return found;
}

/** The label of a change of live parameters. */
export function markLabel(mark) {
  const values = Object.entries(mark.values).map(([name, value]) => {
    return `${name} = ${typeof value === "object" ? "…" : shown(value)}`;
  });
  return `${values.join(", ")} · ${mark.by}`;
}
