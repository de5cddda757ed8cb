"""A worker's links to all adapters of an engine that has several: each gets what belongs to its own requests."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Final, TypeVar

from tracewire_engine.protocol.adapters import adapter_of, address_of
from tracewire_engine.protocol.messages import Layout, Report

from .shared_ring import RingCopy
from .step_link import LinkSender

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
        #: The adapters with requests in each of the last layouts, by the layout's id.
        self._of_layout: dict[int, list[int]] = {}

    def put(self, tensor: torch.Tensor, report: Report) -> RingCopy | None:
        layout = report.layout
        if layout is not None:
            self._of_layout[layout.id] = self.readers = sorted({self._adapter(one.request) for one in layout.entries})
            if len(self._of_layout) > _LAYOUTS:
                del self._of_layout[next(iter(self._of_layout))]
        return super().put(tensor, report)

    def send(self, *reports: Report) -> None:
        shares: list[list[Report]] = [[] for _ in range(1 + len(self._others))]
        for report in reports:
            for adapter, share in self._shares(report).items():
                shares[adapter].append(share)
        if shares[0]:
            super().send(*shares[0])
        for link, own in zip(self._others, shares[1:], strict=True):
            if own:
                link.send(*own)

    def _shares(self, report: Report) -> dict[int, Report]:
        """What each adapter gets of a report, by its number. Adapters that get nothing are left out."""
        found: dict[int, Report] = {}

        def share(adapter: int) -> Report:
            if adapter not in found:
                found[adapter] = Report(time=report.time)
            return found[adapter]

        for adapter, steps in self._by_adapter(report.steps, lambda step: step.request):
            share(adapter).steps = steps
        for adapter, finishes in self._by_adapter(report.finishes, lambda finish: finish.request):
            share(adapter).finishes = finishes
        for adapter, applied in self._by_adapter(report.applied, lambda one: one.run):
            share(adapter).applied = applied
        if report.layout is not None:
            for adapter, entries in self._by_adapter(report.layout.entries, lambda entry: entry.request):
                share(adapter).layout = Layout(report.layout.id, entries)
        if report.batch is not None:
            for adapter in self._of_layout[report.batch.layout]:
                share(adapter).batch = report.batch
        if report.ring:
            for adapter in range(1 + len(self._others)):
                share(adapter).ring = report.ring
        return found

    def _by_adapter(
        self, records: Iterable[_Record], name: Callable[[_Record], str]
    ) -> Iterable[tuple[int, list[_Record]]]:
        """The records of each adapter, told by their names."""
        found: dict[int, list[_Record]] = {}
        for record in records:
            found.setdefault(self._adapter(name(record)), []).append(record)
        return found.items()

    def _adapter(self, name: str) -> int:
        adapter = adapter_of(name)
        return adapter if adapter <= len(self._others) else 0


def link_to(address: str, adapters: int) -> LinkSender:
    """A worker's link to the adapters of its engine."""
    return AdapterLinks(address, adapters) if adapters > 1 else LinkSender(address)
