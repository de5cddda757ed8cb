"""The running engines, as they register themselves, and the request that an engine drain."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING

import anyio
import msgspec

from tracewire.checks import Duration, check_limit, check_seconds, check_text
from tracewire.error_mapping import bus_errors
from tracewire.errors import EngineTooOld, UnknownEngine
from tracewire.traces.model import Model, model_name
from tracewire_bus.wire.codec import schema_version

from .listing import Listing

if TYPE_CHECKING:
    from tracewire.traces.session import Session
    from tracewire_bus.bus import Bus
    from tracewire_bus.wire.messages import EngineInfo

__all__ = ["Draining", "Engine", "Engines", "RedisMemory"]

#: How often `Draining.wait` checks whether the engine has left, in seconds.
_LOOK_S = 0.2


class Engine(msgspec.Struct, frozen=True):
    """A live engine.

    Attributes:
        name: the engine's name, which no earlier engine had.
        model: the name of the model that it serves.
        state: `serving`; `holding` (its traces wait until Redis has taken their events); `stalled` (its vLLM has not
            answered for a while); `draining` (it takes no new traces, and then leaves); or `lost` (its vLLM has died).
            Newer versions may have other states.
        running: how many traces it runs.
        capacity: how many traces it runs at most.
        host: the name of its machine or pod; `""` for an old engine.
        revision, dtype, max_model_len: its model's revision, dtype and context length in tokens.
        schema: the version of the schema that it writes.
        versions: its versions of tracewire, vllm, nnsight and torch.
        started_at: when it started, in seconds since the epoch by its own clock.
        malformed: how many malformed items it has found in Redis and skipped. More than 0 means that another program
            writes to Tracewire's keys.
        waiting_bytes: how many bytes of events and saves wait for Redis.
        edit_failures: for each standing intervention the number of this engine's requests on which it raised.
        edit_errors: for each standing intervention that it cannot run, or runs although it was removed, the reason.
        code: whose blocks it runs: `none`, `listed`, `signed` or `any`; `""` for an old engine.
        code_reason: why that is so.
        unsigned: whether it accepts submissions and orders that no key has signed.
        public_key: the key with which it signs finals, in hexadecimal; `""` if it signs none.
        limits: its limits on submissions and traces that differ from the defaults, by name.
        limits_reached: how often each limit was reached since the engine's start, by name.
    """

    name: str
    model: str
    state: str
    running: int
    capacity: int
    host: str
    revision: str
    dtype: str
    max_model_len: int
    schema: str
    versions: dict[str, str]
    started_at: float
    malformed: int = 0
    waiting_bytes: int = 0
    edit_failures: dict[str, int] = {}
    edit_errors: dict[str, str] = {}
    code: str = ""
    code_reason: str = ""
    unsigned: bool = True
    public_key: str = ""
    limits: dict[str, int] = {}
    limits_reached: dict[str, int] = {}

    @classmethod
    def of(cls, info: EngineInfo) -> Engine:
        """The engine that this record of the registry describes."""
        versions = info.versions
        return cls(
            name=info.engine,
            model=info.model,
            state=info.state,
            running=info.running,
            capacity=info.capacity,
            host=info.host,
            revision=info.revision,
            dtype=info.dtype,
            max_model_len=info.max_model_len,
            schema=info.schema,
            versions={name: getattr(versions, name) for name in versions.__struct_fields__},
            started_at=info.started_at,
            malformed=info.malformed,
            waiting_bytes=info.waiting_bytes,
            edit_failures=dict(info.edit_failures),
            edit_errors=dict(info.edit_errors),
            code=info.code,
            code_reason=info.code_reason,
            unsigned=info.unsigned,
            public_key=info.public_key,
            limits=dict(info.limits),
            limits_reached=dict(info.limits_reached),
        )

    @property
    def ready(self) -> bool:
        """Whether the engine takes traces, now or as soon as Redis has taken the events that wait."""
        return self.state in ("serving", "holding")

    @property
    def can_drain(self) -> bool:
        """Whether the engine's version supports draining."""
        version = schema_version(self.schema)
        return version is None or version >= (1, 1)


