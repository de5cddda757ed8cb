"""The options of `tracewire engine`, and how their values are read."""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path

from tracewire_bus.domain.code_identity import DEFAULT_IMPORTS
from tracewire_bus.logs import LOG_FORMATS
from tracewire_bus.store.blobs import THRESHOLD_BYTES

from .secret import URL

__all__ = ["CODES", "add_options", "redis_url"]

#: The values of `--code`.
CODES = ("none", "listed", "signed", "any")


def whole(least: int) -> Callable[[str], int]:
    """Make an argparse converter for a whole number of at least `least`."""

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
    """Make an argparse converter for a number of seconds of at least `least`. `forever` allows `inf` too."""

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
    """An argparse converter for `NAME=FOLDER`."""
    name, _, folder = text.partition("=")
    if not name or not folder:
        raise argparse.ArgumentTypeError(f"expected NAME=FOLDER, got {text!r}")
    return name, folder


def imports(text: str) -> frozenset[str] | None:
    """An argparse converter for `any`, or names of packages with commas between them. None for `any`."""
    if text == "any":
        return None
    names = [one.strip() for one in text.split(",")]
    if not all(part.isidentifier() for name in names for part in name.split(".")):
        raise argparse.ArgumentTypeError(f"expected names of packages such as torch,numpy, or any; got {text!r}")
    return frozenset(names)


def host_and_port(text: str) -> str:
    """An argparse converter for `HOST:PORT`."""
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise argparse.ArgumentTypeError(f"expected HOST:PORT, such as 0.0.0.0:7400, got {text!r}")
    return text


