"""Control streams: the orders to an engine, for one of its traces or for the whole engine.

Each engine has one control stream for each hash tag of traces. So the script that changes a trace's record
(`trace_records.py`) can also put the order on the stream. An engine reads all its streams in one call; on a cluster, in
one call for each slot. Orders to the whole engine are on a stream of their own, to which only operators may write.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import Any, Final, Literal

import anyio
import msgspec

from tracewire_bus.transport.backoff import Backoff
from tracewire_bus.transport.errors import as_bus_error, is_transient
from tracewire_bus.transport.guard import Guard, integer
from tracewire_bus.transport.link import Link
from tracewire_bus.transport.pool import Connections
from tracewire_bus.transport.scripts import Script
from tracewire_bus.transport.tasks import OwnedTask, Signal

from .keys import Keys

__all__ = ["ControlReader", "Order", "SlotControlReaders", "drain_command"]

logger = logging.getLogger("tracewire")

#: Number of orders that one read returns at most, for each stream.
_PAGE: Final = 512
#: On a cluster, how long one read waits, in milliseconds. A waiting read does not see entries of a slot that moves.
_BLOCK_SLOT_MS: Final = 1000
#: How many of the orders that it has returned a reader knows again.
_KNOWN: Final = 4096
#: The kinds of orders that this version knows. It ignores those of later versions.
_KINDS: Final = frozenset(("steer", "cancel", "pause", "resume", "drain"))

_DRAIN: Final = Script("control_drain")


class Order(msgspec.Struct, frozen=True):
    """An order to an engine.

    Attributes:
        kind: what the engine does: apply a change of live parameters, cancel, pause or resume a trace, or drain itself.
        trace: the trace's id; `""` for `drain`.
        change: for `steer`, the encoded change.
        by: the client that gave the order.
        reason: for `cancel`, the reason.
        within_s: for `drain`, after how many seconds the engine puts its running traces back; for `pause`, after how
            many it ends the pause. None for no limit.
        then: for `pause`, how the engine ends the pause: `resume` or `cancel`.
        id: for `pause` and `resume`, the random id of the client's operation; empty if the client gives none.
        number: for `pause` and `resume`, the count of the trace's pauses and resumptions, from 1; 0 if unknown.
        proof: the client's signature; empty if the client has no key. That of `steer` is in the change.
    """

    kind: Literal["steer", "cancel", "pause", "resume", "drain"]
    trace: str
    change: bytes = b""
    by: str = ""
    reason: str = ""
    within_s: float | None = None
    number: int = 0
    proof: bytes = b""
    then: str = ""
    id: str = ""


def drain_command(
    keys: Keys, engine: str, by: str, within_s: float | None, keep_s: int, proof: bytes = b""
) -> tuple[Any, ...]:
    """The command that asks an engine to drain. Redis may execute it more than once.

    `keep_s` is how long Redis keeps the control stream after this order, in seconds. `proof` is the client's signature.
    """
    key = keys.operate(engine)
    return _DRAIN((key,), by, "" if within_s is None else within_s, keep_s, proof)


class ControlReader:
    """Reads the orders to one engine, over a link of its own. Not for concurrent use.

    A new connection may go to a server that lacks orders which this reader has read, and whose clock is behind. That
    server gives new orders smaller ids. So the reader reads each stream from its beginning, and leaves out the orders
    that it knows. It knows the last `_KNOWN`, and returns an earlier one again if a server still has it.
    """

    def __init__(
        self, link: Link, keys: Keys, engine: str, tags: Sequence[str] = (), *, guard: Guard | None = None
    ) -> None:
        self._link = link
        self._guard = guard or Guard()
        self._backoff = Backoff()
        #: The number (`Link.opened`) of the connection to whose server the positions belong.
        self._opened = 0
        #: The last entries that were read: stream, id, and a hash of the fields.
        self._known: dict[tuple[str, bytes, int], None] = {}
        #: For each stream with entries that `read` has returned and that are not trimmed, the last such entry.
        self._read_up_to: dict[str, bytes] = {}
        self._operate = keys.operate(engine)
        self._positions = {keys.control(tag, engine): b"0-0" for tag in tags or keys.tags}
        if keys.tags[0] in (tags or keys.tags):
            self._positions[self._operate] = b"0-0"

    async def read(self, block_ms: int) -> list[Order]:
        """The next orders; those of one trace are in order. Waits up to `block_ms` milliseconds for the first.

        If Redis does not answer, it returns `[]` after a pause; a later call goes on where this one was.

        Raises:
            BusError: Redis refuses.
        """
        try:
            return await self._read(block_ms)
        except Exception as error:
            if not is_transient(error):
                raise as_bus_error(error) from error
            pause = self._backoff.next()
            logger.log(self._backoff.level, "control waits for Redis: %s", error)
            await anyio.sleep(pause)
            return []

    async def _read(self, block_ms: int) -> list[Order]:
        if self._link.connected:
            await self._link.connect()
        else:
            # On a cluster, a call that fails has the next one look up again which node has the slot.
            await self._link.execute(("PING",))
        if self._link.opened != self._opened:
            self._positions = dict.fromkeys(self._positions, b"0-0")
            # The new server may have orders that nobody has read up to there.
            self._read_up_to.clear()
            self._opened = self._link.opened
        # Trims the orders that the last call returned, so that no order is returned twice after a restart.
        *_, reply = await self._link.execute(
            *(("XTRIM", key, "MINID", _after(last)) for key, last in self._read_up_to.items()),
            ("XREAD", "COUNT", _PAGE, "BLOCK", block_ms, "STREAMS", *self._positions, *self._positions.values()),
            timeout_s=block_ms / 1000 + 30,
        )
        if isinstance(reply, Exception):
            raise reply
        self._backoff.reset()
        if self._link.opened != self._opened:
            # Another server has answered, for the positions of the one before.
            return []
        self._read_up_to.clear()
        orders: list[Order] = []
        for raw, entries in reply or ():
            key = _text(raw)
            for id_, flat in entries:
                if not self._is_new(key, id_, flat):
                    continue
                order = self._guard.read(_order, flat, key=key, entry=id_)
                if order is None or order.kind not in _KINDS:
                    continue
                if (order.kind == "drain") is not (key == self._operate):
                    # A user who may steer traces may write to the control streams, and may drain no engine.
                    self._guard.note(key, id_, f"an order of the kind {order.kind!r} does not belong on this stream")
                    continue
                orders.append(order)
            self._positions[key] = self._read_up_to[key] = entries[-1][0]
        return orders

    def _is_new(self, key: str, id_: bytes, flat: Sequence[bytes]) -> bool:
        """Whether an entry was not read before; from now on it was."""
        entry = key, id_, hash(tuple(flat))
        if entry in self._known:
            return False
        self._known[entry] = None
        if len(self._known) > _KNOWN:
            del self._known[next(iter(self._known))]
        return True

    async def aclose(self) -> None:
        """Close the connection."""
        await self._link.drop()


class SlotControlReaders:
    """The `ControlReader` of a cluster: reads the stream of each hash tag over a link of its own."""

    def __init__(self, connections: Connections, keys: Keys, engine: str) -> None:
        self._readers = [
            ControlReader(connections.link(keys.control(tag, engine)), keys, engine, [tag], guard=connections.guard)
            for tag in keys.tags
        ]
        self._tasks: list[OwnedTask] = []
        self._orders: deque[Order] = deque()
        self._refused: Exception | None = None
        self._arrived = Signal()

    async def read(self, block_ms: int) -> list[Order]:
        """The next orders; those of one trace are in order. Waits up to `block_ms` milliseconds for the first.

        Raises:
            BusError: Redis refuses.
        """
        if not self._tasks:
            self._tasks = [OwnedTask(partial(self._pump, one), "that reads orders") for one in self._readers]
        if not self._orders and self._refused is None:
            with anyio.move_on_after(block_ms / 1000):
                await self._arrived.wait()
        refused, self._refused = self._refused, None
        if refused is not None:
            raise refused
        orders = list(self._orders)
        self._orders.clear()
        return orders

    async def _pump(self, reader: ControlReader) -> None:
        backoff = Backoff()
        while True:
            try:
                orders = await reader.read(_BLOCK_SLOT_MS)
                backoff.reset()
            except Exception as error:
                # The next `read` raises this error.
                self._refused = error
                self._arrived.notify()
                await anyio.sleep(backoff.next())
                continue
            if orders:
                self._orders += orders
                self._arrived.notify()

    async def aclose(self) -> None:
        """End the tasks and close the connections."""
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            await task.aclose()
        for reader in self._readers:
            await reader.aclose()


def _after(id_: bytes) -> bytes:
    """The id of a stream that follows `id_`."""
    milliseconds, _, number = id_.partition(b"-")
    return b"%s-%d" % (milliseconds, int(number) + 1)


def _order(flat: Sequence[bytes]) -> Order:
    fields = dict(zip(flat[::2], flat[1::2], strict=True))
    return Order(
        _text(fields[b"k"]),  # type: ignore[arg-type]
        _text(fields.get(b"t", b"")),
        fields.get(b"d", b""),
        _text(fields.get(b"b", b"")),
        _text(fields.get(b"r", b"")),
        _seconds(_text(fields.get(b"w", b""))),
        integer(fields.get(b"n", b"0")),
        fields.get(b"g", b""),
        _text(fields.get(b"o", b"")),
        _text(fields.get(b"i", b"")),
    )


def _seconds(text: str) -> float | None:
    """Parse a number of seconds; None for `""`."""
    if not text:
        return None
    seconds = float(text)
    if not seconds >= 0:
        raise ValueError(f"expected seconds, got {text!r}")
    return seconds


def _text(data: bytes | str) -> str:
    return data if isinstance(data, str) else data.decode("utf-8", "replace")
