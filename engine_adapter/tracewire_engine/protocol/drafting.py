"""Which requests are drafted on an engine with speculative decoding, and what drafts take of a step.

A step of a drafted request has several rows, of which vLLM takes the first few. Edits act on all of them, and reads are
taken of the rows that count (`worker/declared/drafted_rows.py`). This is right for an intervention whose work on a row
depends on nothing but the row, its token's index and the tokens before it. What goes on from step to step would go on
from rows that do not count.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

from tracewire_bus.wire.messages import AttentionPattern, Declared, Hold
from tracewire_bus.wire.packing import decoder

from .keys import BLOCK_ARG, DECLARED_ARG, EDITS_ARG, SCHEDULE_ARG
from .messages import Placed

__all__ = ["draft_slots", "undrafted"]

#: What keeps a request from being drafted, by the argument that stands for it.
_ARGUMENTS: Final = {
    BLOCK_ARG: "a block runs once for each token",
    EDITS_ARG: "a standing block runs once for each token",
    SCHEDULE_ARG: "scheduled changes of live parameters begin at a token of their own",
}

_placed = decoder(list[Placed])


def draft_slots(vllm_config: Any) -> int:
    """How many tokens of a step's capacity vLLM's drafting model takes for each request, beside the request's own."""
    config = vllm_config.speculative_config
    return 0 if config is None else int(config.max_num_new_slots_for_drafting)


def undrafted(arguments: Mapping[str, Any]) -> str:
    """Why the tokens of a request with these arguments are not drafted; `""` if they are.

    `arguments` are Tracewire's, in the `extra_args` of the request.
    """
    reasons = [reason for name, reason in _ARGUMENTS.items() if name in arguments]
    if DECLARED_ARG in arguments:
        reasons += _reasons(placed.intervention for placed in _placed(arguments[DECLARED_ARG]))
    return "; ".join(dict.fromkeys(reasons))


def _reasons(interventions: Iterable[Declared]) -> Iterator[str]:
    """What goes on from step to step."""
    for one in interventions:
        if isinstance(one, Hold):
            yield "a Hold goes on from the step before"
        if isinstance(one, AttentionPattern):
            yield "an AttentionPattern keeps the keys of each step"
        if one.when is not None and one.when.probe is not None:
            yield "a condition on a probe goes on from the step before"
