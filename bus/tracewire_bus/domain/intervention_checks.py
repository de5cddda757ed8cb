"""Declared interventions, checked: where they apply in a model, and whether what they say can be carried out.

A client checks before it submits, an adapter before its engine hears of it, with the same code. What remains for the
engine to find is a vector that does not fit a module whose width nobody published.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias, cast, get_args, get_origin, get_type_hints

import msgspec

from tracewire_bus.wire.arrays import array_of
from tracewire_bus.wire.codec import digest_bytes
from tracewire_bus.wire.kinds import Unsavable, is_array
from tracewire_bus.wire.messages import Ablate, Clamp, Declared, Live, LogitLens, Probe, Steer, StopWhen
from tracewire_bus.wire.packing import decoder, unpack, wire

from .tree import ModuleTree

if TYPE_CHECKING:
    import numpy as np

__all__ = [
    "MAX_INTERVENTIONS",
    "MAX_SITES",
    "DeclarationError",
    "Site",
    "check",
    "check_encoded",
    "decoded",
    "find_sites",
    "live_name",
    "normalized",
    "resolved",
]

#: How many interventions one trace may declare, and at how many locations in all.
MAX_INTERVENTIONS: Final = 64
MAX_SITES: Final = 4096
MAX_TOP_K: Final = 1024
#: How many characters a location may have.
MAX_AT: Final = 1000

_RESIDUAL = re.compile(r"residual\((.*)\)")
_SLICE = re.compile(r"(-?\d+)?:(-?\d+)?")
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]*")

_KINDS: Final[tuple[type[Declared], ...]] = get_args(Declared)
#: What may be live besides numbers: fields that hold a vector.
_VECTORS: Final[dict[type, str]] = {Steer: "vector", Clamp: "direction", Ablate: "direction"}
#: Fields that take a number or a `Live`.
_NUMBERS: Final[dict[type, tuple[str, ...]]] = {
    kind: tuple(name for name, hint in get_type_hints(kind).items() if Live in get_args(hint)) for kind in _KINDS
}

_Value: TypeAlias = Literal["residual", "output", "input"]


class DeclarationError(ValueError):
    """A declared intervention that cannot be carried out. `field` names the part at fault, as the caller wrote it."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field
        self.message = message


@dataclass(frozen=True, slots=True)
class Site:
    """One location: a module's path, and which of its values. The residual stream is read off a decoder layer."""

    path: str
    value: _Value

    @property
    def location(self) -> str:
        """Where an engine that replays CUDA graphs must have a tap to serve it."""
        return f"{self.path}.{'input' if self.value == 'input' else 'output'}"


def find_sites(tree: ModuleTree, at: str) -> tuple[list[Site], bool]:
    """The locations that `at` names, in the model's order, and whether it is a pattern (of one or several).

    Raises:
        ValueError: it names none; says what is near.
    """
    if len(at) > MAX_AT:
        raise ValueError(f"a location has at most {MAX_AT} characters, got {len(at)}")
    stream = _RESIDUAL.fullmatch(at)
    if stream is not None:
        return _layers(tree, stream[1].strip())
    path, value = at, "output"
    for suffix in ("output", "input"):
        if path.endswith("." + suffix) and not tree.knows(path):
            path, value = path.removesuffix("." + suffix), suffix
    if "*" not in path:
        if not path or not tree.knows(path):
            near = tree.nearest(path) if path else None
            raise ValueError(f"the model has no module {path!r}" + (f"; the nearest is {near!r}" if near else ""))
        return [Site(path, value)], False  # type: ignore[arg-type]
    steps = [step.split("*") for step in path.split(".")]
    found = [Site(known, value) for known in tree.paths if _matches(steps, known)]  # type: ignore[arg-type]
    if not found:
        raise ValueError(f"no module of the model matches {path!r}")
    return found, True


def _matches(steps: Sequence[Sequence[str]], path: str) -> bool:
    """Whether each step of a path has these pieces of text in their order, the first at its beginning and the last at
    its end, with anything between. What a piece has matched is never tried again, so it takes linear time.
    """
    known = path.split(".")
    return len(known) == len(steps) and all(map(_step_matches, steps, known))


def _step_matches(pieces: Sequence[str], step: str) -> bool:
    first, *inner = pieces
    if not inner:
        return step == first
    last = inner.pop()
    if len(step) < len(first) + len(last) or not step.startswith(first) or not step.endswith(last):
        return False
    at, end = len(first), len(step) - len(last)
    for piece in inner:
        at = step.find(piece, at, end)
        if at < 0:
            return False
        at += len(piece)
    return True


