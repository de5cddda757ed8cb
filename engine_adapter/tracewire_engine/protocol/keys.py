"""Names that the adapter and the workers agree on, apart from both so that neither imports the other's libraries."""

from __future__ import annotations

from pathlib import Path

__all__ = [
    "BLOB_THRESHOLD",
    "BLOCK_ARG",
    "BLOCK_TIMEOUT",
    "CHECK_COLLECT",
    "DECLARED_ARG",
    "EDITS_ARG",
    "END_ARG",
    "KEPT_BYTES",
    "LINK_ADDRESS",
    "LIVE_ARG",
    "RAY_CLUSTER",
    "RESULT_ARG",
    "RUN_ARG",
    "SHARED_ARG",
    "STEP_TOKENS",
    "WORKER_PATIENCE",
    "inputs_folder",
]

#: Keys of a request's `SamplingParams.extra_args`: an encoded `Block`, its encoded declared interventions (a list of
#: `Placed`), their packed live parameters, the run that these belong to, the encoded blocks of standing interventions
#: (a list of `EditBlock`), an encoded `Share`, whether its block asks for what the request put out in the end, and
#: whether the adapter alone knows at which token it ends.
BLOCK_ARG = "tracewire_block"
DECLARED_ARG = "tracewire_declared"
LIVE_ARG = "tracewire_live"
RUN_ARG = "tracewire_run"
EDITS_ARG = "tracewire_edits"
SHARED_ARG = "tracewire_shared"
RESULT_ARG = "tracewire_result"
END_ARG = "tracewire_end"

#: Key of vLLM's `additional_config` under which the workers find the adapter's address.
LINK_ADDRESS = "tracewire_link"

#: Key of `additional_config`: take the digests in a final's manifest from what nnsight's own collect returns.
CHECK_COLLECT = "tracewire_check_collect"

#: Key of `additional_config`: how long one turn of a block may take, in seconds.
BLOCK_TIMEOUT = "tracewire_block_timeout"

#: Key of `additional_config`: arrays of more bytes than this travel in blobs; 0 for none.
BLOB_THRESHOLD = "tracewire_blob_threshold"

#: Key of `additional_config`: how many bytes of the KV of preempted requests a worker may keep in host memory.
KEPT_BYTES = "tracewire_kept_bytes"

#: Key of `additional_config`: how many tokens the scheduler puts into a step, whatever more the workers can take.
STEP_TOKENS = "tracewire_step_tokens"

#: Key of `additional_config`: the Ray cluster that the engine's executor joins (`ray_cluster.Cluster`, as a dict).
RAY_CLUSTER = "tracewire_ray_cluster"

#: Key of `additional_config`: how long workers on other machines and the adapter wait for each other, in seconds.
WORKER_PATIENCE = "tracewire_worker_patience"


def inputs_folder(link_address: str) -> Path:
    """Folder of the files that hold submissions' large variables, on the adapter's machine: the link's."""
    return Path(link_address.removeprefix("ipc://")).parent
