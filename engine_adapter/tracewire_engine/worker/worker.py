"""The worker class that vLLM starts in its own processes, over the worker of the platform at hand.

vLLM's worker builds its model runner in `init_device`; the runner's class is then swapped for one that also interleaves
and reports. The swap adds behaviour and no constructor state, so nothing of vLLM's own start is patched.
"""

from __future__ import annotations

import gc
import socket
from typing import Any

import torch
from nnsight.modeling.vllm.workers.GPUWorker import NNsightGPUWorker
from vllm.platforms import current_platform
from vllm.v1.executor.multiproc_executor import WorkerProc

from tracewire_engine.link.addresses import is_remote
from tracewire_engine.link.liveness import HeartbeatSender
from tracewire_engine.protocol.keys import LINK_ADDRESS, WORKER_PATIENCE
from tracewire_engine.worker.parallel.stage_exchange import PipelineMixin

from .runner import TracewireRunner

__all__ = ["TracewireWorker"]

if current_platform.is_cpu():
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner as _PlatformRunner
    from vllm.v1.worker.cpu_worker import CPUWorker as _PlatformWorker
else:
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner as _PlatformRunner
    from vllm.v1.worker.gpu_worker import Worker as _PlatformWorker


class _Runner(TracewireRunner, PipelineMixin, _PlatformRunner):
    """Our runner over the platform's own."""


class TracewireWorker(_PlatformWorker):
    """The platform's vLLM worker with our model runner."""

    def init_device(self) -> None:
        """Build the platform's runner, and make it ours.

        Raises:
            NotImplementedError: vLLM built a runner that cannot interleave (its V2 runner, or another platform's).
        """
        if current_platform.is_cpu() and torch.cpu._is_amx_tile_supported():
            # Linux kills a process that uses AMX's tiles without having asked for them. vLLM's attention does not ask,
            # and relies on a matrix product before it that does: there need not be one, as under tensor parallelism.
            torch.cpu._init_amx()
        super().init_device()
        runner = self.model_runner
        if type(runner) is not _PlatformRunner:
            raise NotImplementedError(
                f"Tracewire runs blocks on vLLM's {_PlatformRunner.__name__}, but this worker built "
                f"{type(runner).__module__}.{type(runner).__name__}. Unset VLLM_USE_V2_MODEL_RUNNER."
            )
        runner.__class__ = _Runner

    def compile_or_warm_up_model(self) -> Any:
        """Warm up, and leave what is there by then out of garbage collections, in which all requests would wait.

        vLLM does so for EngineCore, and not for a worker in a process of its own.
        """
        result = super().compile_or_warm_up_model()
        self.model_runner.tracewire_deferred.attach(WorkerProc)
        gc.collect()
        gc.freeze()
        config = self.vllm_config.additional_config
        address = config.get(LINK_ADDRESS, "")
        if is_remote(address):
            name = f"rank {self.rank} on {socket.gethostname()}"
            self.tracewire_pulse = HeartbeatSender(address, name, config[WORKER_PATIENCE])
        return result

    def tracewire_steer(self, changes: bytes) -> None:
        """Change live parameters from the next step on, by `collective_rpc`."""
        self.model_runner.tracewire_steer(changes)

    def tracewire_result(self, generated: bytes) -> None:
        """Hand a block what its request has put out, by `collective_rpc`."""
        self.model_runner.tracewire_result(generated)

    def tracewire_untapped(self) -> list[str]:
        """CUDA graphs that would leave interventions out, by `collective_rpc`."""
        found: list[str] = self.model_runner.tracewire_untapped()
        return found

    def tracewire_request_count(self) -> int:
        """How many requests the runner holds anything for, by `collective_rpc`."""
        count: int = self.model_runner.tracewire_request_count()
        return count

    def tracewire_input(self, name: str, offset: int, piece: bytes) -> None:
        """Keep a piece of a large variable, by `collective_rpc`; where the adapter's files are out of sight only."""
        self.model_runner.tracewire_inputs.write(name, offset, piece)

    def tracewire_drop_input(self, name: str) -> None:
        """Forget one, by `collective_rpc`."""
        self.model_runner.tracewire_inputs.drop(name)

    #: nnsight's own collect, for comparison with what was streamed.
    collect_nnsight = NNsightGPUWorker.collect_nnsight
