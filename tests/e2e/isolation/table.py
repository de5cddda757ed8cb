"""Tries every kind of hostile or careless block on a real engine, each beside seven innocent traces.

    python -m tests.e2e.isolation.table [--mode host|inline] [--json] [--only NAME,...] [--out FILE]

Prints a line for each kind. With `--json`, the last line is one JSON object: how many kinds were tried, and the names
of those that harmed an innocent trace or a later one, that cost the engine's process, and that stalled innocent traces;
besides these, `hung`, `read` (the offender saved what is not its own), `left` (something stays in the engine) and
`unmet` (the offender did not end as it should). If a pause exceeds the control's, or an innocent block took too long,
the kind is tried five times more, in turns with control runs: a machine that is too busy makes both late. Exits with 1
if any kind is harmed, restarted or stalled.
`--out FILE` keeps each verdict as it comes, and a later call with the same file goes on behind the last one.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import anyio

from .engine import offers_modes
from .host_kinds import HOST_KINDS
from .kinds import Kind, unique
from .process_kinds import PROCESS_KINDS
from .save_kinds import SAVE_KINDS
from .state_kinds import STATE_KINDS
from .time_kinds import TIME_KINDS
from .trial import Verdict, trial
from .value_kinds import VALUE_KINDS

__all__ = ["KINDS", "mode_options", "summary"]

#: How long a step waits for the blocks of hosts, in milliseconds: less than what counts as a stall.
BLOCK_STEP_MS = 200

#: How often a kind is tried whose error should name a line, but its host was ended first.
_TRIES = 3

#: All kinds by name, in the order in which they are tried.
KINDS: dict[str, Kind] = unique([*VALUE_KINDS, *TIME_KINDS, *SAVE_KINDS, *STATE_KINDS, *PROCESS_KINDS, *HOST_KINDS])


def mode_options(mode: str, step_ms: int = BLOCK_STEP_MS) -> tuple[str, ...]:
    """The options of an engine whose blocks run in this mode, and whose steps wait so long for blocks of hosts.

    Raises:
        LookupError: this engine has no such mode.
    """
    if offers_modes():
        return ("--blocks", mode, *(("--block-step-ms", str(step_ms)) if mode == "host" else ()))
    if mode != "inline":
        raise LookupError(f"this engine has no option --blocks, so its blocks cannot run in mode {mode!r}")
    return ()


def summary(verdicts: list[dict[str, Any]]) -> dict[str, Any]:
    """The verdicts as lists of names."""

    def where(key: str) -> list[str]:
        return [one["name"] for one in verdicts if one[key]]

    stalled = [one["name"] for one in verdicts if one["outcome"] == "stalled"]
    found = {"kinds": len(verdicts), "harmed": where("harmed"), "restarted": where("restarted"), "stalled": stalled}
    return found | {key: where(key) for key in ("hung", "left", "unmet")} | {"read": where("stole")}


def _kept(out: Path | None) -> list[dict[str, Any]]:
    if out is None or not out.exists():
        return []
    return [json.loads(line) for line in out.read_text().splitlines()]


async def _run(kinds: list[Kind], options: tuple[str, ...], out: Path | None, folder: Path) -> list[dict[str, Any]]:
    verdicts = _kept(out)
    known = {one["name"] for one in verdicts}
    async with trial(folder, *options) as running:
        for kind in kinds:
            if kind.name in known:
                continue
            verdict: Verdict = await running.judge(kind)
            for _ in range(_TRIES - 1):
                # A machine that is too busy does not let the host name the line before it is ended.
                if verdict.outcome == "unmet" and verdict.error == "BlockTimeout":
                    verdict = await running.judge(kind)
            verdicts.append(verdict.as_dict())
            print(_line(verdicts[-1]), flush=True)
            if out is not None:
                with out.open("a") as file:
                    file.write(json.dumps(verdicts[-1]) + "\n")
    return verdicts


def _line(one: dict[str, Any]) -> str:
    at = "" if one["line"] is None else f" at line {one['line']}"
    end = f"{one['error']}{at}" if one["error"] else one["status"] or "no end"
    said = "; ".join(filter(None, [", ".join(one["harmed"]), one["unmet"], "left: " + ", ".join(one["left"])]))
    said = said.removesuffix("left: ").removesuffix("; ")
    return f"{one['outcome']:10} {one['name']:32} {one['pause_s']:7.2f} s  {end}" + (f"  ({said})" if said else "")


def main(arguments: list[str] | None = None) -> int:
    """Run the command. Returns its exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.e2e.isolation.table", description=__doc__)
    parser.add_argument("--mode", choices=("host", "inline"), default="host")
    parser.add_argument("--json", action="store_true", help="end with one JSON object")
    parser.add_argument("--only", type=lambda text: text.split(","), default=[], metavar="NAME,...")
    parser.add_argument("--out", type=Path, metavar="FILE", help="keep verdicts in this file, and go on behind them")
    parser.add_argument("--log", type=Path, metavar="FOLDER", help="keep the engines' logs in this folder")
    options = parser.parse_args(arguments)
    unknown = set(options.only) - KINDS.keys()
    if unknown:
        parser.error(f"--only: there is no kind {sorted(unknown)}")
    try:
        mode = mode_options(options.mode)
    except LookupError as error:
        print(f"table: {error}", file=sys.stderr)
        return 2
    kinds = [KINDS[name] for name in options.only] or list(KINDS.values())
    with tempfile.TemporaryDirectory() as own:
        folder = options.log or Path(own)
        folder.mkdir(parents=True, exist_ok=True)
        verdicts = anyio.run(_run, kinds, mode, options.out, folder)
    found = summary(verdicts)
    if options.json:
        print(json.dumps(found))
    return 1 if found["harmed"] or found["restarted"] or found["stalled"] else 0


if __name__ == "__main__":
    sys.exit(main())
