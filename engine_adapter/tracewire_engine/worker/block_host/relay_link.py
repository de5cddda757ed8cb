"""The worker's end of the save relay, the process that passes on to the adapters what hosts have saved.

The worker tells the relay which records a host may send, before it tells the host of their requests. It takes no part
in the saves themselves. When a host has ended, it asks the relay what was passed on, and ends the requests behind that
when the answer comes: it waits for none, since the relay may be busy with the saves of other hosts.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import threading
import time
from collections import deque
from typing import NamedTuple

import msgspec

from tracewire_engine.link.host_channel import receive_descriptors, send_descriptors
from tracewire_engine.link.turn_counts import TurnCounts
from tracewire_engine.protocol.save_relay import (
    RELAYED,
    Closed,
    Expected,
    Lost,
    Opened,
    Order,
    Over,
    Passed,
    Refused,
    Relayed,
    Settings,
)

__all__ = ["RelayLink", "RelayLost", "RelayedSaves", "SaveEnds"]

_encode = msgspec.msgpack.Encoder().encode
_said = msgspec.msgpack.Decoder(Passed | Refused)

#: How long the worker waits until the relay takes an order; and after how long without an answer it is given up. In
#: seconds.
_TAKEN_S, _SILENT_S = 5.0, 60.0


class RelayLost(ConnectionError):
    """The save relay has ended. What hosts have saved since then is lost."""

    def __init__(self) -> None:
        super().__init__("the process that passes on what blocks save has ended")


class SaveEnds(NamedTuple):
    """The relay's ends of a host's connection for saves: descriptors of the socket, and of the memory beside it."""

    connection: int
    memory: int

    def close(self) -> None:
        """Close this process's copies."""
        for one in self:
            os.close(one)


class RelayLink:
    """The connection to a relay.

    Args:
        control: a socket that keeps messages apart.
        settings: to where the relay passes saves on.
    """

    def __init__(self, control: socket.socket, settings: Settings) -> None:
        self._control = control
        self._control.setblocking(False)
        self._counts = TurnCounts.create()
        self._lock = threading.Lock()
        self._refused: deque[Refused] = deque()
        self._next, self._open = 0, set[int]()
        #: Hosts of which the relay has not said yet what was passed on, and since when.
        self._asked: dict[int, float] = {}
        #: What the relay has said of hosts in messages of which more come; and of other hosts, all of it.
        self._parts: dict[int, list[Relayed]] = {}
        self._answers: deque[tuple[int, list[Relayed]]] = deque()
        self.lost = False
        self.tell(settings, self._counts.descriptor)

    def fileno(self) -> int:
        """The socket's descriptor."""
        return self._control.fileno()

    def open(self, ends: SaveEnds) -> RelayedSaves:
        """Have the relay take a host's saves. The caller closes this process's ends.

        Raises:
            RelayLost: there is no relay.
        """
        while self._next % self._counts.places in self._open:
            self._next += 1
        number = self._next
        self._next += 1
        self._counts[number] = 0
        self.tell(Opened(number), *ends)
        self._open.add(number % self._counts.places)
        return RelayedSaves(self, number)

    def tell(self, order: Order, *descriptors: int) -> None:
        """Tell the relay something. Waits only if it has left much unread.

        Raises:
            RelayLost: there is no relay, or it takes nothing any more.
        """
        with self._lock:
            if self.lost:
                raise RelayLost
            message = _encode(order)
            try:
                try:
                    send_descriptors(self._control, message, list(descriptors))
                except BlockingIOError:
                    self._await(select.POLLOUT, _TAKEN_S)
                    send_descriptors(self._control, message, list(descriptors))
            except OSError:
                self._give_up()
                raise RelayLost from None

    def allow(self, number: int, turns: int) -> None:
        """Allow a host so many messages of saves in all."""
        self._counts[number] = turns

    def hear(self) -> None:
        """Take what the relay has said, for `refused` and `answers`. Does not wait.

        Raises:
            RelayLost: the relay has ended.
        """
        while self._receive():
            pass

    def refused(self) -> list[Refused]:
        """The hosts that have sent what no host sends, since the last call."""
        found = list(self._refused)
        self._refused.clear()
        return found

    def answers(self) -> list[tuple[int, list[Relayed]]]:
        """The numbers of hosts that `ask` was called for, with what was passed on of their live requests.

        Each is returned once, when the relay has said it.
        """
        found = list(self._answers)
        self._answers.clear()
        return found

    def ask(self, number: int, *, trusted: bool) -> None:
        """End a host's connection, and ask what was passed on of its live requests.

        Args:
            number: of the host.
            trusted: whether what it has still sent is passed on.

        Raises:
            RelayLost: the relay has ended.
        """
        self.tell(Lost(number, trusted))
        self._asked[number] = time.monotonic()

    def look(self) -> None:
        """Give the relay up if it has not answered for long."""
        if not self.lost and any(time.monotonic() - since > _SILENT_S for since in list(self._asked.values())):
            self._give_up()

    def forget(self, number: int) -> None:
        """Forget a host that has no trace left."""
        self._open.discard(number % self._counts.places)
        self.tell(Closed(number))

    def _receive(self) -> bool:
        """Take the next message, if one has come. Returns whether there was one."""
        if self.lost:
            raise RelayLost
        if not self._await(select.POLLIN, 0.0):
            return False
        try:
            message, _ = receive_descriptors(self._control)
        except OSError:
            message = b""
        if not message:
            self._give_up()
            raise RelayLost
        said: Passed | Refused = _said.decode(message)
        if isinstance(said, Refused):
            self._refused.append(said)
            return True
        self._parts.setdefault(said.host, []).extend(said.records)
        if said.last:
            self._asked.pop(said.host, None)
            self._open.discard(said.host % self._counts.places)
            self._answers.append((said.host, self._parts.pop(said.host)))
        return True

    def _await(self, event: int, seconds: float) -> bool:
        poll = select.poll()
        poll.register(self._control, event)
        return bool(poll.poll(seconds * 1000))

    def _give_up(self) -> None:
        """End the relay. Then its socket can be read, and `refused` raises an error."""
        self.lost = True
        with contextlib.suppress(OSError):
            self._control.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """End the relay, and close the connection. Idempotent."""
        self.lost = True
        self._control.close()
        self._counts.close()


