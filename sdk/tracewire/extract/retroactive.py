"""`client.apply_probe`: what a probe says of activations that were harvested, saved, or are computed once more."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias

import anyio
import anyio.to_thread
import msgspec

import tracewire.harvest
from tracewire.checks import check_count, shown
from tracewire.errors import SaveMissing, TraceRejected
from tracewire.traces.recorder.recording import Recording
from tracewire_bus.transport.errors import first_error
from tracewire_bus.wire.messages import NO_MEDIA, Probe

if TYPE_CHECKING:
    from tracewire_bus.wire.messages import Submission

__all__ = ["ProbeReading", "apply_probe"]

#: An array of NumPy, which is imported when it is first needed.
Array: TypeAlias = Any


@dataclass(frozen=True)
class ProbeReading:
    """What a probe says of one sequence.

    Attributes:
        key: the prompt's key in the harvest, or the trace's id.
        values: its values, float32 `[positions]`, or `[positions, outputs]`.
        positions: the position of each in the sequence; -1 where it is unknown.
        token_ids: the sequence.
        prompt_tokens: how many of these are the prompt's.
        invoke, choice: which of the trace's prompts it is, and which of that prompt's choices.
    """

    key: int | str
    values: Array
    positions: Array = field(repr=False)
    token_ids: list[int] = field(repr=False)
    prompt_tokens: int
    invoke: int = 0
    choice: int = 0


class _Sequence(NamedTuple):
    """A prompt of a finished or recorded trace with the tokens of one of its choices."""

    trace_id: str
    model: str
    token_ids: list[int]
    prompt_tokens: int
    saves: Any
    finished: bool
    invoke: int
    choice: int
    lora: str | None = None

    def reading(self, values: Array, positions: Array) -> ProbeReading:
        """The reading of this sequence."""
        return ProbeReading(
            self.trace_id, values, positions, self.token_ids, self.prompt_tokens, self.invoke, self.choice
        )


class Reads(Protocol):
    """A client, as far as this needs it."""

    library: Any

    @property
    def models(self) -> Any: ...

    @property
    def trace(self) -> Any: ...

    @property
    def get_state(self) -> Any: ...


class _Applied:
    """A probe with its arrays, applied to rows of activations."""

    def __init__(self, probe: Probe, weight: Any, bias: Any) -> None:
        import numpy as np

        self.weight = np.asarray(weight, np.float32)
        self.bias = np.float32(0) if bias is None else np.asarray(bias, np.float32)
        self.activation = probe.activation
        if self.weight.ndim not in (1, 2):
            raise TraceRejected(
                "probe.weight", f"expected shape [hidden] or [outputs, hidden], got {self.weight.shape}"
            )

    def __call__(self, rows: Array) -> Array:
        """The probe's values of rows `[positions, hidden]`."""

        import numpy as np

        if rows.shape[-1:] != self.weight.shape[-1:]:
            raise TraceRejected(
                "probe.weight",
                f"the activations have a width of {rows.shape[-1]}, the weight of {self.weight.shape[-1]}",
            )
        values = rows.astype(np.float32) @ self.weight.T + self.bias
        if self.activation == "sigmoid":
            values = 1 / (1 + np.exp(-values))
        elif self.activation == "softmax":
            values = np.exp(values - values.max(-1, keepdims=True))
            values = values / values.sum(-1, keepdims=True)
        found: Array = values.astype(np.float32)
        return found


async def apply_probe(
    client: Reads,
    probe: Probe,
    harvest: str | os.PathLike[str] | None,
    traces: Sequence[str | Recording] | None,
    saves: str | None,
    concurrency: int,
) -> list[ProbeReading]:
    """`Client.apply_probe`."""
    if getattr(probe, "weight", None) is None:
        raise TraceRejected("probe", f"expected a Probe with a weight, got {shown(probe)}")
    if (harvest is None) == (traces is None):
        raise TraceRejected("harvest", "expected either a harvest or traces")
    if saves is not None and traces is None:
        raise TraceRejected("saves", "expected traces with it: a harvest has its tensors by location")
    if harvest is not None:
        applied = await _applied(client, probe)
        return await anyio.to_thread.run_sync(_of_harvest, harvest, probe.at, applied)
    assert traces is not None
    if isinstance(traces, str) or not isinstance(traces, Sequence):
        raise TraceRejected("traces", f"expected a list of trace ids or recordings, got {shown(traces)}")
    limit = anyio.Semaphore(check_count("concurrency", concurrency))
    own = await _applied(client, probe) if saves is not None else None
    found: list[list[ProbeReading]] = [[] for _ in traces]

    async def one(place: int, trace: str | Recording) -> None:
        async with limit:
            state = await client.get_state(trace) if isinstance(trace, str) else trace.state()
            submitted = None if isinstance(trace, str) else trace.submission
            for sequence in _sequences(state, place, submitted if own is None else None):
                reading = await (_again(client, probe, sequence) if own is None else _of_saves(sequence, saves, own))
                found[place].append(reading)

    try:
        async with anyio.create_task_group() as group:
            for place, trace in enumerate(traces):
                if not isinstance(trace, str | Recording):
                    raise TraceRejected(f"traces[{place}]", f"expected a trace id or a recording, got {shown(trace)}")
                group.start_soon(one, place, trace)
    except BaseExceptionGroup as errors:
        raise first_error(errors) from None
    return [reading for readings in found for reading in readings]


