"""Messages over a Unix socket: their order and limits, and an end that is gone."""

from __future__ import annotations

import os
import socket
import struct
import threading
from types import SimpleNamespace

import pytest

from tracewire_engine.link import host_channel
from tracewire_engine.link.host_channel import (
    ChannelClosed,
    ChannelTimeout,
    HostChannel,
    receive_descriptors,
    send_descriptors,
    wait_for,
)
from tracewire_engine.link.message_memory import MessageMemory


def pair(**limits: int) -> tuple[HostChannel, HostChannel]:
    one, other = socket.socketpair()
    return HostChannel(one, **limits), HostChannel(other)


def test_messages_come_whole_and_in_order() -> None:
    one, other = pair()
    sent = [b"", b"a", os.urandom(100_000), b"b" * 7]
    for message in sent:
        one.send(message)
    assert [other.receive() for _ in sent] == sent
    assert other.arrived() == []


def test_what_the_kernel_does_not_take_waits() -> None:
    one, other = pair()
    large = os.urandom(32 << 20)
    one.send(large)
    assert one.unsent
    found = b""
    while not found:
        one.flush()
        found = b"".join(other.arrived())
    assert found == large
    assert not one.unsent


def test_an_end_that_does_not_answer_or_is_gone() -> None:
    one, other = pair()
    with pytest.raises(ChannelTimeout):
        one.receive(0.001)
    other.send(b"last")
    other.close()
    assert one.receive() == b"last"
    with pytest.raises(ChannelClosed):
        one.receive()
    with pytest.raises(ChannelClosed):
        one.send(b"x")


def test_limits() -> None:
    one, other = pair(most=10, backlog=100)
    other.send(b"x" * 11)
    with pytest.raises(ChannelClosed, match="11 bytes"):
        one.receive()
    with pytest.raises(ChannelClosed, match="wait to be read"):
        one.send(b"x" * (64 << 20))


def test_descriptors_travel() -> None:
    one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    read, write = os.pipe()
    send_descriptors(one, b"pipe", [write])
    message, (theirs,) = receive_descriptors(other)
    os.write(theirs, b"through")
    assert (message, os.read(read, 20)) == (b"pipe", b"through")
    assert not os.get_inheritable(theirs)
    one.close()
    assert receive_descriptors(other) == (b"", [])
    for descriptor in (read, write, theirs):
        os.close(descriptor)


def test_of_several_channels_those_are_found_over_which_something_has_come() -> None:
    pairs = [socket.socketpair() for _ in range(3)]
    ours, theirs = ([HostChannel(pair[end]) for pair in pairs] for end in (0, 1))
    assert wait_for(ours, 0.0) == []
    theirs[1].send(b"said")
    assert wait_for(ours, 30.0) == [ours[1]]
    assert ours[1].arrived() == [b"said"]
    theirs[2].close()
    assert wait_for(ours, 30.0) == [ours[2]]
    ours[0].close()
    assert wait_for(ours[:2], 30.0) == [ours[0]]


def test_what_waits_to_be_sent_is_sent_while_others_are_waited_for() -> None:
    pairs = [socket.socketpair() for _ in range(2)]
    (large, quiet), (reader, speaker) = ([HostChannel(pair[end]) for pair in pairs] for end in (0, 1))
    message = b"x" * (32 << 20)
    large.send(message)
    assert large.unsent
    taken: list[bytes | memoryview] = []

    def read() -> None:
        taken.append(reader.receive(30))
        speaker.send(b"now")

    thread = threading.Thread(target=read)
    thread.start()
    assert wait_for([large, quiet], 30.0) == [quiet]
    thread.join(30)
    assert taken == [message]


def test_what_waits_beside_is_sent_while_a_message_is_waited_for() -> None:
    (calls, theirs), (reports, reader) = pair(), pair()
    message = b"x" * (32 << 20)
    reports.send(message)
    assert reports.unsent

    def answer() -> None:
        assert reader.receive(30) == message
        theirs.send(b"now")

    thread = threading.Thread(target=answer)
    thread.start()
    assert calls.receive(30, beside=[reports]) == b"now"
    thread.join(30)
    assert not reports.unsent
    reports.send(message)
    reader.close()
    with pytest.raises(ChannelClosed):
        calls.receive(30, beside=[reports])


