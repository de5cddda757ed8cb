"""Large variables of a submission are files for as long as its trace runs."""

# ruff: noqa: ASYNC240
from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.equality import equal
from tracewire_bus.bus import Bus
from tracewire_bus.transport.errors import BusUnavailable
from tracewire_bus.wire.messages import MAX_MEDIA_BYTES, Block, Invoke, Submission
from tracewire_bus.wire.packing import pack
from tracewire_bus.wire.refs import ArrayRef
from tracewire_engine.adapter.engine_api import Rejection
from tracewire_engine.adapter.large_inputs import Inputs
from tracewire_engine.protocol.input_files import input_path
from tracewire_engine.worker.tensors import to_tensors


def submission(trace: str, variables: Any = None, live: Any = None) -> Submission:
    return Submission(
        trace=trace,
        model="demo",
        invokes=[Invoke(prompt="x")],
        block=Block(name="b", source="pass", variables=pack(variables or {})),
        live=pack(live or {}),
    )


async def test_variables_are_files_for_as_long_as_a_trace_uses_them(bus: Bus, tmp_path: Path) -> None:
    value = np.random.default_rng(0).random((1000, 300), dtype=np.float32)
    refs = {trace: await bus.blobs.store(trace, value, "w") for trace in "ab"}
    inputs = Inputs(bus.blobs, tmp_path)
    path = input_path(tmp_path, refs["a"])
    async with inputs.of(submission("a", {"w": [refs["a"], 1]})):
        async with inputs.of(submission("b", {}, {"w": refs["b"]})):
            assert [file.name for file in tmp_path.iterdir()] == [path.name]
            assert path.stat().st_mode & 0o077 == 0
            first = to_tensors([refs["a"]], torch.device("cpu"), tmp_path)[0]
            second = to_tensors(refs["b"], torch.device("cpu"), tmp_path)
            first.add_(1)
            assert equal(second, value)
        assert path.exists()
    assert not list(tmp_path.iterdir())
    # What is mapped stays.
    assert equal(first, value + 1)


async def test_a_missing_variable_is_a_rejection_that_names_it(bus: Bus, tmp_path: Path) -> None:
    kept = await bus.blobs.store("t", np.ones(10), "kept")
    lost = ArrayRef("float32", (100_000,), bytes(16), "lost", "lost")
    inputs = Inputs(bus.blobs, tmp_path)
    with pytest.raises(Rejection) as caught:
        async with inputs.of(submission("t", variables={"kept": kept, "lost": [lost]})):
            pytest.fail("it ran")
    assert caught.value.failure.field == "variables.lost"
    assert "cannot be fetched" in caught.value.failure.message
    assert not list(tmp_path.iterdir())


async def test_a_redis_that_is_away_is_no_fault_of_a_variable(
    bus: Bus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ref = await bus.blobs.store("t", np.ones(100_000), "w")

    async def away(*_: Any) -> AsyncIterator[bytes]:
        raise BusUnavailable("Redis does not answer")
        yield b""

    with monkeypatch.context() as patch:
        patch.setattr(bus.blobs, "chunks", away)
        with pytest.raises(BusUnavailable):
            await Inputs(bus.blobs, tmp_path).of(submission("t", {"w": ref})).__aenter__()
    async with Inputs(bus.blobs, tmp_path).of(submission("t", {"w": ref})):
        assert input_path(tmp_path, ref).exists()


async def test_a_submission_that_cannot_be_decoded_is_left_to_the_workers(bus: Bus, tmp_path: Path) -> None:
    async with Inputs(bus.blobs, tmp_path).of(Submission(trace="t", model="m", invokes=[], live=b"\xc1")):
        pass
    async with Inputs(bus.blobs, tmp_path).of(Submission(trace="t", model="m", invokes=[], live=pack([1]))):
        pass


async def test_images_that_are_too_large_are_not_fetched(tmp_path: Path) -> None:
    image = ArrayRef("uint8", (MAX_MEDIA_BYTES // 6 + 1, 1, 3), bytes(16), "i", "i")
    one = Invoke(prompt="x", media=pack({"image": [image, image]}))
    # Without blobs: whoever asked for one would fail.
    inputs: Any = Inputs(None, tmp_path)  # type: ignore[arg-type]
    with pytest.raises(Rejection, match=f"at most {MAX_MEDIA_BYTES} bytes") as refused:
        async with inputs.of(Submission(trace="t", model="m", invokes=[Invoke(prompt="y"), one])):
            pytest.fail("it ran")
    assert refused.value.failure.field == "invokes[1].prompt.multi_modal_data"


async def test_a_digest_alone_gives_nobody_another_traces_value(bus: Bus, tmp_path: Path) -> None:
    value = np.random.default_rng(0).random((1000, 300), dtype=np.float32)
    owned = await bus.blobs.store("owner", value, "w")
    inputs = Inputs(bus.blobs, tmp_path)
    async with inputs.of(submission("owner", {"w": owned})):
        for blob in (owned.blob, "another"):
            stolen = ArrayRef("float32", (1000, 300), owned.digest, blob, "w")
            with pytest.raises(Rejection) as refused:
                async with inputs.of(submission("thief", {"w": stolen})):
                    pytest.fail("it ran")
            assert refused.value.failure.field == "variables.w"
        # Nor with a blob of its own that has other bytes, or another shape of the same ones.
        other = await bus.blobs.store("thief", np.zeros((1000, 300), np.float32), "w")
        for shape in ((1000, 300), (300, 1000)):
            with pytest.raises(Rejection, match="do not match"):
                async with inputs.of(submission("thief", {"w": ArrayRef("float32", shape, owned.digest, other.blob)})):
                    pytest.fail("it ran")
        # The owner's trace is none the worse, and another one that has the value shares the file.
        also = await bus.blobs.store("other", value, "w")
        async with inputs.of(submission("other", {"w": also})):
            assert [file.name for file in tmp_path.iterdir()] == [input_path(tmp_path, owned).name]
    assert not list(tmp_path.iterdir())
