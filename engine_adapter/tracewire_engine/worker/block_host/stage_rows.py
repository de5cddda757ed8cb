"""Under pipeline parallelism: what the earlier stages send the hosts of blocks, all of which belong to the last stage.

An earlier stage has no host. The source of a block that only reads tells all locations that it may ask for
(`reading.py`), and every stage goes by the same source. So an earlier stage copies, at those of its own locations, the
rows of the requests whose blocks may read there (`ForwardedBlocks`). When its part of the step is over, it sends them
to the last stage, with the locations that the model has passed. It waits for nothing.

The last stage gives them to its hosts before it shares its own first location of the step (`EarlierStages`). So a
host is told of the locations of a step in their order, whatever the stages of them.

A block that may write would have its stage wait, so such a block is refused.
"""

from __future__ import annotations

import queue
import threading
from array import array
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import msgspec
import torch

from tracewire_bus.wire.messages import Failure
from tracewire_engine.link.shared_rows import RowBytes, pack_value, unpack_value
from tracewire_engine.link.thread_names import name_thread
from tracewire_engine.protocol.block_host import Shape, Shared
from tracewire_engine.worker.host_copy import PinnedCopy
from tracewire_engine.worker.parallel.rank_sockets import RankSockets

from .accounts import Accounts
from .reading import Account
from .rows import StepRows

__all__ = ["EarlierStages", "ForwardedBlocks", "MayWrite"]

#: Where a tensor begins among the bytes of a message: at multiples of this.
_ALIGNED = 64

_generated: msgspec.msgpack.Decoder[list[Any]] = msgspec.msgpack.Decoder(list)


class MayWrite(NotImplementedError):
    """A block may do more than read, so it cannot run in a host of several pipeline stages."""


class _Reached(msgspec.Struct, array_like=True):
    """A location that a stage has reached.

    `before` are the locations that the stage has passed since the last one, as the places of their names, two bytes
    each. The tensors of `value` have the shapes that they have on the stage. Of a tensor with rows of requests, the
    bytes have the rows of the readers alone.
    """

    place: int
    before: bytes
    value: Shared


class _StageRows(msgspec.Struct, array_like=True):
    """A stage's part of a step. `names` are of locations that no message of the stage has named before."""

    stage: int
    names: list[str]
    reached: list[_Reached]
    passed: bytes


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(_StageRows).decode


class _Readers:
    """The requests whose blocks only read: the same ones on all stages, which have the same requests."""

    def __init__(self) -> None:
        self._reads: dict[str, frozenset[str]] = {}

    def add(self, request_id: str, account: Account) -> bool:
        """Take a new request with blocks. Returns whether they only read."""
        if account.reads is None:
            return False
        self._reads[request_id] = account.reads
        return True

    def discard(self, request_id: str) -> None:
        """Forget a request that is over."""
        self._reads.pop(request_id, None)

    def rows_of(self, scheduled: Mapping[str, int], order: Iterable[str]) -> StepRows | None:
        """Where the rows of these requests lie in a step; `None` if it has none of them.

        Args:
            scheduled: how many tokens the step has of each request.
            order: the requests of the step, in the order of the batch.
        """
        spans, places, start, place = [], [], 0, 0
        for request_id in order:
            count = scheduled.get(request_id)
            if count is None:
                continue
            if request_id in self._reads:
                spans.append((start, count))
                places.append(place)
            start, place = start + count, place + 1
        return StepRows(spans, places, start, place) if spans else None

    def reads_in(self, scheduled: Collection[str]) -> frozenset[str]:
        """The locations that blocks of the step's requests may ask for."""
        return frozenset[str]().union(*[reads for name, reads in self._reads.items() if name in scheduled])


# --- on an earlier stage ----------------------------------------------------------------------------------------------


