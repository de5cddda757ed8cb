"""`tracewire engine MODEL`: one engine adapter, and a supervisor that starts it again when it has died.

Besides its own options it takes every option of vLLM's engine (`--max-model-len`, `--tensor-parallel-size`, ...). It
prints `ready ENGINE` on its standard output each time it serves, logs to standard error, and leaves on SIGTERM or
SIGINT after what runs has ended. So it does when it is asked to on the bus (`tracewire drain`), and prints
`draining ENGINE` then. It exits with 0 then, and with 2 on settings that it refuses; with `--restarts 0`, or
when its engine dies again and again, with what the adapter ended with: 1 when its engine died.
"""

from __future__ import annotations

import argparse
import gc
import logging
import math
import os
import signal
import socket
import sys
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack, ExitStack
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

import anyio

from tracewire_bus.domain.fleet import LEAVING, differences, disagreements
from tracewire_bus.store.blobs import THRESHOLD_BYTES
from tracewire_bus.transport.connection import BusError, BusUnavailable
from tracewire_engine.protocol.cluster import Cluster

from .parent_death import die_with_parent
from .ray_cluster import ClusterError, ClusterUnavailable, joined
from .secret import API_KEY, URL, Given, hub_token, shown
from .supervisor import DRAINING, SUPERVISOR_PID, supervise

if TYPE_CHECKING:
    from tracewire_bus.bus import Bus
    from tracewire_bus.wire.messages import EngineInfo
    from tracewire_engine.adapter.http_server import HttpApi
    from tracewire_engine.adapter.service import Adapter
    from tracewire_engine.adapter.vllm_engine import ServedModel, VllmEngine

__all__ = ["LOOP", "demo_model", "main", "settle_memory"]

logger = logging.getLogger("tracewire")

#: How long an adapter may take to leave, besides what it drains, before it is killed, in seconds.
_GRACE_S = 30.0

#: How soon is looked again for a Redis that was away when the model had loaded, in seconds.
_REDIS_S = 1.0

_LOG = "%(asctime)s %(name)s %(levelname)s %(message)s"

#: The event loop that an adapter runs on: uvloop where it is installed, as it is with vLLM's server.
LOOP = {"use_uvloop": find_spec("uvloop") is not None}


def demo_model() -> Path:
    """Folder of the model that ships with the project: in a checkout or in an installed package.

    Raises:
        FileNotFoundError: it is in neither.
    """
    here = Path(__file__).resolve().parents[1]
    for folder in (here / "demo_model", here.parents[1] / "examples" / "demo_model" / "model"):
        if (folder / "config.json").is_file():
            return folder
    raise FileNotFoundError("the demo model is not installed; name a model's folder instead of 'demo'")


def main(arguments: list[str] | None = None) -> int:
    """Run the command; returns the exit status."""
    given = Given.take(sys.argv[1:] if arguments is None else arguments)
    arguments = given.arguments
    supervisor = os.environ.pop(SUPERVISOR_PID, "")
    if supervisor:
        # Whoever kills it outright wants all of it gone.
        die_with_parent(int(supervisor))
        with ExitStack() as loading:
            loading.enter_context(hub_token(given.secrets))
            return _adapter(arguments, given.secrets, loading.close)
    logging.basicConfig(level=logging.INFO, format=_LOG, stream=sys.stderr)
    early = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    early.add_argument("--restarts", type=int)
    early.add_argument("--drain", type=float, default=10.0)
    options, _ = early.parse_known_args(arguments)
    # EngineCore may drain for as long, behind the adapter.
    grace_s = 2 * max(0.0, options.drain) + _GRACE_S
    command = [sys.executable, "-m", "tracewire_engine.launch.cli", *shown(arguments)]
    return supervise(command, options.restarts, grace_s, given)


