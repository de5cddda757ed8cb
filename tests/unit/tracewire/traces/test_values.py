"""What was saved, as arrays of NumPy and torch, tables and labelled arrays: of events, of results, large and small."""

from __future__ import annotations

import importlib
import sys
from collections.abc import AsyncIterator
from typing import Any

import ml_dtypes
import numpy as np
import pandas as pd
import pytest
import torch
import xarray as xr

import tracewire
from tests.support.bus_engine import BusEngine, Stage
from tracewire import ArrayRef, Client, LibraryMissing, NotAnArray, NotLoaded, Result, SaveMissing, Values
from tracewire_bus.wire.arrays import extra_dtypes
from tracewire_bus.wire.messages import Set
from tracewire_bus.wire.packing import wire

HIDDEN = np.arange(12, dtype=np.float32).reshape(3, 4)


@pytest.fixture
async def client(embedded: str, prefix: str) -> AsyncIterator[Client]:
    """A client on the session's Redis."""
    async with tracewire.connect(embedded, prefix=prefix) as client:
        yield client


async def saves(stage: Stage) -> None:
    """Three tokens: a number, a vector of bfloat16 and a lens at each, a matrix, text, and rows of several shapes."""
    await stage.accept()
    for step in range(3):
        lens = {"token_ids": np.array([[step, 7]], dtype=np.int32), "logits": np.array([[2.0, 1.0]], dtype=np.float32)}
        saved = {
            "score": step / 2,
            "hs": HIDDEN[step].astype(ml_dtypes.bfloat16),
            "lens": lens,
            "rows": np.ones((step + 1, 4), dtype=np.float32),
            "word": "abc"[step],
        }
        await stage.save(f" {step}", saved)
    final: list[Any] = [Set(path=("matrix",), value=wire(HIDDEN)), Set(path=("note",), value="text")]
    await stage.final(deltas=[(0, 0, final)])


async def stores(stage: Stage) -> None:
    """The vectors of `saves`, each as a reference."""
    await stage.accept()
    for step in range(3):
        await stage.save(" x", {"hs": await stage.store(HIDDEN[step].astype(ml_dtypes.bfloat16), "hs")})
    await stage.final()


async def result_of(client: Client, script: Any) -> Result:
    bus = client._session.open_bus()
    async with BusEngine.running(bus.url, bus.keys.prefix, script), client.trace("tiny", "hello") as trace:
        return await trace.result()


# --- NumPy and torch --------------------------------------------------------------------------------------------------


async def test_lists_become_one_array(client: Client) -> None:
    result = await result_of(client, saves)
    np.testing.assert_array_equal(result.to_numpy("hs"), HIDDEN)
    assert result.to_numpy("hs").dtype == np.float32
    assert result.to_numpy("hs", dtype="bfloat16").dtype == ml_dtypes.bfloat16
    assert result.to_numpy("hs", dtype="float64").dtype == np.float64
    np.testing.assert_array_equal(result.to_numpy("score"), [0.0, 0.5, 1.0])
    lens = result.to_numpy("lens")
    assert lens["token_ids"].shape == (3, 1, 2)
    assert (lens["token_ids"].dtype, lens["logits"].dtype) == (np.int32, np.float32)
    assert [rows.shape for rows in result.to_numpy("rows")] == [(1, 4), (2, 4), (3, 4)]
    assert result.to_numpy("word") == ["a", "b", "c"]
    everything = result.to_numpy()
    assert everything.keys() == result.saves.keys()
    assert everything["note"] == "text"


async def test_tensors_have_the_saved_dtype_and_can_be_written(client: Client) -> None:
    result = await result_of(client, saves)
    hs = result.to_torch("hs")
    assert (hs.dtype, tuple(hs.shape)) == (torch.bfloat16, (3, 4))
    torch.testing.assert_close(hs.float(), torch.from_numpy(HIDDEN.copy()))
    hs[0, 0] = 9.0
    assert result.to_torch("hs")[0, 0] == 0.0
    assert result.to_torch("hs", dtype="float32").dtype == torch.float32
    assert result.to_torch("hs", dtype=torch.float16, device="cpu").dtype == torch.float16
    assert result.to_torch("lens")["token_ids"].dtype == torch.int32
    assert result.to_torch()["note"] == "text"


