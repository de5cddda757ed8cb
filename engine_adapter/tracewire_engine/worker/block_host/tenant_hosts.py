"""Finds each trace its host: one that it shares with other traces of its tenant, or one of its own.

Blocks share a host if their source shows that they only compute (`reading.py`): such a block can harm its neighbours by
its time and its memory alone. Those that only read have other hosts than those that may write, since the model waits
for a host as a whole. If a stream can wait for hosts (`stream_visits.py`), so have those for which the model's thread
waits.
"""

from __future__ import annotations

import os

from .host import BlockHost
from .pool import HostPool
from .reading import MOST_VISITED, Account
from .report_thread import ReportThread

__all__ = ["TenantHosts"]

#: How many of a tenant's hosts there are at most.
MOST = max(1, min(8, (os.cpu_count() or 1) // 2))


class TenantHosts:
    """The hosts that traces share.

    Args:
        pool: starts hosts.
        reports: passes on what they report.
        most: how many hosts a tenant has at most for blocks that only read, and for others.
        visits: whether a stream can wait for hosts.
    """

    def __init__(self, pool: HostPool, reports: ReportThread, most: int = MOST, *, visits: bool = False) -> None:
        self._pool, self._reports, self._most, self._visits = pool, reports, most, visits
        #: By the tenant, whether the blocks only read, and whether a stream waits for them.
        self._shared: dict[tuple[str, bool, bool], list[BlockHost]] = {}

    def of(self, tenant: str | None, account: Account) -> BlockHost:
        """A host for a trace.

        Args:
            tenant: the trace's; `None` for a host of its own.
            account: of its blocks.

        Raises:
            OSError: no host could be started.
        """
        if tenant is None or not account.computes:
            return self._started(None)
        reads, visited = account.reads is not None, self._visits and account.edits is not None
        kind = tenant, reads, visited and not reads
        known = [
            host for host in self._shared.get(kind, ()) if _is_open(host, reads, account.edits if kind[2] else None)
        ]
        best = _best(known)
        if best is None or (_load(best) >= 1 and len(known) < self._most):
            self._forget_retired()
            best = self._started((tenant, reads), best)
            known.append(best)
        self._shared[kind] = known
        return best

    def _started(self, kind: tuple[str, bool] | None, like: BlockHost | None = None) -> BlockHost:
        host = BlockHost(self._pool.take(), kind, like)
        try:
            self._reports.watch(host)
        except BaseException:
            host.process.close()
            raise
        return host

    def _forget_retired(self) -> None:
        for kind, hosts in list(self._shared.items()):
            self._shared[kind] = [host for host in hosts if not host.retired]
            if not self._shared[kind]:
                del self._shared[kind]


def _best(hosts: list[BlockHost]) -> BlockHost | None:
    """The host of some that a trace is given: the fullest one with room, so that a step has few, or the least full."""
    loads = {host: _load(host) for host in hosts}
    with_room = [host for host in hosts if loads[host] < 1]
    return max(with_room, key=loads.__getitem__) if with_room else min(hosts, key=loads.__getitem__, default=None)


def _load(host: BlockHost) -> float:
    """How much a host has to do in a step, relative to one that is full."""
    found = host.accounts
    return host.load.of(0, found.traces) if host.reads is None else host.load.of(found.reads, found.writers)


def _is_open(host: BlockHost, reads: bool, edits: frozenset[str] | None) -> bool:
    """Whether a host takes more traces. One in which other blocks than such have run takes none: a later request's."""
    usable = host.failure is None and not host.retired and (host.reads is not None) == reads and host.account.computes
    if edits is not None:
        known = host.account.edits
        usable = usable and known is not None and len(known | edits) <= MOST_VISITED
    return usable and host.process.alive()
