"""Checks the conditions of declared interventions, and which probes they depend on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import msgspec

from tracewire_bus.wire.messages import Declared, Live, Probe, StopWhen, When

from .value_checks import MAX_INDEX, DeclarationError, check_number

__all__ = [
    "MAX_TOKENS",
    "check_conditions",
    "checked_outputs",
    "condition_live",
    "live_conditions",
    "normalized_condition",
    "outputs_of",
    "with_values",
]

#: Tokens of one sequence, sequences of one condition, and characters of a text.
MAX_TOKENS: Final = 8
MAX_SEQUENCES: Final = 1024
MAX_TEXT: Final = 200

_THRESHOLDS: Final = ("above", "below", "release")
_INTEGERS: Final = ("start", "stop", "every", "output")
#: What a field of a condition takes.
_EXPECTED: Final = {
    "probe": "a probe's name",
    "tokens": "a list of token ids, or several such lists",
    "text": "a text",
    "part": "'prompt' or 'answer'",
    **dict.fromkeys(_INTEGERS, "an integer"),
    **dict.fromkeys(_THRESHOLDS, "a number or Live(name)"),
}


def normalized_condition(when: Any, field: str) -> When:
    """A caller's condition for the wire: numbers of NumPy become plain, and one sequence of ids a list of one.

    Raises:
        DeclarationError: it is none, or a value is of a type that its field does not accept.
    """
    if not isinstance(when, When):
        raise DeclarationError(field, f"expected a When, got {type(when).__qualname__}")
    found = {name: _plain(getattr(when, name)) for name in when.__struct_fields__}
    tokens = found["tokens"]
    if isinstance(tokens, list) and tokens and not any(isinstance(one, list) for one in tokens):
        found["tokens"] = [tokens]
    for name, value in found.items():
        try:
            msgspec.convert({name: value}, When)
        except msgspec.ValidationError:
            wrong = getattr(when, name)
            raise DeclarationError(f"{field}.{name}", f"expected {_EXPECTED[name]}, got {wrong!r}"[:200]) from None
    plain = msgspec.convert(found, When)
    # Greater integers than those of 64 bits do not reach the other checks.
    _check_greatest(plain, field)
    return plain


def _check_greatest(when: When, field: str) -> None:
    """Refuse integers that the worker's tensors do not hold."""
    for name in _INTEGERS:
        value = getattr(when, name)
        if value is not None and abs(value) > MAX_INDEX:
            raise DeclarationError(f"{field}.{name}", f"expected an integer of at most {MAX_INDEX}, got {value}"[:200])


def _plain(value: Any) -> Any:
    if isinstance(value, Live):
        return {"live": value.live}
    if isinstance(value, (list, tuple, range)):
        return [_plain(one) for one in value]
    return value.tolist() if hasattr(value, "tolist") else value


def live_conditions(one: Declared) -> Iterator[tuple[str, str]]:
    """The fields of an intervention's condition that refer to live parameters, each with the parameter's name."""
    for name in _THRESHOLDS if one.when is not None else ():
        value = getattr(one.when, name)
        if isinstance(value, Live):
            yield f"when.{name}", value.live


def condition_live(when: When | None) -> bool:
    """Whether a condition has a live parameter."""
    return when is not None and any(isinstance(getattr(when, name), Live) for name in _THRESHOLDS)


def with_values(when: When, live: Mapping[str, Any]) -> When:
    """A condition with the values of live parameters, given by name, in place of each `Live`."""
    changed = {name: live[value.live] for name in _THRESHOLDS if isinstance(value := getattr(when, name), Live)}
    return msgspec.structs.replace(when, **changed) if changed else when


def outputs_of(probe: Probe, pattern: bool) -> int | None:
    """How many numbers of one location's last position a probe saves in each step; `None` if it saves something else.

    `pattern`: whether its `at` is a pattern.
    """
    shape = getattr(probe.weight, "shape", None)
    if pattern or probe.positions != "last":
        return None
    if shape is None:
        return {"norm": 1, "l1": 1, "max": 1, "moments": 4}.get(probe.reduce)
    return int(shape[0]) if len(shape) == 2 else 1


def check_conditions(interventions: Sequence[Declared], probes: Mapping[str, tuple[Probe, bool]]) -> None:
    """Check the conditions of a trace's interventions. `probes` has all probes by name (see `outputs_of`).

    Raises:
        DeclarationError: a condition is empty, impossible, cyclic, or names no suitable probe.
    """
    for index, one in enumerate(interventions):
        if one.when is not None:
            field = f"interventions[{index}].when"
            if isinstance(one, StopWhen):
                raise DeclarationError(field, f"a StopWhen has none: give one to the probe {one.probe!r}")
            _check_one(one.when, probes, field)
    _check_cycles(interventions)


