"""Answers as the OpenAPI document describes them."""

from __future__ import annotations

from tracewire.gateway.documents import ERRORS, OPENAI_ERRORS, answers, files, stream
from tracewire.gateway.downloads import FORMATS
from tracewire.gateway.problems import Problem


def test_the_documented_errors_have_the_fields_of_those_that_are_sent() -> None:
    schema = ERRORS["default"]["content"]["application/problem+json"]["schema"]
    sent = Problem(404, "none", code="unknown_trace", field="trace_id").details()
    assert set(schema["required"]) <= set(sent) <= set(schema["properties"])
    assert set(schema["required"]) <= set(schema["example"]) <= set(schema["properties"])
    openai = OPENAI_ERRORS["default"]["content"]["application/json"]["schema"]
    assert set(openai["example"]["error"]) <= set(openai["properties"]["error"]["properties"])
    assert set(openai["properties"]["error"]["required"]) <= set(openai["example"]["error"])


def test_each_route_documents_the_status_of_a_request_that_is_wrong() -> None:
    assert {422, "default"} <= set(ERRORS)
    assert {400, "default"} <= set(OPENAI_ERRORS)


def test_an_answer_has_its_example_and_the_route_s_other_answers() -> None:
    found = answers("Done.", {"a": 1}, 202, _204={"description": "Nothing."})
    assert found[202]["content"]["application/json"]["example"] == {"a": 1}
    assert found[204] == {"description": "Nothing."}


def test_a_stream_may_have_another_form() -> None:
    assert set(stream("Events.", "data: {}\n\n")[200]["content"]) == {"text/event-stream"}
    both = stream("Events.", "data: {}\n\n", {"application/json": {}})
    assert set(both[200]["content"]) == {"text/event-stream", "application/json"}


def test_an_array_is_documented_in_each_of_its_formats() -> None:
    assert set(files()[200]["content"]) == set(FORMATS.values())
