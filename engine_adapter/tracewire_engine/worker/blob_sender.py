"""The worker's end of the link for large arrays: a thread that digests them and sends them in chunks.

Requests take turns of one chunk each, so that a small array does not wait behind a large one of another request. When
Redis is slow, the thread waits and the model does not. From a request's first large array on, the thread also sends the
request's reports, so that they arrive after the chunks that they refer to.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import msgspec
import zmq
import zmq.asyncio

from tracewire_bus.wire.messages import Delta, Failure, Manifest
from tracewire_engine.link.addresses import connect
from tracewire_engine.link.blob_receiver import QUEUED_CHUNKS, BlobChunk
from tracewire_engine.link.step_link import encode_reports
from tracewire_engine.protocol.adapters import adapter_of, address_of
from tracewire_engine.protocol.messages import FinishRecord, Report, StepRecord

if TYPE_CHECKING:
    from tracewire_engine.worker.large_arrays import LargeArray
    from tracewire_engine.worker.save_tracker import Ending

__all__ = ["BlobSender", "Checked"]

logger = logging.getLogger("vllm.tracewire")

_Lane = tuple[str, int]

#: Called with the manifest of a choice's saves before it is sent.
Checked = Callable[[list[Manifest]], None]

_encoder = msgspec.msgpack.Encoder()


def _connected(address: str) -> zmq.Socket[bytes]:
    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PUSH)
    socket.setsockopt(zmq.SNDHWM, QUEUED_CHUNKS)
    socket.setsockopt(zmq.LINGER, 0)
    connect(socket, address, "blobs")
    return socket


class BlobSender:
    """Sends large arrays and the reports that refer to them. The model's thread calls `step` and `finish`.

    Both return at once.
    """

    def __init__(self, link_address: str, adapters: int = 1) -> None:
        from tracewire_engine.worker.large_arrays import encode

        self._addresses = [address_of(link_address, adapter) for adapter in range(adapters)]
        self._encode = encode
        self._new: queue.SimpleQueue[tuple[_Lane, Iterator[None]]] = queue.SimpleQueue()
        self._failed: dict[_Lane, Failure] = {}
        # A daemon thread, which ends with the process.
        threading.Thread(target=self._run, name="tracewire blobs", daemon=True).start()

    def step(self, record: StepRecord, deltas: list[Delta], taken: list[LargeArray]) -> None:
        """Send a step's large arrays, then its record with the deltas that refer to them.

        Args:
            record: of the step; its deltas are set here.
            deltas: of the step.
            taken: the large arrays that the step froze.
        """
        lane = (record.request, record.choice)
        self._new.put((lane, self._step(lane, time.time(), record, deltas, taken)))

    def finish(self, record: FinishRecord, ending: Ending | None, checked: Checked | None) -> None:
        """Send the end of a choice.

        Args:
            record: is sent last, with the last deltas and the manifest.
            ending: the choice's final saves, to compare with the sent values; without it the record is sent as it is.
            checked: is called with the manifest before it is sent.
        """
        lane = (record.request, record.choice)
        self._new.put((lane, self._finish(lane, time.time(), record, ending, checked)))

    def relay(self, lane: _Lane, message: BlobChunk | Report, data: Callable[[], bytes | None]) -> None:
        """Send a piece of a large array, or a report, behind all that was sent of the same lane before.

        Args:
            lane: of the trace.
            message: the report, or the piece's place in its array.
            data: gives the piece's bytes when its turn has come, and nothing of a report; `None`: it is not sent.
        """
        self._new.put((lane, self._relay(lane, message, data)))

    # --- on the thread ------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        self._sockets = [_connected(address) for address in self._addresses]
        self._buffer = bytearray()
        lanes: dict[_Lane, deque[Iterator[None]]] = {}
        while True:
            while not lanes or not self._new.empty():
                lane, job = self._new.get()
                lanes.setdefault(lane, deque()).append(job)
            for lane, jobs in list(lanes.items()):
                try:
                    if next(jobs[0], jobs) is not jobs:
                        continue
                except Exception as error:  # it fails one request; the thread serves all
                    self._fail(lane, error)
                jobs.popleft()
                if not jobs:
                    del lanes[lane]

    def _step(
        self, lane: _Lane, ended_at: float, record: StepRecord, deltas: list[Delta], taken: list[LargeArray]
    ) -> Iterator[None]:
        try:
            yield from self._ship(lane, taken)
            record.deltas = msgspec.Raw(self._encode(deltas))
        except Exception as error:
            self._fail(lane, error)
        self._send(lane, Report(time=ended_at, steps=[record]))

    def _relay(self, lane: _Lane, message: BlobChunk | Report, data: Callable[[], bytes | None]) -> Iterator[None]:
        yield
        given = data()
        if isinstance(message, Report):
            self._send(lane, message)
        elif given is not None:
            self._socket(lane).send_multipart([_encoder.encode(message), given], copy=False)

    def _finish(
        self,
        lane: _Lane,
        ended_at: float,
        record: FinishRecord,
        ending: Ending | None,
        checked: Checked | None,
    ) -> Iterator[None]:
        try:
            if ending is not None:
                yield from self._end(lane, record, ending, checked)
        except Exception as error:
            self._fail(lane, error)
        record.error = record.error or self._failed.pop(lane, None)
        self._send(lane, Report(time=ended_at, finishes=[record]))

    def _send(self, lane: _Lane, report: Report) -> None:
        # The same encoding as the step link's, of a single report.
        encode_reports([report], self._buffer)
        self._socket(lane).send(self._buffer)

    def _socket(self, lane: _Lane) -> zmq.Socket[bytes]:
        """The socket to the adapter of a lane's request."""
        adapter = adapter_of(lane[0])
        return self._sockets[adapter if adapter < len(self._sockets) else 0]

    def _end(self, lane: _Lane, record: FinishRecord, ending: Ending, checked: Checked | None) -> Iterator[None]:
        yield from self._ship(lane, ending.taken)
        try:
            for array in ending.again:
                for _ in array.chunks():
                    yield
            deltas, manifest, changed = ending.compare()
            yield from self._ship(lane, changed)
        finally:
            for array in ending.again:
                array.release()
        if checked is not None:
            checked(manifest)
        record.manifest = manifest
        record.deltas = msgspec.Raw(self._encode(deltas))

    def _ship(self, lane: _Lane, arrays: list[LargeArray]) -> Iterator[None]:
        try:
            for array in arrays:
                for number, chunk in enumerate(array.chunks()):
                    head = _encoder.encode(BlobChunk(lane[0], array.blob, number))
                    # ZeroMQ does not copy the chunk: its frame refers to the array's memory until it is sent.
                    self._socket(lane).send_multipart([head, chunk], copy=False)
                    yield
                array.release()
        finally:
            for array in arrays:
                array.release()

    def _fail(self, lane: _Lane, error: Exception) -> None:
        """Note the error of a choice's large saves, which fails its trace and no other."""
        logger.error("could not send the large saves of %s", lane[0], exc_info=error)
        self._failed.setdefault(
            lane, Failure(type=type(error).__name__, message=f"the large saves could not be read: {error}")
        )
