"""Which rows a result has, and which of them are kept."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import tracewire
from tests.support.bus_engine import engine_info
from tracewire import LogitLens, Probe, Steer
from tracewire.harvest.rows import Filters, prompt_rows, readings
from tracewire_bus.domain.tree import ModuleTree
from tracewire_bus.wire.messages import Accepted

TREE = ModuleTree(engine_info())


class Played:
    """A result as a trace has it."""

    def __init__(self, prompt: str, sampled: int, **saves: Any) -> None:
        ids = [ord(character) for character in prompt]
        self.accepted = Accepted(attempt=1, seq=0, engine="e", model="m", prompt_tokens=[len(ids)])
        self.accepted.prompt_token_ids = [ids]
        self.token_ids = list(range(sampled))
        self.token_strings = None
        self.text = "text"
        self.saves = saves
        self.save_errors: dict[str, str] = {}

    async def load(self, name: str, *, exact: bool = False) -> Any:
        assert exact
        return self.saves[name]


def test_locations_are_named_by_their_layers() -> None:
    interventions = [
        Probe("one", "residual(-1)"),
        Probe("all", "residual(*)"),
        Probe("mlp", "model.layers.*.mlp", positions="all"),
        Probe("every", "model.layers.*.*"),
        Probe("norm", "model.norm.input"),
        LogitLens("lens", "residual(1:3)"),
        Steer("residual(0)", np.ones(8)),
    ]
    found = {one.name: one for one in readings(interventions, TREE)}
    assert list(found) == ["one", "all", "mlp", "every", "norm", "lens"]
    assert [one.label for one in found["all"].locations] == ["0", "1", "2", "3"]
    assert [(one.label, one.name) for one in found["mlp"].locations][1] == ("1", "model.layers.1.mlp.output")
    # Two modules of one layer are told apart by their paths.
    assert found["every"].locations[0].label == "model.layers.0.self_attn.output"
    assert [one.layer for one in found["lens"].locations] == [1, 2]
    assert (found["norm"].locations[0].layer, found["norm"].locations[0].name) == (None, "model.norm.input")
    assert (found["one"].several, found["one"].locations[0].layer) == (False, 3)


def test_interventions_that_the_model_or_the_index_cannot_tell() -> None:
    with pytest.raises(tracewire.TraceRejected, match=r"interventions\[0\].at"):
        readings([Probe("a", "residual(9)")], TREE)
    with pytest.raises(tracewire.TraceRejected, match=r"interventions\[1\].name"):
        readings([Probe("a", "residual(0)"), Probe("a", "residual(1)")], TREE)


@pytest.mark.parametrize(
    ("positions", "items", "expected"),
    [
        ("last", [(8,), (8,)], [2, 3]),
        ("all", [(3, 8), (1, 8)], [0, 1, 2, 3]),
        ("prompt", [(3, 8)], [0, 1, 2]),
        ("generated", [(1, 8)], [3]),
    ],
)
async def test_positions_are_those_that_the_engine_reads(positions: Any, items: Any, expected: list[int]) -> None:
    (reading,) = readings([Probe("hs", "residual(1)", positions=positions)], TREE)
    saved = [np.random.default_rng(number).normal(size=shape) for number, shape in enumerate(items)]
    kept = await prompt_rows(0, "d", Played("abc", 2, hs=saved), [reading], Filters())  # type: ignore[arg-type]
    (series,) = kept.series
    assert series.positions.tolist() == expected
    np.testing.assert_array_equal(series.parts[""], np.concatenate([item.reshape(-1, 8) for item in saved]))
    assert kept.token_ids == [97, 98, 99, 0, 1]


async def test_a_mean_has_a_row_a_step_and_no_position() -> None:
    (reading,) = readings([Probe("hs", "residual(*)", positions="prompt", reduce="mean")], TREE)
    kept = await prompt_rows(0, "d", Played("abc", 1, hs=[np.ones((4, 8))]), [reading], Filters())  # type: ignore[arg-type]
    assert [one.tensor for one in kept.series] == ["hs.0", "hs.1", "hs.2", "hs.3"]
    assert [one.positions.tolist() for one in kept.series] == [[-1]] * 4


@pytest.mark.parametrize(
    ("filters", "expected"),
    [
        (Filters(positions=slice(2, None)), [2, 3, 4]),
        (Filters(positions=slice(-2, None)), [4]),
        (Filters(positions=(0, -2, 99)), [0, 4]),
        (Filters(every=2), [0, 2, 4]),
        (Filters(positions=slice(1, None), every=2), [2, 4]),
    ],
)
async def test_rows_of_other_positions_are_left_out(filters: Filters, expected: list[int]) -> None:
    """The sequence has six tokens, and the last one that was sampled has no activations."""
    (reading,) = readings([Probe("hs", "residual(*)", positions="all")], TREE)
    saved = np.arange(5 * 4 * 2, dtype=np.float32).reshape(5, 4, 2)
    kept = await prompt_rows(0, "d", Played("abcde", 1, hs=[saved]), [reading], filters)  # type: ignore[arg-type]
    for layer, series in enumerate(kept.series):
        assert series.positions.tolist() == series.items.tolist() == expected
        np.testing.assert_array_equal(series.parts[""], saved[expected, layer])
        # The other rows are not kept in memory by a view.
        assert series.parts[""].base is None or series.parts[""].base.nbytes == series.nbytes


async def test_the_greatest_values_of_a_row_with_their_indices() -> None:
    (reading,) = readings([Probe("hs", "residual(0)", positions="all")], TREE)
    saved = np.array([[1, 5, 3, 4], [-1, -5, -3, -4]], np.float32)
    filters = Filters(keep_top=2, dtype="float16")
    kept = await prompt_rows(0, "d", Played("ab", 1, hs=[saved]), [reading], filters)  # type: ignore[arg-type]
    parts = kept.series[0].parts
    assert parts["values"].tolist() == [[5, 4], [-1, -3]]
    assert parts["indices"].tolist() == [[1, 3], [0, 2]]
    assert (parts["values"].dtype, parts["indices"].dtype) == (np.float16, np.int32)


async def test_what_a_block_saves_has_rows_without_positions() -> None:
    saves = {"list": [1.5, 2.5], "array": np.ones((3, 2)), "one": np.float32(4), "dicts": [{"a": 1, "b": [1, 2]}]}
    kept = await prompt_rows(0, "d", Played("ab", 1, **saves), [], Filters())  # type: ignore[arg-type]
    shapes = {one.tensor: {part: array.shape for part, array in one.parts.items()} for one in kept.series}
    assert shapes == {"list": {"": (2,)}, "array": {"": (3, 2)}, "one": {"": (1,)}, "dicts": {"a": (1,), "b": (1, 2)}}
    assert kept.series[1].positions.tolist() == [-1, -1, -1]


@pytest.mark.parametrize(
    "value", ["text", ["text"], [np.ones(2), np.ones(3)], [{"a": 1}, {"b": 1}], {"a": [1, 2], "b": 2}]
)
async def test_saves_that_are_no_rows(value: Any) -> None:
    with pytest.raises(tracewire.NotAnArray):
        await prompt_rows(0, "d", Played("ab", 1, save=value), [], Filters())  # type: ignore[arg-type]


async def test_a_save_that_the_engine_could_not_send() -> None:
    result = Played("ab", 1)
    result.save_errors = {"0.0.hs": "it is too large"}
    with pytest.raises(tracewire.TracewireError, match="could not send 'hs': it is too large"):
        await prompt_rows(0, "d", result, [], Filters())  # type: ignore[arg-type]
