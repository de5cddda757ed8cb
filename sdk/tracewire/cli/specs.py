"""The short forms of interventions and values in options: `--steer`, `--probe`, `--lens`, `--live`, `--sampling`.

Every other intervention has its JSON form: `--declare`.

    --steer 'residual(4)@direction.npy*8'            add 8 times a vector to the residual stream after layer 4
    --steer 'residual(4)@direction.npy*alpha=0'      the factor is the live parameter alpha, which starts at 0
    --steer 'residual(4)@calm@3*8'                   likewise, a vector of the library
    --probe 'projection=residual(4)@direction.npy'   save the projection on a vector, as `projection`
    --probe 'norms=residual(*),reduce=norm'          save the norm after each layer
    --lens 'lens=residual(*),top_k=3'                save the three likeliest tokens after each layer

A converter raises an `ArgumentTypeError` that says what was expected and gives an example.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, get_args, get_type_hints

from tracewire.traces.library_names import parsed
from tracewire_bus.wire.messages import DeclaredIntervention, Live, LogitLens, Positions, Probe, Reading, Steer

from .vectors import is_file, load_vector

__all__ = [
    "DECLARE",
    "LENS",
    "PROBE",
    "STEER",
    "Declared",
    "declare_specs",
    "declared",
    "lens_spec",
    "named_value",
    "numbers",
    "probe_spec",
    "steer_spec",
    "values_by_name",
]

#: The forms of the options, and an example of each.
STEER = ("AT@VECTOR[*FACTOR]", "residual(4)@direction.npy*8")
PROBE = ("[NAME=]AT[@VECTOR]", "projection=residual(4)@direction.npy")
LENS = ("[NAME=]AT", "lens=residual(*),top_k=3")
DECLARE = ("JSON|@FILE", '{"do": "probe", "name": "p", "at": "residual(4)", "when": {"every": 2}}')

_POSITIONS = get_args(Positions)
#: Characters of a JSON text that are named in errors.
_SHOWN = 60
_ACTIVATIONS, _REDUCTIONS = (tuple(get_args(get_type_hints(Probe)[name])) for name in ("activation", "reduce"))


class Spec(NamedTuple):
    """An intervention with the option that declares it, and the first value of the live parameter that it reads."""

    option: str
    one: DeclaredIntervention
    live: dict[str, float]


class Declared(NamedTuple):
    """The declarations of options: interventions, the option of each, and the first values of live parameters."""

    interventions: list[DeclaredIntervention]
    options: list[str]
    live: dict[str, Any]


def steer_spec(text: str) -> Spec:
    """An argparse converter for `--steer`."""
    body, more = _settings(text, {"positions": _POSITIONS}, STEER)
    at, at_sign, rest = body.partition("@")
    if not at or not at_sign or not rest:
        raise _wrong(STEER, text)
    file, star, factor = rest.rpartition("*")
    if not star:
        file, factor = rest, "1"
    vector = _vector(file)
    if not isinstance(vector, str) and vector.ndim != 1:
        raise argparse.ArgumentTypeError(f"{file}: expected one vector, got an array of shape {list(vector.shape)}")
    try:
        return Spec(_option("steer", text), Steer(at=at, vector=vector, scale=float(factor), **more), {})
    except ValueError:
        name, equals, first = factor.partition("=")
    if not name.isidentifier():
        raise argparse.ArgumentTypeError(
            f"the factor after '*' is a number, or a live parameter as alpha or alpha=0; got {factor!r}"
        )
    try:
        value = float(first) if equals else 0.0
    except ValueError:
        raise argparse.ArgumentTypeError(f"{name}: expected a number as its first value, got {first!r}") from None
    return Spec(_option("steer", text), Steer(at=at, vector=vector, scale=Live(name), **more), {name: value})


def probe_spec(text: str) -> Spec:
    """An argparse converter for `--probe`. The probe's name is `""` if the text gives none."""
    choices = {"positions": _POSITIONS, "reduce": _REDUCTIONS, "activation": _ACTIVATIONS}
    body, more = _settings(text, choices, PROBE)
    where, at_sign, file = body.partition("@")
    name, at = _name_and_place(where)
    if not at or (at_sign and not file):
        raise _wrong(PROBE, text)
    probe = Probe(name=name, at=at, weight=_vector(file) if file else None, **more)
    return Spec(_option("probe", text), probe, {})


