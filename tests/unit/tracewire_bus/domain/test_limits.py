"""What one submission may be: at a limit it passes, beyond it is refused by its field."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from tracewire_bus.domain import limits
from tracewire_bus.domain.limits import LimitExceeded, check_size, check_submission, measure
from tracewire_bus.wire.messages import Ablate, Block, Helper, Invoke, Probe, Steer, Submission
from tracewire_bus.wire.refs import ArrayRef

_PROMPT = Invoke(prompt="hello")


def _block(**fields: Any) -> Block:
    return Block(**{"name": "watch", "source": "pass", **fields})


def _vector(nbytes: int) -> ArrayRef:
    return ArrayRef("float32", (nbytes // 4,), bytes(16), f"vector-{bytes(16).hex()}")


#: What of a submission is as much as it may be, what is too much, and the field at fault.
MOST: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "its id": ({"trace": "t" * limits.MAX_TRACE_ID}, {"trace": "t" * (limits.MAX_TRACE_ID + 1)}, "trace"),
    "prompts": (
        {"invokes": [_PROMPT] * limits.MAX_INVOKES},
        {"invokes": [_PROMPT] * (limits.MAX_INVOKES + 1)},
        "invokes",
    ),
    "helpers": (
        {"block": _block(helpers=[Helper(name="h", source="pass")] * limits.MAX_HELPERS)},
        {"block": _block(helpers=[Helper(name="h", source="pass")] * (limits.MAX_HELPERS + 1))},
        "block",
    ),
    "the source of one block": (
        {"block": _block(source="#" * limits.MAX_SOURCE)},
        {"block": _block(source="#" * (limits.MAX_SOURCE + 1))},
        "block",
    ),
    "edits of a prompt": (
        {"invokes": [Invoke(prompt="a", edits=["e"] * limits.MAX_EDITS)]},
        {"invokes": [Invoke(prompt="a", edits=["e"] * (limits.MAX_EDITS + 1))]},
        "edits",
    ),
    "arrays that its interventions refer to": (
        {
            "interventions": [
                Probe("p", "at", weight=_vector(limits.MAX_BYTES // 2), bias=_vector(limits.MAX_BYTES // 2))
            ]
        },
        {"interventions": [Steer("at", _vector(limits.MAX_BYTES // 2)), Ablate("at", _vector(limits.MAX_BYTES))]},
        "interventions",
    ),
    "a deadline": ({"deadline_s": 0.0}, {"deadline_s": -1.0}, "deadline"),
    "a deadline without an end": ({"deadline_s": 1e9}, {"deadline_s": float("inf")}, "deadline"),
}


@pytest.mark.parametrize("case", MOST)
def test_at_the_limit_it_passes_and_beyond_it_is_refused_by_its_field(case: str) -> None:
    most, more, field = MOST[case]
    plain: dict[str, Any] = {"trace": "t", "model": "tiny", "invokes": [_PROMPT]}
    check_submission(Submission(**{**plain, **most}))
    with pytest.raises(LimitExceeded) as caught:
        check_submission(Submission(**{**plain, **more}))
    assert caught.value.field == field


def test_sources_count_together() -> None:
    sources = [Invoke(prompt="a", block=_block(source="#" * limits.MAX_SOURCE)) for _ in range(11)]
    with pytest.raises(LimitExceeded, match="of all blocks and helpers"):
        check_submission(Submission(trace="t", model="tiny", invokes=sources))


def test_bytes_are_bounded() -> None:
    check_size(limits.MAX_BYTES)
    with pytest.raises(LimitExceeded, match="large values travel beside it"):
        check_size(limits.MAX_BYTES + 1)


def test_values_are_counted_before_they_are_decoded() -> None:
    encoded = msgspec.msgpack.encode([1, "two", [3.0, {"four": 5}]])
    counted = measure(encoded, "live")
    assert measure(encoded, "live", counted) == counted
    with pytest.raises(LimitExceeded) as caught:
        measure(encoded, "live", counted - 1)
    assert caught.value.field == "live"


def test_lists_are_counted_apart() -> None:
    encoded = msgspec.msgpack.encode([[]] * limits.MAX_CONTAINERS)
    with pytest.raises(LimitExceeded) as caught:
        measure(encoded, "live")
    assert caught.value.limit == "containers"
    assert measure(encoded, "live", most_containers=limits.MAX_CONTAINERS + 1) == limits.MAX_CONTAINERS + 1


def test_what_nests_too_deep_is_refused() -> None:
    def nested(depth: int) -> bytes:
        return b"\x91" * depth + b"\x90"

    measure(nested(limits.MAX_DEPTH - 2), "live")
    with pytest.raises(LimitExceeded):
        measure(nested(limits.MAX_DEPTH + 1), "live")
