"""The client of a bus: finds models, submits traces, and follows and controls any trace by its id."""

from __future__ import annotations

import os
from collections.abc import Generator, Iterable, Mapping, Sequence
from os import PathLike
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypedDict, Unpack, overload

import anyio

from tracewire.admin.dead_letters import DeadLetters
from tracewire.admin.edits import Edits
from tracewire.admin.engines import Engines
from tracewire.admin.models import Models
from tracewire.admin.watch import Watch, WatchGroups
from tracewire.capture.intervention import Intervention
from tracewire.traces import control
from tracewire.traces.control import check_trace_id
from tracewire.traces.event_reader import EventReader
from tracewire.traces.model import Model, model_name
from tracewire.traces.session import Session
from tracewire.traces.state import State
from tracewire.traces.subscription import Subscription
from tracewire.traces.trace import Trace
from tracewire_bus.domain.fold import Fold
from tracewire_bus.store.trace_records import LiveState
from tracewire_bus.transport.urls import redacted
from tracewire_bus.wire.ids import parse_id
from tracewire_bus.wire.messages import Block, DeclaredIntervention

from .checks import Duration, check_limit, check_seconds, check_text, shown
from .error_mapping import bus_errors
from .errors import AlreadyEntered, InvalidUrl, UnknownPosition, UnknownTrace
from .options import HarvestOptions, TraceOptions
from .progress import HarvestProgress
from .submission import PromptInput, make_submission, split_options

__all__ = ["Client", "connect"]


class ClientOptions(TypedDict, total=False):
    """The keyword arguments of `Client` and of `connect`."""

    prefix: str
    name: str | None
    lease_ttl: Duration
    retry_timeout: Duration | None


def connect(url: str | None = None, **options: Unpack[ClientOptions]) -> Connecting:
    """A client of the bus at `url` that is connected: for as long as a context lasts, or until it is closed.

        async with tracewire.connect(url) as client: ...

        client = await tracewire.connect(url)  # in a notebook, or where a service starts
        await client.aclose()

    The arguments, and the errors, are those of `Client`. `Client.connect` connects one that was made before.
    """
    return Connecting(Client(url, **options))


class Connecting:
    """A client that is still to be connected: enter it with `async with`, or await it."""

    def __init__(self, client: Client) -> None:
        self._client = client

    def __await__(self) -> Generator[Any, None, Client]:
        return self._client.connect().__await__()

    async def __aenter__(self) -> Client:
        return await self._client.__aenter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._client.aclose()

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            if hasattr(Client, name) or name in self._client.__dict__:
                raise AttributeError(
                    f"connect(...) has no {name!r} before it is connected: write `async with tracewire.connect(url) as "
                    "client:`, or `client = await tracewire.connect(url)`"
                )
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")


