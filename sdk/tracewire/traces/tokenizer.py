"""A model's configuration and tokenizer on the client's machine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import lru_cache
from importlib import import_module
from typing import Any

from tracewire.errors import TokenizerUnavailable

__all__ = ["ModelConfig", "load_tokenizer"]


class ModelConfig(Mapping[str, Any]):
    """A model's configuration: `config.hidden_size` or `config["hidden_size"]`. Nested settings likewise."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._settings = settings

    def __getitem__(self, name: str) -> Any:
        value = self._settings[name]
        return ModelConfig(value) if isinstance(value, dict) else value

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            # Copying asks for such names before `__init__` has run.
            raise AttributeError(name)
        if name not in self._settings:
            raise AttributeError(f"the model's configuration has no {name!r}; it has {', '.join(sorted(self))}")
        return self[name]

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *self._settings]

    def __iter__(self) -> Iterator[str]:
        return iter(self._settings)

    def __len__(self) -> int:
        return len(self._settings)

    def to_dict(self) -> dict[str, Any]:
        """The configuration as plain dicts and lists."""
        return dict(self._settings)

    def __repr__(self) -> str:
        return f"ModelConfig({dict(self._settings)!r})"


@lru_cache(maxsize=8)
def load_tokenizer(path: str, revision: str) -> Any:
    """Load the tokenizer of the model at `path`, a folder or a name in Hugging Face's cache, from this machine's files.

    Raises:
        TokenizerUnavailable: transformers is not installed, or the files are not on this machine.
    """
    try:
        # By name, since transformers is an extra of the client.
        transformers = import_module("transformers")
    except ImportError as error:
        raise TokenizerUnavailable(
            "model.tokenizer needs transformers: pip install 'tracewire[tokenizer]' (a block has the engine's own "
            "tokenizer without it)"
        ) from error
    try:
        return transformers.AutoTokenizer.from_pretrained(path, revision=revision or "main", local_files_only=True)
    except (OSError, ValueError) as error:
        raise TokenizerUnavailable(
            f"the engine has loaded its model from {path!r}, and the tokenizer's files are not on this machine: copy "
            "them to that folder, download the model by that name if it is one of the Hugging Face hub, or use "
            "model.tokenizer in a block"
        ) from error
