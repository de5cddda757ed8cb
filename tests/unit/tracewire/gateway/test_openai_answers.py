"""Bodies and chunks in OpenAI's form, of pieces of a trace."""

from __future__ import annotations

from typing import Any

import openai.types
import openai.types.chat
import pytest

from tracewire import Values
from tracewire.gateway.continuity import Piece
from tracewire.gateway.openai_answers import Answer, ChatAnswer, CompletionAnswer, usage_of
from tracewire_bus.wire.messages import Usage

LOGPROBS = [{7: (-0.1, 1, " a"), 8: (-2.5, 2, " b")}, {9: (-0.2, 1, "é"), 8: (-3.0, 4, " b")}]
USAGE = Usage(prompt_tokens=5, completion_tokens=2, cached_tokens=1)


def piece(**fields: Any) -> Piece:
    """Two tokens of the second prompt's second choice."""
    usual: dict[str, Any] = {"invoke": 1, "choice": 1, "index": 0, "text": " aé", "token_ids": [7, 9]}
    usual |= {"logprobs": LOGPROBS, "delta": Values(), "finish_reason": None, "stop_reason": None}
    return Piece(**usual | fields)


def answer(kind: type[Answer], top: int | None = None, ids: bool = False) -> Answer:
    """An answer with two choices for each prompt."""
    return kind("t", "tiny", 1767225600, choices=2, top=top, ids=ids)


@pytest.mark.parametrize(
    ("kind", "whole", "chunk"),
    [
        (CompletionAnswer, openai.types.Completion, openai.types.Completion),
        (ChatAnswer, openai.types.chat.ChatCompletion, openai.types.chat.ChatCompletionChunk),
    ],
)
@pytest.mark.parametrize("top", [None, 0, 2])
def test_the_stock_client_s_types_take_them(kind: type[Answer], whole: Any, chunk: Any, top: int | None) -> None:
    made = answer(kind, top)
    ended = piece(finish_reason="length")
    body = whole.model_validate(made.body([made.whole(3, ended)], USAGE), strict=True)
    assert body.choices[0].finish_reason == "length"
    assert (body.usage.total_tokens, body.usage.prompt_tokens_details.cached_tokens) == (7, 1)
    for part in (made.opening(3), made.added(piece()), made.empty(3), made.ended(3, "stop")):
        if part is not None and not (kind is CompletionAnswer and part["finish_reason"] is None):
            assert chunk.model_validate(made.chunk([part])).choices[0].index == 3


def test_choices_are_numbered_over_the_prompts() -> None:
    made = answer(CompletionAnswer)
    assert [made.index(invoke, choice) for invoke in range(2) for choice in range(2)] == [0, 1, 2, 3]


def test_a_completion_s_logprobs_go_on_where_its_text_does() -> None:
    made = answer(CompletionAnswer, top=2)
    first, second = (made.added(piece())["logprobs"] for _ in range(2))
    assert first == {
        "tokens": [" a", "é"],
        "token_logprobs": [-0.1, -0.2],
        "top_logprobs": [{" a": -0.1, " b": -2.5}, {"é": -0.2, " b": -3.0}],
        "text_offset": [0, 2],
    }
    assert second["text_offset"] == [3, 5]
    other = made.added(piece(choice=0))["logprobs"]
    assert other["text_offset"] == [0, 2]


def test_a_chat_s_logprobs_have_bytes_and_as_many_alternatives_as_were_asked_for() -> None:
    (_, second) = answer(ChatAnswer, top=1).added(piece())["logprobs"]["content"]
    assert second == {
        "token": "é",
        "logprob": -0.2,
        "bytes": [195, 169],
        "top_logprobs": [{"token": "é", "logprob": -0.2, "bytes": [195, 169]}],
    }
    (first, _) = answer(ChatAnswer, top=0).added(piece())["logprobs"]["content"]
    assert first["top_logprobs"] == []


@pytest.mark.parametrize("kind", [CompletionAnswer, ChatAnswer])
def test_what_was_not_asked_for_is_left_out(kind: type[Answer]) -> None:
    added = answer(kind).added(piece())
    assert added["logprobs"] is None
    assert "token_ids" not in added
    assert answer(kind, ids=True).added(piece())["token_ids"] == [7, 9]


@pytest.mark.parametrize(("reason", "word"), [("stop", "stop"), ("length", "length"), ("abort", "stop"), (None, None)])
def test_a_choice_ends_in_openai_s_words(reason: str | None, word: str | None) -> None:
    assert answer(CompletionAnswer).added(piece(finish_reason=reason))["finish_reason"] == word


def test_usage_adds_up() -> None:
    assert usage_of(USAGE)["total_tokens"] == 7
