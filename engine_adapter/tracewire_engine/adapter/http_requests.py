"""Requests that are no traces, made in the adapter's process beside them: those of vLLM's own HTTP API.

`EditedClient` stands before vLLM's engine client. A request on which no standing intervention runs passes through it
as it is. On any other it puts the edits, by the way that a trace's take, and when it has ended, what they saved is left
on their own streams. Its answer waits for none of that.
"""

from __future__ import annotations

import itertools
import logging
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

import anyio
import msgspec

from tracewire_bus.bus import Bus
from tracewire_bus.store.edits import RECORD_BYTES
from tracewire_bus.transport.errors import BusError
from tracewire_bus.transport.tasks import OwnedTask, Signal
from tracewire_engine.protocol.keys import DECLARED_ARG, EDITS_ARG, END_ARG
from tracewire_engine.protocol.messages import Generated

from .engine_api import Rejection
from .pending import PendingRecords
from .report_router import ReportRouter
from .standing_edits import RequestEdits, StandingEdits

__all__ = ["ASKED", "EditedClient", "PlainRequests"]

logger = logging.getLogger("tracewire")

#: The extra argument by which a request names the edits that it asks for: a list of names, or a text with commas.
ASKED = "tracewire_edits"
#: Extra arguments that are the engine's own begin so: some of nnsight's would be unpickled.
_OWN = ("tracewire_", "nnsight_")
#: How long large values of a request are kept when it has ended, in seconds.
_KEEP_S = 3600


class _Edited:
    """A request on which edits run."""

    def __init__(self, name: str, request: str, chosen: RequestEdits, pending: PendingRecords, choices: int) -> None:
        self.name = name
        self.request = request
        self.chosen = chosen
        self.pending = pending
        self.tokens = [0] * choices
        #: Tells the workers at which token it ended, which only its output shows; where they know, nothing.
        self.tell: Callable[[bytes], Awaitable[None]] | None = None
        self.reasons: list[str | None] = [None] * choices

    async def failure(self) -> str:
        """The exception of the edit that ended the request."""
        await self.pending.wait_finished()
        records = [choice.finish for choice in self.pending.choices if choice.finish is not None]
        for record in records:
            if record.error is not None:
                return record.error.message
        # The request was aborted before the token in whose step the edit raised: its record counts that step's error
        # for the edit, and not for the request.
        raised = [
            f"edit {edit.name!r}: {record.edit_errors[edit.name].message}"
            for record in records
            for edit in self.chosen.edits
            if edit.fatal and edit.name in record.edit_errors
        ]
        return raised[0] if raised else "an edit failed it"


