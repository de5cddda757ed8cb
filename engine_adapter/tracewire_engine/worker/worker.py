"""The worker class that vLLM starts in its own processes. It extends vLLM's worker for the platform.

vLLM's worker builds its model runner in `init_device`. The class of that runner is then replaced by one that also runs
blocks and reports. The replacement adds no state to the constructor, so nothing of vLLM's own start needs a patch.
"""

from __future__ import annotations

import gc
import socket
from typing import Any

import torch
from vllm.platforms import current_platform
from vllm.v1.executor.multiproc_executor import WorkerProc

from tracewire_engine.link.addresses import is_remote
from tracewire_engine.link.liveness import HeartbeatSender
from tracewire_engine.protocol.keys import LINK_ADDRESS, WORKER_PATIENCE
from tracewire_engine.worker.blocks import process_state

from .runner import TracewireRunner

__all__ = ["TracewireWorker"]

if current_platform.is_cpu():
    from vllm.v1.worker.cpu_worker import CPUWorker as _PlatformWorker
else:
    from vllm.v1.worker.gpu_worker import Worker as _PlatformWorker

#: vLLM's classes of its first model runner, and those of its second.
_FIRST = {"vllm.v1.worker.gpu_model_runner.GPUModelRunner", "vllm.v1.worker.cpu_model_runner.CPUModelRunner"}
_SECOND = {"vllm.v1.worker.gpu.model_runner.GPUModelRunner", "vllm.v1.worker.cpu.model_runner.CPUModelRunner"}


def tracing(kind: type) -> type[TracewireRunner]:
    """Make the class that extends one of vLLM's classes of model runners by Tracewire's core.

    Raises:
        NotImplementedError: blocks cannot run on a runner of this class, such as another platform's.
    """
    name = f"{kind.__module__}.{kind.__qualname__}"
    # Each module is imported only where it is used: it imports its runner, which another version of vLLM may not have.
    if name in _FIRST:
        from .first_runner import FirstRunner as Runner
    elif name in _SECOND:
        from .second_runner import SecondRunner as Runner
    else:
        raise NotImplementedError(
            f"Tracewire runs blocks on vLLM's {', '.join(sorted(_FIRST | _SECOND))}, but this worker built {name}"
        )
    made: type[TracewireRunner] = type("Runner", (Runner, kind), {})
    return made


class TracewireWorker(_PlatformWorker):
    """vLLM's worker for the platform, with Tracewire's model runner."""

    def init_device(self) -> None:
        """Build the platform's runner, and turn it into Tracewire's.

        Raises:
            NotImplementedError: vLLM built a runner on which blocks cannot run.
        """
        if current_platform.is_cpu() and torch.cpu._is_amx_tile_supported():
            # Linux kills a process that uses AMX's tiles without having asked for them. vLLM's attention does not ask.
            # It relies on an earlier matrix product that did, and under tensor parallelism there may be none.
            torch.cpu._init_amx()
        super().init_device()
        self.model_runner.__class__ = tracing(type(self.model_runner))

    def execute_model(self, scheduler_output: Any) -> Any:
        """Run a step."""
        runner = self.model_runner
        if runner.tracewire_serving:
            runner.begin_ahead(scheduler_output)
        return super().execute_model(scheduler_output)

    def compile_or_warm_up_model(self) -> Any:
        """Warm up, and exempt all objects that exist by then from garbage collection, which stalls all requests.

        vLLM does so for EngineCore, but not for a worker in a process of its own.
        """
        result = super().compile_or_warm_up_model()
        self.model_runner.tracewire_deferred.attach(WorkerProc)
        if self.model_runner.tracewire_hosts is not None:
            self.model_runner.tracewire_hosts.wait_ready()
        self.model_runner.tracewire_serving = True
        process_state.keep()
        gc.collect()
        gc.freeze()
        config = self.vllm_config.additional_config
        address = config.get(LINK_ADDRESS, "")
        if is_remote(address):
            name = f"rank {self.rank} on {socket.gethostname()}"
            self.tracewire_pulse = HeartbeatSender(address, name, config[WORKER_PATIENCE])
        return result

    def tracewire_steer(self, changes: bytes) -> None:
        """Change live parameters from the next step on. The adapter calls this by `collective_rpc`, as all below."""
        self.model_runner.tracewire_steer(changes)

    def tracewire_result(self, generated: bytes) -> None:
        """Take the adapter's message about an ended request: its tokens, and vLLM's output for `tracer.result`."""
        self.model_runner.tracewire_result(generated)

    def tracewire_untapped(self) -> list[str]:
        """Descriptions of CUDA graphs without a tap, in which no intervention would run."""
        found: list[str] = self.model_runner.tracewire_untapped()
        return found

    def tracewire_request_count(self) -> int:
        """How many requests the runner holds state for; 0 on an idle engine."""
        count: int = self.model_runner.tracewire_request_count()
        return count

    def tracewire_input(self, name: str, offset: int, piece: bytes) -> None:
        """Keep a piece of a large variable, on a machine that cannot see the adapter's files (`RemoteInputs.write`)."""
        self.model_runner.tracewire_inputs.write(name, offset, piece)

    def tracewire_drop_input(self, name: str) -> None:
        """Drop a large variable that `tracewire_input` brought."""
        self.model_runner.tracewire_inputs.drop(name)
