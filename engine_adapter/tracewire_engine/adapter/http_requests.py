"""Applies standing interventions to requests of vLLM's HTTP API, which are not traces.

`EditedClient` wraps vLLM's engine client. It passes a request without edits through unchanged. To other requests it
adds the encoded edits, as the adapter does for a trace. When such a request has ended, the adapter publishes the saves
of each edit on the edit's stream. The HTTP response does not wait for that.
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
from tracewire_bus.domain.limit_table import DEFAULTS
from tracewire_bus.store.edits import RECORD_BYTES
from tracewire_bus.transport.errors import BusError
from tracewire_bus.transport.tasks import OwnedTask, Signal
from tracewire_engine.protocol.drafting import undrafted
from tracewire_engine.protocol.keys import DECLARED_ARG, DRAFTS_ARG, EDITS_ARG, END_ARG
from tracewire_engine.protocol.messages import Generated

from .engine_api import Rejection
from .pending import PendingRecords
from .report_router import ReportRouter
from .runner_bounds import RunnerBounds
from .standing_edits import RequestEdits, StandingEdits

__all__ = ["ASKED", "EditedClient", "PlainRequests"]

logger = logging.getLogger("tracewire")

#: The extra argument by which a request names the edits that it asks for: a list of names, or a text with commas.
ASKED = "tracewire_edits"
#: Prefixes of extra arguments that a client must not set. nnsight would unpickle some of its own.
_OWN = ("tracewire_", "nnsight_")
#: How long the large values of an ended request are kept, in seconds.
_KEEP_S = 3600


class _Edited:
    """A request on which edits run."""

    def __init__(self, name: str, request: str, chosen: RequestEdits, pending: PendingRecords, choices: int) -> None:
        self.name = name
        self.request = request
        self.chosen = chosen
        self.pending = pending
        self.tokens = [0] * choices
        #: Tells the workers at which token the request ended, if only its output shows that; else `None`.
        self.tell: Callable[[bytes], Awaitable[None]] | None = None
        self.reasons: list[str | None] = [None] * choices

    async def failure(self) -> str:
        """The message of the edit's exception that ended the request."""
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
        return raised[0] if raised else "an edit raised an exception"


class PlainRequests:
    """The requests of an adapter that are not traces."""

    def __init__(
        self,
        bus: Bus,
        standing: StandingEdits,
        reports: ReportRouter,
        pending: dict[str, PendingRecords],
        engine: str,
        notify: Callable[[], None],
        most_choices: int = DEFAULTS.choices,
    ) -> None:
        self._bus = bus
        #: How many choices a request may ask for.
        self.most_choices = most_choices
        self._standing = standing
        self._reports = reports
        self._pending = pending
        self._engine = engine
        self._notify = notify
        self._names = itertools.count()
        self._over: deque[_Edited] = deque()
        self._ended = Signal()
        #: How many requests run, with edits or without; and how many ended ones have saves of edits to publish.
        self.running = 0
        self._publishing = 0

    @property
    def busy(self) -> bool:
        """Whether a request runs, or the saves of edits on an ended one are not published yet."""
        return bool(self.running or self._publishing)

    def choose(self, asked: list[str] | None) -> RequestEdits:
        """The edits that run on a request that begins now and asks for the edits `asked` (`None`: does not say).

        Raises:
            Rejection: the request asks for an edit that does not run here.
        """
        return self._standing.choose(asked, f"vllm_xargs.{ASKED}")

    def begin(self) -> str:
        """Count a request that begins. Returns a new id for it, since the client's could equal that of a trace's."""
        self.running += 1
        return f"o{next(self._names)}"

    def end(self) -> None:
        """Count a request that has ended."""
        self.running -= 1
        self._notify()

    def edited(self, name: str, request: str, chosen: RequestEdits, choices: int) -> _Edited:
        """Prepare for the workers' reports of the edits on a request.

        Args:
            name: the id from `begin`.
            request: the client's id.
            chosen: the edits.
            choices: how many choices the request has.
        """
        pending = self._pending[name] = PendingRecords(
            choices,
            f"{self._engine}:{name}",
            block=chosen.blocks is not None,
            reads=chosen.reads,
            reports=self._reports,
            limit=RECORD_BYTES,
        )
        return _Edited(name, request, chosen, pending, choices)

    def drop(self, one: _Edited) -> None:
        """Forget a request that vLLM refused: no worker reports it."""
        self._pending.pop(one.name, None)

    def ended(self, one: _Edited) -> None:
        """Note that a request with edits has ended. `run` publishes the saves of its edits."""
        self._publishing += 1
        self._over.append(one)
        self._ended.notify()

    async def run(self) -> None:
        """Publish the saves and errors of edits on requests that have ended. Never ends by itself."""
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
            logger.warning("the saves of edits on request %s are lost: %s", one.request, error)
        except Exception:  # an error of one request must not stop the others
            logger.exception("the saves of edits on request %s could not be published", one.request)
        finally:
            self._pending.pop(one.name, None)
            self._publishing -= 1
            self._notify()