class Draining:
    """The answer of `Engines.drain`: an engine that drains, and what depends on it.

    Attributes:
        engine: the engine, as it was before the request.
        others: names of the other engines that serve its model. Without any, the waiting submissions go on waiting.
        waiting: how many submissions waited for the model.
    """

    def __init__(self, bus: Bus, engine: Engine, others: tuple[str, ...], waiting: int) -> None:
        self.engine = engine
        self.others = others
        self.waiting = waiting
        self._bus = bus

    async def wait(self, *, timeout: Duration | None = None) -> None:
        """Wait for up to `timeout` seconds until the engine has left the registry; with `None` without limit.

        Raises:
            TimeoutError: the engine has not left by then.
            BusUnavailable: Redis does not answer.
            ClientClosed: the client was closed.
            ValueError: `timeout` is negative.
        """
        limit = check_limit("timeout", timeout)
        with bus_errors(), anyio.fail_after(limit):
            while await self._bus.registry.alive(self.engine.name):  # noqa: ASYNC110  (Redis sends no event)
                await anyio.sleep(_LOOK_S)

    def __repr__(self) -> str:
        return f"<Draining of {self.engine.name}>"


class RedisMemory(msgspec.Struct, frozen=True):
    """The memory of Redis: the bytes that it uses, and its limit, 0 for none."""

    used: int
    limit: int


class Engines:
    """The running engines. Available as `Client.engines`."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def list(self, *, model: Model | str | None = None) -> Listing[Engine]:
        """The running engines, or those of one `model`, by model and then by the time of their start.

        Raises:
            TypeError: `model` is neither a model nor its name.
        """
        wanted = None if model is None else model_name(model)

        async def pages() -> AsyncIterator[Sequence[Engine]]:
            yield [Engine.of(engine) for engine in await self._session.models.engines(wanted)]

        return Listing(pages)

    async def get(self, name: str) -> Engine:
        """The running engine of this name.

        Raises:
            UnknownEngine: no running engine has this name. The error names those that run.
        """
        return _found(check_text("name", name), await self.list())

    async def drain(self, engine: Engine | str, *, timeout: Duration | None = None, by: str | None = None) -> Draining:
        """Drain an engine: it takes no new traces, finishes its own, and leaves. Its supervisor does not restart it.

        The call returns once Redis has the request. The engine's state becomes `draining` as soon as the engine takes
        no new traces, and `Draining.wait` returns when the engine has left. After `timeout` seconds the engine returns
        the traces that still run to the queue, ahead of later submissions, and another engine runs them again. Without
        a `timeout` it runs all of its traces to their end, paused ones included. The call can be repeated; the earliest
        timeout counts. `by` names the author, by default this client.

        Raises:
            UnknownEngine: no running engine has this name. The error names those that run.
            EngineTooOld: its version cannot be asked to drain. SIGTERM drains it.
            BusUnavailable: Redis does not answer; the request may have been made.
            ValueError: `timeout` is negative.
        """
        name = engine.name if isinstance(engine, Engine) else check_text("engine", engine)
        seconds = None if timeout is None else check_seconds("timeout", timeout)
        author = self._session.name if by is None else check_text("by", by)
        engines = await self.list()
        drained = _found(name, engines)
        if not drained.can_drain:
            raise EngineTooOld(name, drained.schema)
        bus = self._session.open_bus()
        with bus_errors():
            await bus.registry.drain(name, by=author, within_s=seconds)
            waiting = await bus.queue.waiting(drained.model)
        others = [one.name for one in engines if one.model == drained.model and one.ready and one.name != name]
        return Draining(bus, drained, tuple(others), waiting)

    async def redis_memory(self) -> RedisMemory:
        """The memory of the Redis that takes the engines' events; of a cluster, that of one node.

        Raises:
            BusRefused: Redis's user may not ask.
            BusUnavailable: Redis does not answer.
        """
        bus = self._session.open_bus()
        with bus_errors():
            limit, used, _ = await bus.memory.usage()
        return RedisMemory(used, limit)

    def __repr__(self) -> str:
        return "<Engines>"


def _found(name: str, engines: Sequence[Engine]) -> Engine:
    for engine in engines:
        if engine.name == name:
            return engine
    raise UnknownEngine(name, [engine.name for engine in engines])
