"""Names that the adapter and the workers share, in a module that imports neither side's libraries."""

from __future__ import annotations

from pathlib import Path

__all__ = [
    "ADAPTERS",
    "BLOB_THRESHOLD",
    "BLOCKS",
    "BLOCK_ARG",
    "BLOCK_STEP",
    "BLOCK_TIMEOUT",
    "CHECK_COLLECT",
    "CODE_IMPORTS",
    "DECLARED_ARG",
    "DRAFTS_ARG",
    "EDITS_ARG",
    "END_ARG",
    "FORCED_ARG",
    "KEPT_BYTES",
    "LINK_ADDRESS",
    "LIVE_ARG",
    "PERMIT_ARG",
    "PERMIT_KEY",
    "RAY_CLUSTER",
    "RESULT_ARG",
    "RUN_ARG",
    "SCHEDULE_ARG",
    "SHARED_ARG",
    "STEP_TOKENS",
    "TRACE_ARG",
    "WORKER_PATIENCE",
    "inputs_folder",
]

# Keys of a request's `SamplingParams.extra_args`.

#: The request's encoded `Block`.
BLOCK_ARG = "tracewire_block"
#: The adapter's permit for that block (`protocol/permits.py`).
PERMIT_ARG = "tracewire_permit"
#: Its declared interventions: an encoded list of `Placed`.
DECLARED_ARG = "tracewire_declared"
#: Whether its tokens are drafted, although it has declared interventions (`protocol/drafting.py`).
DRAFTS_ARG = "tracewire_drafts"
#: The packed live parameters of its run.
LIVE_ARG = "tracewire_live"
#: The name of its run, to which the live parameters belong.
RUN_ARG = "tracewire_run"
#: The scheduled changes of its live parameters: an encoded list of `Scheduled` (`worker/blocks/live_schedule.py`).
SCHEDULE_ARG = "tracewire_schedule"
#: The first tokens of each choice, in place of the sampled ones: a list of token ids.
FORCED_ARG = "tracewire_forced"
#: The blocks of standing interventions: an encoded list of `EditBlock`.
EDITS_ARG = "tracewire_edits"
#: The values that the trace's blocks share: an encoded `SharedValues`.
SHARED_ARG = "tracewire_shared"
#: Whether the request's block uses `tracer.result`.
RESULT_ARG = "tracewire_result"
#: Whether only the adapter knows at which token the request ends.
END_ARG = "tracewire_end"

#: The name of its trace's attempt, how many choices all requests of the attempt have together, and the tenant of the
#: trace's key (empty without one; `None` if its blocks share no process with other traces').
TRACE_ARG = "tracewire_trace"

#: Key of vLLM's `additional_config` under which the workers find the adapter's address.
LINK_ADDRESS = "tracewire_link"

#: Key of `additional_config`: how many adapters the engine has.
ADAPTERS = "tracewire_adapters"

#: Key of `additional_config`: whether to take the digests of a final's manifest from nnsight's own collect.
CHECK_COLLECT = "tracewire_check_collect"

#: Key of `additional_config`: the key of permits, in hexadecimal; and what a block may import if its permit says that
#: it is limited.
PERMIT_KEY = "tracewire_permit_key"
CODE_IMPORTS = "tracewire_code_imports"

#: Key of `additional_config`: how long a block may take in one step, in seconds; 0 for no limit.
BLOCK_TIMEOUT = "tracewire_block_timeout"

#: Key of `additional_config`: where blocks run, `"inline"` (in the worker) or `"host"` (in processes of their own).
BLOCKS = "tracewire_blocks"

#: Key of `additional_config`: how long the model waits for all blocks of a step that run in hosts, in seconds.
BLOCK_STEP = "tracewire_block_step"

#: Key of `additional_config`: arrays of more bytes than this travel in blobs; 0 for none.
BLOB_THRESHOLD = "tracewire_blob_threshold"

#: Key of `additional_config`: how many bytes of KV cache of preempted requests a worker may keep in host memory.
KEPT_BYTES = "tracewire_kept_bytes"

#: Key of `additional_config`: how many tokens the scheduler usually puts into a step. The workers can take more.
STEP_TOKENS = "tracewire_step_tokens"

#: Key of `additional_config`: the Ray cluster that the engine's executor joins (`ray_cluster.Cluster`, as a dict).
RAY_CLUSTER = "tracewire_ray_cluster"

#: Key of `additional_config`: the folders of the engine's own autoencoders by name, and the bytes that all may take.
SAES = "tracewire_saes"
SAE_BYTES = "tracewire_sae_bytes"
SAE_HOST_BYTES = "tracewire_sae_host_bytes"
#: Likewise: the bytes above which tensor-parallel ranks split one; `None` for those that the device is too small for.
SAE_SPLIT_BYTES = "tracewire_sae_split_bytes"

#: Key of `additional_config`: how long workers on other machines and the adapter wait for each other, in seconds.
WORKER_PATIENCE = "tracewire_worker_patience"


def inputs_folder(link_address: str) -> Path:
    """The folder of the files for submissions' large variables: that of the link's socket, on the adapter's machine."""
    return Path(link_address.removeprefix("ipc://")).parent
