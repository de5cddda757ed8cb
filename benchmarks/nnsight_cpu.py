"""nnsight's own worker on a CPU, for benchmarks: nnsight's published code, over vLLM's CPU worker and runner.

nnsight's worker refuses any runner but vLLM's GPU runner, by an exact check of its class. Everything else of nnsight's
runs on a CPU as it is. Only that check is left out here, and the platform's classes are put beneath nnsight's.
"""

from __future__ import annotations

from nnsight.modeling.vllm import VLLM
from nnsight.modeling.vllm.model_runners.GPUModelRunner import NNsightGPUModelRunner
from nnsight.modeling.vllm.workers.GPUWorker import NNsightGPUWorker
from vllm.v1.worker.cpu_model_runner import CPUModelRunner
from vllm.v1.worker.cpu_worker import CPUWorker

__all__ = ["CpuVLLM", "NNsightCPUModelRunner", "NNsightCPUWorker"]


class NNsightCPUModelRunner(NNsightGPUModelRunner, CPUModelRunner):
    """nnsight's runner over vLLM's CPU runner."""


class NNsightCPUWorker(NNsightGPUWorker, CPUWorker):
    """nnsight's worker over vLLM's CPU worker."""

    def init_device(self) -> None:
        """As nnsight's, for the CPU runner.

        Raises:
            NotImplementedError: vLLM built another runner.
        """
        super(NNsightGPUWorker, self).init_device()
        if type(self.model_runner) is not CPUModelRunner:
            raise NotImplementedError(f"vLLM built {type(self.model_runner).__name__} instead of its CPU runner")
        self.model_runner.__class__ = NNsightCPUModelRunner


class CpuVLLM(VLLM):
    """nnsight's model, whose workers are those of this module."""

    _WORKER_CLS = "benchmarks.nnsight_cpu.NNsightCPUWorker"
