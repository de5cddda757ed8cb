"""Examples of JSON answers, by their form in `schemas`."""

from __future__ import annotations

from typing import Any

from .responses_answers import response_of

__all__ = ["EXAMPLES"]

_TIME = 1767225600.0
_USAGE: dict[str, Any] = {"prompt_tokens": 5, "completion_tokens": 2}
_CARD: dict[str, Any] = {"id": "demo", "object": "model", "created": 0, "owned_by": "tracewire"}
_CARD |= {"max_model_len": 2048, "root": "demo", "parent": None}
_TRACE: dict[str, Any] = {"id": "mine", "position": "1-7", "status": None, "error": None, "attempt": 1, "paused": False}
_TRACE |= {"live_version": 1, "usage": {**_USAGE, "cached_tokens": 0}, "save_errors": {}, "warnings": []}
_TRACE |= {"accepted": None}
_CHOICE: dict[str, Any] = {"text": " return a", "token_ids": [14, 8], "token_strings": None}
_CHOICE |= {"finish_reason": None, "stop_reason": None}
_LISTED: dict[str, Any] = {
    "id": "mine",
    "model": "demo",
    "client": "alice",
    "state": "running",
    "engine": "gpu-0",
    "attempt": 1,
}
_LISTED |= {"queued_at": _TIME, "ended_at": None, "error": None, "prompt_tokens": None, "tokens": None}
_LIVE: dict[str, Any] = {"version": 1, "values": {"alpha": 8.0}}
_ENGINE: dict[str, Any] = {
    "name": "gpu-0",
    "model": "demo",
    "state": "serving",
    "ready": True,
    "running": 3,
    "capacity": 256,
}
_ENGINE |= {"host": "node-1", "revision": "", "dtype": "bfloat16", "max_model_len": 2048, "schema": "2.6"}
_ENGINE |= {"versions": {"vllm": "0.25.1"}, "started_at": _TIME, "malformed": 0}
_ENGINE |= {"waiting_bytes": 0, "edit_failures": {"calm": 2}, "edit_errors": {}}
_ENGINE |= {"code": "any", "code_reason": "", "unsigned": True, "public_key": ""}
_ENGINE |= {"limits": {"choices": 8}, "limits_reached": {"choices": 1}}
_EDIT: dict[str, Any] = {
    "name": "calm",
    "version": 4,
    "time": _TIME,
    "scope": "all",
    "on_error": "continue",
    "max_failures": 10,
}
_EDIT |= {"by": "alice", "block": None, "filename": None, "line": None, "disabled": "", "problems": {}}
_EDIT |= {"engines": ["gpu-0"], "interventions": [{"do": "ablate", "at": "residual(2)", "keep": 0.5}]}
_ENTRY: dict[str, Any] = {"id": "calm@3", "tenant": "", "name": "calm", "version": 3, "kind": "vector"}
_ENTRY |= {"model": "demo", "at": "residual(4)", "layers": [], "shapes": {"vector": [256]}, "description": ""}
_ENTRY |= {"licence": "MIT", "provenance": {"method": "difference of means"}, "effect": {"score": 0.85}}
_ENTRY |= {"settings": {}, "by": "alice", "time": _TIME, "digest": "5f0c", "removed": None, "removed_by": ""}


def _completion(prefix: str, kind: str, choice: dict[str, Any]) -> dict[str, Any]:
    head = {"id": f"{prefix}-0b1c", "object": kind, "created": int(_TIME), "model": "demo"}
    usage = {**_USAGE, "total_tokens": 7, "prompt_tokens_details": {"cached_tokens": 0}}
    ended = {"index": 0, "finish_reason": "stop", "stop_reason": None, "logprobs": None}
    more = {"usage": usage, "system_fingerprint": None, "tracewire": {"trace_id": "0b1c"}}
    return {**head, "choices": [{**ended, **choice}], **more}


EXAMPLES: dict[str, Any] = {
    "ModelCard": _CARD,
    "ModelList": {"object": "list", "data": [_CARD]},
    "Completion": _completion("cmpl", "text_completion", {"text": " return a"}),
    "ChatCompletion": _completion(
        "chatcmpl", "chat.completion", {"message": {"role": "assistant", "content": "Hello", "refusal": None}}
    ),
    "ModelResponse": response_of("0b1c", "demo", _TIME, status="completed"),
    "OpenAIError": {
        "error": {
            "message": "temperature: expected a number",
            "type": "invalid_request_error",
            "param": "temperature",
            "code": "invalid_request",
        }
    },
    "SubmittedTrace": {
        "id": "mine",
        "model": "demo",
        "links": {"self": "/traces/mine", "events": "/traces/mine/events"},
    },
    "TracePage": {"data": [_LISTED], "next": "1767225600000-0-7"},
    "TraceDescription": {
        **_TRACE,
        "invokes": [[{**_CHOICE, "saves": ["projection"]}]],
        "shared": [],
        "live": _LIVE,
    },
    "TraceState": {**_TRACE, "invokes": [[{**_CHOICE, "saves": {"projection": [-3.1, 0.2]}}]], "shared": {}},
    "LiveParameters": _LIVE,
    "NewVersion": {"version": 1},
    "PausedTrace": {"paused": True},
    "ResumedTrace": {"resumed": True},
    "CancelledTrace": {"cancelled": True},
    "CallerKey": {"name": "alice", "rights": ["read", "steer"], "tenant": "red"},
    "EngineList": {"data": [_ENGINE]},
    "RunningEngine": _ENGINE,
    "DrainingEngine": {"engine": "gpu-0", "others": ["gpu-1"], "waiting": 0},
    "EditList": {"data": [_EDIT]},
    "StandingEdit": _EDIT,
    "RecordedTrace": {
        "trace_id": "mine",
        "model": "demo",
        "made_at": _TIME,
        "made_by": "alice",
        "complete": True,
        "engine": {
            "engine": "gpu-0",
            "host": "node-1",
            "path": "",
            "revision": "",
            "dtype": "bfloat16",
            "versions": {},
        },
        "events": [{"type": "paused", "id": "1-4", "by": "alice", "time": _TIME}],
    },
    "LibraryEntry": _ENTRY,
    "LibraryList": {"data": [_ENTRY]},
    "RemovedEntries": {"removed": ["calm@3"]},
    "Problem": {
        "type": "urn:tracewire:unknown_trace",
        "title": "Not found",
        "status": 404,
        "detail": "no trace 'mine': it was never submitted here, or its events have expired",
    },
}
