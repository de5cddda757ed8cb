"""The seam between the adapter and what generates.

The adapter knows an `Engine` only. `VllmEngine` (`vllm_engine.py`) is the product;
load and fault tests of the bus put a scripted engine behind the same seam.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from typing import Any, Protocol

import msgspec

from tracewire_bus.wire.messages import Failure, Submission
from tracewire_engine.link.blob_receiver import BlobChunk
from tracewire_engine.protocol.messages import Changes, Report

__all__ = ["Carrier", "Choice", "Engine", "EngineLost", "Outputs", "Prepared", "Rejection"]


class Rejection(Exception):
    """A submission that cannot run, with the field at fault."""

    def __init__(self, field: str, message: str, *, type: str = "TraceRejected", line: int | None = None) -> None:
        super().__init__(message)
        self.failure = Failure(type=type, message=message, field=field, line=line)


class EngineLost(Exception):
    """The engine behind the adapter has died: nothing that it ran will go on."""


class Choice(msgspec.Struct):
    """The part of one output that belongs to one choice of a request."""

    index: int
    token_ids: list[int]
    text: str
    logprobs: list[dict[int, tuple[float, int | None, str | None]]] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


class Prepared(msgspec.Struct):
    """One invoke, validated: token ids and resolved sampling params, ready to run."""

    prompt: Any
    prompt_tokens: int
    params: Any
    choices: int
    sampling: dict[str, Any]
    #: Whether its block asks for its result (`Engine.give_result`).
    asks_result: bool = False
    #: Whether only its output shows at which token it ends, so that the workers have to be told (by the same way).
    tells_end: bool = False
    #: The prompt's token ids, and their strings if the submission asks for those.
    token_ids: list[int] = []
    token_strings: list[str] | None = None
    lora: Any = None


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
        """How many of the prompt's tokens were in the prefix cache and not computed, as far as is known."""
        ...

    @property
    def prompt_logprobs(self) -> list[dict[int, tuple[float, int | None, str | None]]]:
        """Those of the prompt's tokens, if they were asked for and have come."""
        ...

    def size(self) -> int:
        """How much memory what `get` would return takes, in bytes, about."""
        ...


class Carrier(Protocol):
    """Brings files to workers that cannot see the folder."""

    async def carry(self, path: Path) -> None:
        """Have all workers hold the file `path` by its name.

        Raises:
            EngineLost: the engine died.
        """
        ...

    async def drop(self, path: Path) -> None:
        """Have the workers forget the file. Memory that they have mapped stays mapped."""
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
    ) -> Prepared:
        """Validate invoke `index`; `block`, `declared` and `edits` are what the workers are to run with it, encoded.

        `edits` holds the blocks of standing interventions. `run` names what shares the submission's live parameters,
        for `steer`. `shared` is an encoded `Share`.

        Raises:
            Rejection: naming the field.
        """
        ...

    async def start(self, request: str, prepared: Prepared, priority: int) -> Outputs:
        """Run a prepared invoke as `request`, a name unique to this engine.

        Raises:
            Rejection: the engine refused it after all.
            EngineLost: the engine died.
        """
        ...

    async def abort(self, request: str) -> None:
        """End a request now. Its finish record still arrives.

        A request with a block ends at the token that it is at: its outputs up to there come before the last.
        """
        ...

    async def steer(self, changes: Changes, over: list[str], since: float) -> None:
        """Change live parameters of runs, each to a version, on all workers before the same step.

        The workers report an `Applied` for each. The runs `over` can be forgotten. `since` is when the first of the
        changes was read, in seconds since the epoch. So can what is shared by the names in `over`.
        """
        ...

    async def give_result(self, result: bytes) -> None:
        """Hand a block what its request has put out, an encoded `Generated`.

        Raises:
            EngineLost: the engine died.
        """
        ...

    async def pause(self, request: str) -> bool:
        """Hold a request, all its choices, where it is within two steps, and nobody else; `abort` still ends it.

        Returns whether there was anything left of it to pause.

        Raises:
            EngineLost: the engine died.
        """
        ...

    async def resume(self, request: str) -> bool:
        """Let a paused request go on from where it is. Returns whether it was paused.

        Raises:
            EngineLost: the engine died.
        """
        ...

    async def pause_all(self) -> None:
        """Make no more tokens, for any request, within two steps. All state is kept, and `abort` still ends requests.

        Raises:
            EngineLost: the engine died.
        """
        ...

    async def takes_requests(self) -> bool:
        """Whether it still runs what it is given: not if it died, or was told to stop by somebody else."""
        ...

    async def answers(self) -> None:
        """Return when it has answered: between two of its steps.

        Raises:
            EngineLost: the engine died.
        """
        ...

    async def resume_all(self) -> None:
        """End a hold.

        Raises:
            EngineLost: the engine died.
        """
        ...

    def decode(self, token_ids: list[int], prepared: Prepared) -> str:
        """The text of an invoke's output, special tokens as its sampling params have them."""
        ...

    def token_strings(self, token_ids: list[int]) -> list[str]:
        """The string of each token, special tokens included."""
        ...

    def ready(self) -> Iterable[Report]:
        """The workers' reports since the last call, step by step.

        The caller takes all of them at once. The bytes of a report's batch are valid until the next report is taken.
        """
        ...

    async def arrived(self) -> None:
        """Wait until `ready` has something."""
        ...

    def large(self) -> AsyncIterator[BlobChunk | Report]:
        """Large arrays that the workers send, in chunks, and the reports that come behind them."""
        ...

    @property
    def inputs(self) -> Path:
        """Folder in which the workers look for submissions' large variables."""
        ...

    @property
    def carrier(self) -> Carrier | None:
        """The carrier to workers that cannot see that folder; `None` where all can."""
        ...

    @property
    def lost(self) -> bool:
        """Whether the engine has died."""
        ...
