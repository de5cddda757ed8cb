"""`tracewire engine MODEL`: an engine adapter, and a supervisor that starts another one if it dies.

Besides its own options the command takes every option of vLLM's engine (`--max-model-len`, `--tensor-parallel-size`,
...). It logs to standard error. Each time the engine begins to serve, it prints `ready ENGINE` on standard output. On
SIGTERM or SIGINT the engine takes no more traces and exits when the running ones have ended. It does the same when it
is asked to on the bus (`tracewire drain`), and then prints `draining ENGINE`.

Exit statuses: 0 after a drain, 2 if the command refuses its settings. If the engine dies and is not restarted (with
`--restarts 0`, or after repeated failures), the status is that of the last adapter, which is 1 if vLLM died.
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
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, AsyncExitStack, ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NoReturn
from uuid import uuid4

import anyio

from tracewire_bus.domain.fleet import LEAVING_STATES, differences, disagreements
from tracewire_bus.domain.limit_table import parse_limits
from tracewire_bus.logs import configure_logging
from tracewire_bus.owned_folder import MAX_SOCKET_PATH, OwnedFolder
from tracewire_bus.process_memory import settle_memory
from tracewire_bus.transport.errors import BusError, BusUnavailable
from tracewire_engine.protocol.cluster import Cluster

from .adapter_process import LOOP, adapter_settings, check_bulk, exporter_of, open_bus, spans_of
from .chat_options import add_chat_options, chat_options, server_options
from .code_options import check_code, default_blocks, limited_imports
from .early import checked, print_help
from .hub import HubAway, check_hub
from .options import add_options, redis_url
from .parent_death import die_with_parent
from .ray_cluster import ClusterError, ClusterUnavailable, joined
from .sae_options import check_room, described
from .sandbox import SandboxError, sandbox
from .secret import API_KEY, Given, hub_token, others, shown, with_secrets
from .shared_files import shared_files
from .supervisor import DRAINING, SUPERVISOR_PID, supervise

if TYPE_CHECKING:
    from tracewire_bus.bus import Bus
    from tracewire_bus.wire.messages import EngineInfo
    from tracewire_engine.adapter.http_server import HttpApi
    from tracewire_engine.adapter.service import Adapter
    from tracewire_engine.adapter.settings import Settings
    from tracewire_engine.adapter.vllm_engine import ServedModel, VllmEngine

    from .adapter_group import AdapterGroup
    from .engine_builder import WorkerSettings

__all__ = ["demo_model", "main"]

logger = logging.getLogger("tracewire")

#: How long an adapter may take to exit, in seconds, in addition to draining. Then the supervisor kills it.
_GRACE_S = 30.0


def demo_model() -> Path:
    """The folder of the model that ships with the project, in the installed package or in a checkout.

    Raises:
        FileNotFoundError: neither has it.
    """
    here = Path(__file__).resolve().parents[1]
    for folder in (here / "demo_model", here.parents[1] / "examples" / "demo_model" / "model"):
        if (folder / "config.json").is_file():
            return folder
    raise FileNotFoundError("the demo model is not installed; give a model's folder instead of 'demo'")


def main(arguments: list[str] | None = None) -> int:
    """Run the command. Returns the exit status."""
    if print_help(sys.argv[1:] if arguments is None else arguments):
        return 0
    given = Given.take(sys.argv[1:] if arguments is None else arguments)
    arguments = given.arguments
    supervisor = os.environ.pop(SUPERVISOR_PID, "")
    if supervisor:
        # If the supervisor is killed, the engine must end too.
        die_with_parent(int(supervisor))
        with ExitStack() as loading:
            loading.enter_context(hub_token(given.secrets))
            return _adapter(arguments, given.secrets, loading.close)
    # Checked here, before any process imports vLLM.
    options = checked(arguments, given.secrets)
    configure_logging(options.log_format)
    try:
        check_hub(arguments)
    except HubAway as error:
        # The same command can succeed later.
        return _refuse(error, 1)
    # EngineCore may drain for as long again, after the adapter.
    grace_s = 2 * max(0.0, options.drain) + _GRACE_S
    command = [sys.executable, "-m", "tracewire_engine.launch", *shown(arguments)]
    return supervise(command, options.restarts, grace_s, given)


def _adapter(
    arguments: list[str], secrets: Mapping[str, str] = MappingProxyType({}), loaded: Callable[[], None] = lambda: None
) -> int:
    """Run the adapter until it is told to stop. Returns the exit status.

    Args:
        arguments: of the command.
        secrets: of the command, by environment variable.
        loaded: is called when the model has loaded.
    """
    # vLLM reads these when it is first imported.
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    # Faster startup: garbage collection, which takes a sixth of the time of the imports, is off until the model loaded.
    gc.disable()
    from .adapter_group import default_count
    from .engine_builder import UnsupportedSetting

    options = _parsed(arguments, secrets)
    configure_logging(options.log_format)
    options.loaded, options.secrets = partial(_loaded, loaded, secrets), dict(secrets)
    if withheld := sorted(others(secrets)):
        logger.info("kept from the processes that run blocks (--keep-env): %s", ", ".join(withheld))
    try:
        vllm_arguments = _vllm_arguments(options)
        _check_autoencoders(options, vllm_arguments.tensor_parallel_size)
        options.adapters = options.adapters or default_count(vllm_arguments, http=options.openai is not None)
        # Checked first, because loading the model takes long.
        anyio.run(_check_redis, options.url, options.prefix, options.retain_total_bytes > 0)
        options.chats = chat_options(options)
        options.listener = _listener(options, secrets)
        check_code(options)
        options.blocks_reason = "as the operator has set it"
        if options.blocks is None:
            options.blocks, options.blocks_reason = default_blocks(options)
        with with_secrets(secrets):
            # An archive's credentials, and the headers of a collector of spans.
            check_bulk(options)
            options.exporter = exporter_of(options)
    except (UnsupportedSetting, BusError, ValueError) as error:
        # A ValueError is about the Redis URL, chats, tracing, or the address or an option of the HTTP server.
        return _refuse(error)
    try:
        if vllm_arguments.distributed_executor_backend != "ray":
            with _contained(options) as memory:
                return _serve(vllm_arguments, options, memory=memory)
        from vllm.platforms import current_platform

        devices = vllm_arguments.tensor_parallel_size * vllm_arguments.pipeline_parallel_size
        with joined(options.ray_address, devices, current_platform.ray_device_key or "CPU") as cluster:
            return _serve(vllm_arguments, options, cluster)
    except ClusterUnavailable as error:
        # With status 1 the supervisor tries again: a machine of the cluster may be away for a while.
        return _refuse(error, 1)
    except (ClusterError, UnsupportedSetting, SandboxError) as error:
        return _refuse(error)
    finally:
        if options.listener is not None:
            options.listener.close()


def _check_autoencoders(options: argparse.Namespace, ranks: int) -> None:
    """Check that the engine's autoencoders have room.

    Raises:
        ValueError: one has none.
    """
    check_room(options.autoencoders, ranks, options.sae_bytes, options.sae_host_bytes, options.sae_split_bytes)


def _sandbox(options: argparse.Namespace) -> AbstractContextManager[object]:
    """The sandbox of the processes that run blocks, or none, by the options."""
    if not options.sandbox:
        return nullcontext()
    return sandbox(hidden=[Path(one) for one in (options.url_file, options.engine_key) if one])


@contextmanager
def _contained(options: argparse.Namespace) -> Iterator[OwnedFolder]:
    """The sandbox, and the folder that names the shared memory of the engine.

    The folder lies outside the sandbox, whose processes could name other files in it.
    """
    with OwnedFolder("tracewire-memory-") as memory, _sandbox(options):
        yield memory


def _loaded(loaded: Callable[[], None], secrets: Mapping[str, str]) -> None:
    """The model has loaded, so the workers have started: set other programs' secrets for the adapter alone."""
    loaded()
    os.environ.update(others(secrets))


