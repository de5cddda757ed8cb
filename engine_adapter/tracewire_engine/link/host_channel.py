"""A stream of messages between a worker and a process that runs blocks, over a Unix socket.

Large messages can go through memory that both share (`message_memory.py`). Then the socket says where they lie.
"""

from __future__ import annotations

import array
import os
import select
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import islice

import numpy as np

from .message_memory import MessageMemory, Placed
from .shared_rows import SharedValueError

__all__ = ["ChannelClosed", "ChannelTimeout", "HostChannel", "receive_descriptors", "send_descriptors", "wait_for"]

_HEAD = struct.Struct("<I")

#: Marks the size of a message that says where another one lies; what it consists of; and the least size of the other.
_ELSEWHERE, _PLACE, _LARGE = 1 << 31, struct.Struct("<QQQ"), 1 << 16

#: How many bytes are read at once, and how many the kernel may hold of messages that the other end has not read.
_PIECE, _HELD = 1 << 16, 4 << 20

#: How much memory a message is given before that much of it has come.
_GIVEN = 4 << 20

#: Up to how many bytes a message is copied behind its head; and how many pieces are sent at once.
_COPIED, _AT_ONCE = 4096, 8

#: In how many pieces a message may come, besides one for each so many bytes: each piece wakes its reader.
_PIECES, _PER_PIECE = 1024, 1 << 10


class _Thread(threading.local):
    """What each thread has: memory for what it reads."""

    def __init__(self) -> None:
        self.piece = memoryview(bytearray(_PIECE))


_thread = _Thread()


class ChannelClosed(ConnectionError):
    """The other end of the channel is gone, or what it sent is no message."""


class ChannelTimeout(TimeoutError):
    """The other end has not answered in time."""


