"""Which Ray cluster an engine runs in, and which cores of a machine in it each rank gets."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

__all__ = ["Cluster", "cores_of"]


class Cluster(msgspec.Struct):
    """A cluster to run in. `address` is `"local"` for one that is still to be started, else `HOST:PORT` of its head."""

    address: str
    #: This machine's address in it.
    node: str = ""

    @property
    def own(self) -> bool:
        """Whether it is this engine's own, and ends with it."""
        return self.address == "local"


def cores_of(bind: str, rank: int, local_rank: int, world: int, neighbours: int, cores: Sequence[int]) -> list[int]:
    """The cores that a rank's threads run on.

    Args:
        bind: `VLLM_CPU_OMP_THREADS_BIND`: a list of cores for each rank, as `"0-3|4-7"`: of all ranks, or of those on
            this machine; `"auto"` to share what there is; `"nobind"`.
        rank: among all `world` ranks.
        local_rank: among the `neighbours` on this machine.
        cores: what this process may use.

    Raises:
        ValueError: no list of cores is meant for it.
    """
    if bind == "nobind":
        return list(cores)
    if bind == "auto":
        share = max(1, len(cores) // neighbours)
        first = local_rank * share % len(cores)
        return list(cores[first : first + share])
    lists = bind.split("|")
    index = rank if len(lists) == world else local_rank
    if index >= len(lists):
        raise ValueError(
            f"VLLM_CPU_OMP_THREADS_BIND={bind!r} has {len(lists)} lists of cores; rank {rank} is number {local_rank} "
            f"on its machine, of {world} in all: give one for each rank, or for each on the machine"
        )
    return [core for span in lists[index].split(",") for core in _span(span)]


def _span(span: str) -> range:
    first, _, last = span.partition("-")
    return range(int(first), int(last or first) + 1)
