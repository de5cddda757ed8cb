"""A connection to Redis for one caller, reopened after it breaks. Commands on it may block."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final

import anyio
import anyio.lowlevel

from tracewire_bus.wire.pieces import LARGE_BYTES, Pieces

from .errors import BusFull, BusUnavailable, as_bus_error, is_demoted, is_full, is_transient, name_command, unloaded
from .loops import Task, Timer, running_loop
from .scripts import with_text
from .server import Transport, discard

__all__ = ["AfterOthers", "Link", "ahead_of", "ask_once", "pack_arguments", "pack_commands"]

#: The time for the replies of one call, in seconds, after which the connection is closed. A reply may be large, and a
#: script slow. A caller that cannot wait so long limits its call.
COMMAND_S: Final = 30.0
#: How often a link that awaits replies asks whether its server is still the right one, in seconds.
WATCH_S: float = 1.0


class AfterOthers(tuple[Any, ...]):
    """A command that runs only after all commands before it in the call, on whichever nodes of a cluster they run.

    One server runs commands in their order anyway. The nodes of a cluster run theirs independently.
    """

    __slots__ = ()


class Link:
    """One connection, opened on first use and again after it broke. Not for concurrent use.

    Attributes:
        opened: how many connections were opened so far. After a change, the server may be another one, which may lack
            writes that the previous one acknowledged.
    """

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._connection: Any = None
        # The previous connection, closed. The transport may open it again.
        self._spare: Any = None
        self.opened = 0

    @property
    def connected(self) -> bool:
        """Whether the link has a connection that was not found broken yet."""
        return self._connection is not None

    async def connect(self) -> None:
        """Open a connection if there is none, or if the transport now chooses another server.

        Raises:
            redis.exceptions.RedisError: the connection could not be opened.
        """
        if self._connection is not None and not await self._transport.is_current(self._connection):
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
        """Open the connections that `commands` need.

        Raises:
            redis.exceptions.RedisError: a connection could not be opened.
        """
        await self.connect()

    async def execute(
        self,
        *commands: Sequence[Any],
        timeout_s: float = COMMAND_S,
        stay: bool = False,
        wait: bool = True,
        packed: bytes | Pieces | None = None,
    ) -> list[Any]:
        """Execute commands in one round trip.

        Redis runs the commands in this order, except that scripts which Redis does not have cached run after the
        others; an `AfterOthers` still runs after every command before it. If a reply says that the server is a replica,
        the link closes the connection, and the next call connects to the current master.

        Args:
            commands: the commands, each as a sequence of its name and arguments.
            timeout_s: the time for all replies, in seconds.
            stay: on a cluster, fail rather than connect to a node without a connection.
            wait: on a cluster, retry commands that a slot's migration blocks.
            packed: all commands as `pack_commands` packs them, if the caller has packed them already.

        Returns:
            the raw reply to each command; for a command that Redis refused, its `ResponseError`.

        Raises:
            redis.exceptions.RedisError: the connection failed. Redis may have executed some of the commands.
            TimeoutError: replies did not arrive in time. Redis may have executed some of the commands.

        While a link awaits replies, it asks once a second whether the transport chooses another server by now. If so,
        the connection counts as failed.
        """
        from redis.exceptions import NoScriptError

        replies = await self.exchange(commands, timeout_s, packed)
        if not any(isinstance(reply, Exception) for reply in replies):
            return replies
        unknown = [place for place, reply in enumerate(replies) if isinstance(reply, NoScriptError)]
        texts = {place: command for place in unknown if (command := with_text(commands[place]))}
        if texts:
            for place, reply in zip(texts, await self.exchange([*texts.values()], timeout_s), strict=True):
                replies[place] = unloaded(reply) or reply
        if any(map(is_demoted, replies)):
            await self.drop()
        return replies

    async def execute_on_node_of(self, other: Link, *commands: Sequence[Any]) -> list[Any]:
        """Execute commands on the server to which `other` is connected; see `execute`.

        On a cluster, each reply is `None` if `other` has no connection.
        """
        return await self.execute(*commands)

    async def exchange(
        self, commands: Sequence[Sequence[Any]], timeout_s: float, packed: bytes | Pieces | None = None
    ) -> list[Any]:
        """Send commands and read the reply to each, without retries; arguments and errors are those of `execute`."""
        from redis.exceptions import ConnectionError, ResponseError

        if packed is None:
            packed = pack_commands(commands)
        await self.connect()
        connection = self._connection
        replies: list[Any] | None = None
        try:
            with anyio.fail_after(timeout_s) as scope, _Watch(self._transport, connection, scope):
                await connection.send_packed_command(packed.buffers if type(packed) is Pieces else packed)
                replies = await connection.read_replies(len(commands))
            if replies is None:
                raise ConnectionError("another server has taken over, and this one has not answered")
            self._transport.note_replies(connection)
        except BaseException as error:
            # The next call must not read the replies to this one.
            await self.drop()
            if isinstance(error, OSError) and not isinstance(error, TimeoutError):
                raise ConnectionError(str(error)) from error
            raise
        for place, reply in enumerate(replies):
            if isinstance(reply, ResponseError):
                replies[place] = name_command(reply, commands[place])
        return replies

    async def drop(self) -> None:
        """Close the connection at once. The next call opens a new one."""
        connection, self._connection = self._connection, None
        if connection is not None:
            await discard(connection)
            self._spare = connection


class _Watch:
    """Cancels `scope`, in which a link awaits replies on `connection`, once the transport chooses another server.

    A server that was replaced may be unable to answer, and to close its connections.
    """

    __slots__ = ("_connection", "_scope", "_task", "_timer", "_transport")

    def __init__(self, transport: Transport, connection: Any, scope: anyio.CancelScope) -> None:
        self._transport, self._connection, self._scope = transport, connection, scope
        self._timer: Timer | None = None
        self._task: Task[None] | None = None

    def __enter__(self) -> None:
        if self._transport.may_change:
            loop = running_loop()
            # Most replies come before that, and need no task.
            self._timer = loop.call_at(loop.time() + WATCH_S, self._begin)

    def __exit__(self, *_: object) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._task is not None:
            self._task.cancel()

    def _begin(self) -> None:
        self._task = running_loop().create_task(self._run(), name="tracewire server watch")

    async def _run(self) -> None:
        while True:
            if not await self._transport.is_current(self._connection):
                return self._scope.cancel()
            await anyio.sleep(WATCH_S)


async def ask_once(link: Link, *commands: Sequence[Any]) -> list[Any]:
    """Execute commands in one round trip over a link, without retries. Returns the raw replies.

    Raises:
        BusUnavailable: Redis does not answer.
        BusFull: Redis has no memory left.
        BusError: Redis refuses.
    """
    try:
        replies = await link.execute(*commands)
        for reply in replies:
            if isinstance(reply, Exception):
                raise reply
    except Exception as error:
        if is_full(error):
            raise BusFull("Redis has no memory left") from error
        if is_transient(error):
            raise BusUnavailable(f"Redis does not answer: {error}") from error
        raise as_bus_error(error) from error
    return replies


def ahead_of(commands: Sequence[Sequence[Any]]) -> int:
    """How many commands stand before the last `AfterOthers`, if a script is among them; else 0."""
    last = max((place for place, one in enumerate(commands) if isinstance(one, AfterOthers)), default=0)
    scripts = any(one[0] == "EVALSHA" and not isinstance(one, AfterOthers) for one in commands[:last])
    return last if scripts else 0


def pack_commands(commands: Sequence[Sequence[Any]]) -> bytes | Pieces:
    """Encode commands in Redis's protocol, as `Pieces` if an argument is `Pieces`.

    Scripts before an `AfterOthers` are sent with their text. By its digest alone, a script that Redis does not have
    cached would be sent again, and so run after the `AfterOthers`. A text of 1.5 to 4 KB costs Redis 3 to 8 µs more
    than a digest, and its sender 2 to 4 µs.
    """
    from hiredis import pack_command

    pack: Callable[[Any], bytes] = pack_command
    last = 0
    for place, command in enumerate(commands):
        if isinstance(command, AfterOthers):
            last = place
    if last:
        ahead = [one if isinstance(one, AfterOthers) else with_text(one) or one for one in commands[:last]]
        commands = [*ahead, *commands[last:]]
    packed: list[bytes | memoryview] = []
    whole = True
    for command in commands:
        try:
            packed.append(pack(command))
        except TypeError:
            packed += _in_pieces(command)
            whole = False
    return b"".join(packed) if whole else Pieces(_coalesced(packed))


def pack_arguments(*arguments: str) -> bytes:
    """Arguments as they stand in a packed command, behind `*`, their number and a line break."""
    return b"".join([b"$%d\r\n%b\r\n" % (len(data), data) for data in map(str.encode, arguments)])


def _in_pieces(command: Sequence[Any]) -> Iterator[bytes | memoryview]:
    """One command as it goes over the wire, without a copy of the buffers of its arguments.

    Raises:
        TypeError: an argument is of a type that no command can hold.
    """
    yield b"*%d\r\n" % len(command)
    for argument in command:
        if type(argument) is Pieces:
            yield b"$%d\r\n" % len(argument)
            yield from argument.buffers
        else:
            kind = type(argument)
            if kind not in (bytes, memoryview, str, int, float):
                raise TypeError(f"a {kind.__name__} cannot be an argument of a command")
            data = argument if kind in (bytes, memoryview) else str(argument).encode()
            yield b"$%d\r\n" % len(data)
            yield data
        yield b"\r\n"


def _coalesced(buffers: Iterable[bytes | memoryview]) -> Iterator[bytes | memoryview]:
    """The same bytes, small buffers joined with their neighbours."""
    small: list[bytes | memoryview] = []
    for buffer in buffers:
        if len(buffer) < LARGE_BYTES:
            small.append(buffer)
            continue
        yield b"".join(small)
        small.clear()
        yield buffer
    yield b"".join(small)
