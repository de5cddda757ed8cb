"""A model's handle: it prints its tree, and names the nearest path."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tracewire import Client


async def test_a_model_prints_its_tree_and_names_the_nearest_path(client: Client, engine: Callable[..., Any]) -> None:
    async with engine():
        model = await client.models.get("tiny")
    assert model.name == "tiny"
    assert model.info.hidden_size == 8
    assert "(0-3): 4 x LlamaDecoderLayer" in repr(model)
    assert model.model.layers[2].mlp.path == "model.layers.2.mlp"
    with pytest.raises(AttributeError, match="mlp"):
        _ = model.model.layers[2].mpl
    with pytest.raises((AttributeError, LookupError)):
        _ = model.model.layers[9]


@pytest.mark.parametrize(
    "name", ["logits", "samples", "tokenizer", "config", "output", "source", "named_modules", "get"]
)
async def test_what_only_a_block_can_read_says_so(client: Client, engine: Callable[..., Any], name: str) -> None:
    async with engine():
        model = await client.models.get("tiny")
        with pytest.raises(AttributeError, match=f"'{name}' exists on the engine, inside a block"):
            getattr(model, name)
        assert not hasattr(model, name)


async def test_a_module_s_words_slices_and_misspelt_children(client: Client, engine: Callable[..., Any]) -> None:
    async with engine():
        model = await client.models.get("tiny")
        layers = model.model.layers
        assert [layer.path for layer in layers[1:3]] == ["model.layers.1", "model.layers.2"]
        assert [layer.path for layer in layers[-1:]] == [layers[-1].path]
        with pytest.raises(AttributeError, match=r"'model\.layers\.2\.output' exists on the engine"):
            _ = layers[2].output
        with pytest.raises(AttributeError, match=r"client\.edits\(model\)\.install"):
            _ = model.edit
        with pytest.raises(AttributeError, match="AutoTokenizer"):
            _ = model.tokenizer
        with pytest.raises(AttributeError, match=r"no module at 'model\.layrs'; the nearest .* 'model\.layers'"):
            _ = model.model.layrs
