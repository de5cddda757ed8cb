"""Chat templates run on a thread, within a time limit."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from tracewire_bus.wire.messages import Invoke
from tracewire_engine.adapter.engine_api import Rejection
from tracewire_engine.adapter.prompts import Prompts


async def test_a_chat_template_runs_on_a_thread_and_bounded() -> None:
    threads: list[int] = []

    class Tokenizer:
        def apply_chat_template(self, messages: Any, **_: Any) -> str:
            threads.append(threading.get_ident())
            return "text"

        def encode(self, text: str, **_: Any) -> list[int]:
            return [1]

        def get_vocab(self) -> dict[str, int]:
            return {"text": 1}

    prompts = Prompts(Tokenizer(), SimpleNamespace(max_model_len=100))
    message = {"role": "user", "content": "hello"}
    assert await prompts.token_ids(Invoke(messages=[message]), "") == [1]
    assert threads
    assert threads[0] != threading.get_ident()
    with pytest.raises(Rejection) as caught:
        await prompts.token_ids(Invoke(messages=[message] * 200), "")
    assert caught.value.failure.field == "messages"
    assert len(threads) == 1
