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
