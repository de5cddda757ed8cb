"""A model as a client sees it: what its engines published of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tracewire.errors import TracewireError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tracewire.client import Client, PromptInput
    from tracewire_bus.domain.tree import ModuleTree
    from tracewire_bus.wire.messages import EngineInfo

    from .tracer import Tracer

__all__ = ["Model", "ModelInfo"]


@dataclass(frozen=True)
class ModelInfo:
    """A model that is served now, and by how many engines. `capacity` and `running` count traces, on all of them.

    `dtype` and `revision` are the weights', `vocabulary` counts its tokens, `max_model_len` those that
    a prompt and its output may have together at most, and `loras` are the adapters that all of its engines have.
    `queue_limit` is how many submissions may wait before more are refused, the most that any engine says; 0 for any
    number. `differs` names what its engines do not have in common (`"revision"`, `"module tree"`, ...): any of them may
    run a trace, and each other field is what the one that started first says. `retention_s` is how long a trace is kept
    after its end, in seconds, the most that any engine says.
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
    #: What a prompt can have beside text, on all of them: `"image"`, or nothing.
    modalities: tuple[str, ...] = ()

    @classmethod
    def of(cls, engines: list[EngineInfo]) -> ModelInfo:
        """What the engines of one model say together; what they should agree on is the first one's word."""
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
        )


class Model:
    """A handle of a served model: its name, and the module tree that a block can reach.

    It prints as the tree. Attributes that it does not have itself are the tree's, so that `model.model.layers[2]` can
    be explored as in a block; a path that does not exist is an error that names the nearest one which does. `trees`
    are those of all its engines, where they differ: a block must fit each.
    """

    def __init__(self, info: ModelInfo, trees: Sequence[ModuleTree], client: Client | None = None) -> None:
        self.name = info.name
        self.info = info
        self.tree = trees[0]
        self.trees = tuple(trees)
        self._client = client

    def trace(
        self, prompt: PromptInput | None = None, /, *, prompts: Sequence[PromptInput] | None = None, **options: Any
    ) -> Tracer:
        """A trace whose block is the body of a `with`, which is captured as source and runs on the engine only.

            with model.trace("The Eiffel Tower is in", max_tokens=5) as tracer:
                logits = model.logits.save()
            async for output in tracer:
                print(output.text)
            tracer.saves["logits"]

        Without a prompt, each `with tracer.invoke(prompt):` in the body is a block with a prompt of its own
        (`Tracer.invoke`). Everything else is as for
        `Client.trace`, sampling params included.

        Raises:
            BlockError: as the `with` is entered or left, for a body that cannot be captured.
            TraceRejected: as it is left; something in it cannot be submitted.
        """
        from .tracer import Tracer

        if self._client is None:
            raise TracewireError("this handle has no client to submit by: take it from client.model()")
        if "max_new_tokens" in options:
            # nnsight's word.
            options["max_tokens"] = options.pop("max_new_tokens")
        return Tracer(self._client, self, prompt, prompts, options)

    #: nnsight's other word for the same: there is no forward pass apart from generation.
    generate = trace

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in ("tree", "trees"):
            # Asked of an object that is not set up yet, as copying does.
            raise AttributeError(name)
        return getattr(self.tree, name)

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *dir(self.tree)]

    def __repr__(self) -> str:
        return repr(self.tree)
