"""Checks the declared interventions of traces and edits against the engine's model, and places them for the workers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import msgspec

from tracewire_bus.domain.intervention_checks import DeclarationError, KnownModel, check, normalize
from tracewire_bus.domain.tree import ModuleTree
from tracewire_bus.wire.feature_kinds import Autoencoder
from tracewire_bus.wire.messages import Declared, EngineInfo, When
from tracewire_engine.protocol.messages import Placed

from .engine_api import Rejection

__all__ = ["Placer"]

#: Tokens with the text of a condition, and texts whose tokens are remembered.
_MOST_TOKENS: Final = 4096
_REMEMBERED: Final = 256


class Placer:
    """Places interventions in one engine's model.

    Args:
        info: the engine.
        tree: its model's modules.
        saes: the engine's own autoencoders, by name.
        strings: finds the strings of token ids, for conditions on texts.
    """

    def __init__(
        self,
        info: EngineInfo,
        tree: ModuleTree,
        saes: Mapping[str, Autoencoder] | None = None,
        strings: Callable[[list[int]], list[str]] | None = None,
    ) -> None:
        self._tree, self._hidden, self._vocabulary = tree, info.hidden_size, info.vocabulary
        self._known = KnownModel(tuple(name for name in (info.model, info.path) if name), saes or {})
        self._strings = strings
        #: The strings of the whole vocabulary, once a condition has asked; and the tokens with each text.
        self._all: list[str] | None = None
        self._tokens: dict[str, list[list[int]]] = {}

    def place(self, interventions: Sequence[Declared], live: Mapping[str, Any]) -> list[Placed]:
        """Declared interventions with their locations, for the workers. `live` has the values of live parameters.

        Raises:
            Rejection: one of them cannot run on this model.
        """
        try:
            places = check(interventions, self._tree, hidden_size=self._hidden, live=live, model=self._known)
            plain = normalize(interventions)
        except DeclarationError as error:
            raise Rejection(error.field, error.message) from error
        return [
            Placed(
                self._in_tokens(one, f"interventions[{index}].when.text"),
                [(f"model.{site.location}", site.value == "residual") for site in sites],
                pattern,
                (sites[0].heads, sites[0].head_size) if sites else (0, 0),
            )
            for index, (one, (sites, pattern)) in enumerate(zip(plain, places, strict=True))
        ]

    def _in_tokens(self, one: Declared, field: str) -> Declared:
        """An intervention whose condition has token ids in place of a text."""
        when = one.when
        if when is None or when.text is None:
            return one
        changed: When = msgspec.structs.replace(when, text=None, tokens=self._with_text(when.text, field))
        placed: Declared = msgspec.structs.replace(one, when=changed)
        return placed

    def _with_text(self, text: str, field: str) -> list[list[int]]:
        found = self._tokens.get(text)
        if found is None:
            if self._all is None:
                self._all = [] if self._strings is None else self._strings(list(range(self._vocabulary)))
            found = [[token] for token, string in enumerate(self._all) if text in string]
            if not found:
                raise Rejection(
                    field, f"no token of the model has {text!r} in it: give sequences of token ids as tokens"
                )
            if len(found) > _MOST_TOKENS:
                raise Rejection(field, f"{len(found)} tokens have {text!r} in them; expected {_MOST_TOKENS} at most")
            if len(self._tokens) >= _REMEMBERED:
                self._tokens.clear()
            self._tokens[text] = found
        return found
