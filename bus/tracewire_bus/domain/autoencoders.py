"""`SparseAutoencoder`: the weights of a sparse autoencoder, and how they travel and are read from files.

An autoencoder's weights travel as one flat array (`packed`), so that one digest names them all.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from tracewire_bus.wire.arrays import array_from_raw, array_of, array_payload, encoded_array, raw_bytes
from tracewire_bus.wire.feature_kinds import Autoencoder

if TYPE_CHECKING:
    import numpy as np

__all__ = ["SparseAutoencoder", "WrongAutoencoder", "same_model", "shapes_of", "size_of", "unpacked"]

#: The vectors of an architecture with an element for each feature, besides the encoder's bias.
_VECTORS = {"relu": (), "topk": (), "jumprelu": ("threshold",), "gated": ("gate", "scale")}
_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16", "F64": "float64"}
_WEIGHTS, _CONFIG = "sae_weights.safetensors", "cfg.json"
_HOOK = re.compile(r"blocks\.(\d+)\.(hook_resid_pre|hook_resid_post|attn\.hook_z)")
_LAYER = re.compile(r"(residual|heads)\((\d+)\)")


class WrongAutoencoder(ValueError):
    """A file or an array is no autoencoder that can be used. The message says what was expected."""


def shapes_of(one: Autoencoder) -> dict[str, tuple[int, ...]]:
    """The shapes of an autoencoder's tensors by name, in the order in which they are packed."""
    shapes: dict[str, tuple[int, ...]] = {
        "encoder": (one.features, one.width),
        "decoder": (one.features, one.width),
        "decoder_bias": (one.width,),
        "encoder_bias": (one.features,),
    }
    return shapes | dict.fromkeys(_VECTORS[one.architecture], (one.features,))


def size_of(one: Autoencoder) -> int:
    """The number of elements of an autoencoder's packed weights."""
    return sum(map(math.prod, shapes_of(one).values()))


def unpacked(one: Autoencoder, packed: Any) -> dict[str, Any]:
    """The tensors of packed weights `[elements]`, by name: views of it, of NumPy or torch."""
    found, start = {}, 0
    for name, shape in shapes_of(one).items():
        count = math.prod(shape)
        found[name] = packed[start : start + count].reshape(shape)
        start += count
    return found


def same_model(one: str, other: str) -> bool:
    """Whether two names mean one model, as far as can be told: without owner, case and separators."""
    first, second = (re.sub(r"[^a-z0-9.]", "", name.rpartition("/")[2].lower()) for name in (one, other))
    aliases = {"gpt2small": "gpt2"}
    return aliases.get(first, first) == aliases.get(second, second)


