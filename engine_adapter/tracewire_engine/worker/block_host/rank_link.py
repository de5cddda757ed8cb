"""What the first tensor-parallel rank tells the others about the blocks that run in its hosts.

The hosts belong to the first rank. It alone knows what a block has asked for, and whether a host has answered in time,
has failed or has ended. Each rank computes a part of the model, so the others must do three things with it: gather a
sharded value at a location where a block reads it, put the rows into the value that a block leaves there, and run a
sharded module that a block calls. So the first rank decides, and tells the others by these messages:

- `StepBegan`, when a step with requests of hosts has begun, has the locations at which ranks do something in it.
- `Served`, at each location at which the first rank waits for a host, has what the blocks leave, and the locations from
  there on.
- `Called`, before either, has a module that a block calls, and its arguments.

Between two messages nothing changes what the ranks do, so all ranks do the same. The messages keep their order.
"""

from __future__ import annotations

from collections.abc import Collection, Container
from typing import Any

import msgspec
import torch

from tracewire_engine.link.shared_rows import CopiedRows, RowBytes
from tracewire_engine.protocol.block_host import Reply, Shape, Shared
from tracewire_engine.worker.parallel.rank_sockets import RankSockets

from .rows import StepRows, StepSpans

__all__ = ["Called", "Edit", "RankLink", "Served", "StepBegan", "StepWatch", "edit_of"]


class StepWatch(msgspec.Struct, array_like=True):
    """The locations at which ranks do something.

    `waits` are those at which the first rank waits for hosts, and how often the model passes each before.
    `observed` are those at which hosts are given the rows each time.
    """

    waits: dict[str, int] = {}
    observed: set[str] = set()

    def __contains__(self, location: str) -> bool:
        return location in self.waits or location in self.observed

    def due(self, location: str) -> bool:
        """Whether hosts are given the value when the model passes the location the next time."""
        return location in self.observed or self.waits.get(location) == 0

    def passes(self, location: str) -> bool:
        """Count a location that the model has reached. Returns whether the first rank waits for hosts there."""
        after = self.waits.get(location)
        if after:
            self.waits[location] = after - 1
        return after == 0


class Edit(msgspec.Struct, array_like=True):
    """What the blocks of one host leave at a location. The tensors of `reply` lie in the bytes of the message."""

    requests: list[str]
    rows: StepSpans
    reply: Reply


class StepBegan(msgspec.Struct, array_like=True, tag="began"):
    """A step has begun. `watch` is `None` if it is what it was at the end of the step before."""

    watch: StepWatch | None = None


class Served(msgspec.Struct, array_like=True, tag="served"):
    """Hosts have answered at a location. `watch` is as in `StepBegan`."""

    edits: list[Edit] = []
    watch: StepWatch | None = None


class Called(msgspec.Struct, array_like=True, tag="called"):
    """A block calls the module at `path`. The tensors of `value`, its arguments, lie in the bytes of the message."""

    path: str
    value: Shared


_encode = msgspec.msgpack.Encoder().encode
_message: msgspec.msgpack.Decoder[StepBegan | Served | Called] = msgspec.msgpack.Decoder(StepBegan | Served | Called)


def edit_of(requests: Collection[str], rows: StepRows, reply: Reply, memory: RowBytes, copies: CopiedRows) -> Edit:
    """What a host leaves, with copies of the tensors.

    Args:
        requests: of the host in the step, by the scheduler's ids.
        rows: where the rows of these requests lie.
        reply: the host's.
        memory: into which the host has written.
        copies: takes the tensors.

    Raises:
        SharedValueError: the host names tensors that are none.
    """
    edited = [(index, _copied(shape, memory, copies)) for index, shape in reply.edited]
    replaced = reply.replaced
    if replaced is not None:
        replaced = Shared(replaced.skeleton, [_copied(shape, memory, copies) for shape in replaced.tensors])
    return Edit(sorted(requests), rows.given, Reply(edited=edited, replaced=replaced))


def _copied(shape: Shape, memory: RowBytes, copies: CopiedRows) -> Shape:
    return copies.add(memory.read(shape))


class RankLink:
    """This rank's end of the connection. All ranks make theirs at the same time.

    Args:
        group: of the ranks.
        address: of the link to the adapter.
    """

    def __init__(self, group: Any, address: str) -> None:
        self.first = group.rank_in_group == 0
        sockets = RankSockets(group, address, "hosts")
        self._pull, self._push = sockets.pull, sockets.push
        #: The live requests with blocks, by the scheduler's ids: the same on all ranks.
        self.requests: set[str] = set()

    def takes_part(self, scheduled: Container[str]) -> bool:
        """Whether a step with these requests has a `StepBegan`."""
        return any(request in scheduled for request in self.requests)

    def tell(self, message: StepBegan | Served | Called, data: torch.Tensor | None = None) -> None:
        """Send the other ranks a message, on the first rank.

        Args:
            message: the message.
            data: the bytes of its tensors, as `CopiedRows` returns them.
        """
        parts: list[bytes] = [_encode(message)]
        if data is not None and data.numel():
            parts.append(data.numpy().tobytes())
        self.pass_on(parts)

    def hear(self) -> tuple[StepBegan | Served | Called, RowBytes]:
        """Wait for the next message of the first rank, and return it with the bytes of its tensors.

        If the first rank ends, vLLM ends this one.
        """
        head, *data = self.parts()
        return _message.decode(head), RowBytes.of(data)

    def parts(self) -> list[bytes]:
        """Wait for the next message of the first rank, and return its parts, still encoded."""
        return self._pull.recv_multipart(copy=True)

    def pass_on(self, parts: list[bytes]) -> None:
        """Send the other ranks an encoded message, on the first rank."""
        for socket in self._push:
            socket.send_multipart(parts)

    def close(self) -> None:
        """Close the sockets."""
        for socket in (self._pull, *self._push):
            socket.close(linger=0)
