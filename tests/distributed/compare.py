"""Every scenario on engines of several layouts, one engine after the other, beside the first: for hosts with GPUs.

    python -m tests.distributed.compare --layout one --layout tp2 --layout pp2 --layout tp2-ray -- --enforce-eager

`tapped` and `second-tapped` replay CUDA graphs with taps; an engine without taps is eager. With `--at-once` the engines
run beside each other, on a host with GPUs and cores enough (`-- --gpu-memory-utilization 0.1 --kv-cache-memory-bytes
1073741824`). What stands behind `--` is given to each engine. The last line says for each layout which scenarios came
out as on the first, values to `--tolerance` of the largest, and where the others differ.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread

from tests.support.parallel.layouts import served
from tests.support.parallel.scenarios import SCENARIOS, same

#: All locations that the scenarios' blocks ask for, but those of `UNTAPPED`.
TAPPED = [
    option
    for place in (
        "model.embed_tokens.input",
        "model.embed_tokens.output",
        "model.layers.*.self_attn.qkv_proj.output",
        "model.layers.*.self_attn.attn.input",
        "model.layers.*.self_attn.o_proj.input",
        "model.layers.*.mlp.gate_up_proj.output",
        "model.layers.*.mlp.down_proj.input",
        "model.layers.*.mlp.output",
        "model.layers.*.output",
        "model.norm.output",
    )
    for option in ("--tap", place)
]

#: The scenario that CUDA graphs cannot serve: a module is not skipped at a tap.
UNTAPPED = "skipped_layers"

LAYOUTS: dict[str, list[str]] = {
    "one": [],
    "tp2": ["--tensor-parallel-size", "2"],
    "pp2": ["--pipeline-parallel-size", "2"],
    "tp2-pp2": ["--tensor-parallel-size", "2", "--pipeline-parallel-size", "2"],
    "tp2-ray": ["--tensor-parallel-size", "2", "--distributed-executor-backend", "ray"],
    "second": ["--model-runner", "second"],
    "second-tp2": ["--model-runner", "second", "--tensor-parallel-size", "2"],
    "second-pp2": ["--model-runner", "second", "--pipeline-parallel-size", "2"],
    "tapped": TAPPED,
    "second-tapped": ["--model-runner", "second", *TAPPED],
    "second-tapped-tp2": ["--model-runner", "second", "--tensor-parallel-size", "2", *TAPPED],
    "pp2-ray": ["--pipeline-parallel-size", "2", "--distributed-executor-backend", "ray"],
}


async def run(layout: str, options: list[str], names: list[str], folder: Path) -> dict[str, Any]:
    """What each scenario comes to on an engine of this layout; one that raises comes to its error."""
    found: dict[str, Any] = {}
    await anyio.Path(folder).mkdir()
    began = time.monotonic()
    async with served(folder, *LAYOUTS[layout], *options) as engine, engine.client() as client:
        model = await client.models.get("demo", timeout=60)
        print(f"{layout}: ready after {time.monotonic() - began:.0f} s", file=sys.stderr)
        for name in names:
            try:
                with anyio.fail_after(120):
                    found[name] = await SCENARIOS[name](client, model)
            except Exception as error:
                found[name] = f"{type(error).__name__}: {error}"
    return found


async def compare(options: argparse.Namespace) -> dict[str, Any]:
    """By layout, how many scenarios came out as on the first layout, and where the others differ."""
    tapped = any("tapped" in layout for layout in options.layout)
    names = options.scenario or [name for name in SCENARIOS if not (tapped and name == UNTAPPED)]
    found: dict[str, dict[str, Any]] = {}
    figures: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        limit = anyio.CapacityLimiter(len(options.layout) if options.at_once else 1)

        async def one(layout: str) -> None:
            # Waiting for an engine blocks its thread.
            work = (run, layout, options.engine, names, Path(folder) / layout)
            try:
                found[layout] = await anyio.to_thread.run_sync(anyio.run, *work, limiter=limit)
            except Exception as error:
                found[layout] = dict.fromkeys(names, f"{type(error).__name__}: {error}")

        async with anyio.create_task_group() as group:
            for layout in options.layout:
                group.start_soon(one, layout)
    first = found[options.layout[0]]
    for layout in options.layout:
        failed = {name: value for name, value in found[layout].items() if isinstance(value, str)}
        differing = {
            name: lines[:3]
            for name in names
            if name not in failed and (lines := same(first[name], found[layout][name], tolerance=options.tolerance))
        }
        equal = len(names) - len(failed) - len(differing)
        figures[layout] = {"scenarios": len(names), "equal": equal, "differing": differing, "failed": failed}
        print(f"{layout}: {figures[layout]}", file=sys.stderr)
    return figures


def main() -> int:
    """Run from the command line; 1 if any scenario came out otherwise."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--layout", action="append", choices=sorted(LAYOUTS), required=True)
    parser.add_argument("--scenario", action="append", choices=sorted(SCENARIOS), default=[])
    parser.add_argument("--tolerance", type=float, default=0.02)
    parser.add_argument("--at-once", action="store_true", help="all layouts at the same time")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    parser.add_argument("engine", nargs="*", help="options of every engine")
    options = parser.parse_args()
    figures = anyio.run(compare, options)
    if options.json:
        print(json.dumps(figures))
    return int(any(one["equal"] != one["scenarios"] for one in figures.values()))


if __name__ == "__main__":
    sys.exit(main())
