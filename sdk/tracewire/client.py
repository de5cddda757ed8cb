"""The client of a bus: what a service holds to look at models, submit traces, and follow them."""

from __future__ import annotations

import asyncio
import difflib
import inspect
import keyword
import math
import os
import re
import socket
import uuid
from collections.abc import Generator, Iterable, Mapping, Sequence
from datetime import timedelta
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import anyio

from tracewire.admin.dead_letters import DeadLetter, fresh
from tracewire.admin.edits import Edits
from tracewire.admin.engines import Draining, Engine
from tracewire.admin.watch import Watch
from tracewire.capture.intervention import Intervention, live_reads
from tracewire.traces.event_reader import EventReader
from tracewire.traces.media import packed_media
from tracewire.traces.model import Model, ModelInfo
from tracewire.traces.presence import Presence
from tracewire.traces.state import State
from tracewire.traces.trace import Subscription, Trace
from tracewire_bus.bus import Bus, BusError
from tracewire_bus.domain.fold import Fold
from tracewire_bus.store.keys import is_text, parse_id
from tracewire_bus.store.trace_records import LiveState, SteerRefused, TraceMissing
from tracewire_bus.store.trace_records import TraceEnded as RecordEnded
from tracewire_bus.transport.connection import Refreshed, Turns, redacted
from tracewire_bus.wire.messages import Block, Declared, DeclaredIntervention, EngineInfo, Submission
from tracewire_bus.wire.messages import Invoke as InvokeMessage

from .checks import check_seconds, check_text, is_entry_id, is_sendable_text, shown, type_name
from .error_mapping import bus_errors, connect_error, refusals
from .errors import (
    ClientClosed,
    ConnectError,
    EngineTooOld,
    SteerRejected,
    TraceEnded,
    TraceRejected,
    TracewireError,
    UnknownDeadLetter,
    UnknownEngine,
    UnknownModel,
    UnknownPosition,
    UnknownTrace,
    UntransportableVariable,
    VersionConflict,
)

if TYPE_CHECKING:
    from tracewire.traces.tracer import Queueing, Tracer
    from tracewire_bus.domain.tree import ModuleTree

__all__ = ["Client", "Prompt", "PromptInput", "connect"]

PromptInput: TypeAlias = "str | Sequence[int] | Sequence[Mapping[str, Any]] | Mapping[str, Any] | Prompt"
"""A prompt: text, token ids, or chat messages (dicts with `role` and `content`), or one of vLLM's dicts, with images
under `multi_modal_data`."""

#: How old what the client knows of the registry may be, in seconds, when a trace is submitted; with more than so many
#: engines, older by as much, so that looking costs no more.
_REGISTRY_AGE = 1.0
_REGISTRY_ENGINES = 100
#: How many traces are made in one turn of the event loop, of those that are started at the same time.
_AT_ONCE = 8

#: Greatest priority, either way: what the queue tells from its neighbour.
_MOST_PRIORITY = 2**53

_TRACE_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


class Prompt:
    """A prompt with sampling params, or a LoRA adapter, of its own: `prompts=[Prompt("a", max_tokens=3), "b"]`.

    A `block` of its own runs in place of the trace's; `edits`, where given, count in place of the trace's.
    """

    def __init__(
        self,
        prompt: str | Sequence[int] | Sequence[Mapping[str, Any]] | Mapping[str, Any],
        /,
        block: Intervention | Block | None = None,
        *,
        edits: Sequence[str] | None = None,
        **sampling: Any,
    ) -> None:
        self.prompt = prompt
        self.block = block
        self.edits = edits
        self.sampling = sampling

    def __repr__(self) -> str:
        parts = [repr(self.prompt)]
        if self.block is not None:
            parts.append(f"block={self.block.name}")
        parts += [f"{name}={value!r}" for name, value in self.sampling.items()]
        if self.edits is not None:
            parts.append(f"edits={self.edits!r}")
        return f"Prompt({', '.join(parts)})"


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

    It runs on asyncio, and is used on the event loop that it was made on: other threads call it by
    `anyio.from_thread.run`. This alone owns tasks and connections: when the client is closed, none is left, and the
    traces that it submitted and that still run are cancelled, unless they were detached. So they are when it dies, or
    its event loop stands still, for `lease` seconds. While Redis is away, what is asked of it waits for up to
    `patience` seconds; reading a trace waits as long as the reader does. Closing the client waits for traces that were
    queued by a `with` for as long, and for two seconds once it is cancelled.

    Raises, when it is entered or awaited:
        ConnectError: no URL is given, it is none of a Redis, or `prefix` has braces.
        BusUnavailable: nothing answers there.
        BusRefused: Redis lets nobody in by these credentials or certificates.
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
    loop = _running_loop()
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
    return Client(bus, client if client is not None else f"{socket.gethostname()}:{os.getpid()}", presence, loop)


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


