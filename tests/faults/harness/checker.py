"""What must hold of a trace whatever broke while it ran: compares what was asked for, what stands in Redis, and what
every consumer got.

Nothing here touches Redis or time: it is fed with what others wrote down, so that tests can feed it with what is wrong.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from tests.support.scripted_engine import expected
from tracewire_bus.domain.fold import DigestMismatch, Fold, FoldError
from tracewire_bus.wire.codec import decode_event, decode_snapshot
from tracewire_bus.wire.ids import FINAL_ID, parse_id
from tracewire_bus.wire.messages import Final, Paused, Restarted, Resumed, SteeredBase

__all__ = ["KINDS", "Asked", "Entries", "Violation", "check_leftovers", "check_trace", "folded"]

#: What can be wrong.
KINDS = ("lost", "duplicated", "reordered", "two finals", "no final", "leftover", "wrong")

#: A stream or a consumer's journal: id and data of each entry, in the order in which they came. Entries that were
#: trimmed before they were read stand as one, `gap <since> <until>`, with the state that they came to.
Entries = Sequence[tuple[str, bytes]]


@dataclass(frozen=True)
class Violation:
    """Something that must not be. `kind` is one of `KINDS`."""

    kind: str
    trace: str
    detail: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.trace}: {self.detail}"


@dataclass
class Asked:
    """What a trace was submitted with, and what was asked of it since.

    `more` are its further prompts, each of as many tokens. `pauses` says how often it may have been paused.
    `steered` has the versions that were accepted; `unsure` says that an answer to such a change never came.
    """

    trace: str
    prompt: str
    tokens: int
    tries: int = 3
    live: bool = False
    cancelled: bool = False
    more: list[str] = field(default_factory=list)
    deadline_s: float | None = None
    pauses: int = 0
    steered: set[int] = field(default_factory=set)
    unsure: bool = False


def folded(entries: Entries) -> Fold:
    """The fold of entries.

    Raises:
        FoldError: they do not follow from each other.
    """
    fold = Fold(verifying=True)
    for id_, data in entries:
        if id_.startswith("gap "):
            fold.resume(decode_snapshot(data))
        else:
            fold.apply(decode_event(data))
    return fold


def check_trace(asked: Asked, stream: Entries, consumers: Mapping[str, Entries]) -> list[Violation]:
    """What is wrong with a trace that should have ended, with its stream as it is in Redis, and with its consumers."""
    found: list[Violation] = []

    def wrong(kind: str, detail: str) -> None:
        found.append(Violation(kind, asked.trace, detail))

    found += _order(asked.trace, "the stream", stream)
    for name, entries in consumers.items():
        found += _order(asked.trace, name, entries)
        found += _compare(asked.trace, name, entries, stream)
    if found:
        # What follows from that is not worth telling.
        return found
    try:
        fold = folded(stream)
    except (FoldError, ValueError) as error:
        wrong("wrong", f"the stream cannot be folded: {error}")
        return found
    try:
        fold.verify()
    except DigestMismatch as error:
        wrong("wrong", str(error))
    for name, entries in consumers.items():
        if folded(entries).digest() != fold.digest():
            wrong("wrong", f"{name} folded something else")
    found += _ending(asked, fold)
    found += _contents(asked, fold)
    found += _steers(asked, stream, fold)
    found += _pauses(asked, stream)
    return found


def _order(trace: str, where: str, entries: Entries) -> list[Violation]:
    """Whether entries follow each other, attempt by attempt, up to one final."""
    found: list[Violation] = []

    def wrong(kind: str, detail: str) -> None:
        found.append(Violation(kind, trace, f"{where}: {detail}"))

    finals = sum(id_ == FINAL_ID for id_, _ in entries)
    if finals > 1:
        wrong("two finals", f"{finals} of {len(entries)} events are finals")
    elif not finals or entries[-1][0] != FINAL_ID:
        wrong("no final", f"the last of {len(entries)} events is {entries[-1][0] if entries else 'none'}")
    attempt, seq = 0, -1
    seen: set[str] = set()
    for id_, data in entries:
        if id_.startswith("gap "):
            _, since, until = id_.split()
            if since != (f"{attempt}-{seq}" if attempt else "start") or parse_id(until) <= (attempt, seq):
                wrong("lost", f"{id_} comes behind {attempt}-{seq}")
            attempt, seq = parse_id(until)
            continue
        event = decode_event(data)
        if id_ in seen and id_ != FINAL_ID:
            wrong("duplicated", f"event {id_} comes again behind {attempt}-{seq}")
            continue
        seen.add(id_)
        if id_ != FINAL_ID and parse_id(id_) != (event.attempt, event.seq):
            wrong("wrong", f"entry {id_} holds event {event.attempt}-{event.seq}")
        if (event.attempt, event.seq) <= (attempt, seq):
            if not isinstance(event, Final):
                wrong("reordered", f"event {event.attempt}-{event.seq} comes behind {attempt}-{seq}")
        elif event.attempt == attempt and event.seq != seq + 1:
            wrong("lost", f"event {event.attempt}-{event.seq} comes behind {attempt}-{seq}")
        elif event.attempt > attempt and event.seq != 0:
            wrong("lost", f"attempt {event.attempt} begins with event {event.seq}")
        elif event.attempt > attempt and event.attempt > 1 and not isinstance(event, Restarted | Final):
            wrong("wrong", f"attempt {event.attempt} begins with a {type(event).__name__}")
        attempt, seq = max((attempt, seq), (event.attempt, event.seq))
    return found


def _compare(trace: str, name: str, entries: Entries, stream: Entries) -> list[Violation]:
    """Whether a consumer got what stands in the stream."""
    held = {id_: data for id_, data in stream if not id_.startswith("gap ")}
    # What lies before this was trimmed, since or before.
    trimmed = max(
        (parse_id(id_.split()[-1]) for id_, _ in [*stream, *entries] if id_.startswith("gap ")), default=(0, 0)
    )
    got = [id_ for id_, _ in entries]
    found = [
        Violation("wrong", trace, f"{name} got an event {id_} that is not the stream's")
        for id_, data in entries
        if held.get(id_, data) != data
    ]
    gone = [id_ for id_ in got if id_ not in held and not id_.startswith("gap ") and parse_id(id_) > trimmed]
    if gone:
        found.append(Violation("lost", trace, f"{name} got {', '.join(gone[:5])}, which the stream has not"))
    missing = [id_ for id_ in held if id_ not in set(got) and parse_id(id_) > trimmed]
    if missing:
        found.append(Violation("lost", trace, f"{name} never got {', '.join(missing[:5])} ({len(missing)} in all)"))
    return found


def _ending(asked: Asked, fold: Fold) -> list[Violation]:
    """Whether it ended as it should, with all that it should have."""
    error = fold.error
    kind = error.type if error is not None else ""
    if fold.status == "cancelled" and asked.cancelled:
        return []
    if fold.status == "failed" and asked.tries <= 1 and kind in ("EngineLost", "EngineShutdown"):
        return []
    if fold.status == "expired" and asked.deadline_s is not None and kind == "DeadlineExceeded":
        return []
    if fold.status != "finished":
        detail = f"it ended as {fold.status}: {error.message if error else ''}"
        return [Violation("wrong", asked.trace, detail)]
    return []


def _contents(asked: Asked, fold: Fold) -> list[Violation]:
    """Whether each prompt has the tokens and saves that it asks for: all, or, of a trace that was ended, the first."""
    found = []
    prompts = [asked.prompt, *asked.more]
    if extra := sorted(set(fold.choices) - {(invoke, 0) for invoke in range(len(prompts))}):
        found.append(Violation("wrong", asked.trace, f"it has outputs of {extra}, which nobody asked for"))
    for invoke, prompt in enumerate(prompts):
        ids, saved = expected(prompt, asked.tokens)
        state = fold.choices.get((invoke, 0))
        had = state.token_ids if state is not None else []
        if fold.status != "finished":
            ids, saved = ids[: len(had)], saved[: len(had)]
        if had != ids:
            detail = f"prompt {invoke}: {len(had)} tokens are not the {len(ids)} that were expected"
            found.append(Violation("wrong", asked.trace, detail))
        elif state is not None and [list(map(float, array)) for array in state.saves.get("acts", [])] != saved:
            found.append(Violation("wrong", asked.trace, f"prompt {invoke}: what it saved is not what was expected"))
    return found


def _pauses(asked: Asked, stream: Entries) -> list[Violation]:
    """Whether an attempt is told to be paused and to go on in turns, and no trace that nobody paused."""
    told: list[str] = []
    for id_, data in stream:
        if id_.startswith("gap "):
            # Whether it was paused there is in the state that the gap came to.
            told = ["Paused"] if decode_snapshot(data).paused else ["Resumed"]
            continue
        event = decode_event(data)
        if isinstance(event, Restarted):
            # It is told again of an attempt that begins paused.
            told = []
        elif isinstance(event, Paused | Resumed):
            kind = type(event).__name__
            if not asked.pauses:
                return [Violation("wrong", asked.trace, f"event {id_} is a {kind}, and nobody paused it")]
            if kind == (told[-1] if told else "Resumed"):
                return [Violation("duplicated", asked.trace, f"event {id_} is another {kind} behind {told}")]
            told.append(kind)
    return []


def _steers(asked: Asked, stream: Entries, fold: Fold) -> list[Violation]:
    """Whether each accepted change of live parameters was told of once, in order."""
    found = []
    told: list[int] = []
    if any(id_.startswith("gap ") for id_, _ in stream):
        # What is not there any more may have told of them.
        return []
    for _, data in stream:
        event = decode_event(data)
        if isinstance(event, SteeredBase):
            told += [change.version for change in getattr(event, "changes", [])]
    if len(set(told)) != len(told):
        found.append(Violation("duplicated", asked.trace, f"changes {told} were told of more than once"))
    elif told != sorted(told):
        found.append(Violation("reordered", asked.trace, f"changes were told of as {told}"))
    # What nobody ran any more when it was ended says nothing of what was accepted last.
    missing = asked.steered - set(told) if fold.status == "finished" else set()
    if missing:
        found.append(Violation("lost", asked.trace, f"accepted changes {sorted(missing)} were told of by no event"))
    if not asked.unsure and set(told) - asked.steered:
        extra = sorted(set(told) - asked.steered)
        found.append(Violation("wrong", asked.trace, f"changes {extra} were told of that nobody made"))
    return found


def check_leftovers(
    counts: Mapping[str, int], without_expiry: Iterable[str], allowed: Iterable[str], engines: Mapping[str, int]
) -> list[Violation]:
    """What is left when every trace has ended: parts of the queue, keys that never expire, what engines hold."""
    found = [Violation("leftover", what, f"{count} left on the queue") for what, count in counts.items() if count]
    known = tuple(allowed)
    found += [Violation("leftover", key, "it never expires") for key in without_expiry if not key.endswith(known)]
    found += [Violation("leftover", what, f"{count} held") for what, count in engines.items() if count]
    return found
