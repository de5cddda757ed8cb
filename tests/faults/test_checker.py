"""The checker finds what is wrong: each kind of violation, put into a trace that was right."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

import pytest

from tests.faults.harness.checker import KINDS, Asked, check_leftovers, check_trace
from tests.support.scripted_engine import expected
from tracewire_bus.domain.fold import Fold
from tracewire_bus.wire.arrays import array_header, array_payload, encoded_array
from tracewire_bus.wire.codec import decode_plain, encode
from tracewire_bus.wire.digests import array_digest, list_digest
from tracewire_bus.wire.ids import FINAL_ID
from tracewire_bus.wire.messages import (
    Accepted,
    Append,
    Change,
    DecodedOutput,
    Event,
    Failure,
    Final,
    Manifest,
    Paused,
    Restarted,
    Resumed,
    Set,
    Steered,
)

TOKENS = 4

Entries = list[tuple[str, bytes]]


def entry(event: Any) -> tuple[str, bytes]:
    """An event as it stands in a stream."""
    return (FINAL_ID if isinstance(event, Final) else f"{event.attempt}-{event.seq}", encode(event))


def good() -> tuple[Asked, Entries]:
    """A trace that was steered twice, lost its engine after two tokens, and finished in its second attempt."""
    asked = Asked("t", "hello", TOKENS, live=True, steered={1, 2})
    tokens, _ = expected("hello", TOKENS)
    arrays = [struct.pack("<dd", token, at) for at, token in enumerate(tokens)]

    def attempt(number: int, length: int) -> list[Any]:
        events: list[Any] = [Restarted(attempt=number, seq=0)] if number > 1 else []
        events.append(Accepted(attempt=number, seq=len(events), engine="e", model="tiny"))
        version = number
        change = Change(version=version, by="x", time=0, values={"alpha": 1.0})
        events.append(Steered(attempt=number, seq=len(events), version=version, changes=[change]))
        for at in range(length):
            item = encoded_array(array_payload("float64", (2,), arrays[at]))
            delta = Append(path=("acts",), items=[item]) if at else Set(path=("acts",), value=[item])
            fields = {"index": at, "token_ids": [tokens[at]], "text": "x", "deltas": [[delta]]}
            events.append(DecodedOutput(attempt=number, seq=len(events), **fields))
        return events

    events = [*attempt(1, 2), *attempt(2, TOKENS)]
    _, head = array_header("float64", (2,), 16)
    digest = list_digest([array_digest(head, array) for array in arrays])
    manifest = [Manifest(0, 0, "acts", "list", TOKENS, digest)]
    events.append(Final(attempt=2, seq=events[-1].seq + 1, status="finished", manifest=manifest))
    return asked, [entry(event) for event in events]


def kinds(asked: Asked, stream: Entries, *consumers: Entries) -> set[str]:
    """What is found."""
    found = check_trace(asked, stream, {f"consumer {number}": got for number, got in enumerate(consumers)})
    assert all(violation.kind in KINDS for violation in found)
    return {violation.kind for violation in found}


def test_nothing_is_found_where_nothing_is_wrong() -> None:
    asked, stream = good()
    assert kinds(asked, stream, stream, list(stream)) == set()


def _swapped(entries: Entries) -> Entries:
    return [*entries[:3], entries[4], entries[3], *entries[5:]]


def _late(entries: Entries) -> Entries:
    return [*entries[:3], *entries[4:6], entries[3], *entries[6:]]


def _two_finals(entries: Entries) -> Entries:
    return [*entries, entry(Final(attempt=3, seq=0, status="cancelled"))]


#: What is done to a good stream's entries, and what kind of violation that is.
BROKEN: dict[str, tuple[Callable[[Entries], Entries], str]] = {
    "an entry is missing": (lambda entries: [*entries[:3], *entries[4:]], "lost"),
    "an attempt's first entry is missing": (lambda entries: [*entries[:4], *entries[5:]], "lost"),
    "an entry comes twice": (lambda entries: [*entries[:4], entries[3], *entries[4:]], "duplicated"),
    "two entries are swapped": (_swapped, "reordered"),
    "an old attempt's comes late": (
        lambda entries: [*entries[:3], *entries[4:6], entries[3], *entries[6:]],
        "reordered",
    ),
    "the final comes twice": (_two_finals, "two finals"),
    "the final is missing": (lambda entries: entries[:-1], "no final"),
    "nothing came": (lambda entries: [], "no final"),
}


@pytest.mark.parametrize("broken", BROKEN)
@pytest.mark.parametrize("where", ["the stream", "a consumer"])
def test_what_is_broken_is_found(broken: str, where: str) -> None:
    asked, stream = good()
    change, kind = BROKEN[broken]
    if where == "the stream":
        assert kind in kinds(asked, change(stream), stream)
    else:
        assert kind in kinds(asked, stream, stream, change(list(stream)))


def test_what_a_consumer_never_got_at_its_end_is_lost() -> None:
    """It follows in itself, and is not all that there is."""
    asked, stream = good()
    assert "lost" in kinds(asked, stream, stream[:5])


def test_what_a_gap_came_to_is_compared() -> None:
    """A consumer that read a state in place of what was trimmed must come to what the stream comes to."""
    asked, stream = good()
    fold = Fold()
    for _, data in stream[:-2]:
        fold.apply(decode_plain(data))
    gap = f"gap start {stream[-3][0]}"
    assert kinds(asked, stream, [(gap, encode(fold.snapshot())), *stream[-2:]]) == set()
    saved = fold.choices[0, 0].saves["acts"]
    saved[0], saved[1] = saved[1], saved[0]
    assert kinds(asked, stream, [(gap, encode(fold.snapshot())), *stream[-2:]]) == {"wrong"}


def test_other_contents_are_found() -> None:
    asked, stream = good()
    asked.prompt = "something else"
    assert kinds(asked, stream) == {"wrong"}
    asked, stream = good()
    asked.tokens += 1
    assert kinds(asked, stream) == {"wrong"}
    other = [*stream[:3], (stream[3][0], stream[2][1]), *stream[4:]]
    asked, stream = good()
    assert "wrong" in kinds(asked, stream, other)
    # Not what its manifest says.
    final = Final(attempt=2, seq=int(stream[-2][0].split("-")[1]) + 1, status="finished", manifest=[])
    assert kinds(asked, [*stream[:-1], entry(final)]) == {"wrong"}
    # An attempt that does not say that it is another one.
    plain = [*stream[:4], entry(Accepted(attempt=2, seq=0, engine="e", model="tiny")), *stream[5:]]
    assert "wrong" in kinds(asked, plain)


@pytest.mark.parametrize(
    ("status", "error", "asked", "right"),
    [
        ("failed", "EngineLost", {"tries": 1}, True),
        ("failed", "EngineShutdown", {"tries": 1}, True),
        ("failed", "EngineLost", {"tries": 3}, False),
        ("failed", "ValueError", {"tries": 1}, False),
        ("cancelled", "Cancelled", {"cancelled": True}, True),
        ("cancelled", "Cancelled", {}, False),
        ("expired", "DeadlineExceeded", {}, False),
        ("expired", "DeadlineExceeded", {"deadline_s": 1.0}, True),
        ("expired", "SomethingElse", {"deadline_s": 1.0}, False),
    ],
)
def test_an_end_must_be_one_that_it_may_come_to(status: Any, error: str, asked: dict[str, Any], right: bool) -> None:
    _, stream = good()
    final = entry(Final(attempt=2, seq=7, status=status, error=Failure(type=error, message="")))
    trace = Asked("t", "hello", TOKENS, live=True, steered={1, 2}, **asked)
    assert (kinds(trace, [*stream[:-1], final]) == set()) is right


def test_each_prompt_has_what_it_asks_for() -> None:
    asked, stream = good()
    asked.more = ["another"]
    assert kinds(asked, stream) == {"wrong"}
    # Of a trace that was ended, what there is must be right.
    final = entry(Final(attempt=2, seq=7, status="expired", error=Failure(type="DeadlineExceeded", message="")))
    asked.deadline_s = 1.0
    assert kinds(asked, [*stream[:-1], final]) == set()
    asked.prompt = "something else"
    assert kinds(asked, [*stream[:-1], final]) == {"wrong"}
    # An output of a prompt that it does not have.
    asked, stream = good()
    asked.cancelled = True
    end = Failure(type="Cancelled", message="")
    for invoke, index in ((0, TOKENS), (1, 0)):
        other = DecodedOutput(attempt=2, seq=7, invoke=invoke, index=index, token_ids=[1], text="x", deltas=[[]])
        final = entry(Final(attempt=2, seq=8, status="cancelled", error=end))
        assert kinds(asked, [*stream[:-1], entry(other), final]) == {"wrong"}


def _paused(*events: Event) -> Entries:
    """A trace of these events, which was cancelled then."""
    numbered = [Accepted(attempt=1, seq=0, engine="e", model="tiny")]
    for event in events:
        again = isinstance(event, Restarted)
        event.attempt = numbered[-1].attempt + again
        event.seq = 0 if again else numbered[-1].seq + 1
        numbered.append(event)  # type: ignore[arg-type]
    end = Final(
        attempt=event.attempt, seq=event.seq + 1, status="cancelled", error=Failure(type="Cancelled", message="")
    )
    return [entry(event) for event in [*numbered, end]]


@pytest.mark.parametrize(
    ("events", "pauses", "kind"),
    [
        ([Paused, Resumed, Paused], 2, set()),
        ([Paused, Restarted, Paused, Resumed], 1, set()),
        ([Paused, Resumed], 0, {"wrong"}),
        ([Paused, Paused], 1, {"duplicated"}),
        ([Resumed], 1, {"duplicated"}),
        ([Paused, Restarted, Resumed], 1, {"duplicated"}),
    ],
)
def test_a_trace_is_told_to_be_paused_and_to_go_on_in_turns(
    events: list[type[Event]], pauses: int, kind: set[str]
) -> None:
    asked = Asked("t", "hello", TOKENS, cancelled=True, pauses=pauses)
    assert kinds(asked, _paused(*(event(attempt=0, seq=0) for event in events))) == kind


@pytest.mark.parametrize(
    ("steered", "kind"), [({1, 2, 3}, {"lost"}), ({1}, {"wrong"}), ({1, 2}, set())], ids=["lost", "made up", "right"]
)
def test_changes_are_told_of_once(steered: set[int], kind: set[str]) -> None:
    asked, stream = good()
    asked.steered = steered
    assert kinds(asked, stream) == kind


def test_a_change_that_is_told_of_twice_is_found() -> None:
    asked, stream = good()
    change = Change(version=1, by="x", time=0, values={"alpha": 1.0})
    again = entry(Steered(attempt=2, seq=2, version=2, changes=[change]))
    assert "duplicated" in kinds(asked, [again if id_ == "2-2" else (id_, data) for id_, data in stream])


def test_leftovers_are_found() -> None:
    keys = ["tw:engines", "tw:{tiny}:queue:state"]
    allowed = (":engines", "queue:state")
    assert check_leftovers({"entries": 0}, keys, allowed, {"engine: requests": 0}) == []
    for found in (
        check_leftovers({"entries": 1}, keys, allowed, {}),
        check_leftovers({}, [*keys, "tw:{t1}:events:t"], allowed, {}),
        check_leftovers({}, keys, allowed, {"engine: requests": 2}),
    ):
        assert [violation.kind for violation in found] == ["leftover"]
