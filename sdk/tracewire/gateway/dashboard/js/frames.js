// Drawing by animation frames. Events only mark what they change; each frame draws what is marked, within a budget.

/** How long one frame may draw, in milliseconds. What is left over is drawn in the next frame. */
const BUDGET_MS = 7;
/** The browser's own work on what was drawn, layout and painting, comes afterwards, and makes a frame long or short. */
const LONG_MS = 34;
const SHORT_MS = 25;
/** How much is drawn in one frame: half as much after a long frame, and one more after a short one. */
const MOST = 64;
let allowed = 8;
/** When the last frame began and how much it drew; null where it was not the frame before. */
let before = null;

const waiting = new Set();
const after = new Set();
let asked = false;

function draw() {
  asked = false;
  const begun = performance.now();
  if (before) adapt(begun - before.begun, before.drawn);
  let drawn = 0;
  for (const one of waiting) {
    // Deleted and added again, it comes behind the others.
    waiting.delete(one);
    one();
    drawn++;
    if (drawn >= allowed || performance.now() - begun > BUDGET_MS) break;
  }
  for (const one of after) one();
  after.clear();
  before = { begun, drawn };
  if (waiting.size) ask();
  else requestAnimationFrame(() => asked || (before = null));
}

/** Draw less in a frame when the last one was long. */
function adapt(took, drawn) {
  if (took > LONG_MS) allowed = Math.max(1, Math.floor(Math.min(allowed, drawn) / 2));
  else if (took < SHORT_MS) allowed = Math.min(MOST, allowed + 1);
}

function ask() {
  if (asked) return;
  asked = true;
  requestAnimationFrame(draw);
}

/** Call `work` in a coming frame, once, however often it is asked for until then. */
export function inFrame(work) {
  waiting.add(work);
  ask();
}

/** Call `work` behind what this frame draws: what has the browser lay the page out does so once, for all of it. */
export function afterDrawing(work) {
  after.add(work);
  ask();
}

/** Forget `work`, which need not be drawn any more. */
export const notInFrame = (work) => waiting.delete(work);

/** `work`, at most once in `interval` milliseconds, and once more after the last call. */
export function paced(work, interval) {
  let timer = null;
  let last = -Infinity;
  const run = () => {
    timer = null;
    last = performance.now();
    work();
  };
  const call = () => {
    if (timer !== null) return;
    const wait = last + interval - performance.now();
    if (wait <= 0) run();
    else timer = setTimeout(run, wait);
  };
  call.stop = () => clearTimeout(timer);
  return call;
}

const watched = new WeakMap();
const observer = new IntersectionObserver(
  (entries) => {
    for (const entry of entries) watched.get(entry.target)?.(entry.isIntersecting);
  },
  { rootMargin: "200px" },
);

/** Call `change(true)` when an element comes into view or near it, and `change(false)` when it leaves. */
export function whileInView(element, change) {
  watched.set(element, change);
  observer.observe(element);
  return () => observer.unobserve(element);
}