class SparseAutoencoder:
    """A sparse autoencoder, for `Features` and `SteerFeatures`.

    Args:
        encoder: `[features, width]`.
        decoder: `[features, width]`.
        encoder_bias: `[features]`; zeros if it is left out.
        decoder_bias: `[width]`; zeros if it is left out.
        architecture: `relu`, `topk`, `jumprelu` or `gated` (see `Autoencoder`).
        more: the other fields of `Autoencoder` (`k`, `centered`, `model`, `at`), and the vectors of the architecture:
            `threshold` of `jumprelu`, `gate` and `scale` of `gated`, `[features]` each.

    Raises:
        WrongAutoencoder: shapes do not fit each other, a vector of the architecture is missing, or numbers are not
            finite.
    """

    def __init__(
        self,
        encoder: Any,
        decoder: Any,
        encoder_bias: Any = None,
        decoder_bias: Any = None,
        *,
        architecture: str = "relu",
        **more: Any,
    ) -> None:
        import numpy as np

        if architecture not in _VECTORS:
            raise WrongAutoencoder(f"architecture: expected one of {', '.join(_VECTORS)}, got {architecture!r}")
        given = {"encoder": encoder, "decoder": decoder, "encoder_bias": encoder_bias, "decoder_bias": decoder_bias}
        given |= {name: more.pop(name, None) for name in _VECTORS[architecture]}
        arrays = {name: np.asarray(array_of(one)) for name, one in given.items() if one is not None}
        if arrays["encoder"].ndim != 2:
            raise WrongAutoencoder(f"encoder: expected shape [features, width], got {list(arrays['encoder'].shape)}")
        features, width = arrays["encoder"].shape
        try:
            self.description = msgspec.convert(
                {"architecture": architecture, "features": features, "width": width, **more}, Autoencoder
            )
        except msgspec.ValidationError as error:
            raise WrongAutoencoder(str(error)) from None
        if unknown := more.keys() - set(Autoencoder.__struct_fields__):
            raise WrongAutoencoder(f"expected fields of an Autoencoder, got {', '.join(sorted(unknown))}")
        if architecture == "topk" and not 1 <= self.description.k <= features:
            raise WrongAutoencoder(f"k: expected 1 to {features}, got {self.description.k}")
        dtype = arrays["encoder"].dtype if arrays["encoder"].dtype.itemsize == 2 else np.dtype(np.float32)
        parts = []
        for name, shape in shapes_of(self.description).items():
            if name not in arrays:
                if name not in ("encoder_bias", "decoder_bias"):
                    raise WrongAutoencoder(f"{name}: an autoencoder of architecture {architecture!r} needs it")
                arrays[name] = np.zeros(shape, dtype)
            if arrays[name].shape != shape:
                raise WrongAutoencoder(f"{name}: expected shape {list(shape)}, got {list(arrays[name].shape)}")
            parts.append(arrays[name].astype(dtype).reshape(-1))
        self.packed: np.ndarray[Any, Any] = np.concatenate(parts)
        if not np.isfinite(self.packed.astype(np.float32)).all():
            raise WrongAutoencoder("expected finite numbers, got NaN or an infinity in it")

    def __repr__(self) -> str:
        one = self.description
        where = "".join(f", {name}={value!r}" for name, value in (("model", one.model), ("at", one.at)) if value)
        return f"SparseAutoencoder({one.architecture}, {one.features} features of width {one.width}{where})"

    @cached_property
    def encoded(self) -> Any:
        """The packed weights as they travel."""
        return encoded_array(array_payload(self.packed.dtype.name, self.packed.shape, raw_bytes(self.packed)))

    def elsewhere(self, *, model: str = "", at: str = "") -> SparseAutoencoder:
        """The same autoencoder as one of another model or location; by default of any."""
        other = object.__new__(SparseAutoencoder)
        other.description, other.packed = msgspec.structs.replace(self.description, model=model, at=at), self.packed
        return other

    # --- in NumPy -----------------------------------------------------------------------------------------------------

    def encode(self, values: Any) -> np.ndarray[Any, Any]:
        """The activations `[..., features]` of values `[..., width]`, float32."""
        import numpy as np

        one = self.description
        parts = {name: part.astype(np.float32) for name, part in unpacked(one, self.packed).items()}
        values = np.asarray(array_of(values)).astype(np.float32)
        pre = (values - parts["decoder_bias"] if one.centered else values) @ parts["encoder"].T
        if one.architecture == "gated":
            magnitude, active = pre * parts["scale"] + parts["encoder_bias"], pre + parts["gate"] > 0
            return np.asarray(np.where(active, np.maximum(magnitude, 0), np.float32(0)))
        pre = pre + parts["encoder_bias"]
        if one.architecture == "jumprelu":
            return np.asarray(np.where(pre > parts["threshold"], np.maximum(pre, 0), np.float32(0)))
        if one.architecture == "topk":
            least = np.partition(pre, -one.k, axis=-1)[..., -one.k, None]
            pre = np.where(pre >= least, pre, np.float32(0))
        return np.asarray(np.maximum(pre, 0))

    def decode(self, activations: Any) -> np.ndarray[Any, Any]:
        """The values `[..., width]` of activations `[..., features]`, float32."""
        import numpy as np

        parts = unpacked(self.description, self.packed)
        decoder, bias = (parts[name].astype(np.float32) for name in ("decoder", "decoder_bias"))
        return np.asarray(np.asarray(activations, np.float32) @ decoder + bias)

    # --- files --------------------------------------------------------------------------------------------------------

    @classmethod
    def load(cls, path: str | Path, *, scaling: float | None = None, **changes: Any) -> SparseAutoencoder:
        """Read an autoencoder from a folder in SAELens's format, or from a safetensors file.

        Args:
            path: a folder with `cfg.json` and `sae_weights.safetensors`, or a file. A file has the tensors by SAELens's
                names (`W_enc`, `W_dec`, `b_enc`, `b_dec`, ...) or by those of two linear layers (`encoder.weight`).
            scaling: the factor by which activations are multiplied before they are encoded, where the configuration
                says that they are normalized and does not have the factor.
            changes: arguments of `SparseAutoencoder` that replace those of the configuration, such as `at=""`.

        Raises:
            WrongAutoencoder: the format is another, or has an option that is not supported.
            OSError: a file cannot be read.
            ModuleNotFoundError: the package safetensors is not installed.
        """
        where = Path(path)
        config: dict[str, Any] = {}
        if where.is_dir():
            config = json.loads((where / _CONFIG).read_text())
            where = where / _WEIGHTS
        tensors = _with_our_names(_tensors(where))
        given: dict[str, Any] = {**_fields(config, tensors), **changes}
        _fold(config, tensors, scaling)
        return cls(**{**tensors, **given})

    def save(self, folder: str | Path) -> None:
        """Write the autoencoder to a folder, in SAELens's format.

        Raises:
            OSError: the folder cannot be written.
            ModuleNotFoundError: the package safetensors is not installed.
        """
        import numpy as np
        from safetensors.numpy import save_file

        one, where = self.description, Path(folder)
        where.mkdir(parents=True, exist_ok=True)
        parts = {name: part.astype(np.float32) for name, part in unpacked(one, self.packed).items()}
        named = {"W_enc": parts["encoder"].T, "W_dec": parts["decoder"], "b_dec": parts["decoder_bias"]}
        if one.architecture == "gated":
            named |= {"b_mag": parts["encoder_bias"], "b_gate": parts["gate"], "r_mag": np.log(parts["scale"])}
        else:
            named["b_enc"] = parts["encoder_bias"]
        if one.architecture == "jumprelu":
            named["threshold"] = parts["threshold"]
        save_file({name: np.ascontiguousarray(part) for name, part in named.items()}, where / _WEIGHTS)
        config: dict[str, Any] = {
            "architecture": "standard" if one.architecture == "relu" else one.architecture,
            "d_in": one.width,
            "d_sae": one.features,
            "dtype": "float32",
            "apply_b_dec_to_input": one.centered,
            "normalize_activations": "none",
            "metadata": {"model_name": one.model, "tracewire_at": one.at},
        }
        if (layer := _LAYER.fullmatch(one.at)) is not None:
            hook = "hook_resid_post" if layer[1] == "residual" else "attn.hook_z"
            config["metadata"]["hook_name"] = f"blocks.{layer[2]}.{hook}"
        if one.architecture == "topk":
            config["k"] = one.k
        (where / _CONFIG).write_text(json.dumps(config, indent=1))


