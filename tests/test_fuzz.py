"""An engine that reads what somebody has mutated goes on: valid traces beside it end as they should."""

from __future__ import annotations

import pytest

import tests.fuzz as fuzz
from tests.support.served import check


async def test_a_fuzz_of_what_an_engine_reads(embedded: str, prefix: str) -> None:
    check(await fuzz.run(2000, 20261123, prefix=prefix, url=embedded))


@pytest.mark.full
async def test_a_long_fuzz_of_what_an_engine_reads() -> None:
    found = await fuzz.run(100_000, 20261124)
    check(found)
    assert found["loop"]["callback_cpu_ms"] < 100, found
