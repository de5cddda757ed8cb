"""The client of a bus: finds models, submits traces, and follows and controls any trace by its id."""

from __future__ import annotations

import os
from collections.abc import Generator, Iterable, Mapping, Sequence
from os import PathLike
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypedDict, Unpack, overload

from tracewire.admin.dead_letters import DeadLetters
from tracewire.admin.edits import Edits
from tracewire.admin.engines import Engines
from tracewire.admin.models import Models
from tracewire.admin.server import Server
from tracewire.admin.traces import Traces
from tracewire.admin.watch import Watch, WatchGroups
from tracewire.capture.intervention import Intervention
from tracewire.library.resource import Library
from tracewire.traces.control import check_trace_id
from tracewire.traces.event_reader import EventReader
from tracewire.traces.model import Model, model_name
from tracewire.traces.session import Session
from tracewire.traces.subscription import Subscription
from tracewire.traces.trace import Trace
from tracewire_bus.transport.urls import redacted
from tracewire_bus.wire.messages import Block, DeclaredIntervention

from .checks import Duration, check_limit, check_seconds, check_text, shown
from .client_control import ControlMethods
from .client_keys import proofs_of
from .client_recorder import RecorderMethods
from .errors import AlreadyEntered, InvalidUrl, UnknownPosition
from .experiments import Experiments
from .options import HarvestOptions, TraceOptions
from .progress import HarvestProgress
from .submission import PromptInput, make_submission, split_options

__all__ = ["Client", "connect"]

_NO_URL = (
    "no URL: pass one (commands: --url), or set TRACEWIRE_URL "
    "(redis://host:port, or embedded:// for a private Redis that ends with this client); "
    "`tracewire up demo` starts a Redis with an engine, and prints the line that sets the variable"
)


class KeyOptions(TypedDict, total=False):
    """The keys of a client (`docs/security.md`).

    `key` is the path of a key file (`tracewire keys new`), by default that of the variable `TRACEWIRE_KEY`: the client
    signs what it submits, its changes, orders and edits. `engine_keys` are public keys of engines, in hexadecimal: a
    trace whose final none of them has signed raises `UnverifiedFinal`. A key that cannot be used raises `InvalidKey`.
    """

    key: str | PathLike[str] | None
    engine_keys: Sequence[str]


class ClientOptions(KeyOptions, total=False):
    """The keyword arguments of `Client` and of `connect`."""

    prefix: str
    name: str | None
    lease_ttl: Duration
    retry_timeout: Duration | None
    read_interval: Duration | None


def connect(url: str | None = None, **options: Unpack[ClientOptions]) -> Connecting:
    """A connected client of the bus at `url`. Leaving its `async with` closes it; an awaited one is closed by `aclose`.

        async with tracewire.connect(url) as client: ...

        client = await tracewire.connect(url)  # in a notebook, or where a service starts
        await client.aclose()

    The arguments and the errors are those of `Client`. To connect a client that exists already, call `Client.connect`.
    """
    return Connecting(Client(url, **options))


class Connecting:
    """A client that is not connected yet: enter it with `async with`, or await it."""

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


def _address(url: str | None) -> str:
    address = os.environ.get("TRACEWIRE_URL") if not url else check_text("url", url)
    if not address:
        raise InvalidUrl(_NO_URL)
    return address


