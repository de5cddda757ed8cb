"""What is certain of the blocks of all traces of a host, many of which have the same blocks."""

from __future__ import annotations

from .reading import Account, union

__all__ = ["JoinedAccounts"]


class JoinedAccounts:
    """The accounts of a host's traces.

    A trace that has the blocks of an earlier one takes as long, however many traces there are.

    Attributes:
        joined: what is certain of all of them together.
        traces: how many there are.
        reads: how many values those whose blocks only read may ask for, each at least one.
        writers: how many of them have blocks that may write.
    """

    def __init__(self) -> None:
        self.joined = union([])
        self.traces = self.reads = self.writers = 0
        #: The accounts that differ, each with the number of its traces.
        self._counts: list[tuple[Account, int]] = []

    def replace(self, old: Account | None, new: Account | None) -> None:
        """A trace has the account `new` from now on: a new trace if it had none, one that leaves if it gets none."""
        joins = self._add(new, 1)
        if self._add(old, -1) or joins:
            self.joined = union([account for account, _ in self._counts])

    def _add(self, account: Account | None, by: int) -> bool:
        """Count a trace in or out. Returns whether the accounts that differ are others now."""
        if account is None:
            return False
        self.traces += by
        if account.reads is None:
            self.writers += by
        else:
            self.reads += by * max(1, len(account.reads))
        for place, (known, count) in enumerate(self._counts):
            if known is account or known == account:
                self._counts[place] = known, count + by
                if not count + by:
                    del self._counts[place]
                return not count + by
        self._counts.append((account, by))
        return True
