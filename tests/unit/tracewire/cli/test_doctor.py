"""`tracewire doctor` finds what is wrong, and says what to do."""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import msgspec
import pytest

from tests.support.bus_engine import Stage, tiny
from tests.support.cli import command
from tracewire import Client, Engine, ServerInfo
from tracewire.cli.doctor import clock_findings, engine_findings, model_findings, redis_findings
from tracewire_bus.bus import Bus
from tracewire_bus.wire.messages import SCHEMA, Failure, Probe, Versions

FITS: dict[str, Any] = {
    "schema": f"{SCHEMA[0]}.{SCHEMA[1]}",
    "versions": Versions(tracewire=version("tracewire")),
}


async def probed(stage: Stage) -> None:
    """Four tokens with what the test trace's probe saves."""
    (probe,) = stage.submission.interventions
    assert isinstance(probe, Probe)
    import time

    await stage.accept(accepted_at=time.time())
    for number in range(4):
        await stage.save("a", {probe.name: float(number)})
    await stage.final()


@pytest.fixture
def where(redis_url: str, prefix: str) -> tuple[str, ...]:
    """The options that name the bus."""
    return "--url", redis_url, "--prefix", prefix


def by_check(findings: list[dict[str, str]]) -> dict[str, str]:
    return {finding["check"]: finding["status"] for finding in findings}


