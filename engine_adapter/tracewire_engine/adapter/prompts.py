"""Prompts, as text or token ids, made into the token ids that vLLM computes. `chats.py` renders chat messages."""

from __future__ import annotations

from typing import Any

import anyio
import anyio.to_thread

from tracewire_bus.wire.messages import Chat, Invoke

from .engine_api import Rejection
from .token_strings import TokenStrings

__all__ = ["Prompts"]


class Prompts:
    """Encodes prompts with `tokenizer` for a model with vLLM's `config`.

    A prompt has at most `most` tokens; 0: as many as the model takes.
    """

    def __init__(self, tokenizer: Any, config: Any, most: int = 0) -> None:
        self._most = most
        self._tokenizer = tokenizer
        self._config = config
        self._longest_token = max((len(token) for token in tokenizer.get_vocab()), default=1)
        # One thread at a time: a tokenizer is not made to be shared.
        self._tokenizing = anyio.CapacityLimiter(1)
        self.strings = TokenStrings(tokenizer)

    async def strings_of(self, token_ids: list[int]) -> list[str]:
        """The strings of a prompt's tokens, made on a thread: a prompt has many tokens that are not cached yet."""
        return await anyio.to_thread.run_sync(self.strings, token_ids, limiter=self._tokenizing)

    async def token_ids(self, invoke: Invoke, where: str) -> list[int]:
        """The token ids of an invoke's text or token ids, whose fields are named with `where` before them.

        Raises:
            Rejection: it has no prompt that this model takes.
        """
        if invoke.token_ids is not None:
            token_ids = list(invoke.token_ids)
            self.check_length(len(token_ids), f"{where}token_ids")
            vocabulary = self._config.get_vocab_size()
            wrong = next((token for token in token_ids if not 0 <= token < vocabulary), None)
            if wrong is not None:
                raise Rejection(f"{where}token_ids", f"token id {wrong} is outside the vocabulary of {vocabulary}")
        else:
            token_ids = await self._encode(invoke.prompt or "", where)
        if not token_ids:
            raise Rejection(f"{where}prompt", "the prompt is empty")
        self.check_length(len(token_ids), f"{where}prompt")
        return list(token_ids)

    def chat_of(self, invoke: Invoke, where: str) -> Chat | None:
        """The chat of an invoke; `None` if its prompt is text or token ids.

        Raises:
            Rejection: it has not exactly one prompt, or one that is too long for this model, or media in its messages.
        """
        given = [name for name in ("prompt", "token_ids", "messages", "chat") if getattr(invoke, name) is not None]
        if len(given) != 1:
            raise Rejection(
                f"{where}prompt", f"give exactly one of prompt, token_ids, messages and chat, got {given or 'none'}"
            )
        chat = Chat(messages=invoke.messages) if invoke.messages is not None else invoke.chat
        if chat is None:
            return None
        for place, message in enumerate(chat.messages):
            parts = message.get("content")
            kinds = {one.get("type", "text") for one in parts if isinstance(one, dict)} if type(parts) is list else ()
            if set(kinds) - {"text"}:
                raise Rejection(
                    f"{where}messages[{place}].content", "expected text: media are not taken in chat messages"
                )
        self._bound(_characters(chat.messages), where, "messages")
        for name, value in (("tools", chat.tools), ("chat_template_kwargs", chat.template_kwargs)):
            self._bound(_characters(value), where, name)
        return chat

    async def _encode(self, text: str, where: str) -> list[int]:
        """Token ids of a text, made on a thread: a long one takes seconds, in which the loop must serve the others."""
        self._bound(len(text), where, "prompt")

        def encode() -> list[int]:
            return list(self._tokenizer.encode(text, add_special_tokens=True))

        return await anyio.to_thread.run_sync(encode, limiter=self._tokenizing)

    def check_length(self, tokens: int, field: str) -> None:
        """Check the number of a prompt's tokens.

        Raises:
            Rejection: the engine's limit is lower.
        """
        if 0 < self._most < tokens:
            message = f"a prompt has at most {self._most} tokens, got {tokens}"
            raise Rejection(field, f"{message} (--limit prompt-tokens)", limit="prompt_tokens")

    def _bound(self, characters: int, where: str, field: str) -> None:
        limit = min(self._config.max_model_len, self._most or self._config.max_model_len)
        if characters > limit * self._longest_token:
            raise Rejection(
                f"{where}{field}",
                f"a prompt of {characters} characters is more than {limit} tokens can hold, which this engine takes",
                limit="prompt_tokens",
            )


def _characters(value: Any) -> int:
    """The number of characters in all texts of plain data. Each number and each container counts as one."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict):
        return 1 + sum(map(_characters, value.values()))
    return 1 + sum(map(_characters, value)) if isinstance(value, list) else 1
