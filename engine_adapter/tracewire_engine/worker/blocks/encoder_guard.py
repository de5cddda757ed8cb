"""Refuses locations in the encoders of a multimodal model, which no block can read.

A vision tower, a projector run when an image comes, once for all images of a step, whichever request they belong to;
their values have no row for each token of a request, so that a block could not be handed its own. What comes of them
serves every request with the same image besides. The language model's modules are served, and see an image's positions
as they see the prompt's.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

__all__ = ["NotByToken", "encoder_locations", "refuse_encoders"]

#: Children of the model's root that run on tokens, wherever the language model is.
_BY_TOKEN = ("lm_head", "logits_processor")


class NotByToken(LookupError):
    """A location in an encoder is asked for: it is no request's own."""


def encoder_locations(model: torch.nn.Module) -> tuple[str, ...]:
    """The prefixes of locations in this model's encoders; none in a text model."""
    whole: Any = model
    if not getattr(whole, "supports_multimodal", False):
        return ()
    try:
        language = whole.get_language_model()
    except NotImplementedError:
        language = None
    path = next((path for path, module in model.named_modules() if module is language), "")
    # Where the language model is not told apart, the model may say which its towers are.
    beside = _beside(model, path) if path else getattr(model, "_tower_model_names", ())
    return tuple(f"model.{name}." for name in beside)


def _beside(model: torch.nn.Module, path: str, under: str = "") -> Iterator[str]:
    """Paths of the modules that are neither at `path`, nor above it, nor below it: the topmost of each."""
    first, _, rest = path.partition(".")
    for name, child in model.named_children():
        if name != first:
            if under or name not in _BY_TOKEN:
                yield f"{under}{name}"
        elif rest:
            yield from _beside(child, rest, f"{under}{name}.")


def refuse_encoders(beginnings: tuple[str, ...], location: str) -> None:
    """Raise if a location, as `model.vision_tower.output`, is in an encoder.

    Raises:
        NotByToken: saying so.
    """
    if beginnings and location.startswith(beginnings):
        raise NotByToken(
            f"{location.removeprefix('model.')!r} is not served: it runs on the images of all requests at once; "
            "the language model's modules are, at the images' positions too"
        )
