"""The client of a bus: finds models, submits traces, and follows and controls any trace by its id."""

from __future__ import annotations

import math
import os
import socket
from collections.abc import Generator, Iterable, Mapping, Sequence
from datetime import timedelta
from types import TracebackType
from typing import Any, Literal

import anyio

from tracewire.admin.dead_letters import DeadLetter, resubmission_of
from tracewire.admin.edits import Edits
from tracewire.admin.engines import Draining, Engine
from tracewire.admin.watch import Watch
from tracewire.capture.capture import ModelHandle
from tracewire.capture.intervention import Intervention
from tracewire.traces import control
from tracewire.traces.control import check_trace_id
from tracewire.traces.event_reader import EventReader
from tracewire.traces.model import Model
from tracewire.traces.presence import Presence
from tracewire.traces.served_models import ModelInfo
from tracewire.traces.session import Session, running_loop
from tracewire.traces.state import State
from tracewire.traces.subscription import Subscription
from tracewire.traces.trace import Trace
from tracewire_bus.bus import Bus, BusError
from tracewire_bus.domain.fold import Fold
from tracewire_bus.store.keys import parse_id
from tracewire_bus.store.trace_records import LiveState
from tracewire_bus.transport.urls import redacted
from tracewire_bus.wire.messages import Block, DeclaredIntervention

from .checks import check_seconds, check_text, is_entry_id, shown
from .error_mapping import bus_errors, connect_error, refusals
from .errors import (
    ConnectError,
    EngineTooOld,
    TracewireError,
    UnknownDeadLetter,
    UnknownEngine,
    UnknownPosition,
    UnknownTrace,
)
from .submission import PromptInput, TraceOptions, make_submission

__all__ = ["Client", "connect"]


def connect(
    url: str | None = None,
    *,
    prefix: str = "tw",
    client: str | None = None,
    lease: float = 10.0,
    patience: float = 20.0,
) -> Connecting:
    """A client of the bus at `url`: for as long as a context lasts, or until it is closed.

        async with tracewire.connect(url) as client: ...

        client = await tracewire.connect(url)  # in a notebook, or where a service starts
        await client.aclose()

    `url` is that of a Redis (`redis://`, `rediss://` or `unix://`; `redis+sentinel://host:port,host:port/service`;
    `redis+cluster://host:port,host:port`; see `docs/redis.md`), or `embedded://` for a private one that is started here
    and ends with the client (`client.url` tells other processes where it is); without one, `TRACEWIRE_URL`
    counts. `prefix` stands before every key. `client` names this client to the engines, which serve clients in turns.

    A client runs on asyncio, on the event loop that it was made on; other threads call it by `anyio.from_thread.run`.
    The client owns all tasks and connections, and closing it ends them. Closing it also cancels the traces that it
    submitted, that still run and that are not detached. Engines cancel these traces, too, when the client dies, or its
    event loop stands still, for `lease` seconds. While Redis is away, a call waits for up to `patience` seconds before
    it raises `BusUnavailable`; reading a trace waits for as long as the caller does. Closing the client waits for up
    to `patience` seconds for traces that a `with` has queued, and for two seconds once it is cancelled.

    Raises, when it is entered or awaited:
        ConnectError: no URL is given, the URL names no Redis, or `prefix` has braces.
        BusUnavailable: no server answers at the URL.
        BusRefused: Redis refuses the credentials or certificates.
        ValueError: `lease` is not at least 1 second, or `patience` is negative.
    """
    return Connecting(url, prefix, client, lease, patience)


class Connecting:
    """A client that is still to be connected: enter it with `async with`, or await it."""

    def __init__(self, url: str | None, prefix: str, name: str | None, lease: float, patience: float) -> None:
        self._arguments = url, prefix, name, lease, patience
        self._client: Client | None = None

    def __await__(self) -> Generator[Any, None, Client]:
        return _connected(*self._arguments).__await__()

    async def __aenter__(self) -> Client:
        if self._client is not None:
            raise TracewireError("this connect() was entered before: make another one for each async with")
        self._client = await _connected(*self._arguments)
        return self._client

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        assert self._client is not None
        await self._client.aclose()

    def __getattr__(self, name: str) -> Any:
        if hasattr(Client, name):
            raise AttributeError(
                f"connect(...) has no {name!r} before it is connected: write `async with tracewire.connect(url) as "
                "client:`, or `client = await tracewire.connect(url)`"
            )
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")


