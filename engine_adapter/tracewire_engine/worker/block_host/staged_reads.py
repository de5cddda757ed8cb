"""The values of a step for hosts for which the model does not wait."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tracewire_engine.protocol.block_host import SOURCE

from .host import BlockHost
from .host_turns import HostTurns, parts_of
from .report_thread import ReportThread
from .staged_step import StagedStep

__all__ = ["StagedReads"]

#: How many bytes of values are staged before hosts are told of them within a step.
_MOST_STAGED = 64 << 20


class StagedReads:
    """What the step under way has reached, until the hosts are told.

    Args:
        turns: tells the hosts.
        reports: passes on what hosts report.
        pinned: whether values may lie on a GPU.
    """

    def __init__(self, turns: HostTurns, reports: ReportThread, *, pinned: bool) -> None:
        self._turns, self._reports, self._pinned = turns, reports, pinned
        self._step: StagedStep | None = None
        #: How many bytes the last step had.
        self.expected = 0

    def drop(self) -> None:
        """Forget a step that was not ended."""
        if self._step is not None:
            self._step.leave()
            self._step = None

    def reach(
        self, location: str, value: Any, readers: list[BlockHost], active: Sequence[BlockHost], *, by_request: bool
    ) -> None:
        """Take a value.

        Args:
            location: where the model has reached it.
            value: the model's.
            readers: the hosts that want it.
            active: all hosts of the step.
            by_request: as in `Reached`.
        """
        passed, inside, parts = len(self._turns.passed), f".{SOURCE}." in location, parts_of(readers, location)
        try:
            if self._step is None:
                rows = {host: host.rows for host in active if host.reads is not None and host.rows is not None}
                self._step = self._turns.stage(rows, pinned=self._pinned, expected=self.expected)
            self._step.reach(location, value, readers, passed, by_request=by_request, rows_only=inside, parts=parts)
        except Exception as error:  # it costs the hosts, not the engine
            for host in readers:
                self._turns.misshared(host, location, error)
        if self._step is not None and self._step.size > _MOST_STAGED:
            self.give(active, wait=True)

    def give(self, active: Sequence[BlockHost], *, wait: bool = False) -> None:
        """Tell the hosts of a step (`active`) what is staged, and perhaps wait until they can have it."""
        step, self._step = self._step, None
        if step is None:
            return
        readers, self.expected = [host for host in active if host.reads is not None], step.size
        self._turns.give(readers, step, whole=True)
        step.leave()
        for host in readers if wait else ():
            if host.failure is None and self._turns.send(host):
                self._reports.send_now((host,))
