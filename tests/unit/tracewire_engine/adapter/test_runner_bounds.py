"""Sampling params that vLLM's runners refuse only in the worker, where the error would end the engine."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tracewire_bus.wire.messages import Invoke
from tracewire_engine.adapter.engine_api import Rejection
from tracewire_engine.adapter.runner_bounds import RunnerBounds

CONTEXT = 4096


class Words:
    """A tokenizer that takes each byte as a token."""

    max_token_id = 1000

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return list(text.encode())


def bounds(*, second: bool = True, ends: Any = None) -> RunnerBounds:
    processor = SimpleNamespace(
        generation_config_fields={} if ends is None else {"eos_token_id": ends},
        renderer=SimpleNamespace(get_eos_token_id=lambda: 5),
        tokenizer=Words(),
    )
    llm = SimpleNamespace(
        vllm_config=SimpleNamespace(use_v2_model_runner=second),
        model_config=SimpleNamespace(max_model_len=CONTEXT),
        input_processor=processor,
    )
    return RunnerBounds(llm)


def params(**sampling: Any) -> Any:
    made = pytest.importorskip("tracewire_engine.adapter.sampling")
    return made.sampling_params(Invoke(prompt="x", sampling=sampling), "")


def refused(bounded: RunnerBounds, **sampling: Any) -> tuple[str, str]:
    with pytest.raises(Rejection) as caught:
        bounded.check(params(**sampling), "sampling.")
    assert caught.value.failure.type == "TraceRejected"
    return caught.value.failure.field, caught.value.failure.message


@pytest.mark.parametrize("second", [False, True])
def test_a_seed_has_64_bits_for_each_choice(second: bool) -> None:
    bounded = bounds(second=second)
    for seed in (2**63, 2**64 - 1, -(2**63) - 1):
        field, message = refused(bounded, seed=seed)
        assert field == "sampling.seed"
        assert message == f"expected an integer from {-(2**63)} to {2**63 - 1}, got {seed}"
    # vLLM gives the second choice the seed behind it.
    assert refused(bounded, seed=2**63 - 1, n=2)[0] == "sampling.seed"
    for fine in ({"seed": 2**63 - 1}, {"seed": -(2**63)}, {"seed": 2**63 - 3, "n": 3}, {}):
        bounded.check(params(**fine), "sampling.")


@pytest.mark.parametrize(
    ("name", "sampling", "most"),
    [
        ("allowed_token_ids", lambda count: {"allowed_token_ids": list(range(count))}, 1024),
        ("logit_bias", lambda count: {"logit_bias": dict.fromkeys(range(count), 1.0)}, 1024),
        # One more is the token at which the model ends.
        ("stop_token_ids", lambda count: {"stop_token_ids": list(range(10, 10 + count)), "min_tokens": 4}, 127),
        ("max_tokens", lambda count: {"max_tokens": count}, 2**31 - 1 - CONTEXT),
        ("min_tokens", lambda count: {"min_tokens": count, "max_tokens": None}, 2**31 - 1 - CONTEXT),
        ("bad_words", lambda count: {"bad_words": [f"w{one}" for one in range(count)]}, 128),
        ("bad_words", lambda count: {"bad_words": ["a" * count]}, 1024),
    ],
)
def test_what_the_second_runner_has_no_room_for_is_refused(name: str, sampling: Any, most: int) -> None:
    bounds().check(params(**sampling(most)), "sampling.")
    field, message = refused(bounds(), **sampling(most + 1))
    assert field == f"sampling.{name}"
    assert str(most) in message or name == "stop_token_ids"
    # The first runner takes them, but for too many words, which vLLM refuses by itself.
    bounds(second=False).check(params(**sampling(most + 1)), "sampling.")


def test_stop_tokens_count_only_with_a_least_number_of_tokens() -> None:
    many = {"stop_token_ids": list(range(10, 300))}
    bounds().check(params(**many), "")
    field, message = refused(bounds(ends=[5, 6, 7]), **many, min_tokens=1)
    assert field == "sampling.stop_token_ids"
    assert message.startswith("expected at most 128 (with min_tokens")
    assert message.endswith("got 293")
    assert refused(bounds(ends=6), **many, min_tokens=1)[1].endswith("got 292")


def test_the_bounds_are_those_of_vllm_s_second_runner() -> None:
    """Its own code refuses what is refused here, and takes what is not."""
    states = pytest.importorskip("vllm.v1.worker.gpu.sample.logit_bias")
    state = object.__new__(states.LogitBiasState)
    state.prompt_len_np = [3]
    state.use_logit_bias = [False]
    for name in ("num_allowed_token_ids", "num_logit_bias", "min_lens", "num_stop_token_ids"):
        setattr(state, name, SimpleNamespace(np=[0]))
    state.restore_when_all_masked = SimpleNamespace(np=[0])
    for name in ("allowed_token_ids", "logit_bias_token_ids", "logit_bias", "stop_token_ids"):
        setattr(state, name, SimpleNamespace(stage_write=lambda *given: None))
    for sampling, fits in [
        ({"allowed_token_ids": [*range(1024)]}, True),
        ({"allowed_token_ids": [*range(1025)]}, False),
        ({"logit_bias": dict.fromkeys(range(1025), 1.0)}, False),
        ({"stop_token_ids": [*range(129)]}, True),
        ({"stop_token_ids": [*range(129)], "min_tokens": 1}, False),
    ]:
        if fits:
            state.add_request(0, params(**sampling))
            continue
        with pytest.raises(ValueError, match="Too many"):
            state.add_request(0, params(**sampling))