class Client:
    """Made by `connect`. Any task of its event loop may use it.

    An argument of the wrong type is a `TypeError`, or, in a submission, a `TraceRejected` with its field. Whatever asks
    Redis raises `BusUnavailable` where that does not answer for as long as the client is patient, `BusRefused` where it
    refuses, `BusFull` where it has no memory left, and `ClientClosed` once the client is: but for `BusFull` these are
    `ConnectError`s.
    """

    def __init__(self, bus: Bus, name: str, presence: Presence, loop: asyncio.AbstractEventLoop) -> None:
        self._bus: Bus | None = bus
        self._loop = loop
        self._url = bus.url
        self._name = name
        self._presence = presence
        self._registry: dict[str, list[EngineInfo]] = {}
        #: What its engines say together of each model, as far as was asked.
        self._infos: dict[str, ModelInfo] = {}
        #: Of many traces that are started at the same time, the first are sent while the others are made.
        self._turns = Turns(_AT_ONCE)
        #: Those of a model's engines that differ, built once for the engines that serve it.
        self._trees: dict[str, tuple[tuple[str, ...], list[ModuleTree]]] = {}
        self._registry_read = Refreshed(self._read_registry)
        self._queueing: Queueing | None = None
        self._closing = False

    async def aclose(self) -> None:
        """Close it: no task or connection is left, and its traces that still run and are not detached are cancelled.

        Leaving `async with tracewire.connect(...)` does so. A second call does nothing.
        """
        bus, self._closing = None if self._closing else self._bus, True
        if bus is None:
            return
        try:
            if self._queueing is not None:
                await self._queueing.empty()
        finally:
            with anyio.CancelScope(shield=True):
                if self._queueing is not None:
                    await self._queueing.aclose()
                self._bus = None
                await self._presence.aclose()
                await bus.aclose()

    @property
    def url(self) -> str:
        """URL of the Redis, for other processes to connect to."""
        return self._url

    def __repr__(self) -> str:
        return f"<Client of {redacted(self._url)}{'' if self._bus else ', closed'}>"

    def _open_bus(self) -> Bus:
        if self._bus is None:
            raise ClientClosed("the client is closed")
        if _running_loop() not in (None, self._loop):
            # Its connections would break under those who use them there.
            raise TracewireError(
                "the client belongs to another event loop: connect() in each, or call it by anyio.from_thread.run"
            )
        return self._bus

    def _queue(self, tracer: Tracer) -> None:
        """Submit a trace in the background; this client's end waits for it."""
        from tracewire.traces.tracer import Queueing

        self._open_bus()
        if self._queueing is None:
            self._queueing = Queueing(self._open_bus().patience_s)
        self._queueing.add(tracer)

    # --- models -------------------------------------------------------------------------------------------------------

    async def models(self) -> list[ModelInfo]:
        """The models that live engines serve now."""
        await self._look(0)
        return [ModelInfo.of(engines) for engines in self._registry.values()]

    async def engines(self, model: Model | str | None = None) -> list[Engine]:
        """The engines that live now (of one model, if one is named), by model, then by when they started."""
        await self._look(0)
        wanted = None if model is None else _asked_model(model)
        found = (engine for engines in self._registry.values() for engine in engines)
        return [Engine.of(engine) for engine in found if wanted in (None, engine.model)]

    async def drain(
        self, engine: Engine | str, *, timeout: float | timedelta | None = None, by: str | None = None
    ) -> Draining:
        """Have an engine take nothing new, finish what it runs, and leave; its supervisor does not start it again.

        It has been asked to on return; the registry says `draining` as soon as it takes nothing new, and
        `Draining.wait` returns when it has left. What has not ended after `timeout` seconds
        is put back, ahead of what came later, and runs anew on another engine; without, it takes as long as its traces
        do, paused ones among them. Asking again does no harm; of several timeouts the earliest counts.

        Raises:
            UnknownEngine: no such engine lives. Names those that do.
            EngineTooOld: it is of a version that cannot be asked to. SIGTERM drains it.
            BusUnavailable: Redis does not answer; it may have been asked.
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
        if not drained.drains:
            raise EngineTooOld(name, drained.schema)
        bus = self._open_bus()
        with bus_errors():
            await bus.drain(name, by=self._name if by is None else check_text("by", by), within_s=seconds)
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
        return await self._find(name, wait_for_engine, 0)

    async def _find(self, name: str, wait_for_engine: float | None, age: float = _REGISTRY_AGE) -> Model:
        await self._look(age)
        if name not in self._registry:
            await self._look(0)
        if name not in self._registry and wait_for_engine:
            with anyio.move_on_after(wait_for_engine):
                while name not in self._registry:
                    await anyio.sleep(0.1)
                    await self._look(0)
        if name not in self._registry:
            raise UnknownModel(name, self._registry, wait_for_engine)
        from tracewire_bus.domain.tree import ModuleTree

        engines = self._registry[name]
        names = tuple(engine.engine for engine in engines)
        known, trees = self._trees.get(name, ((), []))
        if known != names:
            different: list[EngineInfo] = []
            for engine in engines:
                if not any(_same_tree(engine, other) for other in different):
                    different.append(engine)
            trees = [ModuleTree(engine) for engine in different]
            self._trees[name] = (names, trees)
        info = self._infos.get(name)
        if info is None:
            info = self._infos[name] = ModelInfo.of(engines)
        return Model(info, trees, self)

    async def _look(self, age: float) -> None:
        """Read the registry, unless what was read is younger than `age` seconds."""
        self._open_bus()
        known = sum(map(len, self._registry.values()))
        await self._registry_read.get(age * max(1.0, known / _REGISTRY_ENGINES))

    async def _read_registry(self) -> None:
        with bus_errors():
            engines = await self._open_bus().engines()
        registry: dict[str, list[EngineInfo]] = {}
        for engine in engines:
            registry.setdefault(engine.model, []).append(engine)
        self._registry = registry
        self._infos = {}

    # --- traces -------------------------------------------------------------------------------------------------------

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
        self._open_bus()
        packed = _shared(shared)
        names = frozenset(shared or ())
        if not isinstance(detach, bool):
            raise TraceRejected("detach", f"expected True or False, got {shown(detach)}")
        first_values = _live(live)
        invokes, whole = _invokes(prompt, prompts, sampling, names), _block(block, names)
        for one in (whole, *(invoke.block for invoke in invokes)):
            if one is not None:
                _check_live(one, live)
        return Trace(
            self,
            Submission(
                trace=made_id(trace_id),
                model=_model_name(model),
                invokes=invokes,
                block=whole,
                live=first_values,
                deadline_s=_deadline(deadline),
                priority=_priority(priority),
                detach=detach,
                client=self._name,
                interventions=_interventions(interventions),
                max_attempts=_attempts(on_engine_loss, max_attempts),
                edits=_edits("edits", edits),
                shared=packed,
            ),
        )

    def subscribe(self, trace_id: str, *, since: str = "start", names: Iterable[str] | None = None) -> Subscription:
        """A trace's events: replayed from `since`, then as they come, up to and with the final.

        `since` is `"start"`, `"now"`, or the id of an event of this trace (`output.id`), after which to go on; also of
        one that it has not reached. `names` limits what is saved to these names; all events come nevertheless.

        Raises:
            UnknownPosition: `since` is none of these.
            UnknownTrace: when reading begins; no such trace was submitted, or it has expired. A service that answers
                with a stream awaits the subscription's `start()` before it answers, and so learns it in time.
        """
        _known(trace_id)
        bus = self._open_bus()
        try:
            reader = EventReader(trace_id, bus, check_text("since", since))
        except ValueError:
            raise UnknownPosition(since) from None
        return Subscription(self, trace_id, reader, names)

    def watch(
        self,
        *,
        model: Model | str | None = None,
        since: str = "now",
        group: str | None = None,
        consumer: str | None = None,
        idle: float = 60.0,
    ) -> Watch:
        """What becomes of all traces, whoever submitted them: an async iterator of `Lifecycle`
        events, which has no end. It has one connection of its own, and waits while Redis is away.

        `model` limits it to one model's traces. `since` is `"now"`, `"start"` (what is kept: some 2000 events of each
        64th part of all traces, for a day), or the `position` of an earlier watch.

        With a `group`, the watches of that group share the events, across processes: each goes to one of them, and is
        acknowledged when that one asks for the next. The group is made by its first watch, from `since` on, and then
        remembers by itself where it is. `consumer` names this watch in its group (by default, the client's name): one
        that was killed is given what it had not acknowledged when it comes back under its name. Others take that over
        when it has been idle for `idle` seconds, which is therefore how long the handling of one event may take. An
        event may come twice, then, but none is left out.

        Raises:
            ValueError: `since` is none of these, a name is empty, there is a `consumer` without a `group`, or `idle` is
                not positive.
        """
        bus = self._open_bus()
        check_text("since", since)
        wanted = None if model is None else _asked_model(model)
        if group is None:
            if consumer is not None:
                raise ValueError(f"consumer: expected a group with it, got {shown(consumer)} alone")
            return Watch(bus.watch(since), wanted)
        name = self._name if consumer is None else consumer
        for field, value in (("group", group), ("consumer", name)):
            if not check_text(field, value):
                raise ValueError(f"{field}: expected a name, got an empty one")
        if not check_seconds("idle", idle):
            raise ValueError("idle: expected more than 0 seconds")
        return Watch(bus.watch_group(group, name, since, idle), wanted)

    async def watch_groups(self) -> list[str]:
        """The names of the groups that watches share events in."""
        with bus_errors():
            return await self._open_bus().watch_groups.names()

    async def remove_watch_group(self, group: str) -> bool:
        """Forget a group, with what was not acknowledged in it. Returns whether there was one."""
        with bus_errors():
            return await self._open_bus().watch_groups.remove(check_text("group", group))

    # --- standing interventions ---------------------------------------------------------------------------------------

    def edits(self, model: Model | str) -> Edits:
        """The standing interventions of a model: installed on all its engines, and run on requests from then on."""
        self._open_bus()
        return Edits(self, _asked_model(model))

    # --- dead letters -------------------------------------------------------------------------------------------------

    async def dead_letters(self, after: str = "", count: int = 100) -> list[DeadLetter]:
        """Submissions that were given up: no engine could read them, or each that ran them was lost. The oldest first,
        up to `count`, of those that came after the dead letter of id `after`. Some 10000 are kept.

        Raises:
            BusUnavailable: Redis does not answer.
            ValueError: `after` is no dead letter's id, or `count` is no positive integer.
        """
        if check_text("after", after) and not is_entry_id(after):
            raise ValueError(f"after: expected a dead letter's id, got {shown(after)}")
        if type(count) is not int or not 0 < count < 2**31:
            raise ValueError(f"count: expected a positive integer, got {shown(count)}")
        with bus_errors():
            found = await self._open_bus().queue.dead_letters(after, count)
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
        bus = self._open_bus()
        with bus_errors():
            found = await bus.queue.find_dead_letter(id_) if is_entry_id(id_) else None
            if found is None:
                raise UnknownDeadLetter(id_)
            submission = await fresh(DeadLetter.of(found), bus, self._name)
            model = await self._find(submission.model, None)
            with refusals(submission.model):
                await bus.submit(submission, model.info.queue_limit, model.info.retention_s or None)
            await bus.queue.drop_dead_letter(id_)
        return submission.trace

    async def drop_dead_letter(self, id_: str) -> bool:
        """Remove a dead letter. Returns whether it was there.

        Raises:
            BusUnavailable: Redis does not answer.
        """
        bus = self._open_bus()
        with bus_errors():
            return is_entry_id(id_) and await bus.queue.drop_dead_letter(id_)

    # --- what is asked of traces --------------------------------------------------------------------------------------

    async def live(self, trace_id: str) -> LiveState:
        """A trace's live parameters as they are now: their version (0: as declared) and their values.

        Raises:
            UnknownTrace: no such trace was submitted, or it has expired.
        """
        _known(trace_id)
        with bus_errors():
            try:
                return await self._open_bus().records.live(trace_id)
            except TraceMissing:
                raise UnknownTrace(trace_id) from None

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

        Any client may, whoever submitted the trace; changes count in the order in which the bus took them. It is
        accepted on return. A `Steered` event then says from which token on it holds: the first
        that is sampled in a step which begins after the engine has heard of it. `if_version` makes it conditional: it
        is accepted only if the live parameters are still at that version. `by` says who made it, if not this client.
        Floating-point arrays of another precision are converted to the declared one. Parameters that are called as one
        of these arguments go into `values`.

        Raises:
            SteerRejected: a name was not declared, or a value is not finite or not of the declared type and shape.
            VersionConflict: the version is another.
            TraceEnded: the trace has ended, or is about to.
            UnknownTrace: no such trace was submitted, or it has expired.
            BusUnavailable: Redis does not answer; the change may have been accepted.
        """
        from tracewire_bus.wire.live_values import LiveError, cast_to, live_values

        _known(trace_id)
        if values is not None and not isinstance(values, Mapping):
            raise SteerRejected(trace_id, "live", f"expected a dict of live parameters, got {shown(values)}")
        given = {**(values or {}), **more}
        if not given:
            raise SteerRejected(trace_id, "live", "expected at least one live parameter to change, got none")
        if if_version is not None and (isinstance(if_version, bool) or not isinstance(if_version, int)):
            raise SteerRejected(trace_id, "if_version", f"expected a version's number, got {shown(if_version)}")
        if by is not None and not is_sendable_text(by):
            raise SteerRejected(trace_id, "by", f"expected who makes the change, as text, got {shown(by)}")
        try:
            prepared = live_values(given)
        except LiveError as error:
            raise SteerRejected(trace_id, f"live.{error.name}" if error.name else "live", error.message) from None
        with bus_errors():
            while True:
                try:
                    return await self._open_bus().records.steer(
                        trace_id, prepared, by=self._name if by is None else by, if_version=if_version
                    )
                except SteerRefused as error:
                    fitting = cast_to(prepared[error.name], error.declared) if error.reason == "form" else None
                    if fitting is not None:
                        prepared[error.name] = fitting
                        continue
                    if error.reason == "version":
                        raise VersionConflict(trace_id, str(error), error.version) from None
                    field = f"live.{error.name}" if error.name else "live"
                    raise SteerRejected(trace_id, field, str(error), reason=error.reason) from None
                except RecordEnded:
                    raise TraceEnded(trace_id) from None
                except TraceMissing:
                    raise UnknownTrace(trace_id) from None

    async def cancel(self, trace_id: str, reason: str = "", *, by: str | None = None) -> bool:
        """Have a trace end now, as `cancelled`, queued or running. Any client may; `reason`, and by whom, is told.

        Returns whether it will: `False` if it had ended already. Its engine stops within two steps; what was generated
        and saved until then stays readable.

        Raises:
            UnknownTrace: no such trace was submitted, or it has expired.
        """
        _known(trace_id)
        check_text("reason", reason)
        who = self._name if by is None else check_text("by", by)
        bus = self._open_bus()
        with bus_errors():
            try:
                await bus.cancel(trace_id, by=who, reason=reason)
            except RecordEnded:
                return False
            except TraceMissing:
                raise UnknownTrace(trace_id) from None
        return True

    async def pause(self, trace_id: str, *, by: str | None = None) -> bool:
        """Hold a trace where it is, within two steps, until it is resumed; nobody else on its engine waits for it.

        A `Paused` event says so. Its deadline goes on to count, and it can be steered and cancelled
        meanwhile. It keeps its place in the engine's memory as long as nobody else needs that; it is then computed anew
        when it is resumed. One that is still queued is held right after its beginning. Returns whether it was not
        paused already.

        Raises:
            TraceEnded: the trace has ended, or is about to.
            UnknownTrace: no such trace was submitted, or it has expired.
        """
        return await self._pause(trace_id, by, resume=False)

    async def resume(self, trace_id: str, *, by: str | None = None) -> bool:
        """Let a paused trace go on; `Resumed` says so. Returns whether it was paused.

        Raises:
            TraceEnded: the trace has ended, or is about to.
            UnknownTrace: no such trace was submitted, or it has expired.
        """
        return await self._pause(trace_id, by, resume=True)

    async def _pause(self, trace_id: str, by: str | None, *, resume: bool) -> bool:
        _known(trace_id)
        who = self._name if by is None else check_text("by", by)
        with bus_errors():
            try:
                return await self._open_bus().records.pause(trace_id, by=who, resume=resume)
            except RecordEnded:
                raise TraceEnded(trace_id) from None
            except TraceMissing:
                raise UnknownTrace(trace_id) from None

    async def state(self, trace_id: str) -> State:
        """A trace's folded state now: replayed up to its present last event.

        Raises:
            UnknownTrace: no such trace was submitted, or it has expired.
        """
        _known(trace_id)
        bus = self._open_bus()
        with bus_errors():
            tail = await bus.tail_id(trace_id)
            if parse_id(tail) == (0, 0) and not await bus.exists(trace_id):
                raise UnknownTrace(trace_id)
            reader = EventReader(trace_id, bus, "0-0")
            reader.expect()
        fold = Fold()
        try:
            while parse_id(reader.position) < parse_id(tail) and await reader.next(fold) is not None:
                pass
        finally:
            with anyio.CancelScope(shield=True):
                await reader.aclose()
        return State(trace_id, fold)


def _same_tree(one: EngineInfo, other: EngineInfo) -> bool:
    return all(getattr(one, name) == getattr(other, name) for name in ("modules", "attributes", "layers", "taps"))


# --- what a submission is made of, checked before it leaves -----------------------------------------------------------


def made_id(trace_id: Any) -> str:
    if trace_id is None:
        return uuid.uuid4().hex
    if not isinstance(trace_id, str) or not _TRACE_ID.fullmatch(trace_id):
        raise TraceRejected(
            "trace_id", f"expected 1 to 128 letters, digits, '.', '_', ':' or '-', got {shown(trace_id)}"
        )
    return trace_id


def _model_name(model: Any) -> str:
    if isinstance(model, Model):
        return model.name
    if not isinstance(model, str) or not model or not is_text(model):
        raise TraceRejected("model", f"expected a model of client.model(), or its name, got {shown(model)}")
    return model


def _asked_model(model: Any) -> str:
    """A model's name that something is asked about."""
    if isinstance(model, Model):
        return model.name
    if not check_text("model", model):
        raise ValueError("model: expected a model of client.model(), or its name, got an empty one")
    return str(model)


def _invokes(prompt: Any, prompts: Any, sampling: dict[str, Any], shared: frozenset[str]) -> list[InvokeMessage]:
    if prompts is None:
        if prompt is None:
            raise TraceRejected("prompt", "expected a prompt (text, token ids or chat messages), or prompts=[...]")
        return [_invoke("prompt", prompt, sampling, shared)]
    if prompt is not None:
        raise TraceRejected("prompts", "expected either a prompt or prompts=[...], got both")
    if isinstance(prompts, str | bytes | Mapping | Prompt):
        raise TraceRejected("prompts", f"expected a list of prompts, got {shown(prompts)}")
    try:
        several = list(prompts)
    except TypeError:
        raise TraceRejected("prompts", f"expected a list of prompts, got {shown(prompts)}") from None
    if not several:
        raise TraceRejected("prompts", "expected at least one prompt, got an empty list")
    return [_invoke(f"prompts[{index}]", one, sampling, shared) for index, one in enumerate(several)]


def _invoke(field: str, prompt: Any, sampling: dict[str, Any], shared: frozenset[str]) -> InvokeMessage:
    params = {name: _plain(f"sampling.{name}", value) for name, value in sampling.items()}
    own = f"{field}." if field != "prompt" else ""
    if isinstance(prompt, Prompt):
        params |= {name: _plain(f"{own}sampling.{name}", value) for name, value in prompt.sampling.items()}
    lora = params.pop("lora", None)
    if lora is not None and (not isinstance(lora, str) or not lora):
        raise TraceRejected("lora", f"expected the name of an adapter, got {shown(lora)}")
    message = _prompt(field, prompt.prompt if isinstance(prompt, Prompt) else prompt, params)
    message.lora = lora
    if isinstance(prompt, Prompt):
        message.block = _block(prompt.block, shared, f"{own}block")
        message.edits = _edits(f"{own}edits", prompt.edits)
    return message


def _prompt(field: str, prompt: Any, params: dict[str, Any]) -> InvokeMessage:
    if isinstance(prompt, Mapping) and "multi_modal_data" in prompt:
        rest = {name: value for name, value in prompt.items() if name != "multi_modal_data"}
        message = _prompt(field, rest, params)
        message.media = packed_media(f"{field}.multi_modal_data", prompt["multi_modal_data"])
        return message
    if isinstance(prompt, Mapping):
        prompt = _of_mapping(field, prompt)
    if isinstance(prompt, str):
        if not prompt:
            raise TraceRejected(field, "the prompt is empty")
        return InvokeMessage(prompt=_plain(field, prompt), sampling=params)
    if isinstance(prompt, bytes):
        raise TraceRejected(field, f"expected text, token ids or chat messages, got {shown(prompt)}")
    listed = prompt.tolist() if hasattr(prompt, "tolist") else prompt
    try:
        items = list(listed)
    except TypeError:
        raise TraceRejected(field, f"expected text, token ids or chat messages, got {shown(prompt)}") from None
    if not items:
        raise TraceRejected(field, "the prompt is empty")
    if all(isinstance(item, Mapping) for item in items):
        return InvokeMessage(
            messages=[_message(f"{field}[{index}]", item) for index, item in enumerate(items)],
            sampling=params,
        )
    if all(type(item) is int and 0 <= item < 2**63 for item in items):
        return InvokeMessage(token_ids=items, sampling=params)
    for index, item in enumerate(items):
        if isinstance(item, Mapping | bool) or not hasattr(item, "__index__"):
            raise TraceRejected(f"{field}[{index}]", f"expected token ids or chat messages, got {shown(item)}")
        if not 0 <= int(item) < 2**63:
            raise TraceRejected(f"{field}[{index}]", f"expected a token id, which is not negative, got {shown(item)}")
    return InvokeMessage(token_ids=[int(item) for item in items], sampling=params)


def _of_mapping(field: str, prompt: Mapping[str, Any]) -> Any:
    """Text or token ids of one of vLLM's prompts, or of a tokenizer's output."""
    if set(prompt) == {"prompt"}:
        return prompt["prompt"]
    if set(prompt) == {"prompt_token_ids"}:
        return prompt["prompt_token_ids"]
    if "input_ids" not in prompt:
        raise TraceRejected(
            field,
            "expected text, token ids, chat messages, or a dict with prompt, prompt_token_ids or input_ids, "
            f"got {shown(prompt)}",
        )
    ids, mask = (_row(prompt.get(name)) for name in ("input_ids", "attention_mask"))
    if mask is None:
        return ids
    if len(mask) != len(ids):
        raise TraceRejected(f"{field}.attention_mask", f"expected {len(ids)} numbers, one a token, got {len(mask)}")
    return [token for token, kept in zip(ids, mask, strict=True) if kept]


def _row(values: Any) -> Any:
    """A list of numbers, or the only row of a table of them."""
    if hasattr(values, "tolist"):
        values = values.tolist()
    if isinstance(values, list | tuple) and len(values) == 1 and isinstance(values[0], list | tuple):
        return values[0]
    return values


def _message(field: str, message: Mapping[str, Any]) -> dict[str, Any]:
    if not isinstance(message.get("role"), str):
        raise TraceRejected(f"{field}.role", f"expected a chat message with a role, got {shown(message.get('role'))}")
    if "content" not in message:
        raise TraceRejected(f"{field}.content", "expected a chat message with a content")
    parts = message["content"]
    for index, part in enumerate(parts if isinstance(parts, list | tuple) else ()):
        kind = part.get("type", "text") if isinstance(part, Mapping) else "text"
        if kind != "text":
            raise TraceRejected(
                f"{field}.content[{index}]",
                f"expected text, got {kind!r}: media are not taken in chat messages (images are, as "
                '{"prompt": text, "multi_modal_data": {"image": array}})',
            )
    plain = _plain(field, message)
    assert isinstance(plain, dict)
    return plain


def _plain(field: str, value: Any, depth: int = 0) -> Any:
    """`value` if it is made of plain values only; scalars of NumPy and torch become Python's."""
    if depth > 32:
        raise TraceRejected(field, "the value nests too deep, or refers to itself")
    if isinstance(value, str) and not is_text(value):
        raise TraceRejected(field, f"expected text, got half of a surrogate pair in {shown(value)}")
    if isinstance(value, int) and not -(2**63) <= value < 2**64:
        raise TraceRejected(field, f"expected an integer of at most 64 bits, got {shown(value)}")
    if isinstance(value, float) and math.isnan(value):
        raise TraceRejected(field, "expected a number, got NaN")
    if value is None or isinstance(value, bool | str | int | float):
        for base in (bool, int, float, str):
            if isinstance(value, base):
                return base(value)
        return value
    if isinstance(value, Mapping):
        result = {}
        for key, item in value.items():
            if not isinstance(key, str | int):
                raise TraceRejected(field, f"expected keys that are strings or integers, got {shown(key)}")
            _plain(field, key)
            result[key] = _plain(f"{field}.{key}", item, depth + 1)
        return result
    if isinstance(value, list | tuple | set | frozenset):
        items = sorted(value, key=repr) if isinstance(value, set | frozenset) else value
        return [_plain(f"{field}[{index}]", item, depth + 1) for index, item in enumerate(items)]
    if getattr(value, "shape", None) == () and hasattr(value, "item"):
        return _plain(field, value.item(), depth + 1)
    raise TraceRejected(
        field, f"expected a number, a string, None, or a list or dict of them, got {type_name(type(value))}"
    )


def _is_intervention(value: Any) -> bool:
    return isinstance(value, Intervention)


def _block(block: Any, shared: frozenset[str] = frozenset(), field: str = "block") -> Block | None:
    if block is None or isinstance(block, Block):
        return block
    if isinstance(block, Intervention):
        return block.block(shared)
    advice = ": decorate it with @tracewire.intervention" if callable(block) else ""
    if callable(block) and isinstance(inspect.unwrap(block, stop=_is_intervention), Intervention):
        advice = ": decorators do not travel; take the one above @tracewire.intervention away"
    raise TraceRejected(field, f"expected an intervention, got {shown(block)}{advice}")


def _edits(field: str, edits: Any) -> list[str] | None:
    if edits is None:
        return None
    if isinstance(edits, str | bytes | Mapping) or not isinstance(edits, Iterable):
        raise TraceRejected(field, f"expected a list of names of edits, got {shown(edits)}")
    names = list(edits)
    for name in names:
        if not is_sendable_text(name):
            raise TraceRejected(field, f"expected names of edits, got {shown(name)}")
    return names


def _interventions(interventions: Any) -> list[Declared]:
    from tracewire_bus.domain.intervention_checks import DeclarationError, normalized

    if isinstance(interventions, str | bytes | Mapping) or not isinstance(interventions, Iterable):
        raise TraceRejected("interventions", f"expected a list of interventions, got {shown(interventions)}")
    try:
        return normalized(list(interventions))
    except DeclarationError as error:
        raise TraceRejected(error.field, error.message) from None


#: The most that the first values of what a trace shares may take, packed, in bytes: they go with each of its requests.
_MOST_SHARED = 2**20


def _shared(shared: Any) -> bytes:
    from tracewire_bus.wire.values import Unsavable, is_array, pack

    if shared is not None and not isinstance(shared, Mapping):
        raise TraceRejected("shared", f"expected a dict of shared values by name, got {shown(shared)}")
    for name, value in (shared or {}).items():
        if not isinstance(name, str) or not name.isidentifier() or keyword.iskeyword(name):
            raise TraceRejected("shared", f"expected names that a block can use, got {shown(name)}")
        if not isinstance(value, list | dict) and not is_array(value):
            raise TraceRejected(
                f"shared.{name}",
                f"expected a list, a dict or an array, which blocks change in place, got {shown(value)}",
            )
        try:
            pack(value)
        except Unsavable as error:
            raise UntransportableVariable(name, str(error), field=f"shared.{name}") from None
    packed = pack(dict(shared or {}))
    if len(packed) > _MOST_SHARED:
        raise TraceRejected("shared", f"expected first values of at most {_MOST_SHARED} bytes, got {len(packed)}")
    return packed


def _live(live: Any) -> bytes:
    from tracewire_bus.wire.live_values import LiveError, joined, live_values

    if live is not None and not isinstance(live, Mapping):
        raise TraceRejected("live", f"expected a dict of live parameters' first values, got {shown(live)}")
    try:
        prepared = live_values(live or {})
    except LiveError as error:
        if error.name:
            raise UntransportableVariable(error.name, error.message, field=f"live.{error.name}") from None
        raise TraceRejected("live", error.message) from None
    return joined({name: value.packed for name, value in prepared.items()})


def _check_live(block: Block, live: Any) -> None:
    """Refuse a block that reads a live parameter which the trace does not declare.

    Reads inside a `try` are left to the block.
    """
    declared = sorted(live or {})
    for name, line in live_reads(block.source, *block.parameters[1:]):
        if name not in declared:
            near = difflib.get_close_matches(name, declared, 1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise TraceRejected(
                f"live.{name}",
                f"the block reads live.{name}, and the trace declares {', '.join(declared) or 'none'}{hint}",
                filename=block.filename,
                line=block.first_line + line - 1,
            )


def _deadline(deadline: Any) -> float | None:
    if deadline is None:
        return None
    seconds = deadline.total_seconds() if isinstance(deadline, timedelta) else deadline
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 < seconds <= 1e300:
        raise TraceRejected("deadline", f"expected a positive number of seconds or a timedelta, got {shown(deadline)}")
    return float(seconds)


def _attempts(on_engine_loss: str, most: int) -> int:
    if on_engine_loss not in ("restart", "fail"):
        raise TraceRejected("on_engine_loss", f"expected 'restart' or 'fail', got {shown(on_engine_loss)}")
    if type(most) is not int or not 0 < most <= 100:
        raise TraceRejected("max_attempts", f"expected a number from 1 to 100, got {shown(most)}")
    return 1 if on_engine_loss == "fail" else most


def _priority(priority: Any) -> int:
    if isinstance(priority, bool) or not isinstance(priority, int):
        raise TraceRejected("priority", f"expected an integer, got {shown(priority)}")
    if abs(priority) > _MOST_PRIORITY:
        raise TraceRejected("priority", f"expected an integer of at most 53 bits, got {shown(priority)}")
    return priority


def _known(trace_id: Any) -> None:
    """Whether somebody's trace could have this id."""
    if not isinstance(trace_id, str):
        raise TypeError(f"expected a trace's id, got {shown(trace_id)}")
    if not is_text(trace_id):
        raise UnknownTrace(trace_id)
