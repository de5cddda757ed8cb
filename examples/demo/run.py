"""The demo: one trace of 64 tokens, steered half-way, watched by three processes that must agree.

Starts an embedded Redis and a demo engine as processes of their own. This process is the service: it submits the
trace and shows its stream. A second process joins at token 20, replays and follows; a third follows one name only. At
the end each of the three must have received every token, and the digests of what it folded must equal those of what
nnsight's own collect returned on the engine. Otherwise the demo says who lacks what, and exits with 1.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import numpy as np
from anyio.abc import Process
from anyio.streams.text import TextReceiveStream

import tracewire
from tracewire import digest

sys.path.insert(0, str(Path(__file__).resolve().parent))
from blocks import steer

HERE = Path(__file__).resolve().parent
MODEL = HERE.parent / "demo_model"
TOKENS = 64
STEER_AFTER = 24
JOIN_AT = 20
PROMPT = "This module provides"
#: How far to steer towards code, in multiples of the distance between the means of code and prose.
MULTIPLE = 2.2
#: What each consumer follows, by its name.
FOLLOWED = {
    "service": {"probability", "projection"},
    "late": {"probability", "projection"},
    "narrow": {"projection"},
}
#: How long a consumer may take to report after the trace's end, in seconds.
PATIENCE_S = 60


def say(text: str = "", *, end: str = "\n") -> None:
    """Show something; everything but the JSON line goes to standard error's terminal or the log."""
    print(text, end=end, file=sys.stderr, flush=True)


class Lines:
    """The lines that a process prints."""

    def __init__(self, process: Process) -> None:
        assert process.stdout is not None
        self._chunks = TextReceiveStream(process.stdout)
        self._rest = ""

    async def next(self) -> str:
        """The next line, without its end; an empty text at the end of the output."""
        while "\n" not in self._rest:
            try:
                self._rest += await self._chunks.receive()
            except anyio.EndOfStream:
                break
        line, _, self._rest = self._rest.partition("\n")
        return line


@asynccontextmanager
async def started(*command: str, log: Path | None = None) -> AsyncIterator[Process]:
    """A child process, ended with SIGTERM on the way out."""
    with open(log or os.devnull, "wb") as errors:  # noqa: ASYNC230
        process = await anyio.open_process(command, stdin=subprocess.PIPE, stderr=errors if log else None)
        try:
            yield process
        finally:
            with anyio.CancelScope(shield=True):
                if process.returncode is None:
                    process.send_signal(signal.SIGTERM)
                    with anyio.move_on_after(30) as waiting:
                        await process.wait()
                    if waiting.cancelled_caught:
                        process.kill()
                        await process.wait()
                await process.aclose()


async def engine_ready(lines: Lines, process: Process, log: Path) -> None:
    """Wait for the engine, showing that time passes."""
    began = time.monotonic()
    ready = ""

    async def wait(scope: anyio.CancelScope) -> None:
        nonlocal ready
        while not ready.startswith("ready"):
            ready = await lines.next()
            if not ready and process.returncode is None:
                await process.wait()
            if not ready:
                break
        scope.cancel()

    async with anyio.create_task_group() as group:
        group.start_soon(wait, group.cancel_scope)
        while True:
            say(f"\r  engine: starting vLLM, {time.monotonic() - began:3.0f} s (20 to 60 s on two cores) ", end="")
            # A log need not see time pass.
            await anyio.sleep(1 if sys.stderr.isatty() else math.inf)
    if not ready:
        say()
        tail = await anyio.Path(log).read_text()
        raise SystemExit(f"the engine did not start; the end of its log:\n{tail[-3000:]}")
    say(f"\r  engine: ready after {time.monotonic() - began:.0f} s{' ' * 40}")


def show(first: int, last: int, text: str, projection: float, probability: float, scale: float) -> None:
    """One line an output, usually of one token: its text; the last token's probability, and its projection as a bar."""
    width = min(24, int(abs(projection) / scale * 24))
    bar = (" " * (24 - width) + "◀" * width + "│" + " " * 24) if projection < 0 else (" " * 24 + "│" + "▶" * width)
    mark = "steered" if last >= STEER_AFTER else ""
    where = str(last) if first == last else f"{first}-{last}"
    say(f"{where:>5} {text!r:16.16} p={probability:4.2f} prose {bar:<49} code  {mark}")


async def demo(folder: Path) -> dict[str, Any]:
    """Run the demo; returns its figures."""
    python = sys.executable
    direction = np.load(MODEL / "direction.npy")
    facts = json.loads((MODEL / "direction.json").read_text())
    say("Tracewire demo: one trace, three consumers")
    async with started(python, "-m", "tracewire.cli", "redis", log=folder / "redis.log") as redis:
        url = await Lines(redis).next()
        say(f"  redis:  {url}")
        command = (python, "-m", "tracewire.cli", "engine", "demo", "--url", url, "--check-collect")
        async with started(*command, log=folder / "engine.log") as engine:
            await engine_ready(Lines(engine), engine, folder / "engine.log")
            watcher = (python, str(HERE / "watch.py"), "--url", url)
            async with (
                started(*watcher, "--name", "late", log=folder / "late.log") as late,
                started(*watcher, "--name", "narrow", "--only", "projection", log=folder / "narrow.log") as narrow,
            ):
                return await follow(url, direction, facts, late, narrow)


