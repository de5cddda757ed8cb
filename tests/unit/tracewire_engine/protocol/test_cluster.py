"""Which cores of a machine each rank gets."""

from __future__ import annotations

import pytest

from tracewire_engine.protocol.cluster import cores_of


@pytest.mark.parametrize(
    ("bind", "rank", "local_rank", "world", "neighbours", "cores"),
    [
        ("0|1", 1, 1, 2, 2, [1]),
        # One list for each rank of the engine, on two machines.
        ("0-1|2-3", 1, 0, 2, 1, [2, 3]),
        # One for each rank of a machine.
        ("0-1|2-3", 3, 1, 4, 2, [2, 3]),
        ("0-3", 1, 0, 2, 1, [0, 1, 2, 3]),
        ("auto", 0, 0, 2, 2, [0, 1]),
        ("auto", 3, 1, 4, 2, [2, 3]),
        ("auto", 2, 0, 3, 1, [0, 1, 2, 3]),
        ("auto", 5, 5, 8, 8, [1]),
        ("nobind", 0, 0, 2, 2, [0, 1, 2, 3]),
    ],
)
def test_cores(bind: str, rank: int, local_rank: int, world: int, neighbours: int, cores: list[int]) -> None:
    assert cores_of(bind, rank, local_rank, world, neighbours, [0, 1, 2, 3]) == cores


def test_no_cores_for_a_rank() -> None:
    with pytest.raises(ValueError, match=r"VLLM_CPU_OMP_THREADS_BIND='0\|1' has 2 lists of cores, and none for rank 2"):
        cores_of("0|1", 2, 2, 4, 4, [0, 1])
