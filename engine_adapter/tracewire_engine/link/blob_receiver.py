"""The adapter's end of the link for large arrays.

A worker's `BlobSender` digests large arrays on a thread, and sends them in chunks over a socket separate from that of
the steps' reports. Both ends queue only a few chunks: when Redis is slow, the thread waits and the model does not.

From a request's first large array on, its reports take this way too, in order behind the chunks. So when the adapter
reaches a report, it has already written the blobs that the report refers to.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from tracewire_engine.protocol.messages import Report

from .addresses import Guard, bind, endpoint, extended
from .step_link import Receiver

__all__ = ["QUEUED_CHUNKS", "BlobChunk", "BlobReceiver"]

logger = logging.getLogger("vllm.tracewire")

#: The most chunks that each end of the socket queues.
QUEUED_CHUNKS = 8


class BlobChunk(msgspec.Struct, array_like=True):
    """One chunk of a request's blob. Its bytes travel in a separate frame; the receiver sets `data` to them."""

    request: str
    blob: str
    number: int
    data: Any = None


_chunks = msgspec.msgpack.Decoder(BlobChunk)

_reports = msgspec.msgpack.Decoder(list[Report])


class BlobReceiver(Receiver):
    """The adapter's end: yields chunks and reports. Those of one request come in the order in which they were sent."""

    def __init__(self, link_address: str, guard: Guard | None = None) -> None:
        """Bind the socket. `address` is then `link_address` with this socket added; `guard` is the link's."""
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.PULL)
        self._socket.setsockopt(zmq.RCVHWM, QUEUED_CHUNKS)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._unprotect = guard.protect(self._context, self._socket) if guard is not None else None
        at = endpoint(link_address, "blobs") if guard is None else f"{endpoint(link_address).rpartition(':')[0]}:*"
        self.address = extended(link_address, "blobs", bind(self._socket, at))

    def close(self) -> None:
        """Close the socket. Idempotent."""
        if self._unprotect is not None:
            unprotect, self._unprotect = self._unprotect, None
            unprotect()
        self._context.destroy(linger=0)

    async def items(self) -> AsyncIterator[BlobChunk | Report]:
        """Yield every chunk and report, without end. At most a few chunks are received in advance."""
        while True:
            try:
                frames = await self._socket.recv_multipart(copy=False)
            except zmq.Again:
                # The socket can signal a message while it only accepts a connection.
                continue
            try:
                if len(frames) == 1:
                    for report in _reports.decode(frames[0].buffer):
                        yield report
                    continue
                chunk = _chunks.decode(frames[0].buffer)
            except (msgspec.MsgspecError, ValueError, RecursionError):
                # A defect that costs one request: its trace ends with an error, and the others go on.
                logger.exception("a message of a worker could not be decoded")
                continue
            chunk.data = frames[1].buffer
            yield chunk