def _tensors(path: Path) -> dict[str, np.ndarray[Any, Any]]:
    from safetensors import SafetensorError, deserialize

    try:
        found = deserialize(path.read_bytes())  # type: ignore[no-untyped-call]
    except SafetensorError as error:
        raise WrongAutoencoder(f"{path.name}: expected a safetensors file: {error}") from None
    arrays = {}
    for name, tensor in found:
        if tensor["dtype"] not in _DTYPES:
            raise WrongAutoencoder(f"{path.name}: {name} is of dtype {tensor['dtype']}, expected one of floats")
        arrays[name] = array_from_raw(_DTYPES[tensor["dtype"]], tuple(tensor["shape"]), bytes(tensor["data"]))
    return arrays


_Array = Any
_Rename = tuple[str, str, Callable[[_Array], _Array]]


def _as_it_is(array: _Array) -> _Array:
    return array


def _transposed(array: _Array) -> _Array:
    return array.T


def _exponential(array: _Array) -> _Array:
    import numpy as np

    return np.exp(array.astype(np.float32))


_NAMES: tuple[_Rename, ...] = (
    ("W_enc", "encoder", _transposed),
    ("W_dec", "decoder", _as_it_is),
    ("b_enc", "encoder_bias", _as_it_is),
    ("b_mag", "encoder_bias", _as_it_is),
    ("b_dec", "decoder_bias", _as_it_is),
    ("threshold", "threshold", _as_it_is),
    ("b_gate", "gate", _as_it_is),
    ("r_mag", "scale", _exponential),
    ("encoder.weight", "encoder", _as_it_is),
    ("decoder.weight", "decoder", _transposed),
    ("encoder.bias", "encoder_bias", _as_it_is),
    ("decoder.bias", "decoder_bias", _as_it_is),
)


