"""Which speculative decoding an engine does, and what a refusal of another says."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tracewire_engine.launch.speculation import speculation_problem

NGRAM = {"method": "ngram", "num_speculative_tokens": 3}


def problem(config: Any, taps: tuple[str, ...] = (), **options: Any) -> str:
    return speculation_problem(SimpleNamespace(speculative_config=config, **options), taps)


@pytest.mark.parametrize("config", [None, {}, NGRAM, {**NGRAM, "prompt_lookup_max": 4, "prompt_lookup_min": 1}])
def test_what_has_been_tried_is_taken(config: Any) -> None:
    assert problem(config) == ""
    assert problem(config, pipeline_parallel_size=1) == ""


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ("ngram", "expected a JSON object, got str"),
        ({"num_speculative_tokens": 3}, "method is missing; expected ngram"),
        ({**NGRAM, "method": "eagle"}, "method is 'eagle'; expected ngram"),
        ({"method": "ngram"}, "num_speculative_tokens is missing; expected a number of at least 1"),
        ({**NGRAM, "num_speculative_tokens": 0}, "num_speculative_tokens is 0; expected a number of at least 1"),
        ({**NGRAM, "num_speculative_tokens": True}, "num_speculative_tokens is True; expected a number of at least 1"),
        ({**NGRAM, "method": "draft_model", "model": "./small"}, "method is 'draft_model'; expected ngram"),
        ({**NGRAM, "parallel_drafting": True}, "parallel_drafting is not supported"),
        ({**NGRAM, "num_speculative_tokens_per_batch_size": [[1, 8, 2]]}, "num_speculative_tokens_per_batch_size"),
    ],
)
def test_a_refusal_names_the_setting_and_what_is_expected(config: Any, says: str) -> None:
    assert problem(config).startswith(says)


def test_what_has_not_been_tried_together_is_refused() -> None:
    assert "--pipeline-parallel-size; expected one stage" in problem(NGRAM, pipeline_parallel_size=2)
    assert speculation_problem(SimpleNamespace(speculative_config=NGRAM), second=True).endswith("the first one")
    assert "--tap, in CUDA graphs; expected no taps" in problem(NGRAM, ("model.layers.4.output",))
