"""`tracewire models`, `engines`, `drain` and `ready`: list models and engines, drain engines, and probe them."""

from __future__ import annotations

import argparse
import dataclasses
import socket
import sys
from collections.abc import Sequence
from typing import Any

import anyio
import msgspec

from tracewire.client import Client, connect
from tracewire.errors import ConnectError
from tracewire.traces.served_models import ModelInfo

from .commands import UsageError, add_command
from .format import counted
from .model_names import add_model
from .printing import no_engines, place, print_json, print_json_line, print_rows

__all__ = ["add_engines", "names_of_host"]

#: How long `tracewire ready` waits for a Redis that does not answer, in seconds. Probes have short timeouts.
_PROBE_S = 5.0
#: After an outage of Redis, running engines are back in the registry within this many seconds.
_RENEWED_S = 3.0


def add_engines(commands: Any, parents: Sequence[argparse.ArgumentParser]) -> None:
    """Add the subcommands."""
    models = add_command(
        commands,
        "models",
        _models,
        parents=parents,
        help="list the served models",
        json="a list with an object for each model: name, engines, running, capacity, dtype, layer_count, ...",
    )
    models.add_argument("--tree", action="store_true", help="also print each model's modules")
    engines = add_command(
        commands,
        "engines",
        _engines,
        parents=parents,
        help="list running engines",
        json="a list with an object for each engine, with all its fields",
    )
    add_model(engines, "--model", help="list only engines of this model")
    drain = add_command(
        commands,
        "drain",
        _drain,
        parents=parents,
        help="have engines take no new traces, finish their own, and leave; waits for them",
        exits={1: "an error, or no engine has this name or runs on this host"},
        examples=("tracewire drain ENGINE --timeout 60",),
        json="an object on a line for each step: engine, event (draining, left), running",
    )
    drain.add_argument("engines", metavar="ENGINE", nargs="*", help="an engine's name")
    _add_host(drain, "all engines of this machine or pod, or of HOST")
    drain.add_argument(
        "--timeout",
        type=float,
        metavar="SECONDS",
        help="after this time return the traces that still run to the queue (default: wait for their end)",
    )
    drain.add_argument("--no-wait", action="store_true", help="return at once, without waiting for their end")
    ready = add_command(
        commands,
        "ready",
        _ready,
        parents=parents,
        help="probe whether an engine is ready",
        exits={0: "an engine is ready", 1: "no engine is ready, or an error"},
        examples=("tracewire ready --model demo",),
        json="an object: ready, engine, state (both null if there is none)",
    )
    ready.add_argument("engine", metavar="ENGINE", nargs="?", help="the engine's name (default: any engine)")
    add_model(ready, "--model", help="an engine that serves this model")
    _add_host(ready, "an engine of this machine or pod, or of HOST")
    ready.add_argument(
        "--alive",
        action="store_true",
        help="liveness probe: exit with 0 if an engine runs, even a draining one, or if Redis does not answer",
    )


def _add_host(parser: argparse.ArgumentParser, text: str) -> None:
    parser.add_argument("--host", metavar="HOST", nargs="?", const=socket.gethostname(), help=text)


async def _engines(options: argparse.Namespace) -> int:
    async with connect(options.url, prefix=options.prefix) as client:
        live = await client.engines.list()
        url = client.url
    engines = [one for one in live if options.model in (None, one.model)]
    if options.json:
        print_json([msgspec.structs.asdict(engine) for engine in engines])
        return 0
    if not engines:
        no_engines(url, options.prefix, options.model, sorted({one.model for one in live}))
    rows = []
    for engine in engines:
        versions = " ".join(f"{name} {version}" for name, version in engine.versions.items() if version)
        running = f"{engine.running} of {engine.capacity} traces"
        columns = [engine.name, engine.model, engine.state, running, engine.host or "-", versions]
        if engine.malformed:
            columns.append(f"{engine.malformed} malformed items in Redis skipped")
        rows.append(columns)
    print_rows(("engine", "model", "state", "running", "host", "versions"), rows)
    return 0


