"""How much a host has to do in a step: by the number of its blocks, and by the time that they are seen to take.

A tenant's blocks fill a host before the tenant gets another one. Each further host costs the model's thread messages in
each step, and wakes a process, which costs more than what most blocks do. One that is too full keeps the model waiting.
So a host takes many blocks, but fewer if they take longer than blocks do as a rule. A block's source does not tell
that, so the host measures it.
"""

from __future__ import annotations

__all__ = ["FULL", "FULL_OF_WRITERS", "HostLoad"]

#: How many values the traces of a host read in a step, at most, before the tenant gets another one; and how many traces
#: it has before that if their blocks may write. A host has fewer if its blocks take long.
FULL, FULL_OF_WRITERS = 16, 16

#: How much processor time a step takes at most as a rule, in microseconds: in any host, and each value that is read or
#: trace whose blocks may write.
_BASE_US, _EACH_US = 1000.0, 100.0

#: The share that a step has of what is taken to be usual, and how many times as long as the rule a host counts at most.
_WEIGHT, _MOST = 0.1, 100.0


class HostLoad:
    """The load of one host.

    Args:
        like: a host with the same kind of blocks, as which it is taken to be until it is measured.
    """

    def __init__(self, like: HostLoad | None = None) -> None:
        #: How many times as long as the rule its blocks take; 1 if they take no longer.
        self._factor: float = 1.0 if like is None else like._factor

    def measured(self, used_us: float, count: int, steps: int = 1) -> None:
        """Note for how many microseconds the host has worked in a step.

        Args:
            used_us: as the host says, which may be anything.
            count: how many values its blocks read, and traces whose blocks may write.
            steps: of how many steps this is the mean.
        """
        if count:
            found = (used_us - _BASE_US) / (count * _EACH_US)
            self._factor += (1 - (1 - _WEIGHT) ** steps) * (min(_MOST, max(1.0, found)) - self._factor)

    def of(self, reads: int, writers: int) -> float:
        """The load of so many values that blocks read, and traces whose blocks may write, relative to a full host's."""
        return self._factor * (reads / FULL + writers / FULL_OF_WRITERS)
