"""Extends vLLM's Ray executor to CPUs, and makes it use the cluster that the adapter chose.

vLLM's `RayExecutorV2` starts a Ray actor for each rank and talks to the actors by vLLM's own message queues, as vLLM's
multiprocess executor does. It refuses CPUs, because vLLM's CPU platform names no Ray device. `TracewireRayExecutor`
also runs on CPUs: an actor takes a bundle of one CPU, and binds its threads to the cores that
`VLLM_CPU_OMP_THREADS_BIND` gives its rank. On a GPU it changes only how the engine joins and leaves the cluster.

The adapter, EngineCore (Ray's driver) and each worker import this module.
"""

from __future__ import annotations

import logging
import os
import socket
from typing import Any

import msgspec
import psutil
import ray
import torch
from vllm.platforms import current_platform
from vllm.v1.executor import ray_executor_v2

from tracewire_engine.protocol.cluster import Cluster, cores_of
from tracewire_engine.protocol.keys import RAY_CLUSTER

__all__ = ["TracewireRayExecutor", "TracewireRayWorker"]

logger = logging.getLogger("vllm.tracewire")

_CPU = current_platform.is_cpu()
if _CPU and not current_platform.ray_device_key:
    type(current_platform).ray_device_key = "CPU"

#: How long the cluster may take to give the engine its devices, in seconds. vLLM would wait for half an hour.
_PLACE_S = 60
#: The size of Ray's object store in a cluster that the engine starts. vLLM does not use the store.
_STORE_BYTES = 128 * 1024 * 1024

#: Variables that a worker needs when it imports vLLM or torch, before vLLM hands on the rest of the environment.
_EARLY = ("TORCHDYNAMO_DISABLE", "VLLM_LOGGING_LEVEL", "VLLM_LOGGING_STREAM", "VLLM_USE_V2_MODEL_RUNNER")


class TracewireRayWorker(ray_executor_v2.RayWorkerProc):  # type: ignore[misc, unused-ignore]
    """The Ray actor of one rank."""

    def get_node_and_physical_gpu_ids(self) -> tuple[str, list[int]]:
        """The id of the actor's node, and its devices. On a CPU, the rank stands for a device."""
        if not _CPU:
            return super().get_node_and_physical_gpu_ids()  # type: ignore[no-any-return]
        return ray.get_runtime_context().get_node_id(), [self._init_kwargs["rank"]]

    def initialize_worker(self, local_rank: int, *args: Any, **kwargs: Any) -> None:
        """Build the worker. The executor calls it when it knows the ranks on each node."""
        # By default vLLM takes the address of the route to the Internet, and Gloo that of the host name, which may be
        # the loopback's.
        address = ray.util.get_node_ip_address()
        os.environ.setdefault("VLLM_HOST_IP", address)
        card = _card_of(address)
        if card is not None:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", card)
        if _CPU:
            ranks = kwargs.pop("assigned_physical_gpu_ids", None) or [0]
            # Set the environment that the driver passes on first, since it may have VLLM_CPU_OMP_THREADS_BIND.
            if len(args) > 2 and args[2]:
                for name, value in args[2].items():
                    os.environ.setdefault(name, value)
            world = self._init_kwargs["vllm_config"].parallel_config.world_size
            bind = os.environ.get("VLLM_CPU_OMP_THREADS_BIND", "auto")
            allowed = sorted(os.sched_getaffinity(0))
            cores = cores_of(bind, self._init_kwargs["rank"], local_rank, world, len(ranks), allowed)
            if bind != "nobind":
                os.sched_setaffinity(0, cores)
            torch.set_num_threads(len(cores))
            _tell_nodes_apart(ray.get_runtime_context().get_node_id())
        super().initialize_worker(local_rank, *args, **kwargs)


def _tell_nodes_apart(node: str) -> None:
    """Make vLLM's CPU ranks share memory only with ranks on the same node.

    vLLM lets ranks share memory if their groups have the same name. Groups on two machines can have the same name, and
    one would then wait for memory that the other opened on its own machine. This adds the node to the name. Ranks whose
    names differ talk by Gloo.
    """
    from vllm.distributed.device_communicators.cpu_communicator import _CPUSHMDistributed

    theirs = _CPUSHMDistributed.make_group_name
    _CPUSHMDistributed.make_group_name = staticmethod(lambda communicator: f"{theirs(communicator)}-{node[:12]}")


def _card_of(address: str) -> str | None:
    """The network interface that has this address."""
    families = (socket.AF_INET, socket.AF_INET6)
    for name, addresses in psutil.net_if_addrs().items():
        if any(one.family in families and one.address == address for one in addresses):
            return str(name)
    return None


class TracewireRayExecutor(ray_executor_v2.RayExecutorV2):  # type: ignore[misc, unused-ignore]
    """vLLM's executor over Ray actors, in the cluster that the adapter chose."""

    def _init_executor(self) -> None:
        # vLLM passes the driver's whole environment to the workers. The adapter's own variables must not go there: the
        # Redis URL with its password, and the process id that marks the adapter's descendants.
        for name in [name for name in os.environ if name.startswith("TRACEWIRE_")]:
            del os.environ[name]
        cluster = msgspec.convert(self.vllm_config.additional_config[RAY_CLUSTER], Cluster)
        self._connect(cluster)
        self.parallel_config.placement_group = self._place()
        theirs = ray_executor_v2.RayWorkerProc
        ray_executor_v2.RayWorkerProc = TracewireRayWorker
        try:
            super()._init_executor()
        finally:
            ray_executor_v2.RayWorkerProc = theirs
        if _CPU:
            self.parallel_config.assigned_physical_gpu_ids = None

    def _connect(self, cluster: Cluster) -> None:
        os.environ.pop("RAY_ADDRESS", None)
        os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
        if not cluster.own:
            ray.init(address=cluster.address, _node_ip_address=cluster.node)
            return
        options: dict[str, Any] = {}
        if _CPU:
            # Each rank takes a bundle of one CPU, however many cores its threads are bound to.
            options["num_cpus"] = self.parallel_config.world_size
        ray.init(address="local", include_dashboard=False, object_store_memory=_STORE_BYTES, **options)

    def _place(self) -> Any:
        kind = current_platform.ray_device_key
        group = ray.util.placement_group([{kind: 1.0}] * self.parallel_config.world_size, strategy="PACK")
        if not group.wait(_PLACE_S):
            free = ray.available_resources().get(kind, 0)
            raise RuntimeError(
                f"the Ray cluster did not give this engine {self.parallel_config.world_size} {kind} within "
                f"{_PLACE_S} s: {free:g} of {ray.cluster_resources().get(kind, 0):g} are free"
            )
        return group

    def _build_runtime_env(self) -> dict[str, Any]:
        environment: dict[str, Any] = super()._build_runtime_env()
        early = {name: os.environ[name] for name in _EARLY if name in os.environ}
        environment.setdefault("env_vars", {}).update(early)
        return environment

    @staticmethod
    def _get_actor_resource_kwargs() -> dict[str, Any]:
        # On a CPU, the actor itself asks for no CPUs, and runs in its bundle of one.
        return {} if _CPU else dict(ray_executor_v2.RayExecutorV2._get_actor_resource_kwargs())

    def shutdown(self) -> None:
        """End the workers and leave the cluster. A cluster that this engine started ends too."""
        if not ray.is_initialized():
            # Ray would otherwise join the cluster again, to end actors that it does not know.
            self.ray_worker_handles: list[Any] = []
        super().shutdown()
        # Without this, two of Ray's processes would outlive the engine by minutes.
        ray.shutdown()
