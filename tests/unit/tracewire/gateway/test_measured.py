"""The outputs of a trace, as the metrics and the key's limit count them."""

from __future__ import annotations

from time import monotonic, time

import pytest

from tracewire import Lagging, Output, Restarted, Steered
from tracewire.gateway.keys import EVERYBODY, Caller
from tracewire.gateway.limits import Limits
from tracewire.gateway.measured import Measured, SteerTimes
from tracewire.gateway.metrics import Metrics
from tracewire.gateway.problems import Problem


def measured_by(metrics: Metrics, limits: Limits, caller: Caller = EVERYBODY, begun: float = 0.0) -> Measured:
    """What measures a trace."""
    return Measured(metrics, limits, caller, "tiny", monotonic() - begun, trace_id="t", steers=SteerTimes())


def output(tokens: int, choice: int = 0, age: float = 0.5) -> Output:
    """An output of so many tokens, from a step that ended some seconds ago."""
    return Output(1, 0, choice=choice, token_ids=list(range(tokens)), time=time() - age)


def sample(metrics: Metrics, name: str) -> float:
    """A metric of the model."""
    return metrics.registry.get_sample_value(f"tracewire_gateway_{name}", {"model": "tiny"}) or 0.0


def test_outputs_are_counted_and_other_events_are_not() -> None:
    metrics = Metrics()
    measured = measured_by(metrics, Limits(), begun=2.0)
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
    measured = measured_by(Metrics(), limits, caller)
    measured.item(output(9))
    with limits.request(caller):
        measured.item(output(9))
    with pytest.raises(Problem, match="10 tokens a minute") as refused, limits.request(caller):
        pass
    assert refused.value.status == 429


def test_restarts_and_lags_are_counted() -> None:
    metrics = Metrics()
    measured = measured_by(metrics, Limits())
    for item in (Restarted(2, 0, reason="lost"), *(Lagging(2, 1, action=one) for one in ("held", "caught_up", "held"))):
        measured.item(item)
    assert sample(metrics, "restarts_total") == 1
    found = metrics.registry.get_sample_value("tracewire_gateway_lags_total", {"model": "tiny", "action": "held"})
    assert found == 2


def test_only_changes_of_this_gateway_are_timed() -> None:
    metrics, steers = Metrics(), SteerTimes()
    measured = Measured(metrics, Limits(), EVERYBODY, "tiny", monotonic(), trace_id="t", steers=steers)
    steers.begin("t", 2, monotonic() - 3.0)
    steers.begin("other", 1, monotonic())
    for version in (1, 2, 2):
        measured.item(Steered(1, 0, version=version))
    assert sample(metrics, "steer_seconds_count") == 1
    assert sample(metrics, "steer_seconds_sum") >= 3.0
    # Changes whose traces nobody reads here do not pile up.
    for number in range(5000):
        steers.begin(f"t{number}", 1, 0.0)
    assert len(steers._begun) == 4096
    assert steers.end("t0", 1) is None
    assert steers.end("t4999", 1) is not None