def _refuse(error: object, status: int = 2) -> int:
    """Print why this engine does not serve, and return the exit status."""
    print(f"tracewire engine: {error}", file=sys.stderr)
    return status


def _parsed(arguments: list[str], secrets: Mapping[str, str]) -> argparse.Namespace:
    """Parse Tracewire's options and vLLM's. Exits the process with status 2 if one is wrong."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    class OneLine(FlexibleArgumentParser):
        """A parser whose errors are one line: the usage has hundreds of options."""

        def error(self, message: str) -> NoReturn:
            print(f"{self.prog}: error: {message} (see {self.prog} --help-vllm)", file=sys.stderr)
            sys.exit(2)

    parser = OneLine(prog="tracewire engine", description="Serve a model to the bus.")
    add_options(parser.add_argument_group("tracewire"), secrets)
    add_chat_options(parser.add_argument_group("chats"))
    AsyncEngineArgs.add_cli_args(parser)
    # With this policy vLLM's scheduler respects a trace's priority. The operator can choose another one.
    parser.set_defaults(scheduling_policy="priority")
    options: argparse.Namespace = parser.parse_args(arguments)
    if options.log_format == "json":
        # vLLM's processes read it as they import vLLM.
        os.environ.setdefault("VLLM_LOGGING_CONFIG_PATH", str(Path(__file__).with_name("json_logging.json")))
    try:
        options.url = redis_url(options)
        parse_limits(options.limit)
        options.autoencoders = described(options.sae)
    except ValueError as error:
        parser.error(str(error))
    options.model = options.model_folder
    if options.model == "demo":
        options.model, options.name = str(demo_model()), options.name or "demo"
        # The demo model is small. vLLM's default would reserve most of the machine's memory for its KV cache.
        if options.kv_cache_memory_bytes is None:
            options.kv_cache_memory_bytes = 512 * 1024 * 1024
    options.name = options.name or Path(options.model).name
    # vLLM makes its spans of its statistics. At our level of logging it logs them only when asked to.
    options.disable_log_stats = not (options.log_stats or options.otlp_traces_endpoint)
    return options


def _vllm_arguments(options: argparse.Namespace) -> Any:
    """vLLM's engine arguments of the options.

    Raises:
        UnsupportedSetting: Tracewire does not support one of them.
    """
    from vllm.engine.arg_utils import AsyncEngineArgs

    from .engine_builder import UnsupportedSetting, choose_runner, refuse_unsupported

    arguments = AsyncEngineArgs.from_cli_args(options)
    choose_runner(options.model_runner, arguments)
    refuse_unsupported(arguments)
    if getattr(options, "sandbox", False) and arguments.distributed_executor_backend == "ray":
        raise UnsupportedSetting("--sandbox is not supported with Ray, which starts the workers itself")
    if not getattr(arguments, "allowed_media_domains", None):
        # Without a domain vLLM would fetch any URL that a client names. No host has this name.
        arguments.allowed_media_domains = ["no domain is allowed (--allowed-media-domains)"]
    if getattr(arguments, "shutdown_timeout", None) == 0:
        # If SIGTERM goes to all processes at once, EngineCore then lets running requests end, as the adapter does.
        arguments.shutdown_timeout = max(1, math.ceil(options.drain))
    return arguments


def _listener(options: argparse.Namespace, secrets: Mapping[str, str]) -> socket.socket | None:
    """Bind the socket of the HTTP API, before the model is loaded. `None` without `--openai`.

    Raises:
        ValueError: the address of `--openai`, or an option of its server, is wrong or cannot be used.
    """
    if options.openai is None:
        return None
    try:
        from tracewire_engine.adapter.http_server import bound, parsed

        given = [*server_options(options), *options.openai_option]
        key = secrets.get(API_KEY) or os.environ.get(API_KEY)
        options.openai_arguments = parsed(given, key, options.openai)
        return bound(options.openai)
    except (ValueError, OSError, ImportError) as error:
        raise ValueError(f"--openai: {error}") from error


async def _check_redis(url: str, prefix: str, counts_bytes: bool) -> None:
    from tracewire_bus.bus import Bus

    try:
        async with Bus.open(url, prefix=prefix) as bus:
            await bus.memory.refuse_eviction()
            if counts_bytes:
                await bus.finished.check()
    except BusUnavailable as error:
        # Not an error yet: Redis may answer when the model has loaded.
        logger.warning("%s", error)


def _worker_settings(options: argparse.Namespace) -> WorkerSettings:
    from .engine_builder import WorkerSettings

    return WorkerSettings(
        check_collect=options.check_collect,
        block_timeout_s=options.block_timeout,
        blocks=options.blocks,
        block_step_s=options.block_step_ms / 1000,
        blob_threshold=options.blob_threshold,
        kept_bytes=options.kept_kv_bytes,
        worker_patience_s=options.worker_patience,
        model_runner=options.model_runner,
        permit_key=options.permit_key,
        code_imports=sorted(limited_imports(options)),
        adapters=options.adapters,
        saes=dict(options.sae),
        sae_bytes=options.sae_bytes,
        sae_host_bytes=options.sae_host_bytes,
        sae_split_bytes=options.sae_split_bytes,
    )


def _serve(
    vllm_arguments: Any,
    options: argparse.Namespace,
    cluster: Cluster | None = None,
    memory: OwnedFolder | None = None,
) -> int:
    from vllm.envs import enable_envs_cache
    from vllm.platforms import current_platform

    from tracewire_engine.link.blob_receiver import BlobReceiver
    from tracewire_engine.link.liveness import HeartbeatReceiver
    from tracewire_engine.link.step_link import LinkReceiver

    from . import beside
    from .adapter_group import AdapterGroup, front_ends
    from .cpu_affinity import keep_off_workers
    from .engine_builder import build_engine, describe

    # The workers of a cluster that this engine did not start may be on any machine.
    host = None if cluster is None or cluster.own else options.link_host or cluster.node
    with (
        LinkReceiver(host) as link,
        BlobReceiver(link.address, link.guard) as blobs,
        HeartbeatReceiver(blobs.address, link.guard, options.worker_patience) as pulse,
        AdapterGroup(beside.main) as others,
    ):
        if cluster is None:
            _sockets_below(link.folder)
        # Built on the main thread, because the kernel ends the engine's processes with the thread that started them.
        settings = _worker_settings(options)
        with front_ends(link.address, options.adapters, partial(others.start, link.address, options)):
            model = build_engine(
                *(vllm_arguments, pulse.address, options.tap, settings), loras=dict(options.lora), cluster=cluster
            )
        options.loaded()
        if memory is not None:
            memory.take_along(shared_files())
        pulse.on_loss(partial(_give_up, model))
        try:
            if current_platform.is_cpu() and (rest := keep_off_workers()):
                logger.info("the engine's processes other than the workers run on cores %s", sorted(rest))
            # vLLM reads its environment variables with every output; the cache makes that cheap.
            enable_envs_cache()
            info = others.loaded(model, describe(model, options.name, options.capacity, options.queue_limit))
            settle_memory()
            return anyio.run(partial(_run, model, link, blobs, info, options, others), backend_options=LOOP)
        finally:
            others.end()
            model.vllm_entrypoint.shutdown()
            model.vllm_entrypoint = None


def _sockets_below(folder: Path) -> None:
    """Have vLLM make its unix sockets in this folder, so that they go with it, also if the engine is killed.

    Does nothing if their paths would be too long there, or if the operator has named another folder.
    """
    if len(os.fsencode(folder / str(uuid4()))) < MAX_SOCKET_PATH:
        os.environ.setdefault("VLLM_RPC_BASE_PATH", str(folder))


def _give_up(model: ServedModel, why: str) -> None:
    """Kill EngineCore of an engine that has lost a part. The engine's other processes end after it."""
    logger.error("ending the engine: %s", why)
    for process in model.vllm_entrypoint.engine_core.resources.engine_manager.processes:
        process.kill()