async def test_a_sound_bus(
    engine: Callable[..., Any], where: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    async with engine(probed, engine="e1", **FITS) as serving:
        assert await command("doctor", "--json", *where) == 0
        (submission,) = serving.taken
        assert submission.client == "doctor"
        assert await command("doctor", "--no-trace", *where) == 0
        assert len(serving.taken) == 1
    shown = capsys.readouterr().out
    found, end = json.JSONDecoder().raw_decode(shown)
    assert found["ok"] is True
    statuses = by_check(found["findings"])
    assert set(statuses.values()) == {"ok"}
    assert {"connection", "redis version", "engine e1", "model tiny", "test trace on tiny", "clock of e1"} <= set(
        statuses
    )
    lines = shown[end:].strip().splitlines()
    assert lines[0].startswith("ok       connection: Redis answers at ")
    assert lines[-1] == "0 problems, 0 warnings"


async def test_an_empty_bus(where: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert await command("doctor", *where) == 1
    lines = capsys.readouterr().out.splitlines()
    at = next(number for number, line in enumerate(lines) if line.startswith("PROBLEM  engines: no engines on "))
    assert lines[at + 1].startswith("         -> start one: tracewire engine demo --url ")
    assert lines[-1] == "1 problem, 0 warnings"


async def test_no_redis(capsys: pytest.CaptureFixture[str]) -> None:
    assert await command("doctor", "--json", "--url", "unix:///nowhere/redis.sock") == 1
    found = json.loads(capsys.readouterr().out)
    assert [(one["check"], one["status"]) for one in found["findings"]] == [("connection", "problem")]
    assert found["ok"] is False


async def test_a_user_that_may_not_see_dead_letters_still_sees_the_rest(
    registered: str, bus: Bus, embedded: str, prefix: str, capsys: pytest.CaptureFixture[str]
) -> None:
    await bus.command("ACL", "SETUSER", "half", "on", ">secret", "~*", "&*", "+@all", "-xrange")
    try:
        url = f"{embedded}?username=half&password=secret"
        assert await command("doctor", "--json", "--no-trace", "--url", url, "--prefix", prefix) == 0
    finally:
        await bus.command("ACL", "DELUSER", "half")
    found = {one["check"]: one for one in json.loads(capsys.readouterr().out)["findings"]}
    assert found["dead letters"]["status"] == "warning"
    assert "does not allow this user XRANGE" in found["dead letters"]["message"]
    assert found["model tiny"]["status"] == "ok"


async def rejecting(stage: Stage) -> None:
    """Refuses each trace."""
    await stage.final("rejected", Failure(type="TraceRejected", message="not today", field="block"))


@pytest.mark.parametrize(
    ("script", "says"),
    [(rejecting, "not today"), (tiny, "the probe did not save a value for each token")],
)
async def test_a_test_trace_that_goes_wrong(
    engine: Callable[..., Any],
    where: tuple[str, ...],
    capsys: pytest.CaptureFixture[str],
    script: Any,
    says: str,
) -> None:
    async with engine(script, **FITS):
        assert await command("doctor", "--json", "--model", "tiny", *where) == 1
    (problem,) = [one for one in json.loads(capsys.readouterr().out)["findings"] if one["status"] == "problem"]
    assert problem["check"] == "test trace on tiny"
    assert says in problem["message"]
    assert problem["advice"]


async def test_what_waits_and_what_died_is_told(
    client: Client, registered: str, where: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    async with client.trace("tiny", "x"):
        assert await command("doctor", "--json", "--no-trace", *where) == 0
    found = {one["check"]: one for one in json.loads(capsys.readouterr().out)["findings"]}
    assert found["model tiny"]["status"] == "warning"
    assert found["model tiny"]["message"] == "1 submission waiting: no engine takes them"
    assert found["dead letters"]["status"] == "ok"


def info(**fields: Any) -> ServerInfo:
    sound: dict[str, Any] = {"version": "7.0.15", "mode": "standalone", "memory_limit": 1000, "memory_used": 10}
    sound |= {"eviction_policy": "noeviction", "appendonly": True, "clients": 1}
    return ServerInfo(**{**sound, "round_trip_s": 0.001, "clock_offset_s": 0.0, **fields})


@pytest.mark.parametrize(
    ("fields", "check", "status", "says"),
    [
        ({"version": "6.2.0"}, "redis version", "ok", "6.2.0"),
        ({"version": "6.0.16"}, "redis version", "problem", "6.0.16 is too old"),
        ({"version": ""}, "redis version", "problem", "too old"),
        ({"eviction_policy": "allkeys-lru"}, "redis eviction", "problem", "maxmemory-policy is allkeys-lru"),
        ({"eviction_policy": "allkeys-lru", "memory_limit": 0}, "redis eviction", "warning", "allkeys-lru"),
        ({"memory_used": 799}, "redis memory", "ok", ""),
        ({"memory_used": 800}, "redis memory", "warning", ""),
        ({"memory_used": 950}, "redis memory", "problem", "takes no more submissions"),
        ({"memory_limit": 0}, "redis memory", "ok", "without a limit"),
        ({"appendonly": False}, "redis persistence", "ok", "loses its data when it restarts"),
        ({"round_trip_s": 0.05}, "redis latency", "warning", "50.0 ms"),
        ({"clock_offset_s": 2.0}, "clock of redis", "warning", "2.0 s ahead of this machine's"),
        ({"clock_offset_s": -2.0}, "clock of redis", "warning", "2.0 s behind this machine's"),
        ({"clock_offset_s": 2.0, "round_trip_s": 3.0}, "clock of redis", "ok", ""),
    ],
)
def test_redis(fields: dict[str, Any], check: str, status: str, says: str) -> None:
    found = {one.check: one for one in redis_findings(info(**fields))}
    assert found[check].status == status
    assert says in found[check].message
    others = {one.status for name, one in found.items() if name not in (check, "redis latency", "clock of redis")}
    assert others <= {"ok"}
    assert bool(found[check].advice) == (status != "ok")


def engine_of(**fields: Any) -> Engine:
    sound: dict[str, Any] = {"name": "e1", "model": "tiny", "state": "serving", "running": 1, "capacity": 4}
    sound |= {"host": "", "revision": "", "dtype": "", "max_model_len": 1, "started_at": 0.0}
    sound |= {"schema": FITS["schema"], "versions": {"tracewire": version("tracewire")}}
    return Engine(**{**sound, **fields})


@pytest.mark.parametrize(
    ("fields", "status", "says"),
    [
        ({}, "ok", "tiny, serving, 1 of 4 traces"),
        ({"schema": "1.9"}, "problem", "it writes schema 1.9"),
        ({"malformed": 3}, "warning", "skipped 3 malformed items"),
        ({"state": "holding"}, "warning", "holding"),
        ({"state": "draining"}, "warning", "draining"),
        ({"versions": {"tracewire": "0.0.1"}}, "warning", f"this client is {version('tracewire')}"),
        ({"running": 4}, "warning", "it is full"),
    ],
)
def test_engines(fields: dict[str, Any], status: str, says: str) -> None:
    *_, found = engine_findings([engine_of(**fields)], "redis://host", "tw")
    assert (found.check, found.status) == ("engine e1", status)
    assert says in found.message
    assert bool(found.advice) == (status != "ok")


def test_no_engine_is_ready() -> None:
    first, *_ = engine_findings([engine_of(state="draining")], "redis://host", "tw")
    assert (first.status, first.message) == ("problem", "no ready engine")
    (first,) = engine_findings([engine_of()], "redis://host", "tw", "other")
    assert first.message == "no engines of 'other' on redis://host with the prefix 'tw'"
    served = f"name a model that is served: {engine_of().model!r}"
    assert first.advice == f"{served}; or start one: tracewire engine other --url redis://host"
    (first,) = engine_findings([], "redis://host", "tw", "other")
    assert first.advice == "start one: tracewire engine other --url redis://host"


async def test_models(client: Client, registered: str) -> None:
    import dataclasses

    (model,) = await client.models.list()
    assert [one.status for one in model_findings(model, 0)] == ["ok"]
    full = dataclasses.replace(model, running=model.capacity, differs=("dtype",))
    assert [one.message for one in model_findings(full, 2)] == [
        "its engines differ in: dtype",
        "2 submissions waiting: its engines are full",
    ]


def test_a_clock_that_cannot_be_told_apart_is_no_warning() -> None:
    assert clock_findings("c", "e1", 1.5, 0.6)[0].status == "ok"
    assert clock_findings("c", "e1", 1.7, 0.6)[0].status == "warning"
    assert msgspec.structs.asdict(clock_findings("c", "e1", 0.0, 0.0)[0]).keys() == {
        "check",
        "status",
        "message",
        "advice",
    }
