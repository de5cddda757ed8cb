"""Checks of `Patch`: of its values and positions, against a model, and against the prompts of its trace."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from graphlib import CycleError, TopologicalSorter
from typing import Any, Final, get_args

from tracewire_bus.wire.declared_base import Positions
from tracewire_bus.wire.kinds import is_array
from tracewire_bus.wire.messages import Declared, Patch

from .value_checks import DeclarationError, check_array

__all__ = ["check_patch", "check_prompt", "check_prompts", "patched_prompts", "prompt_positions", "source_of"]

_SLICE: Final = re.compile(r"(-?\d{1,9})?:(-?\d{1,9})?")
_NAMES: Final[tuple[str, ...]] = get_args(Positions)


def prompt_positions(positions: int | str | list[int], prompt: int) -> list[int] | None:
    """The positions that `Patch.positions` names in a prompt of `prompt` tokens.

    `None` for a name that means generated positions too.

    Raises:
        ValueError: a position is beyond the prompt or is named twice, there is none, or the text is malformed.
    """
    if isinstance(positions, str):
        if positions == "prompt":
            return list(range(prompt))
        if positions in _NAMES:
            return None
        bounds = _bounds(positions)
        wrong = next((one for one in bounds if one is not None and not -prompt <= one <= prompt), None)
        found = list(range(prompt))[slice(*bounds)]
    else:
        given = [positions] if isinstance(positions, int) else positions
        wrong = next((one for one in given if not -prompt <= one < prompt), None)
        found = [one % prompt for one in given]
    if wrong is not None:
        raise ValueError(f"position {wrong} is beyond the prompt of {prompt} tokens")
    if not found:
        raise ValueError(f"{positions!r} names no position of a prompt of {prompt} tokens")
    if len(set(found)) < len(found):
        raise ValueError(f"{positions!r} names a position of the prompt of {prompt} tokens twice")
    return found


def _bounds(text: str) -> tuple[int | None, int | None]:
    span = _SLICE.fullmatch(text)
    if span is None:
        names = ", ".join(map(repr, _NAMES))
        raise ValueError(f"expected an index, a list of indices, a slice 'a:b' or one of {names}, got {text!r}"[:300])
    start, stop = (None if bound is None else int(bound) for bound in span.groups())
    return start, stop


def check_patch(
    one: Patch,
    live: Mapping[str, Any],
    row: tuple[int | None, ...],
    field: str,
    *,
    what: str = "the model's hidden size is",
) -> None:
    """Check a patch against a model.

    Args:
        one: the patch.
        live: the values of the trace's live parameters, by name.
        row: the shape of the value of a position: `(width,)`, or `(heads, head_size)` of the heads that it names.
            A `None` in it is not known.
        field: names the patch in errors.
        what: begins the error about another width.

    Raises:
        DeclarationError: it is invalid, or does not fit.
    """
    where, positions = f"{field}.positions", one.positions
    if isinstance(positions, str) and positions not in _NAMES:
        try:
            _bounds(positions)
        except ValueError as error:
            raise DeclarationError(where, str(error)) from None
    if isinstance(positions, list) and len(set(positions)) < max(1, len(positions)):
        raise DeclarationError(where, f"expected one or more positions, each once, got {positions!r}"[:300])
    if one.values is None or one.prompt is not None:
        _check_source(one, field)
        return
    lonely = next((name for name in ("source", "into") if getattr(one, name) is not None), None)
    if lonely is not None:
        raise DeclarationError(f"{field}.{lonely}", f"{lonely} goes with prompt, and this patch has values")
    given = one.values.get("live") if isinstance(one.values, dict) else None
    value = live.get(given) if given is not None else one.values
    if given is not None and not is_array(value):
        return  # `check` reports the type of a live parameter itself
    dimensions = len(row)
    shape = check_array(value, f"{field}.values", (dimensions, dimensions + 1), row[-1], what=what)
    if dimensions == 2 and shape[-2] != row[0]:
        raise DeclarationError(f"{field}.values", f"expected values of {row[0]} heads, got an array of {list(shape)}")
    if len(shape) > dimensions:
        _check_rows(positions, shape[0], f"{field}.values")


def _check_source(one: Patch, field: str) -> None:
    """Check a patch whose values are those of another prompt, as far as that does not depend on the prompts."""
    if one.values is not None or one.prompt is None:
        raise DeclarationError(
            f"{field}.values", "expected either values, or prompt: the number of the prompt whose values are taken"
        )
    source, positions = source_of(one), one.positions
    name = "source" if one.source is not None else "positions"
    if isinstance(source, str) and source not in _NAMES:
        try:
            _bounds(source)
        except ValueError as error:
            raise DeclarationError(f"{field}.{name}", str(error)) from None
    if isinstance(source, str) and source in _NAMES and source != "prompt":
        raise DeclarationError(
            f"{field}.source",
            f"expected positions of prompt {one.prompt}, and {source!r} has generated ones too",
        )
    if isinstance(positions, str) and positions in _NAMES and positions != "prompt" and not isinstance(source, int):
        raise DeclarationError(
            f"{field}.source", f"expected one position, for all of the positions {positions!r}, got {source!r}"[:300]
        )


def source_of(one: Patch) -> int | str | list[int]:
    """The positions of the prompt whose values a patch takes."""
    return one.positions if one.source is None else one.source


def patched_prompts(interventions: Sequence[Declared], prompts: int) -> dict[int, tuple[int, ...]]:
    """The prompts that patches change which take values of another of a trace's `prompts` prompts.

    By the patch's place in the list. Every prompt can be computed before those that need its values.

    Raises:
        DeclarationError: a patch names a prompt that the trace does not have, or prompts would wait for each other.
    """
    found: dict[int, tuple[int, ...]] = {}
    waits: dict[int, set[int]] = {}
    for index, one in enumerate(interventions):
        if not isinstance(one, Patch) or one.prompt is None:
            continue
        field, last = f"interventions[{index}]", prompts - 1
        if not 0 <= one.prompt < prompts:
            raise DeclarationError(f"{field}.prompt", f"expected a prompt of the trace, 0 to {last}, got {one.prompt}")
        given = [one.into] if isinstance(one.into, int) else one.into
        into = [number for number in range(prompts) if number != one.prompt] if given is None else given
        if not into:
            why = "expected one or more prompts" if given is not None else "the trace has no other prompt to patch"
            raise DeclarationError(f"{field}.{'prompt' if given is None else 'into'}", why)
        wrong = next((number for number in into if not 0 <= number < prompts), None)
        if wrong is not None or len(set(into)) < len(into):
            raise DeclarationError(
                f"{field}.into", f"expected prompts of the trace, 0 to {last}, each once, got {one.into!r}"[:300]
            )
        if one.prompt in into:
            raise DeclarationError(
                f"{field}.into", f"prompt {one.prompt} cannot take its own values: leave it out, got {one.into!r}"[:300]
            )
        for number in into:
            waits.setdefault(number, set()).add(one.prompt)
        try:
            TopologicalSorter(waits).prepare()
        except CycleError as error:
            cycle = " for ".join(map(str, reversed(error.args[1])))
            raise DeclarationError(
                f"{field}.prompt", f"prompts would wait for each other's values: prompt {cycle}; name others as into"
            ) from None
        found[index] = tuple(into)
    return found


def check_prompts(interventions: Sequence[Declared], lengths: Sequence[int]) -> None:
    """Check patches with values of other prompts against the prompts' numbers of tokens.

    Raises:
        DeclarationError: a position is beyond its prompt, or the numbers of positions differ.
    """
    for index, into in patched_prompts(interventions, len(lengths)).items():
        one = interventions[index]
        assert isinstance(one, Patch)
        assert one.prompt is not None
        field = f"interventions[{index}].{'source' if one.source is not None else 'positions'}"
        given = _found(source_of(one), lengths[one.prompt], field, f"prompt {one.prompt}") or []
        for number in into:
            where = f"interventions[{index}].positions"
            taken = _found(one.positions, lengths[number], where, f"prompt {number}")
            if taken is not None and len(given) not in (1, len(taken)):
                raise DeclarationError(
                    where,
                    f"expected as many positions of prompt {number} as of prompt {one.prompt}, which are {len(given)}, "
                    f"got {len(taken)}",
                )


def _found(positions: int | str | list[int], tokens: int, field: str, what: str) -> list[int] | None:
    try:
        return prompt_positions(positions, tokens)
    except ValueError as error:
        raise DeclarationError(field, f"{what}: {error}") from None


def _check_rows(positions: int | str | list[int], rows: int, field: str) -> None:
    """Check the number of rows where it does not depend on the prompt."""
    if isinstance(positions, str) and positions in _NAMES and positions != "prompt":
        raise DeclarationError(
            field, f"expected one row [width] for all of the positions {positions!r}, got an array of {rows} rows"
        )
    count = 1 if isinstance(positions, int) else len(positions) if isinstance(positions, list) else rows
    if rows != count:
        raise DeclarationError(field, f"expected a row for each of {count} positions, got {rows}")


def check_prompt(interventions: Sequence[Declared], prompt: int) -> None:
    """Check interventions against a prompt of `prompt` tokens.

    Raises:
        DeclarationError: a position is beyond the prompt, or there is not a row for each position.
    """
    for index, one in enumerate(interventions):
        if isinstance(one, Patch) and one.prompt is None:
            field = f"interventions[{index}]"
            try:
                found = prompt_positions(one.positions, prompt)
            except ValueError as error:
                raise DeclarationError(f"{field}.positions", str(error)) from None
            shape: tuple[int, ...] = getattr(one.values, "shape", ())
            rows = len(shape) == (2 if one.heads is None else 3)
            if found is not None and rows and shape[0] != len(found):
                raise DeclarationError(
                    f"{field}.values", f"expected a row for each of {len(found)} positions, got {shape[0]}"
                )
