"""What speculative decoding takes of a step, which the scheduler plans by and the adapter checks prompts by."""

from __future__ import annotations

from typing import Any

__all__ = ["draft_slots"]


def draft_slots(vllm_config: Any) -> int:
    """How many tokens of a step's capacity vLLM's drafting model takes for each request, beside the request's own."""
    config = vllm_config.speculative_config
    return 0 if config is None else int(config.max_num_new_slots_for_drafting)
