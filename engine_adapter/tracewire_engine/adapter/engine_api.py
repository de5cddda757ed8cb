"""The interface between the adapter and the engine that generates tokens.

The adapter uses an `Engine` only. The product implements it with vLLM (`vllm_engine.py`). Tests of load and of faults
implement it with a scripted engine.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from typing import Any, Protocol

import msgspec

from tracewire_bus.wire.messages import ChatMessage, Drafts, Failure, MessageDelta, Submission
from tracewire_engine.link.blob_receiver import BlobChunk
from tracewire_engine.protocol.messages import Changes, Report

__all__ = ["Carrier", "Choice", "Engine", "EngineLost", "MessageParser", "Outputs", "Prepared", "Rejection"]


class Rejection(Exception):
    """A submission that cannot run, with the field at fault. `limit` names the limit that the submission exceeds."""

    def __init__(
        self, field: str, message: str, *, type: str = "TraceRejected", line: int | None = None, limit: str = ""
    ) -> None:
        super().__init__(message)
        self.limit = limit
        self.failure = Failure(type=type, message=message, field=field, line=line)


class EngineLost(Exception):
    """The adapter's engine has died, with all requests that it ran."""


class Choice(msgspec.Struct):
    """The part of one output that belongs to one choice of a request."""

    index: int
    token_ids: list[int]
    text: str
    logprobs: list[dict[int, tuple[float, int | None, str | None]]] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


class Prepared(msgspec.Struct):
    """A validated invoke that is ready to run, with its token ids and resolved sampling params."""

    prompt: Any
    prompt_tokens: int
    params: Any
    choices: int
    sampling: dict[str, Any]
    #: Whether the block uses `tracer.result`, so that the adapter calls `Engine.give_result`.
    asks_result: bool = False
    #: Whether only the output shows at which token the request ends. `Engine.give_result` then tells the workers.
    tells_end: bool = False
    #: The prompt's token ids, and their strings if the submission asks for those.
    token_ids: list[int] = []
    token_strings: list[str] | None = None
    lora: Any = None
    #: Parsers of the choices' outputs, one each, if the invoke has a chat.
    parsers: list[MessageParser] = []
    #: Arguments of vLLM's about reasoning.
    reasoning: dict[str, Any] = {}
    #: The W3C trace context for vLLM's own spans, if vLLM makes any.
    context: dict[str, str] | None = None
    #: Whether the tokens are drafted, if the engine drafts any.
    drafts: Drafts | None = None


class MessageParser(Protocol):
    """Makes a message of the output of one choice."""

    def delta(self, text: str, token_ids: list[int], finished: bool) -> MessageDelta | None:
        """What an output adds to the message; `None` if it adds nothing yet. `finished` says whether it is the last.

        Raises:
            Rejection: the output cannot be parsed.
        """
        ...

    def whole(self, text: str, token_ids: list[int]) -> ChatMessage:
        """The whole message of an output.

        Raises:
            Rejection: the output cannot be parsed.
        """
        ...


class Outputs(Protocol):
    """The outputs of one running request."""

    async def get(self) -> tuple[list[Choice], bool]:
        """The outputs since the last call (at least one), and whether the request has ended.

        Raises:
            EngineLost: the engine died.
        """
        ...

    @property
    def cached_tokens(self) -> int:
        """How many of the prompt's tokens came from the prefix cache, as far as is known yet."""
        ...

    @property
    def prompt_logprobs(self) -> list[dict[int, tuple[float, int | None, str | None]]]:
        """The logprobs of the prompt's tokens; empty if they were not asked for or have not come yet."""
        ...

    def size(self) -> int:
        """About how much memory the outputs take that `get` would return now, in bytes."""
        ...


class Carrier(Protocol):
    """Sends files to workers on machines that cannot see the adapter's folder."""

    async def carry(self, path: Path) -> None:
        """Send the file at `path` to all workers, which keep it under its name.

        Raises:
            EngineLost: the engine died.
        """
        ...

    async def drop(self, path: Path) -> None:
        """Let the workers drop the file. Memory that they have mapped stays valid."""
        ...