async def _run(
    model: Any, link: Any, blobs: Any, info: EngineInfo, options: argparse.Namespace, others: AdapterGroup
) -> int:
    from tracewire_bus.bus import Bus
    from tracewire_engine.adapter.service import Adapter
    from tracewire_engine.adapter.vllm_engine import VllmEngine

    try:
        most = parse_limits(options.limit).prompt_tokens
        engine = VllmEngine(model, link, blobs, options.engine_patience, options.chats, most, 0)
    except TypeError as error:
        return _refuse(error)
    fault = await _untapped(engine)
    if not fault and options.first_answer:
        fault = await _first_answer(engine, options.first_answer)
    if fault:
        if not engine.lost:
            # The engine hangs, so it cannot be asked to shut down.
            _give_up(engine.model, "it does not answer")
        # In a cluster another try may help, since a machine may come back (1). Elsewhere it would fail again (2).
        return _refuse(fault, 1 if options.distributed_executor_backend == "ray" else 2)
    async with AsyncExitStack() as held:
        bus = Bus.open(options.url, prefix=options.prefix, retention_s=options.retention)
        try:
            while not await open_bus(bus, held):
                if engine.lost:
                    return 1
        except BusError as error:
            return _refuse(error)
        settings = adapter_settings(options, 0, options.adapters, spans_of(options, info, held))
        engine.permit = settings.code.permit
        _say(settings, options)
        adapter = Adapter(engine, info, bus, settings)
        # Now `info` has what the settings say, too.
        if stranger := await _stranger(bus, info):
            return _refuse(stranger)
        api = await _http_api(engine, adapter, info, options)
        async with anyio.create_task_group() as group:
            group.start_soon(_stop_on_signals, adapter)
            group.start_soon(_print_when, adapter.draining, f"{DRAINING}{info.engine}")
            if api is not None:
                group.start_soon(api.run)
                group.start_soon(_stop_with, api, adapter)
                logger.info("serving vLLM's OpenAI-compatible API at %s", api.url)
            group.start_soon(_print_ready, adapter, others, f"ready {info.engine}")
            group.start_soon(others.run, adapter)
            await adapter.run()
            await others.wait_ended(options.drain)
            if api is not None:
                await api.drop()
            if not adapter.lost:
                await _log_leftovers(engine)
            elif not engine.lost:
                _give_up(engine.model, "it does not answer")
            group.cancel_scope.cancel()
    return 1 if adapter.lost else 0


