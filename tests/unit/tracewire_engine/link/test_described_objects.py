"""A configuration and a tokenizer, made again from their descriptions."""

from __future__ import annotations

import json
from typing import Any

import pytest
from transformers import AutoTokenizer, GPT2Config, LlamaConfig, PreTrainedConfig, Qwen2VLConfig

from tests.support import ROOT
from tracewire_engine.link.described_objects import described, made
from tracewire_engine.link.shared_rows import SharedValueError

TEXT = "def add(a, b):\n    return a + b  # é\n"


def test_a_tokenizer_encodes_and_decodes_as_the_one_described() -> None:
    own = AutoTokenizer.from_pretrained(ROOT / "examples" / "demo_model" / "model")
    found = made(described(own))
    assert found(TEXT)["input_ids"] == own(TEXT)["input_ids"]
    ids = [*own(TEXT)["input_ids"], own.eos_token_id]
    for skipped in (True, False):
        assert found.decode(ids, skip_special_tokens=skipped) == own.decode(ids, skip_special_tokens=skipped)
    assert found.special_tokens_map == own.special_tokens_map
    messages = [{"role": "user", "content": "hello"}]
    assert found.apply_chat_template(messages, tokenize=False) == own.apply_chat_template(messages, tokenize=False)
    assert (found.padding_side, found.model_max_length) == (own.padding_side, own.model_max_length)
    assert len(found) == len(own)


@pytest.mark.parametrize("own", [LlamaConfig(hidden_size=64), Qwen2VLConfig(), GPT2Config(n_embd=96)])
def test_a_configuration_is_equal_with_its_parts(own: PreTrainedConfig) -> None:
    found = made(described(own))
    assert type(found).__name__ == type(own).__name__
    compare(found, own)


def compare(found: Any, own: PreTrainedConfig) -> None:
    assert getattr(found, "hidden_size", None) == getattr(own, "hidden_size", None)
    for name in json.loads(own.to_json_string(use_diff=False)).keys() - {"transformers_version"}:
        if name in own.sub_configs:
            compare(getattr(found, name), getattr(own, name))
        else:
            assert (name, getattr(found, name)) == (name, getattr(own, name))


def test_nothing_else_is_described() -> None:
    with pytest.raises(TypeError, match="object cannot be given"):
        described(object())


@pytest.mark.parametrize("given", [["odd", "{}"], ["config"], ["config", 1], ["tokenizer", "{}"], []])
def test_what_is_no_description_makes_nothing(given: list[Any]) -> None:
    with pytest.raises(SharedValueError):
        made(given)
