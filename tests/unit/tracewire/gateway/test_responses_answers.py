"""Responses: what a message becomes, and the events of a stream."""

from __future__ import annotations

from typing import Any

from tracewire import ChatMessage, MessageDelta, ToolCall, ToolCallDelta, Values
from tracewire.gateway.continuity import Piece
from tracewire.gateway.responses_answers import ResponseAnswer, ResponseEvents, items_of, response_of
from tracewire.gateway.responses_bodies import ResponsesBody
from tracewire_bus.wire.messages import Usage


def answer(**fields: Any) -> ResponseAnswer:
    asked = ResponsesBody(**{"model": "m", "input": "x", **fields})
    return ResponseAnswer("t", "m", 5, choices=1, top=None, ids=False, asked=asked)


def piece(text: str, reason: str | None = None, **fields: Any) -> Piece:
    return Piece(0, 0, 0, text, [1], None, Values(), reason, None, **fields)


def test_a_message_is_items() -> None:
    calls = [ToolCall(id="c", name="add", arguments="{}")]
    kinds = [one["type"] for one in items_of("t", ChatMessage(reasoning="r", tool_calls=calls), "completed")]
    assert kinds == ["reasoning", "function_call"]
    (empty,) = items_of("t", ChatMessage(), "completed")
    assert (empty["type"], empty["content"][0]["text"]) == ("message", "")


def test_a_body_repeats_its_request() -> None:
    made = answer(temperature=0.5, tool_choice="none", metadata={"a": "b"})
    choice = made.whole(0, piece("text", "length", whole=ChatMessage(content="text")))
    body = made.body([choice], Usage(prompt_tokens=2, completion_tokens=3), tracewire={"trace_id": "t"})
    assert (body["id"], body["temperature"], body["tool_choice"]) == ("resp_t", 0.5, "none")
    assert (body["status"], body["metadata"]) == ("incomplete", {"a": "b"})
    assert (body["usage"]["total_tokens"], body["tracewire"]) == (5, {"trace_id": "t"})
    assert body.keys() >= response_of("t", "m", 5.0, status="completed").keys()


def test_two_calls_are_two_items_and_numbers_go_up() -> None:
    events = ResponseEvents(answer())
    found = list(events.begin())
    for index in range(2):
        call = ToolCallDelta(index=index, id=f"c{index}", name="add", arguments="{}")
        found += events.added(piece("x", "stop" if index else None, message=MessageDelta(tool_calls=[call])))
    found += events.end(Usage())
    assert [one["sequence_number"] for one in found] == list(range(len(found)))
    response = found[-1]["response"]
    assert [one["call_id"] for one in response["output"]] == ["c0", "c1"]
    places = [one["output_index"] for one in found if one["type"] == "response.output_item.done"]
    assert places == [0, 1]
    assert found[-1]["type"] == "response.completed"


def test_the_logprobs_of_tokens_without_text_come_with_the_next_text_or_at_the_close() -> None:
    asked = ResponsesBody(model="m", input="x")
    events = ResponseEvents(ResponseAnswer("t", "m", 5, choices=1, top=0, ids=False, asked=asked))

    def adds(token: str, reason: str | None = None, **delta: Any) -> list[dict[str, Any]]:
        logprobs = [{1: (-0.5, 1, token)}]
        return list(events.added(Piece(0, 0, 0, "", [1], logprobs, Values(), reason, None, MessageDelta(**delta))))

    found = [*adds("r1", reasoning="r"), *adds("r2"), *adds("r3", reasoning="r")]
    found += [*adds("a"), *adds("b", content="ab"), *adds("c"), *adds("d", content="cd"), *adds("e", "stop")]
    found += events.end(Usage())

    def tokens(of: dict[str, Any]) -> list[str]:
        return [one["token"] for one in of["logprobs"]]

    deltas = [tokens(one) for one in found if one["type"] == "response.output_text.delta"]
    assert deltas == [["a", "b"], ["c", "d"]]
    (done,) = [one for one in found if one["type"] == "response.output_text.done"]
    assert tokens(done) == ["a", "b", "c", "d", "e"]
    _, message = found[-1]["response"]["output"]
    assert tokens(message["content"][0]) == ["a", "b", "c", "d", "e"]