async def test_what_came_in_an_event_is_copied_and_nothing_else(client: Client) -> None:
    result = await result_of(client, saves)
    assert not result.saves["matrix"].flags.writeable
    copied = result.to_numpy("matrix")
    copied[0, 0] = 5.0
    assert result.saves["matrix"][0, 0] == 0.0
    mine = Values(matrix=HIDDEN.copy(), half=HIDDEN.astype(ml_dtypes.bfloat16))
    assert mine.to_numpy("matrix") is mine["matrix"]
    tensor = mine.to_torch("half")
    tensor[0, 0] = 3.0
    assert mine["half"][0, 0] == 3.0
    assert mine.to_numpy("half", dtype="bfloat16") is mine["half"]


@pytest.mark.parametrize("name", sorted(extra_dtypes()))
def test_every_dtype_of_ml_dtypes_becomes_a_tensor(name: str) -> None:
    array = np.array([0.5, 1.0, 2.0]).astype(extra_dtypes()[name])
    tensor = Values(x=array).to_torch("x")
    assert tensor.dtype == getattr(torch, name, torch.float32)
    np.testing.assert_array_equal(tensor.float().numpy(), array.astype(np.float32))
    assert Values(x=array).to_numpy("x").dtype == np.float32


def test_numbers_that_no_array_holds_stay_numbers() -> None:
    values = Values(large=[2**70, 1], mixed=[1, 2.5], flags=[True, False], none=[], one=3, deep=[[1, 2], [3, 4]])
    assert values.to_numpy("large") == [2**70, 1]
    assert values.to_numpy("mixed").dtype == np.float64
    assert values.to_numpy("flags").dtype == np.bool_
    assert values.to_numpy("none").shape == (0,)
    assert values.to_torch("one").item() == 3
    assert values.to_numpy("deep").shape == (2, 2)
    # A number in NumPy's own class, unaligned bytes.
    unaligned = np.frombuffer(b"x" + HIDDEN.tobytes(), dtype=np.float32, offset=1)
    assert Values(x=unaligned).to_torch("x").tolist() == HIDDEN.reshape(-1).tolist()


# --- references -------------------------------------------------------------------------------------------------------


async def test_a_program_reads_references_and_arrays_alike(client: Client) -> None:
    for script in (saves, stores):
        result = await result_of(client, script)
        digest = result.digest()
        hs = await result.load("hs", dtype="float32")
        assert [one.dtype for one in hs] == [np.float32] * 3
        np.testing.assert_array_equal(np.stack(hs), HIDDEN)
        assert (await result.load("hs"))[0].dtype == np.float32
        assert (await result.load("hs", exact=True))[0].dtype == ml_dtypes.bfloat16
        assert result.to_torch("hs").dtype == torch.bfloat16
        assert result.digest() == digest
        assert (await result.load())["hs"][1].tolist() == HIDDEN[1].tolist()


async def test_what_was_loaded_is_here_and_can_be_written(client: Client) -> None:
    result = await result_of(client, stores)
    with pytest.raises(NotLoaded, match=r"'hs' refers to an array of 8 bytes .* before its to_torch"):
        result.to_torch("hs")
    await result.load("hs")
    bus = client._session.open_bus()
    await bus.command("DEL", bus.keys.blobs(result.trace_id))
    first = result.saves["hs"][0]
    assert (await result.load("hs", exact=True))[0] is first
    assert Values(first=first).to_numpy("first", dtype="bfloat16") is first
    first[0] = 2.0
    assert result.to_numpy("hs")[0, 0] == 2.0


async def test_an_output_s_values_load_and_convert(client: Client) -> None:
    bus = client._session.open_bus()
    async with BusEngine.running(bus.url, bus.keys.prefix, stores):
        async for output in client.trace("tiny", "hello").outputs():
            delta = output.delta
            assert isinstance(delta["hs"][0], ArrayRef)
            await delta.load("hs")
            assert delta.to_torch("hs").tolist() == [HIDDEN[output.index].tolist()]


async def test_load_is_told_of_a_dtype_that_there_is_not(client: Client) -> None:
    result = await result_of(client, stores)
    for options, message in (
        ({"dtype": "floaty"}, "expected one of .*got 'floaty'"),
        ({"dtype": "int8", "exact": True}, "either"),
    ):
        with pytest.raises(ValueError, match=f"dtype: .*{message}"):
            await result.load("hs", **options)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="dtype"):
        result.to_numpy("hs", dtype="floaty")
    loaded = await tracewire.load(result.saves, dtype="float64")
    assert loaded["hs"][0].dtype == np.float64
    assert isinstance(result.saves["hs"][0], ArrayRef)


