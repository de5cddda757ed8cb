"""`tracewire doctor`: looks at Redis, the engines, clocks and versions, runs a test trace, and says what to do."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import AsyncIterator, Sequence
from importlib.metadata import version
from typing import Any, Literal

import msgspec

from tracewire.admin.engines import Engine
from tracewire.client import Client, connect
from tracewire.errors import ConnectError, PermissionDeniedError, TracewireError
from tracewire.traces.served_models import ModelInfo
from tracewire_bus.store.server_info import ServerInfo
from tracewire_bus.transport.urls import redacted
from tracewire_bus.wire.messages import SCHEMA, Accepted, Probe

from .commands import add_command
from .format import counted
from .model_names import add_model
from .printing import place, print_json, rich_terminal, start_command

__all__ = ["Finding", "add_doctor", "clock_findings", "engine_findings", "model_findings", "redis_findings"]

#: The oldest Redis that Tracewire runs on.
_OLDEST = (6, 2)
#: Shares of the memory of Redis: the first is worth a warning, with the second Redis takes no more submissions.
_FILLING, _FULL = 0.8, 0.95
#: A round trip to Redis that is worth a warning, in seconds; and a difference between clocks.
_SLOW_S, _APART_S = 0.02, 1.0
#: How long the test trace may take, in seconds.
_DEADLINE_S = 60.0


class Finding(msgspec.Struct, frozen=True):
    """One part that the command looked at.

    Attributes:
        check: the part that the command looked at.
        status: `ok`; `warning`: it works, but not well; `problem`: it does not work.
        message: the state of that part.
        advice: the step that mends it; `""` if there is nothing to mend.
    """

    check: str
    status: Literal["ok", "warning", "problem"]
    message: str
    advice: str = ""


def add_doctor(commands: Any, parents: Sequence[argparse.ArgumentParser]) -> None:
    """Add the subcommand."""
    doctor = add_command(
        commands,
        "doctor",
        _doctor,
        parents=parents,
        help="check Redis, the engines, clocks and versions, run a test trace, and say what to do",
        exits={0: "no problem was found; there may be warnings", 1: "a problem was found"},
        examples=("tracewire doctor --url redis://localhost",),
        json="an object: ok, findings (a list of check, status, message, advice)",
    )
    add_model(doctor, "--model", help="run the test trace on this model (default: on every one)")
    doctor.add_argument("--no-trace", action="store_true", help="run no test trace")


async def _doctor(options: argparse.Namespace) -> int:
    findings = []
    async for finding in _findings(options):
        findings.append(finding)
        if not options.json:
            _print(finding)
    problems = [one for one in findings if one.status == "problem"]
    if options.json:
        print_json({"ok": not problems, "findings": [msgspec.structs.asdict(one) for one in findings]})
    else:
        warnings = sum(one.status == "warning" for one in findings)
        print(f"{counted(len(problems), 'problem')}, {counted(warnings, 'warning')}")
    return 1 if problems else 0


def _print(finding: Finding) -> None:
    mark = {"ok": "ok     ", "warning": "WARNING", "problem": "PROBLEM"}[finding.status]
    if rich_terminal():
        colour = {"ok": "\x1b[32m", "warning": "\x1b[33m", "problem": "\x1b[31m"}[finding.status]
        mark = f"{colour}{mark}\x1b[0m"
    print(f"{mark}  {finding.check}: {finding.message}")
    if finding.advice:
        print(f"         -> {finding.advice}")
    sys.stdout.flush()


async def _findings(options: argparse.Namespace) -> AsyncIterator[Finding]:
    try:
        async with connect(options.url, prefix=options.prefix, retry_timeout=5.0) as client:
            yield Finding("connection", "ok", f"Redis answers at {redacted(client.url)}")
            try:
                for one in redis_findings(await client.server.info()):
                    yield one
            except TracewireError as error:
                advice = "let the user run INFO and TIME, or run this command as another user (docs/redis.md)"
                yield Finding("redis", "warning", f"Redis does not say how it is set up: {error}", advice)
            engines = await client.engines.list()
            for one in engine_findings(engines, client.url, options.prefix, options.model):
                yield one
            yield await _dead_letters(client)
            for info in await client.models.list():
                if options.model not in (None, info.name):
                    continue
                for one in model_findings(info, await client.models.waiting(info.name)):
                    yield one
                if not options.no_trace and any(one.model == info.name and one.ready for one in engines):
                    for one in await _trace_findings(client, info.name):
                        yield one
    except ConnectError as error:
        advice = "start everything with: tracewire up demo; or name a Redis that runs: docs/redis.md"
        yield Finding("connection", "problem", str(error), advice)


def redis_findings(info: ServerInfo) -> list[Finding]:
    """Findings about Redis and its clock."""
    found = []
    parts = [int(part) for part in info.version.split(".")[:2] if part.isdecimal()]
    if tuple(parts) >= _OLDEST:
        found.append(Finding("redis version", "ok", f"{info.version}, {info.mode}"))
    else:
        found.append(Finding("redis version", "problem", f"{info.version} is too old", "run Redis 6.2 or later"))
    if info.eviction_policy != "noeviction":
        message = f"maxmemory-policy is {info.eviction_policy}: a full Redis would lose events"
        status: Literal["warning", "problem"] = "problem" if info.memory_limit else "warning"
        found.append(Finding("redis eviction", status, message, "CONFIG SET maxmemory-policy noeviction"))
    else:
        found.append(Finding("redis eviction", "ok", "maxmemory-policy is noeviction"))
    found.append(_memory(info))
    kept = "keeps its data over a restart" if info.appendonly else "loses its data when it restarts (appendonly no)"
    found.append(Finding("redis persistence", "ok", f"Redis {kept}"))
    took = f"a round trip takes {info.round_trip_s * 1000:.1f} ms"
    if info.round_trip_s > _SLOW_S:
        found.append(Finding("redis latency", "warning", took, "run engines and clients near Redis"))
    else:
        found.append(Finding("redis latency", "ok", took))
    found += clock_findings("clock of redis", "Redis", info.clock_offset_s, info.round_trip_s / 2)
    return found


def _memory(info: ServerInfo) -> Finding:
    used = f"{info.memory_used / 1e6:.0f} MB used"
    if not info.memory_limit:
        return Finding("redis memory", "ok", f"{used}, without a limit (maxmemory 0)")
    share = info.memory_used / info.memory_limit
    message = f"{used} of {info.memory_limit / 1e6:.0f} MB"
    advice = "raise maxmemory, or keep fewer finished traces: tracewire engine --retention, --retain-total-bytes"
    if share >= _FULL:
        return Finding("redis memory", "problem", f"{message}: Redis takes no more submissions", advice)
    return Finding(
        "redis memory", "warning" if share >= _FILLING else "ok", message, advice if share >= _FILLING else ""
    )


def clock_findings(check: str, whose: str, ahead_s: float, unsure_s: float) -> list[Finding]:
    """The finding about a clock that is `ahead_s` seconds ahead of this machine's, give or take `unsure_s`."""
    if abs(ahead_s) - unsure_s > _APART_S:
        where = "ahead of" if ahead_s > 0 else "behind"
        message = f"the clock of {whose} is {abs(ahead_s):.1f} s {where} this machine's"
        return [Finding(check, "warning", message, "run NTP on both machines: times in events would mislead")]
    message = f"the clock of {whose} agrees with this machine's to {abs(ahead_s) + unsure_s:.3f} s"
    return [Finding(check, "ok", message)]


