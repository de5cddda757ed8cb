"""The options of `tracewire engine`, and how their values are read."""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path

from tracewire_bus.store.blobs import THRESHOLD_BYTES

from .secret import URL

__all__ = ["add_options", "redis_url"]


def whole(least: int) -> Callable[[str], int]:
    """A converter of argparse: a whole number of at least `least`."""

    def convert(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if value < least:
            raise argparse.ArgumentTypeError(f"expected a whole number of at least {least}, got {text!r}")
        return value

    return convert


def seconds(least: float, *, forever: bool = False) -> Callable[[str], float]:
    """A converter of argparse: a number of seconds of at least `least`; with `forever`, infinity too."""

    def convert(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not value >= least or (value == math.inf and not forever):
            raise argparse.ArgumentTypeError(f"expected a number of seconds, at least {least:g}, got {text!r}")
        return value

    return convert


def name_and_folder(text: str) -> tuple[str, str]:
    """A converter of argparse: `NAME=FOLDER`."""
    name, _, folder = text.partition("=")
    if not name or not folder:
        raise argparse.ArgumentTypeError(f"expected NAME=FOLDER, got {text!r}")
    return name, folder


# whole: a table of options
def add_options(group: argparse._ArgumentGroup, secrets: Mapping[str, str]) -> None:
    """Add our own options, beside vLLM's, to a parser's group. `secrets` may have the Redis URL."""
    group.add_argument("model_folder", metavar="MODEL", help="a Hugging Face model's folder or name, or 'demo'")
    group.add_argument("--name", help="the name that clients ask for (default: the last part of MODEL)")
    group.add_argument(
        "--url", default=secrets.get(URL) or os.environ.get(URL), help="Redis URL (default: $TRACEWIRE_URL)"
    )
    group.add_argument("--url-file", metavar="FILE", help="a file that holds the Redis URL, in place of --url")
    group.add_argument("--prefix", default="tw", help="prefix of all keys on Redis")
    group.add_argument("--capacity", type=int, default=256, help="traces taken at once")
    group.add_argument(
        "--queue-limit",
        type=whole(0),
        default=4096,
        metavar="SUBMISSIONS",
        help="how many submissions may wait for the model before further ones are refused (0: any number)",
    )
    group.add_argument(
        "--drain", type=float, default=10.0, metavar="SECONDS", help="how long traces may go on after SIGTERM"
    )
    group.add_argument(
        "--restarts", type=int, metavar="TIMES", help="how often to start again when the engine died (default: always)"
    )
    group.add_argument(
        "--tap",
        action="append",
        default=[],
        metavar="PATTERN",
        help="keep CUDA graphs, and serve this location in them (repeatable), as model.layers.*.output",
    )
    group.add_argument(
        "--lora",
        action="append",
        type=name_and_folder,
        default=[],
        metavar="NAME=FOLDER",
        help="serve a LoRA adapter (PEFT's format) to the prompts that ask for it by name (repeatable)",
    )
    group.add_argument(
        "--block-timeout",
        type=float,
        default=10.0,
        metavar="SECONDS",
        help="how long a block may compute within one step, while all requests wait (0: any time)",
    )
    group.add_argument(
        "--blob-threshold",
        type=whole(0),
        default=THRESHOLD_BYTES,
        metavar="BYTES",
        help="saved arrays of more bytes than this are downloaded on demand (0: none is)",
    )
    group.add_argument(
        "--kept-kv-bytes",
        type=whole(0),
        default=8 << 30,
        metavar="BYTES",
        help="how much KV of preempted traces each worker keeps in host memory; what is more is computed anew",
    )
    group.add_argument(
        "--retain-events",
        type=whole(0),
        default=0,
        metavar="N",
        help="trim a running trace's stream when it has more events than this; a consumer that missed some gets the "
        "state instead (default 0: keep all)",
    )
    group.add_argument(
        "--retain-bytes",
        type=whole(0),
        default=0,
        metavar="BYTES",
        help="likewise, when its events take more bytes than this (default 0: any number)",
    )
    group.add_argument(
        "--retain-traces",
        type=whole(0),
        default=0,
        metavar="N",
        help="how many finished traces to keep on this Redis, of all models: the oldest are dropped first, whatever "
        "--retention says (default 0: any number)",
    )
    group.add_argument(
        "--retain-total-bytes",
        type=whole(0),
        default=0,
        metavar="BYTES",
        help="likewise, when all finished traces take more bytes of Redis than this (default 0: any number)",
    )
    group.add_argument(
        "--buffer-bytes",
        type=whole(1),
        default=256 * 1024 * 1024,
        metavar="BYTES",
        help="how much may wait for a Redis that is away or slow before the engine is paused",
    )
    group.add_argument(
        "--memory-patience",
        type=seconds(0, forever=True),
        default=60.0,
        metavar="SECONDS",
        help="how long a trace waits for a Redis whose memory is full before it fails",
    )
    group.add_argument(
        "--retention",
        type=seconds(1),
        default=3600.0,
        metavar="SECONDS",
        help="how long a trace can be read after its end",
    )
    group.add_argument(
        "--ray-address",
        default=os.environ.get("RAY_ADDRESS") or None,
        metavar="ADDRESS",
        help="with --distributed-executor-backend ray: HOST:PORT of a cluster, 'auto' for the one that runs here, "
        "'local' for one of this engine's own (default: $RAY_ADDRESS, else auto if there is one, else local)",
    )
    group.add_argument(
        "--link-host",
        metavar="ADDRESS",
        help="with a Ray cluster: this machine's address for the workers (default: the one that Ray knows it by)",
    )
    group.add_argument(
        "--worker-patience",
        type=seconds(2),
        default=30.0,
        metavar="SECONDS",
        help="with a Ray cluster: how long nothing is heard of a worker before the engine is given up",
    )
    group.add_argument(
        "--engine-patience",
        type=seconds(10),
        default=120.0,
        metavar="SECONDS",
        help="how long vLLM may take to answer, or to report a step, before it is given up: longer than any step",
    )
    group.add_argument(
        "--openai",
        metavar="HOST:PORT",
        help="serve vLLM's OpenAI-compatible HTTP API, too, with standing interventions on its requests",
    )
    group.add_argument(
        "--openai-option",
        action="append",
        default=[],
        metavar="OPTION",
        help="an option of vLLM's HTTP server (repeatable), as --openai-option=--chat-template=FILE",
    )
    group.add_argument(
        "--first-answer",
        type=seconds(0),
        default=600.0,
        metavar="SECONDS",
        help="how long the engine's first request, a trial before it serves, may take (0: no trial)",
    )
    group.add_argument(
        "--check-collect",
        action="store_true",
        help="check every trace's saves against what nnsight's own collect returns (costs throughput)",
    )
    group.add_argument(
        "--log-stats",
        action="store_true",
        help="keep vLLM's own statistics, its line in the log every ten seconds (costs throughput)",
    )


def redis_url(options: argparse.Namespace) -> str:
    """The Redis URL that the options name.

    Raises:
        ValueError: they name none, or a file that cannot be read.
    """
    url: str | None = options.url
    if options.url_file is not None:
        try:
            url = Path(options.url_file).read_text().strip()
        except OSError as error:
            raise ValueError(f"--url-file: {error}") from error
    if not url:
        raise ValueError("--url is required (or --url-file, or set TRACEWIRE_URL): the Redis that clients use")
    return url