class PlainRequests:
    """The requests of an adapter that are no traces."""

    def __init__(
        self,
        bus: Bus,
        standing: StandingEdits,
        reports: ReportRouter,
        pending: dict[str, PendingRecords],
        engine: str,
        notify: Callable[[], None],
    ) -> None:
        self._bus = bus
        self._standing = standing
        self._reports = reports
        self._pending = pending
        self._engine = engine
        self._notify = notify
        self._names = itertools.count()
        self._over: deque[_Edited] = deque()
        self._ended = Signal()
        #: How many run, with edits or without; how many have ended whose edits are not told of yet.
        self.running = 0
        self._publishing = 0

    @property
    def busy(self) -> bool:
        """Whether any runs, or is not told of yet."""
        return bool(self.running or self._publishing)

    def choose(self, asked: list[str] | None) -> RequestEdits:
        """The edits that run on a request that is taken now.

        Raises:
            Rejection: it asks for one that does not run here.
        """
        return self._standing.choose(asked, f"vllm_xargs.{ASKED}")

    def begin(self) -> str:
        """A request begins. Returns our name for it: its client's could be that of a trace's request."""
        self.running += 1
        return f"o{next(self._names)}"

    def end(self) -> None:
        """A request has ended."""
        self.running -= 1
        self._notify()

    def edited(self, name: str, request: str, chosen: RequestEdits, choices: int) -> _Edited:
        """Edits run on a request of ours."""
        pending = self._pending[name] = PendingRecords(
            choices,
            f"{self._engine}:{name}",
            block=chosen.blocks is not None,
            reads=chosen.reads,
            reports=self._reports,
            limit=RECORD_BYTES,
            # The saves of each edit go to a stream of its own.
            columns=False,
        )
        return _Edited(name, request, chosen, pending, choices)

    def drop(self, one: _Edited) -> None:
        """Forget a request that vLLM never took: no worker reports it."""
        self._pending.pop(one.name, None)

    def ended(self, one: _Edited) -> None:
        """Note that the request has ended. `run` reports the records of its edits."""
        self._publishing += 1
        self._over.append(one)
        self._ended.notify()

    async def run(self) -> None:
        """Tell what edits left on requests that have ended. Never ends by itself."""
        async with anyio.create_task_group() as group:
            while True:
                while not self._over:
                    await self._ended.wait()
                group.start_soon(self._publish, self._over.popleft())

    async def _publish(self, one: _Edited) -> None:
        pending = one.pending
        try:
            if one.tell is not None:
                await one.tell(msgspec.msgpack.encode(Generated(one.name, None, [], [], one.tokens)))
            await pending.wait_finished()
            blobs = pending.large
            for choice in pending.choices:
                blobs |= await choice.reads.upload(self._bus.blobs, pending.trace)
            self._standing.queue_records(one.chosen, pending, one.request, one.tokens, one.reasons)
            if blobs:
                await self._bus.command("EXPIRE", self._bus.keys.blobs(pending.trace), _KEEP_S)
        except BusError as error:
            logger.warning("what edits left on request %s is lost: %s", one.request, error)
        except Exception:  # one request's misfortune
            logger.exception("what edits left on request %s could not be told", one.request)
        finally:
            self._pending.pop(one.name, None)
            self._publishing -= 1
            self._notify()