def _adapter(
    arguments: list[str], secrets: Mapping[str, str] = MappingProxyType({}), loaded: Callable[[], None] = lambda: None
) -> int:
    """Serve until it is told to stop. `loaded` is called when the model is."""
    # vLLM reads these when it is first imported.
    os.environ.setdefault("VLLM_USE_V2_MODEL_RUNNER", "0")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    # Until it serves: to look for garbage among what is imported takes a sixth of the time of importing it.
    gc.disable()
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    from .engine_builder import UnsupportedSetting, refuse_unsupported

    parser = FlexibleArgumentParser(prog="tracewire engine", description="Serve a model to the bus.")
    ours = parser.add_argument_group("tracewire")
    ours.add_argument("model_folder", metavar="MODEL", help="a Hugging Face model's folder or name, or 'demo'")
    ours.add_argument("--name", help="the name that clients ask for (default: the last part of MODEL)")
    ours.add_argument(
        "--url", default=secrets.get(URL) or os.environ.get(URL), help="Redis URL (default: $TRACEWIRE_URL)"
    )
    ours.add_argument("--url-file", metavar="FILE", help="a file that holds the Redis URL, in place of --url")
    ours.add_argument("--prefix", default="tw", help="prefix of all keys on Redis")
    ours.add_argument("--capacity", type=int, default=256, help="traces taken at once")
    ours.add_argument(
        "--queue-limit",
        type=int,
        default=4096,
        metavar="SUBMISSIONS",
        help="how many may wait for the model before clients are told to come later (0: any number)",
    )
    ours.add_argument(
        "--drain", type=float, default=10.0, metavar="SECONDS", help="how long traces may go on after SIGTERM"
    )
    ours.add_argument(
        "--restarts", type=int, metavar="TIMES", help="how often to start again when the engine died (default: always)"
    )
    ours.add_argument(
        "--tap",
        action="append",
        default=[],
        metavar="PATTERN",
        help="keep CUDA graphs, and serve this location in them (repeatable), as model.layers.*.output",
    )
    ours.add_argument(
        "--lora",
        action="append",
        default=[],
        metavar="NAME=FOLDER",
        help="serve a LoRA adapter (PEFT's format) to the prompts that ask for it by name (repeatable)",
    )
    ours.add_argument(
        "--block-timeout",
        type=float,
        default=10.0,
        metavar="SECONDS",
        help="how long a block may compute within one step, while all requests wait (0: any time)",
    )
    ours.add_argument(
        "--blob-threshold",
        type=int,
        default=THRESHOLD_BYTES,
        metavar="BYTES",
        help="saved arrays of more bytes than this are fetched by those who want them (0: no array is)",
    )
    ours.add_argument(
        "--kept-kv-bytes",
        type=int,
        default=8 << 30,
        metavar="BYTES",
        help="how much KV of preempted traces each worker keeps in host memory; what is more is computed anew",
    )
    ours.add_argument(
        "--retain-events",
        type=int,
        default=0,
        metavar="N",
        help="trim a running trace's stream when it has more events than this; who missed some gets the state instead "
        "(default 0: keep all)",
    )
    ours.add_argument(
        "--retain-bytes",
        type=int,
        default=0,
        metavar="BYTES",
        help="likewise, when its events take more bytes than this (default 0: any number)",
    )
    ours.add_argument(
        "--retain-traces",
        type=int,
        default=0,
        metavar="N",
        help="how many finished traces to keep on this Redis, of all models: the oldest are dropped first, whatever "
        "--retention says (default 0: any number)",
    )
    ours.add_argument(
        "--retain-total-bytes",
        type=int,
        default=0,
        metavar="BYTES",
        help="likewise, when all finished traces take more bytes of Redis than this (default 0: any number)",
    )
    ours.add_argument(
        "--buffer-bytes",
        type=int,
        default=256 * 1024 * 1024,
        metavar="BYTES",
        help="how much may wait for a Redis that is away or slow before the engine is held",
    )
    ours.add_argument(
        "--memory-patience",
        type=float,
        default=60.0,
        metavar="SECONDS",
        help="how long a trace waits for a Redis whose memory is full before it fails",
    )
    ours.add_argument(
        "--retention",
        type=float,
        default=3600.0,
        metavar="SECONDS",
        help="how long a trace can be read after its end",
    )
    ours.add_argument(
        "--ray-address",
        default=os.environ.get("RAY_ADDRESS") or None,
        metavar="ADDRESS",
        help="with --distributed-executor-backend ray: HOST:PORT of a cluster, 'auto' for the one that runs here, "
        "'local' for one of this engine's own (default: $RAY_ADDRESS, else auto if there is one, else local)",
    )
    ours.add_argument(
        "--link-host",
        metavar="ADDRESS",
        help="with a Ray cluster: this machine's address for the workers (default: the one that Ray knows it by)",
    )
    ours.add_argument(
        "--worker-patience",
        type=float,
        default=30.0,
        metavar="SECONDS",
        help="with a Ray cluster: how long nothing is heard of a worker before the engine is given up",
    )
    ours.add_argument(
        "--engine-patience",
        type=float,
        default=120.0,
        metavar="SECONDS",
        help="how long vLLM may take to answer, or to report a step, before it is given up: longer than any step",
    )
    ours.add_argument(
        "--openai",
        metavar="HOST:PORT",
        help="serve vLLM's OpenAI-compatible HTTP API, too, with standing interventions on its requests",
    )
    ours.add_argument(
        "--openai-option",
        action="append",
        default=[],
        metavar="OPTION",
        help="an option of vLLM's HTTP server (repeatable), as --openai-option=--chat-template=FILE",
    )
    ours.add_argument(
        "--first-answer",
        type=float,
        default=600.0,
        metavar="SECONDS",
        help="how long the engine's first request may take, which it makes itself before it serves (0: it makes none)",
    )
    ours.add_argument(
        "--check-collect",
        action="store_true",
        help="check every trace's saves against what nnsight's own collect returns (costs throughput)",
    )
    ours.add_argument(
        "--log-stats",
        action="store_true",
        help="keep vLLM's own statistics, its line in the log every ten seconds (costs throughput)",
    )
    AsyncEngineArgs.add_cli_args(parser)
    # A trace's priority is to reach vLLM's scheduler, unless the operator chooses otherwise.
    parser.set_defaults(scheduling_policy="priority")
    options = parser.parse_args(arguments)

    logging.basicConfig(level=logging.INFO, format=_LOG, stream=sys.stderr)
    wrong = [one for one in options.lora if not all(one.partition("="))]
    if wrong:
        parser.error(f"--lora takes NAME=FOLDER; got {wrong[0]!r}")
    if options.blob_threshold < 0:
        parser.error(f"--blob-threshold takes a number of bytes, or 0; got {options.blob_threshold}")
    if options.queue_limit < 0:
        parser.error(f"--queue-limit takes a number of submissions, or 0; got {options.queue_limit}")
    for setting in ("retain_events", "retain_bytes", "retain_traces", "retain_total_bytes", "kept_kv_bytes"):
        if getattr(options, setting) < 0:
            parser.error(f"--{setting.replace('_', '-')} takes a number, or 0; got {getattr(options, setting)}")
    if options.buffer_bytes <= 0:
        parser.error(f"--buffer-bytes takes a number of bytes above 0; got {options.buffer_bytes}")
    if not options.memory_patience >= 0:
        parser.error(f"--memory-patience takes a number of seconds; got {options.memory_patience}")
    if not 0 <= options.first_answer < math.inf:
        parser.error(f"--first-answer takes a number of seconds, or 0; got {options.first_answer}")
    if not 2 <= options.worker_patience < math.inf:
        parser.error(f"--worker-patience takes a number of seconds, at least 2; got {options.worker_patience}")
    if not 10 <= options.engine_patience < math.inf:
        parser.error(f"--engine-patience takes a number of seconds, at least 10; got {options.engine_patience}")
    if not 1 <= options.retention < math.inf:
        parser.error(f"--retention takes a number of seconds, at least 1; got {options.retention}")
    if options.url_file is not None:
        try:
            options.url = Path(options.url_file).read_text().strip()
        except OSError as error:
            parser.error(f"--url-file: {error}")
    if not options.url:
        parser.error("--url is required (or --url-file, or set TRACEWIRE_URL): the Redis that clients use")
    folder, name = options.model_folder, options.name
    if folder == "demo":
        folder, name = str(demo_model()), name or "demo"
        # A small model on a small machine: do not reserve the machine for it.
        if options.kv_cache_memory_bytes is None:
            options.kv_cache_memory_bytes = 512 * 1024 * 1024
    options.model = folder
    options.disable_log_stats = not options.log_stats
    try:
        vllm_arguments = AsyncEngineArgs.from_cli_args(options)
        refuse_unsupported(vllm_arguments)
        if getattr(vllm_arguments, "shutdown_timeout", None) == 0:
            # When a SIGTERM goes to all processes at once, EngineCore then finishes what runs, as the adapter does.
            vllm_arguments.shutdown_timeout = max(1, math.ceil(options.drain))
    except UnsupportedSetting as error:
        print(f"tracewire engine: {error}", file=sys.stderr)
        return 2
    try:
        # Before the model is loaded, which takes its time.
        anyio.run(_check_redis, options.url, options.prefix, options.retain_total_bytes > 0)
    except (BusError, ValueError) as error:
        # A ValueError is a URL that is none of a Redis.
        print(f"tracewire engine: {error}", file=sys.stderr)
        return 2
    #: Where HTTP is served, if it is: bound before the model is loaded, which takes its time.
    listener: socket.socket | None = None
    if options.openai is not None:
        try:
            from tracewire_engine.adapter.http_server import bound, parsed

            options.openai_arguments = parsed(options.openai_option, secrets.get(API_KEY) or os.environ.get(API_KEY))
            listener = bound(options.openai)
        except (ValueError, OSError, ImportError) as error:
            print(f"tracewire engine: --openai: {error}", file=sys.stderr)
            return 2
    options.listener = listener
    options.loaded = loaded
    try:
        if vllm_arguments.distributed_executor_backend != "ray":
            return _serve(vllm_arguments, name or Path(folder).name, options)
        from vllm.platforms import current_platform

        devices = vllm_arguments.tensor_parallel_size * vllm_arguments.pipeline_parallel_size
        with joined(options.ray_address, devices, current_platform.ray_device_key or "CPU") as cluster:
            return _serve(vllm_arguments, name or Path(folder).name, options, cluster)
    except ClusterUnavailable as error:
        # The supervisor tries again: a machine of it may have gone for a while.
        print(f"tracewire engine: {error}", file=sys.stderr)
        return 1
    except (ClusterError, UnsupportedSetting) as error:
        print(f"tracewire engine: {error}", file=sys.stderr)
        return 2
    finally:
        if listener is not None:
            listener.close()


