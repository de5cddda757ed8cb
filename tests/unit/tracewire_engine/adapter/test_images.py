"""Images are taken off a prompt as Pillow has them, or refused by their place."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tracewire_bus.wire.digests import digest
from tracewire_bus.wire.messages import Invoke
from tracewire_bus.wire.packing import pack
from tracewire_bus.wire.refs import ArrayRef
from tracewire_engine.adapter.engine_api import Rejection
from tracewire_engine.adapter.images import rendered, taken
from tracewire_engine.protocol.input_files import input_path

PIXELS = np.arange(2 * 3 * 3, dtype=np.uint8).reshape(2, 3, 3)


def _invoke(media: Any) -> Invoke:
    return Invoke(prompt="x", media=pack(media))


def test_images_are_what_was_sent_beside_the_prompt_or_in_a_file(tmp_path: Path) -> None:
    ref = ArrayRef("uint8", PIXELS.shape, digest(PIXELS), "b0")
    input_path(tmp_path, ref).write_bytes(PIXELS.tobytes())
    images = taken(_invoke({"image": [PIXELS, ref]}), tmp_path, "")
    assert [np.asarray(one).tolist() for one in images] == [PIXELS.tolist()] * 2
    assert taken(Invoke(prompt="x"), tmp_path, "") == []


@pytest.mark.parametrize(
    ("media", "field"),
    [
        ({"audio": [PIXELS]}, "prompt.multi_modal_data"),
        ({"image": PIXELS}, "prompt.multi_modal_data"),
        ([PIXELS], "prompt.multi_modal_data"),
        ({"image": [PIXELS, PIXELS[0]]}, "prompt.multi_modal_data.image[1]"),
        ({"image": [PIXELS.astype(np.float32)]}, "prompt.multi_modal_data.image[0]"),
        ({"image": [PIXELS[:0]]}, "prompt.multi_modal_data.image[0]"),
        ({"image": ["a path"]}, "prompt.multi_modal_data.image[0]"),
    ],
)
def test_what_is_no_image_is_refused_by_its_place(media: Any, field: str, tmp_path: Path) -> None:
    with pytest.raises(Rejection) as caught:
        taken(_invoke(media), tmp_path, "invokes[2].")
    assert caught.value.failure.field == f"invokes[2].{field}"


async def test_a_model_of_text_takes_none() -> None:
    text_only = SimpleNamespace(model_config=SimpleNamespace(is_multimodal_model=False))
    with pytest.raises(Rejection, match="this model takes no images"):
        await rendered(text_only, [1, 2], [object()], "")
