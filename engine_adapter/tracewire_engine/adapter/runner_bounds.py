"""Checks sampling params against what vLLM's model runner holds of a request.

vLLM itself checks these bounds in the worker, as the runner takes the request. An error there ends the engine.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from tracewire_bus.domain.value_checks import MAX_INDEX

from .engine_api import Rejection

__all__ = ["MAX_SEED", "RunnerBounds"]

#: The greatest seed; the least is one further from 0. The HTTP API of vLLM has the same bounds.
MAX_SEED: Final = 2**63 - 1


class RunnerBounds:
    """The bounds of one `AsyncLLM`, whose config tells which model runner it has."""

    def __init__(self, llm: Any) -> None:
        self._llm = llm

    def check(self, params: Any, where: str) -> None:
        """Check the sampling params of a request. The names of their fields get `where` before them.

        Raises:
            Rejection: the runner would not take them.
        """
        for name, message in self._refusals(params):
            raise Rejection(f"{where}{name}", message)

    def _refusals(self, params: Any) -> Iterator[tuple[str, str]]:
        """The params that are beyond a bound, each with a message."""
        if params.seed is not None:
            # Each choice has a seed of its own, which is greater by its number.
            most = MAX_SEED - max(0, (params.n or 1) - 1)
            if not -MAX_SEED - 1 <= params.seed <= most:
                yield "seed", f"expected an integer from {-MAX_SEED - 1} to {most}, got {params.seed}"
        if not self._llm.vllm_config.use_v2_model_runner:
            return
        # The runner counts a sequence's tokens in 32 bits, the prompt's among them.
        most = MAX_INDEX - self._llm.model_config.max_model_len
        for name in ("max_tokens", "min_tokens"):
            if (getattr(params, name) or 0) > most:
                yield name, f"expected at most {most}, got {getattr(params, name)}"
        yield from self._long_lists(params)
        if params.bad_words:
            yield from self._bad_words(params.bad_words)

    def _long_lists(self, params: Any) -> Iterator[tuple[str, str]]:
        from vllm.v1.worker.gpu.sample import logit_bias as bounds

        for name, most in (
            ("allowed_token_ids", bounds.MAX_NUM_ALLOWED_TOKEN_IDS),
            ("logit_bias", bounds.MAX_NUM_LOGIT_BIAS_TOKENS),
        ):
            count = len(getattr(params, name) or ())
            if count > most:
                yield name, f"expected at most {most} tokens, got {count}"
        if params.min_tokens <= 0:
            return
        stops, most = len(self._stops(params)), bounds.MAX_NUM_STOP_TOKEN_IDS
        if stops > most:
            more = "with min_tokens, and those at which the model itself ends count too"
            yield "stop_token_ids", f"expected at most {most} ({more}), got {stops}"

    def _stops(self, params: Any) -> set[int]:
        """The ids that end a request, as vLLM puts them together when it takes the request."""
        processor = self._llm.input_processor
        own, end = processor.generation_config_fields.get("eos_token_id"), processor.renderer.get_eos_token_id()
        found = {*params.all_stop_token_ids, *([own] if isinstance(own, int) else own or ())}
        return found if end is None else found | {end}

    def _bad_words(self, words: list[str]) -> Iterator[tuple[str, str]]:
        from vllm import SamplingParams
        from vllm.exceptions import VLLMValidationError

        tokenizer = self._llm.input_processor.tokenizer
        if tokenizer is None:
            return
        most_words, most_tokens = _most_bad_words()
        # With a space before it and without, and no token has less than a byte.
        if 2 * len(words) <= most_words and 2 * sum(len(word.encode()) + 1 for word in words) <= most_tokens:
            return
        params = SamplingParams(bad_words=words)
        try:
            params.update_from_tokenizer(tokenizer)
        except VLLMValidationError as error:
            yield "bad_words", str(error)
            return
        made = params.bad_words_token_ids or []
        if len(made) > most_words:
            yield "bad_words", f"expected at most {most_words} words, with a space before them or not, got {len(made)}"
        tokens = sum(map(len, made))
        if tokens > most_tokens:
            yield "bad_words", f"expected words of at most {most_tokens} tokens together, got {tokens}"


def _most_bad_words() -> tuple[int, int]:
    """How many words a request may have, and how many tokens they may have together."""
    import vllm.envs as envs
    from vllm.v1.worker.gpu.sample import bad_words

    if hasattr(bad_words, "MAX_NUM_BAD_WORDS"):  # vLLM 0.25
        return bad_words.MAX_NUM_BAD_WORDS, bad_words.MAX_BAD_WORDS_TOTAL_TOKENS
    return envs.VLLM_MAX_NUM_BAD_WORDS, envs.VLLM_MAX_BAD_WORDS_TOTAL_TOKENS
