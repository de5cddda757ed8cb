"""Images beside a prompt's text are packed, or refused by their place."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from PIL import Image

from tracewire import TraceRejected
from tracewire.media import packed_media
from tracewire_bus.wire.messages import MAX_MEDIA_BYTES
from tracewire_bus.wire.packing import unpack

PIXELS = np.arange(2 * 3 * 3, dtype=np.uint8).reshape(2, 3, 3)


@pytest.mark.parametrize("image", [PIXELS, [PIXELS], (Image.fromarray(PIXELS),)], ids=["one", "a list", "Pillow's"])
def test_images_are_packed_as_arrays(image: Any) -> None:
    (found,) = unpack(packed_media("prompt", {"image": image}))["image"]
    assert found.tolist() == PIXELS.tolist()


@pytest.mark.parametrize(
    ("media", "field"),
    [
        (None, "m"),
        ({}, "m"),
        ({"audio": [PIXELS]}, "m.audio"),
        ({"image": []}, "m.image"),
        ({"image": "a path"}, "m.image"),
        ({"image": [PIXELS, PIXELS[0]]}, "m.image[1]"),
        ({"image": PIXELS.astype(np.float32)}, "m.image"),
        ({"image": PIXELS[:, :, :1]}, "m.image"),
        ({"image": np.zeros((1, MAX_MEDIA_BYTES // 3 + 1, 3), np.uint8)}, "m.image"),
    ],
)
def test_what_cannot_be_sent_is_named(media: Any, field: str) -> None:
    with pytest.raises(TraceRejected) as caught:
        packed_media("m", media)
    assert caught.value.field == field
