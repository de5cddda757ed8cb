"""Connections to Redis, and what to do when they break.

The transport is redis-py's asyncio connection, used below its client: a connection on which a command was given up
half way is given up with it, whatever kind of scope cancelled it, and nobody but us decides what may be sent twice.
`Connections` lends connections to short commands, a bounded number at a time,
and sends those together that are asked for at the same time; whoever blocks on Redis or must not wait behind others
has a `Link` of its own.

Where a connection goes is decided anew each time that one is opened: to the server that the URL names, or to the one
that the sentinels name (`sentinel.py`). On a cluster a link has a connection to each node that it needs (`cluster.py`).

Redis-py is imported on first use.
"""

from __future__ import annotations

import asyncio
import copy
import logging
import math
import random
import re
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from functools import cache
from itertools import islice
from typing import TYPE_CHECKING, Any, Final, Generic, Protocol, TypeVar

import anyio
import anyio.lowlevel

from .scripts import with_text
from .urls import parsed, redacted, unreadable

if TYPE_CHECKING:
    from .cluster import Cluster
    from .guard import Guard

__all__ = [
    "CONNECT_S",
    "SCHEMES",
    "After",
    "Background",
    "Backoff",
    "BusError",
    "BusFull",
    "BusUnavailable",
    "Connections",
    "Link",
    "NotAllowed",
    "Refreshed",
    "Server",
    "Transport",
    "Wakeup",
    "as_bus_error",
    "is_full",
    "is_transient",
    "redacted",
]

logger = logging.getLogger("tracewire")

T = TypeVar("T")

#: How long one command may take, in seconds, before its connection is given up.
COMMAND_S: Final = 30.0
CONNECT_S: Final = 5.0
#: How many round trips of short commands are under way at once, and how many connections a bus keeps for them.
CONCURRENT: Final = 8
#: How many of those a client opens before it needs them.
WARM: Final = 3
#: How long a background task that failed waits before it begins anew, in seconds, the first time and at most.
_ANEW_S, _ANEW_MOST_S = 0.1, 5.0
#: How many calls share a round trip, and how many bytes; of how many a call may be to share one.
_TOGETHER, _TOGETHER_BYTES, _SMALL_BYTES = 128, 256 * 1024, 32 * 1024
#: What URLs of a Redis begin with.
SCHEMES: Final = (
    *("redis", "rediss", "unix"),
    *("redis+sentinel", "rediss+sentinel", "redis+cluster", "rediss+cluster"),
)


class BusError(Exception):
    """Redis refused, and would refuse again. Says what it said."""


class NotAllowed(BusError):
    """Redis does not allow our user that. Says which command on which key."""


class BusUnavailable(BusError, ConnectionError):
    """Redis could not be reached, or not for as long as the caller would wait."""


class BusFull(BusError):
    """Redis has no memory left for it. Nothing was written; there may be room later."""


class Backoff:
    """Waits that double from `first_s` to `most_s`, each shortened at random so that a crowd does not come back at
    once.
    """

    def __init__(self, first_s: float = 0.05, most_s: float = 2.0) -> None:
        self._first_s, self._most_s = first_s, most_s
        self.failures = 0

    def next(self) -> float:
        """How long to wait now, in seconds."""
        self.failures += 1
        return random.uniform(0.5, 1.0) * min(self._most_s, self._first_s * (1 << min(self.failures - 1, 16)))

    def reset(self) -> None:
        """It worked again."""
        self.failures = 0

    @property
    def level(self) -> int:
        """How loud to say that it failed: one broken connection is nothing, an outage is said once, and once more."""
        return logging.WARNING if self.failures in (3, 30) else logging.DEBUG


class Background:
    """A task that belongs to an object instead of a scope, and lasts as long as that does.

    A task group would do, but one that is entered in `start()` and left in `aclose()` must be left by the task that
    entered it, which a fixture or a web framework does not promise.

    Nobody waits for it. So an error that it does not handle is logged at once, and it begins anew after a pause: what
    rests on it (a client's lease, everything that waits for events) must not end without a word. `name` says in the log
    what it does: "that ...".
    """

    def __init__(self, run: Callable[[], Awaitable[None]], name: str) -> None:
        self._run = run
        self._name = name
        self._task = asyncio.get_running_loop().create_task(self._body(), name=f"tracewire: the task {name}")

    async def _body(self) -> None:
        backoff = Backoff(_ANEW_S, _ANEW_MOST_S)
        while True:
            begun = anyio.current_time()
            try:
                return await self._run()
            except Exception as error:
                if anyio.current_time() - begun > 2 * _ANEW_MOST_S:
                    backoff.reset()
                pause = backoff.next()
                logger.error(
                    "the task %s failed, and begins anew in %.1f s: %r",
                    *(self._name, pause, error),
                    exc_info=error if backoff.failures == 1 else None,
                )
            await anyio.sleep(pause)

    def cancel(self) -> None:
        """Have it end soon."""
        self._task.cancel()

    async def aclose(self) -> None:
        """Cancel it and wait for its end, from any task."""
        self._task.cancel()
        with anyio.CancelScope(shield=True):
            await asyncio.wait([self._task])
        if not self._task.cancelled():
            self._task.result()