class EditedClient:
    """vLLM's engine client, with a model's edits on the requests that are made through it. Else it is that client."""

    def __init__(self, client: Any, plain: PlainRequests) -> None:
        self._client = client
        self._plain = plain
        #: Our names of the requests that run, by what their clients call them.
        self._ours: dict[str, list[str]] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def generate(
        self, prompt: Any, sampling_params: Any, request_id: str, *more: Any, **options: Any
    ) -> AsyncGenerator[Any, None]:
        """As vLLM's; the edits are those of this moment.

        Raises:
            ValueError: the request asks for edits that do not run here, or brings what is the engine's own.
        """
        asked, params = _asked(sampling_params)
        try:
            chosen = self._plain.choose(asked)
        except Rejection as rejection:
            raise ValueError(f"{rejection.failure.field}: {rejection.failure.message}") from None
        if not chosen:

            def start(name: str) -> AsyncGenerator[Any, None]:
                return self._client.generate(prompt, params, name, *more, **options)  # type: ignore[no-any-return]
        else:
            salted = _salted(prompt, request_id)

            def start(name: str) -> AsyncGenerator[Any, None]:
                one = self._plain.edited(name, request_id, chosen, params.n or 1)
                return self._edited(one, salted, params, more, options)

        return self._named(request_id, start)

    async def abort(self, request_id: Any, *more: Any, **options: Any) -> None:
        """As vLLM's, for the requests that were made here."""
        ids = [request_id] if isinstance(request_id, str) else list(request_id)
        if names := [name for one in ids for name in self._ours.get(one, ())]:
            await self._client.abort(names, *more, **options)

    async def _named(
        self, request_id: str, start: Callable[[str], AsyncGenerator[Any, None]]
    ) -> AsyncGenerator[Any, None]:
        name = self._plain.begin()
        self._ours.setdefault(request_id, []).append(name)
        outputs = start(name)
        try:
            async for output in outputs:
                output.request_id = request_id
                yield output
        finally:
            self._ours[request_id].remove(name)
            if not self._ours[request_id]:
                del self._ours[request_id]
            self._plain.end()
            # A client that stops reading ends the request in the engine at once.
            await outputs.aclose()

    async def _edited(
        self, one: _Edited, prompt: Any, params: Any, more: tuple[Any, ...], options: Mapping[str, Any]
    ) -> AsyncGenerator[Any, None]:
        chosen = one.chosen
        extra = dict(params.extra_args or {})
        declared = chosen.declared(None)
        if declared is not None:
            extra[DECLARED_ARG] = declared
        if chosen.blocks is not None:
            extra[EDITS_ARG] = chosen.blocks
        if params.stop and chosen.blocks is not None:
            extra[END_ARG] = True
            one.tell = self._tell_end
        params = params.clone()
        params.extra_args = extra
        # A token served from the prefix cache runs no forward pass, and an edit would not see it.
        params.skip_reading_prefix_cache = True
        outputs = self._client.generate({**prompt, "cache_salt": one.pending.trace}, params, one.name, *more, **options)
        guard = OwnedTask(partial(self._guard, one), "tracewire edits") if chosen.fatal else None
        delta = params.output_kind.name == "DELTA"
        begun, end = False, self._plain.ended
        try:
            async for output in outputs:
                begun = True
                for completion in output.outputs:
                    count = len(completion.token_ids)
                    before = one.tokens[completion.index] if delta else 0
                    one.tokens[completion.index] = before + count
                    one.reasons[completion.index] = completion.finish_reason
                if guard is not None and output.finished:
                    # The workers' report of the last step may come after its tokens.
                    await one.pending.wait_reported(one.tokens)
                    if one.pending.failed:
                        await guard.aclose()
                        raise _error(await one.failure())
                yield output
        except Exception:
            if not begun:
                end = self._plain.drop
            raise
        finally:
            try:
                if guard is not None:
                    await guard.aclose()
            finally:
                end(one)
            await outputs.aclose()

    async def _tell_end(self, end: bytes) -> None:
        await self._client.collective_rpc("tracewire_result", args=(end,))

    async def _guard(self, one: _Edited) -> None:
        """Abort the request when an edit has failed it."""
        with suppress(Exception):
            await one.pending.wait_failed()
            await self._client.abort(one.name)


def _asked(params: Any) -> tuple[list[str] | None, Any]:
    """The edits that a request asks for, and its sampling params without that.

    Raises:
        ValueError: it brings what is the engine's own.
    """
    extra = getattr(params, "extra_args", None)
    if not extra:
        return None, params
    for name in extra:
        if name.startswith(_OWN) and name != ASKED:
            raise ValueError(f"vllm_xargs.{name}: this name is the engine's own; edits are asked for by {ASKED!r}")
    if ASKED not in extra:
        return None, params
    asked = extra[ASKED]
    if isinstance(asked, str):
        asked = [name.strip() for name in asked.split(",") if name.strip()]
    if not isinstance(asked, list) or not all(isinstance(name, str) for name in asked):
        raise ValueError(f"vllm_xargs.{ASKED}: expected a list of names of edits, got {asked!r}"[:300])
    params = params.clone()
    params.extra_args = {name: value for name, value in extra.items() if name != ASKED} or None
    return asked, params


def _salted(prompt: Any, request_id: str) -> dict[str, Any]:
    """A prompt as what a salt can be put to.

    Raises:
        ValueError: it is of a form that takes none.
    """
    if isinstance(prompt, str):
        return {"prompt": prompt}
    if isinstance(prompt, Mapping):
        return dict(prompt)
    raise ValueError(f"request {request_id}: edits cannot run on a prompt of the form {type(prompt).__name__}")


def _error(message: str) -> Exception:
    """The statuses by which vLLM's server reports an error of its own, and not the caller's."""
    try:
        from vllm.exceptions import GenerationError
    except ImportError:
        return RuntimeError(message)
    return GenerationError(message)  # type: ignore[no-any-return]
