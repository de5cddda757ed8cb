"""The rows of a step's flat batch that an intervention reads or edits."""

from __future__ import annotations

from dataclasses import dataclass

from tracewire_bus.domain.patch_checks import prompt_positions
from tracewire_bus.wire.messages import Hold, Patch

from .ops import Declaration, Op

__all__ = ["Chunk", "spans_of"]


@dataclass(slots=True)
class Chunk:
    """What a step computes of a request: `count` positions from `first` on, whose rows begin at `start`.

    `prompt` is how many tokens the request's prompt has.
    """

    start: int
    first: int
    count: int
    prompt: int


def spans_of(op: Op, declaration: Declaration, chunk: Chunk) -> list[tuple[int, int, int]]:
    """The rows of an intervention: of each run of rows the first, how many, and a number that goes with the first.

    That is the row's place among the rows of a `Patch`, and for others the row's position in the sequence.

    Raises:
        ValueError: the intervention names positions that the prompt does not have.
    """
    if isinstance(op.one, Patch):
        return _patched(op, op.one, chunk)
    start, count = _span(op, declaration.seen, chunk)
    return [(start, count, chunk.first + start - chunk.start)] if count else []


def _patched(op: Op, one: Patch, chunk: Chunk) -> list[tuple[int, int, int]]:
    if one.prompt is not None and op.kept is None:
        return []  # it is between other prompts of the trace
    positions = prompt_positions(one.positions, chunk.prompt)
    if positions is None:
        start, count = _edited(str(one.positions), chunk)
        return [(start, count, 0)] if count else []
    rows = 1 if op.matrix is None else len(op.matrix)
    if rows not in (1, len(positions)):
        raise ValueError(f"it has {rows} rows for {len(positions)} positions")
    found: list[tuple[int, int, int]] = []
    for place, position in enumerate(positions):
        row = position - chunk.first
        if not 0 <= row < chunk.count:
            continue
        start, count, at = found[-1] if found else (-1, 0, -1)
        if (start + count, at + count) == (chunk.start + row, place):
            found[-1] = start, count + 1, at
        else:
            found.append((chunk.start + row, 1, place))
    return found


def _span(op: Op, seen: int, chunk: Chunk) -> tuple[int, int]:
    start, first, count, prompt = chunk.start, chunk.first, chunk.count, chunk.prompt
    positions, end = str(getattr(op.one, "positions", "last")), first + count
    if not op.reads or isinstance(op.one, Hold):
        return _edited(positions, chunk)
    if positions == "last":
        return (start + count - 1, 1) if end >= prompt else (start, 0)
    low = max(first, seen, prompt if positions == "generated" else 0)
    high = min(end, prompt) if positions == "prompt" else end
    return start + low - first, max(0, high - low)


def _edited(positions: str, chunk: Chunk) -> tuple[int, int]:
    prompt, end = chunk.prompt, chunk.first + chunk.count
    low = max(chunk.first, {"generated": prompt, "last": prompt - 1}.get(positions, 0))
    high = min(end, prompt) if positions == "prompt" else end
    return chunk.start + low - chunk.first, max(0, high - low)
