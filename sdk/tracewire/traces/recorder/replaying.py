"""A recording run again on an engine, and how the second run compares."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from .comparing import ChoiceDifference, compared
from .planning import CUT, planned_again

if TYPE_CHECKING:
    from collections.abc import Callable

    from tracewire.traces.output import Accepted
    from tracewire.traces.trace import Trace
    from tracewire_bus.wire.messages import Submission

    from .recording import Recording

__all__ = ["Replay", "replay"]


class Replay(msgspec.Struct, frozen=True):
    """How a second run of a recording compares with it.

    Attributes:
        trace_id: of the second run, which any client can read as long as Redis keeps it.
        status: how the second run ended.
        choices: what differs, for each choice.
        notes: what else differs, in words: versions, the model's files, prompts, edits, a missing seed.
    """

    trace_id: str
    status: str
    choices: list[ChoiceDifference]
    notes: list[str]

    @property
    def same(self) -> bool:
        """Whether all tokens and all values are the same."""
        return all(one.token is None and not one.values for one in self.choices)

    def __str__(self) -> str:
        lines = []
        for one in self.choices:
            where = f"prompt {one.invoke}, choice {one.choice}: " if len(self.choices) > 1 else ""
            if one.token is None:
                lines.append(f"{where}all {one.tokens} tokens are the same")
            else:
                token = one.token
                lines.append(f"{where}token {token.index} differs: recorded {token.recorded}, got {token.got}")
            for value in one.values:
                item = "" if value.index is None else f" at item {value.index}"
                relative = "" if value.relative is None else f" ({value.relative:.2g} of the recorded value)"
                lines.append(f"{where}{value.name}{item} {value.what}{relative}")
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])


async def replay(
    make: Callable[[Submission], Trace], client: str, recording: Recording, model: str | None, tolerance: float
) -> Replay:
    """Run a recording again, and compare. `make` makes a trace of a submission."""
    trace = make(planned_again(recording, client, model))
    try:
        status = await trace.until_done()
        accepted = await trace.accepted()
        recorded = recording.state()
        choices = await compared(recorded, trace.state(), whole=recorded.status not in CUT, tolerance=tolerance)
    finally:
        await trace.aclose()
    return Replay(trace.id, status, choices, _notes(recording, accepted))


def _notes(recording: Recording, accepted: Accepted) -> list[str]:
    before = recording.accepted
    assert before is not None
    notes = []
    now = {name: value for name, value in msgspec.to_builtins(accepted.versions).items() if value}
    for name, value in recording.engine.versions.items():
        if name not in now:
            notes.append(f"the engine does not tell its {name}, which was {value}")
        elif now[name] != value:
            what = "the model's files differ: their digest" if name == "weights" else name
            notes.append(f"{what} was {value}, and is {now[name]}")
    if before.dtype != accepted.dtype:
        notes.append(f"the dtype was {before.dtype}, and is {accepted.dtype}")
    if before.prompt_token_ids != accepted.prompt_token_ids:
        notes.append("the prompts have other tokens")
    if before.edits != accepted.edits:
        notes.append(f"the standing edits were {before.edits}, and are {accepted.edits}")
    for index, sampling in enumerate(before.sampling):
        if sampling.get("temperature", 1.0) and sampling.get("seed") is None:
            notes.append(
                f"prompt {index} was sampled without a seed, so that other tokens are no difference of engines"
            )
    if not recording.complete:
        notes.append("the recording ends before the trace did")
    return notes
