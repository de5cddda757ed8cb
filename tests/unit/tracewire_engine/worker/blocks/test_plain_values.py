"""What vLLM hands a block as an object of its own is a plain value, made once."""

from __future__ import annotations

from typing import Any

from vllm.outputs import CompletionOutput, RequestOutput

from tests.support.equality import equal
from tracewire_engine.worker.blocks.plain_values import plain


def _output() -> RequestOutput:
    choice = CompletionOutput(
        index=0, text="hi", token_ids=[5, 6], cumulative_logprob=-1.5, logprobs=None, finish_reason="length"
    )
    return RequestOutput("r", "hello", [1, 2], None, [choice], finished=True)


def test_a_result_is_a_dict_that_can_travel() -> None:
    made: dict[int, tuple[Any, Any]] = {}
    found = plain(_output(), made)
    assert equal(found, found)
    assert (found["prompt_token_ids"], found["finished"]) == ([1, 2], True)
    assert found["outputs"][0] == {
        "index": 0,
        "text": "hi",
        "token_ids": [5, 6],
        "cumulative_logprob": -1.5,
        "finish_reason": "length",
        "stop_reason": None,
    }


def test_one_object_is_one_value() -> None:
    made: dict[int, tuple[Any, Any]] = {}
    output = _output()
    assert plain(output, made) is plain(output, made)
    assert plain(_output(), made) is not plain(output, made)


def test_what_is_plain_stays_as_it_is() -> None:
    value = {"a": [1]}
    assert plain(value, {}) is value