class Wakeup:
    """Wakes the tasks that wait, if any do. Costs nothing while none does, as an event that is renewed would."""

    __slots__ = ("_loop", "_waiters")

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._waiters: list[asyncio.Future[None]] = []

    async def wait(self) -> None:
        """Wait for the next `notify`."""
        if self._loop is None:
            # Asked once: up to Python 3.11 each time is a system call.
            self._loop = asyncio.get_running_loop()
        waiter = self._loop.create_future()
        self._waiters.append(waiter)
        try:
            await waiter
        finally:
            self._waiters.remove(waiter)

    def notify(self) -> None:
        """Wake them."""
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)


class Refreshed(Generic[T]):
    """What is asked for again when it is older than whoever wants it likes: once for all who want it meanwhile.

    If asking fails, it fails for all of them. It goes on for as long as one of them waits.
    """

    __slots__ = ("_asking", "_at", "_begun", "_run", "_value", "_waiting")

    def __init__(self, run: Callable[[], Awaitable[T]]) -> None:
        self._run = run
        self._at = -math.inf
        self._value: T
        self._asking: asyncio.Task[T] | None = None
        #: When the asking under way began.
        self._begun = math.inf
        #: How many wait for it.
        self._waiting = 0

    def forget(self) -> None:
        """Ask the next time, however young it is."""
        self._at = -math.inf

    async def get(self, age_s: float) -> T:
        """It, as it was at most so many seconds ago. Raises what asking raises."""
        now = anyio.current_time()
        if now - self._at < age_s:
            return self._value
        if self._asking is None or self._begun < now - age_s:
            self._begun, self._waiting = math.inf, 0
            self._asking = asyncio.get_running_loop().create_task(self._ask(), name="tracewire asks for all")
        asking = self._asking
        self._waiting += 1
        try:
            return await asyncio.shield(asking)
        except Exception as error:
            # Of its own: whoever raises an error writes to it.
            raise _copy(error) from error.__cause__
        finally:
            if asking is self._asking:
                self._waiting -= 1
                if not self._waiting:
                    self._asking = None
                    asking.cancel()

    async def _ask(self) -> T:
        self._begun = anyio.current_time()
        self._value = value = await self._run()
        self._at = anyio.current_time()
        return value


class Turns:
    """Lets `count` callers through in each turn of the event loop, in their order, and anybody while there are fewer.

    What the first of a crowd have made is then on its way while the others make theirs.
    """

    __slots__ = ("_count", "_left", "_loop", "_waiting")

    def __init__(self, count: int) -> None:
        self._count = self._left = count
        self._loop: asyncio.AbstractEventLoop | None = None
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def wait(self) -> None:
        """Wait for one's turn."""
        if self._loop is None:
            # Asked once: up to Python 3.11 each time is a system call.
            self._loop = asyncio.get_running_loop()
        if self._left == self._count:
            self._loop.call_soon(self._next)
        if self._left:
            self._left -= 1
            return
        waiter = self._loop.create_future()
        self._waiting.append(waiter)
        await waiter

    def _next(self) -> None:
        """A turn of the loop has passed, and whoever waits goes first in the next."""
        assert self._loop is not None
        self._left = self._count
        while self._left and self._waiting:
            waiter = self._waiting.popleft()
            # Some have been cancelled.
            if not waiter.done():
                waiter.set_result(None)
                self._left -= 1
        if self._left < self._count:
            self._loop.call_soon(self._next)


class After(tuple[Any, ...]):
    """A command that is carried out only once those before it in its call have been, wherever each of them goes.

    One server takes commands in their order; of several, each takes its own.
    """

    __slots__ = ()


class Transport(Protocol):
    """Opens connections to whichever server is the one to talk to at that moment."""

    async def open(self, spare: Any = None) -> Any:
        """A connection of redis-py's, connected. `spare` is a closed one that was opened here, to be used again or not.

        Raises:
            redis.exceptions.RedisError: there is none to be had.
        """

    async def holds(self, connection: Any) -> bool:
        """Whether `connection`, which was opened here, still goes to the right server. Asked before each use."""

    async def aclose(self) -> None:
        """Close what it holds itself."""