class ForwardedBlocks:
    """Takes the place of `HostedBlocks` on the earlier stages: sends what blocks read here to the last stage.

    Args:
        accounts: of blocks.
        group: of the stages.
        address: of the link to the adapter.
        sends: whether this rank sends. Of the tensor-parallel ranks of a stage, the first does.
    """

    def __init__(self, accounts: Accounts, group: Any, address: str, *, sends: bool) -> None:
        self._accounts, self._stage = accounts, group.rank_in_group
        self._readers = _Readers()
        self._by_request: dict[str, str] = {}
        self._watched: frozenset[str] = frozenset()
        self._rows: StepRows | None = None
        self._numbers: dict[str, int] = {}
        self._names: list[str] = []
        self._passed: array[int] = array("H")
        self._reached: list[_Reached] = []
        self._pieces = _Pieces()
        sockets = RankSockets(group, address, "stages")
        self._send = _Sender(sockets.push[-1]) if sends else None

    # --- requests -----------------------------------------------------------------------------------------------------

    def wait_ready(self) -> None:
        """Return at once: the last stage has the hosts."""

    def open(
        self,
        request_id: str,
        request: Any,
        arguments: dict[str, Any],
        trace: tuple[str, int, str | None],
        reserved: Iterable[str],
    ) -> None:
        """Take a new request with blocks, as `HostedBlocks.open` does."""
        self._by_request[request_id] = request.engine_id
        self._readers.add(request_id, self._accounts.of(arguments))

    def finish(self, request_id: str, tokens: int | None, failure: Failure | None, failed_at: int | None) -> bool:
        """Forget a request that the scheduler has ended. Returns whether it had blocks."""
        self._readers.discard(request_id)
        return self._by_request.pop(request_id, None) is not None

    def steer(self, encoded: bytes) -> None:
        """Do nothing: the last stage tells its hosts."""

    def take_result(self, generated: bytes) -> bool:
        """Return whether the adapter's message is about a request with blocks, which the last stage tells its host."""
        return _generated.decode(generated)[0] in self._by_request.values()

    def fail(self, request_id: str, failure: Failure) -> bool:
        """Return whether a request has blocks. The last stage ends it."""
        return request_id in self._by_request

    def __len__(self) -> int:
        return len(self._by_request)

    # --- a step -------------------------------------------------------------------------------------------------------

    @property
    def active(self) -> bool:
        """Whether blocks that read take part in the step."""
        return self._rows is not None

    def begin_for(self, states: Mapping[str, Any], scheduled: dict[str, int], order: Sequence[str]) -> bool:
        """Begin a step with these requests. Returns whether blocks that read take part in it."""
        self._rows = self._readers.rows_of(scheduled, order)
        self._watched = self._readers.reads_in(scheduled) if self._rows is not None else frozenset()
        return self._rows is not None

    def pass_by(self, locations: Collection[str]) -> bool:
        """Count these locations as passed, if no block reads any of them. Returns whether none does."""
        if self._rows is None:
            return True
        if any(location in self._watched for location in locations):
            return False
        self._passed.extend(map(self._number, locations))
        return True

    def wants(self, location: str) -> bool:
        """Whether the last stage is sent the value at a location."""
        return location in self._watched

    def reach(self, location: str, value: Any, *, by_request: bool = False) -> Any:
        """Keep the rows of a location that blocks may read. Returns the value."""
        number = self._number(location)
        if location in self._watched and self._send is not None:
            shared = pack_value(value, self._keep, lambda other: type(other).__name__)
            self._reached.append(_Reached(number, self._passed.tobytes(), shared))
            self._passed = array("H")
        else:
            self._passed.append(number)
        return value

    def end(self) -> None:
        """End this stage's part of the step: send it to the last stage."""
        if self._rows is None:
            return
        self._rows, self._watched = None, frozenset()
        reached, self._reached = self._reached, []
        pieces, self._pieces = self._pieces, _Pieces()
        passed, self._passed = self._passed.tobytes(), array("H")
        names, self._names = self._names, []
        if self._send is not None:
            self._send(_encode(_StageRows(self._stage, names, reached, passed)), pieces)

    def _number(self, location: str) -> int:
        number = self._numbers.get(location)
        if number is None:
            number = self._numbers[location] = len(self._numbers)
            self._names.append(location)
        return number

    def _keep(self, tensor: torch.Tensor) -> Shape:
        assert self._rows is not None
        place = self._rows.of(tensor, by_request=False)
        kept = tensor
        if place is not None:
            pieces = [tensor.narrow(place[0], first, count) for first, count in place[1]]
            kept = pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=place[0])
        return Shape(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), self._pieces.add(kept))


