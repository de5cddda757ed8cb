"""Sockets between ranks: each rank hears all others, in the order in which each of them sends."""

from __future__ import annotations

from tests.support.hosted_ranks import linked
from tracewire_engine.worker.parallel.rank_sockets import RankSockets


def test_each_rank_hears_the_other() -> None:
    one, other = linked(lambda group, address: RankSockets(group, address, "test"))
    for number in range(3):
        one.push[0].send(b"%d" % number)
    other.push[0].send(b"back")
    assert [other.pull.recv() for _ in range(3)] == [b"0", b"1", b"2"]
    assert one.pull.recv() == b"back"
    for sockets in (one, other):
        for socket in (sockets.pull, *sockets.push):
            socket.close(linger=0)