def engine_findings(engines: Sequence[Engine], url: str, prefix: str, model: str | None = None) -> list[Finding]:
    """Findings about the engines: whether any is ready, their states and versions."""
    wanted = [one for one in engines if model in (None, one.model)]
    if not wanted:
        what = f"no engines of {model!r}" if model else "no engines"
        start = f"start one: {start_command(url, prefix, model)}"
        if engines:
            served = ", ".join(sorted({repr(one.model) for one in engines}))
            start = f"name a model that is served: {served}; or {start}"
        return [Finding("engines", "problem", f"{what} on {place(url, prefix)}", start)]
    found = []
    if not any(one.ready for one in wanted):
        found.append(Finding("engines", "problem", "no ready engine", "start one, or wait until one is ready"))
    return [*found, *(_engine(engine) for engine in wanted)]


def _engine(engine: Engine) -> Finding:
    ours, theirs = version("tracewire"), engine.versions.get("tracewire", "")
    check = f"engine {engine.name}"
    shown = f"{engine.model}, {engine.state}, {engine.running} of {engine.capacity} traces, tracewire {theirs or '?'}"
    if engine.schema and engine.schema.partition(".")[0] != str(SCHEMA[0]):
        advice = "install the same version of tracewire on the client and on the engine"
        return Finding(
            check, "problem", f"{shown}; it writes schema {engine.schema}, this client {SCHEMA[0]}.{SCHEMA[1]}", advice
        )
    if engine.malformed:
        advice = "find out which other program writes to these keys, or give Tracewire another --prefix"
        return Finding(check, "warning", f"{shown}; it skipped {engine.malformed} malformed items in Redis", advice)
    if engine.state == "holding":
        advice = "Redis takes events more slowly than this engine makes them: look at the load and memory of Redis"
        return Finding(check, "warning", shown, advice)
    if not engine.ready:
        return Finding(check, "warning", shown, "it takes no new traces: wait until it has left, or start another")
    if theirs and theirs != ours:
        return Finding(check, "warning", f"{shown}; this client is {ours}", "install the same version on both")
    if engine.running >= engine.capacity:
        return Finding(check, "warning", f"{shown}: it is full", "further traces wait; start another engine")
    return Finding(check, "ok", shown)