def test_the_logprobs_of_calls_are_no_text() -> None:
    asked = ResponsesBody(model="m", input="x")
    events = ResponseEvents(ResponseAnswer("t", "m", 5, choices=1, top=0, ids=False, asked=asked))
    call = ToolCallDelta(index=0, id="c", name="add", arguments="{}")
    for token, delta in (("<call>", {}), ("{}", {"tool_calls": [call]}), ("x", {"content": "x"})):
        logprobs = [{1: (-0.5, 1, token)}]
        found = list(events.added(Piece(0, 0, 0, "", [1], logprobs, Values(), None, None, MessageDelta(**delta))))
    assert [one["token"] for one in found[-1]["logprobs"]] == ["x"]


def test_the_logprobs_of_marks_are_in_no_message() -> None:
    """Neither what ends the reasoning before a message, nor what begins the call behind it."""
    asked = ResponsesBody(model="m", input="x")
    events = ResponseEvents(ResponseAnswer("t", "m", 5, choices=1, top=0, ids=False, asked=asked))
    call = ToolCallDelta(index=0, id="c", name="add", arguments="{}")
    pieces: list[tuple[str, dict[str, Any]]] = [
        ("<think>", {}),
        ("r", {"reasoning": "r"}),
        ("</think>", {}),
        ("\n", {}),
    ]
    pieces += [("Hel", {}), ("lo", {"content": "Hello"}), ("<call>", {}), ("{}", {"tool_calls": [call]})]
    pieces += [("</call>", {}), ("x", {"content": "x"}), ("y", {})]
    found: list[dict[str, Any]] = []
    for token, delta in pieces:
        logprobs = [{1: (-0.5, 1, token)}]
        found += events.added(Piece(0, 0, 0, "", [1], logprobs, Values(), None, None, MessageDelta(**delta)))
    found += events.end(Usage())
    messages = [one for one in found[-1]["response"]["output"] if one["type"] == "message"]
    tokens = [[one["token"] for one in message["content"][0]["logprobs"]] for message in messages]
    assert tokens == [["Hel", "lo"], ["x", "y"]]


def test_the_logprobs_of_marks_that_come_with_a_text_are_in_no_message() -> None:
    asked = ResponsesBody(model="m", input="x")

    def begun_by(*tokens: str, **delta: Any) -> list[str]:
        events = ResponseEvents(ResponseAnswer("t", "m", 5, choices=1, top=0, ids=False, asked=asked))
        logprobs = [{1: (-0.5, 1, token)} for token in tokens]
        ids = [1] * len(tokens)
        found = list(events.added(Piece(0, 0, 0, "", ids, logprobs, Values(), None, None, MessageDelta(**delta))))
        return [one["token"] for one in found[-1]["logprobs"]]

    assert begun_by("</think>", "Hel", "lo", content="Hello") == ["Hel", "lo"]
    assert begun_by("r", "</think>", "Hi", reasoning="r", content="Hi") == ["Hi"]
    # A character of several tokens: none of them has it.
    assert begun_by("\ufffd", "\ufffd", content="é") == ["\ufffd", "\ufffd"]


def test_a_stream_without_output_has_an_empty_message() -> None:
    events = ResponseEvents(answer())
    kinds = [one["type"].removeprefix("response.") for one in events.end(Usage())]
    assert kinds[0] == "output_item.added"
    assert kinds[-1] == "completed"


def test_a_failure_is_an_event() -> None:
    event = ResponseEvents(answer()).failed({"code": "engine_lost", "message": "gone", "param": None})
    assert (event["type"], event["response"]["status"]) == ("response.failed", "failed")
    assert event["response"]["error"] == {"code": "engine_lost", "message": "gone"}