class RelayedSaves:
    """What a worker tells the relay of one host.

    Args:
        link: to the relay.
        number: of the host.
    """

    def __init__(self, link: RelayLink, number: int) -> None:
        self.link, self.number = link, number
        self._lock = threading.Lock()
        self._expected: list[tuple[str, int]] = []
        self._over: list[tuple[str, int]] = []

    def expect(self, request: str, choice: int) -> None:
        """Expect records of a choice of a request, from the next turn on."""
        with self._lock:
            self._expected.append((request, choice))

    def over(self, request: str, choice: int) -> None:
        """Expect no more records of a choice, of which the host has sent all."""
        with self._lock:
            self._over.append((request, choice))

    def allow(self, turns: int, before: int = 0) -> None:
        """Allow so many messages in all, before the host is told of the last turn of these.

        `before` is how many were allowed before the first of these turns.

        If there is no relay any more, the worker hears of that from the connection, and ends the host.
        """
        self.link.allow(self.number, turns)
        if not self._expected:
            return
        with self._lock:
            expected, self._expected = self._expected, []
            over, self._over = self._over, []
        with contextlib.suppress(RelayLost):
            for start in range(0, len(over), RELAYED):
                self.link.tell(Over(self.number, over[start : start + RELAYED]))
            for start in range(0, len(expected), RELAYED):
                self.link.tell(Expected(self.number, expected[start : start + RELAYED], before))

    def ask(self, *, trusted: bool) -> None:
        """End the connection of a host that has ended, and ask what was passed on (see `RelayLink.ask`)."""
        self.link.ask(self.number, trusted=trusted)

    def close(self) -> None:
        """Forget the host, which has no trace left."""
        with contextlib.suppress(RelayLost):
            self.link.forget(self.number)