class HostChannel:
    """One end of a channel. Sending never blocks; what the kernel does not take yet waits here for `flush`.

    Args:
        connection: a connected stream socket.
        most: the largest message that is taken, in bytes. A larger one closes the channel.
        backlog: how many bytes may wait here. More of them close the channel.
        memory: through which large messages go, all in one direction.
    """

    def __init__(
        self,
        connection: socket.socket,
        most: int = 1 << 30,
        backlog: int = 256 << 20,
        memory: MessageMemory | None = None,
    ) -> None:
        self._socket = connection
        self._socket.setblocking(False)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _HELD)
        self._most, self._backlog, self._memory = most, backlog, memory
        self._waiting: deque[memoryview] = deque()
        self._waits = 0
        self._lock = threading.Lock()
        #: The messages that are complete.
        self._arrived: deque[bytes | memoryview] = deque()
        #: The beginning of a message of which not even the size is known; and one that has not come whole: its size,
        #: how many bytes of it have come, and in how many pieces.
        self._head = b""
        self._message: memoryview | None = None
        self._size = self._come = self._pieces = 0
        #: Why nothing is read any more, if so.
        self._broken: ChannelClosed | None = None

    def fileno(self) -> int:
        """The socket's descriptor; -1 once it is closed."""
        return self._socket.fileno()

    @property
    def unsent(self) -> bool:
        """Whether messages wait for `flush`."""
        return bool(self._waiting)

    @property
    def broken(self) -> bool:
        """Whether the other end has sent what is no message, so that nothing more is read."""
        return self._broken is not None

    def send(self, message: bytes) -> None:
        """Send a message, or keep what the kernel does not take of it.

        Raises:
            ChannelClosed: the other end is gone, or has left too much unread.
        """
        with self._lock:
            marked = len(message)
            if marked >= _LARGE and self._memory is not None and (placed := self._memory.place(message)) is not None:
                message, marked = _PLACE.pack(*placed), _PLACE.size | _ELSEWHERE
            head = _HEAD.pack(marked)
            self._waiting += map(memoryview, (head, message) if len(message) > _COPIED else (head + message,))
            self._waits += len(message) + _HEAD.size
            self._flush()
            if self._waits > self._backlog:
                raise ChannelClosed(f"{self._waits} bytes wait to be read")

    def flush(self) -> None:
        """Send what waits, as far as the kernel takes it.

        Raises:
            ChannelClosed: the other end is gone.
        """
        with self._lock:
            self._flush()

    def _flush(self) -> None:
        waiting = self._waiting
        while waiting:
            try:
                sent = self._socket.sendmsg(list(islice(waiting, _AT_ONCE)))
            except BlockingIOError:
                return
            except OSError as error:
                raise ChannelClosed(str(error)) from error
            self._waits -= sent
            while waiting and sent >= len(waiting[0]):
                sent -= len(waiting.popleft())
            if sent:
                waiting[0] = waiting[0][sent:]

    def settle(self, most: int = 0) -> None:
        """Wait until no more than `most` bytes wait to be sent.

        Raises:
            ChannelClosed: the other end is gone.
        """
        while self._waits > most:
            poll = select.poll()
            poll.register(self._socket, select.POLLOUT)
            poll.poll()
            self.flush()

    def receive(self, timeout_s: float | None = None, beside: Sequence[HostChannel] = ()) -> bytes | memoryview:
        """Wait for a message, and send meanwhile what waits here and in `beside`.

        Raises:
            ChannelClosed: the other end is gone, or that of one of `beside`.
            ChannelTimeout: none came within `timeout_s` seconds.
        """
        until = None if timeout_s is None else time.monotonic() + timeout_s
        while (message := self._next()) is None:
            if self._broken is not None:
                raise self._broken
            left = None if until is None else until - time.monotonic()
            if left is not None and left <= 0:
                raise ChannelTimeout
            events = select.POLLIN | (select.POLLOUT if self._waiting else 0)
            poll = select.poll()
            poll.register(self._socket, events)
            others = {one.fileno(): one for one in beside if one.unsent}
            for descriptor in others:
                poll.register(descriptor, select.POLLOUT)
            for descriptor, event in poll.poll(None if left is None else max(1, int(left * 1000))):
                if (other := others.get(descriptor)) is not None:
                    other.flush()
                    continue
                if event & select.POLLOUT:
                    self.flush()
                if event & ~select.POLLOUT:
                    self._take()
        return message

    def arrived(self) -> list[bytes | memoryview]:
        """The messages that have come. Does not wait.

        Raises:
            ChannelClosed: the other end is gone, and all its messages were returned before; or what it sent is no
                message.
        """
        closed: ChannelClosed | None = None
        try:
            self._take()
        except ChannelClosed as error:
            if self._broken is not None:
                raise
            closed = error
        found = []
        while (message := self._next()) is not None:
            found.append(message)
        if closed is not None and not found:
            raise closed
        return found

    def last(self, most: int = 1 << 30) -> Iterator[bytes | memoryview]:
        """The messages that the other end has sent before its end. Does not wait.

        Args:
            most: how many bytes are read at most.

        Raises:
            ChannelClosed: the other end is gone, and all its messages were yielded before; or what it sent is no
                message.
        """
        read = 1
        while read and most > 0:
            while (message := self._next()) is not None:
                yield message
            most -= (read := self._take())
        while (message := self._next()) is not None:
            yield message

    def _take(self) -> int:
        """Read what has come, as far as the kernel gives it at once. Returns how many bytes that were."""
        if self._broken is not None:
            raise self._broken
        try:
            if self._message is not None:
                size = self._socket.recv_into(self._message[self._come :])
            else:
                size = self._socket.recv_into(_thread.piece)
        except BlockingIOError:
            return 0
        except OSError as error:
            raise ChannelClosed(str(error)) from error
        if not size:
            raise ChannelClosed("the other end has closed it")
        try:
            self._put(size)
        except ChannelClosed as error:
            # What comes behind it is no message.
            self._broken = error
            raise
        return size

    def _put(self, size: int) -> None:
        """Take so many bytes that were read."""
        self._pieces += 1
        if self._message is not None:
            self._add(size)
        else:
            self._split(_thread.piece[:size])
        whole = _HEAD.size + self._come if self._message is not None else len(self._head)
        if self._pieces > _PIECES + whole // _PER_PIECE:
            raise ChannelClosed(f"a message comes in more than {_PIECES} pieces")

    def _add(self, size: int) -> None:
        """Note that so many more bytes of the message have come."""
        assert self._message is not None
        self._come += size
        if self._come == self._size:
            self._arrived.append(self._message)
            self._message, self._come, self._pieces = None, 0, 0
        elif self._come == len(self._message):
            # Memory grows with what has come: the size is only what the other end says.
            grown = self._room(min(2 * self._come, self._size))
            grown[: self._come] = self._message
            self._message = grown

    def _split(self, piece: memoryview) -> None:
        """Take the messages out of a piece, and begin the one that has not come whole."""
        if self._head:
            piece = memoryview(self._head + bytes(piece))
            self._head = b""
        elsewhere = 0
        while len(piece) >= _HEAD.size:
            (size,) = _HEAD.unpack_from(piece)
            if size & _ELSEWHERE and self._memory is not None:
                placed = self._placed(piece)
                if placed is None:
                    break
                # They lay in the memory at once, so together they take no more than it has.
                elsewhere += placed.size
                piece = piece[_HEAD.size + _PLACE.size :]
                self._arrived.append(self._found(placed, elsewhere))
                continue
            if size > self._most:
                raise ChannelClosed(f"a message of {size} bytes; at most {self._most} are taken")
            end = _HEAD.size + size
            if len(piece) < end:
                self._begin(size, piece[_HEAD.size :])
                return
            self._arrived.append(bytes(piece[_HEAD.size : end]))
            self._pieces = 0
            piece = piece[end:]
        self._head = bytes(piece)

    def _placed(self, piece: memoryview) -> Placed | None:
        """Where a message lies of which a piece says so; `None` if that has not come whole."""
        if _HEAD.unpack_from(piece) != (_PLACE.size | _ELSEWHERE,):
            raise ChannelClosed("no place of a message")
        whole = len(piece) >= _HEAD.size + _PLACE.size
        return Placed(*_PLACE.unpack_from(piece, _HEAD.size)) if whole else None

    def _found(self, placed: Placed, together: int) -> memoryview:
        """A message that lies in the memory. `together` is how many bytes it has with those that came with it."""
        assert self._memory is not None
        try:
            if together > self._memory.size or placed.size < _LARGE:
                raise ChannelClosed(f"a message of {placed.size} bytes in the shared memory, with others of {together}")
            self._pieces = 0
            return self._memory.take(placed)
        except (MemoryError, SharedValueError) as error:
            raise ChannelClosed(str(error)) from None

    def _begin(self, size: int, piece: memoryview) -> None:
        """Begin a message of which this has come."""
        self._size, self._come = size, len(piece)
        self._message = self._room(min(size, max(_GIVEN, 2 * len(piece))))
        self._message[: len(piece)] = piece

    def _room(self, size: int) -> memoryview:
        try:
            # Not filled with zeros, for which the model's thread would wait.
            return np.empty(size, np.uint8).data
        except MemoryError:
            raise ChannelClosed(f"there is no memory for a message of {self._size} bytes") from None

    def _next(self) -> bytes | memoryview | None:
        return self._arrived.popleft() if self._arrived else None

    def close(self) -> None:
        """Close this end, and its memory. Idempotent."""
        self._socket.close()
        memory, self._memory = self._memory, None
        if memory is not None:
            memory.close()