def _check_one(when: When, probes: Mapping[str, tuple[Probe, bool]], field: str) -> None:
    if when == When():
        raise DeclarationError(field, "expected a condition: probe, start, stop, every, tokens, text or part")
    _check_greatest(when, field)
    _check_probe(when, probes, field)
    if when.start is not None and when.start < 0:
        raise DeclarationError(f"{field}.start", f"expected an index of 0 or more, got {when.start}")
    if when.stop is not None and when.stop <= (when.start or 0):
        raise DeclarationError(
            f"{field}.stop", f"the range is empty: expected more than {when.start or 0}, got {when.stop}"
        )
    if when.every is not None and when.every < 1:
        raise DeclarationError(f"{field}.every", f"expected 1 or more, got {when.every}")
    if when.text is not None and when.tokens is not None:
        raise DeclarationError(f"{field}.text", "expected tokens or a text, got both")
    if when.text is not None and not 1 <= len(when.text) <= MAX_TEXT:
        raise DeclarationError(f"{field}.text", f"expected 1 to {MAX_TEXT} characters, got {len(when.text)}")
    if when.tokens is not None:
        if not 1 <= len(when.tokens) <= MAX_SEQUENCES:
            raise DeclarationError(
                f"{field}.tokens", f"expected 1 to {MAX_SEQUENCES} sequences of ids, got {len(when.tokens)}"
            )
        for sequence in when.tokens:
            if not 1 <= len(sequence) <= MAX_TOKENS or any(not 0 <= one < 2**31 for one in sequence):
                raise DeclarationError(
                    f"{field}.tokens", f"expected sequences of 1 to {MAX_TOKENS} token ids, got {sequence!r}"[:200]
                )


def _check_probe(when: When, probes: Mapping[str, tuple[Probe, bool]], field: str) -> None:
    given = [name for name in _THRESHOLDS if getattr(when, name) is not None]
    if when.probe is None:
        if given or when.output:
            raise DeclarationError(f"{field}.probe", f"{given[0] if given else 'output'} needs the name of a probe")
        return
    outputs = checked_outputs(when.probe, probes, f"{field}.probe")
    if not 0 <= when.output < outputs:
        raise DeclarationError(f"{field}.output", f"probe {when.probe!r} has {outputs} outputs, got {when.output}")
    for name in given:
        check_number(getattr(when, name), f"{field}.{name}")
    above, below, release = when.above, when.below, when.release
    if above is None and below is None:
        raise DeclarationError(f"{field}.above", "expected a threshold: above, below or both")
    if release is not None and above is not None and below is not None:
        raise DeclarationError(f"{field}.release", "a release goes with one threshold: leave above or below out")
    if isinstance(release, float | int):
        if isinstance(above, float | int) and release > above:
            raise DeclarationError(f"{field}.release", f"expected {above} or less, as above is, got {release}")
        if isinstance(below, float | int) and release < below:
            raise DeclarationError(f"{field}.release", f"expected {below} or more, as below is, got {release}")


def checked_outputs(name: str, probes: Mapping[str, tuple[Probe, bool]], field: str) -> int:
    """How many numbers the probe of this name saves in each step.

    Raises:
        DeclarationError: there is no such probe, or it saves something else than numbers of one location.
    """
    if name not in probes:
        known = ", ".join(sorted(probes)) or "none"
        raise DeclarationError(field, f"no probe {name!r} is declared (declared: {known})")
    outputs = outputs_of(*probes[name])
    if outputs is None:
        raise DeclarationError(field, f"probe {name!r} does not save numbers of one location's last position each step")
    return outputs


def _check_cycles(interventions: Sequence[Declared]) -> None:
    """Refuse probes whose conditions depend on each other."""
    needs = {
        one.name: (one.when.probe, index)
        for index, one in enumerate(interventions)
        if isinstance(one, Probe) and one.when is not None and one.when.probe is not None
    }
    for first, (_, index) in needs.items():
        seen, name = [first], needs[first][0]
        while name in needs and name not in seen:
            seen.append(name)
            name = needs[name][0]
        if name in seen:
            circle = " -> ".join([*seen[seen.index(name) :], name])
            raise DeclarationError(f"interventions[{index}].when.probe", f"the condition is cyclic: {circle}")