class Client(ControlMethods, RecorderMethods, Experiments):
    """A client of the bus at `url`. Making one does no I/O. Entering it connects it, and so does `connect`.

        async with tracewire.Client(url) as client: ...

    `url` is the URL of a Redis: `redis://`, `rediss://`, `unix://`, `redis+sentinel://host:port,host:port/service` or
    `redis+cluster://host:port,host:port` (see `docs/redis.md`). `embedded://` starts a private Redis that ends with the
    client; other processes connect to `client.url`. Without a `url`, the client uses the variable `TRACEWIRE_URL`.
    `prefix` stands before every key. `name` is the client's name for the engines, which serve clients in turns; the
    default is the host's name and the process's id. `key` and `engine_keys` are in `KeyOptions`.

    A client runs on asyncio or trio and belongs to the event loop that connected it; any task of that loop may use it.
    Threads and scripts use `tracewire.blocking.Client`. The client owns its tasks and connections. Closing it ends
    them, and cancels the traces that it submitted, that still run and that are not detached. Engines cancel these
    traces, too, when the client has died, or its event loop has been blocked, for `lease_ttl` seconds. While Redis
    does not answer, a call waits for up to `retry_timeout` seconds and then raises `BusUnavailable`; with `None` it
    waits without limit. Reading a trace always waits without limit.

    The client reads the events of all its traces together, as soon as there are any. With a `read_interval`, of one
    second at most, it reads that long after its last read. It then takes less of a core, and events come later by up
    to the interval. With `None` the interval is half a millisecond for each trace that is followed, 40 ms at most.

    An argument of the wrong type raises a `TypeError`, or, in a submission, a `TraceRejected` with its field. A method
    that asks Redis raises `BusUnavailable` if Redis does not answer within `retry_timeout`, `BusRefused` if Redis
    refuses, `BusFull` if its memory is full, and `ClientClosed`. All of these but `BusFull` are `ConnectError`s.

    Attributes:
        models: the models that engines serve: `list()`, `get(name)`.
        engines: the running engines: `list()`, `get(name)`, `drain(engine)`.
        traces: the traces of all clients that were submitted of late: `list()`.
        dead_letters: the dead-letter queue: `list()`, `get(id)`, `resubmit(id)`, `drop(id)`.
        watch_groups: the groups that share what `watch` yields: `list()`, `remove(group)`.
        library: vectors, probes and autoencoders by name: `put`, `get`, `load`, `list()`, `history`, `remove`.
        server: the Redis: `info()`.

    Raises:
        ConnectError: no URL is given, the URL names no Redis, or `prefix` has braces.
        ValueError: `lease_ttl` is not at least 1 second, `retry_timeout` is negative, or `read_interval` is not between
            0 and 1 second.
    """

    def __init__(
        self,
        url: str | None = None,
        *,
        prefix: str = "tw",
        name: str | None = None,
        lease_ttl: Duration = 10.0,
        retry_timeout: Duration | None = 20.0,
        read_interval: Duration | None = 0.0,
        **keys: Unpack[KeyOptions],
    ) -> None:
        self._session = Session(
            _address(url),
            name=None if name is None else check_text("name", name),
            prefix=check_text("prefix", prefix),
            lease_ttl=check_seconds("lease_ttl", lease_ttl, 1),
            retry_timeout=check_limit("retry_timeout", retry_timeout),
            read_interval=None if read_interval is None else check_seconds("read_interval", read_interval, most=1.0),
            proofs=proofs_of(**keys),
        )
        self._entered = False
        self.models = Models(self._session)
        self.engines = Engines(self._session)
        self.traces = Traces(self._session)
        self.dead_letters = DeadLetters(self._session)
        self.watch_groups = WatchGroups(self._session)
        self.library = Library(self._session)
        self.server = Server(self._session)

    # --- life ---------------------------------------------------------------------------------------------------------

    async def connect(self) -> Self:
        """Connect the client, and return it. A second call does nothing.

        Raises:
            BusUnavailable: no server answers at the URL.
            BusRefused: Redis refuses the credentials or certificates.
            ConnectError: the URL has an unknown option, or no private Redis could be started.
            ClientClosed: the client was closed, before this call or during it.
        """
        await self._session.open()
        return self

    async def aclose(self) -> None:
        """Close the client: end its tasks and connections, and cancel its running traces that are not detached.

        Leaving the client's `async with` calls this. Any task of the client's event loop may call it, also several
        tasks at once, and also while Redis does not answer. The call first waits for the traces that a `with` has
        queued: up to `retry_timeout` and at most 60 seconds, or 2 seconds once the call is cancelled. The rest takes at
        most 10 seconds.
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

    @overload
    def trace(
        self,
        model: Model | str,
        *,
        messages: Sequence[Mapping[str, Any]],
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
        messages: Sequence[Mapping[str, Any]] | None = None,
        **options: Unpack[TraceOptions],
    ) -> Trace:
        """A trace of `block` over one prompt, or over each of `prompts`. Entering or starting the trace submits it.

        All other keywords are sampling params by vLLM's names (`SamplingOptions`), such as `max_tokens=64`;
        `extra_sampling={...}` sends params that a newer vLLM has.

        Args:
            model: a model's handle, or its name.
            prompt: one prompt: text, token ids or chat messages.
            block: the intervention that runs on each prompt without a block of its own.
            prompts: several prompts, in place of `prompt`.
            messages: chat messages in place of `prompt`, with options such as `tools` (`ChatOptions`); the answers are
                `output.message` and `result.message`.
            interventions: declared interventions (`Probe`, `Steer`, ...). They apply before the block.
            live: the live parameters that the block and the interventions read, with their first values: numbers,
                booleans, strings, bytes, and arrays of up to 1 MiB. Any client can change them while the trace runs
                (`steer`), each to a value of the same type, dtype and shape.
            deadline: seconds from the submission, or a timedelta. A trace that still runs then ends as `expired`.
            priority: lower runs first, among this client's own traces in the queue, and among all in vLLM's scheduler.
            detach: let the trace run on when its handle is left or its client ends. Otherwise the trace is cancelled.
            on_engine_loss: `"restart"`: another engine runs the trace again when its engine is lost or shut down, and
                iterating yields a `Restarted`. Without a `seed`, the engine derives one from the trace's id, so that
                each attempt samples the same tokens. `"fail"`: the trace fails with its first engine.
            max_attempts: how many engines may be lost over the trace before it fails.
            edits: names of standing interventions (`Client.edits`); by default those of scope `"all"` or `"default"`.
            trace_id: the trace's id; by default a random one. Submitting the same id twice runs the trace once; the
                handle of the second submission reads it, and does not cancel it when it is left.
            shared: first values, by name, of lists, dicts and arrays that all blocks share (`result.shared`).
            token_strings: whether the engine sends a string with each token id.
            on_lag: what the engine does if Redis takes the trace's events more slowly than the engine makes them.
                `"hold"`: it makes no tokens for the trace until Redis has taken most of them, which is the default.
                `"thin"`: it leaves out reads of declared interventions in some steps. `"spill"`: it puts saves into its
                bulk store (`--bulk`).
            schedule: changes of live parameters that are part of the trace, by the index of the sampled token from
                which on each holds, for all prompts and choices: `{20: {"alpha": 8.0}}`. `Steered` events tell them.
            forced_tokens: the first tokens of the output, in place of those that the model samples there (with several
                prompts, a list for each). The model goes on from them, and a seed's later draws stay the same. Log
                probabilities at these tokens are those of the drawn ones.
            by: the name under which the trace is submitted, by default the client's own. A service names its user here.

        Raises:
            UnknownOption: a keyword is neither an option nor a sampling param. The error names the nearest one.
            TraceRejected: the trace cannot be submitted; `field` names the part at fault.
        """
        self._session.open_bus()
        settings, sampling = split_options(options, prompts, messages)
        return Trace(self._session, make_submission(self._session.name, model, prompt, block, settings, sampling))

    def subscribe(self, trace_id: str, *, since: str = "start", names: Iterable[str] | None = None) -> Subscription:
        """A trace's events: first those from `since` on that exist already, then new ones, up to and with the final.

        `since` is `"start"`, `"now"`, `"recent"`, or the id of an event of this trace (`output.id`). `"recent"` begins
        with the last 32 events that exist, for views that show how a trace goes on. With an id, the first event read is
        the one after it; the trace need not have reached that id. `names` limits the saves in the events to
        these names; it leaves out no event.

        Raises:
            UnknownPosition: `since` is none of these.
            UnknownTrace: no such trace was submitted, or it has expired. Raised when reading begins: a service that
                answers with a stream awaits the subscription's `start()` before it answers.
        """
        check_trace_id(trace_id)
        bus = self._session.open_bus()
        try:
            wants_saves = names is None or bool(names)
            reader = EventReader(trace_id, bus, check_text("since", since), saves=wants_saves)
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
        """The lifecycle events of all traces of all clients: an endless async iterator of `Lifecycle` items.

        A watch has a connection of its own, and waits while Redis does not answer. `model` limits it to one model's
        traces. `since` is `"now"`, `"start"`, or the `position` of an earlier watch. From `"start"` it reads what Redis
        keeps: traces are spread over 64 streams, each of which keeps about 2000 events for a day.

        With a `group`, the watches of that group share the events, across processes. Each event goes to one watch, and
        is acknowledged when that watch asks for the next. The first watch makes the group, from `since` on, and Redis
        keeps the group's position. `consumer` names this watch in its group; the default is the client's name. A
        consumer that was killed and starts again under its name gets the events that it had not acknowledged. Other
        consumers take these events over when the consumer has been idle for `idle_timeout` seconds, so handling one
        event must take less. An event may be delivered twice, but none is left out.

        Raises:
            ValueError: `since` is none of these, a name is empty, `consumer` is given without a `group`, or
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

        A second call with the same arguments continues where the first one ended. Prompts that are in a shard do not
        run again, and each prompt is in the result once, even after a kill. A prompt whose own trace failed is listed
        with its error, and runs again only with `retry_failed`. `HarvestOptions` lists the options.

        Raises:
            UnknownModel: no engine serves the model.
            TraceRejected: the interventions, the block or an option cannot be submitted.
            InvalidDataset: a row is no prompt, or its key is missing or that of another row.
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