def test_what_an_end_has_sent_before_it_ended_is_read_to_its_end() -> None:
    one, other = pair()
    messages = [bytes([number]) * (1 << 20) for number in range(3)]
    for message in messages:
        other.send(message)
    assert not other.unsent
    # One read gives no whole message.
    assert list(one.last()) == messages
    other.send(b"more")
    other.close()
    rest = one.last()
    assert next(rest) == b"more"
    with pytest.raises(ChannelClosed):
        next(rest)


def test_a_sender_may_wait_until_little_waits() -> None:
    one, other = pair()
    message = b"x" * (32 << 20)
    found: list[bytes | memoryview] = []
    thread = threading.Thread(target=lambda: found.append(other.receive(30)))
    one.send(message)
    assert one.unsent
    one.settle(64 << 20)
    assert one.unsent
    thread.start()
    one.settle()
    assert not one.unsent
    thread.join(30)
    assert found == [message]


@pytest.mark.parametrize("cut", [1, 3, 4, 5, 100, 1 << 18, (1 << 18) + 3])
def test_messages_are_whole_however_the_pieces_come(cut: int) -> None:
    raw, theirs = socket.socketpair()
    one = HostChannel(theirs)
    messages = [b"", b"a", b"b" * 100, b"c" * 50, b"d" * 300_000, b"", b"e" * 20]
    stream = b"".join(struct.pack("<I", len(message)) + message for message in messages)
    if cut <= 100:
        # Those before and behind the large one.
        messages, stream = messages[:4], b"".join(struct.pack("<I", len(one)) + one for one in messages[:4])
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
    found = []
    for start in range(0, len(stream), cut):
        raw.sendall(stream[start : start + cut])
        found += one.arrived()
    while len(found) < len(messages):
        found += one.arrived()
    assert found == messages
    raw.close()
    with pytest.raises(ChannelClosed):
        one.arrived()