async def _connected(url: str | None, prefix: str, client: str | None, lease: float, patience: float) -> Client:
    check_seconds("lease", lease, 1)
    check_seconds("patience", patience, most=math.inf)
    if client is not None:
        check_text("client", client)
    check_text("prefix", prefix)
    address = os.environ.get("TRACEWIRE_URL") if not url else check_text("url", url)
    if not address:
        raise ConnectError(
            "no URL: pass one to connect(), or set TRACEWIRE_URL "
            "(redis://host:port, or embedded:// for a private Redis that ends with this client)"
        )
    loop = running_loop()
    if loop is None:
        raise TracewireError("tracewire runs on asyncio, and no event loop of asyncio runs here")
    from tracewire_bus.transport.embedded import EmbeddedServerError

    try:
        bus = Bus.open(address, prefix=prefix, patience_s=patience)
        await bus.__aenter__()
    except BusError as error:
        raise type(connect_error(error))(f"cannot connect: {error}") from error
    except (EmbeddedServerError, ValueError) as error:
        raise ConnectError(f"cannot connect: {error}") from error
    try:
        await bus.warm()
    except BaseException:
        await bus.aclose()
        raise
    presence = Presence(bus, lease)
    name = client if client is not None else f"{socket.gethostname()}:{os.getpid()}"
    return Client(Session(bus, name, presence, loop))


