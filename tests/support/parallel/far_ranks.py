"""One of two ranks' collectives, in a process of its own, which is told its rank, the store, its address, its node."""

from __future__ import annotations

import os
import sys

import torch
from vllm.config import ParallelConfig, VllmConfig, set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.platforms import current_platform

from tracewire_engine.core.ray_executor import _card_of, _tell_nodes_apart


def main(rank: int, store: str, address: str, node: str) -> None:
    """Print how the ranks talk, and what came of a sum and a gathering."""
    os.environ["GLOO_SOCKET_IFNAME"] = _card_of(address) or ""
    # As vLLM's CPU worker has it: the same on all machines.
    os.environ["VLLM_DIST_IDENT"] = store.rpartition(":")[2]
    _tell_nodes_apart(node)
    # Its shared memory is in there.
    current_platform.import_kernels()
    parallel = ParallelConfig(tensor_parallel_size=2, distributed_executor_backend="mp")
    with set_current_vllm_config(VllmConfig(parallel_config=parallel)):
        parallel_state.init_distributed_environment(2, rank, store, 0, "gloo")
        parallel_state.initialize_model_parallel(2)
        group = parallel_state.get_tp_group()
        total = group.all_reduce(torch.full((2,), rank + 1.0)).tolist()
        gathered = group.all_gather(torch.full((1, 2), float(rank)), 0).tolist()
        module = group.device_communicator.dist_module
        print("said", "gloo" if module is torch.distributed else "memory", total, gathered, flush=True)
        parallel_state.get_world_group().barrier()


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