def test_a_message_for_which_there_is_no_memory_closes_the_channel(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(size: int, kind: object) -> object:
        raise MemoryError(size, kind)

    raw, theirs = socket.socketpair()
    one = HostChannel(theirs)
    monkeypatch.setattr(host_channel, "np", SimpleNamespace(empty=none, uint8=None))
    raw.sendall(struct.pack("<I", 1 << 29) + b"begin")
    with pytest.raises(ChannelClosed, match="no memory for a message of 536870912 bytes"):
        one.arrived()


def test_behind_what_is_no_message_nothing_is_read() -> None:
    raw, theirs = socket.socketpair()
    one = HostChannel(theirs, most=10)
    raw.sendall(struct.pack("<I", 2) + b"ok" + struct.pack("<I", 0xFFFFFFFF) + b"x")
    for _ in range(2):
        with pytest.raises(ChannelClosed, match="4294967295 bytes"):
            one.arrived()
        raw.sendall(struct.pack("<I", 2) + b"no")
    assert one.receive() == b"ok"
    with pytest.raises(ChannelClosed, match="4294967295 bytes"):
        one.receive()


def test_memory_grows_with_what_has_come_of_a_message() -> None:
    raw, theirs = socket.socketpair()
    one = HostChannel(theirs)
    raw.sendall(struct.pack("<I", 1 << 29) + b"begin")
    assert one.arrived() == []
    assert one._message is not None
    assert len(one._message) <= 4 << 20
    message = os.urandom(20 << 20)
    near, far = pair()
    near.send(message)
    found: list[bytes | memoryview] = []
    while not found:
        near.flush()
        found = far.arrived()
    assert found == [message]


def sharing(size: int = 1 << 20) -> tuple[HostChannel, HostChannel, MessageMemory]:
    """A channel whose large messages go through memory of this size, from its first end to the second one."""
    ends = socket.socketpair()
    ours = MessageMemory.create(size)
    theirs = MessageMemory(os.dup(ours.descriptor), size)
    return HostChannel(ends[0], memory=ours), HostChannel(ends[1], memory=theirs), ours


def arrived(near: HostChannel, far: HostChannel, count: int) -> list[bytes | memoryview]:
    found: list[bytes | memoryview] = []
    while len(found) < count:
        near.flush()
        found += far.arrived()
    return found


def place(start: int, size: int, taken: int) -> bytes:
    return struct.pack("<IQQQ", 24 | 1 << 31, start, size, taken)


def test_large_messages_go_through_memory_in_their_order() -> None:
    near, far, memory = sharing()
    messages = [os.urandom(size) for size in (10, 100_000, 70_000, 0, 65_535, 65_536, 300_000, 5)]
    for _ in range(20):
        for message in messages:
            near.send(message)
        assert arrived(near, far, len(messages)) == messages
    # All but the small ones, which the socket carries.
    assert memory.taken >= 20 * (100_000 + 70_000 + 65_536 + 300_000)


def test_without_room_in_the_memory_the_socket_carries_a_message() -> None:
    near, far, memory = sharing(1 << 18)
    messages = [os.urandom(200_000) for _ in range(3)]
    for message in messages:
        near.send(message)
    assert memory.taken < 400_000
    assert arrived(near, far, 3) == messages
    near.send(messages[0])
    assert arrived(near, far, 1) == messages[:1]
    assert memory.taken >= 400_000


def test_a_message_is_kept_when_its_memory_is_written_again() -> None:
    near, far, _ = sharing(1 << 17)
    first, second = os.urandom(100_000), os.urandom(100_000)
    near.send(first)
    found = far.arrived()
    near.send(second)
    assert [*found, *far.arrived()] == [first, second]


def test_where_a_message_lies_may_come_in_pieces() -> None:
    raw, theirs = socket.socketpair()
    memory = MessageMemory.create(1 << 20)
    placed = memory.place(b"x" * 70_000)
    assert placed is not None
    far = HostChannel(theirs, memory=MessageMemory(os.dup(memory.descriptor), 1 << 20))
    stream = struct.pack("<I", 2) + b"ok" + place(*placed) + struct.pack("<I", 2) + b"ko"
    found: list[bytes | memoryview] = []
    for place_of in range(len(stream)):
        raw.sendall(stream[place_of : place_of + 1])
        found += far.arrived()
    assert found == [b"ok", b"x" * 70_000, b"ko"]


@pytest.mark.parametrize(
    ("stream", "why"),
    [
        (place(0, 1 << 20, 1 << 20), "shared memory"),
        (place(1 << 63, 1 << 63, 1), "shared memory"),
        (place(0, 1 << 16, 1 << 63), "shared memory"),
        (struct.pack("<I", 25 | 1 << 31) + b"x" * 25, "no place of a message"),
        # A few bytes must not become many.
        (place(0, 1 << 19, 1 << 19) + place(0, 1 << 19, 1 << 20) + place(0, 1 << 19, 1 << 21), "with others of"),
        (place(0, 100, 128), "a message of 100 bytes"),
    ],
)
def test_a_message_that_lies_nowhere_closes_the_channel(stream: bytes, why: str) -> None:
    raw, theirs = socket.socketpair()
    far = HostChannel(theirs, memory=MessageMemory.create(1 << 20))
    raw.sendall(stream)
    with pytest.raises(ChannelClosed, match=why):
        while True:
            far.arrived()


def test_without_memory_no_message_lies_elsewhere() -> None:
    raw, theirs = socket.socketpair()
    far = HostChannel(theirs)
    raw.sendall(place(0, 10, 64))
    with pytest.raises(ChannelClosed, match="a message of 2147483672 bytes"):
        far.arrived()


def test_a_closed_channel_gives_its_memory_back() -> None:
    near, far, memory = sharing()
    near.close()
    near.close()
    far.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(memory.descriptor)
