"""Several adapters for one engine: each has its own front end of vLLM, and all share EngineCore and the workers.

One adapter is one process, whose event loop handles the outputs of all its requests. At tens of thousands of tokens a
second that is more than one core does. With `--adapters N`, adapter 0 starts the engine as usual, and N - 1 more
processes beside it. vLLM lets several front ends share one EngineCore, which answers each request to the front end that
sent it. On the bus, each adapter is an engine with its own name and its share of the capacity, so the queue spreads
traces over the adapters.

The adapters live and end together. Adapter 0 tells the others over a pipe when to stop. If an adapter dies, adapter 0
gives the engine up, and the supervisor starts all of them again.
"""

from __future__ import annotations

import logging
import math
import multiprocessing
import os
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any, Final, Self
from unittest import mock

import anyio
import msgspec

from tracewire_bus.wire.messages import EngineInfo
from tracewire_engine.adapter.service import Adapter

from .sandbox import outside

__all__ = [
    "DRAINING",
    "SERVING",
    "AdapterGroup",
    "Beside",
    "Loaded",
    "Model",
    "core_sockets",
    "default_count",
    "follow",
    "front_ends",
    "share",
]

logger = logging.getLogger("tracewire")

#: What adapter 0 tells the others, and what they tell it.
STOP, DRAIN, LOST, SERVING, DRAINING = b"stop", b"drain", b"lost", b"serving", b"draining"

#: How many adapters an engine has by default where it has that many cores.
_ADAPTERS: Final = 3
_CORES: Final = 12

#: How long adapters beside adapter 0 may take to end, in addition to draining, in seconds.
_END_S: Final = 15.0


@dataclass
class Beside:
    """What an adapter beside adapter 0 gets when it starts, while vLLM loads the model.

    Attributes:
        number: the adapter's number.
        count: how many adapters the engine has.
        link: the address of adapter 0's link.
        vllm_config: vLLM's configuration of the engine.
        options: the command's.
    """

    number: int
    count: int
    link: str
    vllm_config: Any
    options: Namespace


@dataclass
class Loaded:
    """What an adapter beside adapter 0 gets when the model has loaded.

    Attributes:
        tokenizer: the model's.
        loras: vLLM's requests for the engine's LoRA adapters.
        taps: the locations that CUDA graphs serve.
        info: the adapter's entry of the registry, encoded.
    """

    tokenizer: Any
    loras: Any
    taps: Any
    info: bytes


@dataclass
class Model:
    """The model as an adapter beside adapter 0 has it (`vllm_engine.ServedModel`)."""

    vllm_entrypoint: Any
    tokenizer: Any
    loras: Any
    taps: Any


def core_sockets(link: str, number: int) -> tuple[str, str]:
    """The addresses at which the front end of an adapter takes EngineCore's messages."""
    folder = link.removeprefix("ipc://").rpartition("/")[0]
    return f"ipc://{folder}/core-in-{number}", f"ipc://{folder}/core-out-{number}"


@contextmanager
def front_ends(link: str, count: int, starting: Callable[[Any], None]) -> Iterator[None]:
    """Have vLLM start EngineCore for `count` front ends. The first is the one that starts it.

    `starting` is called with vLLM's configuration before EngineCore starts.
    """
    from vllm.v1.engine import core_client

    launch: Any = core_client.launch_core_engines

    def launched(vllm_config: Any, executor: Any, log_stats: bool, addresses: Any) -> Any:
        for number in range(1, count):
            taken, given = core_sockets(link, number)
            addresses.inputs.append(taken)
            addresses.outputs.append(given)
        starting(vllm_config)
        return launch(vllm_config, executor, log_stats, addresses)

    with mock.patch.object(core_client, "launch_core_engines", launched) if count > 1 else nullcontext():
        yield


def default_count(arguments: Any, *, http: bool) -> int:
    """How many adapters an engine with these arguments of vLLM's has unless the operator says so.

    Adapter 0 alone serves vLLM's HTTP API, so an engine with that (`http`) has one.
    """
    from vllm.platforms import current_platform

    # Each worker keeps a core busy too.
    workers = arguments.tensor_parallel_size * arguments.pipeline_parallel_size
    cores = len(os.sched_getaffinity(0)) - (workers - 1)
    if http or current_platform.is_cpu() or arguments.distributed_executor_backend == "ray" or cores < _CORES:
        return 1
    return 1 if arguments.create_model_config().is_multimodal_model else _ADAPTERS


def share(info: EngineInfo, number: int, count: int) -> EngineInfo:
    """The registry's entry of one of `count` adapters of an engine, given that of the engine."""
    share = info.capacity // count + (number < info.capacity % count)
    name = f"{info.engine}.{number}" if number else info.engine
    return msgspec.structs.replace(info, engine=name, capacity=max(1, share), openai=info.openai if not number else "")


