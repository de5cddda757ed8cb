"""Runs generated blocks on a real engine, in batches of eight, a tenth of them hostile.

    python -m tests.e2e.isolation.fuzz [--mode host|inline] [--blocks N] [--seed N] [--json]

A batch with a hostile block is run again with a plain trace in its place. What the other traces come to must be equal
in both runs: status, error, tokens and every bit of the saves. At the end the engine must be the same process, hold no
request, and have all its KV blocks free. The last line of `--json` is one object: `blocks`, `hostile`, `harmed` (the
seeds whose traces came to something else), `restarted` (how often the engine's process was lost) and `free` (whether
nothing was left at the end). Exits with 1 unless all is as it should be.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import anyio

from tracewire_bus.wire.messages import Invoke, Submission

from .batch import Seen, run_traces, source_block
from .generated import Generated, generate
from .kinds import Kind
from .table import KINDS, mode_options
from .trial import Trial, trial

__all__ = ["eligible", "run_fuzz"]

_BATCH, _TOKENS, _PATIENCE_S = 8, 16, 60.0

#: How often a batch is tried in which a block was late: a machine that is too busy makes it so, now and then.
_TRIES = 3

#: How long a step waits for blocks of hosts, in milliseconds: pauses are not measured here, and a machine may be busy.
_STEP_MS = 2000

#: Kinds that damage files or read them, which the runs do not prepare, and those that take long.
_LEFT_OUT = frozenset({"integers-250000-a-step", "integers-1000000-a-step", "saves-10000-names", "message-of-200mb"})

_FREE = "vLLM holds no request, and all KV blocks are free"


def eligible(mode: str) -> list[Kind]:
    """The hostile kinds that are drawn: in inline mode only those that it contains."""
    return [
        kind
        for kind in KINDS.values()
        if kind.name not in _LEFT_OUT and "{folder}" not in kind.source and (mode == "host" or kind.inline)
    ]


def _submission(label: str, at: int, block: Generated | None) -> Submission:
    sampling: dict[str, Any] = {"max_tokens": _TOKENS, "ignore_eos": True, "temperature": 0.0}
    if at % 3 == 1:
        sampling |= {"temperature": 0.9, "seed": at}
    prompt = ("def add(a, b):\n", "import os\n", "for name in ")[at % 3] * (1 + at % 4)
    return Submission(
        trace=f"{label}-{at}",
        model="demo",
        invokes=[Invoke(prompt=prompt, sampling=sampling)],
        block=None if block is None else source_block(block.source, f"seed{block.seed}"),
        detach=True,
        max_attempts=1,
    )


def _came_to(seen: Seen) -> tuple[Any, ...]:
    error = seen.error
    return (*seen.outcome(), None if error is None else (error.type, error.line))


def _end(seen: Seen) -> str:
    error = seen.error
    return seen.status + ("" if error is None else f", {error.type} at line {error.line}: {error.message}")


async def run_fuzz(running: Trial, mode: str, blocks: int, seed: int) -> dict[str, Any]:
    """Run `blocks` generated blocks. Returns what the command prints."""
    kinds, harmed, hostile, restarted = eligible(mode), [], 0, 0
    for first in range(seed, seed + blocks, _BATCH):
        drawn = [generate(number, kinds) for number in range(first, min(first + _BATCH, seed + blocks))]
        hostile += sum(bool(one.kind) for one in drawn)
        for attempt in range(_TRIES):
            before = running.engine.model_processes()
            seen, ended = await _run(running, f"fuzz-{first}-{attempt}", dict(enumerate(drawn)))
            if running.engine.model_processes() != before or not ended:
                print(f"batch {first}: {'it did not end' if not ended else 'the engine has ended'}", flush=True)
                restarted += 1
                harmed.append(first)
                await running.again()
                break
            found, late = await _differing(running, f"control-{first}-{attempt}", drawn, seen)
            if not late:
                harmed += found
                break
        else:
            harmed += found
    return {"blocks": blocks, "seed": seed, "hostile": hostile, "harmed": harmed, "restarted": restarted}


async def _differing(
    running: Trial, label: str, drawn: list[Generated], seen: dict[int, Seen]
) -> tuple[list[int], bool]:
    """The seeds of blocks that came to something else than without the hostile ones, and whether one was only late."""
    bad = {at for at, one in enumerate(drawn) if one.kind}
    if not bad:
        odd = [drawn[at].seed for at, one in seen.items() if one.broken or not one.status]
        return odd, any(map(_is_late, seen.values()))
    control, _ = await _run(running, label, {at: None if at in bad else one for at, one in enumerate(drawn)})
    found, late = [], False
    for at in seen.keys() - bad:
        if _came_to(seen[at]) != _came_to(control[at]):
            found.append(drawn[at].seed)
            late = late or _is_late(seen[at]) or _is_late(control[at])
            names = [drawn[other].kind for other in sorted(bad)]
            print(f"seed {drawn[at].seed} beside {names}: {_end(seen[at])}", flush=True)
            print(f"  without them: {_end(control[at])}", flush=True)
    return found, late


def _is_late(seen: Seen) -> bool:
    """Whether a block was ended for the time that it, or one that shares its host, took. No drawn block takes long."""
    error = seen.error
    return error is not None and (error.type == "BlockTimeout" or " ran for " in error.message)


async def _run(running: Trial, label: str, blocks: dict[int, Generated | None]) -> tuple[dict[int, Seen], bool]:
    submissions = {str(at): _submission(label, at, block) for at, block in blocks.items()}

    async def on_late() -> None:
        running.engine.kill_model()

    seen, ended = await run_traces(running.bus, submissions, _PATIENCE_S, on_late)
    return {int(at): one for at, one in seen.items()}, ended


async def _main(options: argparse.Namespace, mode: tuple[str, ...], folder: Path) -> dict[str, Any]:
    async with trial(folder, *mode) as running:
        found = await run_fuzz(running, options.mode, options.blocks, options.seed)
        return found | {"free": _FREE in running.engine.stop()}


def main(arguments: list[str] | None = None) -> int:
    """Run the command. Returns its exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.e2e.isolation.fuzz", description=__doc__)
    parser.add_argument("--mode", choices=("host", "inline"), default="host")
    parser.add_argument("--blocks", type=int, default=2000, metavar="N")
    parser.add_argument("--seed", type=int, default=1, metavar="N", help="the first block's; later ones count up")
    parser.add_argument("--json", action="store_true", help="end with one JSON object")
    options = parser.parse_args(arguments)
    try:
        mode = mode_options(options.mode, _STEP_MS)
    except LookupError as error:
        print(f"fuzz: {error}", file=sys.stderr)
        return 2
    print(f"seeds {options.seed} to {options.seed + options.blocks - 1}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        found = anyio.run(_main, options, mode, Path(folder))
    if options.json:
        print(json.dumps(found))
    else:
        print(", ".join(f"{name}: {value}" for name, value in found.items()))
    return 1 if found["harmed"] or found["restarted"] or not found["free"] else 0


if __name__ == "__main__":
    sys.exit(main())
