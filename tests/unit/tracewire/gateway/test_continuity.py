"""Each token once, whatever attempts and gaps bring again."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest

from tracewire import ChatMessage, MessageDelta, Output, Restarted, TextChanged, ToolCall, ToolCallDelta
from tracewire.gateway.continuity import Continuity
from tracewire_bus.domain.fold import extended
from tracewire_bus.wire.messages import Append, Set

TOKENS = [f"<{number}>" for number in range(30)]


def outputs(choices: int, chooser: random.Random, upto: int) -> list[Output]:
    """The first tokens of each choice in outputs of random sizes, with a delta for each token."""
    found = []
    for choice in range(choices):
        index = 0
        while index < upto:
            size = chooser.randrange(1, 5)
            ids = list(range(index, min(index + size, upto)))
            deltas: list[Any] = [[Append(("n",), [n]) if n else Set(("n",), [n])] for n in ids]
            output = Output(1, 0, 0, choice, index, ids, "".join(TOKENS[n] for n in ids))
            output.encoded_deltas = msgspec.Raw(msgspec.msgpack.encode(deltas))
            output.logprobs = [{n: (0.0, 1, TOKENS[n])} for n in ids]
            output.finish_reason = "stop" if ids[-1] == len(TOKENS) - 1 else None
            found.append(output)
            index += size
    return found


@pytest.mark.parametrize("seed", range(20))
def test_attempts_that_repeat_bring_each_token_once(seed: int) -> None:
    chooser = random.Random(seed)
    continuity = Continuity("t")
    texts, ids, saved, logprobs, ends = [""] * 2, [[], []], [[], []], [[], []], [0, 0]
    for upto in [chooser.randrange(0, 30) for _ in range(3)] + [30]:
        for item in outputs(2, chooser, upto):
            for piece in continuity.pieces(item):
                assert piece.index == len(ids[piece.choice])
                texts[piece.choice] += piece.text
                ids[piece.choice] += piece.token_ids
                saved[piece.choice] += piece.delta.get("n", [])
                logprobs[piece.choice] += [next(iter(one)) for one in piece.logprobs or ()]
                ends[piece.choice] += piece.finish_reason is not None
        assert continuity.pieces(Restarted(1, 0)) == []
    everything = list(range(30))
    assert texts == ["".join(TOKENS)] * 2
    assert ids == saved == logprobs == [everything] * 2
    assert ends == [1, 1]
    assert continuity.unfinished(1, 2) == []
    # A third one has not begun.
    assert continuity.unfinished(1, 3) == [(0, 2)]


@pytest.mark.parametrize(("token_ids", "text"), [([0, 7], "<0><7>"), ([0, 1], "<0>!"), ([5], "<0>")])
def test_an_attempt_that_differs_is_an_error(token_ids: list[int], text: str) -> None:
    continuity = Continuity("t")
    continuity.pieces(Output(1, 0, 0, 0, 0, [0, 1], "<0><1>"))
    assert continuity.unfinished(1, 1) == [(0, 0)]
    continuity.pieces(Restarted(2, 0))
    with pytest.raises(TextChanged) as caught:
        continuity.pieces(Output(2, 1, 0, 0, 0, token_ids, text))
    assert caught.value.length == 6


def test_without_saves_no_delta_is_decoded() -> None:
    output = Output(1, 0, 0, 0, 0, [0], "<0>")
    output.encoded_deltas = msgspec.Raw(b"\xc1")
    (piece,) = Continuity("t").pieces(output, saves=False)
    assert piece.delta == {}


def said(text: str, index: int = 0, **call: Any) -> Output:
    """An output that adds to a message: its text, or to the tool call of number 0."""
    output = Output(1, index, 0, 0, index, [index], text)
    calls = [ToolCallDelta(index=0, **call)] if call else []
    output.message = MessageDelta(content=text if not call else "", tool_calls=calls)
    return output


FIRST = [said("Let"), said(" me", 1), said("{", 2, id="one", name="add", arguments='{"a"')]


def test_a_message_that_begins_anew_goes_on_where_it_was() -> None:
    continuity, message = Continuity("t"), None
    again = [said("Let"), said(" me", 1), said("{", 2, id="two", name="add", arguments='{"a": 1')]
    again.append(said("}", 3, arguments="}"))
    for item in [*FIRST, Restarted(2, 0), *again]:
        for piece in continuity.pieces(item):
            if piece.message is not None:
                message = extended(message, piece.message)
    # The id is the first attempt's, which the reader has.
    assert message == ChatMessage(content="Let me", tool_calls=[ToolCall(id="one", name="add", arguments='{"a": 1}')])


def test_a_message_that_differs_is_an_error() -> None:
    continuity = Continuity("t")
    for item in [*FIRST, Restarted(2, 0), said("Let"), said(" me", 1)]:
        continuity.pieces(item)
    with pytest.raises(TextChanged):
        continuity.pieces(said("{", 2, id="two", name="subtract", arguments="{"))