# --- tables and labelled arrays ---------------------------------------------------------------------------------------


async def test_a_result_is_a_table_with_a_row_a_token(client: Client) -> None:
    result = await result_of(client, saves)
    table = result.to_pandas()
    assert list(table.columns) == ["token_id", "score", "hs", "lens", "rows", "word"]
    assert (table.index.name, len(table)) == ("step", 3)
    assert table["token_id"].tolist() == result.token_ids
    assert table["score"].tolist() == [0.0, 0.5, 1.0]
    assert table["score"].dtype == np.float64
    assert table["hs"][1].tolist() == HIDDEN[1].tolist()
    assert table["lens"][2]["token_ids"].tolist() == [[2, 7]]
    assert table["word"].tolist() == ["a", "b", "c"]


async def test_a_save_is_a_table(client: Client) -> None:
    result = await result_of(client, saves)
    pd.testing.assert_series_equal(
        result.to_pandas("score"), pd.Series([0.0, 0.5, 1.0], index=pd.RangeIndex(3, name="step"), name="score")
    )
    hidden = result.to_pandas("hs")
    assert (hidden.shape, hidden.index.name) == ((3, 4), "step")
    np.testing.assert_array_equal(hidden.to_numpy(), HIDDEN)
    lens = result.to_pandas("lens")
    assert list(lens.columns) == ["token_ids", "logits"]
    assert lens.index.names == ["step", "dim_1", "dim_2"]
    assert lens.loc[(2, 0, 1), "token_ids"] == 7
    assert result.to_pandas("rows")[2].shape == (3, 4)
    assert result.to_pandas("note").tolist() == ["text"]
    deep = Values(x=[np.ones((2, 3))] * 4).to_pandas("x")
    assert (deep.shape, deep.index.names) == ((8, 3), ["step", "dim_1"])


async def test_lists_of_several_lengths_share_a_table() -> None:
    table = Values(long=[1, 2, 3], short=[1.0], one=5).to_pandas()
    assert list(table.columns) == ["long", "short"]
    assert table["short"].isna().tolist() == [False, True, True]


async def test_a_save_is_a_labelled_array(client: Client) -> None:
    result = await result_of(client, saves)
    hidden = result.to_xarray("hs")
    assert isinstance(hidden, xr.DataArray)
    assert (hidden.dims, hidden.name) == (("step", "hs_1"), "hs")
    assert hidden.sel(step=2).values.tolist() == HIDDEN[2].tolist()
    assert result.to_xarray("matrix").dims == ("matrix_0", "matrix_1")
    lens = result.to_xarray("lens")
    assert set(lens.data_vars) == {"lens.token_ids", "lens.logits"}
    assert lens["lens.logits"].dims == ("step", "lens_1", "lens_2")
    with pytest.raises(NotAnArray, match="'rows' cannot be one array"):
        result.to_xarray()
    assert result.to_xarray("word").values.tolist() == ["a", "b", "c"]
    whole = Values({name: value for name, value in result.saves.items() if name != "rows"}).to_xarray()
    assert whole["score"].dims == ("step",)
    assert whole["hs"].shape == (3, 4)
    longer = Values(a=[1.0, 2.0], b=[1.0, 2.0, 3.0]).to_xarray()
    assert np.isnan(longer["a"].sel(step=2))


# --- errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("library", ["torch", "pandas", "xarray"])
async def test_a_library_that_is_missing_is_named_with_its_extra(
    library: str, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = await result_of(client, saves)
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(
        LibraryMissing, match=rf"to_{library}\(\) needs {library}: pip install 'tracewire\[{library}\]'"
    ):
        getattr(result, f"to_{library}")()
    assert issubclass(LibraryMissing, ImportError)
    monkeypatch.undo()
    assert importlib.import_module(library)


async def test_a_name_that_nothing_was_saved_as(client: Client) -> None:
    result = await result_of(client, saves)
    for convert in (result.to_numpy, result.to_torch, result.to_pandas, result.to_xarray):
        with pytest.raises(SaveMissing, match="did you mean 'score'"):
            convert("scor")
    with pytest.raises(SaveMissing):
        await result.load("scor")
