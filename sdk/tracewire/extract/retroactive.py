"""`client.apply_probe`: what a probe says of activations that were harvested, saved, or are computed once more."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

import anyio
import anyio.to_thread
import msgspec

import tracewire.harvest
from tracewire.checks import check_count, shown
from tracewire.errors import SaveMissing, TraceRejected
from tracewire_bus.wire.messages import Probe

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
    """

    key: int | str
    values: Array
    positions: Array = field(repr=False)
    token_ids: list[int] = field(repr=False)
    prompt_tokens: int


class Reads(Protocol):
    """A client, as far as this needs it."""

    library: Any

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
    traces: Sequence[str] | None,
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
    limit = anyio.Semaphore(check_count("concurrency", concurrency))
    found: dict[str, ProbeReading] = {}
    own = await _applied(client, probe) if saves is not None else None

    async def one(trace_id: str) -> None:
        async with limit:
            state = await client.get_state(trace_id)
            found[trace_id] = await (_again(client, probe, state) if own is None else _of_saves(state, saves, own))

    async with anyio.create_task_group() as group:
        for trace_id in dict.fromkeys(traces):
            group.start_soon(one, trace_id)
    return [found[trace_id] for trace_id in traces]


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


async def _of_saves(state: Any, name: str | None, probe: _Applied) -> ProbeReading:
    import numpy as np

    (choice,) = (choice for invoke in state.invokes for choice in invoke.choices)
    if name not in choice.saves:
        raise SaveMissing(state.trace_id, name, choice.saves, "", state.finished)
    await choice.saves.load()
    items = [np.asarray(one, np.float32) for one in choice.saves[name]]
    rows = np.concatenate([one.reshape(-1, one.shape[-1]) for one in items])
    accepted = state.accepted
    prompt = list(accepted.prompt_token_ids[0])
    sequence = [*prompt, *choice.token_ids]
    # One row a step: the last of the prompt, and one for each token but the last. Else one for each position.
    first = len(prompt) - 1 if len(items) == len(rows) else 0
    return ProbeReading(state.trace_id, probe(rows), np.arange(first, first + len(rows)), sequence, len(prompt))


async def _again(client: Reads, probe: Probe, state: Any) -> ProbeReading:
    """The probe's values where the model reads a trace's prompt and output once more, in one step."""

    import numpy as np

    (choice,) = (choice for invoke in state.invokes for choice in invoke.choices)
    prompt = list(state.accepted.prompt_token_ids[0])
    sequence = [*prompt, *choice.token_ids]
    read = msgspec.structs.replace(probe, positions="prompt")
    trace = client.trace(state.accepted.model, sequence, interventions=[read], max_tokens=1, temperature=0.0)
    result = await trace.result()
    await result.load()
    values = np.concatenate([np.asarray(one, np.float32) for one in result.saves[probe.name]])
    return ProbeReading(state.trace_id, values, np.arange(len(values)), sequence, len(prompt))
