"""The outputs of a trace, as the metrics and the key's limit count them."""

from __future__ import annotations

from time import monotonic, time

import pytest

from tracewire import Output, Restarted
from tracewire.gateway.keys import EVERYBODY, Caller
from tracewire.gateway.limits import Limits
from tracewire.gateway.measured import Measured
from tracewire.gateway.metrics import Metrics
from tracewire.gateway.problems import Problem


def output(tokens: int, choice: int = 0, age: float = 0.5) -> Output:
    """An output of so many tokens, from a step that ended some seconds ago."""
    return Output(1, 0, choice=choice, token_ids=list(range(tokens)), time=time() - age)


def sample(metrics: Metrics, name: str) -> float:
    """A metric of the model."""
    return metrics.registry.get_sample_value(f"tracewire_gateway_{name}", {"model": "tiny"}) or 0.0


def test_outputs_are_counted_and_other_events_are_not() -> None:
    metrics = Metrics()
    measured = Measured(metrics, Limits(), EVERYBODY, "tiny", monotonic() - 2.0)
    measured.item(Restarted(1, 0, reason="lost"))
    assert sample(metrics, "first_output_seconds_count") == 0
    for item in (output(1), output(4), output(2, choice=1), output(0)):
        measured.item(item)
    assert sample(metrics, "tokens_total") == 7
    # One answer has one first output, however many choices it has.
    assert sample(metrics, "first_output_seconds_count") == 1
    assert sample(metrics, "first_output_seconds_sum") >= 2.0
    # The first output of each choice follows none, and one without tokens adds none.
    assert sample(metrics, "inter_token_seconds_count") == 1
    assert sample(metrics, "output_lag_seconds_count") == 4
    assert sample(metrics, "output_lag_seconds_sum") >= 4 * 0.5
    assert sample(metrics, "delta_bytes_total") == 4


def test_tokens_count_against_the_key() -> None:
    limits, caller = Limits(clock=lambda: 0.0), Caller("alice", tokens_per_minute=10)
    measured = Measured(Metrics(), limits, caller, "tiny", monotonic())
    measured.item(output(9))
    with limits.request(caller):
        measured.item(output(9))
    with pytest.raises(Problem, match="10 tokens a minute") as refused, limits.request(caller):
        pass
    assert refused.value.status == 429
