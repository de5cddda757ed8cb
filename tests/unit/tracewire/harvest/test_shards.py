"""A shard's files hold the rows of its prompts, in safetensors and in Parquet, in every dtype."""

from __future__ import annotations

import io
from typing import Any

import ml_dtypes
import numpy as np
import pyarrow.parquet
import pytest
import safetensors.numpy

import tracewire
from tests.support.harvests import failed, rows
from tracewire.harvest.journal import file_digest
from tracewire.harvest.pieces import raw
from tracewire.harvest.shards import Shard, Signatures, decoded_tensors, values_of_table

DTYPES = ["float32", "float16", "float64", ml_dtypes.bfloat16, "int32", "uint8", "bool"]


def shard(*added: Any) -> Shard:
    made = Shard()
    for one in added:
        made.add(one)
    return made


def array(count: int, dtype: Any = "float32", first: int = 0) -> np.ndarray[Any, Any]:
    return (np.arange(first, first + count * 2).reshape(count, 2) % 5).astype(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("values", ["safetensors", "parquet"])
def test_tensors_have_the_rows_of_all_prompts(dtype: Any, values: str) -> None:
    one, two = array(3, dtype), array(2, dtype, first=1)
    entry, files = shard(rows(5, ("hs", one)), failed(6), rows(7, ("hs", two))).files("000000-ab", values)
    assert entry.prompts == [5, 7]
    assert [lost.prompt for lost in entry.failed] == [6]
    assert [file.bytes for file in entry.files] == [len(b"".join(pieces)) for pieces in files.values()]
    index = pyarrow.parquet.read_table(io.BytesIO(b"".join(files["shards/000000-ab.index.parquet"])))
    if values == "safetensors":
        tensors = decoded_tensors(b"".join(map(raw, files["shards/000000-ab.safetensors"])))
    else:
        tensors = values_of_table(index, entry)
    np.testing.assert_array_equal(tensors["hs"], np.concatenate([one, two]))
    assert tensors["hs"].dtype == one.dtype
    assert entry.tensors["hs"].shape == [5, 2]


def test_the_index_says_what_each_row_is_of() -> None:
    made = shard(rows(1, ("a", array(2)), ("b", array(3))), rows(2, ("a", array(3)), prompt="xyz"))
    _, files = made.files("000000-ab", "safetensors")
    table = pyarrow.parquet.read_table(io.BytesIO(b"".join(files["shards/000000-ab.index.parquet"]))).to_pylist()
    assert [(row["tensor"], row["prompt"], row["row"]) for row in table] == [
        *(("a", 1, 0), ("a", 1, 1), ("a", 2, 2), ("a", 2, 3), ("a", 2, 4)),
        *(("b", 1, 0), ("b", 1, 1), ("b", 1, 2)),
    ]
    assert [(row["position"], row["token"], row["token_id"]) for row in table[2:5]] == [
        *((0, "x", 120), (1, "y", 121), (2, "z", 122)),
    ]
    assert {(row["layer"], row["location"], row["shard"]) for row in table} == {(0, "residual(0)", "000000-ab")}
    prompts = pyarrow.parquet.read_table(io.BytesIO(b"".join(files["shards/000000-ab.prompts.parquet"]))).to_pylist()
    assert prompts[1] == {"prompt": 2, "prompt_tokens": 3, "token_ids": [120, 121, 122, 33], "text": "!"}


@pytest.mark.parametrize("values", ["safetensors", "parquet"])
def test_parts_of_a_tensor_stand_side_by_side(values: str) -> None:
    top, indices = array(2), np.array([[7, 1], [3, 2]], np.int32)
    entry, files = shard(rows(0, ("hs", array(3)), values=top, indices=indices)).files("000000-ab", values)
    table = pyarrow.parquet.read_table(io.BytesIO(b"".join(files["shards/000000-ab.index.parquet"])))
    if values == "safetensors":
        tensors = decoded_tensors(b"".join(map(raw, files["shards/000000-ab.safetensors"])))
    else:
        tensors = values_of_table(table, entry)
    np.testing.assert_array_equal(tensors["parts.indices"], indices)
    np.testing.assert_array_equal(tensors["parts.values"], top)
    np.testing.assert_array_equal(tensors["hs"], array(3))
    # Nobody knows the positions of a block's rows.
    assert [row["position"] for row in table.to_pylist() if row["name"] == "parts"] == [None, None]


def test_the_field_s_own_reader_takes_the_files() -> None:
    _, files = shard(rows(0, ("hs", array(3)))).files("000000-ab", "safetensors")
    loaded = safetensors.numpy.load(b"".join(map(raw, files["shards/000000-ab.safetensors"])))
    np.testing.assert_array_equal(loaded["hs"], array(3))


def test_a_file_is_as_the_field_s_own_writer_makes_it() -> None:
    """Tensors of several dtypes, with rows of several prompts, one of them in another order of bytes and memory."""
    dtypes = ["uint8", "float64", ml_dtypes.bfloat16, "bool", "int32", "float16"]
    own = {f"t{place}": [array(count, dtype) for count in (3, 1, 2)] for place, dtype in enumerate(dtypes)}
    own["t1"][1] = np.asfortranarray(own["t1"][1]).astype(">f8")
    made = shard(*[rows(key, *[(name, parts[key]) for name, parts in own.items()]) for key in range(3)])
    entry, files = made.files("000000-ab", "safetensors")
    data = b"".join(map(raw, files["shards/000000-ab.safetensors"]))
    loaded = decoded_tensors(data)
    whole = {name: np.concatenate(parts) for name, parts in own.items()}
    assert loaded.keys() == whole.keys()
    for name, tensor in whole.items():
        np.testing.assert_array_equal(loaded[name], tensor)
    header = 8 + int.from_bytes(data[:8], "little")
    assert header % 8 == 0
    theirs = safetensors.numpy.save({name: tensor.astype(loaded[name].dtype) for name, tensor in whole.items()})
    assert data[header:] == theirs[8 + int.from_bytes(theirs[:8], "little") :]
    assert [file.digest for file in entry.files] == [
        file_digest(b"".join(map(raw, pieces))) for pieces in files.values()
    ]


def test_other_dtypes_are_left_to_the_field_s_own_writer() -> None:
    _, files = shard(rows(0, ("hs", array(3, "complex64"))), rows(1, ("hs", array(1, "complex64")))).files(
        "a", "safetensors"
    )
    loaded = safetensors.numpy.load(b"".join(files["shards/a.safetensors"]))
    np.testing.assert_array_equal(loaded["hs"], np.concatenate([array(3, "complex64"), array(1, "complex64")]))


def test_a_shard_of_failures_has_no_files() -> None:
    entry, files = shard(failed(1)).files("000000-ab", "safetensors")
    assert (files, entry.files, len(entry.failed)) == ({}, [], 1)


def test_prompts_without_rows_are_in_the_harvest_all_the_same() -> None:
    entry, files = shard(rows(1, ("hs", array(0)))).files("000000-ab", "parquet")
    assert entry.prompts == [1]
    assert entry.tensors == {}
    assert pyarrow.parquet.read_table(io.BytesIO(b"".join(files["shards/000000-ab.index.parquet"]))).num_rows == 0


def test_rows_of_another_shape_or_dtype_do_not_fit() -> None:
    signatures = Signatures()
    entry, _ = shard(rows(0, ("hs", array(3)))).files("000000-ab", "safetensors")
    signatures.learn([entry])
    signatures.check(rows(1, ("hs", array(1)), ("other", array(1, "int32"))))
    for wrong in (array(1, "float16"), np.zeros((2, 3), np.float32)):
        with pytest.raises(tracewire.NotAnArray, match="hs"):
            signatures.check(rows(2, ("hs", wrong)))