def problems(consumers: list[dict[str, Any]], token_ids: list[int], collected: dict[str, str]) -> list[str]:
    """What is wrong with what the consumers report, by consumer; nothing if each received what it should have.

    `token_ids` are those of the trace's verified result; `collected` has the digests of what nnsight collected.
    """
    found = []
    if len(token_ids) != TOKENS:
        found.append(f"the trace has {len(token_ids)} tokens, not {TOKENS}")
    if collected.keys() != FOLLOWED["service"]:
        found.append(f"nnsight collected {sorted(collected)}, not {sorted(FOLLOWED['service'])}")
    reports = {consumer.get("name"): consumer for consumer in consumers}
    for name, followed in FOLLOWED.items():
        report = reports.get(name)
        if report is None:
            found.append(f"{name}: no report")
            continue
        if not report["outputs"]:
            found.append(f"{name}: no output")
        if report["tokens"] != TOKENS:
            found.append(f"{name}: {report['tokens']} of {TOKENS} tokens")
        elif report["token_digest"] != digest(token_ids).hex():
            found.append(f"{name}: other tokens than the trace's")
        if report["digests"].keys() != followed:
            found.append(f"{name}: folded {sorted(report['digests'])}, not {sorted(followed)}")
        found += [
            f"{name}: another {save} than nnsight collected"
            for save, value in report["digests"].items()
            if value != collected.get(save)
        ]
    return found


async def reported(lines: Lines) -> dict[str, Any]:
    """What a consumer's process reports; nothing if it ended without, or takes too long."""
    with anyio.move_on_after(PATIENCE_S):
        if line := await lines.next():
            report: dict[str, Any] = json.loads(line)
            return report
    return {}


async def follow(url: str, direction: Any, facts: dict[str, Any], late: Process, narrow: Process) -> dict[str, Any]:
    """Submit the trace, follow it, let the others join, and compare."""
    late_lines, narrow_lines = Lines(late), Lines(narrow)
    await late_lines.next()
    await narrow_lines.next()
    assert late.stdin is not None
    assert narrow.stdin is not None
    block = steer(direction=direction, layer=facts["layer"], after=STEER_AFTER, strength=MULTIPLE * facts["distance"])
    async with tracewire.connect(url) as client:
        model = await client.models.get("demo", timeout=30)
        trace = client.trace(model, PROMPT, block, max_tokens=TOKENS, temperature=0.8, seed=0, ignore_eos=True)
        async with trace:
            say(f"  trace:  {trace.id}, {TOKENS} tokens from {PROMPT!r}; steered to code from token {STEER_AFTER}\n")
            await narrow.stdin.send(f"{trace.id}\n".encode())
            outputs = 0
            token_ids: list[int] = []
            began = 0.0
            joined = False
            async for output in trace:
                if not isinstance(output, tracewire.Output):
                    continue
                began = began or time.monotonic()
                outputs += 1
                token_ids += output.token_ids
                if len(token_ids) >= JOIN_AT and not joined:
                    joined = True
                    await late.stdin.send(f"{trace.id}\n".encode())
                saves = trace.state().saves
                last = len(token_ids) - 1
                show(output.index, last, output.text, saves["projection"][-1], saves["probability"][-1], facts["scale"])
            seconds = time.monotonic() - began
            result = await trace.result()
    digests = {name: digest(value).hex() for name, value in sorted(result.saves.items())}
    service = {
        "outputs": outputs,
        "tokens": len(token_ids),
        "token_digest": digest(token_ids).hex(),
        "digests": digests,
    }
    reports = [{"name": "service", **service}, await reported(late_lines), await reported(narrow_lines)]
    consumers = [report for report in reports if report]
    collected = {entry.name: entry.digest.hex() for entry in sorted(result.manifest, key=lambda entry: entry.name)}
    values = sum(len(value) for value in result.saves.values())
    wrong = problems(consumers, result.token_ids, collected)
    if values != TOKENS * len(FOLLOWED["service"]):
        wrong.append(f"the trace saved {values} values, not {TOKENS * len(FOLLOWED['service'])}")
    for consumer in consumers:
        consumer["digest"] = digest(consumer["digests"]).hex()
    return {
        "consumers": consumers,
        "nnsight_collect": collected,
        "agree": not wrong,
        "problems": wrong,
        "tokens": len(result.token_ids),
        "values": values,
        "steered_from": STEER_AFTER,
        "tokens_per_second": round(len(token_ids) / seconds, 1) if seconds else None,
        "values_per_second": round(values / seconds, 1) if seconds else None,
        "text": result.text,
    }


def main() -> int:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--json", action="store_true", help="print the figures as one JSON object, as the last line")
    parser.add_argument("--logs", type=Path, default=None, help="folder for the processes' logs")
    options = parser.parse_args()
    import tempfile

    with tempfile.TemporaryDirectory(prefix="tracewire-demo-") as temporary:
        folder = options.logs or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        figures = anyio.run(demo, folder)
    say(f"\n  {PROMPT}{figures['text']}\n")
    for consumer in figures["consumers"]:
        said = ", ".join(f"{name} {value[:12]}" for name, value in consumer["digests"].items())
        say(f"  {consumer['name']:8} {consumer['tokens']} tokens in {consumer['outputs']:2} outputs   {said}")
    said = ", ".join(f"{name} {value[:12]}" for name, value in figures["nnsight_collect"].items())
    say(f"  {'nnsight':8} collect {' ' * 19}{said}")
    for problem in figures["problems"]:
        say(f"  wrong: {problem}")
    say(
        f"\n  {figures['tokens']} tokens ({figures['tokens_per_second']} a second), {figures['values']} values "
        f"({figures['values_per_second']} a second); all agree: {figures['agree']}"
    )
    if options.json:
        print(json.dumps(figures), flush=True)
    return 0 if figures["agree"] else 1


if __name__ == "__main__":
    sys.exit(main())
