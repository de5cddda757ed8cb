"""Sparse autoencoders in SAELens's format and in plain safetensors files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from tracewire_bus.domain.autoencoders import SparseAutoencoder, WrongAutoencoder, same_model, size_of, unpacked

FEATURES, WIDTH = 12, 5
RNG = np.random.default_rng(3)
X = RNG.normal(size=(7, WIDTH)).astype(np.float32)


def tensors(*names: str) -> dict[str, np.ndarray[Any, Any]]:
    shapes = {"W_enc": (WIDTH, FEATURES), "W_dec": (FEATURES, WIDTH), "b_dec": (WIDTH,)}
    return {
        name: RNG.normal(size=shapes.get(name, (FEATURES,))).astype(np.float32)
        for name in ("W_enc", "W_dec", "b_dec", *names)
    }


def folder(path: Path, config: dict[str, Any], given: dict[str, np.ndarray[Any, Any]]) -> Path:
    """A folder as SAELens writes it."""
    save_file(given, path / "sae_weights.safetensors")
    (path / "cfg.json").write_text(json.dumps({"d_in": WIDTH, "d_sae": FEATURES, "dtype": "float32", **config}))
    return path


def meant(given: dict[str, np.ndarray[Any, Any]], architecture: str, *, centered: bool, k: int = 3) -> Any:
    """What SAELens computes: features of `X`."""
    pre = (X - given["b_dec"] * centered) @ given["W_enc"]
    if architecture == "gated":
        magnitude = np.maximum(pre * np.exp(given["r_mag"]) + given["b_mag"], 0)
        return magnitude * (pre + given["b_gate"] > 0)
    pre = pre + given["b_enc"]
    if architecture == "jumprelu":
        return np.maximum(pre, 0) * (pre > given["threshold"])
    if architecture == "topk":
        least = np.sort(pre, -1)[:, -k, None]
        return np.maximum(pre, 0) * (pre >= least)
    return np.maximum(pre, 0)


@pytest.mark.parametrize("centered", [False, True])
@pytest.mark.parametrize(
    ("architecture", "names", "config"),
    [
        ("standard", ["b_enc"], {"activation_fn_str": "relu"}),
        ("topk", ["b_enc"], {"k": 3}),
        ("jumprelu", ["b_enc", "threshold"], {}),
        ("gated", ["b_gate", "r_mag", "b_mag"], {}),
    ],
)
def test_an_autoencoder_in_saelens_format_computes_what_saelens_does(
    tmp_path: Path, architecture: str, names: list[str], config: dict[str, Any], centered: bool
) -> None:
    given = tensors(*names)
    options = {"architecture": architecture, "apply_b_dec_to_input": centered, **config}
    options |= {"model_name": "gemma-2-2b", "hook_name": "blocks.3.hook_resid_post"}
    loaded = SparseAutoencoder.load(folder(tmp_path, options, given))
    assert (loaded.description.model, loaded.description.at) == ("gemma-2-2b", "residual(3)")
    found = loaded.encode(X)
    assert 0 < np.count_nonzero(found) < found.size
    np.testing.assert_allclose(found, meant(given, architecture, centered=centered), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(loaded.decode(found), found @ given["W_dec"] + given["b_dec"], rtol=1e-5, atol=1e-5)
    # Written and read again, it is the same.
    loaded.save(tmp_path / "again")
    written = json.loads((tmp_path / "again" / "cfg.json").read_text())
    assert written["metadata"]["hook_name"] == "blocks.3.hook_resid_post"
    again = SparseAutoencoder.load(tmp_path / "again")
    assert again.description == loaded.description
    np.testing.assert_allclose(again.encode(X), found, rtol=1e-5, atol=1e-5)


def test_older_and_newer_configurations(tmp_path: Path) -> None:
    given = tensors("b_enc")
    old = {"activation_fn_str": "topk", "activation_fn_kwargs": {"k": 3}, "hook_name": "blocks.4.hook_resid_pre"}
    one = SparseAutoencoder.load(folder(tmp_path, old, given)).description
    assert (one.architecture, one.k, one.at, one.centered) == ("topk", 3, "residual(3)", True)
    heads = {"architecture": "standard", "metadata": {"hook_name": "blocks.2.attn.hook_z"}}
    one = SparseAutoencoder.load(folder(tmp_path, heads, given))
    assert one.description.at == "heads(2)"
    one.save(tmp_path / "heads")
    assert SparseAutoencoder.load(tmp_path / "heads").description == one.description
    new = {"architecture": "standard", "metadata": {"model_name": "gpt2-small", "hook_name": "blocks.0.hook_mlp_out"}}
    one = SparseAutoencoder.load(folder(tmp_path, new, given)).description
    assert (one.architecture, one.model, one.at) == ("relu", "gpt2-small", "")


def test_scaled_activations_become_a_part_of_the_weights(tmp_path: Path) -> None:
    given = tensors("b_enc")
    options = {"architecture": "topk", "k": 3, "normalize_activations": "expected_average_only_in"}
    path = folder(tmp_path, {**options, "rescale_acts_by_decoder_norm": True}, given)
    with pytest.raises(WrongAutoencoder, match="give the factor as scaling"):
        SparseAutoencoder.load(path)
    loaded = SparseAutoencoder.load(path, scaling=0.5)
    norms = np.linalg.norm(given["W_dec"], axis=-1)
    pre = ((0.5 * X - given["b_dec"]) @ given["W_enc"] + given["b_enc"]) * norms
    active = np.maximum(pre, 0) * (pre >= np.sort(pre, -1)[:, -3, None])
    np.testing.assert_allclose(loaded.encode(X), active, rtol=1e-4, atol=1e-4)
    decoded = ((active / norms) @ given["W_dec"] + given["b_dec"]) / 0.5
    np.testing.assert_allclose(loaded.decode(active), decoded, rtol=1e-4, atol=1e-4)


def test_a_file_of_two_linear_layers(tmp_path: Path) -> None:
    given = tensors("b_enc")
    layers = {
        "encoder.weight": np.ascontiguousarray(given["W_enc"].T),
        "encoder.bias": given["b_enc"],
        "decoder.weight": np.ascontiguousarray(given["W_dec"].T),
        "b_dec": given["b_dec"],
    }
    save_file(layers, tmp_path / "sae.safetensors")
    loaded = SparseAutoencoder.load(tmp_path / "sae.safetensors", at="residual(1)")
    assert loaded.description.at == "residual(1)"
    np.testing.assert_allclose(loaded.encode(X), meant(given, "relu", centered=False), rtol=1e-5, atol=1e-5)


def test_bfloat16_stays(tmp_path: Path) -> None:
    half = {name: one.astype(ml_dtypes.bfloat16) for name, one in tensors("b_enc").items()}
    save_file(half, tmp_path / "sae.safetensors")
    loaded = SparseAutoencoder.load(tmp_path / "sae.safetensors")
    assert loaded.packed.dtype.name == "bfloat16"
    assert len(loaded.packed) == size_of(loaded.description)
    parts = unpacked(loaded.description, loaded.packed)
    assert np.array_equal(parts["encoder"], half["W_enc"].T)
    assert np.array_equal(parts["encoder_bias"], half["b_enc"])


@pytest.mark.parametrize(
    ("config", "drop", "says"),
    [
        ({"architecture": "transcoder"}, "", "expected standard, topk, jumprelu or gated, got 'transcoder'"),
        ({"activation_fn_str": "tanh-relu"}, "", "expected relu or topk"),
        ({"normalize_activations": "layer_norm"}, "", "normalize_activations"),
        ({"architecture": "topk"}, "", "k: expected 1 to 12, got 0"),
        ({"architecture": "jumprelu"}, "", "threshold: an autoencoder of architecture 'jumprelu' needs it"),
        ({}, "W_enc", "expected tensors W_enc and W_dec"),
    ],
)
def test_what_cannot_be_used_is_refused(tmp_path: Path, config: dict[str, Any], drop: str, says: str) -> None:
    given = {name: one for name, one in tensors("b_enc").items() if name != drop}
    with pytest.raises(WrongAutoencoder, match=says):
        SparseAutoencoder.load(folder(tmp_path, config, given))


def test_arrays_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    rows = np.ones((FEATURES, WIDTH), np.float32)
    for given, says in [
        ({"decoder": rows[:, :3]}, r"decoder: expected shape \[12, 5\], got \[12, 3\]"),
        ({"encoder": rows[0]}, r"expected shape \[features, width\]"),
        ({"encoder_bias": rows[0]}, "encoder_bias: expected shape"),
        ({"decoder": rows * np.inf}, "finite"),
        ({"architecture": "deep"}, "expected one of relu, topk"),
        ({"layer": 3}, "expected fields of an Autoencoder, got layer"),
    ]:
        with pytest.raises(WrongAutoencoder, match=says):
            SparseAutoencoder(**{"encoder": rows, "decoder": rows, **given})  # type: ignore[arg-type]
    (tmp_path / "none.safetensors").write_bytes(b"nothing")
    with pytest.raises(WrongAutoencoder, match="expected a safetensors file"):
        SparseAutoencoder.load(tmp_path / "none.safetensors")


def test_names_of_models() -> None:
    assert same_model("gemma-2-2b", "google/gemma-2-2b")
    assert same_model("gpt2-small", "openai-community/gpt2")
    assert not same_model("gemma-2-2b", "google/gemma-2-9b")
    assert repr(SparseAutoencoder(np.ones((3, 2)), np.ones((3, 2)), model="m")) == (
        "SparseAutoencoder(relu, 3 features of width 2, model='m')"
    )
