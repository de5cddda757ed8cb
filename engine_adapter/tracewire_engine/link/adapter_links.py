"""A worker's links to all adapters of an engine that has several: each gets what belongs to its own requests."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Final, TypeVar

from tracewire_engine.protocol.adapters import adapter_of, address_of
from tracewire_engine.protocol.messages import Layout, LayoutEntry, Report

from .shared_ring import RingCopy
from .step_link import LinkSender, encode_reports

if TYPE_CHECKING:
    import torch

__all__ = ["AdapterLinks", "link_to"]

_Record = TypeVar("_Record")

#: How many layouts are remembered: more than reports can wait.
_LAYOUTS: Final = 16


class AdapterLinks(LinkSender):
    """The links to `adapters` adapters, of which the first is at `address`. A worker uses it like the link to one."""

    def __init__(self, address: str, adapters: int) -> None:
        super().__init__(address, readers=adapters)
        self._others = [LinkSender(address_of(address, adapter)) for adapter in range(1, adapters)]
        #: The adapters with requests in each of the last layouts, by the layout's id; and each one's part of the last.
        self._of_layout: dict[int, list[int]] = {}
        self._last: tuple[Layout, dict[int, list[LayoutEntry]]] | None = None

    def put(self, tensor: torch.Tensor, report: Report) -> RingCopy | None:
        layout = report.layout
        if layout is not None:
            self._of_layout[layout.id] = self.readers = sorted(self._entries_of(layout))
            if len(self._of_layout) > _LAYOUTS:
                del self._of_layout[next(iter(self._of_layout))]
        return super().put(tensor, report)

    def send(self, *reports: Report) -> None:
        if adapters := self._of_all(reports):
            # In most steps requests only read, and these adapters get the same bytes.
            encode_reports(reports, self._buffer)
            for adapter in adapters:
                link = self if adapter == 0 else self._others[adapter - 1]
                link.send_encoded(self._buffer)
            return
        shares: list[list[Report]] = [[] for _ in range(1 + len(self._others))]
        for report in reports:
            for adapter, share in self._shares(report).items():
                shares[adapter].append(share)
        if shares[0]:
            super().send(*shares[0])
        for link, own in zip(self._others, shares[1:], strict=True):
            if own:
                link.send(*own)

    def _of_all(self, reports: Sequence[Report]) -> Sequence[int]:
        """The adapters that get each of these reports as a whole; none if there are others, or nothing but reads."""
        wanted: Sequence[int] | None = None
        for report in reports:
            batch = report.batch
            if batch is None or report.steps or report.finishes or report.applied or report.layout or report.ring:
                return ()
            adapters = self._of_layout[batch.layout]
            if wanted is not None and adapters != wanted:
                return ()
            wanted = adapters
        return wanted or ()

    def _shares(self, report: Report) -> dict[int, Report]:
        """What each adapter gets of a report, by its number. Adapters that get nothing are left out."""
        found: dict[int, Report] = {}

        def share(adapter: int) -> Report:
            if adapter not in found:
                found[adapter] = Report(time=report.time)
            return found[adapter]

        for adapter, steps in self._by_adapter(report.steps, lambda step: step.request).items():
            share(adapter).steps = steps
        for adapter, finishes in self._by_adapter(report.finishes, lambda finish: finish.request).items():
            share(adapter).finishes = finishes
        for adapter, applied in self._by_adapter(report.applied, lambda one: one.run).items():
            share(adapter).applied = applied
        if report.layout is not None:
            for adapter, entries in self._entries_of(report.layout).items():
                share(adapter).layout = Layout(report.layout.id, report.layout.sets, entries)
        if report.batch is not None:
            for adapter in self._of_layout[report.batch.layout]:
                share(adapter).batch = report.batch
        if report.ring:
            for adapter in range(1 + len(self._others)):
                share(adapter).ring = report.ring
        return found

    def _entries_of(self, layout: Layout) -> dict[int, list[LayoutEntry]]:
        """The entries of each adapter in a layout. It is asked for when the layout is made and when it is sent."""
        if self._last is None or self._last[0] is not layout:
            self._last = layout, self._by_adapter(layout.entries, lambda entry: entry.request)
        return self._last[1]

    def _by_adapter(self, records: Iterable[_Record], name: Callable[[_Record], str]) -> dict[int, list[_Record]]:
        """The records of each adapter, told by their names."""
        found: dict[int, list[_Record]] = {}
        for record in records:
            found.setdefault(self._adapter(name(record)), []).append(record)
        return found

    def _adapter(self, name: str) -> int:
        adapter = adapter_of(name)
        return adapter if adapter <= len(self._others) else 0


def link_to(address: str, adapters: int) -> LinkSender:
    """A worker's link to the adapters of its engine."""
    return AdapterLinks(address, adapters) if adapters > 1 else LinkSender(address)
