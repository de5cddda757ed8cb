"""Small models that draft for the demo model: one for each of vLLM's ways to draft by a model.

They are made of the demo model's weights, and of maps by least squares between what it computes for a token and for
those behind it. So they guess well enough that some of their drafts are taken.
"""

# mypy: ignore-errors

from __future__ import annotations

import argparse
import dis
import inspect
import json
import json.decoder
import shlex
import shutil
import textwrap
import zipfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from tests.support import ROOT

__all__ = ["DRAFT_MODELS", "Follower", "drafting_model"]

DEMO = ROOT / "examples" / "demo_model" / "model"
#: How many tokens are drafted for a step.
DRAFTS = 3

Weights = dict[str, torch.Tensor]
#: What a checkpoint holds: the changes of the demo model's configuration, and its tensors.
Checkpoint = tuple[dict[str, Any], Weights]


@cache
def _computed() -> SimpleNamespace:
    """What the demo model computes for sources of Python's own library, a row for each token, text behind text.

    Attributes:
        tokens: the embeddings of the tokens.
        layers: the stream before each layer, and behind the last one.
        last: that, normed.
        ends: the row behind each text.
    """
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(DEMO)
    tokens, layers, last = [], [], []
    unnormed: list[torch.Tensor] = []
    model.model.norm.register_forward_pre_hook(lambda _, given: unnormed.append(given[0][0]))
    with torch.inference_mode():
        for module in (argparse, dis, json.decoder, shlex, textwrap, zipfile):
            text = tokenizer(inspect.getsource(module), return_tensors="pt").input_ids[:, :1024]
            out = model.model(text, output_hidden_states=True)
            tokens.append(model.model.embed_tokens(text)[0])
            layers.append(torch.stack([*(one[0] for one in out.hidden_states[:-1]), unnormed[-1]]))
            last.append(out.last_hidden_state[0])
    ends = torch.tensor([len(one) for one in tokens]).cumsum(0).tolist()
    return SimpleNamespace(tokens=torch.cat(tokens), layers=torch.cat(layers, 1), last=torch.cat(last), ends=ends)