def wait_for(channels: Sequence[HostChannel], timeout_s: float) -> list[HostChannel]:
    """Wait until something has come over one of these channels, or a channel is closed. Flushes them meanwhile.

    Returns:
        The channels with something to take (`arrived`); none if `timeout_s` seconds have passed.
    """
    until = time.monotonic() + timeout_s
    by_descriptor = {channel.fileno(): channel for channel in channels}
    if -1 in by_descriptor:
        return [by_descriptor[-1]]
    while True:
        poll = select.poll()
        for descriptor, channel in by_descriptor.items():
            poll.register(descriptor, select.POLLIN | (select.POLLOUT if channel.unsent else 0))
        found = []
        for descriptor, events in poll.poll(max(0.0, until - time.monotonic()) * 1000):
            channel = by_descriptor[descriptor]
            try:
                if events & select.POLLOUT:
                    channel.flush()
            except ChannelClosed:
                found.append(channel)
            else:
                if events & ~select.POLLOUT:
                    found.append(channel)
        if found or time.monotonic() >= until:
            return found


def send_descriptors(connection: socket.socket, message: bytes, descriptors: list[int]) -> None:
    """Send a short message with descriptors over a socket that keeps messages apart (`SOCK_SEQPACKET`)."""
    packed = array.array("i", descriptors).tobytes()
    connection.sendmsg([message], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, packed)] if descriptors else [])


def receive_descriptors(connection: socket.socket, most: int = 8) -> tuple[bytes, list[int]]:
    """Receive what `send_descriptors` sent. The message is empty if the other end is gone."""
    room = socket.CMSG_SPACE(most * array.array("i").itemsize)
    message, extra, _, _ = connection.recvmsg(1 << 16, room)
    found = array.array("i")
    for level, kind, data in extra:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            found.frombytes(data[: len(data) - len(data) % found.itemsize])
    for descriptor in found:
        os.set_inheritable(descriptor, False)
    return message, list(found)
