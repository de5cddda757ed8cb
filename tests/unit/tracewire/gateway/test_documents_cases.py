"""Requests that schemathesis makes of the API's document: each gets an answer that the document describes."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

import msgspec
import pytest

from tests.support.api_cases import documented, run_cases
from tests.support.gateways import Served

ROUTES = 25


def answered(served: Served) -> Counter[str]:
    """How many requests the gateway has answered, by status."""
    found: Counter[str] = Counter()
    for sample in (sample for metric in served.gateway.metrics.requests.collect() for sample in metric.samples):
        if sample.name.endswith("_total"):
            found[sample.labels["status"]] += int(sample.value)
    return found


async def check(served: Served, folder: Path, *phases: str, examples: int, seed: int, least: int) -> None:
    """Run cases, at least so many, and see them answered as the document says, none of them with an error of ours."""
    found = await run_cases(served, folder, *phases, examples=examples, seed=seed)
    assert not found.failures
    assert found.cases >= least
    statuses = answered(served)
    assert statuses.total() >= found.cases
    assert not [status for status in statuses if not "200" <= status < "500"]
    # They reach behind the checks of their form: traces run, and things are found.
    assert statuses["200"] + statuses["202"] > found.cases / 20, statuses


async def test_requests_get_documented_answers(redis_url: str, prefix: str, tmp_path: Path) -> None:
    async with documented(redis_url, prefix) as served:
        await check(served, tmp_path, "examples", "fuzzing", examples=10, seed=1, least=8 * ROUTES)


@pytest.mark.full
@pytest.mark.parametrize("seed", [2, 3])
async def test_many_requests_get_documented_answers(redis_url: str, prefix: str, tmp_path: Path, seed: int) -> None:
    async with documented(redis_url, prefix) as served:
        await check(served, tmp_path, "examples", "coverage", "fuzzing", examples=100, seed=seed, least=5000)


async def test_any_point_to_begin_at_is_answered(served: Served) -> None:
    """The stream of all traces has no end, so that schemathesis leaves it out."""
    places = random.Random(7)
    points = ["".join(places.choices("0123456789-", k=places.randrange(12))) for _ in range(100)]
    points += ["".join(chr(places.randrange(1, 0xD800)) for _ in range(places.randrange(9))) for _ in range(100)]
    statuses: Counter[int] = Counter()
    async with served.http() as http:
        for point in ["start", "now", *points]:
            async with http.stream("GET", "/events", params={"since": point}) as answer:
                statuses[answer.status_code] += 1
                if answer.status_code == 422:
                    assert msgspec.json.decode(await answer.aread())["field"] == "since"
    assert statuses.keys() == {200, 422}, statuses
    assert statuses[200] >= 2
