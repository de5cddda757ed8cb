"""`tracewire harvest`: activations of a data set's prompts, written as shards."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from typing import Any

from tracewire.client import connect
from tracewire.errors import TracewireError
from tracewire.progress import HarvestProgress
from tracewire_bus.wire.messages import LogitLens, Probe

from .blocks import BLOCK, load_block
from .commands import UsageError, add_command, positive
from .model_names import add_model
from .printing import print_json

__all__ = ["add_harvest"]

#: How often the command prints progress, in seconds: if standard error is no terminal, and if it is one.
_EVERY_S = 10.0
_EVERY_TERMINAL_S = 0.2
#: The options that are arguments of `Client.harvest` by the same name.
_OPTIONS = (
    *("column", "key", "format", "dtype", "positions", "every", "keep_top", "concurrency", "shard_bytes"),
    *("shard_prompts", "patience", "max_tokens", "max_attempts", "retry_failed", "repair"),
)


def add_harvest(commands: Any, parents: Sequence[argparse.ArgumentParser]) -> None:
    """Add the subcommand."""
    harvest = add_command(
        commands,
        "harvest",
        _harvest,
        parents=parents,
        help="write the activations of a data set's prompts as shards of safetensors or Parquet; the same command "
        "continues after an interruption",
        exits={0: "each prompt is in the result", 3: "some prompts failed"},
        json="an object at the end: to, prompts, failed (an object of reasons by key)",
        examples=("tracewire harvest demo prompts.jsonl --to acts --read 'hs=residual(*)'",),
    )
    add_model(harvest)
    harvest.add_argument(
        "data",
        metavar="DATA",
        help="a JSONL or Parquet file, by its path or fsspec URL; with --split, a data set's name or folder",
    )
    harvest.add_argument("--to", required=True, metavar="URL", help="a folder, or any URL of fsspec")
    _add_reads(harvest)
    _add_data(harvest)
    _add_filters(harvest)
    _add_bounds(harvest)


def _add_reads(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("reads")
    what = "a location, as residual(4), residual(*) or model.layers.*.mlp; repeatable"
    group.add_argument("--read", action="append", default=[], metavar="[NAME=]AT", help=what)
    group.add_argument("--lens", action="append", default=[], metavar="[NAME=]AT", help="the same by the logit lens")
    group.add_argument("--lens-top-k", type=int, default=5, metavar="K", help="tokens of a lens (default: 5)")
    group.add_argument(
        "--project",
        metavar="FILE",
        help="a .npy file of [hidden] or [outputs, hidden]: the engine projects each read on it",
    )
    what = "keep the saves of a block in a Python file: @tracewire.intervention def NAME(model, tracer, live)"
    group.add_argument("--block", metavar=BLOCK, help=what)
    group.add_argument(
        "--at",
        choices=("all", "prompt", "generated", "last"),
        default="all",
        help="which positions the engine reads (default: all)",
    )
    group.add_argument("--max-tokens", type=int, default=1, metavar="N", help="tokens to sample (default: 1)")


def _add_data(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("the data set")
    group.add_argument("--split", help="load DATA with Hugging Face's datasets.load_dataset, and take this split")
    group.add_argument("--column", metavar="NAME", help="the prompts' column (default: prompt, text, messages, ...)")
    group.add_argument("--key", metavar="NAME", help="a column that tells prompts apart (default: their numbers)")
    group.add_argument("--retry-failed", action="store_true", help="run prompts again that failed in an earlier run")
    group.add_argument("--repair", action="store_true", help="run the prompts of damaged shards again")


def _add_filters(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("filters")
    what = "keep these positions, indexed as in Python: 0:16, -4:, or 0,5,-1"
    group.add_argument("--positions", type=_positions, metavar="POSITIONS", help=what)
    group.add_argument("--every", type=int, default=1, metavar="N", help="keep each N-th position")
    group.add_argument(
        "--keep-top", type=int, metavar="K", help="keep the K greatest values of each row, with their indices"
    )
    group.add_argument("--dtype", metavar="DTYPE", help="float16 or float32 (default: the engine's)")
    group.add_argument("--format", choices=("safetensors", "parquet"), default="safetensors", help="of the values")


def _add_bounds(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("bounds")
    group.add_argument("--concurrency", type=positive, default=32, metavar="N", help="prompts at once (default: 32)")
    what = "bytes of values in a shard (default: 256 MiB)"
    group.add_argument("--shard-bytes", type=int, default=256 << 20, metavar="BYTES", help=what)
    what = "prompts in a shard at most (default: 1000)"
    group.add_argument("--shard-prompts", type=int, default=1000, metavar="N", help=what)
    what = "how long to wait while Redis or all engines are away (default: 300)"
    group.add_argument("--patience", type=float, default=300.0, metavar="SECONDS", help=what)
    what = "engines that may be lost over a prompt until it counts as failed (default: 3)"
    group.add_argument("--max-attempts", type=int, default=3, metavar="N", help=what)
    what = "options for fsspec with --to, as a JSON object"
    group.add_argument("--storage-options", type=_mapping, metavar="JSON", help=what)


def _positions(text: str) -> slice | list[int]:
    try:
        if ":" in text:
            return slice(*(int(part) if part else None for part in text.split(":")))
        return [int(part) for part in text.split(",")]
    except (ValueError, TypeError):
        raise argparse.ArgumentTypeError(f"expected positions as 0:16 or 0,5,-1, got {text!r}") from None


def _mapping(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"expected a JSON object: {error}") from None
    if not isinstance(found, dict):
        raise argparse.ArgumentTypeError(f"expected a JSON object, got {text!r}")
    return found


async def _harvest(options: argparse.Namespace) -> int:
    """Returns 0 if each prompt is in the result, 3 if some failed."""
    try:
        interventions = _interventions(options)
        block = None if options.block is None else load_block(options.block)
    except (OSError, ValueError) as error:
        raise UsageError(str(error)) from None
    if not interventions and block is None:
        raise UsageError("nothing is read: give --read AT, --lens AT or --block FILE.py::NAME")
    given = {name: getattr(options, name) for name in _OPTIONS if getattr(options, name) is not None}
    shown = _Shown()
    async with connect(options.url, prefix=options.prefix) as client:
        try:
            await client.harvest(
                options.model,
                _data(options),
                interventions,
                to=options.to,
                block=block,
                storage_options=options.storage_options,
                progress=shown.report,
                **given,
            )
        except (TypeError, ValueError) as error:
            if isinstance(error, TracewireError):
                raise
            raise UsageError(str(error)) from None
        finally:
            shown.end()
    return _summary(options)


def _summary(options: argparse.Namespace) -> int:
    from tracewire.harvest import open

    harvested = open(options.to, storage_options=options.storage_options)
    if options.json:
        failed = {str(key): reason for key, reason in harvested.failed.items()}
        print_json({"to": options.to, "prompts": len(harvested), "failed": failed})
    else:
        print(f"{options.to}: {len(harvested)} prompts, {len(harvested.failed)} failed", flush=True)
    for key, reason in list(harvested.failed.items())[:10]:
        print(f"tracewire: prompt {key!r} failed: {reason}", file=sys.stderr)
    return 3 if harvested.failed else 0


def _data(options: argparse.Namespace) -> Any:
    if options.split is None:
        return options.data
    from tracewire.harvest.libraries import library

    datasets = library("datasets", "--split", "datasets")
    if os.path.isdir(options.data) and not any(
        name.endswith((".parquet", ".jsonl")) for name in os.listdir(options.data)
    ):
        return datasets.load_from_disk(options.data)[options.split]
    return datasets.load_dataset(options.data, split=options.split)


def _interventions(options: argparse.Namespace) -> list[Any]:
    weight = None
    if options.project is not None:
        import numpy as np

        weight = np.load(options.project, allow_pickle=False)
    reads = [_named(text, "read", number) for number, text in enumerate(options.read)]
    lenses = [_named(text, "lens", number) for number, text in enumerate(options.lens)]
    return [
        *(Probe(name=name, at=at, weight=weight, positions=options.at) for name, at in reads),
        *(LogitLens(name=name, at=at, top_k=options.lens_top_k, positions=options.at) for name, at in lenses),
    ]


def _named(text: str, kind: str, number: int) -> tuple[str, str]:
    name, equals, at = text.partition("=")
    return (name, at) if equals else (f"{kind}{number or ''}", text)


class _Shown:
    """Progress on standard error: one line that changes on a terminal, else a line every few seconds."""

    def __init__(self) -> None:
        self._terminal = sys.stderr.isatty()
        self._last = time.monotonic()
        self._progress: HarvestProgress | None = None

    def report(self, progress: HarvestProgress) -> None:
        self._progress = progress
        now = time.monotonic()
        if now - self._last >= (_EVERY_TERMINAL_S if self._terminal else _EVERY_S):
            self._last = now
            self._print(progress, "\r" if self._terminal else "", "" if self._terminal else "\n")

    def end(self) -> None:
        """Print the last progress that was reported, and end the line."""
        if self._progress is not None:
            self._print(self._progress, "\r" if self._terminal else "", "\n")

    def _print(self, progress: HarvestProgress, before: str, after: str) -> None:
        print(f"{before}{progress_line(progress)}", end=after, file=sys.stderr, flush=True)


def progress_line(progress: HarvestProgress) -> str:
    """The progress of a harvest, in one line."""
    of = f" of {progress.total}" if progress.total is not None else ""
    parts = [f"{progress.prompts + progress.skipped}{of} prompts", f"{progress.failed} failed"]
    parts += [f"{progress.shards} shards", f"{progress.tokens_per_second:.0f} tokens/s"]
    parts.append(f"{progress.bytes_per_second / 1e6:.1f} MB/s")
    return ", ".join(parts)
