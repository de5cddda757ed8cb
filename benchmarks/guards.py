"""How soon a guard pauses a trace: from the token to the pause, over many running traces.

    python -m benchmarks.guards [--traces 200] [--tokens 60] [--step-ms 100]

A Redis, a scripted engine, a guard (`tracewire guard`) and a client have a process each. The guard reads a save of each
trace, and pauses and resumes the trace at about one token in 20. `asked_ms` is from the end of the step that sampled
the token to Redis's acceptance of the pause, `later_ms` likewise in the last two thirds of each trace, when the
beginning of all traces at once is over, and `paused_ms` to the engine's `Paused` event; the rest of the machine's
load is theirs, too. `missed` counts alarms that the guard's audit lacks.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import anyio

import tracewire
from benchmarks.processes import at_least, show, start
from benchmarks.quantiles import quantiles
from tests.support.guards import alarms_of, audited, ended, guard_process, rules, write_rules
from tests.support.scripted_engine import acts
from tests.support.until import until
from tracewire import Output, Paused
from tracewire_bus.transport.embedded import EmbeddedServer


async def _run(client: tracewire.Client, name: str, tokens: int, paused: list[float]) -> None:
    """One trace, and the seconds from its alarms' tokens to its pauses."""
    alarms, times = alarms_of(name, tokens), {}
    async with client.trace("tiny", name, acts, max_tokens=tokens, trace_id=name) as trace:
        async for item in trace:
            if isinstance(item, Output):
                times.update(dict.fromkeys(range(item.index, item.index + len(item.token_ids)), item.time))
            elif isinstance(item, Paused):
                before = [times[token] for token in alarms if token in times]
                paused += [item.time - before[-1]] if before else []


async def measure(options: argparse.Namespace) -> dict[str, Any]:
    """All traces at once."""
    names = [f"t{number}" for number in range(options.traces)]
    paused: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        path, audit = Path(folder) / "rules.toml", Path(folder) / "audit.jsonl"
        write_rules(path, rules(audit=str(audit), since="start"))
        async with EmbeddedServer.start() as server, tracewire.connect(server.url) as client:
            where = ("--url", server.url, "--capacity", str(options.traces), "--rate", str(1000 / options.step_ms))
            engine = start("tests.support.scripted_engine", *where)
            guard = guard_process(server.url, "tw", path, "g")
            try:
                await client.models.get("tiny", timeout=60)
                await until(lambda: client.watch_groups.list())
                async with anyio.create_task_group() as group:
                    for name in names:
                        group.start_soon(_run, client, name, options.tokens, paused)
                expected = {(name, token) for name in names for token in alarms_of(name, options.tokens)}
                with anyio.move_on_after(60):
                    await until(lambda: len(audited(audit)) >= len(expected))
            finally:
                ended(guard)
                engine.terminate()
                engine.communicate()
            lines = audited(audit)
    found = {(line["alarm"]["trace_id"], line["alarm"]["token"]) for line in lines}
    asked = [(line["alarm"]["token"], line["pause_seconds"]) for line in lines if line["pause_seconds"] is not None]
    return {
        "asked_ms": quantiles([seconds for _, seconds in asked]),
        "later_ms": quantiles([seconds for token, seconds in asked if token >= options.tokens // 3]),
        "paused_ms": quantiles(paused),
        "alarms": len(expected),
        "missed": len(expected - found),
        "late": sum(line["outcome"] == "late" for line in lines),
        "traces": options.traces,
        "tokens": options.tokens,
        "step_ms": options.step_ms,
    }


def main() -> None:
    """Measure, and print what was found."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--traces", type=at_least(1), default=200, help="traces at a time")
    parser.add_argument("--tokens", type=at_least(1), default=60, help="tokens of a trace")
    parser.add_argument("--step-ms", type=at_least(1), default=100, help="milliseconds between two tokens of a trace")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    show(anyio.run(measure, options), as_json=options.json)


if __name__ == "__main__":
    main()
