"""A handle of a served model: its module tree, and traces whose block is the body of a `with`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Unpack

from tracewire.capture.capture import ModelHandle
from tracewire.checks import check_text
from tracewire.errors import NotConnected
from tracewire.options import WithOptions, check_names

from .tokenizer import ModelConfig, load_tokenizer
from .tracer import Tracer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tracewire.submission import PromptInput
    from tracewire_bus.domain.tree import ModuleTree

    from .served_models import ModelInfo
    from .session import Session

__all__ = ["Model", "model_name"]


def model_name(model: ModelHandle | str) -> str:
    """The name of a model that is given by its handle or by its name.

    Raises:
        TypeError: the value is neither.
        ValueError: the name is empty, or cannot be sent as text.
    """
    if isinstance(model, ModelHandle):
        return model.name
    if not check_text("model", model):
        raise ValueError("model: expected a model of client.models.get(), or a model's name; got an empty name")
    return model


class Model(ModelHandle):
    """A handle of a served model: its name, and the module tree that a block can reach.

    It prints as the tree. Other attributes are the tree's, so that `model.model.layers[2]` can be explored as in a
    block; for an unknown path the error names the nearest path that exists. `trees` are the different module trees of
    the model's engines: a block must fit each of them.
    """

    def __init__(self, info: ModelInfo, trees: Sequence[ModuleTree], session: Session | None = None) -> None:
        self.name = info.name
        self.info = info
        self.tree = trees[0]
        self.trees = tuple(trees)
        self._session = session

    def trace(
        self,
        prompt: PromptInput | None = None,
        /,
        *,
        prompts: Sequence[PromptInput] | None = None,
        **options: Unpack[WithOptions],
    ) -> Tracer:
        """A trace whose block is the body of a `with`. The body travels as source and runs on the engine only.

            with model.trace("The Eiffel Tower is in", max_tokens=5) as tracer:
                logits = model.logits.save()
            async for output in tracer:
                print(output.text)
            tracer.saves["logits"]

        Without a prompt, each `with tracer.invoke(prompt):` in the body is a block with a prompt of its own
        (`Tracer.invoke`). The options and sampling params are those of `Client.trace`.

        Raises:
            UnknownOption: a keyword is neither an option nor a sampling param. Raised by this call.
            BlockError: the body cannot be captured. Raised when the `with` is entered or left.
            TraceRejected: the trace cannot be submitted. Raised when the `with` is left.
            NotConnected: this handle was not made by a client.
        """
        if self._session is None:
            raise NotConnected("this handle has no client to submit by: take it from client.models.get()")
        check_names(options, WithOptions)
        given: dict[str, Any] = {**options}
        if "max_new_tokens" in given:
            # nnsight's name for it.
            given["max_tokens"] = given.pop("max_new_tokens")
        return Tracer(self._session, self.name, prompt, prompts, given)

    #: nnsight's other name for it. Tracewire has no forward pass apart from generation.
    generate = trace

    @property
    def config(self) -> ModelConfig:
        """The model's configuration, as its engine has it: `model.config.hidden_size`.

        Raises:
            AttributeError: the engine is of a version that does not publish it.
        """
        if not self.info.config:
            raise AttributeError("config")  # Python then calls __getattr__, which asks the tree.
        return ModelConfig(self.info.config)

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer, of transformers (the extra `tracewire[tokenizer]`). It is loaded when first asked for.

        The files must be on this machine: where the engine has its model, if that is here, or in the cache of Hugging
        Face. Nothing is downloaded.

        Raises:
            TokenizerUnavailable: transformers is not installed, or the files are not here.
        """
        if not self.info.path:
            raise AttributeError("tokenizer")
        return load_tokenizer(self.info.path, self.info.revision)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in ("tree", "trees"):
            # `copy` asks this of an object whose `__init__` has not run. Without the check it would recurse for ever.
            raise AttributeError(name)
        return getattr(self.tree, name)

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *dir(self.tree)]

    def __repr__(self) -> str:
        return repr(self.tree)