def _layers(tree: ModuleTree, which: str) -> tuple[list[Site], bool]:
    count = tree.layer_count
    if not count:
        raise ValueError("this model has no list of decoder layers that residual() could count in")
    if re.fullmatch(r"-?\d+", which):
        index = int(which)
        if not -count <= index < count:
            raise ValueError(f"residual({index}): the model has {count} layers, 0 to {count - 1}")
        chosen, pattern = [index % count], False
    elif which == "*":
        chosen, pattern = list(range(count)), True
    elif (span := _SLICE.fullmatch(which)) is not None:
        start, stop = (None if bound is None else int(bound) for bound in span.groups())
        chosen, pattern = list(range(count))[start:stop], True
        if not chosen:
            raise ValueError(f"residual({which}) is empty: the model has {count} layers, 0 to {count - 1}")
    else:
        raise ValueError(f"expected a layer's index, 'a:b' or '*' in residual(...), got {which!r}")
    return [Site(f"{tree.layers}.{index}", "residual") for index in chosen], pattern


# --- what a caller wrote ----------------------------------------------------------------------------------------------


def normalized(interventions: Sequence[Any]) -> list[Declared]:
    """The interventions of a caller, ready to stand in a `Submission`: numbers plain, arrays prepared for the wire.

    Raises:
        DeclarationError: something in them cannot travel, or is of a type that the field does not take.
    """
    return [_normalized(one, f"interventions[{index}]") for index, one in enumerate(interventions)]


_encoder = msgspec.msgpack.Encoder()
_decode = decoder(list[Declared])


def decoded(interventions: Sequence[Declared]) -> list[Declared]:
    """Normalized interventions as the other end of the bus has them: with arrays."""
    return cast(list[Declared], _decode(_encoder.encode(interventions)))


def _normalized(one: Any, field: str) -> Declared:
    if not isinstance(one, _KINDS):
        *names, last = (kind.__name__ for kind in _KINDS)
        raise DeclarationError(field, f"expected a {', '.join(names)} or {last}, got {type(one).__qualname__}")
    changed: dict[str, Any] = {}
    for name in one.__struct_fields__:
        value = getattr(one, name)
        if isinstance(value, Live):
            changed[name] = {"live": value.live} if name == _VECTORS.get(type(one)) else value
        elif is_array(value) or isinstance(value, (list, tuple)):
            try:
                array = _vector(value, f"{field}.{name}")
                # A NumPy or torch scalar is a number.
                changed[name] = float(array) if not array.shape else wire(array)
            except Unsavable as error:
                raise DeclarationError(f"{field}.{name}", str(error)) from None
    plain: Declared = msgspec.structs.replace(one, **changed) if changed else one
    try:
        # What a struct's constructor does not check: types, and the words that a field takes.
        msgspec.convert({name: _bare(getattr(plain, name)) for name in plain.__struct_fields__} | _tag(plain), Declared)
    except msgspec.ValidationError as error:
        named = re.search(r" - at `\$\.(\w+)", str(error))
        if named is None:
            raise DeclarationError(field, str(error)) from None
        name = named[1]
        expected = _expected(get_type_hints(type(one))[name])
        raise DeclarationError(f"{field}.{name}", f"expected {expected}, got {getattr(one, name)!r}"[:200]) from None
    return plain


