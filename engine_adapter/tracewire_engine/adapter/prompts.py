"""Prompts, as text, chat messages or token ids, made into the token ids that vLLM computes."""

from __future__ import annotations

from typing import Any

import anyio
import anyio.to_thread

from tracewire_bus.wire.messages import Invoke

from .engine_api import Rejection
from .token_strings import TokenStrings

__all__ = ["Prompts"]


class Prompts:
    """Encodes prompts with `tokenizer` for a model with vLLM's `config`."""

    def __init__(self, tokenizer: Any, config: Any) -> None:
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
        """The token ids of an invoke's prompt, whose fields are named with `where` before them.

        Raises:
            Rejection: it has no prompt that this model takes.
        """
        given = [name for name in ("prompt", "token_ids", "messages") if getattr(invoke, name) is not None]
        if len(given) != 1:
            raise Rejection(
                f"{where}prompt", f"give exactly one of prompt, token_ids and messages, got {given or 'none'}"
            )
        if invoke.token_ids is not None:
            token_ids = list(invoke.token_ids)
            vocabulary = self._config.get_vocab_size()
            wrong = next((token for token in token_ids if not 0 <= token < vocabulary), None)
            if wrong is not None:
                raise Rejection(f"{where}token_ids", f"token id {wrong} is outside the vocabulary of {vocabulary}")
        elif invoke.messages is not None:
            for place, message in enumerate(invoke.messages):
                parts = message.get("content")
                kinds = (
                    {one.get("type", "text") for one in parts if isinstance(one, dict)} if type(parts) is list else ()
                )
                if set(kinds) - {"text"}:
                    raise Rejection(
                        f"{where}messages[{place}].content", "expected text: media are not taken in chat messages"
                    )
            self._bound(_characters(invoke.messages), where, "messages")

            def text_of(messages: list[dict[str, Any]]) -> str:
                return str(self._tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False))

            try:
                text = await anyio.to_thread.run_sync(text_of, invoke.messages, limiter=self._tokenizing)
            except Exception as error:
                raise Rejection(
                    f"{where}messages", f"the model's chat template refused the messages: {error}"
                ) from error
            token_ids = await self._encode(text, where, add_special_tokens=False)
        else:
            token_ids = await self._encode(invoke.prompt or "", where, add_special_tokens=True)
        if not token_ids:
            raise Rejection(f"{where}prompt", "the prompt is empty")
        return list(token_ids)

    async def _encode(self, text: str, where: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of a text, made on a thread: a long one takes seconds, in which the loop must serve the others."""
        self._bound(len(text), where, "prompt")

        def encode() -> list[int]:
            return list(self._tokenizer.encode(text, add_special_tokens=add_special_tokens))

        return await anyio.to_thread.run_sync(encode, limiter=self._tokenizing)

    def _bound(self, characters: int, where: str, field: str) -> None:
        limit = self._config.max_model_len
        if characters > limit * self._longest_token:
            raise Rejection(
                f"{where}{field}",
                f"a prompt of {characters} characters is more than this model's {limit} tokens can hold",
            )


def _characters(value: Any) -> int:
    """The number of characters in all texts of plain data. Each number and each container counts as one."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict):
        return 1 + sum(map(_characters, value.values()))
    return 1 + sum(map(_characters, value)) if isinstance(value, list) else 1
