"""One of every event."""

from __future__ import annotations

from typing import Any

from tracewire_bus.wire.messages import (
    SHARED_INVOKE,
    Accepted,
    Change,
    DecodedOutput,
    DecodedShared,
    Failure,
    Final,
    FirstToken,
    Lagging,
    Manifest,
    Paused,
    Restarted,
    Resumed,
    Steered,
    Usage,
    Waiting,
)

EVENTS: list[Any] = [
    Accepted(attempt=1, seq=0, engine="e", model="m", queued_at=1.5, sampling=[{"seed": None, "stop": ["a"]}]),
    DecodedOutput(attempt=1, seq=1, invoke=2, choice=3, index=4, token_ids=[5, 6], text="täxt", deltas=[[], []]),
    DecodedOutput(
        attempt=1, seq=2, logprobs=[{7: (-0.5, 1, "a"), 8: (-2.0, None, None)}], token_ids=[7], stop_reason=13
    ),
    DecodedShared(attempt=1, seq=3, invoke=SHARED_INVOKE, deltas=[[]]),
    Steered(
        attempt=1,
        seq=4,
        version=2,
        first=[FirstToken(invoke=0, choice=1, index=4)],
        time=4.5,
        changes=[Change(version=2, by="c", time=5, values={"alpha": 0.5})],
    ),
    Paused(attempt=1, seq=5, by="c", time=5.5),
    Resumed(attempt=1, seq=6, by="c", time=6.5),
    Lagging(attempt=1, seq=6, action="thinned", nbytes=5, left_out=3, time=6.6),
    Waiting(attempt=1, seq=7, reason="lost", time=2.0),
    Restarted(attempt=2, seq=0, reason="lost"),
    Final(
        attempt=2,
        seq=9,
        status="failed",
        error=Failure(type="ValueError", message="no", line=3),
        usage=Usage(prompt_tokens=3, completion_tokens=4),
        manifest=[Manifest(invoke=0, choice=0, name="x", kind="list", length=2, digest=b"0" * 16)],
        save_errors={"0.0.y": "cannot travel"},
    ),
]
