"""One batch of eight traces: seven innocent ones and an offender. What each comes to is compared with a control's."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import anyio
import numpy as np

from tracewire_bus.bus import Bus
from tracewire_bus.domain.fold import Fold
from tracewire_bus.wire.codec import decode_event
from tracewire_bus.wire.digests import digest
from tracewire_bus.wire.messages import (
    Accepted,
    Block,
    DecodedOutput,
    Failure,
    Invoke,
    Probe,
    Restarted,
    Steer,
    Submission,
)
from tracewire_bus.wire.packing import wire

__all__ = ["INNOCENTS", "TOKENS", "Batch", "Seen", "is_late", "run_batch", "run_traces", "source_block"]

#: How many tokens each innocent trace generates.
TOKENS = 24

_HIDDEN = 256

#: How long a lost engine may take to start again and to run its traces, in seconds.
_RESTART_S = 300.0

_READS = """innocent = [].save()
for step in tracer.iter[:]:
    innocent.append(float(model.model.layers[2].output[0][-1].float().norm()))
"""

_WRITES = """innocent = [].save()
for step in tracer.iter[:]:
    hidden = model.model.layers[1].output[0]
    hidden[-1] += 0.01 * step
    innocent.append(model.logits[0, :8].clone())
"""

_ASSIGNS = """innocent = [].save()
for step in tracer.iter[:]:
    h, residual = model.model.layers[3].output
    model.model.layers[3].output = (h * 1.001, residual)
    innocent.append(h[-1].clone())
    innocent.append(int(model.samples[0]))
"""


@dataclass(frozen=True)
class _Innocent:
    prompt: str
    source: str = ""
    interventions: tuple[Any, ...] = ()
    sampling: Mapping[str, Any] = field(default_factory=dict)


def _steered() -> tuple[Any, ...]:
    vector = wire(np.random.default_rng(3).standard_normal(_HIDDEN).astype(np.float32))
    return Steer("residual(3)", vector, scale=0.5), Probe("projection", "residual(4)", weight=vector)


#: The seven innocent traces by name: plain ones, blocks that read and write, and declared interventions.
INNOCENTS: dict[str, _Innocent] = {
    "plain": _Innocent("def add(a, b):\n    return"),
    "plain-sampled": _Innocent("import os\nimport sys\n\nclass Path", sampling={"temperature": 1.0, "seed": 7}),
    "plain-long": _Innocent("for name in names:\n    print(name)\n" * 6),
    "reads": _Innocent("# A comment on it", _READS),
    "writes": _Innocent("def parse(text):", _WRITES),
    "assigns": _Innocent("class Reader:\n    def", _ASSIGNS, sampling={"temperature": 0.8, "seed": 11}),
    "declared": _Innocent("while True:", interventions=_steered()),
}


def source_block(source: str, name: str = "written") -> Block:
    """A block of this source, whose lines count from 1."""
    return Block(name=name, source=source, filename="user.py", first_line=1)


class Seen:
    """What one trace came to, as its events say."""

    def __init__(self) -> None:
        self.fold = Fold()
        self.attempts = 1
        #: When the trace was accepted and when each of its outputs was, by the engine's clock.
        self.times: list[float] = []
        #: Why its events cannot be folded, if so.
        self.broken = ""

    @property
    def status(self) -> str:
        """The trace's status at its end; `""` if it has not ended."""
        return self.fold.status or ""

    @property
    def error(self) -> Failure | None:
        return self.fold.error

    @property
    def pause_s(self) -> float:
        """The longest time without an output."""
        return max((after - before for before, after in zip(self.times, self.times[1:], strict=False)), default=0.0)

    @property
    def saves(self) -> dict[str, Any]:
        held = self.fold.choices.get((0, 0))
        return {} if held is None else held.saves

    def outcome(self) -> tuple[Any, ...]:
        """What two equal runs agree on: status, tokens and every bit of the saves."""
        held = self.fold.choices.get((0, 0))
        tokens = [] if held is None else held.token_ids
        return self.status, self.broken, tuple(tokens), digest(self.saves).hex(), tuple(self.fold.save_errors)

    async def follow(self, bus: Bus, trace: str) -> None:
        """Read the trace to its end."""
        async for entry in bus.read(trace):
            event = decode_event(entry.data)
            if isinstance(event, Restarted):
                self.attempts, self.times = event.attempt, []
            if isinstance(event, Accepted):
                self.times.append(event.accepted_at)
            elif isinstance(event, DecodedOutput):
                self.times.append(event.time)
            try:
                self.fold.apply(event)
            except ValueError as error:
                self.broken = f"{type(error).__name__}: {error}"


