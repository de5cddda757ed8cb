"""Arrays as files."""

from __future__ import annotations

import io
import struct
from typing import Any

import ml_dtypes
import numpy as np
import pyarrow as pa
import pytest
from safetensors.numpy import load

from tracewire import ArrayRef, digest
from tracewire.gateway.downloads import Download
from tracewire.gateway.problems import Problem

PLAIN = np.arange(6, dtype=np.float32).reshape(2, 3)
BRAIN = np.array([1.5, -2], ml_dtypes.bfloat16)


async def test_each_format() -> None:
    assert np.array_equal(np.load(io.BytesIO(await Download(PLAIN).encoded("npy"))), PLAIN)
    assert await Download(PLAIN).encoded("raw") == PLAIN.tobytes()
    assert np.array_equal(load(await Download(PLAIN).encoded("safetensors"))["value"], PLAIN)
    with pa.ipc.open_stream(await Download(PLAIN).encoded("arrow")) as stream:
        assert stream.read_all().schema.metadata[b"tracewire.shape"] == b"[2, 3]"
    assert (Download(PLAIN).dtype, Download(PLAIN).shape) == ("float32", (2, 3))


async def test_what_numpy_does_not_have_is_float32_in_its_own_format_only() -> None:
    assert np.load(io.BytesIO(await Download(BRAIN).encoded("npy"))).tolist() == [1.5, -2]
    assert await Download(BRAIN).encoded("raw") == BRAIN.tobytes()
    whole = await Download(BRAIN).encoded("safetensors")
    assert b'"BF16"' in whole[8 : 8 + struct.unpack("<Q", whole[:8])[0]]


async def test_a_dtype_may_be_asked_for() -> None:
    assert await Download(PLAIN).encoded("raw", "float16") == PLAIN.astype(np.float16).tobytes()
    with pytest.raises(Problem, match="float16") as caught:
        await Download(PLAIN).encoded("raw", "half")
    assert caught.value.field == "dtype"


async def test_a_reference_is_loaded_when_it_is_encoded() -> None:
    loads: list[Any] = []

    async def loader(ref: ArrayRef) -> Any:
        loads.append(ref)
        return PLAIN

    download = Download(ArrayRef("float32", (2, 3), digest(PLAIN), "blob", "x", loader))
    assert (download.dtype, download.shape, loads) == ("float32", (2, 3), [])
    assert await download.encoded("raw") == PLAIN.tobytes()
    assert len(loads) == 1