def _sequences(state: Any, place: int, submitted: Submission | None) -> list[_Sequence]:
    """The sequences of a trace, prompt by prompt and choice by choice. `submitted` is known of a recording."""
    accepted = state.accepted
    if accepted is None:
        raise TraceRejected(f"traces[{place}]", f"no engine has accepted trace {state.trace_id}")
    found = []
    for invoke, (prompt, of_prompt) in enumerate(zip(accepted.prompt_token_ids, state.invokes, strict=False)):
        for choice, one in enumerate(of_prompt.choices):
            tokens = [*prompt, *one.token_ids]
            about = (state.trace_id, accepted.model, tokens, len(prompt), one.saves, state.finished)
            lora = None
            if submitted is not None:
                own = submitted.invokes[invoke]
                if own.media != NO_MEDIA:
                    raise TraceRejected(f"traces[{place}]", "expected no media: its tokens do not give its prompt back")
                lora = own.lora
            found.append(_Sequence(*about, invoke, choice, lora))
    return found


async def _applied(client: Reads, probe: Probe) -> _Applied:
    """The probe, with the arrays of its entry in the library if it names one."""
    if not isinstance(probe.weight, str):
        return _Applied(probe, probe.weight, probe.bias)
    entry = await client.library.get(probe.weight)
    if entry.at and entry.at != probe.at:
        raise TraceRejected("probe.weight", f"{entry.id} belongs to {entry.at!r}, and not to {probe.at!r}")
    arrays = await client.library.load(entry.id)
    plain = {"probe": "weight", "vector": "vector", "subspace": "basis"}.get(entry.kind, "")
    if plain not in arrays:
        raise TraceRejected("probe.weight", f"{entry.id} has no array of one location for a probe")
    return _Applied(probe, arrays[plain], arrays.get("bias") if probe.bias is None else probe.bias)


def _of_harvest(to: Any, at: str, probe: _Applied) -> list[ProbeReading]:
    import numpy as np

    found = []
    harvested = tracewire.harvest.open(to)
    tensor = _tensor(harvested, at)
    for prompt in harvested:
        rows, positions = prompt[tensor], prompt.positions[tensor]
        order = np.argsort(positions, kind="stable")
        values = probe(rows[order])
        found.append(ProbeReading(prompt.key, values, positions[order], prompt.token_ids, prompt.prompt_tokens))
    return found


def _tensor(harvested: Any, at: str) -> str:
    """The tensor of a location in a harvest: of whole activations, by layer (`residual(3)`) or by name."""
    locations = harvested.locations
    for name, location in locations.items():
        if location == at and len(harvested.tensors[name][1]) == 1:
            return str(name)
    there = ", ".join(sorted(set(locations.values()))) or "none"
    raise TraceRejected("probe.at", f"the harvest has no activations at {at!r} (it has: {there})")


async def _of_saves(one: _Sequence, name: str | None, probe: _Applied) -> ProbeReading:
    import numpy as np

    if name not in one.saves:
        raise SaveMissing(one.trace_id, name, one.saves, "", one.finished)
    await one.saves.load()
    try:
        items = [np.asarray(item, np.float32) for item in one.saves[name]]
        rows = np.concatenate([item.reshape(-1, item.shape[-1]) for item in items])
    except (TypeError, ValueError, IndexError):
        raise TraceRejected(
            "saves",
            f"expected a list of activations, [hidden] or [positions, hidden] each, as {name!r} of {one.trace_id}",
        ) from None
    first = _first_position(one, items, len(rows))
    positions = np.full(len(rows), -1) if first is None else np.arange(first, first + len(rows))
    return one.reading(probe(rows), positions)


def _first_position(one: _Sequence, items: Sequence[Array], rows: int) -> int | None:
    """The position of the first saved row, as its number says which positions were read; None if it does not.

    The last sampled token is never read. A condition leaves positions out, so that they are unknown.
    """
    sampled = len(one.token_ids) - one.prompt_tokens
    if all(item.ndim == 1 for item in items):
        # The last position of the prompt, and each sampled token but the last.
        return one.prompt_tokens - 1 if rows == sampled else None
    if rows == one.prompt_tokens + sampled - 1:
        return 0
    if rows == sampled - 1 and all(len(item) == 1 for item in items):
        return one.prompt_tokens
    return 0 if rows == one.prompt_tokens else None


async def _again(client: Reads, probe: Probe, one: _Sequence) -> ProbeReading:
    """The probe's values where the model reads a trace's prompt and output once more, in one step."""

    import numpy as np

    read = msgspec.structs.replace(probe, positions="prompt")
    options: dict[str, Any] = {"interventions": [read], "max_tokens": 1, "temperature": 0.0}
    if one.lora is not None:
        options["lora"] = one.lora
    # A prompt has to leave room for one more token.
    most = (await client.models.get(one.model)).info.max_model_len - 1
    async with client.trace(one.model, one.token_ids[:most], **options) as trace:
        result = await trace.result()
        await result.load()
    values = np.concatenate([np.asarray(item, np.float32) for item in result.saves[probe.name]])
    return one.reading(values, np.arange(len(values)))