class EditedClient:
    """Wraps vLLM's engine client: adds the model's edits to requests, and passes all other calls on."""

    def __init__(self, client: Any, plain: PlainRequests, bounds: RunnerBounds) -> None:
        self._client = client
        self._plain = plain
        self._bounds = bounds
        #: By the client's request id, the adapter's ids of the running requests.
        self._ours: dict[str, list[str]] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def generate(
        self, prompt: Any, sampling_params: Any, request_id: str, *more: Any, **options: Any
    ) -> AsyncGenerator[Any, None]:
        """Like vLLM's `generate`, with the edits that are installed at this moment.

        Raises:
            ValueError: the request asks for edits that do not run here, sets an extra argument of the engine's own or a
                priority, asks for too many choices, or has sampling params that vLLM's runner does not take.
        """
        _check_bounds(sampling_params, options, self._plain.most_choices)
        asked, params = _asked(sampling_params)
        try:
            self._bounds.check(params, "")
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
        """Like vLLM's `abort`, for requests that were made through this client."""
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
        extra = {**(params.extra_args or {}), **_arguments(chosen)}
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
        """Abort the request when a fatal edit has raised."""
        with suppress(Exception):
            await one.pending.wait_failed()
            await self._client.abort(one.name)


def _check_bounds(params: Any, options: Mapping[str, Any], most_choices: int) -> None:
    """Check what would give a request more of the engine than other requests and traces have.

    Raises:
        ValueError: the request sets a priority, or asks for too many choices.
    """
    if options.get("priority"):
        raise ValueError("priority: this engine runs all HTTP requests with priority 0; traces have priorities")
    if (getattr(params, "n", None) or 1) > most_choices:
        raise ValueError(f"n: a request has at most {most_choices} choices, got {params.n} (--limit choices)")


def _arguments(chosen: RequestEdits) -> dict[str, Any]:
    """What tells the scheduler and the workers of a request's edits."""
    declared = chosen.declared(None)
    found = {DECLARED_ARG: declared, EDITS_ARG: chosen.blocks}
    given: dict[str, Any] = {name: value for name, value in found.items() if value is not None}
    return given | ({} if declared is None or undrafted(given) else {DRAFTS_ARG: True})


def _asked(params: Any) -> tuple[list[str] | None, Any]:
    """Take the names of the edits that a request asks for out of its sampling params.

    Returns:
        The names (`None` if the request does not say), and the sampling params without them.

    Raises:
        ValueError: the request sets an extra argument of the engine's own, or the names are malformed.
    """
    extra = getattr(params, "extra_args", None)
    if not extra:
        return None, params
    for name in extra:
        if name.startswith(_OWN) and name != ASKED:
            raise ValueError(f"vllm_xargs.{name}: clients cannot set this argument; to ask for edits use {ASKED!r}")
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
    """A prompt as a dict, to which a cache salt can be added.

    Raises:
        ValueError: the prompt is neither a text nor a mapping.
    """
    if isinstance(prompt, str):
        return {"prompt": prompt}
    if isinstance(prompt, Mapping):
        return dict(prompt)
    raise ValueError(f"request {request_id}: edits cannot run on a prompt of the form {type(prompt).__name__}")


def _error(message: str) -> Exception:
    """Make an exception that vLLM's server reports as the server's error, not the caller's."""
    try:
        from vllm.exceptions import GenerationError
    except ImportError:
        return RuntimeError(message)
    return GenerationError(message)  # type: ignore[no-any-return]
