"""A worker's record of one live request: its own block, and the blocks of edits that run beside it."""

from __future__ import annotations

import re
from typing import Any

from vllm import envs

from tracewire_bus.wire.messages import Failure

__all__ = ["Request"]

#: What vLLM appends to a request's id, unless `VLLM_DISABLE_REQUEST_ID_RANDOMIZATION` is set.
_SUFFIX = re.compile(r"-[0-9a-f]{8}\Z")


class Request:
    """The blocks of one request, under the id that the scheduler has for the request.

    The scheduler's id is `ENGINE_ID-XXXXXXXX`, or `N_ENGINE_ID-XXXXXXXX` for a choice of a request with `n > 1`. The
    engine id is the one that the adapter gave.
    """

    __slots__ = ("copies", "engine_id", "error", "id", "index", "mediator")

    def __init__(self, request_id: str) -> None:
        self.id = request_id
        stem = request_id
        if not getattr(envs, "VLLM_DISABLE_REQUEST_ID_RANDOMIZATION", False):
            stem = _SUFFIX.sub("", request_id)
        number, _, parent = stem.partition("_")
        choice = bool(parent) and number.isdigit()
        self.engine_id = parent if choice else stem
        #: The number of the choice; 0 without choices.
        self.index = int(number) if choice else 0
        #: Serves the request's own block, if it has one.
        self.mediator: Any = None
        #: The mediators of edits, by the edit's name.
        self.copies: dict[str, Any] = {}
        #: Why the request's blocks do not run.
        self.error: Failure | None = None

    def workers(self) -> list[Any]:
        """All mediators. Those of edits come first, so the request's own block reads what the edits left."""
        own = [] if self.mediator is None else [self.mediator]
        return [*self.copies.values(), *own]

    def saves(self) -> dict[str, Any]:
        """The values that the request's own block has saved and still binds, by name."""
        found: dict[str, Any] = {} if self.mediator is None else self.mediator.saved()
        return found