def _say(settings: Settings, options: argparse.Namespace) -> None:
    """Log whose blocks the engine runs and where, and whose orders it obeys."""
    code, identity = settings.code, settings.identity
    level = logging.WARNING if code.code == "any" else logging.INFO
    logger.log(level, "whose code this engine runs: %s (%s)", code.code, code.reason)
    if code.code != "none":
        where = "processes of their own" if options.blocks == "host" else "vLLM's worker"
        logger.log(level, "blocks run in %s: --blocks %s (%s)", where, options.blocks, options.blocks_reason)
    if identity.keyring is None:
        logger.info("no --keyring: everybody who can write to this Redis may submit, steer, install edits and drain")
    else:
        unsigned = "accepted" if identity.unsigned else "refused"
        logger.info("keys of %s; what no key has signed is %s", identity.keyring.path, unsigned)


async def _http_api(
    engine: VllmEngine, adapter: Adapter, info: EngineInfo, options: argparse.Namespace
) -> HttpApi | None:
    """Make vLLM's HTTP server on this engine, and set its URL in `info`. `None` without `--openai`."""
    if options.listener is None:
        return None
    from tracewire_engine.adapter.http_server import HttpApi

    api = await HttpApi.of(
        *(engine.llm, adapter.plain, options.listener),
        model=info.model,
        path=info.path,
        arguments=options.openai_arguments,
        fence=_fence(adapter, options),
    )
    info.openai = api.url
    return api


