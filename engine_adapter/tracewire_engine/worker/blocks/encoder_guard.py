"""Refuses locations in the encoders of a multimodal model, which no block can read.

An encoder (a vision tower, a projector) runs once for all images of a step, whichever request they belong to. Its
values have no row for each token of a request, so a block could not be handed its own part. vLLM also caches an
encoder's output and uses it for every request with the same image. The language model's modules are served as usual,
at an image's positions as at the prompt's tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

__all__ = ["NotByToken", "encoder_locations", "refuse_encoders"]

#: Children of the model's root that run on tokens, even if the language model is another child.
_BY_TOKEN = ("lm_head", "logits_processor")


class NotByToken(LookupError):
    """A block asks for a location in an encoder, whose values belong to no single request."""


def encoder_locations(model: torch.nn.Module) -> tuple[str, ...]:
    """The prefixes of all locations in this model's encoders, such as `model.vision_tower.`; none in a text model."""
    whole: Any = model
    if not getattr(whole, "supports_multimodal", False):
        return ()
    try:
        language = whole.get_language_model()
    except NotImplementedError:
        language = None
    path = next((path for path, module in model.named_modules() if module is language), "")
    # If the model does not name its language model, it may name its towers.
    beside = _beside(model, path) if path else getattr(model, "_tower_model_names", ())
    return tuple(f"model.{name}." for name in beside)


def _beside(model: torch.nn.Module, path: str, under: str = "") -> Iterator[str]:
    """The topmost modules that are neither at `path` nor above or below it, by path, but for those run on tokens."""
    first, _, rest = path.partition(".")
    for name, child in model.named_children():
        if name != first:
            if under or name not in _BY_TOKEN:
                yield f"{under}{name}"
        elif rest:
            yield from _beside(child, rest, f"{under}{name}.")


def refuse_encoders(beginnings: tuple[str, ...], location: str) -> None:
    """Refuse a location that is in an encoder.

    Args:
        beginnings: the result of `encoder_locations`.
        location: such as `model.vision_tower.output`.

    Raises:
        NotByToken: the location is in an encoder.
    """
    if beginnings and location.startswith(beginnings):
        raise NotByToken(
            f"{location.removeprefix('model.')!r} cannot be read: the module runs once on the images of all requests; "
            "a block can read the language model's modules, also at the images' positions"
        )
