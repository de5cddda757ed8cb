"""A harvest is read by prompt and by shard, and a damaged shard costs the others nothing."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

import tracewire
from tests.support.harvests import failed, rows
from tracewire.harvest.journal import Journal
from tracewire.harvest.shards import Shard
from tracewire.harvest.stores import Store


def harvest(folder: Path, values: str = "safetensors") -> Path:
    """Two shards of two prompts, and one prompt that failed."""
    journal = Journal(Store(folder))
    journal.open({"model": "tiny"}, {})
    for first in (0, 2):
        shard = Shard()
        for key in (first, first + 1):
            shard.add(rows(key, ("hs", np.full((key + 1, 2), key, ml_dtypes.bfloat16)), ids=np.array([key])))
        shard.add(failed(10 + first))
        entry, files = shard.files(journal.shard_name(), values)
        for name, data in files.items():
            journal.store.put(name, *data)
        journal.commit(entry)
    return folder


@pytest.mark.parametrize("values", ["safetensors", "parquet"])
def test_prompts_are_read_in_any_order(tmp_path: Path, values: str) -> None:
    harvested = tracewire.harvest.open(harvest(tmp_path, values))
    assert (len(harvested), harvested.keys(), 2 in harvested, 9 in harvested) == (4, [0, 1, 2, 3], True, False)
    assert harvested.failed == {10: "ValueError: it is bad", 12: "ValueError: it is bad"}
    assert harvested.description["model"] == "tiny"
    assert harvested.tensors == {"hs": ("bfloat16", [2]), "parts.ids": ("int64", [])}
    for key in (3, 0, 2, 1):
        prompt = harvested[key]
        np.testing.assert_array_equal(prompt["hs"], np.full((key + 1, 2), key))
        assert prompt["hs"].dtype == np.float32
        assert prompt.positions["hs"].tolist() == list(range(key + 1))
        assert prompt["parts.ids"].tolist() == [key]
        assert (prompt.prompt_tokens, prompt.token_ids, prompt.text) == (3, [97, 98, 99, 33], "!")
    assert [prompt.key for prompt in harvested] == [0, 1, 2, 3]
    with pytest.raises(KeyError):
        harvested[9]


def test_arrays_in_the_dtype_that_the_engine_saved(tmp_path: Path) -> None:
    harvested = tracewire.harvest.open(harvest(tmp_path), exact=True)
    assert harvested[3]["hs"].dtype == ml_dtypes.bfloat16


def test_shards_with_their_indices(tmp_path: Path) -> None:
    for index, tensors in tracewire.harvest.open(harvest(tmp_path)).shards():
        for row in index.to_pylist():
            if row["tensor"] == "hs":
                assert tensors["hs"][row["row"]].tolist() == [row["prompt"]] * 2


@pytest.mark.parametrize("file", ["safetensors", "index.parquet", "prompts.parquet"])
def test_a_shard_cut_short_is_named_and_the_others_are_read(tmp_path: Path, file: str) -> None:
    harvest(tmp_path)
    (path,) = tmp_path.glob(f"shards/000000-*.{file}")
    path.write_bytes(path.read_bytes()[:-5])
    harvested = tracewire.harvest.open(tmp_path)
    with pytest.raises(tracewire.ShardDamaged) as damaged:
        harvested[1]
    assert damaged.value.file == f"shards/{path.name}"
    assert harvested[3]["hs"].shape == (4, 2)


def test_a_place_without_a_harvest(tmp_path: Path) -> None:
    with pytest.raises(tracewire.HarvestMissing, match=r"no harvest\.json"):
        tracewire.harvest.open(tmp_path)
