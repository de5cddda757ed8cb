"""Values as JSON, both ways."""

from __future__ import annotations

import base64
from typing import Any

import ml_dtypes
import msgspec
import numpy as np
import pytest

from tracewire import ArrayRef, AttentionPattern, HeadAblate, Live, Patch, Probe, Steer, TraceRejected, digest
from tracewire.gateway.json_values import arrays_in, block_of, inlined, interventions_of, to_json, value_of, values_of

ARRAYS = [
    np.arange(6, dtype=np.int16).reshape(2, 3),
    np.array(1.5),
    np.zeros((0, 4), np.float32),
    np.array([1.5, -2], ml_dtypes.bfloat16),
    np.array([True, False]),
    np.array([1 + 2j], np.complex64),
]


@pytest.mark.parametrize("array", ARRAYS, ids=lambda array: array.dtype.name)
def test_an_array_comes_back_from_base64(array: Any) -> None:
    encoded = msgspec.json.decode(msgspec.json.encode(to_json({"x": [array]}, "base64", "t")))
    (found,) = value_of(encoded, "live")["x"]
    assert (found.dtype, found.shape, digest(found)) == (array.dtype, array.shape, digest(array))


def test_an_array_as_a_list() -> None:
    assert to_json(ARRAYS[0], "list", "t") == [[0, 1, 2], [3, 4, 5]]
    assert to_json(ARRAYS[3], "list", "t") == [1.5, -2.0]
    assert to_json(np.array(2.0), "list", "t") == 2.0
    # A list of complex numbers has no form in JSON.
    assert to_json(ARRAYS[5], "list", "t")["dtype"] == "complex64"
    # Small arrays only, where that is asked for.
    assert to_json(np.ones(1024), "small", "t") == [1.0] * 1024
    assert to_json(np.ones(1025), "small", "t")["href"].startswith("/traces/t/values/")
    text = msgspec.json.encode(to_json(np.array([np.nan, np.inf, 1]), "list", "t"))
    assert text == b"[null,null,1.0]"


def test_what_json_does_not_have() -> None:
    value = {1: (True, None), b"\xff": {3}, "n": [2**64, -(2**63) - 1, 2**64 - 1], "c": 1j, "f": np.float32(0.5)}
    assert to_json(value, "list", "t") == {
        "1": [True, None],
        "ff": [3],
        "n": [str(2**64), str(-(2**63) - 1), 2**64 - 1],
        "c": {"real": 0.0, "imag": 1.0},
        "f": 0.5,
    }


async def test_references_are_downloaded_up_to_a_limit() -> None:
    array = np.arange(10, dtype=np.float32)

    async def load(ref: ArrayRef) -> Any:
        return array.copy()

    ref = ArrayRef("float32", (10,), digest(array), "blob", "x", load)
    value = {"x": [ref], "y": 1}
    assert list(arrays_in(value)) == [ref]
    assert (await inlined(value, 40))["x"][0].tolist() == array.tolist()
    assert await inlined(value, 39) is value
    found = to_json(ref, "list", "t")
    assert found == to_json(array, "reference", "t")
    assert found["href"] == f"/traces/t/values/{digest(array).hex()}"


RAW = base64.b64encode(np.ones(2, np.float32).tobytes()).decode()
ONES = {"dtype": "float32", "shape": [2], "base64": RAW}


@pytest.mark.parametrize(
    ("value", "field"),
    [
        ({"dtype": "object", "shape": [2], "base64": RAW}, "live.x.dtype"),
        ({"dtype": ["float32"], "shape": [2], "base64": RAW}, "live.x.dtype"),
        ({"dtype": {}, "shape": [2], "base64": RAW}, "live.x.dtype"),
        ({"dtype": "float32", "shape": [-2], "base64": RAW}, "live.x.shape"),
        ({"dtype": "float32", "shape": [3], "base64": RAW}, "live.x.base64"),
        ({"dtype": "float32", "shape": [2], "base64": "?"}, "live.x.base64"),
        ({"dtype": "float32", "shape": [2], "base64": 7}, "live.x.base64"),
        ([[1], [1, 2]], "live.x"),
        (["a"], "live.x"),
        ([10**400], "live.x"),
    ],
)
def test_what_is_no_array(value: Any, field: str) -> None:
    with pytest.raises(TraceRejected) as caught:
        values_of({"x": value}, "live", arrays=True)
    assert caught.value.field == field


