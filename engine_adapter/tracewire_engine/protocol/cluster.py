"""The Ray cluster of an engine, and the cores that each rank gets on its machine."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

__all__ = ["Cluster", "cores_of"]


class Cluster(msgspec.Struct):
    """A Ray cluster. `address` is the `HOST:PORT` of its head, or `"local"` if the engine is to start the cluster."""

    address: str
    #: This machine's address in the cluster.
    node: str = ""

    @property
    def own(self) -> bool:
        """Whether the engine starts the cluster itself, so that the cluster ends with it."""
        return self.address == "local"


def cores_of(bind: str, rank: int, local_rank: int, world: int, neighbours: int, cores: Sequence[int]) -> list[int]:
    """The cores that a rank's threads run on.

    Args:
        bind: the value of `VLLM_CPU_OMP_THREADS_BIND`. A list of cores for each rank, such as `"0-3|4-7"`, either for
            all ranks or for those on this machine; `"auto"` to divide the cores evenly; `"nobind"` to bind no thread.
        rank: the rank's number among all.
        local_rank: the rank's number among those on this machine.
        world: how many ranks there are.
        neighbours: how many ranks are on this machine.
        cores: the cores that this process may use.

    Raises:
        ValueError: `bind` has no list of cores for this rank.
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
            f"VLLM_CPU_OMP_THREADS_BIND={bind!r} has {len(lists)} lists of cores, and none for rank {rank} (number "
            f"{local_rank} on its machine, of {world} ranks): give a list for each rank, or for each on the machine"
        )
    return [core for span in lists[index].split(",") for core in _span(span)]


def _span(span: str) -> range:
    first, _, last = span.partition("-")
    return range(int(first), int(last or first) + 1)
