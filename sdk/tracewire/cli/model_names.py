"""The argument MODEL of commands. Shells complete it with the models that are served."""

from __future__ import annotations

import argparse
import logging
import os
from typing import Any

import anyio

__all__ = ["add_model", "served_names"]

#: How long a shell waits for the names, in seconds.
_PATIENCE_S = 1.0


def add_model(
    parser: Any, name: str = "model", help: str | None = "the model's name (tracewire models lists them)"
) -> None:
    """Add the argument, or an option such as `--model`."""
    action = parser.add_argument(name, metavar="MODEL", type=_name, help=help)
    # As argcomplete reads it.
    action.completer = _complete


def _name(text: str) -> str:
    if not text:
        raise argparse.ArgumentTypeError("expected a model's name, got an empty one")
    return text


def _complete(prefix: str, parsed_args: argparse.Namespace, **_: Any) -> list[str]:
    """The names that argcomplete offers; none where Redis does not answer soon."""
    url = getattr(parsed_args, "url", None) or os.environ.get("TRACEWIRE_URL")
    if not url or url.startswith("embedded:"):
        return []
    before = logging.root.manager.disable
    logging.disable()
    try:
        return [name for name in anyio.run(served_names, url, parsed_args.prefix) if name.startswith(prefix)]
    except Exception:
        # A shell shows what is printed in the middle of the line.
        return []
    finally:
        logging.disable(before)


async def served_names(url: str, keys: str) -> list[str]:
    """The names of the models on a bus with this prefix of keys; none if it does not answer within a second.

    Raises:
        TracewireError: Redis refuses, or the URL is malformed.
    """
    from tracewire.client import connect

    names: list[str] = []
    with anyio.move_on_after(_PATIENCE_S):
        async with connect(url, prefix=keys, retry_timeout=_PATIENCE_S) as client:
            names = [model.name for model in await client.models.list()]
    return names
