"""Connections to Redis, and what to do when they break.

The transport is redis-py's asyncio connection, used below its client, and on trio a connection of our own
(`anyio_connection.py`). A connection on which a command was given up half way is given up with it, whatever kind of
scope cancelled it, and nobody but us decides what may be sent twice.
`Connections` lends connections to short commands, a bounded number at a time,
and sends those together that are asked for at the same time; whoever blocks on Redis or must not wait behind others
has a `Link` of its own.

Where a connection goes is decided anew each time that one is opened: to the server that the URL names, or to the one
that the sentinels name (`sentinel.py`). On a cluster a link has a connection to each node that it needs (`cluster.py`).

Redis-py is imported on first use.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from itertools import islice
from typing import TYPE_CHECKING, Any, Final

import anyio
import anyio.lowlevel

from .urls import parsed, redacted

if TYPE_CHECKING:
    from .cluster import Cluster
    from .guard import Guard
from tracewire_bus.wire.pieces import Pieces

from .backoff import Backoff
from .errors import BusFull, BusUnavailable, as_bus_error, copy_of, is_full, is_transient
from .link import Link, pack_commands
from .loops import Future, Loop, Task, running_loop, semaphore
from .server import Server, Transport

__all__ = ["Connections"]

logger = logging.getLogger("tracewire")

#: How many round trips of short commands are under way at once, and how many connections a bus keeps for them.
CONCURRENT: Final = 8

#: How many of those a client opens before it needs them.
WARM: Final = 3

#: How many calls share a round trip, and how many bytes; of how many a call may be to share one.
_TOGETHER, _TOGETHER_BYTES, _SMALL_BYTES = 128, 256 * 1024, 32 * 1024


def _transport(url: str) -> Transport:
    if parsed(url).scheme.endswith("+sentinel"):
        from .sentinel import Sentinels

        return Sentinels(url)
    return Server(url)


class Connections:
    """Makes links to one Redis and lends a bounded number of them to short commands.

    With `alone` each call has a round trip of its own: for replies that are large. Those made `like` others find their
    servers by the same means, and are closed before them.
    """

    def __init__(
        self,
        url: str,
        *,
        patience_s: float,
        alone: bool = False,
        guard: Guard | None = None,
        like: Connections | None = None,
    ) -> None:
        from .guard import Guard

        self.url = url
        self._like = like
        #: Parses whatever is read over these connections.
        self.guard = guard or Guard()
        self._alone = alone
        self._patience_s = patience_s
        self._cluster: Cluster | None = None
        self._transport: Transport | None = None
        if like is not None:
            self._cluster, self._transport = like._cluster, like._transport
        elif parsed(url).scheme.endswith("+cluster"):
            from .cluster import Cluster

            self._cluster = Cluster(url)
        else:
            self._transport = _transport(url)
        self._idle: list[Link] = []
        #: Calls that wait for the next round trip, those under way, and the one that is about to take the calls.
        self._calls: deque[_Call] = deque()
        self._trips: set[Task[None]] = set()
        self._departing: Task[None] | None = None
        self._loop: Loop | None = None
        self._turn = semaphore(CONCURRENT)
        self._closed = False
        #: When a command last found Redis away, by the event loop's clock.
        self.broken_at = -math.inf

    @property
    def clustered(self) -> bool:
        """Whether keys lie on several servers."""
        return self._cluster is not None

    def slot(self, key: str) -> int | None:
        """The slot of a key, on a cluster. Commands that wait take keys of one slot only."""
        return None if self._cluster is None else self._cluster.slot(key)

    def link(self, near: str = "") -> Link:
        """A link of one's own, not yet connected. Whoever asks closes it by `drop`.

        With `near` it is for commands that wait: on a cluster it stays at that key's node.
        """
        if self._cluster is not None:
            from .cluster import ClusterLink

            return ClusterLink(self._cluster, near)
        assert self._transport is not None
        return Link(self._transport)

    def apart(self) -> Connections:
        """Others to the same Redis, for calls whose replies are large."""
        return Connections(self.url, patience_s=self._patience_s, alone=True, guard=self.guard, like=self)

    async def once(self, *commands: Sequence[Any], beside: Link | None = None, alone: bool = False) -> list[Any]:
        """`Link.ask` on a lent link, one try; with `beside`, of the server that this one is connected to.

        Small calls that are made at the same time share a round trip, but for one that is to be `alone`; on a cluster,
        where one node of several may be away, each has its own.
        """
        if self._closed:
            raise anyio.ClosedResourceError
        alone = alone or self._alone or beside is not None or self._cluster is not None
        # Packed before anything is borrowed: what cannot be is this caller's fault alone.
        packed = b"" if self._cluster is not None else pack_commands(commands)
        if alone or len(packed) > _SMALL_BYTES:
            # A semaphore that is free lets a cancelled caller through.
            await anyio.lowlevel.checkpoint_if_cancelled()
            async with self._turn:
                return await self._lend(commands, packed, beside)
        if self._loop is None:
            # Asked once: up to Python 3.11 each time is a system call.
            self._loop = running_loop()
        call = _Call(commands, packed, self._loop.create_future())
        self._calls.append(call)
        self._depart()
        try:
            return await call.replies
        finally:
            # Who is cancelled before it was sent has not asked; a trip for nobody is given up, and its connection.
            call.replies.cancel()
            if call.trip is None:
                with suppress(ValueError):
                    self._calls.remove(call)
            elif all(one.replies.done() for one in call.aboard):
                call.trip.cancel()

    def _depart(self) -> None:
        """Have a round trip take the calls, once whoever runs in this turn of the loop has made theirs."""
        if self._calls and self._departing is None and self._loop is not None and not self._closed:
            trip = self._departing = self._loop.create_task(self._trip(), name="tracewire commands")
            self._trips.add(trip)
            trip.add_done_callback(self._arrived)

    def _arrived(self, trip: Task[None]) -> None:
        self._trips.discard(trip)
        if self._departing is trip:
            # Cancelled before it took anything.
            self._departing = None
            self._depart()

    async def _trip(self) -> None:
        """One round trip, with all calls that wait when its turn comes."""
        calls: list[_Call] = []
        try:
            async with self._turn:
                size = 0
                while self._calls and len(calls) < _TOGETHER and size < _TOGETHER_BYTES:
                    call = self._calls.popleft()
                    if not call.replies.done():
                        call.trip, call.aboard = self._departing, calls
                        calls.append(call)
                        size += len(call.packed)
                self._departing = None
                self._depart()
                if calls:
                    await self._travel(calls)
        except Exception as error:
            for call in calls:
                if not call.replies.done():
                    # Of its own: whoever raises an error writes to it.
                    call.replies.set_exception(copy_of(error))
        finally:
            for call in calls:
                # Closed meanwhile.
                if not call.replies.done():
                    call.replies.set_exception(anyio.ClosedResourceError())
            # They refer to it.
            calls.clear()

    async def _travel(self, calls: list[_Call]) -> None:
        if self._closed:
            raise anyio.ClosedResourceError
        link = self._idle.pop() if self._idle else self.link()
        try:
            await link.connect()
            # That may have taken a while.
            calls[:] = [call for call in calls if not call.replies.done()]
            if not calls:
                await self._give_back(link)
                return
            replies = await link.ask(
                *[command for call in calls for command in call.commands],
                packed=b"".join([bytes(call.packed) for call in calls]),
            )
        except BaseException as error:
            await self._broke(link, error)
            raise
        await self._give_back(link)
        found = iter(replies)
        for call in calls:
            own = list(islice(found, len(call.commands)))
            if not call.replies.done():
                call.replies.set_result(own)

    async def _lend(self, commands: Sequence[Sequence[Any]], packed: bytes | Pieces, beside: Link | None) -> list[Any]:
        if self._closed:
            raise anyio.ClosedResourceError
        link = self._idle.pop() if self._idle else self.link()
        try:
            if beside is None:
                replies = await link.ask(*commands, packed=packed)
            else:
                replies = await link.ask_beside(beside, *commands)
        except BaseException as error:
            await self._broke(link, error)
            raise
        await self._give_back(link)
        return replies

    async def _broke(self, link: Link, error: BaseException) -> None:
        """A lent link is given up. If its server was away, those that idle are, too: each would have to find out."""
        from redis.exceptions import ConnectionError

        await link.drop()
        if not isinstance(error, Exception):
            return
        self.broken_at = anyio.current_time()
        # A command that took too long says nothing of others, nor does one node of several.
        away = isinstance(error, (ConnectionError, OSError)) and not isinstance(error, TimeoutError)
        if away and self._cluster is None:
            while self._idle:
                await self._idle.pop().drop()

    async def _give_back(self, link: Link) -> None:
        if self._closed:
            await link.drop()
        else:
            self._idle.append(link)

    async def warm(self) -> None:
        """Open connections in advance, for as many round trips at once as a burst of calls makes.

        A connection that cannot be opened now is opened when it is needed.
        """
        for _ in range(len(self._idle), WARM):
            link = self.link()
            try:
                await link.connect()
            except Exception as error:
                logger.debug("could not open a connection to Redis in advance: %r", error)
                return
            await self._give_back(link)

    async def command(self, *command: Any, alone: bool = False) -> Any:
        """One command that may be carried out twice; tried again while Redis is away, for as long as the bus is
        patient. With `alone`, its reply may be large: it goes by itself.

        Raises:
            BusError: Redis refused it.
            BusUnavailable: it stayed away.
        """
        return (await self.commands(command, alone=alone))[0]

    async def commands(self, *commands: Sequence[Any], refuse_full: bool = False, alone: bool = False) -> list[Any]:
        """Like `command`, for several sent together. With `refuse_full` it does not wait for a Redis to get memory.

        Raises:
            BusFull: it has none left, and `refuse_full` says so.
        """
        backoff = Backoff()
        deadline = anyio.current_time() + self._patience_s
        while True:
            try:
                replies = await self.once(*commands, alone=alone)
                for reply in replies:
                    if isinstance(reply, Exception):
                        raise reply
                return replies
            except Exception as error:
                if refuse_full and is_full(error):
                    raise BusFull("Redis has no memory left") from error
                if not is_transient(error):
                    raise as_bus_error(error) from error
                self.broken_at = anyio.current_time()
                pause = backoff.next()
                if anyio.current_time() + pause > deadline:
                    state = "has no memory left" if is_full(error) else "is away"
                    hint = "the client connects again by itself, and the call can be repeated"
                    raise BusUnavailable(f"Redis at {redacted(self.url)} {state}: {error} ({hint})") from error
                await anyio.sleep(pause)

    async def aclose(self) -> None:
        """Close what is idle; what is lent is closed on its return. Calls that were not sent end as closed."""
        self._closed = True
        while self._calls:
            call = self._calls.popleft()
            if not call.replies.done():
                call.replies.set_exception(anyio.ClosedResourceError())
        while self._idle:
            await self._idle.pop().drop()
        if self._like is None and self._transport is not None:
            await self._transport.aclose()


class _Call:
    """Commands of one caller, and where their replies go; then its round trip, and who else is aboard."""

    __slots__ = ("aboard", "commands", "packed", "replies", "trip")

    def __init__(self, commands: Sequence[Sequence[Any]], packed: bytes | Pieces, replies: Future[list[Any]]) -> None:
        self.commands = commands
        self.packed = packed
        self.replies = replies
        self.trip: Task[None] | None = None
        self.aboard: list[_Call] = []
