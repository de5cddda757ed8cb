"""Checks of lenses with maps, subspaces, features and controllers against a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from tracewire_bus.wire.kinds import is_array
from tracewire_bus.wire.messages import (
    Autoencoder,
    Coordinates,
    Declared,
    Features,
    Hold,
    Lens,
    Live,
    Probe,
    SteerFeatures,
)
from tracewire_bus.wire.refs import ArrayRef, is_vector

from .autoencoders import same_model, size_of
from .condition_checks import checked_outputs
from .value_checks import DeclarationError, check_array, check_content

__all__ = ["CHECKED", "UNKNOWN", "KnownModel", "check_hold", "check_kind", "same_places"]

#: Features that one intervention names, and activations that one saves.
MAX_FEATURES: Final = 4096

#: The kinds that `check_kind` checks.
CHECKED: Final = (Lens, Coordinates, Features, SteerFeatures)


@dataclass(frozen=True)
class KnownModel:
    """What is known of a model besides its modules.

    Attributes:
        names: under which the model is known.
        saes: the autoencoders that its engine has, by name; `None` if that is not known.
    """

    names: Sequence[str] = ()
    saes: Mapping[str, Autoencoder] | None = None


#: A model of which nothing is known besides its modules.
UNKNOWN: Final = KnownModel()


def check_kind(one: Declared, places: tuple[int, int | None], same_place: Any, model: KnownModel, field: str) -> None:
    """Check an intervention of one of the `CHECKED` kinds.

    Args:
        one: the intervention.
        places: how many locations it has, and their width if it is known.
        same_place: tells whether a location as text is one of them: takes the text, returns whether.
        model: the model.
        field: the intervention's field.

    Raises:
        DeclarationError: it is invalid, or does not fit the model.
    """
    count, width = places
    if isinstance(one, Lens):
        _check_lens(one, count, width, field)
    elif isinstance(one, Coordinates):
        check_array(one.basis, f"{field}.basis", (1, 2), width)
    elif isinstance(one, Features | SteerFeatures):
        _check_features(one, width, same_place, model, field)


def _check_lens(one: Lens, count: int, width: int | None, field: str) -> None:
    assert width is not None
    for name, wanted in (("matrix", (width, width)), ("bias", (width,))):
        value = getattr(one, name)
        if value is None and name == "bias":
            continue
        shape = _shape(value, f"{field}.{name}")
        if shape not in (wanted, (count, *wanted)):
            more = f" or {[count, *wanted]}, one for each location" if count > 1 else ""
            raise DeclarationError(f"{field}.{name}", f"expected shape {list(wanted)}{more}, got {list(shape)}")
        if not isinstance(value, ArrayRef):
            check_content(value, f"{field}.{name}")


def _shape(value: Any, field: str) -> tuple[int, ...]:
    if isinstance(value, ArrayRef) and not is_vector(value):
        raise DeclarationError(field, f"expected an array, got {value!r}, which belongs to a trace; load it first")
    if not isinstance(value, ArrayRef) and not is_array(value):
        raise DeclarationError(field, f"expected an array, got {type(value).__qualname__}")
    return tuple(value.shape)


def _check_features(
    one: Features | SteerFeatures, width: int | None, same_place: Any, model: KnownModel, field: str
) -> None:
    sae = one.sae
    if isinstance(sae, str):
        if one.weights is not None:
            raise DeclarationError(f"{field}.weights", "an autoencoder of the engine has its own: leave them out")
        if model.saes is not None:
            if sae not in model.saes:
                known = ", ".join(sorted(model.saes)) or "none"
                says = f"the engine has no autoencoder {sae!r} (it has: {known}); tracewire engine --sae NAME=FOLDER"
                raise DeclarationError(
                    f"{field}.sae", f"{says} gives it one, and SparseAutoencoder.load reads a folder"
                )
            sae = model.saes[sae]
    else:
        shape = _shape(one.weights, f"{field}.weights")
        if sae.features < 1 or sae.width < 1 or (sae.architecture == "topk" and not 1 <= sae.k <= sae.features):
            raise DeclarationError(f"{field}.sae", f"expected an autoencoder with features, got {sae!r}")
        if shape != (size_of(sae),):
            raise DeclarationError(
                f"{field}.weights", f"expected the {size_of(sae)} numbers of {sae!r}, got shape {list(shape)}"
            )
        if not isinstance(one.weights, ArrayRef):
            check_content(one.weights, f"{field}.weights")
    if isinstance(sae, Autoencoder):
        _check_autoencoder(sae, width, same_place, model, field)
    _check_indices(one, sae.features if isinstance(sae, Autoencoder) else None, field)


def _check_autoencoder(sae: Autoencoder, width: int | None, same_place: Any, model: KnownModel, field: str) -> None:
    if width is not None and sae.width != width:
        raise DeclarationError(
            f"{field}.sae", f"the values there have {width} features, and the autoencoder's have {sae.width}"
        )
    if sae.model and model.names and not any(same_model(sae.model, name) for name in model.names):
        raise DeclarationError(
            f"{field}.sae",
            f"the autoencoder is of model {sae.model!r}, and this is {' or '.join(map(repr, model.names))}",
        )
    if sae.at and not same_place(sae.at):
        raise DeclarationError(f"{field}.sae", f"the autoencoder is of {sae.at}, which is not the one location of at")


def _check_indices(one: Features | SteerFeatures, features: int | None, field: str) -> None:
    indices = one.indices
    if indices is not None:
        if not 1 <= len(indices) <= MAX_FEATURES or len(set(indices)) != len(indices):
            raise DeclarationError(
                f"{field}.indices", f"expected 1 to {MAX_FEATURES} different features, got {len(indices)}"
            )
        most = features if features is not None else 2**31
        wrong = next((index for index in indices if not 0 <= index < most), None)
        if wrong is not None:
            raise DeclarationError(f"{field}.indices", f"expected features from 0 to {most - 1}, got {wrong}")
    if isinstance(one, Features):
        if indices is None and not 1 <= one.top_k <= MAX_FEATURES:
            raise DeclarationError(f"{field}.top_k", f"expected 1 to {MAX_FEATURES}, got {one.top_k}")
        if indices is not None and one.threshold is not None:
            raise DeclarationError(f"{field}.threshold", "chosen features are all saved: leave the threshold out")
    elif isinstance(one.min, float | int) and isinstance(one.max, float | int) and one.min > one.max:
        raise DeclarationError(f"{field}.max", f"expected {one.min} or more, as min is, got {one.max}")


def check_hold(one: Hold, probes: Mapping[str, tuple[Probe, bool]], same_place: Any, field: str) -> None:
    """Check a controller. `same_place` tells whether a location as text is the controller's.

    Raises:
        DeclarationError: its probe is not there or does not suit, or a number is out of its range.
    """
    outputs = checked_outputs(one.probe, probes, f"{field}.probe")
    if not 0 <= one.output < outputs:
        raise DeclarationError(f"{field}.output", f"probe {one.probe!r} has {outputs} outputs, got {one.output}")
    if not isinstance(one.min, Live) and not isinstance(one.max, Live) and one.min > one.max:
        raise DeclarationError(f"{field}.max", f"expected {one.min} or more, as min is, got {one.max}")
    if one.gain is not None:
        if not isinstance(one.gain, Live) and one.gain <= 0:
            raise DeclarationError(f"{field}.gain", f"expected more than 0, got {one.gain}")
        return
    probe, _ = probes[one.probe]
    why = (
        "it has no weight"
        if probe.weight is None
        else f"its activation is {probe.activation}"
        if probe.activation == "softmax"
        else f"it reads {probe.at}"
        if not same_place(probe.at)
        else ""
    )
    if why:
        raise DeclarationError(
            f"{field}.gain", f"expected a gain: no strength is exact for the probe {one.probe!r}, since {why}"
        )
    if probe.activation == "sigmoid" and not isinstance(one.target, Live) and not 0 < one.target < 1:
        raise DeclarationError(f"{field}.target", f"expected a number between 0 and 1, got {one.target}")
    _check_moves(one, probe, field)


def _check_moves(one: Hold, probe: Probe, field: str) -> None:
    """Refuse a vector along which the probe does not change."""
    import numpy as np

    if not is_array(one.vector) or not is_array(probe.weight):
        return
    vector, weight = (np.asarray(value).astype(np.float64) for value in (one.vector, probe.weight))
    weight = np.atleast_2d(weight)[one.output]
    if vector.shape == weight.shape and abs(vector @ weight) <= 1e-6 * np.linalg.norm(vector) * np.linalg.norm(weight):
        raise DeclarationError(f"{field}.vector", f"the probe {one.probe!r} does not change along the vector")


def same_places(sites: Sequence[Any], found: Sequence[Any]) -> bool:
    """Whether two lists of locations are one and the same location."""
    return len(sites) == 1 and list(sites) == list(found)