class Client:
    """Made by `connect`. Any task of its event loop may use it.

    An argument of the wrong type raises a `TypeError`, or, in a submission, a `TraceRejected` with its field. Each
    method that sends a request to Redis raises `BusUnavailable` if Redis does not answer within the client's
    `patience`, `BusRefused` if it refuses, `BusFull` if it has no memory left, and `ClientClosed` if the client is
    closed. All of these but `BusFull` are `ConnectError`s.
    """

    def __init__(self, session: Session) -> None:
        self._session = session

    async def aclose(self) -> None:
        """Close it: no task or connection is left, and its traces that still run and are not detached are cancelled.

        Leaving `async with tracewire.connect(...)` does so. A second call does nothing.
        """
        await self._session.aclose()

    @property
    def url(self) -> str:
        """URL of the Redis, for other processes to connect to."""
        return self._session.url

    def __repr__(self) -> str:
        return f"<Client of {redacted(self.url)}{', closed' if self._session.closed else ''}>"

    # --- models -------------------------------------------------------------------------------------------------------

    async def models(self) -> list[ModelInfo]:
        """The models that live engines serve now."""
        return await self._session.models.infos()

    async def engines(self, model: Model | str | None = None) -> list[Engine]:
        """The engines that live now (of one model, if one is named), by model, then by when they started."""
        wanted = None if model is None else _model_name(model)
        return [Engine.of(engine) for engine in await self._session.models.engines(wanted)]

    async def drain(
        self, engine: Engine | str, *, timeout: float | timedelta | None = None, by: str | None = None
    ) -> Draining:
        """Have an engine take nothing new, finish what it runs, and leave; its supervisor does not start it again.

        The request is made on return. The registry says `draining` as soon as the engine takes nothing new, and
        `Draining.wait` returns when the engine has left. After `timeout` seconds the engine puts the traces that still
        run back, ahead of later submissions, and they run anew on another engine. Without a `timeout` it runs all of
        its traces to their end, paused ones included. The call can be repeated; the earliest timeout counts.

        Raises:
            UnknownEngine: no such engine lives. Names those that do.
            EngineTooOld: its version cannot be asked to drain. SIGTERM drains it.
            BusUnavailable: Redis does not answer; the request may have been made.
            ValueError: `timeout` is negative.
        """
        name = engine.name if isinstance(engine, Engine) else check_text("engine", engine)
        seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
        if seconds is not None:
            check_seconds("timeout", seconds)
        engines = {one.name: one for one in await self.engines()}
        if name not in engines:
            raise UnknownEngine(name, engines)
        drained = engines[name]
        if not drained.can_drain:
            raise EngineTooOld(name, drained.schema)
        bus = self._session.open_bus()
        with bus_errors():
            await bus.drain(name, by=self._session.name if by is None else check_text("by", by), within_s=seconds)
            waiting = await bus.queue.waiting(drained.model)
        others = [one.name for one in engines.values() if one.model == drained.model and one.ready]
        return Draining(bus, drained, tuple(other for other in others if other != name), waiting)

    async def model(self, name: str, wait_for_engine: float | None = None) -> Model:
        """A model's handle, with its module tree.

        `wait_for_engine` is how many seconds to wait for an engine that serves it; without it the answer comes at once.

        Raises:
            UnknownModel: no live engine serves a model of this name. Names those that are served.
            ValueError: `wait_for_engine` is negative.
        """
        check_text("name", name)
        if wait_for_engine is not None:
            check_seconds("wait_for_engine", wait_for_engine, most=math.inf)
        served = await self._session.models.find(name, wait_for_engine, age=0)
        return Model(served.info, served.trees, self._session)

    # --- traces -------------------------------------------------------------------------------------------------------

    # whole: what a caller of `trace` can say, by keywords with their defaults
    def trace(
        self,
        model: Model | str,
        prompt: PromptInput | None = None,
        block: Intervention | Block | None = None,
        *,
        prompts: Sequence[PromptInput] | None = None,
        interventions: Sequence[DeclaredIntervention] = (),
        live: Mapping[str, Any] | None = None,
        deadline: float | timedelta | None = None,
        priority: int = 0,
        detach: bool = False,
        on_engine_loss: Literal["restart", "fail"] = "restart",
        max_attempts: int = 3,
        edits: Sequence[str] | None = None,
        trace_id: str | None = None,
        shared: Mapping[str, Any] | None = None,
        **sampling: Any,
    ) -> Trace:
        """A trace of `block` over one prompt, or over each of `prompts`; submitted when it is entered or started.

        `interventions` are declared ones (`Probe`, `Steer`, ...), alone or beside
        a block, which is then served after them. `live` declares the live parameters that they and the block read, by
        their first values: numbers, booleans, strings, bytes and arrays of up to 1 MiB, which anybody who knows the
        trace's id may change while it runs (`steer`), each to a value of the same type, and
        of the same dtype and shape. `deadline` (seconds, or a timedelta) counts from the submission; a trace that has
        not ended by then ends as `expired`. `priority`: lower first, on the queue among this client's own traces
        (clients take turns), in vLLM's scheduler among all that run. `detach` lets it run on when the trace is left or
        the client goes away; otherwise it is cancelled then. A trace whose engine is lost, or shut down, runs anew on
        another (iterating yields a `Restarted`; sampling without a seed is given one, so that it
        samples the same) until `max_attempts` engines were lost over it; with `on_engine_loss="fail"` it fails with the
        first. `edits` names the standing interventions that it asks for (`edits`): none at
        all and an empty list differ. `trace_id` is made up unless given; submitting the same id
        twice runs it once. `lora="name"` runs it with an adapter that the engine was started with. `shared` has first
        values, by name, of lists, dicts and arrays that the blocks of all prompts share: one object on the engine,
        whatever order they run in, which a block uses by its name, as a variable or from around it. What it comes to is
        `result.shared`. Everything else is sampling params, by vLLM's names: `max_tokens=64`, `temperature=0.0`.

        Raises:
            TraceRejected: something in it cannot be submitted; `field` names what.
        """
        self._session.open_bus()
        options = TraceOptions(
            prompts=prompts,
            interventions=interventions,
            live=live,
            deadline=deadline,
            priority=priority,
            detach=detach,
            on_engine_loss=on_engine_loss,
            max_attempts=max_attempts,
            edits=edits,
            trace_id=trace_id,
            shared=shared,
        )
        return Trace(self._session, make_submission(self._session.name, model, prompt, block, options, sampling))

    def subscribe(self, trace_id: str, *, since: str = "start", names: Iterable[str] | None = None) -> Subscription:
        """A trace's events: replayed from `since`, then as they come, up to and with the final.

        `since` is `"start"`, `"now"`, or the id of an event of this trace (`output.id`), after which to go on; also of
        one that it has not reached. `names` limits what is saved to these names; all events come nevertheless.

        Raises:
            UnknownPosition: `since` is none of these.
            UnknownTrace: when reading begins; no such trace was submitted, or it has expired. A service that answers
                with a stream awaits the subscription's `start()` before it answers, and so learns it in time.
        """
        check_trace_id(trace_id)
        bus = self._session.open_bus()
        try:
            reader = EventReader(trace_id, bus, check_text("since", since))
        except ValueError:
            raise UnknownPosition(since) from None
        return Subscription(self._session, trace_id, reader, names)

    def watch(
        self,
        *,
        model: Model | str | None = None,
        since: str = "now",
        group: str | None = None,
        consumer: str | None = None,
        idle: float = 60.0,
    ) -> Watch:
        """The lifecycle events of all traces, this client's and others': an async iterator of `Lifecycle` items without
        an end. It has one connection of its own, and waits while Redis is away.

        `model` limits it to one model's traces. `since` is `"now"`, `"start"` (what is kept: some 2000 events of each
        64th part of all traces, for a day), or the `position` of an earlier watch.

        With a `group`, the watches of that group share the events, across processes: each goes to one of them, and is
        acknowledged when that watch asks for the next. The first watch makes the group, from `since` on. Redis keeps
        its position. `consumer` names this watch in its group (by default, the client's name). A consumer that
        was killed and comes back under its name gets the events that it had not acknowledged. Other consumers take
        these events over when it has been idle for `idle` seconds, so the handling of one event may take that long. An
        event may be delivered twice, but none is left out.

        Raises:
            ValueError: `since` is none of these, a name is empty, there is a `consumer` without a `group`, or `idle` is
                not positive.
        """
        bus = self._session.open_bus()
        check_text("since", since)
        wanted = None if model is None else _model_name(model)
        if group is None:
            if consumer is not None:
                raise ValueError(f"consumer: expected a group with it, got {shown(consumer)} alone")
            return Watch(bus.watch(since), wanted)
        name = self._session.name if consumer is None else consumer
        for field, value in (("group", group), ("consumer", name)):
            if not check_text(field, value):
                raise ValueError(f"{field}: expected a name, got an empty one")
        if not check_seconds("idle", idle):
            raise ValueError("idle: expected more than 0 seconds")
        return Watch(bus.watch_group(group, name, since, idle), wanted)

    async def watch_groups(self) -> list[str]:
        """The names of the groups that watches share events in."""
        with bus_errors():
            return await self._session.open_bus().watch_groups.names()

    async def remove_watch_group(self, group: str) -> bool:
        """Remove a group, with the events that it had not acknowledged. Returns whether it existed."""
        with bus_errors():
            return await self._session.open_bus().watch_groups.remove(check_text("group", group))

    # --- standing interventions ---------------------------------------------------------------------------------------

    def edits(self, model: Model | str) -> Edits:
        """The standing interventions of a model: installed on all its engines, and run on requests from then on."""
        self._session.open_bus()
        return Edits(self._session, _model_name(model))

    # --- dead letters -------------------------------------------------------------------------------------------------

    async def dead_letters(self, after: str = "", count: int = 100) -> list[DeadLetter]:
        """The dead-letter queue: submissions that no engine could read, or whose engines were lost each time. Returns
        the oldest `count` of those after the dead letter of id `after`. Redis keeps about 10000.

        Raises:
            BusUnavailable: Redis does not answer.
            ValueError: `after` is no dead letter's id, or `count` is no positive integer.
        """
        if check_text("after", after) and not is_entry_id(after):
            raise ValueError(f"after: expected a dead letter's id, got {shown(after)}")
        if type(count) is not int or not 0 < count < 2**31:
            raise ValueError(f"count: expected a positive integer, got {shown(count)}")
        with bus_errors():
            found = await self._session.open_bus().queue.dead_letters(after, count)
        return [DeadLetter.of(one) for one in found]

    async def resubmit(self, id_: str) -> str:
        """Submit a dead letter once more, and return the id of the trace that it is now: a new one, since the old trace
        has ended and stays so. It is this client's and runs detached; its deadline counts anew, and its large variables
        are sent again. The dead letter is removed; if that fails after it was queued, resubmitting it again queues
        nothing more and returns the same id.

        Raises:
            UnknownDeadLetter: there is no such dead letter.
            TraceRejected: what was submitted cannot be read.
            ValueMissing: a large variable of it has expired.
            UnknownModel: no live engine serves the model.
            Overloaded: too many submissions wait for the model.
            BusFull: Redis has too little memory left.
            BusUnavailable: Redis does not answer.
        """
        bus = self._session.open_bus()
        with bus_errors():
            found = await bus.queue.find_dead_letter(id_) if is_entry_id(id_) else None
            if found is None:
                raise UnknownDeadLetter(id_)
            submission = await resubmission_of(DeadLetter.of(found), bus, self._session.name)
            model = await self._session.models.find(submission.model)
            with refusals(submission.model):
                await bus.submit(submission, model.info.queue_limit, model.info.retention_s or None)
            await bus.queue.drop_dead_letter(id_)
        return submission.trace

    async def drop_dead_letter(self, id_: str) -> bool:
        """Remove a dead letter. Returns whether it was there.

        Raises:
            BusUnavailable: Redis does not answer.
        """
        bus = self._session.open_bus()
        with bus_errors():
            return is_entry_id(id_) and await bus.queue.drop_dead_letter(id_)

    # --- control ------------------------------------------------------------------------------------------------------

    async def live(self, trace_id: str) -> LiveState:
        """A trace's live parameters as they are now: their version (0: as declared) and their values.

        Raises:
            UnknownTrace: no such trace was submitted, or it has expired.
        """
        return await control.live_state(self._session, trace_id)

    async def steer(
        self,
        trace_id: str,
        values: Mapping[str, Any] | None = None,
        /,
        *,
        if_version: int | None = None,
        by: str | None = None,
        **more: Any,
    ) -> int:
        """Change live parameters of a trace, all that are given at once, and return the version that this makes.

        Any client may steer any trace; changes apply in the order in which Redis took them. The change is accepted on
        return. A `Steered` event then names the first token for which it holds: the first one sampled in a step that
        begins after the engine has received the change. With `if_version` the change is accepted only if the live
        parameters are still at that version. `by` names the author, by default this client. Floating-point arrays of
        another precision are converted to the declared one. Parameters with the name of one of these arguments go into
        `values`.

        Raises:
            SteerRejected: a name was not declared, or a value is not finite or not of the declared type and shape.
            VersionConflict: the version is another.
            TraceEnded: the trace has ended, or is about to.
            UnknownTrace: no such trace was submitted, or it has expired.
            BusUnavailable: Redis does not answer; the change may have been accepted.
        """
        return await control.steer(self._session, trace_id, values, more, if_version=if_version, by=by)

    async def cancel(self, trace_id: str, reason: str = "", *, by: str | None = None) -> bool:
        """Cancel a trace, queued or running; it ends as `cancelled`. Any client may. The trace's error names the
        `reason` and the author.

        Returns `False` if the trace had ended already. Its engine stops within two steps; what was generated
        and saved until then stays readable.

        Raises:
            UnknownTrace: no such trace was submitted, or it has expired.
        """
        return await control.cancel(self._session, trace_id, reason, by=by)

    async def pause(self, trace_id: str, *, by: str | None = None) -> bool:
        """Pause a trace within two steps, until it is resumed. The engine's other traces go on.

        A `Paused` event follows. The deadline keeps counting, and the trace can be steered and cancelled meanwhile. Its
        KV cache stays in the engine's memory until another trace needs the room; the engine then computes it anew when
        the trace is resumed. A trace that is still queued pauses right after it begins. Returns `False` if the trace
        was paused already.

        Raises:
            TraceEnded: the trace has ended, or is about to.
            UnknownTrace: no such trace was submitted, or it has expired.
        """
        return await control.pause(self._session, trace_id, by=by)

    async def resume(self, trace_id: str, *, by: str | None = None) -> bool:
        """Resume a paused trace; a `Resumed` event follows. Returns whether it was paused.

        Raises:
            TraceEnded: the trace has ended, or is about to.
            UnknownTrace: no such trace was submitted, or it has expired.
        """
        return await control.pause(self._session, trace_id, by=by, resume=True)

    async def state(self, trace_id: str) -> State:
        """A trace's folded state now: replayed up to its present last event.

        Raises:
            UnknownTrace: no such trace was submitted, or it has expired.
        """
        check_trace_id(trace_id)
        bus = self._session.open_bus()
        with bus_errors():
            tail = await bus.tail_id(trace_id)
            if parse_id(tail) == (0, 0) and not await bus.exists(trace_id):
                raise UnknownTrace(trace_id)
            reader = EventReader(trace_id, bus, "0-0")
            reader.assume_exists()
        fold = Fold()
        try:
            while parse_id(reader.position) < parse_id(tail) and await reader.next(fold) is not None:
                pass
        finally:
            with anyio.CancelScope(shield=True):
                await reader.aclose()
        return State(trace_id, fold)


def _model_name(model: ModelHandle | str) -> str:
    """The name of a model that the caller asks about."""
    if isinstance(model, ModelHandle):
        return model.name
    if not check_text("model", model):
        raise ValueError("model: expected a model of client.model(), or its name, got an empty one")
    return model