def lens_spec(text: str) -> Spec:
    """An argparse converter for `--lens`. The lens's name is `""` if the text gives none."""
    body, more = _settings(text, {"positions": _POSITIONS, "top_k": ()}, LENS)
    name, at = _name_and_place(body)
    if not at or "@" in at:
        raise _wrong(LENS, text)
    if "top_k" in more:
        if not more["top_k"].isdecimal() or not int(more["top_k"]):
            raise argparse.ArgumentTypeError(f"top_k: expected a number of tokens, got {more['top_k']!r}")
        more["top_k"] = int(more["top_k"])
    return Spec(_option("lens", text), LogitLens(name=name, at=at, **more), {})


def declare_specs(text: str) -> list[Spec]:
    """An argparse converter for `--declare`: an intervention as JSON, or several in a list; or a file with either."""
    from tracewire.errors import TraceRejected
    from tracewire.gateway.json_values import interventions_of

    try:
        given = json.loads(Path(text[1:]).read_text() if text.startswith("@") else text)
    except OSError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"expected {DECLARE[0]}, as in {DECLARE[1]!r}; {error}") from None
    option = _option("declare", text if len(text) <= _SHOWN else f"{text[:_SHOWN]}...")
    try:
        found = interventions_of(given if isinstance(given, list) else [given], "declare")
    except TraceRejected as error:
        raise argparse.ArgumentTypeError(f"{error.field}: {error.message}") from None
    return [Spec(option, one, {}) for one in found]


def _option(name: str, text: str) -> str:
    return f"--{name} '{text}'"


def _settings(text: str, known: Mapping[str, Sequence[str]], form: tuple[str, str]) -> tuple[str, dict[str, Any]]:
    """Split `BODY,key=value,...`. A key without choices takes any value."""
    body, *parts = text.split(",")
    found: dict[str, Any] = {}
    for part in parts:
        key, equals, value = part.partition("=")
        if not equals or key not in known:
            raise argparse.ArgumentTypeError(
                f"after a comma: expected {' or '.join(f'{name}=...' for name in known)}, got {part!r} "
                f"(the form is {form[0]}[,KEY=VALUE...], as in '{form[1]}')"
            )
        if known[key] and value not in known[key]:
            raise argparse.ArgumentTypeError(f"{key}: expected one of {', '.join(known[key])}, got {value!r}")
        found[key] = value
    return body, found


def _name_and_place(text: str) -> tuple[str, str]:
    name, equals, at = text.partition("=")
    return (name, at) if equals else ("", text)


def _vector(file: str, *, named: bool = True) -> Any:
    """The array of a file, or the name of an entry of the library."""
    try:
        if named and parsed(file) is not None and not is_file(file):
            return file
        return load_vector(file)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _wrong(form: tuple[str, str], text: str) -> argparse.ArgumentTypeError:
    return argparse.ArgumentTypeError(f"expected {form[0]}, as in '{form[1]}'; got {text!r}")


def numbers(text: str) -> list[float]:
    """An argparse converter for numbers with commas between them, such as strengths."""
    try:
        found = [float(one) for one in text.split(",")]
        if not all(map(math.isfinite, found)):
            raise ValueError
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected numbers, as -20,0,20, got {text!r}") from None
    return found


def named_value(text: str) -> tuple[str, Any]:
    """An argparse converter for `NAME=VALUE`: the value is JSON, a word, or `@FILE` with an array."""
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise argparse.ArgumentTypeError(
            f"expected NAME=VALUE, as in alpha=8 or direction=@direction.npy; got {text!r}"
        )
    if value.startswith("@"):
        return name, _vector(value[1:], named=False)
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


def values_by_name(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """The values of `NAME=VALUE` options by name; the last of a name counts."""
    return dict(pairs)


def declared(specs: Sequence[Spec], live: Mapping[str, Any]) -> Declared:
    """All declarations of these options together. Reads without a name are called `probe`, `probe2`, `lens` and so on.

    `live` has the first values that options give; a number replaces that of a `--steer`.
    """
    reads = [spec.one for spec in specs if isinstance(spec.one, Reading)]
    taken = {one.name for one in reads if one.name}
    for one in reads:
        if not one.name:
            word = "probe" if isinstance(one, Probe) else "lens"
            names = (word if number == 1 else f"{word}{number}" for number in range(1, len(taken) + 2))
            one.name = next(name for name in names if name not in taken)
            taken.add(one.name)
    first: dict[str, Any] = {name: value for spec in specs for name, value in spec.live.items()}
    given = {name: float(value) if name in first and type(value) is int else value for name, value in live.items()}
    return Declared([spec.one for spec in specs], [spec.option for spec in specs], {**first, **given})