# whole: a table of options
def add_options(group: argparse._ArgumentGroup, secrets: Mapping[str, str], *, model: bool = True) -> None:
    """Add Tracewire's options, which come beside vLLM's, to a parser's group.

    `secrets` may hold the Redis URL. Without `model`, the positional argument MODEL is left out.
    """
    if model:
        group.add_argument("model_folder", metavar="MODEL", help="a Hugging Face model: its folder or name, or 'demo'")
    group.add_argument("--name", help="the name by which clients ask for the model (default: the last part of MODEL)")
    group.add_argument(
        "--url", default=secrets.get(URL) or os.environ.get(URL), help="Redis URL (default: $TRACEWIRE_URL)"
    )
    group.add_argument(
        "--url-file", metavar="FILE", help="read the Redis URL from this file or descriptor (/dev/fd/3), not --url"
    )
    group.add_argument(
        "--keep-env",
        action="append",
        default=[],
        metavar="NAME",
        help="leave this environment variable to the processes that run blocks, although its name or value looks like "
        "a secret, such as 'AWS_*' to load a model from S3 (repeatable)",
    )
    group.add_argument("--prefix", default="tw", help="prefix of all keys on Redis")
    group.add_argument("--capacity", type=int, default=256, help="how many traces this engine runs at once")
    group.add_argument(
        "--adapters",
        type=whole(1),
        metavar="N",
        help="how many processes handle the outputs of this engine's traces; each takes a core at high rates (default: "
        "3 on a GPU host with at least 12 cores for this engine and without --openai, else 1)",
    )
    group.add_argument(
        "--queue-limit",
        type=whole(0),
        default=4096,
        metavar="SUBMISSIONS",
        help="how many submissions may wait for the model; Redis refuses further ones (0: any number)",
    )
    group.add_argument(
        "--limit",
        action="append",
        default=[],
        metavar="NAME=NUMBER",
        help="change a limit on submissions and traces, such as choices=64 or trace-save-bytes=1000000000 (repeatable; "
        "docs/internals/untrusted-input.md lists them with their defaults)",
    )
    group.add_argument(
        "--drain", type=float, default=10.0, metavar="SECONDS", help="how long running traces may go on after SIGTERM"
    )
    group.add_argument(
        "--restarts", type=int, metavar="TIMES", help="how often to restart an engine that died (default: always)"
    )
    group.add_argument(
        "--tap",
        action="append",
        default=[],
        metavar="PATTERN",
        help="keep CUDA graphs, and serve these locations in them (repeatable), for example model.layers.*.output",
    )
    group.add_argument(
        "--model-runner",
        choices=("auto", "first", "second"),
        default="auto",
        help="which of vLLM's model runners to use (default: auto, vLLM's own choice; on a CPU and for pipeline stages "
        "the first)",
    )
    group.add_argument(
        "--unknown-vllm",
        action="store_true",
        help="start with a version of vLLM that this version of Tracewire has not been tested with",
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
        "--sae",
        action="append",
        type=name_and_folder,
        default=[],
        metavar="NAME=FOLDER",
        help="have a sparse autoencoder (SAELens's format, or a safetensors file) that traces can name (repeatable)",
    )
    group.add_argument(
        "--sae-bytes",
        type=whole(0),
        default=1 << 30,
        metavar="BYTES",
        help="how much memory of each GPU sparse autoencoders may take beside the model",
    )
    group.add_argument(
        "--sae-host-bytes",
        type=whole(0),
        default=0,
        metavar="BYTES",
        help="how much pinned memory of the host autoencoders may take, for each worker, where a GPU has no room "
        "(default: none)",
    )
    group.add_argument(
        "--sae-split-bytes",
        type=whole(0),
        metavar="BYTES",
        help="with --tensor-parallel-size, the ranks split the features of an autoencoder of more bytes than this "
        "(default: those that --sae-bytes is too small for)",
    )
    group.set_defaults(autoencoders={})
    # The command makes the key of permits when it starts.
    group.set_defaults(permit_key=b"")
    group.add_argument(
        "--code",
        choices=CODES,
        help="whose blocks to run: none, only declared interventions; listed, approved ones (tracewire approve); "
        "signed, those of keys with the right 'code'; any (default: any if the Redis is private to this user, else "
        "none)",
    )
    group.add_argument(
        "--approved",
        type=Path,
        metavar="FILE",
        help="with --code listed: the approved blocks, as tracewire approve writes them",
    )
    group.add_argument(
        "--code-imports",
        type=imports,
        default=argparse.SUPPRESS,
        metavar="PACKAGES",
        help="what a block may import: names with commas between them, or any (default: any with --code any, else "
        f"{len(DEFAULT_IMPORTS)} packages such as torch, numpy and math; see docs/security.md)",
    )
    group.add_argument(
        "--keyring",
        type=Path,
        metavar="FILE",
        help="the public keys of clients, with their tenants and rights (tracewire keys); read again when it changes",
    )
    group.add_argument(
        "--unsigned",
        choices=("accept", "refuse"),
        help="what to do with submissions, orders and edits that no key has signed (default: accept if there is no "
        "--keyring, or if the Redis is private to this user; else refuse)",
    )
    group.add_argument(
        "--engine-key",
        type=Path,
        metavar="FILE",
        help="sign the finals of traces with this key file (tracewire keys new), so that a forged one shows",
    )
    group.add_argument(
        "--audit",
        type=whole(0),
        metavar="ENTRIES",
        help="write what this engine was asked for, and decided, to the audit trail of this Redis, which keeps about "
        "so many entries (default: 100000 with --keyring, or if --code is not any; else 0, none)",
    )
    group.add_argument(
        "--block-timeout",
        type=float,
        default=10.0,
        metavar="SECONDS",
        help="how long a block may compute within one step, while all requests wait (0: any time)",
    )
    group.add_argument(
        "--blocks",
        choices=("inline", "host"),
        help="where blocks run: 'inline', in vLLM's worker, for trusted code; or 'host', in confined processes, which "
        "only blocks of one tenant that do nothing but compute share (default: host where blocks run and others than "
        "this user can submit some, and the engine has no --check-collect)",
    )
    group.add_argument(
        "--block-step-ms",
        type=whole(1),
        default=5000,
        metavar="MILLISECONDS",
        help="with --blocks host: how long a step waits for all of its blocks that may change values (default: 5000)",
    )
    group.add_argument(
        "--blob-threshold",
        type=whole(0),
        default=THRESHOLD_BYTES,
        metavar="BYTES",
        help="clients download saved arrays of more bytes than this on demand (0: no array)",
    )
    group.add_argument(
        "--bulk",
        type=Path,
        metavar="FOLDER",
        help="keep large saves of traces in files of this folder, instead of in Redis, such as /dev/shm/tracewire for "
        "consumers on this host (default: all on Redis)",
    )
    group.add_argument(
        "--bulk-threshold",
        type=whole(1),
        default=32 * 1024,
        metavar="BYTES",
        help="with --bulk: outputs whose saves take more bytes than this go there",
    )
    group.add_argument(
        "--bulk-bytes",
        type=whole(1),
        default=4 << 30,
        metavar="BYTES",
        help="with --bulk: how much this engine keeps there, of running and finished traces; beyond, saves go to Redis",
    )
    group.add_argument(
        "--bulk-listen",
        type=host_and_port,
        metavar="HOST:PORT",
        help="with --bulk: serve consumers on other hosts at this address (port 0: any)",
    )
    group.add_argument(
        "--bulk-advertise",
        default="",
        metavar="HOST",
        help="with --bulk-listen: the name or address at which those consumers reach this host (default: HOST)",
    )
    group.add_argument(
        "--bulk-archive",
        default="",
        metavar="URL",
        help="with --bulk: move the saves of traces that have ended to this fsspec URL, such as s3://bucket/bulk",
    )
    group.add_argument(
        "--kept-kv-bytes",
        type=whole(0),
        default=8 << 30,
        metavar="BYTES",
        help="how much KV cache of preempted traces each worker keeps in host memory; the rest is recomputed",
    )
    group.add_argument(
        "--retain-events",
        type=whole(0),
        default=0,
        metavar="N",
        help="trim a running trace's stream when it has more events than this; a consumer that missed events gets the "
        "trace's state in place of them (default 0: keep all)",
    )
    group.add_argument(
        "--retain-bytes",
        type=whole(0),
        default=0,
        metavar="BYTES",
        help="trim a running trace's stream when its events take more than this (default 0: any number)",
    )
    group.add_argument(
        "--retain-traces",
        type=whole(0),
        default=0,
        metavar="N",
        help="how many finished traces of all models to keep on this Redis; the oldest are dropped first, even within "
        "--retention (default 0: any number)",
    )
    group.add_argument(
        "--retain-total-bytes",
        type=whole(0),
        default=0,
        metavar="BYTES",
        help="how much of Redis finished traces may take; the oldest are dropped first (default 0: any number)",
    )
    group.add_argument(
        "--buffer-bytes",
        type=whole(1),
        default=256 * 1024 * 1024,
        metavar="BYTES",
        help="how many bytes of events may wait while Redis is slow or does not answer; then the engine pauses",
    )
    group.add_argument(
        "--memory-patience",
        type=seconds(0, forever=True),
        default=60.0,
        metavar="SECONDS",
        help="how long a trace waits while the memory of Redis is full, before it fails",
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
        help="with --distributed-executor-backend ray: HOST:PORT of a cluster, 'auto' for the cluster on this "
        "machine, 'local' to start one for this engine (default: $RAY_ADDRESS, else auto if one runs, else local)",
    )
    group.add_argument(
        "--link-host",
        metavar="ADDRESS",
        help="with a Ray cluster: the address of this machine that workers connect to (default: its address in Ray)",
    )
    group.add_argument(
        "--worker-patience",
        type=seconds(2),
        default=30.0,
        metavar="SECONDS",
        help="with a Ray cluster: how long a worker may be silent before this engine ends",
    )
    group.add_argument(
        "--engine-patience",
        type=seconds(10),
        default=120.0,
        metavar="SECONDS",
        help="how long vLLM may take to answer or to report a step, before this engine ends; longer than any step",
    )
    group.add_argument(
        "--openai",
        metavar="HOST:PORT",
        help="also serve vLLM's OpenAI-compatible HTTP API, with standing interventions on its requests",
    )
    group.add_argument(
        "--openai-route",
        action="append",
        default=[],
        metavar="PATH",
        help="allow one more route of vLLM's server with --openai, such as /v1/audio/transcriptions, or /x/* for all "
        "routes below /x (repeatable)",
    )
    group.add_argument(
        "--openai-option",
        action="append",
        default=[],
        metavar="OPTION",
        help="an option of vLLM's HTTP server (repeatable), for example --openai-option=--chat-template=FILE",
    )
    group.add_argument(
        "--sandbox",
        action="store_true",
        help="run the processes that run blocks without network, with a read-only root, no privileges and a filter of "
        "system calls; needs bubblewrap (docs/security.md says what it does not contain)",
    )
    group.add_argument(
        "--first-answer",
        type=seconds(0),
        default=600.0,
        metavar="SECONDS",
        help="how long vLLM may take for a trial request before this engine serves (0: no trial)",
    )
    group.add_argument(
        "--check-collect",
        action="store_true",
        help="check every trace's saves against those of nnsight's own collect (costs throughput)",
    )
    group.add_argument(
        "--log-format", choices=LOG_FORMATS, default="text", help="text, or a JSON object in each line (default: text)"
    )
    group.add_argument(
        "--tracing",
        action="store_true",
        help="send OpenTelemetry spans of traces, as the variables OTEL_* say; vLLM's own take --otlp-traces-endpoint",
    )
    group.add_argument(
        "--log-stats",
        action="store_true",
        help="log vLLM's statistics, a line every ten seconds (costs throughput)",
    )


def redis_url(options: argparse.Namespace) -> str:
    """The Redis URL of the options.

    Raises:
        ValueError: the options give no URL, or a file that cannot be read.
    """
    url: str | None = options.url
    if options.url_file is not None:
        try:
            url = Path(options.url_file).read_text().strip()
        except OSError as error:
            raise ValueError(f"--url-file: {error}") from error
    if not url:
        raise ValueError("--url, --url-file or TRACEWIRE_URL is required: the URL of the Redis that clients use")
    return url