def _expected(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return f"one of {', '.join(map(repr, get_args(kind)))}"
    return {str: "a string", int: "an integer"}.get(kind, "a number or Live(name)")


def _bare(value: Any) -> Any:
    return (
        {"live": value.live} if isinstance(value, Live) else None if isinstance(value, msgspec.msgpack.Ext) else value
    )


def _tag(one: Declared) -> dict[str, Any]:
    config = one.__struct_config__
    return {str(config.tag_field): config.tag}


def _vector(value: Any, field: str) -> np.ndarray[Any, Any]:
    import numpy as np

    if isinstance(value, (list, tuple)):
        try:
            value = np.asarray(value, dtype=np.float32)
        except (ValueError, TypeError):
            raise DeclarationError(field, "expected an array of numbers, got a list of something else") from None
    return array_of(value)


# --- what a model can carry out ---------------------------------------------------------------------------------------


def check(
    interventions: Sequence[Declared],
    tree: ModuleTree,
    *,
    hidden_size: int,
    live: Mapping[str, Any],
) -> list[tuple[list[Site], bool]]:
    """Where each intervention applies (none for a `StopWhen`), in this model. Arrays in it are decoded ones.

    Raises:
        DeclarationError: for the first that cannot be carried out.
    """
    if len(interventions) > MAX_INTERVENTIONS:
        raise DeclarationError("interventions", f"at most {MAX_INTERVENTIONS} to a trace, got {len(interventions)}")
    places: list[tuple[list[Site], bool]] = []
    probes: dict[str, tuple[Probe, bool]] = {}
    names: set[str] = set()
    for index, one in enumerate(interventions):
        field = f"interventions[{index}]"
        if isinstance(one, StopWhen):
            _check_stop(one, probes, field)
            places.append(([], False))
            continue
        if isinstance(one, (Probe, LogitLens)):
            if not _NAME.fullmatch(one.name):
                raise DeclarationError(f"{field}.name", f"expected a name as in Python, got {one.name!r}")
            if one.name in names:
                raise DeclarationError(f"{field}.name", f"{one.name!r} is saved twice")
            names.add(one.name)
        try:
            sites, pattern = find_sites(tree, one.at)
        except ValueError as error:
            raise DeclarationError(f"{field}.at", str(error)) from None
        untapped = next((site.location for site in sites if not tree.serves(site.location)), None)
        if untapped is not None:
            raise DeclarationError(f"{field}.at", tree.not_tapped(untapped))
        if isinstance(one, LogitLens):
            if any(site.value != "residual" for site in sites):
                raise DeclarationError(f"{field}.at", f"a logit lens reads the residual stream, not {one.at!r}")
            if not 1 <= one.top_k <= MAX_TOP_K:
                raise DeclarationError(f"{field}.top_k", f"expected 1 to {MAX_TOP_K}, got {one.top_k}")
        if isinstance(one, Probe):
            probes[one.name] = one, pattern
        _check_values(one, sites, hidden_size, live, field)
        places.append((sites, pattern))
    if sum(len(sites) for sites, _ in places) > MAX_SITES:
        raise DeclarationError("interventions", f"at most {MAX_SITES} locations to a trace")
    for field, name, vector in _live_names(interventions):
        if name not in live:
            declared = ", ".join(sorted(map(str, live))) or "none"
            raise DeclarationError(field, f"live parameter {name!r} was not declared at submission ({declared})")
        value = live[name]
        if vector != is_array(value) or (
            not vector and (isinstance(value, bool) or not isinstance(value, (int, float)))
        ):
            raise DeclarationError(
                field, f"live parameter {name!r} must be {'an array' if vector else 'a number'}, got {value!r}"[:200]
            )
    return places


#: How many lists of interventions a tree remembers to fit, and of how many bytes one that is remembered may be.
_REMEMBERED: Final = 1024
_LONG: Final = 256 * 1024


def check_encoded(
    interventions: Sequence[Declared], live: bytes, trees: Sequence[ModuleTree], *, hidden_size: int
) -> None:
    """`check` of normalized interventions and packed live parameters, in each of these models. Services send the same
    ones again and again: those that have been found to fit are told by their bytes.

    Raises:
        DeclarationError: for the first that cannot be carried out.
    """
    encoded = _encoder.encode(interventions)
    known = b""
    if len(encoded) + len(live) <= _LONG:
        known = digest_bytes(_encoder.encode((hidden_size, encoded, live)))
    if known and all(known in tree.fitting for tree in trees):
        return
    own, values = decoded(interventions), unpack(live)
    for tree in trees:
        check(own, tree, hidden_size=hidden_size, live=values)
        if known:
            if len(tree.fitting) >= _REMEMBERED:
                tree.fitting.clear()
            tree.fitting.add(known)


def resolved(one: Declared, live: Mapping[str, Any]) -> Declared:
    """`one` with live parameters in place of their names."""
    changed: dict[str, Any] = {}
    for name in one.__struct_fields__:
        found = live_name(getattr(one, name))
        if found is not None:
            changed[name] = live[found]
    return msgspec.structs.replace(one, **changed) if changed else one


def live_name(value: Any) -> str | None:
    """The live parameter that a field refers to, if it does: a `Live`, or one that was decoded as plain data."""
    if isinstance(value, Live):
        return value.live
    if isinstance(value, dict) and isinstance(value.get("live"), str):
        return str(value["live"])
    return None


def _live_names(interventions: Sequence[Declared]) -> Iterator[tuple[str, str, bool]]:
    for index, one in enumerate(interventions):
        for name in one.__struct_fields__:
            found = live_name(getattr(one, name))
            if found is not None:
                yield f"interventions[{index}].{name}", found, name == _VECTORS.get(type(one))


def _check_stop(one: StopWhen, probes: Mapping[str, tuple[Probe, bool]], field: str) -> None:
    if one.probe not in probes:
        known = ", ".join(sorted(probes)) or "none"
        raise DeclarationError(f"{field}.probe", f"no probe {one.probe!r} is declared before it (declared: {known})")
    probe, pattern = probes[one.probe]
    shape = getattr(probe.weight, "shape", None)
    outputs = (
        1
        if probe.reduce == "norm" and shape is None
        else None
        if shape is None
        else (shape[0] if len(shape) == 2 else 1)
    )
    if outputs is None or pattern or probe.positions != "last":
        raise DeclarationError(
            f"{field}.probe", f"probe {one.probe!r} does not save numbers of one location's last position each step"
        )
    if not 0 <= one.output < outputs:
        raise DeclarationError(f"{field}.output", f"probe {one.probe!r} has {outputs} outputs, got {one.output}")
    if one.above is None and one.below is None:
        raise DeclarationError(f"{field}.above", "expected a threshold: above, below or both")
    if one.steps < 1:
        raise DeclarationError(f"{field}.steps", f"expected 1 or more, got {one.steps}")
    for name in _NUMBERS[StopWhen]:
        _check_number(getattr(one, name), f"{field}.{name}")


def _check_values(
    one: Declared,
    sites: Sequence[Site],
    hidden_size: int,
    live: Mapping[str, Any],
    field: str,
) -> None:
    width = hidden_size if any(site.value == "residual" for site in sites) else None
    for name in _NUMBERS[type(one)]:
        _check_number(getattr(one, name), f"{field}.{name}")
    if isinstance(one, Clamp) and one.min is None and one.max is None:
        raise DeclarationError(f"{field}.min", "expected a bound: min, max or both")
    if isinstance(one, Probe):
        if one.weight is not None:
            if one.reduce == "norm":
                raise DeclarationError(f"{field}.reduce", "a norm is taken of the value itself: leave the weight out")
            shape = _check_array(one.weight, f"{field}.weight", (1, 2), width)
            if one.bias is not None:
                _check_bias(one.bias, f"{field}.bias", shape)
        elif one.bias is not None or one.activation != "none":
            part = "bias" if one.bias is not None else "activation"
            raise DeclarationError(f"{field}.{part}", "goes with a weight")
    name = _VECTORS.get(type(one), "")
    if name:
        given = getattr(one, name)
        found = live_name(given)
        value = live.get(found) if found is not None else given
        if value is None and isinstance(one, Ablate):
            return
        if found is not None and not is_array(value):
            return  # said of the live parameter
        _check_array(value, f"{field}.{name}", (1, 2) if isinstance(one, Ablate) else (1,), width)


def _check_number(value: Any, field: str) -> None:
    if isinstance(value, float) and value != value:
        raise DeclarationError(field, "expected a number, got NaN")
    if isinstance(value, float) and value in (float("inf"), float("-inf")):
        raise DeclarationError(field, "expected a finite number, got an infinity")


def _check_array(value: Any, field: str, dimensions: tuple[int, ...], width: int | None) -> tuple[int, ...]:
    import numpy as np

    if not is_array(value):
        raise DeclarationError(field, f"expected an array, got {type(value).__qualname__}")
    array = np.asarray(array_of(value))
    wanted = " or ".join({1: "[hidden]", 2: "[n, hidden]"}[count] for count in dimensions)
    if array.ndim not in dimensions or not array.size:
        raise DeclarationError(field, f"expected an array of shape {wanted}, got {list(array.shape)}")
    if width is not None and array.shape[-1] != width:
        raise DeclarationError(field, f"the model's hidden size is {width}, got an array of shape {list(array.shape)}")
    try:
        finite = bool(np.isfinite(array.astype(np.float32)).all())
    except (TypeError, ValueError):
        raise DeclarationError(field, f"expected an array of numbers, got dtype {array.dtype}") from None
    if not finite:
        raise DeclarationError(field, "expected finite numbers, got NaN or an infinity in it")
    return tuple(array.shape)


def _check_bias(value: Any, field: str, shape: tuple[int, ...]) -> None:
    if is_array(value):
        if len(shape) != 2 or tuple(value.shape) != shape[:1]:
            raise DeclarationError(field, f"expected one number for each output, got shape {list(value.shape)}")
        _check_array(value, field, (1,), None)
    elif isinstance(value, bool) or not isinstance(value, (int, float)):
        raise DeclarationError(field, f"expected a number or an array, got {type(value).__qualname__}")
    else:
        _check_number(float(value), field)
