"""The keys of a client: its own, with which it signs, and those of the engines whose finals it trusts."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from tracewire_bus.domain.identity import KeyFileError, Signer
from tracewire_bus.store.proofs import Proofs

from .checks import shown
from .errors import InvalidKey

__all__ = ["KEY", "check_engine_keys", "proofs_of", "signer_of"]

#: Environment variable with the path of the client's key file.
KEY = "TRACEWIRE_KEY"


def proofs_of(key: str | os.PathLike[str] | None = None, engine_keys: Sequence[str] = ()) -> Proofs:
    """Signs with a key file, and checks finals against the keys of engines.

    Raises:
        InvalidKey: the file cannot be read, or the key of an engine is none.
    """
    return Proofs(signer_of(key), check_engine_keys(engine_keys))


def signer_of(path: str | os.PathLike[str] | None) -> Signer | None:
    """The signer of a key file, by default the one of `TRACEWIRE_KEY`; None without one.

    Raises:
        InvalidKey: the file cannot be read, or the package `cryptography` is not installed.
    """
    path = os.environ.get(KEY) if path is None else path
    if not path:
        return None
    try:
        return Signer.load(path)
    except KeyFileError as error:
        raise InvalidKey(f"key: {error}") from error
    except ModuleNotFoundError as error:
        raise InvalidKey(f"key: signing needs {error.name}: pip install 'tracewire[signing]'") from error


def check_engine_keys(keys: Sequence[Any]) -> tuple[str, ...]:
    """The public keys of engines.

    Raises:
        InvalidKey: one of them is no public key.
    """
    for key in keys:
        if isinstance(keys, str) or not isinstance(key, str) or len(key) != 64 or not _is_hexadecimal(key):
            raise InvalidKey(f"engine_keys: expected public keys of 64 hexadecimal digits, got {shown(key)}")
    return tuple(keys)


def _is_hexadecimal(text: str) -> bool:
    return not set(text) - set("0123456789abcdef")
