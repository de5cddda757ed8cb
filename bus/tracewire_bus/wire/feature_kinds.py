"""Features of sparse autoencoders: `Features` and `SteerFeatures`."""

from __future__ import annotations

from typing import Any, Literal

from .declared_base import DeclaredIntervention, Live, Message, Positions

__all__ = ["Autoencoder", "Features", "SteerFeatures"]


class Autoencoder(Message):
    """What a sparse autoencoder is, without its weights.

    With `x` of `width` features (less the decoder's bias if `centered`), the pre-activations are `encoder @ x + bias`,
    `[features]`. The architectures make of them the activations:

    - `relu`: negative ones become 0.
    - `topk`: all but the `k` greatest become 0, and negative ones.
    - `jumprelu`: those that are not above the feature's threshold become 0, and negative ones.
    - `gated`: a feature is active where `encoder @ x + gate` is above 0; its activation is the positive part of
      `scale * (encoder @ x) + bias`.

    `model` and `at` are the model and the location that the autoencoder was trained on, if they are known: an engine
    of another model, and an intervention at another location, refuse it.
    """

    architecture: Literal["relu", "topk", "jumprelu", "gated"]
    features: int
    width: int
    k: int = 0
    centered: bool = False
    model: str = ""
    at: str = ""


class Features(DeclaredIntervention, tag="features"):
    """Reads the activations of a sparse autoencoder's features, and saves one item a step in the list `name`.

    `sae` is a `SparseAutoencoder`, or the name of one that the engine has (`tracewire engine --sae NAME=FOLDER`). In a
    submission it is an `Autoencoder`, and `weights` has the weights.

    An item is a dict of `features`, int32 `[top_k]`, and `activations`, float32 `[top_k]`: the features with the
    greatest activations, best first (all features, if there are fewer than `top_k`). A place without a feature that is
    active, and above `threshold` if there is one, has the feature -1 and the activation 0. With `indices`, an item is
    the activations of these features instead, float32 `[indices]`. Positions and locations are further dimensions as in
    `Probe`.
    """

    name: str
    at: str
    sae: str | Autoencoder
    top_k: int = 16
    threshold: float | Live | None = None
    indices: list[int] | None = None
    positions: Positions = "last"
    weights: Any = None


class SteerFeatures(DeclaredIntervention, tag="steer_features"):
    """Changes the activations of features of a sparse autoencoder, and adds what this changes to the values.

    Each feature of `indices` with the activation `a` gets the activation `scale * a + add`, limited to the range `min`
    to `max`, and its row of the decoder times the difference is added to the value. So the part of the value that the
    autoencoder does not reconstruct stays. `add` alone steers, `min=4, max=4` clamps to 4, `scale=0` ablates. `sae` and
    `weights` are as in `Features`.
    """

    at: str
    sae: str | Autoencoder
    indices: list[int]
    add: float | Live = 0.0
    scale: float | Live = 1.0
    min: float | Live | None = None
    max: float | Live | None = None
    positions: Positions = "all"
    weights: Any = None