def _fence(adapter: Adapter, options: argparse.Namespace) -> dict[str, Any]:
    """The limits of the HTTP API by the options."""
    from tracewire_engine.adapter.http_fence import ROUTES

    limits = parse_limits(options.limit)
    return {
        "routes": (*ROUTES, *options.openai_route),
        "body_bytes": limits.http_body_bytes,
        # The other half of the places is for traces.
        "requests": limits.http_requests or max(1, options.capacity // 2),
        "reached": adapter.note_limit,
    }


async def _stop_on_signals(adapter: Adapter) -> None:
    with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
        async for number in signals:
            logger.info("%s: draining", signal.Signals(number).name)
            adapter.stop()


async def _print_ready(adapter: Adapter, others: AdapterGroup, line: str) -> None:
    """Print the line when all adapters of the engine serve."""
    await adapter.serving.wait()
    await others.wait_serving()
    print(line, flush=True)


async def _print_when(event: anyio.Event, line: str) -> None:
    """When an event is set, print a line, which the operator and the supervisor read."""
    await event.wait()
    print(line, flush=True)


async def _untapped(engine: VllmEngine) -> str:
    """An error message if vLLM captured CUDA graphs without taps, in which no intervention would run; else `""`."""
    from tracewire_engine.adapter.engine_api import EngineLost

    from .engine_builder import versions

    try:
        graphs = await engine.untapped_graphs()
    except EngineLost as error:
        return f"vLLM died before its first request: {error}"
    if not graphs:
        return ""
    return (
        f"--tap: vLLM {versions().vllm} captured {len(graphs)} CUDA graphs without taps, so no intervention would run "
        f"in them (the first is {graphs[0]}); use a version of vLLM that Tracewire's documentation lists as supported, "
        "or leave --tap out"
    )


async def _first_answer(engine: VllmEngine, patience_s: float) -> str:
    """Run a trial request. Returns an error message if vLLM does not answer it; else `""`."""
    from tracewire_engine.adapter.engine_api import EngineLost

    try:
        with anyio.fail_after(patience_s):
            await engine.try_out()
    except EngineLost:
        return "vLLM died at its first request, so it cannot run this model with these settings; its error is above"
    except TimeoutError:
        return f"vLLM did not answer its first request within {patience_s:g} s (--first-answer)"
    return ""


async def _stop_with(api: HttpApi, adapter: Adapter) -> None:
    """Stop taking HTTP requests when the adapter stops taking traces."""
    await adapter.stopping.wait()
    api.stop()


async def _log_leftovers(engine: VllmEngine) -> None:
    """Log what an engine without traces still holds. Anything left after a moment is a leak."""
    held: dict[str, int] = {}
    try:
        with anyio.move_on_after(5):
            # The workers forget the last ended request in one more step.
            while any((held := await engine.leftovers()).values()):  # noqa: ASYNC110
                await anyio.sleep(0.05)
            logger.info("exiting: vLLM holds no request, and all KV blocks are free")
            return
    except Exception as error:  # vLLM was stopped at the same time
        logger.info("exiting: could not ask vLLM for requests that it still holds: %s", error)
        return
    logger.warning("exiting although vLLM still holds state of requests: %s", held)


async def _stranger(bus: Bus, info: EngineInfo) -> str:
    """Why this engine must not serve beside the engines that serve the same model name: an error message, or `""`.

    Differences that are no reason are logged.
    """
    try:
        engines = await bus.registry.list()
    except BusError as error:
        logger.warning("could not find out which other engines serve %s: %s", info.model, error)
        return ""
    for other in engines:
        own = other.engine == info.engine or other.engine.startswith(f"{info.engine}.")
        if other.model != info.model or own or other.state in LEAVING_STATES:
            continue
        if why := disagreements(info, other):
            return (
                f"engine {other.engine} serves another model as {info.model!r} (this engine has {'; '.join(why)}): "
                "give this engine another --name, or drain that one first"
            )
        if differs := differences([info, other]):
            logger.warning(
                "engine %s serves %s too, but differs in: %s; blocks must work on both engines",
                *(other.engine, info.model, ", ".join(differs)),
            )
    return ""