async def _check_redis(url: str, prefix: str, counts_bytes: bool) -> None:
    from tracewire_bus.bus import Bus

    try:
        async with Bus.open(url, prefix=prefix) as bus:
            await bus.refuse_eviction()
            if counts_bytes:
                await bus.finished.check()
    except BusUnavailable as error:
        # It may be there when the model is.
        logger.warning("%s", error)


def _serve(vllm_arguments: object, name: str, options: argparse.Namespace, cluster: Cluster | None = None) -> int:
    from vllm.envs import enable_envs_cache
    from vllm.platforms import current_platform

    from tracewire_engine.link.blob_receiver import BlobReceiver
    from tracewire_engine.link.liveness import PulseReceiver
    from tracewire_engine.link.step_link import LinkReceiver

    from .cpu_affinity import keep_off_workers
    from .engine_builder import build_engine, describe

    # Workers of a cluster that is not our own may be anywhere.
    host = None if cluster is None or cluster.own else options.link_host or cluster.node
    with (
        LinkReceiver(host) as link,
        BlobReceiver(link.address, link.guard) as blobs,
        PulseReceiver(blobs.address, link.guard, options.worker_patience) as pulse,
    ):
        # Built on the main thread, which the kernel ties the engine's processes to.
        model = build_engine(
            vllm_arguments,
            pulse.address,
            options.tap,
            check_collect=options.check_collect,
            block_timeout_s=options.block_timeout,
            blob_threshold=options.blob_threshold,
            kept_bytes=options.kept_kv_bytes,
            cluster=cluster,
            worker_patience_s=options.worker_patience,
            loras=dict(one.split("=", 1) for one in options.lora),
        )
        options.loaded()
        pulse.on_loss(partial(_give_up, model))
        try:
            if current_platform.is_cpu() and (rest := keep_off_workers()):
                logger.info("everything but the workers runs on cores %s", sorted(rest))
            # Its settings are asked for with every output.
            enable_envs_cache()
            info = describe(model, name, options.capacity, options.queue_limit)
            settle_memory()
            return anyio.run(partial(_run, model, link, blobs, info, options), backend_options=LOOP)
        finally:
            model.vllm_entrypoint.shutdown()
            model.vllm_entrypoint = None
            # What is exempt from garbage collection at the interpreter's end, Triton's bindings report as leaked.
            gc.unfreeze()