def is_late(seen: Seen) -> bool:
    """Whether a trace ended because its block took too long."""
    return seen.error is not None and seen.error.type == "BlockTimeout"


@dataclass
class Batch:
    """The innocent traces of a batch by name, the offender, and whether all have ended in time."""

    innocents: dict[str, Seen]
    offender: Seen | None
    ended: bool
    took_s: float

    @property
    def pause_s(self) -> float:
        """The longest pause of a plain innocent trace: the clock of their outputs is the adapter's, not the block's."""
        return max(seen.pause_s for name, seen in self.innocents.items() if name.startswith("plain"))

    @property
    def late(self) -> list[str]:
        """The innocent traces that ended because their own blocks took too long, as on a machine that is too busy."""
        return [name for name, seen in self.innocents.items() if is_late(seen)]

    def outcomes(self) -> dict[str, tuple[Any, ...]]:
        return {name: seen.outcome() for name, seen in self.innocents.items()}


def _submissions(label: str, offender: Block | None, tokens: int) -> dict[str, Submission]:
    found = {}
    for name, one in INNOCENTS.items():
        sampling = {"max_tokens": tokens, "ignore_eos": True, "temperature": 0.0, **one.sampling}
        block = source_block(one.source, name) if one.source else None
        invoke = Invoke(prompt=one.prompt, sampling=sampling)
        found[name] = Submission(
            trace=f"{label}-{name}",
            model="demo",
            invokes=[invoke],
            block=block,
            interventions=list(one.interventions),
            detach=True,
        )
    if offender is not None:
        invoke = Invoke(prompt="import this", sampling={"max_tokens": tokens, "ignore_eos": True, "temperature": 0.0})
        # One attempt: an offender that costs an engine does not cost three.
        found["offender"] = Submission(
            trace=f"{label}-offender", model="demo", invokes=[invoke], block=offender, detach=True, max_attempts=1
        )
    return found


async def run_batch(
    bus: Bus, label: str, offender: Block | None, patience_s: float, *, on_late: Any = None, tokens: int = TOKENS
) -> Batch:
    """Run the innocent traces and the offender at once.

    Args:
        bus: of the engine.
        label: unique; the trace ids begin with it.
        offender: the eighth trace's block, if there is an eighth.
        patience_s: see `run_traces`.
        on_late: see `run_traces`.
        tokens: how many tokens each trace generates.
    """
    began = time.monotonic()
    seen, ended = await run_traces(bus, _submissions(label, offender, tokens), patience_s, on_late)
    offending = seen.pop("offender", None)
    return Batch(seen, offending, ended, time.monotonic() - began)


async def run_traces(
    bus: Bus, submissions: Mapping[str, Submission], patience_s: float, on_late: Any = None
) -> tuple[dict[str, Seen], bool]:
    """Run traces at once, and follow each to its end.

    Args:
        bus: of the engine.
        submissions: of the traces, by any names.
        patience_s: after this time `on_late` is awaited, and the traces have time for another start of the engine.
        on_late: what to do about an engine that does not answer.

    Returns:
        What each trace came to, and whether all ended before `on_late` was due.
    """
    seen = {name: Seen() for name in submissions}
    done = {name: anyio.Event() for name in submissions}
    ended = True

    async def follow(name: str) -> None:
        await seen[name].follow(bus, submissions[name].trace)
        done[name].set()

    async with anyio.create_task_group() as group:
        for submission in submissions.values():
            await bus.submit(submission)
        for name in seen:
            group.start_soon(follow, name)
        for within_s in (patience_s, _RESTART_S):
            with anyio.move_on_after(within_s) as scope:
                for event in done.values():
                    await event.wait()
            if not scope.cancelled_caught:
                break
            if ended and on_late is not None:
                await on_late()
            ended = False
        group.cancel_scope.cancel()
    return seen, ended
