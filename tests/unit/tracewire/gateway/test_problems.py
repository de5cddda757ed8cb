"""Errors as HTTP answers."""

from __future__ import annotations

import json
from typing import Any

import pytest

import tracewire
from tracewire import errors
from tracewire.gateway.problems import Problem, of_error, of_validation

FAILED: dict[str, Any] = {"trace_id": "t", "type": "X"}
CASES: list[tuple[errors.TracewireError, int, int]] = [
    (errors.UnknownTrace("t"), 404, 404),
    (errors.UnknownModel("m", []), 404, 404),
    (errors.TraceRejected("prompt", "empty"), 422, 400),
    (errors.Overloaded("m", 9, 8, 3.2), 503, 503),
    (errors.BusUnavailable("away"), 503, 503),
    (errors.BusFull("full"), 503, 503),
    (errors.BusRefused("no"), 502, 502),
    (errors.LibraryMissing("the format arrow", "pyarrow"), 501, 501),
    (errors.UnexpectedReply("odd"), 502, 502),
    (errors.TraceEnded("t"), 409, 409),
    (errors.VersionConflict("t", "other", 4), 409, 409),
    (errors.TooManyChanges("t", "busy"), 503, 503),
    (errors.InvalidChange("t", "live.a", "no"), 422, 400),
    (errors.ClientClosed("closed"), 503, 503),
    (errors.StateMismatch("differs"), 500, 500),
    (tracewire.EngineLost("x", **FAILED), 503, 503),
    (tracewire.EngineFailed("x", **FAILED), 500, 500),
    (tracewire.TraceCancelled("x", **FAILED), 409, 409),
    (tracewire.TraceExpired("x", **FAILED), 408, 408),
]


@pytest.mark.parametrize(("error", "status", "openai"), CASES, ids=lambda case: type(case).__name__)
def test_each_error_has_its_status(error: errors.TracewireError, status: int, openai: int) -> None:
    assert of_error(error).status == status
    problem = of_error(error, openai=True)
    assert problem.status == openai
    answer = problem.response("/v1/completions")
    # A client is told to try again exactly where that may help.
    assert answer.headers["X-Should-Retry"] == ("true" if status == 503 else "false")
    assert ("Retry-After" in answer.headers) == (status == 503)


def test_the_queue_says_when_there_is_room() -> None:
    assert of_error(errors.Overloaded("m", 9, 8, 3.2)).response("/traces").headers["Retry-After"] == "4"


def test_fields_are_those_of_the_body() -> None:
    for field, name in {
        "sampling.temperature": "temperature",
        "interventions[0].at": "tracewire.interventions[0].at",
        "live.alpha": "tracewire.live.alpha",
        "lora": "model",
        "prompts[1]": "prompts[1]",
    }.items():
        assert of_error(errors.TraceRejected(field, "no"), openai=True).field == name
        assert of_error(errors.TraceRejected(field, "no")).field == field


def test_both_shapes() -> None:
    problem = Problem(422, "half \ud800", code="odd", field="x", line=3, none=None)
    plain = problem.response("/traces")
    assert json.loads(plain.body) == {
        "type": "urn:tracewire:odd",
        "title": "Invalid request",
        "status": 422,
        "detail": "half \ud800",
        "field": "x",
        "line": 3,
    }
    assert plain.media_type == "application/problem+json"
    shaped = json.loads(problem.response("/v1/models").body)["error"]
    assert shaped["tracewire"] == {"line": 3}
    assert (shaped["param"], shaped["code"], shaped["type"]) == ("x", "odd", "invalid_request_error")


def test_a_fault_of_the_body_does_not_repeat_the_value() -> None:
    fault = {
        "type": "string_type",
        "loc": ("body", "prompt", "list[str]", 0),
        "msg": "expected text",
        "input": "\ud800",
    }
    problem = of_validation([fault], openai=True)
    assert (problem.status, problem.field, problem.message) == (400, "prompt.0", "prompt.0: expected text")