class Engine(Protocol):
    """The engine that an adapter drives."""

    async def prepare(
        self,
        submission: Submission,
        index: int,
        block: bytes | None,
        declared: bytes | None,
        run: str,
        edits: bytes | None = None,
        shared: bytes | None = None,
        tenant: str | None = "",
    ) -> Prepared:
        """Validate an invoke of a submission.

        Args:
            submission: the trace's submission.
            index: of the invoke.
            block: the encoded `Block` that the workers run with it.
            declared: its declared interventions, an encoded list of `Placed`.
            run: names the run, whose live parameters `steer` changes.
            edits: the blocks of standing interventions, an encoded list of `EditBlock`.
            shared: the trace's shared values, an encoded `SharedValues`.
            tenant: of the trace's key; empty without one. Blocks of one tenant may share a process; with `None`, these
                share it with no other trace's.

        Raises:
            Rejection: the invoke cannot run; names the field at fault.
        """
        ...

    async def start(self, request: str, prepared: Prepared, priority: int) -> Outputs:
        """Run a prepared invoke.

        Args:
            request: the request's id, unique in this engine.
            prepared: the result of `prepare`.
            priority: of the trace.

        Raises:
            Rejection: the engine refused the request.
            EngineLost: the engine died.
        """
        ...

    async def abort(self, request: str) -> None:
        """End a request now. The workers still report its finish record.

        A request with a block ends at its current token. All outputs up to that token come before the last one.
        """
        ...

    async def steer(self, changes: Changes, over: list[str], since: float) -> None:
        """Change live parameters of runs, on all workers before the same step.

        The workers report an `Applied` for each changed run.

        Args:
            changes: by run, the new version and the changed values.
            over: runs that are over. The workers forget their live parameters and shared values.
            since: when the adapter read the first of the changes, in seconds since the epoch.
        """
        ...

    async def give_result(self, result: bytes) -> None:
        """Send the workers the output of an ended request, an encoded `Generated`.

        Raises:
            EngineLost: the engine died.
        """
        ...

    async def pause(self, request: str) -> bool:
        """Pause all choices of a request, within two steps. Other requests are unaffected, and `abort` still works.

        Returns:
            Whether the request had not ended.

        Raises:
            EngineLost: the engine died.
        """
        ...

    async def resume(self, request: str) -> bool:
        """Resume a paused request. Returns whether it was paused.

        Raises:
            EngineLost: the engine died.
        """
        ...

    async def pause_all(self) -> None:
        """Pause all requests, present and future, within two steps. All state is kept, and `abort` still works.

        Raises:
            EngineLost: the engine died.
        """
        ...

    async def takes_requests(self) -> bool:
        """Whether the engine still takes requests: not if it died, or was told to stop by another process."""
        ...

    async def answers(self) -> None:
        """Return when the engine has answered a call, which it does between two steps.

        Raises:
            EngineLost: the engine died.
        """
        ...

    async def resume_all(self) -> None:
        """End `pause_all`. Requests that are paused singly stay paused.

        Raises:
            EngineLost: the engine died.
        """
        ...

    def decode(self, token_ids: list[int], prepared: Prepared) -> str:
        """The text of an invoke's output. The sampling params decide whether it has special tokens."""
        ...

    def token_strings(self, token_ids: list[int]) -> list[str]:
        """The string of each token, special tokens included."""
        ...

    def ready(self) -> Iterable[Report]:
        """The workers' reports since the last call, in order. Does not wait.

        The caller takes all of them at once. The bytes of a report's batch are valid until the next report is taken.
        """
        ...

    async def arrived(self) -> None:
        """Wait until reports have come for `ready`."""
        ...

    def large(self) -> AsyncIterator[BlobChunk | Report]:
        """Yield the chunks of the workers' large arrays, and the reports that come after them. Never ends by itself."""
        ...

    @property
    def inputs(self) -> Path:
        """The folder in which the workers find submissions' large variables."""
        ...

    @property
    def carrier(self) -> Carrier | None:
        """Sends files to workers that cannot see that folder; `None` if all workers can."""
        ...

    @property
    def lost(self) -> bool:
        """Whether the engine has died."""
        ...