#: What belongs to adapter 0's process alone.
_OWN: Final = frozenset(("loaded", "exporter", "listener", "openai_arguments"))


@dataclass
class AdapterGroup:
    """The adapters beside adapter 0, as adapter 0 holds them. Each is a process that runs `main`.

    None of them outlives the context: without an engine, they would wait for one for ever.
    """

    main: Callable[[Beside, Connection, int], None]
    processes: list[Any] = field(default_factory=list)
    pipes: list[Connection] = field(default_factory=list)
    serving: list[anyio.Event] = field(default_factory=list)
    gone: list[anyio.Event] = field(default_factory=list)
    #: What the adapters were told, if they were told to stop.
    told: bytes = b""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def start(self, link: str, options: Namespace, vllm_config: Any) -> None:
        """Start the processes. Call it on the main thread: the kernel ends them with the thread that started them.

        Args:
            link: the address of adapter 0's link.
            options: the command's.
            vllm_config: vLLM's configuration of the engine.
        """
        context = multiprocessing.get_context("spawn")
        kept = Namespace(**{name: value for name, value in vars(options).items() if name not in _OWN})
        for number in range(1, options.adapters):
            ours, theirs = context.Pipe()
            beside = Beside(number, options.adapters, link, vllm_config, kept)
            arguments = (beside, theirs, os.getpid())
            process = context.Process(target=self.main, args=arguments, name=f"adapter {number}")
            with outside():
                process.start()
            theirs.close()
            self.processes.append(process)
            self.pipes.append(ours)

    def loaded(self, model: Any, info: EngineInfo) -> EngineInfo:
        """Tell the adapters that the model has loaded. Returns the entry of adapter 0, given that of the engine."""
        count = 1 + len(self.pipes)
        for number, pipe in enumerate(self.pipes, 1):
            entry = msgspec.msgpack.encode(share(info, number, count))
            with suppress(OSError):  # that process has ended, which `run` notices
                pipe.send(Loaded(model.tokenizer, list(model.loras), list(model.taps), entry))
        return share(info, 0, count)

    async def run(self, adapter: Adapter) -> None:
        """Pass on what adapter 0 does to the others, and what they do to adapter 0. Cancel it when adapter 0 ended."""
        self.serving = [anyio.Event() for _ in self.processes]
        self.gone = [anyio.Event() for _ in self.processes]
        async with anyio.create_task_group() as group:
            for number in range(len(self.processes)):
                group.start_soon(self._watch, number, adapter)
            await adapter.stopping.wait()
            self.tell(LOST if adapter.lost else DRAIN if adapter.draining.is_set() else STOP)

    async def wait_serving(self) -> None:
        """Wait until all adapters serve."""
        for event in self.serving:
            await event.wait()

    async def _watch(self, number: int, adapter: Adapter) -> None:
        process, pipe, event = self.processes[number], self.pipes[number], self.serving[number]
        while True:
            await anyio.wait_readable(pipe)
            try:
                message = pipe.recv_bytes()
            except (EOFError, OSError):
                break
            if message == SERVING:
                event.set()
            elif message == DRAINING:
                adapter.drain()
        await anyio.wait_readable(process.sentinel)
        process.join()
        self.gone[number].set()
        if not self.told:
            logger.error("adapter %d of this engine ended with status %s", number + 1, process.exitcode)
            adapter.give_up()

    def tell(self, message: bytes) -> None:
        """Tell all adapters to stop: `STOP`, `DRAIN` or `LOST`."""
        self.told = message
        for pipe in self.pipes:
            with suppress(OSError):  # that process has ended
                pipe.send_bytes(message)

    async def wait_ended(self, drain_s: float) -> None:
        """Wait until the adapters have ended. Those that were told to stop may take `drain_s` seconds for it."""
        limit_s = math.inf if self.told == DRAIN else _END_S + (drain_s if self.told == STOP else 0)
        with anyio.move_on_after(limit_s):
            for event in self.gone:
                await event.wait()

    def end(self) -> None:
        """Kill the processes that have not ended."""
        for process in self.processes:
            if process.is_alive():
                logger.warning("killing %s: its engine has ended", process.name)
                process.kill()
                process.join()


async def follow(adapter: Adapter, pipe: Connection) -> None:
    """Do in an adapter beside adapter 0 what that one says. Never ends by itself."""
    while True:
        await anyio.wait_readable(pipe)
        try:
            message = pipe.recv_bytes()
        except (EOFError, OSError):
            message = LOST
        if message == LOST:
            return adapter.give_up()
        if message == DRAIN:
            adapter.drain()
        else:
            adapter.stop()