class _Pieces:
    """Copies of tensors, which may still be on their way from a GPU."""

    def __init__(self) -> None:
        self._copies: list[tuple[int, PinnedCopy]] = []
        self.size = 0
        self.late = False

    def add(self, tensor: torch.Tensor) -> int:
        """Copy a tensor. Returns where it will lie among the bytes."""
        # A copy, since the model may change the value in place.
        flat = tensor.detach().contiguous().clone().view(-1).view(torch.uint8)
        start = self.size
        if flat.numel():
            self._copies.append((start, PinnedCopy(flat)))
        self.late = self.late or flat.is_cuda
        self.size += -(-flat.numel() // _ALIGNED) * _ALIGNED
        return start

    def bytes(self) -> bytearray:
        """All bytes. Waits for the copies."""
        data = bytearray(self.size)
        for start, copy in self._copies:
            held = copy.lend()
            data[start : start + len(held)] = held
            del held
            copy.release()
        return data


class _Sender:
    """Sends messages in their order, from a thread of its own where copies from a GPU must be waited for."""

    def __init__(self, socket: Any) -> None:
        self._socket = socket
        self._waiting: queue.SimpleQueue[tuple[bytes, _Pieces]] = queue.SimpleQueue()
        self._threaded = False

    def __call__(self, head: bytes, pieces: _Pieces) -> None:
        if not self._threaded and not pieces.late:
            self._socket.send_multipart([head, pieces.bytes()])
            return
        if not self._threaded:
            self._threaded = True
            threading.Thread(target=self._run, name="tracewire stages", daemon=True).start()
        self._waiting.put((head, pieces))

    def _run(self) -> None:
        name_thread("stages")
        while True:
            head, pieces = self._waiting.get()
            self._socket.send_multipart([head, pieces.bytes()])


# --- on the last stage ------------------------------------------------------------------------------------------------


class EarlierStages:
    """On the last stage, what the earlier ones send it.

    Args:
        group: of the stages.
        address: of the link to the adapter.
    """

    def __init__(self, group: Any, address: str) -> None:
        self._count = group.world_size - 1
        self._pull = RankSockets(group, address, "stages").pull
        self._readers = _Readers()
        self._names: list[list[str]] = [[] for _ in range(self._count)]
        #: Messages of steps that this stage has not come to, by stage.
        self._early: list[list[tuple[_StageRows, RowBytes]]] = [[] for _ in range(self._count)]
        self._rows: StepRows | None = None

    def open(self, request_id: str, account: Account) -> None:
        """Take a new request with blocks.

        Raises:
            MayWrite: its blocks may do more than read.
        """
        if not self._readers.add(request_id, account):
            raise MayWrite(
                "with --blocks host and --pipeline-parallel-size, blocks may only read, and the source of this one "
                "does not show that it does: change the model by declared interventions, or start the engine with "
                "--blocks inline"
            )

    def discard(self, request_id: str) -> None:
        """Forget a request that is over."""
        self._readers.discard(request_id)

    def begin(self, scheduled: Mapping[str, int], order: Iterable[str]) -> None:
        """Begin a step with these requests."""
        self._rows = self._readers.rows_of(scheduled, order)

    @property
    def due(self) -> bool:
        """Whether the messages of the step have not been taken."""
        return self._rows is not None

    def take(self) -> Iterator[tuple[list[str], str, Any]]:
        """The locations of the step on the earlier stages, in their order. Waits for the stages.

        Yields:
            The locations that were passed since the last one, the location, and its value, which has the rows of the
            readers alone. Last of each stage, an empty location.
        """
        rows, self._rows = self._rows, None
        assert rows is not None
        for stage, names in enumerate(self._names):
            message, data = self._message(stage)
            names += message.names
            read = partial(_whole, rows, data)
            for one in message.reached:
                value = unpack_value(one.value, read, _stand_in)
                yield _named(one.before, names), names[one.place], value
            yield _named(message.passed, names), "", None

    def _message(self, stage: int) -> tuple[_StageRows, RowBytes]:
        while not self._early[stage]:
            head, data = self._pull.recv_multipart(copy=True)
            message = _decode(head)
            found = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
            self._early[message.stage].append((message, RowBytes(found)))
        return self._early[stage].pop(0)


def _named(places: bytes, names: Sequence[str]) -> list[str]:
    return [names[place] for place in array("H", places)]


def _whole(rows: StepRows, data: RowBytes, _: int, shape: Shape) -> torch.Tensor:
    """A tensor as it is on its stage, of which the rows of readers are filled."""
    whole = torch.empty(shape.shape, dtype=getattr(torch, shape.dtype))
    place = rows.of(whole, by_request=False)
    if place is None:
        return data.read(shape)
    axis, spans = place
    sizes = list(shape.shape)
    sizes[axis] = sum(count for _, count in spans)
    given, start = data.read(Shape(shape.dtype, tuple(sizes), shape.start)), 0
    for first, count in spans:
        whole.narrow(axis, first, count).copy_(given.narrow(axis, start, count))
        start += count
    return whole


def _stand_in(name: Any) -> Any:
    """Stands for an object of another stage, of a class of this name."""
    return type(str(name), (), {})()
