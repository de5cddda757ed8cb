"""The one-way link from the workers to their adapter, which carries the new saves of each step without an RPC.

The reporting worker sends one message a step for all its requests, over a ZeroMQ socket. ZeroMQ's own thread does the
sending, so the model never waits for the adapter's event loop. The adapter pairs each record with vLLM's output of the
same request, choice and token index. The values in a record are already encoded for the bus, and the adapter passes
them on unchanged.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from types import TracebackType
from typing import TYPE_CHECKING, Self
from urllib.parse import urlencode

import msgspec
import zmq

from tracewire_bus.owned_folder import OwnedFolder
from tracewire_bus.wire.messages import Failure

from .addresses import Guard, bind, connect, is_remote
from .shared_ring import LEAST_BYTES, RingBuffer, RingCopy, RingReader, ring_bytes

if TYPE_CHECKING:
    import torch
from tracewire_engine.protocol.adapters import address_of
from tracewire_engine.protocol.keys import inputs_folder
from tracewire_engine.protocol.messages import Changes, FinishRecord, Place, Report, StepRecord

__all__ = ["LinkReceiver", "LinkSender", "encode_changes", "encode_reports"]

logger = logging.getLogger("tracewire")

_encoder = msgspec.msgpack.Encoder()

_decoder = msgspec.msgpack.Decoder(list[Report])

#: The longest name of a socket in the folder of a link, or a longer one.
_LONGEST = len("adapter-999/link-blobs")

_NO_DELTAS = msgspec.Raw(_encoder.encode([]))

#: Stands for the deltas of a record that follow as a part of their own; and from how many bytes on they do.
_APART, _LARGE = msgspec.Raw(_encoder.encode(None)), 1 << 16


def encode_reports(reports: Sequence[Report], buffer: bytearray) -> None:
    """Encode reports into `buffer`. A record that cannot be encoded ends its request; other records are unaffected."""
    try:
        _encoder.encode_into(reports, buffer)
    except Exception:
        logger.exception("a record of a report could not be encoded")
        for report in reports:
            report.steps = [_encodable_step(step) for step in report.steps]
            report.finishes = [_encodable_finish(finish) for finish in report.finishes]
        _encoder.encode_into(reports, buffer)


def _encodable_step(record: StepRecord) -> StepRecord:
    try:
        _encoder.encode(record)
    except Exception:
        return StepRecord(record.request, record.choice, record.index, _NO_DELTAS, "error")
    return record


def _encodable_finish(record: FinishRecord) -> FinishRecord:
    try:
        _encoder.encode(record)
    except Exception as error:
        failure = Failure(type=type(error).__name__, message=f"the block's saves could not be encoded: {error!r}")
        steps, tokens = record.steps, record.tokens
        return FinishRecord(record.request, record.choice, _NO_DELTAS, error=failure, steps=steps, tokens=tokens)
    return record


class LinkSender:
    """The worker's end. Sending never blocks the model: the socket queues messages without a limit."""

    def __init__(self, address: str, readers: int = 1) -> None:
        """Connect to the adapter at `address`. `readers` adapters read from the ring buffer."""
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PUSH)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.LINGER, 0)
        connect(self._socket, address)
        self._buffer = bytearray()
        #: Memory that an adapter on this machine shares with this process; made before the first large batch.
        self._ring: RingBuffer | None = None
        #: The smaller one before it, until all adapters have the new one open: then all its steps have been sent.
        self._former: RingBuffer | None = None
        self._may_share = not is_remote(address) and hasattr(os, "memfd_create")
        self._all_readers = readers
        #: The adapters that read the next tensor.
        self.readers: Sequence[int] = (0,)

    def put(self, tensor: torch.Tensor, report: Report) -> RingCopy | None:
        """Begin to copy a tensor of bytes to the ring buffer. Returns `None` if the bytes must go in the message.

        The first call with a large tensor makes the buffer, and has `report` tell the adapter of it. So does a call
        with a tensor for which the buffer is small.
        """
        ring = self._ring
        if self._former is not None and ring is not None and ring.is_open:
            self._former.close()
            self._former = None
        wanted = tensor.nbytes >= LEAST_BYTES if ring is None else ring.is_small(tensor.nbytes)
        if self._may_share and wanted:
            self._share(tensor, report)
        return None if self._ring is None else self._ring.put(tensor, self.readers)

    def _share(self, tensor: torch.Tensor, report: Report) -> None:
        """Make a buffer for tensors as large as this one, in place of a smaller one."""
        former = self._ring
        try:
            ring = RingBuffer(ring_bytes(tensor.nbytes), readers=self._all_readers)
        except OSError as error:
            self._may_share = False
            logger.warning("no more shared memory (%s): the link's messages carry reads of interventions", error)
            return
        if former is not None and tensor.is_cuda and not ring.pin():
            self._may_share = False
            ring.close()
            return
        self._ring, self._former, report.ring = ring, former, ring.name

    def send(self, *reports: Report) -> None:
        """Queue reports of steps, in one message.

        The caller may reuse the memory of their batches after this returns, and does not change that of their deltas.
        """
        # The encoder would copy large ones once more than the socket does.
        large = {id(record): (record, record.deltas) for record in _records(reports) if len(record.deltas) >= _LARGE}
        for record, _ in large.values():
            record.deltas = _APART
        encode_reports(reports, self._buffer)
        # Not those of records that could not be encoded, in whose place others are.
        apart = [large[id(record)][1] for record in _records(reports) if record.deltas is _APART] if large else []
        for record, deltas in large.values():
            record.deltas = deltas
        self.send_encoded(self._buffer, more=bool(apart))
        # The model would wait longer for a copy of large deltas.
        for left, deltas in zip(range(len(apart) - 1, -1, -1), apart, strict=True):
            self._socket.send(deltas, zmq.SNDMORE if left else 0, copy=False)

    def send_encoded(self, reports: bytearray, *, more: bool = False) -> None:
        """Queue encoded reports. With `more`, further parts of the message follow."""
        # Copied: sending without a copy wakes a Python thread for each part, which the model would wait for.
        self._socket.send(reports, zmq.SNDMORE if more else 0)