def settle_memory() -> None:
    """Have garbage collections of this process hold its traces up as little as can be."""
    # What has been built by now stays: a collection that walks it all would hold every trace up.
    gc.collect()
    gc.freeze()
    # Little that traces are made of is garbage, and looking through it was a tenth of the adapter's time. A collection
    # of the second generation looks at 40,000 objects at most, which takes some 20 ms on a slow core.
    gc.set_threshold(10_000, 3, 20)
    gc.enable()


def _give_up(model: ServedModel, why: str) -> None:
    """End an engine of which a part is gone: EngineCore's end is what everything else follows from."""
    logger.error("the engine is given up: %s", why)
    for process in model.vllm_entrypoint.engine_core.resources.engine_manager.processes:
        process.kill()


async def _run(model: object, link: object, blobs: object, info: object, options: argparse.Namespace) -> int:
    from tracewire_bus.bus import Bus
    from tracewire_engine.adapter.service import Adapter, Settings
    from tracewire_engine.adapter.vllm_engine import VllmEngine

    engine = VllmEngine(model, link, blobs, options.engine_patience)  # type: ignore[arg-type]
    fault = await _untapped(engine)
    if not fault and options.first_answer:
        fault = await _first_answer(engine, options.first_answer)
    if fault:
        if not engine.lost:
            # It may be anywhere, and hears nothing.
            _give_up(engine.model, "it does not answer")
        print(f"tracewire engine: {fault}", file=sys.stderr)
        # A machine of a cluster may come back; all else would be the same again.
        return 1 if options.distributed_executor_backend == "ray" else 2
    settings = Settings(
        drain_s=options.drain,
        blob_threshold=options.blob_threshold,
        buffer_bytes=options.buffer_bytes,
        memory_patience_s=options.memory_patience,
        retain_events=options.retain_events,
        retain_bytes=options.retain_bytes,
        retain_traces=options.retain_traces,
        retain_total_bytes=options.retain_total_bytes,
        engine_patience_s=options.engine_patience,
    )
    async with AsyncExitStack() as held:
        bus = Bus.open(options.url, prefix=options.prefix, retention_s=options.retention)
        try:
            while not await _open(bus, held):
                if engine.lost:
                    return 1
        except BusError as error:
            print(f"tracewire engine: {error}", file=sys.stderr)
            return 2
        if stranger := await _stranger(bus, info):  # type: ignore[arg-type]
            print(f"tracewire engine: {stranger}", file=sys.stderr)
            return 2
        adapter = Adapter(engine, info, bus, settings)  # type: ignore[arg-type]

        api: HttpApi | None = None
        if options.listener is not None:
            from tracewire_engine.adapter.http_server import HttpApi

            api = await HttpApi.of(
                engine.llm,
                adapter.plain,
                options.listener,
                model=info.model,  # type: ignore[attr-defined]
                path=info.path,  # type: ignore[attr-defined]
                arguments=options.openai_arguments,
            )
            info.openai = api.url  # type: ignore[attr-defined]

        async def watch_signals() -> None:
            with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
                async for number in signals:
                    logger.info("%s: draining", signal.Signals(number).name)
                    adapter.stop()

        async def tell_of_draining() -> None:
            await adapter.draining.wait()
            # For the supervisor, too: it starts nothing again.
            print(f"{DRAINING}{info.engine}", flush=True)  # type: ignore[attr-defined]

        async def tell_of_serving() -> None:
            await adapter.serving.wait()
            print(f"ready {info.engine}", flush=True)  # type: ignore[attr-defined]

        async with anyio.create_task_group() as group:
            group.start_soon(watch_signals)
            group.start_soon(tell_of_draining)
            if api is not None:
                group.start_soon(api.run)
                group.start_soon(_stop_with, api, adapter)
                logger.info("serving vLLM's OpenAI-compatible API at %s", api.url)
            group.start_soon(tell_of_serving)
            await adapter.run()
            if api is not None:
                await api.drop()
            if not adapter.lost:
                await _tell_held(engine)
            elif not engine.lost:
                _give_up(engine.model, "it does not answer")
            group.cancel_scope.cancel()
    return 1 if adapter.lost else 0


