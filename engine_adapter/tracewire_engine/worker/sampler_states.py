"""Whether the sampler of vLLM's second runner has anything to write in a step without new requests.

In every step, vLLM copies the sampling parameters of all requests to where the GPU reads them. They change only when a
request is added. On a small model these copies take a twelfth of the step (vLLM 0.25.1, an H200).
"""

from __future__ import annotations

from typing import Any

from vllm.v1.worker.gpu.sample.sampler import Sampler

__all__ = ["changes_with_requests_alone"]

_PACKAGE = "vllm.v1.worker.gpu."

#: vLLM's parts of a sampler that write nothing but what `add_request` has set.
_KNOWN = frozenset(
    {
        "BadWordsState",
        "LogitBiasState",
        "LogprobTokenIdsState",
        "PenaltiesState",
        "RequestState",
        "SamplingStates",
        "ThinkingBudgetState",
        "TraceReplayState",
    }
)


def changes_with_requests_alone(sampler: Any) -> bool:
    """Whether a sampler's `apply_staged_writes` writes nothing new unless `add_request` was called since the last time.

    This is false of a sampler, or a part of one, that vLLM 0.25.1 to 0.32.0 do not have, such as an operator's logits
    processor.
    """
    return type(sampler) is Sampler and all(
        type(part).__module__.startswith(_PACKAGE) and type(part).__name__ in _KNOWN
        for value in vars(sampler).values()
        for part in (value if isinstance(value, list) else [value])
        if hasattr(part, "apply_staged_writes")
    )