def _fitted(given: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """The matrix that turns rows `[n, k]` into rows `[n, m]` with the least error, of small numbers: `[m, k]`."""
    small = 1e-2 * given.pow(2).mean() * len(given) * torch.eye(given.shape[1])
    return torch.linalg.solve(given.T @ given + small, given.T @ wanted).T


def _rows(ahead: int) -> torch.Tensor:
    """The rows of `_computed` behind which so many more rows of the same text come."""
    ends = _computed().ends
    return torch.cat([torch.arange(start, end - ahead) for start, end in zip([0, *ends], ends, strict=False)])


def _layer(weights: Weights, number: int) -> Weights:
    """The weights of one of the demo model's layers, by their names within it."""
    stem = f"model.layers.{number}."
    return {name.removeprefix(stem): one for name, one in weights.items() if name.startswith(stem)}


def _quiet(weights: Weights) -> Weights:
    """A layer that adds little to its stream."""
    return {
        name: one / 16 if name.endswith(("o_proj.weight", "down_proj.weight")) else one for name, one in weights.items()
    }


def _draft_model(weights: Weights) -> Checkpoint:
    """A model of its own: the demo model without two of its layers."""
    kept = (0, 1, 2, 3, 6, 7)
    rest = {name: one for name, one in weights.items() if ".layers." not in name}
    layers = {
        f"model.layers.{place}.{name}": one
        for place, number in enumerate(kept)
        for name, one in _layer(weights, number).items()
    }
    return {"num_hidden_layers": len(kept)}, rest | layers


def _eagle(weights: Weights) -> Checkpoint:
    """One layer over a token's embedding and the model's result of the token before it: it guesses the next result."""
    found, at = _computed(), _rows(1)
    given = torch.cat((found.tokens[at + 1], found.last[at]), 1)
    layer = {name: one for name, one in _quiet(_layer(weights, 0)).items() if name != "input_layernorm.weight"}
    made = {f"layers.0.{name}": one for name, one in layer.items()}
    made |= {
        "fc.weight": _fitted(given, found.last[at + 1]),
        "embed_tokens.weight": weights["model.embed_tokens.weight"],
    }
    return {"num_hidden_layers": 1}, made


def _eagle3(weights: Weights) -> Checkpoint:
    """One layer over a token's embedding and the streams before three layers at the token before it."""
    found, at = _computed(), _rows(1)
    count = len(found.layers) - 1
    given = torch.cat([found.layers[layer][at] for layer in (2, count // 2, count - 3)], 1)
    layer = _quiet(_layer(weights, 7))
    made = {
        f"midlayer.{name}": torch.cat((one, one), 1)
        if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight"))
        else one
        for name, one in layer.items()
    }
    embedding = weights["model.embed_tokens.weight"]
    made |= {
        "midlayer.hidden_norm.weight": layer["input_layernorm.weight"],
        "fc.weight": _fitted(given, found.layers[count][at + 1]),
        "norm.weight": weights["model.norm.weight"],
        "lm_head.weight": embedding,
    }
    return {"num_hidden_layers": 1, "tie_word_embeddings": False, "draft_vocab_size": len(embedding)}, made


def _medusa(weights: Weights) -> Checkpoint:
    """A head for each draft, over the model's result of the last token."""
    found, embedding = _computed(), weights["model.embed_tokens.weight"]
    size, width = embedding.shape
    made = {}
    for head in range(DRAFTS):
        at = _rows(head + 1)
        ahead = _fitted(found.last[at], found.last[at + head + 1])
        made[f"blocks.{head}.layers.0.weight"] = torch.zeros(width, width)
        made[f"lm_heads.{head}.weight"] = embedding.float() @ ahead
    config = {"architectures": ["MedusaModel"], "model_type": "medusa", "num_heads": DRAFTS, "num_hidden_layers": 1}
    return {**config, "hidden_size": width, "vocab_size": size}, made


#: By vLLM's name of the method, what makes such a model's checkpoint.
DRAFT_MODELS: dict[str, Callable[[Weights], Checkpoint]] = {
    "draft_model": _draft_model,
    "eagle": _eagle,
    "eagle3": _eagle3,
    "medusa": _medusa,
}


def drafting_model(method: str, folder: Path) -> dict[str, Any]:
    """vLLM's options of drafting by a model of this kind, whose checkpoint is made in a folder."""
    changes, weights = DRAFT_MODELS[method](load_file(DEMO / "model.safetensors"))
    path = folder / method
    path.mkdir(parents=True)
    config = json.loads((DEMO / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | changes))
    save_file({name: one.bfloat16().clone() for name, one in weights.items()}, path / "model.safetensors")
    for file in DEMO.glob("*token*"):
        shutil.copy(file, path)
    return {"method": method, "model": str(path), "num_speculative_tokens": DRAFTS}


class Follower:
    """A class that drafts, as vLLM wants one (`custom_class`): what followed the last token before."""

    def __init__(self, vllm_config: Any) -> None:
        self._drafts = vllm_config.speculative_config.num_speculative_tokens

    def load_model(self, *_: Any, **__: Any) -> None:
        """Do nothing: there is no model."""

    def propose(self, sampled: list[list[int]], lengths: np.ndarray, tokens: np.ndarray, **_: Any) -> list[list[int]]:
        """Draft for each request: `sampled` are its last step's tokens, `tokens` all of them."""
        found = []
        for row, fresh in enumerate(sampled):
            ids = tokens[row, : lengths[row]]
            (before,) = np.nonzero(ids[:-1] == ids[-1]) if fresh else ([],)
            found.append(ids[before[-1] + 1 :][: self._drafts].tolist() if len(before) else [])
        return found
