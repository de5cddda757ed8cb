"""Connections to Redis, shared by short commands.

The connections are those of `asyncio_connection.py`, and on trio those of `anyio_connection.py`. A cancelled command
closes its connection, since its reply would arrive later. This module decides which commands may be sent twice.

`Connections` shares a bounded number of connections between short commands, and sends commands of concurrent calls
together. A caller that blocks on Redis, or must not wait behind others, opens a `Link` of its own.

Each new connection goes to the server that the URL names, or that the sentinels name at that time (`sentinel.py`). On a
cluster a link has a connection to each node that it needs (`cluster.py`).

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

from .urls import parse_url, redacted

if TYPE_CHECKING:
    from .cluster import Cluster
    from .guard import Guard
from tracewire_bus.wire.pieces import Pieces

from .backoff import Backoff
from .errors import BusFull, BusUnavailable, as_bus_error, copy_of, is_full, is_transient
from .link import Link, ahead_of, pack_commands
from .loops import Future, Loop, Task, Timer, running_loop, semaphore
from .server import Server, Transport

__all__ = ["Connections"]

logger = logging.getLogger("tracewire")

#: Concurrent round trips of short commands, and the number of connections kept for them.
CONCURRENT: Final = 8

#: The time for one try of a call at least, however little patience is left, in seconds.
_LEAST_TRY_S: Final = 2.0

#: Connections that a client opens ahead of its first commands.
WARM: Final = 3

#: Limits of a batch, which is one round trip: its calls, its bytes, and the bytes of one call.
_BATCH_CALLS, _BATCH_BYTES, _BATCHED_CALL_BYTES = 128, 256 * 1024, 32 * 1024


def _transport(url: str) -> Transport:
    if parse_url(url).scheme.endswith("+sentinel"):
        from .sentinel import Sentinels

        return Sentinels(url)
    return Server(url)


class Connections:
    """Connections to one Redis. Makes links, and shares a bounded number of them between short commands.

    Args:
        url: the URL of the Redis.
        patience_s: how long `command` and `commands` retry while Redis is unreachable, in seconds.
        unbatched: send each call in a round trip of its own.
        guard: parses what is read over these connections; a new one by default.
        parent: other connections to the same Redis, whose knowledge of the servers these share. Close these first.

    Attributes:
        url: the URL of the Redis.
        guard: parses what is read over these connections.
    """

    def __init__(
        self,
        url: str,
        *,
        patience_s: float,
        unbatched: bool = False,
        guard: Guard | None = None,
        parent: Connections | None = None,
    ) -> None:
        from .guard import Guard

        self.url = url
        self._parent = parent
        self.guard = guard or Guard()
        self._unbatched = unbatched
        self._patience_s = patience_s
        self._cluster: Cluster | None = None
        self._transport: Transport | None = None
        if parent is not None:
            self._cluster, self._transport = parent._cluster, parent._transport
        elif parse_url(url).scheme.endswith("+cluster"):
            from .cluster import Cluster

            self._cluster = Cluster(url)
        else:
            self._transport = _transport(url)
        self._idle: list[Link] = []
        # The calls that wait for a batch, the tasks that send batches, and the one of them that takes the next calls.
        self._calls: deque[_Call] = deque()
        self._flushes: set[Task[None]] = set()
        self._scheduled: Task[None] | None = None
        self._loop: Loop | None = None
        self._limit = semaphore(CONCURRENT)
        #: Whether this user may run scripts by their digests only; None while that is not known.
        self._digests_only: bool | None = None
        self._closed = False
        self._broken_at = -math.inf

    @property
    def clustered(self) -> bool:
        """Whether the Redis is a cluster."""
        return self._cluster is not None

    def slot(self, key: str) -> int | None:
        """The slot of a key on a cluster, else `None`. A blocking command can only have keys of one slot."""
        return None if self._cluster is None else self._cluster.slot(key)

    def link(self, near: str = "") -> Link:
        """A new link for the caller alone, not yet connected. The caller closes it by `drop`.

        Args:
            near: for a link that blocks, a key of its commands. On a cluster the link connects to that key's node only.
        """
        if self._cluster is not None:
            from .cluster import ClusterLink

            return ClusterLink(self._cluster, near)
        assert self._transport is not None
        return Link(self._transport)

    def unbatched(self) -> Connections:
        """New connections to the same Redis that batch no calls: for calls with large replies."""
        return Connections(self.url, patience_s=self._patience_s, unbatched=True, guard=self.guard, parent=self)

    @property
    def broken_at(self) -> float:
        """When Redis was last found unreachable, or was another server than before, by the event loop's clock.

        -inf for never.
        """
        return self._broken_at if self._transport is None else max(self._broken_at, self._transport.moved_at)

    def note_outage(self) -> None:
        """Note that Redis does not answer a caller, or has not answered one."""
        self._broken_at = anyio.current_time()

    async def execute_once(
        self,
        *commands: Sequence[Any],
        on_node_of: Link | None = None,
        unbatched: bool = False,
        within_s: float = 0.0,
    ) -> list[Any]:
        """Execute commands on a shared link, without retries; replies and errors are those of `Link.execute`.

        Small concurrent calls are sent as one batch. On a cluster each call has a round trip of its own, since a call
        must not wait for nodes that others need.

        Args:
            commands: the commands.
            on_node_of: execute on the server to which this link is connected.
            unbatched: send this call in a round trip of its own.
            within_s: how long a call that is sent in a batch waits for other calls to be sent with, in seconds.

        Raises:
            anyio.ClosedResourceError: these connections were closed.
        """
        if self._closed:
            raise anyio.ClosedResourceError
        if self._cluster is None and (ahead := ahead_of(commands)) and await self._may_send_no_texts():
            return await self._in_turns(commands[:ahead], commands[ahead:])
        unbatched = unbatched or self._unbatched or on_node_of is not None or self._cluster is not None
        # Packed first, so that commands that cannot be packed fail this call only.
        packed = b"" if self._cluster is not None else pack_commands(commands)
        if unbatched or len(packed) > _BATCHED_CALL_BYTES:
            # A free semaphore does not raise for a cancelled caller.
            await anyio.lowlevel.checkpoint_if_cancelled()
            async with self._limit:
                return await self._execute_unbatched(commands, packed, on_node_of)
        if self._loop is None:
            # Kept, since up to Python 3.11 `get_running_loop` makes a system call.
            self._loop = running_loop()
        call = _Call(commands, packed, self._loop.create_future())
        self._calls.append(call)
        timer: Timer | None = None
        if within_s:
            timer = self._loop.call_at(self._loop.time() + within_s, self._schedule)
        else:
            self._schedule()
        try:
            return await call.replies
        finally:
            if timer is not None:
                timer.cancel()
            # A call that is cancelled before it is sent has no effect. If all calls of a batch are cancelled, so is the
            # batch, which closes its connection.
            call.replies.cancel()
            if call.flush is None:
                with suppress(ValueError):
                    self._calls.remove(call)
            elif all(one.replies.done() for one in call.batch):
                call.flush.cancel()

    async def _may_send_no_texts(self) -> bool:
        """Whether this user runs scripts by their digests only; asks Redis once."""
        if self._parent is not None:
            return await self._parent._may_send_no_texts()
        if self._digests_only is None:
            from redis.exceptions import NoPermissionError

            (reply,) = await self.execute_once(("EVAL", "return 1", 0))
            self._digests_only = isinstance(reply, NoPermissionError)
        return self._digests_only

    async def _in_turns(self, ahead: Sequence[Sequence[Any]], rest: Sequence[Sequence[Any]]) -> list[Any]:
        """Execute `rest` after `ahead`, whose scripts go by their digests, unless Redis has not loaded one of these."""
        from redis.exceptions import TryAgainError

        replies = await self.execute_once(*ahead)
        missing = [reply for reply in replies if isinstance(reply, TryAgainError)]
        return [*replies, *(missing[:1] * len(rest) if missing else await self.execute_once(*map(tuple, rest)))]

    def _schedule(self) -> None:
        """Start a task that sends the waiting calls once all tasks of this tick of the event loop have made theirs."""
        if self._calls and self._scheduled is None and self._loop is not None and not self._closed:
            flush = self._scheduled = self._loop.create_task(self._flush_batch(), name="tracewire commands")
            self._flushes.add(flush)
            flush.add_done_callback(self._flushed)

    def _flushed(self, flush: Task[None]) -> None:
        self._flushes.discard(flush)
        if self._scheduled is flush:
            # The task was cancelled before it took any calls.
            self._scheduled = None
            self._schedule()

    async def _flush_batch(self) -> None:
        """Send the calls that wait once a connection is free, as one batch."""
        calls: list[_Call] = []
        try:
            async with self._limit:
                size = 0
                while self._calls and len(calls) < _BATCH_CALLS and size < _BATCH_BYTES:
                    call = self._calls.popleft()
                    if not call.replies.done():
                        call.flush, call.batch = self._scheduled, calls
                        calls.append(call)
                        size += len(call.packed)
                self._scheduled = None
                self._schedule()
                if calls:
                    await self._send(calls)
        except Exception as error:
            for call in calls:
                if not call.replies.done():
                    # A copy for each caller: raising an error changes its traceback.
                    call.replies.set_exception(copy_of(error))
        finally:
            for call in calls:
                # The connections were closed, or the task was cancelled.
                if not call.replies.done():
                    call.replies.set_exception(anyio.ClosedResourceError())
            # The calls refer to this list: break the cycle.
            calls.clear()

    async def _send(self, calls: list[_Call]) -> None:
        if self._closed:
            raise anyio.ClosedResourceError
        link = self._idle.pop() if self._idle else self.link()
        try:
            await link.connect()
            # Some callers may have given up while the link connected.
            calls[:] = [call for call in calls if not call.replies.done()]
            if not calls:
                await self._give_back(link)
                return
            replies = await link.execute(
                *[command for call in calls for command in call.commands],
                packed=b"".join([bytes(call.packed) for call in calls]),
            )
        except BaseException as error:
            await self._discard_broken(link, error)
            raise
        await self._give_back(link)
        found = iter(replies)
        for call in calls:
            own = list(islice(found, len(call.commands)))
            if not call.replies.done():
                call.replies.set_result(own)

    async def _execute_unbatched(
        self, commands: Sequence[Sequence[Any]], packed: bytes | Pieces, on_node_of: Link | None
    ) -> list[Any]:
        if self._closed:
            raise anyio.ClosedResourceError
        link = self._idle.pop() if self._idle else self.link()
        try:
            if on_node_of is None:
                replies = await link.execute(*commands, packed=packed)
            else:
                replies = await link.execute_on_node_of(on_node_of, *commands)
        except BaseException as error:
            await self._discard_broken(link, error)
            raise
        await self._give_back(link)
        return replies

    async def _discard_broken(self, link: Link, error: BaseException) -> None:
        """Close a shared link on which a call failed with `error`.

        If the server was unreachable, close the idle links too; otherwise each would fail one more call.
        """
        from redis.exceptions import ConnectionError

        await link.drop()
        if not isinstance(error, Exception):
            return
        self.note_outage()
        # A slow command, or one unreachable node of a cluster, is no reason to close the other links.
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
        """Open `WARM` connections ahead of the first burst of calls. A failure is ignored: calls open them later."""
        for _ in range(len(self._idle), WARM):
            link = self.link()
            try:
                await link.connect()
            except Exception as error:
                logger.debug("could not open a connection to Redis in advance: %r", error)
                return
            await self._give_back(link)

    async def command(self, *command: Any, unbatched: bool = False) -> Any:
        """Execute a command, and retry it for `patience_s` while Redis is unreachable.

        Redis may execute the command twice.

        Args:
            command: the command's name and arguments.
            unbatched: send it in a round trip of its own, for a large reply.

        Returns:
            the raw reply.

        Raises:
            BusError: Redis refused the command.
            BusUnavailable: Redis was unreachable for `patience_s`.
        """
        return (await self.commands(command, unbatched=unbatched))[0]

    async def commands(
        self, *commands: Sequence[Any], refuse_full: bool = False, unbatched: bool = False, within_s: float = 0.0
    ) -> list[Any]:
        """Execute several commands in one round trip, with the retries and errors of `command`.

        The last try ends with the patience, or after `_LEAST_TRY_S`.

        Args:
            commands: the commands; all are retried together.
            refuse_full: do not retry when Redis has no memory left.
            unbatched: send them in a round trip of their own.
            within_s: how long they may wait for other calls, to share a round trip with these, in seconds.

        Returns:
            the raw replies.

        Raises:
            BusFull: Redis has no memory left, and `refuse_full` is set.
        """
        backoff = Backoff()
        deadline = anyio.current_time() + self._patience_s
        while True:
            try:
                # A server that was slow for the whole time may still answer the last try.
                with anyio.fail_after(max(_LEAST_TRY_S, deadline - anyio.current_time())):
                    replies = await self.execute_once(*commands, unbatched=unbatched, within_s=within_s)
                for reply in replies:
                    if isinstance(reply, Exception):
                        raise reply
                return replies
            except Exception as error:
                if refuse_full and is_full(error):
                    raise BusFull("Redis has no memory left") from error
                if not is_transient(error):
                    raise as_bus_error(error) from error
                if not is_full(error):
                    self.note_outage()
                pause = backoff.next()
                if anyio.current_time() + pause > deadline:
                    state = "has no memory left" if is_full(error) else "is away"
                    why = str(error) or "it has not answered in time"
                    hint = "the client reconnects by itself; the call can be repeated"
                    raise BusUnavailable(f"Redis at {redacted(self.url)} {state}: {why} ({hint})") from error
                await anyio.sleep(pause)

    async def aclose(self) -> None:
        """Close the idle connections now, and the others when their calls end.

        Calls that were not sent yet raise `anyio.ClosedResourceError`.
        """
        self._closed = True
        while self._calls:
            call = self._calls.popleft()
            if not call.replies.done():
                call.replies.set_exception(anyio.ClosedResourceError())
        while self._idle:
            await self._idle.pop().drop()
        if self._parent is None and self._transport is not None:
            await self._transport.aclose()


class _Call:
    """The commands of one batched call.

    Attributes:
        commands: the commands.
        packed: the commands in Redis's protocol.
        replies: receives the replies.
        flush: the task that sends the call's batch, once it took the call.
        batch: all calls of that batch.
    """

    __slots__ = ("batch", "commands", "flush", "packed", "replies")

    def __init__(self, commands: Sequence[Sequence[Any]], packed: bytes | Pieces, replies: Future[list[Any]]) -> None:
        self.commands = commands
        self.packed = packed
        self.replies = replies
        self.flush: Task[None] | None = None
        self.batch: list[_Call] = []
