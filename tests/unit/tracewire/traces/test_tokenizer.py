"""What a handle of a model has of its configuration and its tokenizer."""

from __future__ import annotations

import copy
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

import tracewire
from tests.support import ROOT
from tests.support.bus_engine import engine_info
from tracewire import Model, TokenizerUnavailable
from tracewire.traces.tokenizer import ModelConfig, load_tokenizer
from tracewire_bus.bus import Bus

DEMO = ROOT / "examples" / "demo_model" / "model"
SETTINGS = {"hidden_size": 8, "rope": {"theta": 1e4}, "architectures": ["Llama"]}


@pytest.fixture
async def model(embedded: str, prefix: str, bus: Bus) -> AsyncIterator[Model]:
    """The model of an engine that is registered, and has sent a heartbeat since."""
    info = engine_info(config=SETTINGS, path=str(DEMO))
    for _ in range(2):
        await bus.registry.register(info, 60)
    async with tracewire.connect(embedded, prefix=prefix) as client:
        yield await client.models.get("tiny")


async def test_the_configuration_comes_with_the_registry(model: Model) -> None:
    assert model.config.hidden_size == 8
    assert model.config["rope"].theta == 1e4
    assert model.config.to_dict() == SETTINGS
    assert dict(model.info.config) == SETTINGS
    assert "rope" not in repr(model.info)
    with pytest.raises(AttributeError, match="has no 'hidden'; it has architectures, hidden_size, rope"):
        _ = model.config.hidden


async def test_the_tokenizer_is_read_from_the_model_s_folder(model: Model) -> None:
    ids = model.tokenizer.encode("def parse(text):")
    assert model.tokenizer.decode(ids) == "def parse(text):"
    assert model.tokenizer is model.tokenizer


def test_a_configuration_can_be_copied_and_searched() -> None:
    config = ModelConfig(SETTINGS)
    assert copy.deepcopy(config) == config
    assert list(config) == list(SETTINGS)
    assert "hidden_size" in dir(config)
    assert config.get("absent", 3) == 3
    assert repr(config) == f"ModelConfig({SETTINGS!r})"


def test_without_transformers_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    load_tokenizer.cache_clear()
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(TokenizerUnavailable, match=r"pip install 'tracewire\[tokenizer\]'"):
        load_tokenizer("a model", "")


@pytest.mark.parametrize("name", ["/nowhere/at/all", "nobody/has-this-model"])
def test_files_that_are_not_here_are_not_downloaded(name: str, tmp_path: Path) -> None:
    with pytest.raises(TokenizerUnavailable, match=f"from '{name}', and the tokenizer's files are not on this machine"):
        load_tokenizer(name, "")
