"""Lua scripts, sent by their digest: Redis keeps what it has run once."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import Any

from .connection import BusError, Connections

__all__ = ["Script"]


class Script:
    """A script that may be carried out twice: it is sent again when the connection breaks under it."""

    def __init__(self, source: str) -> None:
        self._source = source
        self._digest = hashlib.sha1(source.encode(), usedforsecurity=False).hexdigest()

    async def __call__(self, connections: Connections, keys: Sequence[Any], arguments: Sequence[Any]) -> Any:
        """Run it once and return its raw reply.

        Raises:
            BusError: Redis refused it.
            BusUnavailable: Redis stayed away.
        """
        return (await self.many(connections, [(keys, arguments)]))[0]

    async def many(self, connections: Connections, calls: Iterable[tuple[Sequence[Any], Sequence[Any]]]) -> list[Any]:
        """Run it for each pair of keys and arguments, sent together; their raw replies."""
        commands = [("EVALSHA", self._digest, len(keys), *keys, *arguments) for keys, arguments in calls]
        try:
            return await connections.commands(*commands)
        except BusError as error:
            if type(error.__cause__).__name__ != "NoScriptError":
                raise
        # None of them ran.
        return (await connections.commands(("SCRIPT", "LOAD", self._source), *commands))[1:]
