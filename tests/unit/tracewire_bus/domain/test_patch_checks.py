"""Patches: which positions they name, and what is refused before an engine hears of it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.unit.tracewire_bus.domain.test_intervention_checks import HIDDEN, V, checked
from tracewire_bus.domain.intervention_checks import DeclarationError, decode_interventions, normalize
from tracewire_bus.domain.patch_checks import check_prompt, check_prompts, patched_prompts, prompt_positions
from tracewire_bus.wire.messages import Live, Patch

ROWS = np.ones((3, HIDDEN), np.float32)


@pytest.mark.parametrize(
    ("positions", "found"),
    [
        (-1, [4]),
        (0, [0]),
        ([3, -5], [3, 0]),
        ("1:3", [1, 2]),
        ("-2:", [3, 4]),
        (":", [0, 1, 2, 3, 4]),
        ("prompt", [0, 1, 2, 3, 4]),
        ("all", None),
        ("generated", None),
        ("last", None),
    ],
)
def test_positions_of_a_prompt_of_five_tokens(positions: Any, found: list[int] | None) -> None:
    assert prompt_positions(positions, 5) == found
    values = ROWS[0] if found is None else np.ones((len(found), HIDDEN), np.float32)
    (one,) = decode_interventions(normalize([Patch("residual(1)", values, positions=positions)]))
    checked(one)
    check_prompt([one], 5)


@pytest.mark.parametrize(
    ("positions", "says"),
    [
        (5, "position 5 is beyond the prompt of 5 tokens"),
        (-6, "position -6 is beyond"),
        ([1, 7], "position 7 is beyond"),
        ("2:6", "position 6 is beyond"),
        ("3:2", "'3:2' names no position"),
        ([1, -4], "twice"),
    ],
)
def test_a_position_that_the_prompt_lacks_is_refused_by_its_field(positions: Any, says: str) -> None:
    plain = decode_interventions(normalize([Patch("residual(1)", V, positions=positions)]))
    checked(*plain)
    with pytest.raises(DeclarationError, match=says) as caught:
        check_prompt(plain, 5)
    assert caught.value.field == "interventions[0].positions"


def test_a_row_for_each_position_of_the_prompt() -> None:
    plain = decode_interventions(normalize([Patch("residual(1)", ROWS, positions="prompt")]))
    check_prompt(plain, 3)
    with pytest.raises(DeclarationError, match="a row for each of 5 positions, got 3") as caught:
        check_prompt(plain, 5)
    assert caught.value.field == "interventions[0].values"


@pytest.mark.parametrize(
    ("patch", "field", "says"),
    [
        (Patch("residual(1)", np.ones(HIDDEN + 1)), "values", "hidden size is 8"),
        (Patch("residual(1)", np.ones((1, 2, HIDDEN))), "values", "expected an array of shape"),
        (Patch("residual(1)", np.full(HIDDEN, np.nan)), "values", "finite"),
        (Patch("residual(1)", ROWS), "values", "a row for each of 1 positions, got 3"),
        (Patch("residual(1)", ROWS, positions=[0, 1]), "values", "a row for each of 2 positions, got 3"),
        (Patch("residual(1)", ROWS, positions="generated"), "values", "one row"),
        (Patch("residual(1)", V, positions="first"), "positions", "expected an index"),
        (Patch("residual(1)", V, positions=[]), "positions", "one or more"),
        (Patch("residual(1)", V, positions=[2, 2]), "positions", "each once"),
        (Patch("residual(1)", V, positions=1.5), "positions", "expected an index"),  # type: ignore[arg-type]
        (Patch("residual(1)", V, positions=["a"]), "positions", "expected an index"),  # type: ignore[list-item]
        (Patch("residual(1)", V, strength=float("nan")), "strength", "NaN"),
        (Patch("residual(1)", V, strength=Live("alpha")), "strength", "was not declared"),
        (Patch("residual(1)", Live("v")), "values", "was not declared"),
        (Patch("residual(9)", V), "at", "4 layers"),
    ],
)
def test_what_does_not_fit_is_refused_by_its_field(patch: Patch, field: str, says: str) -> None:
    with pytest.raises(DeclarationError, match=says) as caught:
        checked(patch)
    assert caught.value.field == f"interventions[0].{field}"


def test_positions_come_as_any_sequence_of_integers() -> None:
    for given in ((0, 2), range(0, 4, 2), np.array([0, 2]), [np.int64(0), 2]):
        (plain,) = normalize([Patch("residual(1)", V, positions=given)])  # type: ignore[arg-type]
        assert isinstance(plain, Patch)
        assert plain.positions == [0, 2]
    (plain,) = normalize([Patch("residual(1)", V, positions=np.int64(-1))])  # type: ignore[arg-type]
    assert isinstance(plain, Patch)
    assert type(plain.positions) is int


def test_a_live_array_and_a_live_strength_are_checked_like_their_values() -> None:
    patch = Patch("residual(1)", Live("v"), strength=Live("alpha"))
    checked(patch, live={"v": V, "alpha": 0.5})
    with pytest.raises(DeclarationError, match="must be an array"):
        checked(patch, live={"v": 1.0, "alpha": 0.5})
    with pytest.raises(DeclarationError, match="hidden size"):
        checked(patch, live={"v": np.ones(3), "alpha": 0.5})


@pytest.mark.parametrize(
    ("patch", "into"),
    [
        (Patch("residual(1)", prompt=0), (1, 2)),
        (Patch("residual(1)", prompt=2, source=0, positions="generated"), (0, 1)),
        (Patch("residual(*)", prompt=1, source="prompt", positions="prompt", into=2), (2,)),
        (Patch("residual(1)", prompt=1, source=[0, 1], positions="-2:", into=[2, 0]), (2, 0)),
    ],
)
def test_a_patch_from_another_prompt(patch: Patch, into: tuple[int, ...]) -> None:
    plain = decode_interventions(normalize([patch]))
    checked(*plain)
    assert patched_prompts(plain, 3) == {0: into}
    check_prompts(plain, [5, 5, 5])
    check_prompt(plain, 1)


@pytest.mark.parametrize(
    ("patch", "field", "says"),
    [
        (Patch("residual(1)"), "values", "either values, or prompt"),
        (Patch("residual(1)", V, prompt=0), "values", "either values, or prompt"),
        (Patch("residual(1)", V, source=0), "source", "goes with prompt"),
        (Patch("residual(1)", V, into=0), "into", "goes with prompt"),
        (Patch("residual(1)", prompt=0, source="1-2"), "source", "expected an index"),
        (Patch("residual(1)", prompt=0, source="all"), "source", "has generated ones too"),
        (Patch("residual(1)", prompt=0, positions="generated"), "source", "has generated ones too"),
        (Patch("residual(1)", prompt=0, positions="last", source=[0, 1]), "source", "expected one position"),
        (Patch("residual(1)", prompt=0, positions=[1, 1]), "positions", "each once"),
        (Patch("residual(1)", prompt="0"), "prompt", "the number of a prompt"),  # type: ignore[arg-type]
        (Patch("residual(1)", prompt=0, into="1"), "into", "the number of a prompt, or a list"),  # type: ignore[arg-type]
    ],
)
def test_a_patch_from_another_prompt_is_refused_by_its_field(patch: Patch, field: str, says: str) -> None:
    with pytest.raises(DeclarationError, match=says) as caught:
        checked(*decode_interventions(normalize([patch])))
    assert caught.value.field == f"interventions[0].{field}"


@pytest.mark.parametrize(
    ("patches", "prompts", "field", "says"),
    [
        ([Patch("residual(1)", prompt=2)], 2, "[0].prompt", "0 to 1, got 2"),
        ([Patch("residual(1)", prompt=-1)], 2, "[0].prompt", "0 to 1, got -1"),
        ([Patch("residual(1)", prompt=0)], 1, "[0].prompt", "no other prompt"),
        ([Patch("residual(1)", prompt=0, into=[])], 2, "[0].into", "one or more"),
        ([Patch("residual(1)", prompt=0, into=[1, 1])], 2, "[0].into", "each once"),
        ([Patch("residual(1)", prompt=0, into=2)], 2, "[0].into", "0 to 1"),
        ([Patch("residual(1)", prompt=1, into=[0, 1])], 2, "[0].into", "cannot take its own"),
        (
            [Patch("residual(1)", prompt=0), Patch("residual(2)", prompt=1)],
            3,
            "[1].prompt",
            "wait for each other's values: prompt [01] for [01] for [01]; name others as into",
        ),
    ],
)
def test_prompts_that_are_not_there_or_wait_for_each_other(
    patches: list[Patch], prompts: int, field: str, says: str
) -> None:
    with pytest.raises(DeclarationError, match=says) as caught:
        patched_prompts(patches, prompts)
    assert caught.value.field == f"interventions{field}"


def test_prompts_may_wait_in_a_row() -> None:
    patches = [Patch("residual(1)", prompt=1, into=0), Patch("residual(1)", prompt=2, into=[1])]
    assert patched_prompts(patches, 3) == {0: (0,), 1: (1,)}


@pytest.mark.parametrize(
    ("patch", "lengths", "field", "says"),
    [
        (Patch("residual(1)", prompt=0, source=7, positions=0), [5, 9], "source", "prompt 0: position 7 is beyond"),
        (Patch("residual(1)", prompt=0, positions=7), [5, 9], "positions", "prompt 0: position 7 is beyond"),
        (Patch("residual(1)", prompt=0, source=0, positions=7), [9, 5], "positions", "prompt 1: position 7 is beyond"),
        (Patch("residual(1)", prompt=0, positions="prompt"), [5, 6], "positions", "which are 5, got 6"),
        (Patch("residual(1)", prompt=0, source=[1, 2], positions=0), [5, 6], "positions", "which are 2, got 1"),
    ],
)
def test_positions_that_prompts_do_not_have(patch: Patch, lengths: list[int], field: str, says: str) -> None:
    with pytest.raises(DeclarationError, match=says) as caught:
        check_prompts([patch], lengths)
    assert caught.value.field == f"interventions[0].{field}"
