"""The saves behind an output of Inspect, with their arrays, for scorers and for readers of logs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tracewire.client import Client, connect
from tracewire.errors import InvalidRequestError, InvalidUrl
from tracewire.traces.state import Saves, State

from .connections import connected_to

if TYPE_CHECKING:
    from inspect_ai.model import ModelOutput

__all__ = ["saves"]


async def saves(output: ModelOutput, *, choice: int = 0, client: Client | None = None, url: str | None = None) -> Saves:
    """The saves of an output's trace, with all arrays: what `result.saves` has after `await result.load()`.

    Redis keeps a trace for as long as the engine's retention says, so a scorer can always read it, and a reader of an
    old log cannot.

    Args:
        output: an output of a model `tracewire/...`, such as `state.output` of a scorer or of a sample in a log.
        choice: which of the output's choices.
        client: a client of the bus; by default, that of the provider in this process, or one of the bus that the
            output names.
        url: the URL of the bus, where the output's own lacks a password.

    Raises:
        InvalidRequestError: the output is of another provider, or has no such choice.
        TraceForgotten: Redis no longer has the trace.
        ValueMissing: Redis no longer has one of the arrays.
        ConnectError: Redis does not answer, or refuses.
    """
    metadata = output.metadata or {}
    trace_id, where, prefix = (metadata.get(name) for name in ("trace_id", "url", "prefix"))
    if not isinstance(trace_id, str) or not isinstance(where, str) or not isinstance(prefix, str):
        raise InvalidRequestError("output: expected one of a model tracewire/..., got one without a trace")
    client = client or (None if url else await connected_to(where, prefix))
    if client is not None:
        return await _loaded(await client.get_state(trace_id), choice)
    if not url and "***" in where:
        raise InvalidUrl(f"url: expected the URL of {where} with its password, which the output leaves out")
    async with connect(url or where, prefix=prefix) as own:
        return await _loaded(await own.get_state(trace_id), choice)


async def _loaded(state: State, choice: int) -> Saves:
    choices = [one for invoke in state.invokes for one in invoke.choices]
    if not 0 <= choice < len(choices):
        raise InvalidRequestError(f"choice: expected less than {len(choices)}, which the trace has, got {choice}")
    found = choices[choice].saves
    await found.load()
    return found
