"""Decodes the images of a prompt, and combines them with the prompt by vLLM's processor of the model.

The processor inserts a placeholder token for each position of an image, so the prompt's tokens are known only
afterwards. The adapter does not use the processor's cache. If a request were refused after the processor ran, that
cache would have an image that EngineCore, which holds the other half of the cache, never got.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from vllm.inputs import TokensPrompt

from tracewire_bus.wire.arrays import array_from_raw
from tracewire_bus.wire.messages import NO_MEDIA, Invoke
from tracewire_bus.wire.packing import unpack
from tracewire_bus.wire.refs import ArrayRef
from tracewire_engine.protocol.input_files import input_path

from .engine_api import Rejection

__all__ = ["modalities", "rendered", "taken"]


def modalities(llm: Any) -> list[str]:
    """The modalities beside text that this `AsyncLLM` takes in a prompt: `["image"]`, or none."""
    renderer: Any = getattr(llm, "renderer", None)
    if not llm.model_config.is_multimodal_model or not hasattr(renderer, "process_for_engine_async"):
        return []
    return ["image"] if renderer.get_mm_processor().info.allowed_mm_limits.get("image") else []


def taken(invoke: Invoke, folder: Path, where: str) -> list[Any]:
    """Decode the images of an invoke. Returns Pillow images.

    Args:
        invoke: the invoke.
        folder: where the files of large images lie.
        where: is put before the names of fields in errors.

    Raises:
        Rejection: the invoke's media cannot be decoded, or hold something other than images.
    """
    if invoke.media == NO_MEDIA:
        return []
    from PIL import Image

    field = f"{where}prompt.multi_modal_data"
    try:
        media = unpack(invoke.media)
    except ValueError as error:
        raise Rejection(field, f"it cannot be decoded: {error}") from error
    if not isinstance(media, dict) or set(media) != {"image"} or not isinstance(media["image"], list):
        raise Rejection(field, "only images are supported beside text")
    images = []
    for place, array in enumerate(media["image"]):
        if isinstance(array, ArrayRef):
            array = array_from_raw(array.dtype, array.shape, input_path(folder, array).read_bytes())
        shape = list(getattr(array, "shape", ()))
        if len(shape) != 3 or shape[2] != 3 or 0 in shape or array.dtype.name != "uint8":
            raise Rejection(f"{field}.image[{place}]", f"expected [height, width, 3] of uint8, got {shape or array!r}")
        images.append(Image.fromarray(array))
    return images


async def rendered(llm: Any, token_ids: list[int], images: list[Any], where: str) -> Any:
    """Combine a prompt's token ids with its images by vLLM's processor of the model.

    Raises:
        Rejection: the model takes no images, or its processor refuses these.
    """
    field = f"{where}prompt.multi_modal_data"
    if not modalities(llm):
        raise Rejection(field, "this model takes no images")
    prompt = TokensPrompt(prompt_token_ids=token_ids, multi_modal_data={"image": images})
    try:
        return await llm.renderer.process_for_engine_async(prompt, time.time(), skip_mm_cache=True)
    except Exception as error:  # any error of the model's processor is about the caller's prompt
        raise Rejection(f"{field}.image", f"the model's processor refused the prompt: {error}") from error
