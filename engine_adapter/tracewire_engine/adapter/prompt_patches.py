"""Patches whose values are those of another prompt of their trace: the order of the prompts, and what workers are told.

The requests of prompts that take values start when the requests of those that give them have put out a token: then the
workers have computed the prompts. A request that never starts, because the trace ended before, ends without outputs.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import anyio
import msgspec

from tracewire_bus.domain.patch_checks import check_prompts, patched_prompts, source_of
from tracewire_bus.domain.value_checks import DeclarationError
from tracewire_bus.wire.messages import Declared, Patch
from tracewire_bus.wire.packing import decoder
from tracewire_engine.protocol.messages import Placed

from .engine_api import Choice, Engine, Outputs, Prepared, Rejection
from .running_request import RunningRequest

__all__ = ["LateOutputs", "PromptPatches"]

logger = logging.getLogger("tracewire")

_raws, _placed = decoder(list[msgspec.Raw]), decoder(Placed)
_encoder = msgspec.msgpack.Encoder()
#: How long the call that has the workers drop the kept values may take, in seconds.
_FORGET_S = 10.0


class LateOutputs:
    """The outputs of a request that starts later than others of its trace.

    Args:
        start: starts it.
        waits: are set when it may start.
        over: says whether the trace is to end. The request then does not start any more.
    """

    def __init__(
        self, start: Callable[[], Awaitable[Outputs]], waits: Sequence[anyio.Event], over: Callable[[], bool]
    ) -> None:
        self._start, self._waits, self._over = start, waits, over
        self._outputs: Outputs | None = None

    @property
    def begun(self) -> bool:
        """Whether the request has started."""
        return self._outputs is not None

    async def get(self) -> tuple[list[Choice], bool]:
        """The outputs since the last call, and whether the request has ended. None, if it is not to start."""
        if self._outputs is None:
            for event in self._waits:
                await event.wait()
            if self._over():
                return [], True
            self._outputs = await self._start()
        return await self._outputs.get()

    @property
    def cached_tokens(self) -> int:
        """How many of the prompt's tokens came from the prefix cache."""
        return 0 if self._outputs is None else self._outputs.cached_tokens

    @property
    def prompt_logprobs(self) -> list[dict[int, tuple[float, int | None, str | None]]]:
        """The logprobs of the prompt's tokens."""
        return [] if self._outputs is None else self._outputs.prompt_logprobs

    def size(self) -> int:
        """About how much memory the outputs take that `get` would return now, in bytes."""
        return 0 if self._outputs is None else self._outputs.size()


class PromptPatches:
    """Those of one attempt of a trace.

    Args:
        interventions: the trace's.
        prompts: how many prompts it has.
        run: names what the workers keep, unique to the engine.

    Raises:
        Rejection: a patch names a prompt that the trace does not have, or prompts would wait for each other.
    """

    def __init__(self, interventions: Sequence[Declared], prompts: int, run: str) -> None:
        self._interventions, self._run = interventions, run
        try:
            self._into = patched_prompts(interventions, prompts)
        except DeclarationError as error:
            raise Rejection(error.field, error.message) from error
        #: By the number of a prompt that gives values: set when it has been computed, or never will be.
        self._computed = {self._source(index): anyio.Event() for index in self._into}

    def _source(self, index: int) -> int:
        one = self._interventions[index]
        assert isinstance(one, Patch)
        assert one.prompt is not None
        return one.prompt

    def declared(self, encoded: bytes | None, invoke: int) -> bytes | None:
        """The placed interventions of one prompt: what it gives and takes."""
        if not self._into or encoded is None:
            return encoded
        # Only these are decoded: the arrays of others would have to be encoded again.
        raws: list[Any] = _raws(encoded)
        for index, into in self._into.items():
            one, source = _placed(raws[index]), self._source(index)
            kept = (self._run, index)
            if invoke == source:
                patch = one.intervention
                assert isinstance(patch, Patch)
                given = msgspec.structs.replace(patch, positions=source_of(patch), source=None, when=None)
                raws[index] = msgspec.structs.replace(one, intervention=given, kept=kept, gives=True)
            elif invoke in into:
                raws[index] = msgspec.structs.replace(one, kept=kept)
        return _encoder.encode(raws)

    def check(self, prepared: Sequence[Prepared]) -> None:
        """Check the positions against the prompts.

        Raises:
            Rejection: a prompt does not have a position, or the numbers of positions differ.
        """
        try:
            check_prompts(self._interventions, [one.prompt_tokens for one in prepared])
        except DeclarationError as error:
            raise Rejection(error.field, error.message) from error

    async def start(self, invoke: int, start: Callable[[], Awaitable[Outputs]], over: Callable[[], bool]) -> Outputs:
        """The outputs of a prompt's request, which starts now, or when the prompts have been computed that it needs."""
        sources = {self._source(index) for index, into in self._into.items() if invoke in into}
        if not sources:
            return await start()
        return LateOutputs(start, [self._computed[source] for source in sorted(sources)], over)

    def note(self, invoke: int) -> None:
        """Note that a prompt has been computed."""
        if invoke in self._computed:
            self._computed[invoke].set()

    def release(self) -> None:
        """Have no request wait any more: the trace is to end."""
        for event in self._computed.values():
            event.set()

    def end(self, request: RunningRequest) -> None:
        """Note that a request is over: no other waits for it, and workers report nothing of one that did not start."""
        self.note(request.invoke)
        if isinstance(request.outputs, LateOutputs) and not request.outputs.begun:
            request.pending = None

    async def forget(self, engine: Engine) -> None:
        """Have the workers drop the values that they keep for this attempt."""
        if not self._into:
            return
        with anyio.move_on_after(_FORGET_S, shield=True):
            try:
                await engine.steer({}, [self._run], time.time())
            except Exception as error:
                logger.debug("the workers could not drop the values of run %s: %s", self._run, error)