async def _drain(options: argparse.Namespace) -> int:
    """Returns 0 when all named engines have been asked to drain and, unless `--no-wait` is given, have left."""
    if options.timeout is not None and not options.timeout >= 0:
        raise UsageError(f"--timeout takes a number of seconds, got {options.timeout:g}")
    if not options.engines and options.host is None:
        raise UsageError("name an engine (tracewire engines lists them), or give --host")
    async with connect(options.url, prefix=options.prefix) as client:
        names = list(options.engines)
        if options.host is not None:
            here = await names_of_host(client, options.host)
            names += here
            if not here:
                where = place(client.url, options.prefix)
                print(
                    f"tracewire: no engine runs on host {options.host!r} (tracewire engines); looked on {where}",
                    file=sys.stderr,
                )
                return 1
        drained = [await client.engines.drain(name, timeout=options.timeout) for name in dict.fromkeys(names)]
        asked = {one.engine.name for one in drained}
        for one in drained:
            if options.json:
                print_json_line({"engine": one.engine.name, "event": "draining", "running": one.engine.running})
            else:
                print(f"{one.engine.name}: asked to drain; it runs {one.engine.running} traces", flush=True)
            if one.waiting and asked.issuperset(one.others):
                print(
                    f"tracewire: no other engine serves {one.engine.model!r}: the {one.waiting} submissions that wait, "
                    "and the traces that are returned to the queue, wait until one does",
                    file=sys.stderr,
                )
        for one in drained if not options.no_wait else ():
            await one.wait()
            if options.json:
                print_json_line({"engine": one.engine.name, "event": "left", "running": 0})
            else:
                print(f"{one.engine.name}: has left", flush=True)
    return 0


async def names_of_host(client: Client, host: str) -> list[str]:
    """The names of a host's engines. After an outage of Redis, the registry may lack a live engine for a moment."""
    with anyio.move_on_after(_RENEWED_S):
        while True:
            if found := [engine.name for engine in await client.engines.list() if engine.host == host]:
                return found
            await anyio.sleep(0.2)
    return []


async def _ready(options: argparse.Namespace) -> int:
    """Returns 0 if an engine meets the options, else 1."""
    try:
        async with connect(options.url, prefix=options.prefix, retry_timeout=_PROBE_S) as client:
            engines = await client.engines.list(model=options.model)
            where = place(client.url, options.prefix)
    except ConnectError as error:
        if not options.alive:
            raise
        print(f"tracewire: it is not known whether an engine runs: {error}", file=sys.stderr)
        return 0
    for engine in engines:
        named = options.engine in (None, engine.name) and options.host in (None, engine.host)
        if named and (engine.ready or options.alive):
            if options.json:
                print_json({"ready": engine.ready, "engine": engine.name, "state": engine.state})
            else:
                print(f"{engine.name}\t{engine.state}")
            return 0
    if options.json:
        print_json({"ready": False, "engine": None, "state": None})
    wanted = " ".join(
        text
        for text in (
            f"engine {options.engine}" if options.engine else "engine",
            f"of {options.model!r}" if options.model else "",
            f"on {options.host}" if options.host else "",
        )
        if text
    )
    missing = f"no {wanted} runs" if options.alive else f"no ready {wanted}"
    print(f"tracewire: {missing} (tracewire engines lists them); looked on {where}", file=sys.stderr)
    return 1


async def _models(options: argparse.Namespace) -> int:
    async with connect(options.url, prefix=options.prefix) as client:
        models = await client.models.list()
        trees = [(await client.models.get(info.name)).tree if options.tree else None for info in models]
        url = client.url
    if options.json:
        print_json([_model_json(info, tree) for info, tree in zip(models, trees, strict=True)])
        return 0
    if not models:
        no_engines(url, options.prefix)
    columns = ("model", "engines", "running", "dtype", "layers", "context", "differences")
    if not options.tree:
        print_rows(columns, [_model_row(info) for info in models])
    for info, tree in zip(models, trees, strict=True) if options.tree else ():
        print_rows(columns, [_model_row(info)])
        print(tree)
    return 0


def _model_row(info: ModelInfo) -> list[str]:
    return [
        info.name,
        counted(len(info.engines), "engine"),
        f"{info.running} of {info.capacity} traces",
        info.dtype,
        f"{info.layer_count} layers of {info.hidden_size}",
        f"{info.max_model_len} tokens",
        *([f"its engines differ in: {', '.join(info.differs)}"] if info.differs else []),
    ]


def _model_json(info: ModelInfo, tree: Any) -> dict[str, Any]:
    found = {name: value for name, value in dataclasses.asdict(info).items() if name != "config"}
    return found if tree is None else {**found, "tree": str(tree)}
