"""Edits of several requests at once come to what each comes to by itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.hosted_model import Model
from tracewire_bus.wire.messages import Block
from tracewire_bus.wire.packing import pack
from tracewire_engine.protocol.known_edits import Edit, Operation
from tracewire_engine.worker.block_host import edit_runs
from tracewire_engine.worker.block_host.edit_runs import OPERATIONS, EditRuns, UnfitLeaf, UnfitValue, leaves_of
from tracewire_engine.worker.block_host.known_edits import edits_of
from tracewire_engine.worker.block_host.reading import ModelPaths
from tracewire_engine.worker.block_host.setup import outline_of
from tracewire_engine.worker.blocks.live_params import LiveRun

PATHS = ModelPaths(outline_of(Model(4)), "model.layers")
L1 = "model.model.layers.1.output"
SIZE = 64

EACH = "for step in tracer.iter[:]:\n    "
H = EACH + "h = model.model.layers[1].output[0]\n    "
ADDS = H + "h += vec.to(h.dtype)"
REMOVES = H + "v = vec.to(h.dtype)\n    v = v / v.norm()\n    h -= (h @ v).unsqueeze(-1) * v"

#: A request's source and its variables.
Given = tuple[str, dict[str, Any]]


def vector(seed: int, size: int = SIZE) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).standard_normal(size).astype(np.float32)


def numbers(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(7).standard_normal(shape)).to(dtype)


def output(tokens: int, dtype: torch.dtype = torch.bfloat16) -> tuple[torch.Tensor, torch.Tensor]:
    """A layer's output."""
    hidden, residual = numbers(2, tokens, SIZE, dtype=dtype)
    return hidden.clone(), residual.clone()


class Runs:
    """Requests with the edits of their blocks, in steps of the model; `None` stands for a request without one."""

    def __init__(self, requests: Mapping[str, Given | None], *, exact: bool = True, sums: bool = True) -> None:
        self.runs = EditRuns(torch.device("cpu"), sums=sums, exact=exact)
        self.names = list(requests)
        for name, given in requests.items():
            if given is not None:
                self.open(name, given)

    def open(self, name: str, given: Given, live: LiveRun | None = None) -> None:
        """Take a request."""
        live = live or LiveRun("")
        source, variables = given
        block = Block(name="block", source=source, variables=pack(variables), modules={"torch": "torch"})
        found = edits_of(block, PATHS, live.values)
        assert found is not None
        self.runs.open(name, found.edits, leaves_of(block.variables, found.edits, live.values), live)

    def begin(self, tokens: Mapping[str, int] | None = None) -> None:
        """Begin a step with one token of each request, unless it is said how many."""
        spans = list((tokens or dict.fromkeys(self.names, 1)).items())
        self.runs.begin(spans, lambda: spans)

    def step(
        self, value: Any, tokens: Mapping[str, int] | None = None, *, location: str = L1, by_request: bool = False
    ) -> Any:
        """Run a step that reaches a location. Returns the value there."""
        self.begin(tokens)
        self.runs.apply(location, value, by_request=by_request)
        return value


def alone(given: Given | None, rows: Any, *, location: str = L1, by_request: bool = False, sums: bool = True) -> Any:
    """What a request's rows become without others."""
    if given is None:
        return rows
    runs = Runs({"one": given}, sums=sums)
    whole = rows[0] if isinstance(rows, tuple) else rows
    count = 1 if by_request else whole.shape[0]
    return runs.step(rows, {"one": count}, location=location, by_request=by_request)


