"""Events of a trace as JSON objects, each with its `type` and, from a stream, its `id`."""

from __future__ import annotations

from typing import Any

import msgspec

from tracewire import (
    Accepted,
    Event,
    Final,
    Gap,
    Lagging,
    Output,
    Paused,
    Restarted,
    Resumed,
    Shared,
    State,
    Steered,
    Waiting,
)
from tracewire.traces.output import merged
from tracewire_bus.wire.messages import SHARED_INVOKE, Failure, Usage

from .json_values import Form, to_json

__all__ = ["event_json", "failure_json", "state_json"]


def event_json(event: Event, form: Form, trace_id: str) -> dict[str, Any]:
    """An event as JSON. References in its saves stay references; `form` says how its other arrays stand."""
    return {"type": event.type, "id": event.id, **_fields(event, form, trace_id)}


def _fields(event: Event, form: Form, trace_id: str) -> dict[str, Any]:
    match event:
        case Output():
            return _output(event, form, trace_id)
        case Shared():
            return {"delta": to_json(event.delta, form, trace_id)}
        case Steered():
            return {
                "version": event.version,
                "first": [{"invoke": one.invoke, "choice": one.choice, "index": one.index} for one in event.first],
                "changes": [
                    {
                        "version": one.version,
                        "by": one.by,
                        "time": one.time / 1000,
                        "values": to_json(one.values, form, trace_id),
                    }
                    for one in event.changes
                ],
                "time": event.time,
            }
        case Paused() | Resumed():
            return {"by": event.by, "time": event.time}
        case Lagging():
            return {name: getattr(event, name) for name in ("action", "nbytes", "left_out", "time")}
        case Waiting():
            return {"reason": event.reason, "time": event.time}
        case Restarted():
            return {"attempt": event.attempt, "reason": event.reason}
        case Accepted():
            return _accepted(event, form, trace_id)
        case Gap():
            return {"since": event.since, "until": event.until, "state": state_json(event.state, form)}
        case Final():
            return _final(event, form, trace_id)


def _output(event: Output, form: Form, trace_id: str) -> dict[str, Any]:
    found: dict[str, Any] = {
        "invoke": event.invoke,
        "choice": event.choice,
        "index": event.index,
        "token_ids": event.token_ids,
        "text": event.text,
        "time": event.time,
        "finish_reason": event.finish_reason,
        "stop_reason": event.stop_reason,
        "delta": to_json(event.delta, form, trace_id),
    }
    if event.token_strings is not None:
        found["token_strings"] = event.token_strings
    if event.message is not None:
        found["message"] = msgspec.to_builtins(event.message)
    if event.logprobs is not None:
        found["logprobs"] = [_logprobs(step) for step in event.logprobs]
    return found


def _logprobs(step: dict[int, tuple[float, int | None, str | None]]) -> list[dict[str, Any]]:
    return [
        {"token_id": token_id, "logprob": logprob, "rank": rank, "text": text}
        for token_id, (logprob, rank, text) in step.items()
    ]


def _accepted(event: Accepted, form: Form, trace_id: str) -> dict[str, Any]:
    return {
        "engine": event.engine,
        "model": event.model,
        "revision": event.revision,
        "dtype": event.dtype,
        "queued_at": event.queued_at,
        "accepted_at": event.accepted_at,
        "sampling": to_json(event.sampling, form, trace_id),
        "prompt_tokens": event.prompt_tokens,
        "prompt_token_ids": event.prompt_token_ids,
        "prompt_token_strings": event.prompt_token_strings,
        "live_version": event.live_version,
        "live": to_json(event.live, form, trace_id),
        "edits": [[{"name": name, "version": version} for name, version in one] for one in event.edits],
        "versions": msgspec.to_builtins(event.versions),
        "drafts": msgspec.to_builtins(event.drafts),
    }


def _final(event: Final, form: Form, trace_id: str) -> dict[str, Any]:
    return {
        "status": event.status,
        "error": failure_json(event.error),
        "usage": usage_json(event.usage),
        "time": event.time,
        "saves": [
            {"invoke": invoke, "choice": choice, "delta": to_json(merged([deltas]), form, trace_id)}
            for invoke, choice, deltas in event.deltas
            if invoke != SHARED_INVOKE
        ],
        "shared": [
            to_json(merged([deltas]), form, trace_id) for invoke, _, deltas in event.deltas if invoke == SHARED_INVOKE
        ],
        "save_errors": event.save_errors,
        "warnings": event.warnings,
        "manifest": [
            {
                "invoke": one.invoke,
                "choice": one.choice,
                "name": one.name,
                "kind": one.kind,
                "length": one.length,
                "digest": one.digest.hex(),
            }
            for one in event.manifest
        ],
        "messages": [
            {"invoke": invoke, "choice": choice, "message": msgspec.to_builtins(message)}
            for invoke, choice, message in event.messages
        ],
    }


def usage_json(usage: Usage) -> dict[str, int]:
    """Numbers of tokens."""
    names = ("prompt_tokens", "completion_tokens", "cached_tokens")
    return {name: getattr(usage, name) for name in names}


def failure_json(failure: Failure | None) -> dict[str, Any] | None:
    """Why a trace did not end well, without what it does not have."""
    if failure is None:
        return None
    return {name: value for name, value in msgspec.to_builtins(failure).items() if value is not None}


def state_json(state: State, form: Form) -> dict[str, Any]:
    """A folded state."""
    trace_id = state.trace_id
    return {
        "id": trace_id,
        "position": state.position,
        "status": state.status,
        "error": failure_json(state.error),
        "attempt": state.attempt,
        "paused": state.paused,
        "live_version": state.live_version,
        "usage": usage_json(state.usage),
        "invokes": [
            [
                {
                    "text": choice.text,
                    "token_ids": choice.token_ids,
                    "token_strings": choice.token_strings,
                    "finish_reason": choice.finish_reason,
                    "stop_reason": choice.stop_reason,
                    "saves": to_json(choice.saves, form, trace_id),
                    **({} if choice.message is None else {"message": msgspec.to_builtins(choice.message)}),
                }
                for choice in invoke.choices
            ]
            for invoke in state.invokes
        ],
        "shared": to_json(state.shared, form, trace_id),
        "save_errors": state.save_errors,
        "warnings": state.warnings,
        "accepted": None if state.accepted is None else _accepted(state.accepted, form, trace_id),
    }
