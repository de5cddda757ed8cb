"""Live engines, as they register themselves, and engines that are asked to drain."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import anyio

from tracewire.error_mapping import bus_errors

if TYPE_CHECKING:
    from tracewire_bus.bus import Bus
    from tracewire_bus.wire.messages import EngineInfo

__all__ = ["Draining", "Engine"]

#: How often `Draining.wait` checks whether the engine has left, in seconds.
_LOOK_S = 0.2


@dataclass(frozen=True)
class Engine:
    """A live engine.

    Attributes:
        name: its name, which no engine before it had.
        model: the name of the model that it serves.
        state: `serving`; `holding` (until Redis has taken what waits for it), `draining` (it takes nothing new, and
            leaves), or `lost` (its vLLM has died). Newer versions may say more.
        running: how many traces it runs. `capacity`: how many it takes.
        host: the name of its machine, or pod. `""` if its version does not say.
        revision, dtype, max_model_len: of its model.
        schema: the schema that it writes; `versions`: of tracewire, vllm, nnsight and torch.
        started_at: when it started, in seconds since the epoch by its own clock.
        malformed: how many malformed items it has found in Redis and passed over. It should be 0: somebody else than
            Tracewire writes there.
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

    @classmethod
    def of(cls, info: EngineInfo) -> Engine:
        """What an engine registered."""
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
        )

    @property
    def ready(self) -> bool:
        """Whether it takes traces, now or as soon as Redis has taken what waits."""
        return self.state in ("serving", "holding")

    @property
    def can_drain(self) -> bool:
        """Whether its version can be asked to drain."""
        major, _, minor = self.schema.partition(".")
        return not (major.isdecimal() and minor.isdecimal()) or (int(major), int(minor)) >= (1, 1)


class Draining:
    """An engine that was asked to drain.

    Attributes:
        engine: as it was before.
        others: names of the other engines that serve its model. Where there is none, what waits goes on to wait.
        waiting: how many submissions waited for the model.
    """

    def __init__(self, bus: Bus, engine: Engine, others: tuple[str, ...], waiting: int) -> None:
        self.engine = engine
        self.others = others
        self.waiting = waiting
        self._bus = bus

    async def wait(self) -> None:
        """Wait until it has left the registry.

        Raises:
            BusUnavailable: Redis does not answer.
            ClientClosed: the client was closed.
        """
        with bus_errors():
            while await self._bus.alive(self.engine.name):  # noqa: ASYNC110  (Redis sends no event)
                await anyio.sleep(_LOOK_S)