def test_values_that_nest_too_deep() -> None:
    value: Any = 1
    for _ in range(70):
        value = [value]
    with pytest.raises(TraceRejected, match="too deep"):
        value_of(value, "live")
    with pytest.raises(TraceRejected, match="too deep"):
        interventions_of([{"do": "probe", "name": value, "at": "x"}], "interventions")


def test_interventions() -> None:
    one, two = interventions_of(
        [
            {"do": "steer", "at": "residual(0)", "vector": [1, 2], "scale": {"live": "a"}},
            {
                "do": "probe",
                "name": "x",
                "at": "residual(0)",
                "bias": {"dtype": "float32", "shape": [2], "base64": RAW},
            },
        ],
        "interventions",
    )
    assert isinstance(one, Steer)
    assert (one.vector.dtype, one.vector.tolist(), one.scale) == (np.float32, [1, 2], Live("a"))
    assert isinstance(two, Probe)
    assert two.bias.tolist() == [1, 1]
    (live,) = interventions_of([{"do": "steer", "at": "residual(0)", "vector": {"live": "v"}}], "interventions")
    assert live.vector == Live("v")


@pytest.mark.parametrize(
    ("given", "field"),
    [
        (3, "interventions[0]"),
        ({}, "interventions[0].do"),
        ({"do": "steer"}, "interventions[0]"),
        ({"do": "steer", "at": "x", "vector": [1], "scales": 2}, "interventions[0].scales"),
        ({"do": "steer", "at": 3, "vector": [1]}, "interventions[0].at"),
        ({"do": "steer", "at": "x", "vector": ["a"]}, "interventions[0].vector"),
        ({"do": "steer", "at": "x", "vector": {"alive": 1}}, "interventions[0].vector"),
        ({"do": "steer", "at": "x", "vector": [1], "positions": "some"}, "interventions[0].positions"),
        ({"do": "probe", "name": "\ud800", "at": "x"}, "interventions[0].name"),
        ({"do": "probe", "name": "a", "at": "x\ud800"}, "interventions[0].at"),
        ({"do": "steer", "at": "x", "vector": {"live": "\ud800"}}, "interventions[0].vector.live"),
        ({"do": "steer", "at": "x", "vector": [1], "scale": {"\ud800": 1}}, "interventions[0].scale"),
    ],
)
def test_what_is_no_intervention(given: Any, field: str) -> None:
    with pytest.raises(TraceRejected) as caught:
        interventions_of([given], "interventions")
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({}, "block"),
        ({"source": 3}, "block.source"),
        ({"source": "\U000a4830"}, "block.source"),
        ({"source": "x\0"}, "block.source"),
        ({"source": "(" * 10_000}, "block.source"),
        ({"source": "x", "sauce": 1}, "block"),
        ({"source": "x", "variables": {"n": 2**70}}, None),
        ({"source": "x", "helpers": [{"name": "f"}]}, "block.helpers[0]"),
        ({"source": "x", "name": "\ud800"}, "block.name"),
        ({"source": "x", "filename": "\ud800"}, "block.filename"),
        ({"source": "x", "helpers": [{"name": "\ud800"}]}, "block.helpers[0].name"),
        ({"source": "x", "imports": {"\ud800": ["a", "b"]}}, "block.imports"),
        ({"source": "x", "modules": {"a": "\ud800"}}, "block.modules.a"),
    ],
)
def test_what_is_no_block(given: Any, field: str | None) -> None:
    if field is None:
        assert block_of(given, "block").name == "block"
        return
    with pytest.raises(TraceRejected) as caught:
        block_of(given, "block")
    assert caught.value.field == field


def test_heads_and_positions_are_lists_of_integers_and_values_are_arrays() -> None:
    patch, ablated, pattern = interventions_of(
        [
            {"do": "patch", "at": "heads(1)", "values": [[1.0, 2.0]], "heads": [3], "positions": [0, -1]},
            {"do": "head_ablate", "at": "heads(1)", "heads": 2, "mean": [0.5, 1], "keep": {"live": "keep"}},
            {"do": "attention_pattern", "name": "a", "at": "heads(*)", "heads": [0, 1], "top_k": 4},
        ],
        "interventions",
    )
    assert isinstance(patch, Patch)
    assert isinstance(ablated, HeadAblate)
    assert isinstance(pattern, AttentionPattern)
    assert (patch.values.tolist(), patch.heads, patch.positions) == ([[1.0, 2.0]], [3], [0, -1])
    assert (ablated.mean.tolist(), ablated.heads, ablated.keep) == ([0.5, 1.0], 2, Live("keep"))
    assert (pattern.heads, pattern.top_k) == ([0, 1], 4)