class Server:
    """The transport to one server, by its URL (`redis://`, `rediss://` or `unix://`)."""

    def __init__(self, url: str, **options: Any) -> None:
        from redis.asyncio.connection import ConnectionPool
        from redis.asyncio.retry import Retry
        from redis.backoff import NoBackoff
        from redis.exceptions import RedisError

        options = {
            # Retrying is ours: a command sent twice unseen would be refused the second time, or done twice.
            "retry": Retry(NoBackoff(), 0),
            # Time is kept around whole calls instead.
            "socket_timeout": None,
            "socket_connect_timeout": CONNECT_S,
            # The replies' shapes are the same on all versions.
            "protocol": 2,
            **options,
        }
        if not url.startswith("unix:"):
            options["socket_keepalive"] = True
        if "lib_name=" not in url and "lib_version=" not in url:
            options |= _driver()
        try:
            # Redis-py's pool, for what it knows of URLs: it makes connections and holds none.
            self._factory: Any = ConnectionPool.from_url(url, **options)
            self._factory.make_connection()  # type: ignore[no-untyped-call]
        except (TypeError, ValueError, RedisError) as error:
            raise ValueError(_refused(url, error)) from None

    async def open(self, spare: Any = None) -> Any:
        """A connection to it."""
        # Making one takes longer than connecting it.
        connection = self._factory.make_connection() if spare is None else spare
        try:
            await connection.connect()
        except BaseException:
            await discard(connection)
            raise
        return connection

    async def holds(self, connection: Any) -> bool:
        """There is no other."""
        return True

    async def aclose(self) -> None:
        """It holds nothing."""


def _refused(url: str, error: Exception) -> str:
    """What redis-py has against a URL, without what may be a part of a password."""
    option = re.search(r"(?:keyword argument|Invalid value for) '(\w+)'", str(error))
    if option is None and isinstance(error, ValueError):
        return unreadable(url)
    if option is None:
        # What stands behind a colon is the value.
        return f"the URL {redacted(url)} is refused: {str(error).partition(':')[0]}"
    shown = redacted(url)
    name = repr(option[1]) if re.search(rf"[?&]{option[1]}=", shown) else "its name may be a part of a password"
    what = "an option that redis-py does not know" if isinstance(error, TypeError) else "an option with a wrong value"
    return f"the URL {shown} has {what}: {name}"


@cache
def _driver() -> dict[str, Any]:
    """What connections tell Redis of us. Left to itself, redis-py reads its version from disk for each of them."""
    try:
        from redis.driver_info import DriverInfo
    except ImportError:  # before 7.1
        return {}
    return {"driver_info": DriverInfo()}


def _transport(url: str) -> Transport:
    if parsed(url).scheme.endswith("+sentinel"):
        from .sentinel import Sentinels

        return Sentinels(url)
    return Server(url)


async def discard(connection: Any) -> None:
    """Close a connection at once, whatever state it is in."""
    with anyio.CancelScope(shield=True):
        try:
            await connection.disconnect(nowait=True)
        except Exception as error:
            logger.debug("closing a connection to Redis: %r", error)