def _records(reports: Iterable[Report]) -> Iterator[StepRecord | FinishRecord]:
    return chain.from_iterable((*report.steps, *report.finishes) for report in reports)


class Receiver:
    """A resource that is closed when its `with` block ends."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the socket. Idempotent."""
        raise NotImplementedError


class LinkReceiver(Receiver):
    """The adapter's end: binds a socket in a private folder, and returns the reports that come.

    The constructor makes the folder, because the engine needs the address before it starts. `close` removes the folder.
    If the adapter is killed, the next adapter on this machine removes it. With `host`, an address of this machine,
    workers on other machines can connect; `address` then contains their keys.

    Where an engine has several adapters, the first one's constructor is called like this, and the others' with the
    first one's address as `beside`, and the adapter's number as `adapter`.
    """

    def __init__(self, host: str | None = None, *, beside: str = "", adapter: int = 0) -> None:
        self._adapter = adapter
        self._folder: OwnedFolder | None = None
        if beside:
            self.folder = inputs_folder(address_of(beside, adapter))
            self.folder.mkdir(mode=0o700)
        else:
            self._folder = OwnedFolder("tracewire-link-", _LONGEST)
            self.folder = self._folder.path
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.PULL)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._ring: RingReader | None = None
        self.guard = Guard() if host is not None else None
        if self.guard is None:
            self.address = bind(self._socket, f"ipc://{self.folder / 'link'}")
            return
        self._unprotect: Callable[[], None] | None = self.guard.protect(self._context, self._socket)
        try:
            bound = bind(self._socket, f"tcp://[{host}]:*" if ":" in str(host) else f"tcp://{host}:*")
        except zmq.ZMQError:
            self.close()
            raise
        self.address = f"{bound}?{urlencode(self.guard.parameters())}"

    def close(self) -> None:
        """Close the socket and remove its folder. Idempotent."""
        if self.guard is not None and self._unprotect is not None:
            unprotect, self._unprotect = self._unprotect, None
            unprotect()
        self._context.destroy(linger=0)
        if self._folder is not None:
            self._folder.remove()
        ring, self._ring = self._ring, None
        if ring is not None:
            ring.close()

    def ready(self) -> Iterator[Report]:
        """The reports that have come since the last call, in the order in which the worker sent them.

        The bytes of a report's batch may lie in shared memory: they are valid until the next report is asked for.
        """
        while True:
            try:
                message, *apart = [frame.buffer for frame in self._socket.recv_multipart(zmq.NOBLOCK, copy=False)]
            except zmq.Again:
                return
            try:
                reports = _decoder.decode(message)
                _put_back(reports, apart)
            except (msgspec.MsgspecError, ValueError, RecursionError):
                # A defect that costs one step: traces with records in it end with an error, and the others go on.
                logger.exception("a report of a worker could not be decoded")
                continue
            for report in reports:
                try:
                    used = self._locate(report)
                except (IndexError, ValueError):
                    logger.exception("the reads of a step could not be found in shared memory")
                    report.batch = used = None
                yield report
                if used is not None and self._ring is not None:
                    if report.batch is not None:
                        # A late reader gets an error, and not the bytes of a later step.
                        report.batch.data.release()
                    self._ring.release(used)

    def _locate(self, report: Report) -> Place | None:
        """Open the worker's ring buffer if the report names one, and find this step's bytes in it.

        Returns the place in the buffer that is to be released afterwards, if the bytes lie there.

        Raises:
            ValueError: the report names a place outside the buffer.
        """
        if report.ring:
            former = self._ring
            try:
                self._ring = RingReader(report.ring, self._adapter)
                if former is not None:
                    former.close()
            except (OSError, ValueError) as error:
                # The worker uses the buffer only if the adapter has opened it.
                logger.warning("no shared memory (%s): the link's messages carry the reads of interventions", error)
        batch = report.batch
        if batch is not None and batch.place is not None:
            if self._ring is None:
                raise ValueError("a report refers to shared memory that is not open")
            batch.data = self._ring.view(batch.place)
            return batch.place
        return None

    async def arrived(self) -> None:
        """Wait until a message has come for `ready`."""
        loop = asyncio.get_running_loop()
        descriptor = int(self._socket.getsockopt(zmq.FD))
        # The descriptor signals changes only, so the state is read before each wait.
        while not int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            changed = loop.create_future()
            loop.add_reader(descriptor, _wake, changed)
            try:
                await changed
            finally:
                loop.remove_reader(descriptor)


def _put_back(reports: Iterable[Report], parts: Sequence[memoryview]) -> None:
    """Put deltas that were sent as parts of their own into their records.

    Raises:
        ValueError: there are more or fewer of them than records without deltas.
    """
    without = [record for record in _records(reports) if record.deltas == _APART]
    for record, part in zip(without, parts, strict=True):
        record.deltas = msgspec.Raw(part)


def _wake(changed: asyncio.Future[None]) -> None:
    if not changed.done():
        changed.set_result(None)


def encode_changes(changes: Changes, over: Iterable[str] = (), since: float = 0.0) -> bytes:
    """Encode changes of live parameters, and the names of the runs that are over, for the workers' `LiveRuns.steer`.

    `since` is when the adapter read the first of the changes, in seconds since the epoch.
    """
    return msgspec.msgpack.encode((since, changes, list(over)))
