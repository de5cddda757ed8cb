"""Sends the adapter what hosts have reported: gathered, or behind large arrays of the same trace."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING

from tracewire_engine.link.blob_receiver import BlobChunk
from tracewire_engine.protocol.block_host import Chunk
from tracewire_engine.protocol.messages import Report

from .host import BlockHost, HostedTrace
from .passed_arrays import PassedArrays

if TYPE_CHECKING:
    from tracewire_engine.link.step_link import LinkSender
    from tracewire_engine.worker.blob_sender import BlobSender

__all__ = ["GatheredReports"]


class GatheredReports:
    """What is to be sent next.

    Args:
        connect: makes an end of the link to the adapter. Called when something is sent first.
        blobs: sends large arrays.
        hosts: gives all hosts.
        end: ends a host, given how many bytes of its large arrays waited: too many. They are dropped before.
    """

    def __init__(
        self,
        connect: Callable[[], LinkSender],
        blobs: BlobSender | None,
        hosts: Callable[[], Iterable[BlockHost]],
        end: Callable[[BlockHost, int], None],
    ) -> None:
        self._connect, self._blobs = connect, blobs
        self._hosts, self._end = hosts, end
        self._link: LinkSender | None = None
        self._unsent: list[Report] = []
        #: The names of the traces that have large arrays.
        self._large: set[str] = set()
        self._arrays = PassedArrays()

    def __len__(self) -> int:
        return len(self._unsent)

    def watch(self, host: BlockHost) -> None:
        """Tell a host from now on how many bytes of large arrays it may have sent."""
        host.allowed = partial(self._arrays.allow, host.arrays)

    def forget(self, trace: HostedTrace) -> None:
        """Forget a trace that is over."""
        self._large.discard(trace.name)

    def send(self) -> None:
        """Send what has been gathered."""
        reports, self._unsent = self._unsent, []
        if reports:
            self._link = self._link or self._connect()
            self._link.send(*reports)

    def add(self, host: BlockHost, report: Report) -> None:
        """Send a report with the next `send`. What belongs to a trace with large arrays follows them."""
        if self._blobs is None or self._large.isdisjoint(host.traces):
            self._unsent.append(report)
            return
        lanes: dict[str, Report] = {}
        for kind in ("steps", "finishes"):
            for record in getattr(report, kind):
                trace = _trace_of(host, record.request)
                lane = trace.name if trace is not None and trace.name in self._large else ""
                getattr(lanes.setdefault(lane, Report(time=report.time)), kind).append(record)
        for lane, part in lanes.items():
            if lane:
                # Behind what its trace reported before it had large arrays.
                self.send()
                self._relay(host, lane, part)
            else:
                self._unsent.append(part)

    def add_chunk(self, host: BlockHost, chunk: Chunk) -> None:
        """Send a piece of a large array.

        Raises:
            UntrustedReport: the host has sent more than it was told that it may.
        """
        owner = _trace_of(host, chunk.request)
        if self._blobs is not None and owner is not None:
            self._large.add(owner.name)
            self._relay(host, owner.name, BlobChunk(chunk.request, chunk.blob, chunk.number), chunk.data)

    def _relay(self, host: BlockHost, lane: str, message: BlobChunk | Report, data: bytes = b"") -> None:
        assert self._blobs is not None
        taken = self._arrays.take(host.arrays, message, data)
        self._blobs.relay((lane, 0), message, taken.send)
        live = {one.arrays: one for one in self._hosts() if one.failure is None}
        if (arrays := self._arrays.too_many(live)) is not None:
            waiting = arrays.waiting
            self._arrays.drop(arrays)
            self._end(live[arrays], waiting)


def _trace_of(host: BlockHost, name: str) -> HostedTrace | None:
    """The trace of a host's request, or of shared values, by the name that records give it."""
    found = (one.trace for (request, _), one in list(host.records.items()) if request == name)
    return host.shared_names.get(name) or next(found, None)