async def _open(bus: Bus, held: AsyncExitStack) -> bool:
    """Open the bus, and hold it open; else whether to try again: the model is loaded, and need not be so again.

    Raises:
        BusError: this Redis cannot be used.
    """
    try:
        await held.enter_async_context(bus)
    except BusUnavailable as error:
        logger.warning("this engine waits for Redis to serve: %s", error)
        await anyio.sleep(_REDIS_S)
        return False
    try:
        await bus.refuse_eviction()
    except BusUnavailable as error:
        logger.warning("%s", error)
    return True


async def _untapped(engine: VllmEngine) -> str:
    """What is wrong with an engine whose CUDA graphs leave interventions out; empty if they do not."""
    from tracewire_engine.adapter.engine_api import EngineLost

    from .engine_builder import versions

    try:
        graphs = await engine.untapped_graphs()
    except EngineLost as error:
        return f"vLLM was lost before its first request: {error}"
    if not graphs:
        return ""
    return (
        f"--tap: vLLM {versions().vllm} captured {len(graphs)} CUDA graphs without a place for taps, so that no "
        f"intervention would run in them (the first is {graphs[0]}); use a version of vLLM that Tracewire names as "
        "supported, or leave --tap out"
    )


async def _first_answer(engine: VllmEngine, patience_s: float) -> str:
    """What is wrong with an engine that does not answer its first request; empty if it does."""
    from tracewire_engine.adapter.engine_api import EngineLost

    try:
        with anyio.fail_after(patience_s):
            await engine.try_out()
    except EngineLost:
        return "vLLM died of its first request, so it cannot run this model here as it is set up; its error is above"
    except TimeoutError:
        return f"vLLM did not answer its first request within {patience_s:g} s (--first-answer)"
    return ""