class Client:
    """A client of the bus at `url`. Making one does no I/O; it is connected by entering it, or by `connect`.

        client = tracewire.Client(url)
        async with client: ...

    `url` is that of a Redis (`redis://`, `rediss://` or `unix://`; `redis+sentinel://host:port,host:port/service`;
    `redis+cluster://host:port,host:port`; see `docs/redis.md`), or `embedded://` for a private one that starts and ends
    with the client (`client.url` tells other processes where it is); without one, `TRACEWIRE_URL` counts. `prefix`
    stands before every key. `name` names this client to the engines, which serve clients in turns; by default it is
    the host's name and the process's id.

    A client runs on asyncio or trio, on the event loop that it was connected on, and any task there may use it; threads
    and scripts use `tracewire.blocking.Client`. The client owns all tasks and connections, and closing it ends them.
    Closing it also cancels the traces that it submitted, that still run and that are not detached. Engines cancel these
    traces, too, when the client dies, or its event loop stands still, for `lease_ttl` seconds. While Redis is away, a
    call waits for up to `retry_timeout` seconds before it raises `BusUnavailable` (`None`: for as long as it takes);
    reading a trace waits for as long as the caller does.

    An argument of the wrong type raises a `TypeError`, or, in a submission, a `TraceRejected` with its field. Each
    method that sends a request to Redis raises `BusUnavailable` if Redis does not answer within `retry_timeout`,
    `BusRefused` if it refuses, `BusFull` if it has no memory left, and `ClientClosed` if the client is closed. All of
    these but `BusFull` are `ConnectError`s.

    Attributes:
        models: the models that engines serve: `list()`, `get(name)`.
        engines: the engines that live: `list()`, `get(name)`, `drain(engine)`.
        dead_letters: submissions that were given up: `list()`, `get(id)`, `resubmit(id)`, `drop(id)`.
        watch_groups: the groups that share what `watch` yields: `list()`, `remove(group)`.

    Raises:
        ConnectError: no URL is given, the URL names no Redis, or `prefix` has braces.
        ValueError: `lease_ttl` is not at least 1 second, or `retry_timeout` is negative.
    """

    def __init__(
        self,
        url: str | None = None,
        *,
        prefix: str = "tw",
        name: str | None = None,
        lease_ttl: Duration = 10.0,
        retry_timeout: Duration | None = 20.0,
    ) -> None:
        if name is not None:
            check_text("name", name)
        address = os.environ.get("TRACEWIRE_URL") if not url else check_text("url", url)
        if not address:
            raise InvalidUrl(
                "no URL: pass one, or set TRACEWIRE_URL "
                "(redis://host:port, or embedded:// for a private Redis that ends with this client)"
            )
        self._session = Session(
            address,
            name=name,
            prefix=check_text("prefix", prefix),
            lease_ttl=check_seconds("lease_ttl", lease_ttl, 1),
            retry_timeout=check_limit("retry_timeout", retry_timeout),
        )
        self._entered = False
        self.models = Models(self._session)
        self.engines = Engines(self._session)
        self.dead_letters = DeadLetters(self._session)
        self.watch_groups = WatchGroups(self._session)

    # --- life ---------------------------------------------------------------------------------------------------------

    async def connect(self) -> Self:
        """Connect it, and return it. A second call does nothing.

        Raises:
            BusUnavailable: no server answers at the URL.
            BusRefused: Redis refuses the credentials or certificates.
            ConnectError: an option of the URL is none, or no private Redis could be started.
            ClientClosed: it was closed, now or before.
        """
        await self._session.open()
        return self

    async def aclose(self) -> None:
        """Close it: no task or connection is left, and its traces that still run and are not detached are cancelled.

        Leaving its context does so. Any task of its event loop may call it, several at once, and when Redis is away: it
        waits for up to `retry_timeout` (a minute at most) for traces that a `with` has queued, for two seconds once it
        is cancelled, and for at most ten for the rest. A second call returns when the first has closed it.
        """
        await self._session.aclose()

    async def __aenter__(self) -> Self:
        if self._entered:
            raise AlreadyEntered("this client was entered before: make another one for each async with")
        self._entered = True
        return await self.connect()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.aclose()

    @property
    def url(self) -> str:
        """URL of the Redis, for other processes to connect to."""
        return self._session.url

    def __repr__(self) -> str:
        state = ", closed" if self._session.closed else "" if self._session.opened else ", not connected"
        return f"<Client of {redacted(self.url)}{state}>"

    # --- traces -------------------------------------------------------------------------------------------------------

    @overload
    def trace(
        self,
        model: Model | str,
        prompt: PromptInput,
        block: Intervention | Block | None = None,
        **options: Unpack[TraceOptions],
    ) -> Trace: ...

    @overload
    def trace(
        self,
        model: Model | str,
        *,
        prompts: Sequence[PromptInput],
        block: Intervention | Block | None = None,
        **options: Unpack[TraceOptions],
    ) -> Trace: ...

    def trace(
        self,
        model: Model | str,
        prompt: PromptInput | None = None,
        block: Intervention | Block | None = None,
        *,
        prompts: Sequence[PromptInput] | None = None,
        **options: Unpack[TraceOptions],
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
        `result.shared`. With `token_strings=True` the engine sends a string with each token id: of outputs
        (`output.token_strings`), of prompts (`accepted.prompt_token_strings`) and of logit lenses. Everything else is
        sampling params, by vLLM's names (`SamplingOptions`): `max_tokens=64`,
        `temperature=0.0`; `extra_sampling={...}` sends those that a newer vLLM has.

        Raises:
            UnknownOption: a keyword is neither an option nor a sampling param. Names the nearest one.
            TraceRejected: something in it cannot be submitted; `field` names what.
        """
        self._session.open_bus()
        settings, sampling = split_options(options, prompts)
        return Trace(self._session, make_submission(self._session.name, model, prompt, block, settings, sampling))

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
        idle_timeout: Duration = 60.0,
    ) -> Watch:
        """The lifecycle events of all traces, this client's and others': an async iterator of `Lifecycle` items without
        an end. It has one connection of its own, and waits while Redis is away.

        `model` limits it to one model's traces. `since` is `"now"`, `"start"` (what is kept: some 2000 events of each
        64th part of all traces, for a day), or the `position` of an earlier watch.

        With a `group`, the watches of that group share the events, across processes: each goes to one of them, and is
        acknowledged when that watch asks for the next. The first watch makes the group, from `since` on. Redis keeps
        its position. `consumer` names this watch in its group (by default, the client's name). A consumer that
        was killed and comes back under its name gets the events that it had not acknowledged. Other consumers take
        these events over when it has been idle for `idle_timeout` seconds, so the handling of one event may take that
        long. An event may be delivered twice, but none is left out.

        Raises:
            ValueError: `since` is none of these, a name is empty, there is a `consumer` without a `group`, or
                `idle_timeout` is not positive.
        """
        bus = self._session.open_bus()
        check_text("since", since)
        wanted = None if model is None else model_name(model)
        if group is None:
            if consumer is not None:
                raise ValueError(f"consumer: expected a group with it, got {shown(consumer)} alone")
            return Watch(bus.watch(since), wanted)
        name = self._session.name if consumer is None else consumer
        for field, value in (("group", group), ("consumer", name)):
            if not check_text(field, value):
                raise ValueError(f"{field}: expected a name, got an empty one")
        idle = check_seconds("idle_timeout", idle_timeout)
        if not idle:
            raise ValueError("idle_timeout: expected more than 0 seconds")
        return Watch(bus.watch_group(group, name, since, idle), wanted)

    # --- harvests -----------------------------------------------------------------------------------------------------

    async def harvest(
        self,
        model: Model | str,
        prompts: Any,
        interventions: Sequence[DeclaredIntervention] = (),
        *,
        to: str | PathLike[str],
        block: Intervention | Block | None = None,
        **options: Unpack[HarvestOptions],
    ) -> HarvestProgress:
        """Run `interventions`, or a `block`, on each prompt of a data set, and write what they save to `to`.

            probe = tracewire.Probe("hs", "residual(*)", positions="all")
            done = await client.harvest("demo", "prompts.jsonl", [probe], to="s3://bucket/acts")

        `prompts` is the path or URL of a JSONL or Parquet file, or an iterable or async iterable of prompts or of dicts
        with a column of prompts, such as a `datasets.Dataset`. `to` is a folder or any URL of fsspec. A prompt's trace
        samples one token unless `max_tokens` says otherwise. `tracewire.harvest.open(to)` reads what was written.

        Made again with the same arguments, it goes on where it was: prompts that are in a shard are not run again, and
        each prompt is in the result once, whatever was killed meanwhile. A prompt whose own trace failed is listed with
        its error, and not run again unless `retry_failed` asks for it. `HarvestOptions` says what can be set.

        Raises:
            UnknownModel: no engine serves the model.
            TraceRejected: the interventions, the block or an option cannot be submitted.
            InvalidDataset: a row is no prompt, or its key is missing or not its own.
            HarvestConflict: `to` has a harvest of something else, or another client writes there.
            ShardDamaged: a shard that an earlier run wrote is damaged, and `repair` is not set.
            StoreFull: `to` has no room left.
            StoreRefused: `to` is read-only, or refuses the credentials.
            StoreUnavailable: `to` does not answer.
            LibraryMissing: the extra `tracewire[harvest]` is not installed.
            TracewireError: Redis or all engines are away for longer than `patience`, or `max_failures` prompts failed
                one after the other: the error of the last one.
        """
        from tracewire.harvest.start import harvest

        self._session.open_bus()
        return await harvest(self, model, prompts, interventions, block, to, options)

    # --- standing interventions ---------------------------------------------------------------------------------------

    def edits(self, model: Model | str) -> Edits:
        """The standing interventions of a model: installed on all its engines, and run on requests from then on."""
        self._session.open_bus()
        return Edits(self._session, model_name(model))

    # --- control ------------------------------------------------------------------------------------------------------

    async def get_live(self, trace_id: str) -> LiveState:
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

    async def get_state(self, trace_id: str) -> State:
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