def _with_our_names(tensors: Mapping[str, _Array]) -> dict[str, _Array]:
    found = {ours: change(tensors[theirs]) for theirs, ours, change in _NAMES if theirs in tensors}
    if missing := {"encoder", "decoder"} - found.keys():
        names = ", ".join(sorted(tensors)) or "nothing"
        raise WrongAutoencoder(
            f"expected tensors W_enc and W_dec, or encoder.weight and decoder.weight; got {names}"
        ) from (KeyError(*missing))
    return found


def _fields(config: Mapping[str, Any], tensors: Mapping[str, _Array]) -> dict[str, Any]:
    """The fields of an `Autoencoder` from SAELens's configuration, or without one from the tensors that there are."""
    metadata = config.get("metadata") or {}
    architecture = config.get("architecture")
    if architecture is None:
        architecture = "gated" if "gate" in tensors else "jumprelu" if "threshold" in tensors else "standard"
    function = config.get("activation_fn_str") or config.get("activation_fn") or "relu"
    keywords = config.get("activation_fn_kwargs") or {}
    if architecture == "standard" and function == "topk":
        architecture = "topk"
    elif architecture == "standard" and function != "relu":
        raise WrongAutoencoder(f"activation_fn: expected relu or topk, got {function!r}")
    ours = {"standard": "relu"}.get(architecture, architecture)
    if ours not in _VECTORS:
        raise WrongAutoencoder(f"architecture: expected standard, topk, jumprelu or gated, got {architecture!r}")
    hook = _HOOK.fullmatch(str(metadata.get("hook_name") or config.get("hook_name") or ""))
    at = str(metadata.get("tracewire_at") or "")
    if hook is not None and (layer := int(hook[1]) - (hook[2] == "hook_resid_pre")) >= 0:
        at = f"heads({layer})" if hook[2] == "attn.hook_z" else f"residual({layer})"
    found = {
        "architecture": ours,
        "centered": bool(config.get("apply_b_dec_to_input", bool(config))),
        "model": str(metadata.get("model_name") or config.get("model_name") or ""),
        "at": at,
    }
    return found | ({"k": int(config.get("k") or keywords.get("k") or 0)} if ours == "topk" else {})


def _fold(config: Mapping[str, Any], tensors: dict[str, _Array], scaling: float | None) -> None:
    """Make the options of SAELens's that scale activations a part of the weights."""
    import numpy as np

    how = config.get("normalize_activations") or "none"
    if how not in ("none", "expected_average_only_in"):
        raise WrongAutoencoder(f"normalize_activations: expected none or expected_average_only_in, got {how!r}")
    if how != "none" and scaling is None:
        raise WrongAutoencoder("normalize_activations: the activations are scaled: give the factor as scaling")
    if config.get("rescale_acts_by_decoder_norm"):
        norms = np.linalg.norm(tensors["decoder"].astype(np.float32), axis=-1)
        tensors["encoder"] = tensors["encoder"].astype(np.float32) * norms[:, None]
        tensors["decoder"] = tensors["decoder"].astype(np.float32) / norms[:, None]
        if "encoder_bias" in tensors:
            tensors["encoder_bias"] = tensors["encoder_bias"].astype(np.float32) * norms
    if scaling is not None:
        tensors["encoder"] = tensors["encoder"].astype(np.float32) * np.float32(scaling)
        for name in ("decoder", "decoder_bias") if "decoder_bias" in tensors else ("decoder",):
            tensors[name] = tensors[name].astype(np.float32) / np.float32(scaling)
