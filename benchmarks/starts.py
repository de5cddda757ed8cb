"""How long people wait at the start: for the command line, and from `tracewire up demo` to the first token.

    python -m benchmarks.starts [--rounds 5] [--no-up] [--json]

Each command is started as a process, in turns with its baseline: `python -c pass` for the command line, and for
`tracewire up demo` a process in which plain vLLM loads the same model and makes one token. `cpu_ms` is processor time,
which other work on the machine does not change much.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import signal
import statistics
import subprocess
import sys
import urllib.request
from time import perf_counter
from typing import Any

from .processes import ROOT, at_least

_TRACEWIRE = (sys.executable, "-m", "tracewire.cli")
COMMANDS = {
    "python -c pass": (sys.executable, "-c", "pass"),
    "tracewire --version": (*_TRACEWIRE, "--version"),
    "tracewire run --help": (*_TRACEWIRE, "run", "--help"),
    "tracewire engine --help": (*_TRACEWIRE, "engine", "--help"),
}
_PLAIN = f"""
from vllm import LLM, SamplingParams

if __name__ == "__main__":
    model = LLM({str(ROOT / "examples" / "demo_model" / "model")!r}, enforce_eager=True)
    assert model.generate("def", SamplingParams(max_tokens=1))[0].outputs[0].token_ids
    print("token", flush=True)
"""


#: As users have it: modules are compiled once.
_ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}


def _spent() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def took(*command: str) -> tuple[float, float]:
    """Seconds from the start of a command to its end, and its seconds of processor time."""
    begun, spent = perf_counter(), _spent()
    subprocess.run(command, check=True, cwd=ROOT, env=_ENVIRONMENT, stdout=subprocess.DEVNULL)
    return perf_counter() - begun, _spent() - spent


def commands(rounds: int) -> dict[str, Any]:
    """The medians of each command, after a first start that may compile modules; `ratio` is to the baseline."""
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in COMMANDS}
    for number in range(rounds + 1):
        for name, command in COMMANDS.items():
            found = took(*command)
            if number:
                seconds[name].append(found)
    medians = {name: [statistics.median(one) for one in zip(*each, strict=True)] for name, each in seconds.items()}
    baseline = medians["python -c pass"][0]
    return {
        name: {"ms": round(1000 * wall), "cpu_ms": round(1000 * cpu), "ratio": round(wall / baseline, 2)}
        for name, (wall, cpu) in medians.items()
    }


def up() -> dict[str, float]:
    """Seconds from the start of `tracewire up demo` to its ready line, and to the first token."""
    begun = perf_counter()
    process = subprocess.Popen([*_TRACEWIRE, "up", "demo", "--json"], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert process.stdout is not None
    try:
        told = json.loads(process.stdout.readline())
        ready = perf_counter() - begun
        body = {"model": "demo", "prompt": "def", "max_tokens": 8, "stream": True}
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{told['gateway']}/v1/completions", json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request, timeout=60) as answer:
            answer.readline()
            token = perf_counter() - begun
        return {"ready_s": round(ready, 2), "first_token_s": round(token, 2)}
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(60)


def plain() -> float:
    """Seconds from the start of a process to plain vLLM's first token."""
    begun = perf_counter()
    process = subprocess.Popen([sys.executable, "-c", _PLAIN], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert process.stdout is not None
    if not any(line.strip() == "token" for line in process.stdout):
        raise RuntimeError("plain vLLM made no token")
    found = perf_counter() - begun
    process.wait(60)
    return found


def main() -> int:
    """Measure, and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=at_least(1), default=5, help="how often each command is started")
    parser.add_argument("--no-up", action="store_true", help="start no engine")
    parser.add_argument("--json", action="store_true", help="end with one JSON object")
    options = parser.parse_args()
    found: dict[str, Any] = {"commands": commands(options.rounds)}
    if not options.no_up:
        baseline = plain()
        shown = up()
        ratio = round(shown["first_token_s"] / baseline, 2)
        found["up"] = {**shown, "plain_vllm_s": round(baseline, 2), "ratio": ratio}
    if options.json:
        print(json.dumps(found))
        return 0
    for name, one in found["commands"].items():
        print(f"{name:28} {one['ms']:6} ms  {one['cpu_ms']:6} ms of a processor  {one['ratio']:.2f}")
    for name, value in found.get("up", {}).items():
        print(f"up demo: {name:18} {value}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