class Link:
    """One connection, opened when first needed and again after it broke. Not for concurrent use."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._connection: Any = None
        #: The last one, closed.
        self._spare: Any = None
        #: How often a connection was opened: what one server acknowledged, the next may not have.
        self.opened = 0

    @property
    def connected(self) -> bool:
        """Whether it has a connection, as far as it knows."""
        return self._connection is not None

    async def connect(self) -> None:
        """Connect if it is not.

        Raises:
            redis.exceptions.RedisError: it could not.
        """
        if self._connection is not None and not await self._transport.holds(self._connection):
            await self.drop()
        if self._connection is None:
            spare, self._spare = self._spare, None
            try:
                self._connection = await self._transport.open(spare)
            except BaseException:
                self._spare = spare
                raise
            self.opened += 1

    async def prepare(self, *commands: Sequence[Any]) -> None:
        """Connect to wherever `commands` go.

        Raises:
            redis.exceptions.RedisError: it could not.
        """
        await self.connect()

    async def ask(
        self,
        *commands: Sequence[Any],
        timeout_s: float = COMMAND_S,
        stay: bool = False,
        wait: bool = True,
        packed: bytes | None = None,
    ) -> list[Any]:
        """Send `commands` together and return their raw replies; a refused one's is its `ResponseError`.

        They are carried out in this order, but for scripts that Redis does not know yet: those come after the others.
        What is `After` never comes before any of them. A server that takes no writes is left: the next call asks where
        to go. `stay` and `wait` are for clusters.
        `packed` is all of them as they go over the wire, if the caller has it.

        Raises:
            redis.exceptions.RedisError: the connection failed: some of them may have been carried out.
            TimeoutError: no reply came; likewise.
        """
        from redis.exceptions import NoScriptError

        replies = await self.exchange(commands, timeout_s, packed)
        unknown = [place for place, reply in enumerate(replies) if isinstance(reply, NoScriptError)]
        texts = {place: command for place in unknown if (command := with_text(commands[place]))}
        if texts:
            for place, reply in zip(texts, await self.exchange([*texts.values()], timeout_s), strict=True):
                replies[place] = reply
        if any(map(_is_demoted, replies)):
            await self.drop()
        return replies

    async def ask_beside(self, other: Link, *commands: Sequence[Any]) -> list[Any]:
        """`ask` the server that `other` is connected to."""
        return await self.ask(*commands)

    async def exchange(
        self, commands: Sequence[Sequence[Any]], timeout_s: float, packed: bytes | None = None
    ) -> list[Any]:
        """Send `commands` and read a reply to each, whatever it says."""
        from redis.exceptions import ConnectionError, ResponseError

        if packed is None:
            packed = _packed(commands)
        await self.connect()
        connection = self._connection
        replies: list[Any] = []
        try:
            with anyio.fail_after(timeout_s):
                await connection.send_packed_command(packed)
                for _ in commands:
                    try:
                        replies.append(await connection.read_response())
                    except ResponseError as error:
                        replies.append(_named(error, commands[len(replies)]))
        except BaseException as error:
            # Replies of this call must not be read by the next one.
            await self.drop()
            if isinstance(error, OSError) and not isinstance(error, TimeoutError):
                raise ConnectionError(str(error)) from error
            raise
        return replies

    async def drop(self) -> None:
        """Close the connection at once. The next use opens it anew."""
        connection, self._connection = self._connection, None
        if connection is not None:
            await discard(connection)
            self._spare = connection


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
        self._trips: set[asyncio.Task[None]] = set()
        self._departing: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._turn = asyncio.Semaphore(CONCURRENT)
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
        packed = b"" if self._cluster is not None else _packed(commands)
        if alone or len(packed) > _SMALL_BYTES:
            # A semaphore that is free lets a cancelled caller through.
            await anyio.lowlevel.checkpoint_if_cancelled()
            async with self._turn:
                return await self._lend(commands, packed, beside)
        if self._loop is None:
            # Asked once: up to Python 3.11 each time is a system call.
            self._loop = asyncio.get_running_loop()
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

    def _arrived(self, trip: asyncio.Task[None]) -> None:
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
                        call.trip, call.aboard = asyncio.current_task(), calls
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
                    call.replies.set_exception(_copy(error))
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
                packed=b"".join([call.packed for call in calls]),
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

    async def _lend(self, commands: Sequence[Sequence[Any]], packed: bytes, beside: Link | None) -> list[Any]:
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
        self.broken_at = asyncio.get_running_loop().time()
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
        """Have connections for as many round trips at once as a burst of calls makes.

        One that cannot be opened now is opened when it is needed.
        """
        for _ in range(len(self._idle), WARM):
            link = self.link()
            try:
                await link.connect()
            except Exception as error:
                logger.debug("a connection to Redis was not opened ahead: %r", error)
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
                    raise BusUnavailable(f"Redis at {redacted(self.url)} {state}: {error}") from error
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

    def __init__(self, commands: Sequence[Sequence[Any]], packed: bytes, replies: asyncio.Future[list[Any]]) -> None:
        self.commands = commands
        self.packed = packed
        self.replies = replies
        self.trip: asyncio.Task[None] | None = None
        self.aboard: list[_Call] = []


def _packed(commands: Sequence[Sequence[Any]]) -> bytes:
    """Commands as they go over the wire.

    Scripts that an `After` follows go with their texts: one that Redis did not know would be sent again, and so carried
    out, after what is to come after it.
    """
    from hiredis import pack_command

    pack: Callable[[Any], bytes] = pack_command
    last = 0
    for place, command in enumerate(commands):
        if isinstance(command, After):
            last = place
    if last:
        ahead = [one if isinstance(one, After) else with_text(one) or one for one in commands[:last]]
        commands = [*ahead, *commands[last:]]
    return b"".join(map(pack, commands))


def _copy(error: Exception) -> Exception:
    """The same error once more, with what it came of."""
    try:
        one = copy.copy(error)
    except Exception:  # one that is made of more than it tells
        return error
    one.__cause__, one.__context__ = error.__cause__, error.__context__
    one.__suppress_context__ = error.__suppress_context__
    return one.with_traceback(error.__traceback__)


#: What Redis says of a script that it stopped at a command which it does not take for now.
_OF_A_SCRIPT: Final = re.compile(r"@user_script: ?\d+: -(READONLY|OOM|MISCONF|NOREPLICAS) ")


def is_transient(error: Exception) -> bool:
    """Whether the same command may well be taken in a moment: the connection broke, or the server is not itself."""
    from redis import exceptions as redis

    if _is_unwelcome(error):
        return False
    if isinstance(error, (redis.ConnectionError, redis.TimeoutError, redis.InvalidResponse, OSError)):
        return True
    return isinstance(
        error, (redis.ReadOnlyError, redis.OutOfMemoryError, redis.TryAgainError, redis.ClusterDownError)
    ) or (
        isinstance(error, redis.ResponseError)
        and (
            str(error).startswith(("MISCONF", "BUSY ", "CLUSTERDOWN", "MASTERDOWN", "UNBLOCKED ", "NOREPLICAS "))
            or bool(_OF_A_SCRIPT.search(str(error)))
        )
    )


def is_full(error: object) -> bool:
    """Whether this is Redis's word that it has no memory left for a command, or for one of a script's."""
    if not isinstance(error, Exception):
        return False
    from redis.exceptions import OutOfMemoryError

    text = str(error)
    # Redis-py may have cut the code off.
    return isinstance(error, OutOfMemoryError) or text.startswith(("OOM ", "-OOM ")) or ": -OOM " in text


def _is_demoted(reply: Any) -> bool:
    """Whether a reply says that its server is, or has become, a replica."""
    from redis.exceptions import ReadOnlyError, ResponseError

    if not isinstance(reply, ResponseError):
        return False
    said = _OF_A_SCRIPT.search(str(reply))
    return (
        isinstance(reply, ReadOnlyError)
        or str(reply).startswith("UNBLOCKED ")
        or (said is not None and said[1] == "READONLY")
    )


#: What Redis says of a script that its user may not run to its end.
_NOT_IN_A_SCRIPT: Final = "The user executing the script can't"
#: Why a server ends a handshake, as OpenSSL calls it.
_BAD_CERTIFICATE: Final = re.compile(r"CERTIFICATE|UNKNOWN_CA|BAD_SIGNATURE")


def _named(error: Any, command: Sequence[Any]) -> Any:
    """A refusal with the command that it is one of: Redis names no key."""
    from redis.exceptions import NoPermissionError

    if not (isinstance(error, NoPermissionError) or _NOT_IN_A_SCRIPT in str(error)):
        return error
    name, key = str(command[0]), command[1] if len(command) > 1 else ""
    if name in ("EVAL", "EVALSHA"):
        name, key = "a script", command[3]
    elif name == "XREAD":
        key = command[list(command).index("STREAMS") + 1]
    shown = key.decode("utf-8", "replace") if isinstance(key, bytes) else str(key)
    return NoPermissionError(f"{name} {'on ' if ':' in shown else ''}{shown}: {error}")


def _is_unwelcome(error: BaseException) -> bool:
    """Whether Redis does not take our credentials, or we its certificate; redis-py may wrap that as a failed
    connection.
    """
    from ssl import SSLError

    from redis.exceptions import AuthenticationError, AuthorizationError

    one: BaseException | None = error
    seen: set[int] = set()
    while one is not None and id(one) not in seen:
        seen.add(id(one))
        if isinstance(one, (AuthenticationError, AuthorizationError)):
            return True
        if isinstance(one, SSLError) and _BAD_CERTIFICATE.search(str(one.reason)):
            return True
        one = one.__cause__ or one.__context__
    return False


def as_bus_error(error: Exception) -> Exception:
    """What redis-py raised, as an error of ours; anything else as it is."""
    from redis.exceptions import MovedError, NoPermissionError, RedisError

    if _is_unwelcome(error):
        return BusError(f"Redis lets nobody in by these credentials or certificates: {error}")
    if isinstance(error, NoPermissionError):
        return NotAllowed(f"Redis does not allow this user {error}")
    if isinstance(error, MovedError):
        return BusError(f"this Redis is a node of a cluster: its URL begins with redis+cluster:// ({error})")
    if isinstance(error, RedisError):
        return BusError(f"Redis refused: {error}")
    return error
