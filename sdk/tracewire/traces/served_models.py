"""The models that live engines serve, as a client last read them from the registry."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import anyio
import msgspec

from tracewire.error_mapping import bus_errors
from tracewire.errors import UnknownModel
from tracewire_bus.transport.tasks import Refreshed

if TYPE_CHECKING:
    from tracewire_bus.bus import Bus
    from tracewire_bus.domain.tree import ModuleTree
    from tracewire_bus.wire.messages import EngineInfo

__all__ = ["ModelInfo", "ServedModel", "ServedModels"]

#: How old the registry that a client has read may be when it submits a trace, in seconds. With more engines
#: than this number it may be older in proportion, so that reading it costs no more.
_REGISTRY_AGE_S = 1.0
_REGISTRY_ENGINES = 100
#: How often a client that waits for an engine reads the registry, in seconds.
_POLL_S = 0.1
#: How long after an outage of Redis engines take to register again at most, in seconds.
_BACK_S = 10.0


@dataclass(frozen=True)
class ModelInfo:
    """A served model, and its engines together. Any of the engines may run a trace.

    Where the engines differ, a field has the value of the engine that started first, unless it says otherwise below.

    Attributes:
        name: the model's name.
        engines: names of its engines.
        dtype, revision: of its weights.
        layer_count, hidden_size: number of decoder layers, and width of the residual stream.
        vocabulary: number of tokens of the vocabulary.
        max_model_len: the most tokens that a prompt and its output may have together.
        capacity, running: how many traces all engines run at most, and now.
        queue_limit: how many submissions may wait before more are refused, the greatest of all engines; 0: no limit.
        differs: the properties in which its engines differ (`"revision"`, `"module tree"`, ...).
        retention_s: for how many seconds a trace is kept after its end, the greatest of all engines.
        loras: the LoRA adapters that all engines have.
        path: the folder or name that the engine loaded the model from.
        config: the contents of its `config.json`.
    """

    name: str
    engines: tuple[str, ...]
    dtype: str
    revision: str
    layer_count: int
    hidden_size: int
    vocabulary: int
    max_model_len: int
    capacity: int
    running: int
    queue_limit: int
    differs: tuple[str, ...] = ()
    retention_s: float = 0.0
    loras: tuple[str, ...] = ()
    #: The media that prompts can have beside text on all of the engines: `"image"`, or nothing.
    modalities: tuple[str, ...] = ()
    path: str = ""
    config: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def of(cls, engines: list[EngineInfo]) -> ModelInfo:
        """The model that these engines serve; fields that they should agree on are the first engine's."""
        from tracewire_bus.domain.fleet import differences

        first = engines[0]
        limits = [engine.queue_limit for engine in engines]
        return cls(
            name=first.model,
            engines=tuple(engine.engine for engine in engines),
            dtype=first.dtype,
            revision=first.revision,
            layer_count=first.layer_count,
            hidden_size=first.hidden_size,
            vocabulary=first.vocabulary,
            max_model_len=first.max_model_len,
            capacity=sum(engine.capacity for engine in engines),
            running=sum(engine.running for engine in engines),
            queue_limit=max(limits) if all(limits) else 0,
            differs=tuple(differences(engines)),
            retention_s=max(engine.retention_s for engine in engines),
            loras=tuple(name for name in first.loras if all(name in engine.loras for engine in engines)),
            modalities=tuple(name for name in first.modalities if all(name in one.modalities for one in engines)),
            path=first.path,
            config=first.config,
        )


class ServedModel(msgspec.Struct, frozen=True):
    """A model with the engines that serve it. `trees` are their module trees, each once: a block must fit all."""

    info: ModelInfo
    trees: Sequence[ModuleTree]
    engines: Sequence[EngineInfo]


class ServedModels:
    """The registry as a client last read it."""

    def __init__(self, open_bus: Callable[[], Bus]) -> None:
        self._open_bus = open_bus
        self._engines: dict[str, list[EngineInfo]] = {}
        #: Made when first asked for, until the registry is read again.
        self._infos: dict[str, ModelInfo] = {}
        #: The trees of a model's engines that differ, built once for the engines that serve it.
        self._trees: dict[str, tuple[tuple[str, ...], list[ModuleTree]]] = {}
        self._registry = Refreshed(self._read)

    async def engines(self, model: str | None = None) -> list[EngineInfo]:
        """The running engines, or those of one `model`, by model and then by the time of their start."""
        await self._look(0)
        return [one for engines in self._engines.values() for one in engines if model in (None, one.model)]

    async def infos(self) -> list[ModelInfo]:
        """The models that live engines serve now."""
        await self._look(0)
        return [ModelInfo.of(engines) for engines in self._engines.values()]

    async def find(self, name: str, timeout: float = 0.0, age: float = _REGISTRY_AGE_S) -> ServedModel:
        """A model by its name, from a registry that was read at most `age` seconds ago.

        Raises:
            UnknownModel: no engine serves it, and none began to within `timeout` seconds. After an outage of Redis, the
                call waits for some seconds in any case, in which engines register again.
        """
        await self._look(age)
        if name not in self._engines:
            await self._look(0)
        if name not in self._engines:
            since_outage = anyio.current_time() - self._open_bus().broken_at
            with anyio.move_on_after(max(timeout, _BACK_S - since_outage)):
                while name not in self._engines:
                    await anyio.sleep(_POLL_S)
                    await self._look(0)
        if name not in self._engines:
            raise UnknownModel(name, self._engines, timeout or None)
        engines = self._engines[name]
        info = self._infos.get(name)
        if info is None:
            info = self._infos[name] = ModelInfo.of(engines)
        return ServedModel(info, self._trees_of(name, engines), engines)

    def forget(self) -> None:
        """Have the registry read again when it is needed next."""
        self._registry.forget()

    def _trees_of(self, name: str, engines: Iterable[EngineInfo]) -> list[ModuleTree]:
        from tracewire_bus.domain.tree import ModuleTree

        names = tuple(engine.engine for engine in engines)
        known, trees = self._trees.get(name, ((), []))
        if known != names:
            different: list[EngineInfo] = []
            for engine in engines:
                if not any(_same_tree(engine, other) for other in different):
                    different.append(engine)
            trees = [ModuleTree(engine) for engine in different]
            self._trees[name] = (names, trees)
        return trees

    async def _look(self, age: float) -> None:
        """Read the registry, unless it was read within the last `age` seconds."""
        self._open_bus()
        known = sum(map(len, self._engines.values()))
        await self._registry.get(age * max(1.0, known / _REGISTRY_ENGINES))

    async def _read(self) -> None:
        with bus_errors():
            found = await self._open_bus().registry.list()
        engines: dict[str, list[EngineInfo]] = {}
        for engine in found:
            engines.setdefault(engine.model, []).append(engine)
        self._engines = engines
        self._infos = {}


def _same_tree(one: EngineInfo, other: EngineInfo) -> bool:
    return all(
        getattr(one, name) == getattr(other, name) for name in ("modules", "attributes", "layers", "taps", "attention")
    )