async def _stop_with(api: HttpApi, adapter: Adapter) -> None:
    """Take no HTTP requests any more when the adapter takes no traces."""
    await adapter.stopping.wait()
    api.stop()


async def _tell_held(engine: VllmEngine) -> None:
    """Say what an engine without traces still holds: what is left after a moment is a leak."""
    held: dict[str, int] = {}
    try:
        with anyio.move_on_after(5):
            # What ended last is forgotten in one more step.
            while any((held := await engine.held()).values()):  # noqa: ASYNC110
                await anyio.sleep(0.05)
            logger.info("leaving: nothing tracked, all KV blocks free")
            return
    except Exception as error:  # told to stop at the same time
        logger.info("leaving: what vLLM still holds is not known: %s", error)
        return
    logger.warning("leaving with something left of requests: %s", held)


async def _stranger(bus: Bus, info: EngineInfo) -> str:
    """Why it must not serve beside the engines that serve this model's name now: one message, or none."""
    try:
        engines = await bus.engines()
    except BusError as error:
        logger.warning("which other engines serve %s is not known: %s", info.model, error)
        return ""
    for other in engines:
        if other.model != info.model or other.engine == info.engine or other.state in LEAVING:
            continue
        if why := disagreements(info, other):
            return (
                f"engine {other.engine} serves another model as {info.model!r} (this one has {'; '.join(why)}): "
                "give this one another --name, or drain that one first"
            )
        if differs := differences([info, other]):
            logger.warning(
                "engine %s serves %s too, and differs in: %s; a block must fit both",
                *(other.engine, info.model, ", ".join(differs)),
            )
    return ""


if __name__ == "__main__":
    sys.exit(main())
