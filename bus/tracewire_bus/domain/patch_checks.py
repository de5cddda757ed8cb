"""Checks of `Patch`: of its values and positions, against a model, and against the prompts that it is to change."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final, get_args

from tracewire_bus.wire.declared_base import Positions
from tracewire_bus.wire.kinds import is_array
from tracewire_bus.wire.messages import Declared, Patch

from .value_checks import DeclarationError, check_array

__all__ = ["check_patch", "check_prompt", "prompt_positions"]

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
        if isinstance(one, Patch):
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
