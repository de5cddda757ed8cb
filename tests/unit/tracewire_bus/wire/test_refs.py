"""References to large arrays: checked, sized, and of no use unless loaded."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tracewire_bus.wire.digests import digest
from tracewire_bus.wire.packing import decoder, pack, unpack
from tracewire_bus.wire.refs import ArrayRef


def test_every_reference_in_a_message_has_the_loader_of_its_call() -> None:
    """Also those in tuples, which are messages of their own."""

    async def load(ref: ArrayRef) -> Any:
        raise NotImplementedError

    ref = ArrayRef("int8", (1,), bytes(16), "b")
    data = pack([ref, {"k": (1, (ref, [(ref,)]))}])
    first, held = decoder()(data, load)
    found = [first, held["k"][1][0], held["k"][1][1][0][0]]
    assert [one._load for one in found] == [load] * 3
    # The next call has none.
    assert decoder()(data)[0]._load is None


def test_a_reference_counts_as_its_array() -> None:
    value = np.arange(10, dtype=np.float16)
    ref = ArrayRef("float16", (10,), digest(value), "blob", "acts")
    for holder in (lambda x: x, lambda x: [x, 1], lambda x: {"k": (x, [x])}):
        assert digest(holder(ref)) == digest(holder(value))
        again = unpack(pack(holder(ref)))
        assert digest(again) == digest(holder(value))
    back = unpack(pack(ref))
    assert back == ref
    assert (back.dtype, back.shape, back.blob, back.name, back.nbytes) == ("float16", (10,), "blob", "acts", 20)
    assert "float16[10]" in repr(back)
    assert {ref: 1}[back] == 1


@pytest.mark.parametrize(
    "fields",
    [
        ("object", (1,), bytes(16), "b", ""),
        ("float32", (-1,), bytes(16), "b", ""),
        ("float32", (1,) * 33, bytes(16), "b", ""),
        ("float32", (1,), bytes(15), "b", ""),
        ("float32", (1,), "digest", "b", ""),
        ("float32",),
    ],
)
def test_a_malformed_reference_is_refused(fields: tuple[Any, ...]) -> None:
    import msgspec

    data = msgspec.msgpack.encode(msgspec.msgpack.Ext(5, msgspec.msgpack.encode(fields)))
    with pytest.raises(ValueError):
        unpack(data)


async def test_a_reference_that_no_client_decoded_cannot_load() -> None:
    ref = unpack(pack(ArrayRef("int8", (1,), bytes(16), "b")))
    with pytest.raises(RuntimeError, match="not decoded by a client"):
        await ref.load()


def test_every_dtype_has_the_size_that_numpy_gives_it() -> None:
    from tracewire_bus.wire.arrays import array_from_raw
    from tracewire_bus.wire.refs import DTYPES

    for name in DTYPES:
        ref = ArrayRef(name, (3,), bytes(16), "b")
        assert array_from_raw(name, (3,), bytes(ref.nbytes)).shape == (3,)