def same(one: Any, other: Any) -> bool:
    if isinstance(one, tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(torch.equal(one, other))


def rows_of(value: Any, first: int, count: int = 1) -> Any:
    if isinstance(value, tuple):
        return tuple(one[first : first + count].clone() for one in value)
    return value[first : first + count].clone()


BATCHES: dict[str, dict[str, Given | None]] = {
    "one vector": {name: (ADDS, {"vec": vector(1)}) for name in "abc"},
    "different vectors": {name: (ADDS, {"vec": vector(seed)}) for seed, name in enumerate("abcd")},
    "rows between them": {
        "a": (ADDS, {"vec": vector(1)}),
        "none": None,
        "b": (ADDS, {"vec": vector(2)}),
        "c": (H + "h *= 3.0", {}),
        "d": (ADDS, {"vec": vector(1)}),
    },
    "other edits": {
        "a": (H + "h[:] = h * scale", {"scale": 1.25}),
        "b": (H + "h[:] = h * scale", {"scale": 0.5}),
        "c": (H + "h.zero_()", {}),
        "d": (H + "h[-1, 3:9] = 0.5", {}),
        "e": (H + "h[-1, 3:9] = 0.5", {}),
    },
    "directions": {name: (REMOVES, {"vec": vector(seed)}) for seed, name in enumerate("abcd")},
    "streams": {
        name: (EACH + "model.residual(1).output[:] += vec * scale", {"vec": vector(seed), "scale": 2.0})
        for seed, name in enumerate("abc")
    },
    "streams that are scaled": {
        "a": (EACH + "model.residual(1).output *= 0.5", {}),
        "none": None,
        "b": (EACH + "model.residual(1).output *= 0.5", {}),
    },
    "the other item": {
        name: (EACH + "h, r = model.model.layers[1].output\n    r += vec", {"vec": vector(seed)})
        for seed, name in enumerate("ab")
    },
    "numbers in arrays": {
        name: (H + "h *= by['a']", {"by": {"a": np.float32(2 + seed)}}) for seed, name in enumerate("ab")
    },
}


@pytest.mark.parametrize("sums", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("name", BATCHES)
def test_several_at_once_come_to_the_same_bits_as_one_by_one(name: str, dtype: torch.dtype, sums: bool) -> None:
    batch = BATCHES[name]
    runs = Runs(batch, sums=sums)
    for _ in range(3):
        value = output(len(batch), dtype)
        expected = [alone(given, rows_of(value, place), sums=sums) for place, given in enumerate(batch.values())]
        before = output(len(batch), dtype)
        found = runs.step(value)
        assert found is value
        for place, given in enumerate(batch.values()):
            assert same(rows_of(found, place), expected[place])
            assert same(expected[place], rows_of(before, place)) == (given is None)


def test_requests_with_one_form_of_edit_are_done_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """In whatever rows: otherwise the test above shows nothing."""
    shapes = []
    add = OPERATIONS["iadd"]

    def noted(one: torch.Tensor, other: Any) -> Any:
        shapes.append(tuple(one.shape))
        return add(one, other)

    monkeypatch.setitem(OPERATIONS, "iadd", noted)
    batch = {name: (ADDS, {"vec": vector(seed)}) for seed, name in enumerate("abc")} | {"none": None}
    runs = Runs({name: batch[name] for name in ("a", "b", "none", "c")})
    runs.step(output(4))
    shapes.clear()
    runs.step(output(4))
    assert shapes == [(3, SIZE)]


def test_prompts_of_several_tokens_are_done_one_by_one() -> None:
    batch: dict[str, Given | None] = {
        "a": (H + "h[-1] += vec", {"vec": vector(1)}),
        "none": None,
        "b": (H + "h[-1] += vec", {"vec": vector(2)}),
        "c": (H + "h[-1] += vec", {"vec": vector(2)}),
    }
    tokens = {"a": 3, "none": 2, "b": 1, "c": 4}
    value = output(10)
    starts = dict(zip(tokens, (0, 3, 5, 6), strict=True))
    expected = {name: alone(batch[name], rows_of(value, starts[name], tokens[name])) for name in batch}
    found = Runs(batch).step(value, tokens)
    for name in batch:
        assert same(rows_of(found, starts[name], tokens[name]), expected[name])
    # Of the prompt's tokens, the last alone is changed.
    assert same(rows_of(found, 0, 2), rows_of(output(10), 0, 2))
    assert not same(rows_of(found, 2), rows_of(output(10), 2))


def test_logits_have_a_row_for_each_request() -> None:
    favours: Given = (EACH + "model.logits[:, 7] += 2.0", {})
    batch: dict[str, Given | None] = {"a": favours, "none": None, "b": favours}
    where: dict[str, Any] = {"location": "model.logits", "by_request": True}
    runs = Runs(batch)
    for tokens in ({"a": 4, "none": 3, "b": 2}, None):
        logits = numbers(3, 50)
        expected = logits.clone()
        expected[[0, 2], 7] += 2.0
        assert same(runs.step(logits, tokens, **where), expected)


def test_steps_before_and_behind_a_bounded_edit_are_left_alone() -> None:
    bounded: Given = ("for step in tracer.iter[1:3]:\n    model.model.layers[1].output[0][:] *= 2.0", {})
    first: Given = ("model.model.layers[1].output[0][:] *= 2.0", {})
    runs = Runs({"a": bounded, "b": first})
    factors = []
    for _ in range(5):
        value = torch.ones(2, SIZE), torch.ones(2, SIZE)
        factors.append(runs.step(value)[0][:, 0].tolist())
    assert factors == [[1.0, 2.0], [2.0, 1.0], [2.0, 1.0], [1.0, 1.0], [1.0, 1.0]]


def test_a_request_counts_the_steps_in_which_it_is() -> None:
    second: Given = ("for step in tracer.iter[1]:\n    model.model.layers[1].output[0][:] *= 2.0", {})
    runs = Runs({"a": second, "b": second})
    factors = []
    for tokens in ({"a": 1}, {"a": 1, "b": 1}, {"b": 1}, {"b": 1}):
        value = torch.ones(len(tokens), SIZE), torch.ones(len(tokens), SIZE)
        factors.append(runs.step(value, tokens)[0][:, 0].tolist())
    assert factors == [[1.0], [2.0, 1.0], [2.0], [1.0]]


def test_a_vector_that_does_not_fit_fails_its_own_request_alone() -> None:
    scales = H + "h *= 2.0\n    h += vec"
    batch = {
        "a": (scales, {"vec": vector(1)}),
        "b": (scales, {"vec": vector(1, SIZE + 1)}),
        "c": (ADDS, {"vec": vector(2)}),
    }
    runs = Runs(batch)
    for number in range(3):
        value = output(3, torch.float32)
        expected = [alone(batch[name], rows_of(value, place)) for name, place in (("a", 0), ("c", 2))]
        # As far as its block comes, in the step in which that fails.
        own = rows_of(value, 1)
        own[0].mul_(1.0 if number else 2.0)
        found = runs.step(value)
        assert [same(rows_of(found, place), one) for place, one in ((0, expected[0]), (2, expected[1]))] == [True, True]
        assert same(rows_of(found, 1), own)


def test_a_request_that_is_over_is_left_alone() -> None:
    scales: Given = (H + "h *= 2.0", {})
    runs = Runs({"a": scales, "b": scales})
    assert runs.step((torch.ones(2, 4), torch.ones(2, 4)))[0][:, 0].tolist() == [2.0, 2.0]
    runs.runs.discard("a")
    runs.runs.discard("nobody")
    assert runs.step((torch.ones(2, 4), torch.ones(2, 4)))[0][:, 0].tolist() == [1.0, 2.0]
    runs.open("a", (H + "h *= 3.0", {}))
    assert runs.step((torch.ones(2, 4), torch.ones(2, 4)))[0][:, 0].tolist() == [3.0, 2.0]


def test_it_says_whether_anything_is_done() -> None:
    runs = Runs({"a": ("for step in tracer.iter[1:]:\n    model.model.layers[1].output[0][:] *= 2.0", {}), "b": None})
    runs.begin()
    assert not runs.runs.apply(L1, output(2), by_request=False)
    runs.begin()
    assert not runs.runs.apply("model.model.layers.2.output", output(2), by_request=False)
    assert runs.runs.apply(L1, output(2), by_request=False)


def test_rows_of_some_requests() -> None:
    scales: Given = (H + "h *= 2.0", {})
    runs = Runs({"a": scales, "none": None, "b": scales})
    runs.begin({"a": 2, "none": 1, "b": 3})
    value, logits = torch.arange(6), torch.arange(3)

    def is_over(name: str) -> bool:
        return name == "b"

    assert [one.tolist() for one in runs.runs.rows_of(value, by_request=False, over=is_over)] == [[3, 4, 5]]
    assert [one.tolist() for one in runs.runs.rows_of(logits, by_request=True, over=is_over)] == [[2]]
    assert len(runs.runs.rows_of(value, by_request=False, over=lambda _: True)) == 2


@pytest.mark.parametrize("shape", [(2, SIZE), (1, 3, SIZE)])
def test_a_value_without_a_row_for_each_token_is_refused(shape: tuple[int, ...]) -> None:
    runs = Runs({"a": (H + "h *= 2.0", {}), "b": None})
    runs.begin({"a": 2, "b": 1})
    value = torch.ones(shape), torch.ones(shape)
    with pytest.raises(UnfitValue, match="3 tokens of 2 requests"):
        runs.runs.apply(L1, value, by_request=False)
    assert (value[0] == 1).all()


def test_a_tensor_that_has_no_rows_of_requests_stays_as_it_is() -> None:
    runs = Runs({"a": (EACH + "h, r = model.model.layers[1].output\n    r *= 2.0", {}), "b": None})
    value = torch.ones(2, 4), torch.ones(7, 4), torch.ones(())
    assert runs.step(value) is value
    assert all((one == 1).all() for one in value)


def test_directions_are_removed_at_once_where_bits_may_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    batch: dict[str, Given | None] = {name: (REMOVES, {"vec": vector(seed)}) for seed, name in enumerate("abc")}
    batch = {"a": batch["a"], "none": None, "b": batch["b"], "c": batch["c"]}
    value = output(4, torch.float32)
    expected = [alone(given, rows_of(value, place)) for place, given in enumerate(batch.values())]
    shapes = []
    subtract = OPERATIONS["isub"]

    def noted(one: torch.Tensor, other: Any) -> Any:
        shapes.append(tuple(one.shape))
        return subtract(one, other)

    monkeypatch.setitem(OPERATIONS, "isub", noted)
    found = Runs(batch, exact=False).step(value)
    assert (3, SIZE) in shapes
    for place, (hidden, residual) in enumerate(expected):
        torch.testing.assert_close(found[0][place : place + 1], hidden)
        assert same(found[1][place : place + 1], residual)
    # Each its own: of a's direction nothing is left in a's row, and something in b's.
    unit = torch.from_numpy(vector(0))
    unit = unit / unit.norm()
    assert abs(found[0][0] @ unit) < 1e-4 < abs(found[0][2] @ unit)
    shapes.clear()
    Runs(batch, exact=True).step(output(4, torch.float32))
    assert shapes == [(1, SIZE)] * 3


def edit(*leaves: list[Any]) -> Edit:
    return Edit(L1, [Operation("imul", [["r", 0], ["v", place]]) for place in range(len(leaves))], list(leaves))


def test_leaves_are_numbers_and_vectors_by_their_keys() -> None:
    variables = pack(
        {"vec": vector(1), "by": {"a": [1.5, vector(2)], 3: True}, "n": 2, "none": np.empty(0, np.float32)}
    )
    edits = [edit(["vec"], ["by", "a", 0]), edit(), edit(["by", "a", -1], ["by", 3], ["n"], ["vec", 4], ["none"])]
    found = leaves_of(variables, edits)
    assert [type(one) for one in found] == [np.ndarray, float, np.ndarray, bool, int, np.ndarray, np.ndarray]
    assert np.array_equal(found[0], vector(1))
    assert np.array_equal(found[2], vector(2))
    assert (found[1], found[3], found[4], found[5].tolist()) == (1.5, True, 2, vector(1)[4].tolist())
    assert found[5].ndim == 0


def test_without_leaves_no_variable_is_looked_at() -> None:
    assert leaves_of(b"\xc1", [edit()]) == []


@pytest.mark.parametrize(
    "leaf",
    [
        *(["matrix"], ["text"], ["by"], ["many"], ["whole"], ["flags"]),
        *(["by", "missing"], ["by", "text"], ["some", 5], ["text", "a"], ["n", 0], ["vec", "a"], ["vec", 100]),
        ["vec", True],
    ],
)
def test_what_is_no_number_and_no_vector_is_left_to_the_block(leaf: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(edit_runs, "_MOST_ELEMENTS", 100)
    variables = pack(
        {
            "matrix": np.ones((2, 2), np.float32),
            "many": np.ones(101, np.float32),
            "whole": np.ones(4, np.int64),
            "flags": np.ones(4, np.bool_),
            "vec": vector(1),
            "by": {"text": "x"},
            "text": "text",
            "some": [1],
            "n": 1,
        }
    )
    with pytest.raises(UnfitLeaf):
        leaves_of(variables, [edit(leaf)])


STEERS = EACH + "s = model.residual(1).output\n    model.residual(1).output = s + live.alpha * vec.to(s.dtype)"
SCALES = H + "h *= live.alpha"


def live_run(**values: Any) -> LiveRun:
    run = LiveRun("run")
    run.values = values
    return run


@pytest.mark.parametrize(("source", "groups"), [(STEERS, 1), (SCALES, 3)])
def test_requests_with_other_live_values_are_served_at_once_where_these_only_make_constants(
    source: str, groups: int
) -> None:
    runs, lives = Runs({}), {name: live_run(alpha=float(place)) for place, name in enumerate("abc")}
    runs.names = list(lives)
    for name, live in lives.items():
        runs.open(name, (source, {"vec": vector(1)}), live)
    for step in range(3):
        if step == 2:
            lives["b"].values = {"alpha": 5.0}
        value = output(3)
        expected = []
        for place, live in enumerate(lives.values()):
            one = Runs({})
            one.open("one", (source, {"vec": vector(1)}), live_run(**live.values))
            expected.append(one.step(rows_of(value, place), {"one": 1}))
        runs.step(value)
        assert all(same(rows_of(value, place), rows) for place, rows in enumerate(expected))
        ((together, alone),) = runs.runs._plans.values()
        assert (len(together), alone) == (groups, [])


def test_a_live_value_that_only_made_a_constant_is_that_of_each_step() -> None:
    """Also where others of the step, which share the edit, are not steered."""
    runs, live = Runs({}), live_run(alpha=2.0)
    runs.names = ["steered", "other"]
    for name, own in (("steered", live), ("other", live_run(alpha=2.0))):
        runs.open(name, (STEERS, {"vec": vector(1)}), own)
    for alpha in (2.0, -1.0, -1.0, 3.5):
        live.values = live.values if live.values["alpha"] == alpha else {"alpha": alpha}
        value = output(2)
        plain = [sum(rows_of(value, place)) for place in range(2)]
        steered, other = runs.step(value)[0]
        added = torch.from_numpy(vector(1)).to(torch.bfloat16)
        assert torch.equal(steered, (plain[0] + alpha * added)[0])
        assert torch.equal(other, (plain[1] + 2.0 * added)[0])
