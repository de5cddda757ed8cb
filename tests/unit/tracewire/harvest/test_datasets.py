"""Data sets: iterables, files and Hugging Face's, with keys that tell prompts apart."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pyarrow.parquet
import pytest

import tracewire
from tests.support.harvests import numbered
from tracewire import Prompt
from tracewire.harvest.datasets import Dataset

ROWS = [{"id": f"p{index}", "text": f"prompt {index}", "label": index} for index in range(600)]


async def items(source: Any, **options: Any) -> list[tuple[Any, Any]]:
    return [(item.key, item.prompt) async for item in Dataset(source, **options)]


def jsonl(path: Path, rows: Any = ROWS) -> Path:
    text = "".join(json.dumps(row) + "\n" for row in rows).encode()
    path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
    return path


async def test_prompts_of_all_forms() -> None:
    chat = [{"role": "user", "content": "hello"}]
    image = {"prompt": "a", "multi_modal_data": {"image": b"..."}}
    prompts = ["text", [1, 2, 3], chat, Prompt("own", max_tokens=3), {"prompt": "of a dict"}, image]
    found = await items(prompts)
    assert [key for key, _ in found] == list(range(6))
    assert [prompt for _, prompt in found] == [*prompts[:4], "of a dict", image]
    assert Dataset(prompts).total == 6


async def test_iterables_and_async_iterables() -> None:
    def rows() -> Iterator[str]:
        yield from ("a", "b")

    assert await items(rows()) == [(0, "a"), (1, "b")]
    assert await items(numbered(2)) == [(0, "prompt 0"), (1, "prompt 1")]
    assert Dataset(rows()).total is None


async def test_columns_and_keys() -> None:
    assert (await items(ROWS, key="id"))[7] == ("p7", "prompt 7")
    assert (await items(ROWS, key="label", column="id"))[7] == (7, "p7")
    tokens = [{"input_ids": [1, 2, 0], "attention_mask": [1, 1, 0]}]
    assert await items(tokens) == [(0, tokens[0])]


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.parquet"])
async def test_files(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    if name.endswith(".parquet"):
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), path)
    else:
        jsonl(path)
    for source in (path, f"file://{path}"):
        found = await items(source, key="id")
        assert found == [(row["id"], row["text"]) for row in ROWS]


async def test_data_sets_of_hugging_face() -> None:
    whole = datasets.Dataset.from_list(ROWS)
    assert Dataset(whole).total == 600
    assert await items(whole, key="id") == [(row["id"], row["text"]) for row in ROWS]
    streamed = whole.to_iterable_dataset()
    assert await items(streamed, key="id") == [(row["id"], row["text"]) for row in ROWS]


async def test_a_digest_is_the_prompt_s_own() -> None:
    import numpy as np

    prompts = ["a", "b", "a", np.array([1, 2]), np.array([1, 3]), Prompt("a", max_tokens=3), Prompt("a", max_tokens=4)]
    digests = [item.digest async for item in Dataset(prompts)]
    assert digests[0] == digests[2]
    assert len(set(digests)) == 6


@pytest.mark.parametrize(
    ("rows", "options", "message"),
    [
        ([{"text": "a"}, {"other": "b"}], {}, "row 1 of the data set: it has no column 'prompt' or .*; it has other"),
        ([{"text": "a"}], {"column": "prompt"}, "row 0 of the data set: it has no column 'prompt' to be its prompt"),
        (["a"], {"column": "text"}, "expected a dict with a column 'text', got 'a'"),
        (["a"], {"key": "id"}, "it has no column 'id' to be its key, got 'a'"),
        ([{"text": "a", "id": 1.5}], {"key": "id"}, "expected an integer or a text as its key, got 1.5"),
        ([{"text": "a", "id": 1}, {"text": "b", "id": 1}], {"key": "id"}, "row 1 .*: the key 1 is that of an earlier"),
        ([{"text": "a", "id": 1}, {"text": "b", "id": "1"}], {"key": "id"}, "row 1 .*: expected a key of type int"),
        ([object()], {}, "row 0 of the data set: expected a prompt"),
    ],
)
async def test_rows_that_are_no_prompts(rows: Any, options: Any, message: str) -> None:
    with pytest.raises(tracewire.InvalidDataset, match=message):
        await items(rows, **options)


async def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    broken = jsonl(tmp_path / "broken.jsonl", ROWS[:300])
    broken.write_text(broken.read_text() + "{\n")
    with pytest.raises(tracewire.InvalidDataset, match=r"row 300 of the data set: .*broken\.jsonl has no JSON there"):
        await items(broken)
    (tmp_path / "cut.parquet").write_bytes(b"PAR1")
    for name in ("cut.parquet", "missing.parquet", "missing.jsonl"):
        with pytest.raises(tracewire.InvalidDataset, match=f"{name} cannot be read"):
            await items(tmp_path / name)


@pytest.mark.parametrize("source", ["prompts.csv", b"prompts", {"prompt": "a"}, 3])
def test_what_is_no_data_set(source: Any) -> None:
    with pytest.raises((TypeError, ValueError), match="prompts: expected"):
        Dataset(source)