async def _dead_letters(client: Client) -> Finding:
    try:
        count = len(await client.dead_letters.list(limit=100))
    except PermissionDeniedError as error:
        # As for the role `controller`, which otherwise may do all that this command does.
        advice = "run this command as another user to see them (docs/redis.md)"
        return Finding("dead letters", "warning", str(error), advice)
    if not count:
        return Finding("dead letters", "ok", "none")
    many = "100 or more" if count == 100 else str(count)
    return Finding("dead letters", "warning", many, "tracewire dead list shows them; resubmit or drop them")


def model_findings(info: ModelInfo, waiting: int) -> list[Finding]:
    """Findings about a model: whether its engines agree, and whether submissions wait."""
    check = f"model {info.name}"
    found = []
    if info.differs:
        advice = "engines of one model are to be alike: blocks must run on each of them"
        found.append(Finding(check, "warning", f"its engines differ in: {', '.join(info.differs)}", advice))
    if waiting:
        more = "no engine takes them" if info.running < info.capacity else "its engines are full"
        found.append(
            Finding(check, "warning", f"{counted(waiting, 'submission')} waiting: {more}", "start another engine")
        )
    return found or [Finding(check, "ok", f"{counted(len(info.engines), 'engine')}, nothing waits")]


async def _trace_findings(client: Client, model: str) -> list[Finding]:
    """Run a trace with a probe, and compare its result and the engine's clock."""
    check = f"test trace on {model}"
    began, sent = time.monotonic(), time.time()
    first_s = 0.0
    probe = Probe(name="doctor", at="residual(0)", reduce="norm")
    options: dict[str, Any] = {"max_tokens": 4, "temperature": 0.0, "ignore_eos": True, "deadline": _DEADLINE_S}
    try:
        async with client.trace(model, "The test of", interventions=[probe], by="doctor", **options) as trace:
            accepted = await trace.accepted()
            received = time.time()
            async for _ in trace.outputs():
                first_s = first_s or time.monotonic() - began
            result = await trace.result()
    except TracewireError as error:
        return [Finding(check, "problem", str(error), "docs/errors.md says what each error means")]
    took = f"first token after {first_s * 1000:.0f} ms, {len(result.token_ids)} after {time.monotonic() - began:.2f} s"
    if len(result.saves.get("doctor", ())) != len(result.token_ids):
        message = f"{took}; the probe did not save a value for each token"
        return [Finding(check, "problem", message, "report it, with the engine's log")]
    found = [Finding(check, "ok", f"{took}, saves verified")]
    return [*found, *_engine_clock(accepted, sent, received)]


def _engine_clock(accepted: Accepted, sent: float, received: float) -> list[Finding]:
    if not accepted.accepted_at:
        return []
    # By this machine's clock the engine accepted the trace between these two times.
    middle, half = (sent + received) / 2, (received - sent) / 2
    return clock_findings(f"clock of {accepted.engine}", accepted.engine, accepted.accepted_at - middle, half)
