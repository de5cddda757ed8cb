"""Which speculative decoding an engine does, and what a refusal of another says."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tracewire_engine.launch.speculation import speculation_problem, speculation_settings

NGRAM = {"method": "ngram", "num_speculative_tokens": 3}


def problem(config: Any, **options: Any) -> str:
    return speculation_problem(SimpleNamespace(speculative_config=config, **options))


DRAFTED = {"method": "draft_model", "model": "./small", "num_speculative_tokens": 3}


@pytest.mark.parametrize(
    "config", [None, {}, NGRAM, {**NGRAM, "prompt_lookup_max": 4, "prompt_lookup_min": 1}, DRAFTED]
)
def test_what_has_been_tried_is_taken(config: Any) -> None:
    assert problem(config) == ""
    assert problem(config, pipeline_parallel_size=1) == ""


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ("ngram", "expected a JSON object, got str"),
        ({"num_speculative_tokens": 3}, "method is missing; expected ngram, draft_model, eagle, eagle3, medusa or"),
        ({**NGRAM, "method": "suffix"}, "method is 'suffix'; expected ngram"),
        ({**NGRAM, "method": ["ngram"]}, "method is ['ngram']; expected ngram"),
        ({"method": "ngram"}, "num_speculative_tokens is missing; expected a number of at least 1"),
        ({**NGRAM, "num_speculative_tokens": 0}, "num_speculative_tokens is 0; expected a number of at least 1"),
        ({**NGRAM, "num_speculative_tokens": True}, "num_speculative_tokens is True; expected a number of at least 1"),
        ({**NGRAM, "num-speculative-tokens": 0}, "num_speculative_tokens is 0; expected a number of at least 1"),
        (
            {**DRAFTED, "model": None},
            "model is missing; expected the name or the folder of a model that drafts (draft_model)",
        ),
        ({**DRAFTED, "model": 3}, "model is 3; expected the name or the folder"),
        ({**DRAFTED, "method": "custom_class", "model": ""}, "model is ''; expected the path of a class that drafts"),
        ({**NGRAM, "parallel_drafting": True}, "parallel_drafting is not supported"),
        ({**NGRAM, "num_speculative_tokens_per_batch_size": [[1, 8, 2]]}, "num_speculative_tokens_per_batch_size"),
    ],
)
def test_a_refusal_names_the_setting_and_what_is_expected(config: Any, says: str) -> None:
    assert problem(config).startswith(says)


def test_settings_by_options_of_their_own_are_checked_as_well() -> None:
    """vLLM's `--spec-method`, `--spec-model` and `--spec-tokens`, alone or beside its object."""
    assert "'suffix'; expected ngram" in problem(None, spec_method="suffix", spec_tokens=3)
    assert problem(None, spec_method="eagle", spec_tokens=3).startswith("model is missing")
    assert problem(None, spec_method="eagle", spec_model="./head", spec_tokens=3) == ""
    assert problem({"prompt_lookup_max": 3}, spec_method="ngram").startswith("num_speculative_tokens is missing")
    assert speculation_settings(SimpleNamespace(speculative_config={"a-b": 1}, spec_tokens=2)) == {
        "num_speculative_tokens": 2,
        "a_b": 1,
    }
    assert speculation_settings(SimpleNamespace()) is None


def test_what_has_not_been_tried_together_is_refused() -> None:
    assert "--pipeline-parallel-size; expected one stage" in problem(NGRAM, pipeline_parallel_size=2)


def test_the_second_runner_has_methods_of_its_own() -> None:
    arguments = SimpleNamespace(speculative_config={**DRAFTED, "method": "medusa"})
    assert speculation_problem(arguments) == ""
    assert speculation_problem(arguments, second=True).endswith("with --model-runner second")
    assert speculation_problem(SimpleNamespace(speculative_config=NGRAM), second=True) == ""
