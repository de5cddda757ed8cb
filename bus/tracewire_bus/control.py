"""Control streams: what an engine is asked to do for the traces that it runs.

There is one for each engine and hash tag of traces, so that a script that changes a trace's record (`records.py`) can
put an order on it in the same breath. An engine reads all of its own in one call.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, Literal

from .connection import Link
from .keys import Keys

__all__ = ["ControlReader", "Order"]

#: How many orders are read at once.
_PAGE: Final = 512


@dataclass(frozen=True, slots=True)
class Order:
    """What an engine is to do for one of its traces: apply `change` (encoded), or cancel it."""

    kind: Literal["steer", "cancel"]
    trace: str
    change: bytes = b""
    by: str = ""
    reason: str = ""


class ControlReader:
    """Reads what one engine is to do, over a link of its own. Not for concurrent use."""

    def __init__(self, link: Link, keys: Keys, engine: str) -> None:
        self._link = link
        self._positions = {keys.control(tag, engine): b"0-0" for tag in keys.tags}

    async def read(self, block_ms: int) -> list[Order]:
        """The next orders, in each trace's order; waits up to `block_ms` for the first.

        What was read is removed with the next call.

        Raises:
            redis.exceptions.RedisError: the connection broke; the next call goes on where this one would have.
        """
        (reply,) = await self._link.ask(
            ("XREAD", "COUNT", _PAGE, "BLOCK", block_ms, "STREAMS", *self._positions, *self._positions.values()),
            timeout_s=block_ms / 1000 + 30,
        )
        if isinstance(reply, Exception):
            raise reply
        orders: list[Order] = []
        done: list[tuple[Any, ...]] = []
        for key, entries in reply or ():
            for _, flat in entries:
                fields = dict(zip(flat[::2], flat[1::2], strict=True))
                kind = _text(fields.get(b"k", b""))
                if kind in ("steer", "cancel"):
                    orders.append(
                        Order(
                            kind,  # type: ignore[arg-type]
                            _text(fields.get(b"t", b"")),
                            fields.get(b"d", b""),
                            _text(fields.get(b"b", b"")),
                            _text(fields.get(b"r", b"")),
                        )
                    )
            self._positions[_text(key)] = entries[-1][0]
            done.append(("XTRIM", key, "MINID", _after(entries[-1][0])))
        if done:
            await self._link.ask(*done)
        return orders

    async def aclose(self) -> None:
        """Close its connection."""
        await self._link.drop()


def _after(id_: bytes) -> bytes:
    """The least id that is greater."""
    milliseconds, _, number = id_.partition(b"-")
    return b"%s-%d" % (milliseconds, int(number) + 1)


def _text(data: bytes | str) -> str:
    return data if isinstance(data, str) else data.decode("utf-8", "replace")
