"""An author of a trace's events, and what a reader of them should hold."""

from __future__ import annotations

import anyio
import numpy as np

from tracewire_bus.bus import Bus, Gap
from tracewire_bus.domain.fold import Fold
from tracewire_bus.events.writer import Writer
from tracewire_bus.wire.codec import decode_event, decode_snapshot, encode
from tracewire_bus.wire.digests import digest
from tracewire_bus.wire.kinds import kind, length
from tracewire_bus.wire.messages import Accepted, Append, DecodedOutput, Delta, Event, Final, Manifest, Set
from tracewire_bus.wire.packing import encode_key, wire
from tracewire_bus.wire.refs import ArrayRef

VALUES = [
    np.arange(3, dtype="float32"),
    (1, (2.5, None)),
    2**80,
    complex(1, 2),
    {1: [b"x"], "k": {"deep": [1]}, (1, "head"): 2},
    {"seen", (1, 2)},
    frozenset({3}),
    np.dtype("float16"),
    ArrayRef("float32", (300,), b"d" * 16, "blob", "acts"),
]


def saved(step: int) -> list[Delta]:
    """What the step of token `step` saves: values of every sort, into a list and a nested dict."""
    value = wire(VALUES[step % len(VALUES)])
    if step == 0:
        return [Set(path=("acts",), value=[value]), Set(path=("nested",), value={"a": {}})]
    return [Append(path=("acts",), items=[value]), Set(path=("nested", "a", encode_key((step, "head"))), value=value)]


class Author:
    """Writes a trace's events, and folds them as a consumer would."""

    def __init__(self, bus: Bus, writer: Writer, trace: str = "t", attempt: int = 1) -> None:
        self.bus, self.writer, self.trace = bus, writer, trace
        self.attempt, self.seq = attempt, 0
        self.fold = Fold()
        self.tokens = 0

    async def write(self, event: Event, final: bool = False) -> None:
        """Append the next event."""
        event.attempt, event.seq = self.attempt, self.seq
        data = encode(event)
        self.fold.apply(decode_event(data))
        self.seq += 1
        await self.writer.append(self.trace, event.attempt, event.seq, data, final=final)

    async def begin(self) -> None:
        """The first event."""
        await self.write(Accepted(attempt=0, seq=0, engine="e", model="m", live={"alpha": wire(np.ones(2))}))

    async def outputs(self, count: int) -> None:
        """So many tokens."""
        for _ in range(count):
            step, self.tokens = self.tokens, self.tokens + 1
            output = DecodedOutput(
                attempt=0, seq=0, index=step, token_ids=[step], text=f" {step}", deltas=[saved(step)], logprobs=None
            )
            await self.write(output)

    async def end(self) -> None:
        """The final, with a manifest."""
        manifest = [
            Manifest(invoke, choice, name, kind(value), length(value), digest(value))
            for (invoke, choice), state in self.fold.choices.items()
            for name, value in state.saves.items()
        ]
        await self.write(Final(attempt=0, seq=0, status="finished", manifest=manifest), final=True)


def same(fold: Fold, author: Author) -> None:
    """Hold the same."""
    assert fold.digest() == author.fold.digest()
    for key, state in author.fold.choices.items():
        assert fold.choices[key].token_ids == state.token_ids
        assert fold.choices[key].text == state.text
    assert (fold.attempt, fold.seq) == (author.fold.attempt, author.fold.seq)
    assert (fold.live_version, fold.paused) == (author.fold.live_version, author.fold.paused)
    assert fold.accepted is not None
    assert author.fold.accepted is not None
    assert digest(fold.accepted.live) == digest(author.fold.accepted.live)


async def read(bus: Bus, trace: str, since: str = "start", fold: Fold | None = None) -> tuple[Fold, list[str]]:
    """A trace folded to its end, with ids of what came and `since>until` for gaps."""
    fold, seen = fold or Fold(verifying=True), []
    with anyio.fail_after(20):
        async for item in bus.read(trace, since):
            if isinstance(item, Gap):
                seen.append(f"{item.since}>{item.until}")
                fold.resume(decode_snapshot(item.snapshot.data))
            else:
                seen.append(item.id)
                fold.apply(decode_event(item.data))
    fold.verify()
    return fold, seen
