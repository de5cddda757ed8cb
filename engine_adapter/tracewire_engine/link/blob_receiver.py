"""The adapter's end of the link for large arrays, beside the link of the steps' reports.

A worker's `BlobSender` digests large arrays on a thread and pushes them in chunks over a socket of their own. Both ends
queue a few chunks only: when Redis is slow, the thread waits, and the model does not.

A request's reports take this way too from its first large array on, in order behind the chunks. An adapter that has
written everything before a report has therefore written the blobs that the report refers to.
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

#: Chunks that a socket's end queues at most.
QUEUED_CHUNKS = 8


class BlobChunk(msgspec.Struct, array_like=True):
    """One chunk of a request's blob. Its bytes are a frame of their own, and `data` once it was received."""

    request: str
    blob: str
    number: int
    data: Any = None


_chunks = msgspec.msgpack.Decoder(BlobChunk)

_reports = msgspec.msgpack.Decoder(list[Report])


class BlobReceiver(Receiver):
    """The adapter's end: yields chunks and reports, in the order in which the worker sent each request's.

    `address` is the link's with this socket in it; `guard` is the link's.
    """

    def __init__(self, link_address: str, guard: Guard | None = None) -> None:
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
        """Yield every chunk and report. Never ends by itself. Nothing more is received than a few chunks ahead."""
        while True:
            try:
                frames = await self._socket.recv_multipart(copy=False)
            except zmq.Again:
                # A connection that is being let in can look like a message.
                continue
            try:
                if len(frames) == 1:
                    for report in _reports.decode(frames[0].buffer):
                        yield report
                    continue
                chunk = _chunks.decode(frames[0].buffer)
            except msgspec.MsgspecError:
                # A defect, but one request's: its trace ends with an error, the others go on.
                logger.exception("a message of the workers could not be read")
                continue
            chunk.data = frames[1].buffer
            yield chunk
