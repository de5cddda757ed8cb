"""Prompts are encoded on a thread, and bounded before that."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from tracewire_bus.wire.messages import Chat, Invoke
from tracewire_engine.adapter.engine_api import Rejection
from tracewire_engine.adapter.prompts import Prompts


class Tokenizer:
    """Notes its threads."""

    def __init__(self) -> None:
        self.threads: list[int] = []

    def encode(self, text: str, **_: Any) -> list[int]:
        self.threads.append(threading.get_ident())
        return [1]

    def get_vocab(self) -> dict[str, int]:
        return {"text": 1}


MESSAGE = {"role": "user", "content": "hello"}


async def test_a_text_is_encoded_on_a_thread_and_bounded() -> None:
    tokenizer = Tokenizer()
    prompts = Prompts(tokenizer, SimpleNamespace(max_model_len=100))
    assert await prompts.token_ids(Invoke(prompt="hello"), "") == [1]
    assert threading.get_ident() not in tokenizer.threads
    with pytest.raises(Rejection) as caught:
        await prompts.token_ids(Invoke(prompt="hello" * 200), "")
    assert caught.value.failure.field == "prompt"
    assert len(tokenizer.threads) == 1


@pytest.mark.parametrize(
    ("invoke", "field"),
    [
        (Invoke(), "prompt"),
        (Invoke(prompt="a", chat=Chat(messages=[MESSAGE])), "prompt"),
        (Invoke(messages=[MESSAGE] * 200), "messages"),
        (Invoke(chat=Chat(messages=[MESSAGE], tools=[{"a": "b" * 1000}])), "tools"),
        (Invoke(messages=[{"role": "user", "content": [{"type": "image_url"}]}]), "messages[0].content"),
    ],
)
def test_what_is_no_prompt_is_refused_with_its_field(invoke: Invoke, field: str) -> None:
    prompts = Prompts(Tokenizer(), SimpleNamespace(max_model_len=100))
    with pytest.raises(Rejection) as caught:
        prompts.chat_of(invoke, "")
    assert caught.value.failure.field == field


def test_a_prompt_of_text_is_no_chat() -> None:
    prompts = Prompts(Tokenizer(), SimpleNamespace(max_model_len=100))
    assert prompts.chat_of(Invoke(prompt="a"), "") is None
    assert prompts.chat_of(Invoke(messages=[MESSAGE]), "") == Chat(messages=[MESSAGE])
