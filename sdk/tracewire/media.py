"""Images beside the text of a prompt, where vLLM's prompts have them: under `multi_modal_data`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tracewire_bus.wire.arrays import array_of
from tracewire_bus.wire.kinds import Unsavable, is_array
from tracewire_bus.wire.messages import MAX_MEDIA_BYTES
from tracewire_bus.wire.packing import pack

from .checks import type_name
from .errors import TraceRejected

__all__ = ["packed_media"]


def packed_media(field: str, media: Any) -> bytes:
    """`multi_modal_data` of a prompt, packed for its invoke: by modality, a list of arrays.

    Raises:
        TraceRejected: an image cannot be sent; `field` names it.
    """
    if not isinstance(media, Mapping) or not media:
        raise TraceRejected(field, f'expected a dict like {{"image": array}}, got {type_name(type(media))}')
    for name in media:
        if name != "image":
            raise TraceRejected(f"{field}.{name}", f"only images are supported beside text, got {str(name)[:80]!r}")
    images = media["image"]
    if not isinstance(images, list | tuple):
        arrays = [_image(f"{field}.image", images)]
    else:
        arrays = [_image(f"{field}.image[{index}]", image) for index, image in enumerate(images)]
    if not arrays:
        raise TraceRejected(f"{field}.image", "expected an image, or a list of them, got an empty list")
    size = sum(array.nbytes for array in arrays)
    if size > MAX_MEDIA_BYTES:
        raise TraceRejected(f"{field}.image", f"a prompt's images have at most {MAX_MEDIA_BYTES} bytes, got {size}")
    return pack({"image": [array_of(array) for array in arrays]})


def _image(field: str, image: Any) -> Any:
    """An image as `[height, width, 3]` of uint8."""
    wanted = "expected an image as an array [height, width, 3] of uint8, or Pillow's"
    if hasattr(image, "convert") and hasattr(image, "__array_interface__"):
        import numpy as np

        image = np.asarray(image.convert("RGB"))
    if not is_array(image):
        raise TraceRejected(field, f"{wanted}, got {type_name(type(image))}")
    try:
        # Copied only after the checks.
        array = image if type(image).__name__ == "ndarray" else array_of(image)
    except Unsavable as error:
        raise TraceRejected(field, f"{wanted}: {error}") from None
    if array.dtype.name != "uint8" or array.ndim != 3 or array.shape[2] != 3 or not array.size:
        raise TraceRejected(field, f"{wanted}, got {array.dtype.name} {list(array.shape)}")
    return array
