"""A tiny Llama with random weights, quantized in the ways that vLLM runs on a CPU, and the same model in float32.

The float32 model has the weights that the quantized one has after it took them from their codes, so the two differ by
rounding where a method quantizes weights alone, and by a few per cent where it quantizes activations, too.
"""

# mypy: ignore-errors

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
from safetensors.torch import load_file, save_file

from tests.support.checkpoints import make_checkpoint

__all__ = ["METHODS", "make_quantized"]

GROUP = 32
Tensors = dict[str, torch.Tensor]


def _int8(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    """Eight bits, a scale for each output; activations are quantized, too, with a scale for each token."""
    scale = weight.abs().amax(1, keepdim=True) / 127
    codes = (weight / scale).round()
    return {"weight": codes.to(torch.int8), "weight_scale": scale}, codes * scale


def _grouped(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes of -8 to 7, a scale for each group of inputs, and the weights that they stand for."""
    groups = weight.unflatten(1, (-1, GROUP))
    scale = groups.abs().amax(2, keepdim=True) / 7
    codes = (groups / scale).round().clamp(-8, 7)
    return codes.flatten(1), scale.squeeze(2), (codes * scale).flatten(1)


def _int4(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    """Four bits, a scale for each group of inputs."""
    codes, scale, stood_for = _grouped(weight)
    packed = pack_to_int32(codes.to(torch.int8), 4)
    return {"weight_packed": packed, "weight_scale": scale, "weight_shape": torch.tensor(weight.shape)}, stood_for


def _awq(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    """AWQ's layout of the same: inputs first, and the eight codes of a word in AWQ's order."""
    codes, scale, stood_for = _grouped(weight)

    def words(values: torch.Tensor) -> torch.Tensor:
        eights = values.to(torch.int64).unflatten(1, (-1, 8))[:, :, (0, 2, 4, 6, 1, 3, 5, 7)]
        packed = (eights << torch.arange(0, 32, 4)).sum(2)
        return torch.where(packed >= 2**31, packed - 2**32, packed).to(torch.int32)

    zeros = torch.full((scale.shape[1], weight.shape[0]), 8)
    tensors = {"qweight": words(codes.T + 8), "qzeros": words(zeros), "scales": scale.T.contiguous()}
    return tensors, stood_for


def _compressed(weights: dict[str, Any], activations: dict[str, Any] | None, format: str) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": format,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


_SYMMETRIC = {"type": "int", "symmetric": True, "dynamic": False}
#: By method, what makes a linear layer's tensors of its weight, and the checkpoint's `quantization_config`.
METHODS: dict[str, tuple[Callable[[torch.Tensor], tuple[Tensors, torch.Tensor]], dict[str, Any]]] = {
    "int8": (
        _int8,
        _compressed(
            {**_SYMMETRIC, "num_bits": 8, "strategy": "channel"},
            {**_SYMMETRIC, "num_bits": 8, "strategy": "token", "dynamic": True},
            "int-quantized",
        ),
    ),
    "int4": (
        _int4,
        _compressed({**_SYMMETRIC, "num_bits": 4, "strategy": "group", "group_size": GROUP}, None, "pack-quantized"),
    ),
    "awq": (
        _awq,
        {
            "quant_method": "awq",
            "bits": 4,
            "group_size": GROUP,
            "zero_point": True,
            "modules_to_not_convert": ["lm_head"],
        },
    ),
}


def make_quantized(method: str, folder: Path) -> tuple[Path, Path]:
    """The quantized checkpoint, and the one in float32 with the weights that its codes stand for."""
    plain = make_checkpoint("llama", folder)
    quantize, config = METHODS[method]
    tensors, stood_for = {}, {}
    for name, weight in load_file(plain / "model.safetensors").items():
        if name.endswith("_proj.weight"):
            made, stood_for[name] = quantize(weight)
            tensors.update({name.removesuffix("weight") + end: value.contiguous() for end, value in made.items()})
        else:
            tensors[name] = stood_for[name] = weight
    quantized = folder / f"llama-{method}"
    quantized.mkdir()
    for file in plain.iterdir():
        if file.suffix != ".safetensors":
            (quantized / file.name).write_bytes(file.read_bytes())
    described = json.loads((plain / "config.json").read_text()) | {"quantization_config": config}
    (quantized / "config.json").write_text(json.dumps(described))
    for path, weights in ((quantized, tensors), (plain, stood_for)):
        save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    return quantized, plain
