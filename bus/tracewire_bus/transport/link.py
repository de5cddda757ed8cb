"""A connection to Redis for one caller, which may block on it, and is mended when it breaks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final

import anyio
import anyio.lowlevel

from tracewire_bus.wire.pieces import LARGE_BYTES, Pieces

from .errors import is_demoted, named
from .scripts import with_text
from .server import Transport, discard

__all__ = ["AfterOthers", "Link", "pack_commands"]

#: How long one command may take, in seconds, before its connection is given up.
COMMAND_S: Final = 30.0


class AfterOthers(tuple[Any, ...]):
    """A command that is carried out only once those before it in its call have been, wherever each of them goes.

    One server takes commands in their order; of several, each takes its own.
    """

    __slots__ = ()


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
        packed: bytes | Pieces | None = None,
    ) -> list[Any]:
        """Send `commands` together and return their raw replies; a refused one's is its `ResponseError`.

        They are carried out in this order, but for scripts that Redis does not know yet: those come after the others.
        What is `AfterOthers` never comes before any of them. A server that takes no writes is left: the next call asks
        where to go. `stay` and `wait` are for clusters.
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
        if any(map(is_demoted, replies)):
            await self.drop()
        return replies

    async def ask_beside(self, other: Link, *commands: Sequence[Any]) -> list[Any]:
        """`ask` the server that `other` is connected to."""
        return await self.ask(*commands)

    async def exchange(
        self, commands: Sequence[Sequence[Any]], timeout_s: float, packed: bytes | Pieces | None = None
    ) -> list[Any]:
        """Send `commands` and read a reply to each, whatever it says."""
        from redis.exceptions import ConnectionError, ResponseError

        if packed is None:
            packed = pack_commands(commands)
        await self.connect()
        connection = self._connection
        replies: list[Any] = []
        try:
            with anyio.fail_after(timeout_s):
                await connection.send_packed_command(packed.buffers if type(packed) is Pieces else packed)
                for _ in commands:
                    try:
                        replies.append(await connection.read_response())
                    except ResponseError as error:
                        replies.append(named(error, commands[len(replies)]))
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


def pack_commands(commands: Sequence[Sequence[Any]]) -> bytes | Pieces:
    """Commands as they go over the wire; `Pieces` if an argument is `Pieces`.

    Scripts that an `AfterOthers` follows go with their texts: one that Redis did not know would be sent again, and so
    carried out, after what is to come after it.
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
