"""Checks declared interventions against a model, and finds the locations that they apply to.

A client checks before submitting, and an adapter before it passes the trace to vLLM, with the same code. The workers
check only the width of vectors at modules whose width the registry does not have.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache, partial
from typing import (
    TYPE_CHECKING,
    Any,
    Final,
    Literal,
    SupportsIndex,
    TypeAlias,
    cast,
    get_args,
    get_origin,
    get_type_hints,
)

import msgspec

from tracewire_bus.wire.arrays import array_of, array_payload, dtype_names, encoded_array, raw_bytes
from tracewire_bus.wire.codec import digest_bytes
from tracewire_bus.wire.kinds import Unsavable, is_array
from tracewire_bus.wire.messages import (
    Ablate,
    AttentionPattern,
    Autoencoder,
    Clamp,
    Coordinates,
    Declared,
    Features,
    HeadAblate,
    Hold,
    Lens,
    Live,
    LogitLens,
    Patch,
    Probe,
    Project,
    Reading,
    Steer,
    SteerFeatures,
    StopWhen,
)
from tracewire_bus.wire.packing import decoder, unpack
from tracewire_bus.wire.refs import ArrayRef, encode_ref, is_vector

from . import head_checks, patch_checks
from .autoencoders import SparseAutoencoder
from .condition_checks import (
    check_conditions,
    condition_live,
    live_conditions,
    normalized_condition,
    outputs_of,
    with_values,
)
from .foreign_names import our_name
from .kind_checks import CHECKED, UNKNOWN, KnownModel, check_hold, check_kind, same_places
from .normal_forms import SIMPLE, NormalForms
from .tree import ModuleTree
from .value_checks import DeclarationError, check_array, check_content, check_number

if TYPE_CHECKING:
    import numpy as np

__all__ = [
    "MAX_INTERVENTIONS",
    "MAX_SITES",
    "DeclarationError",
    "KnownModel",
    "Site",
    "array_fields",
    "check",
    "check_content",
    "check_encoded",
    "decode_interventions",
    "encode_arrays",
    "find_sites",
    "live_name",
    "normalize",
    "substitute_live",
]

#: Interventions that one trace may declare.
MAX_INTERVENTIONS: Final = 64
#: Locations of all interventions of a trace together.
MAX_SITES: Final = 4096
MAX_TOP_K: Final = 1024
#: Characters of a location.
MAX_AT: Final = 1000

_RESIDUAL = re.compile(r"residual\((.*)\)")
_HEADS = re.compile(r"heads\((.*)\)")
_SLICE = re.compile(r"(-?\d+)?:(-?\d+)?")
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]*")

_KINDS: Final[tuple[type[Declared], ...]] = get_args(Declared)
#: Fields with a vector. These and the numbers can be live parameters.
_VECTORS: Final[dict[type, str]] = {
    Steer: "vector",
    Clamp: "direction",
    Ablate: "direction",
    Patch: "values",
    Project: "basis",
    Hold: "vector",
    HeadAblate: "mean",
}
#: Fields with a list of integers, which are no arrays; and what a field of another type than these takes.
_LISTS: Final = frozenset({"positions", "indices", "heads", "source", "into"})
_EXPECTED: Final = {
    "positions": "an index, a list of indices, a slice 'a:b' or a name of Positions",
    "source": "an index, a list of indices, a slice 'a:b' or 'prompt'",
    "heads": "a head's number, or a list of them",
    "prompt": "the number of a prompt",
    "into": "the number of a prompt, or a list of them",
}
#: Likewise with arrays that no live parameter stands for.
_ARRAYS: Final[dict[type, tuple[str, ...]]] = {
    Probe: ("weight", "bias"),
    Lens: ("matrix", "bias"),
    Coordinates: ("basis",),
    Features: ("weights",),
    SteerFeatures: ("weights",),
}
_ARRAY_FIELDS: Final[dict[type, tuple[str, ...]]] = _ARRAYS | {kind: (name,) for kind, name in _VECTORS.items()}
#: Fields that take a number or a `Live`.
_NUMBERS: Final[dict[type, tuple[str, ...]]] = {
    kind: tuple(name for name, hint in get_type_hints(kind).items() if Live in get_args(hint)) for kind in _KINDS
}

_Value: TypeAlias = Literal["residual", "output", "input"]


class Site(msgspec.Struct, frozen=True):
    """One location in a model: a module's path, and which of the module's values.

    The path of a `residual` is that of the decoder layer after which the stream is read. The path of `heads` is that of
    the attention's output projection, whose input has the heads.
    """

    path: str
    value: _Value
    #: Of `heads(...)`: how many attention heads, and their size.
    heads: int = 0
    head_size: int = 0

    @property
    def location(self) -> str:
        """The tap that an engine that replays CUDA graphs needs to serve this site."""
        return f"{self.path}.{'input' if self.value == 'input' else 'output'}"


def find_sites(tree: ModuleTree, at: str) -> tuple[list[Site], bool]:
    """Find the locations that `at` names (see `DeclaredIntervention`).

    Returns:
        the locations in the order of the model's modules, and whether `at` is a pattern, which may match several.

    Raises:
        ValueError: `at` is malformed or matches nothing; the error suggests a similar path if there is one.
    """
    if len(at) > MAX_AT:
        raise ValueError(f"a location has at most {MAX_AT} characters, got {len(at)}")
    stream = _RESIDUAL.fullmatch(at)
    if stream is not None:
        return _layers(tree, stream[1].strip())
    of_heads = _HEADS.fullmatch(at)
    if of_heads is not None:
        chosen, pattern = _chosen(tree, of_heads[1].strip(), "heads")
        found = head_checks.layers_of_heads(tree, chosen)
        return [Site(one.output, "input", one.heads, one.head_size) for one in found], pattern
    path, value = at, "output"
    for suffix in ("output", "input"):
        if path.endswith("." + suffix) and not tree.knows(path):
            path, value = path.removesuffix("." + suffix), suffix
    if "*" not in path:
        if not path or not tree.knows(path):
            raise ValueError(f"the model has no module {path!r}{_instead(tree, path)}")
        return [Site(path, value)], False  # type: ignore[arg-type]
    steps = [step.split("*") for step in path.split(".")]
    matching = [Site(known, value) for known in tree.paths if _matches(steps, known)]  # type: ignore[arg-type]
    if not matching:
        raise ValueError(f"no module of the model matches {path!r}")
    return matching, True


def _instead(tree: ModuleTree, path: str) -> str:
    """What the caller may have meant by a path that the model does not have."""
    ours = our_name(path)
    near = None if ours else tree.nearest(path) if path else None
    return f": it is {ours} here" if ours else f"; the nearest is {near!r}" if near else ""


def _matches(steps: Sequence[Sequence[str]], path: str) -> bool:
    """Whether a path matches a pattern. Each item of `steps` is a step of the pattern, split at its `*`s.

    Takes linear time: no piece of the pattern is matched twice.
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
    chosen, pattern = _chosen(tree, which, "residual")
    return [Site(f"{tree.layers}.{index}", "residual") for index in chosen], pattern


def _chosen(tree: ModuleTree, which: str, name: str) -> tuple[list[int], bool]:
    """The layers that stand in the parentheses behind `name`, and whether they may be several."""
    count = tree.layer_count
    if not count:
        raise ValueError(f"{name}() needs a list of decoder layers, and this model has none")
    if re.fullmatch(r"-?\d+", which):
        index = int(which)
        if not -count <= index < count:
            raise ValueError(f"{name}({index}): the model has {count} layers, 0 to {count - 1}")
        return [index % count], False
    if which == "*":
        return list(range(count)), True
    if (span := _SLICE.fullmatch(which)) is not None:
        start, stop = (None if bound is None else int(bound) for bound in span.groups())
        chosen = list(range(count))[start:stop]
        if not chosen:
            raise ValueError(f"{name}({which}) is empty: the model has {count} layers, 0 to {count - 1}")
        return chosen, True
    raise ValueError(f"expected a layer's index, 'a:b' or '*' in {name}(...), got {which!r}")


# --- types and values -------------------------------------------------------------------------------------------------


def normalize(interventions: Sequence[Any], *, keep_saved: bool = False, again: bool = False) -> list[Declared]:
    """Convert a caller's interventions for `Submission.interventions`: NumPy numbers become floats, arrays are encoded.

    With `keep_saved`, a reference to an array that a trace saved stays as it is, for `encode_arrays`. With `again`, the
    same objects may come again, and are converted once.

    Raises:
        DeclarationError: a value cannot travel, or is of a type that its field does not accept.
    """
    found = []
    known = _normal_forms.get(interventions) if again else [None] * len(interventions)
    for index, (one, plain) in enumerate(zip(interventions, known, strict=True)):
        if plain is None:
            plain = _normalize_one(one, f"interventions[{index}]", keep_saved)
            if again and plain is not one:
                _normal_forms.keep(one, plain)
        found.append(plain)
    return found


_normal_forms = NormalForms()


def encode_arrays(one: Declared, arrays: Mapping[str, np.ndarray[Any, Any]]) -> Declared:
    """A copy of a normalized intervention with these arrays in the fields that they are named for."""
    encoded: dict[str, Any] = {name: _encoded(array_of(array)) for name, array in arrays.items()}
    return msgspec.structs.replace(one, **encoded)


_encoder = msgspec.msgpack.Encoder()
_decode = decoder(list[Declared])


def decode_interventions(interventions: Sequence[Declared]) -> list[Declared]:
    """Decode the arrays in interventions that `normalize` returned."""
    return cast(list[Declared], _decode(_encoder.encode(interventions)))


def _normalize_one(one: Any, field: str, keep_saved: bool) -> Declared:
    if not isinstance(one, _KINDS):
        *names, last = (kind.__name__ for kind in _KINDS)
        raise DeclarationError(field, f"expected a {', '.join(names)} or {last}, got {type(one).__qualname__}")
    changed: dict[str, Any] = {}
    for name in one.__struct_fields__:
        value = getattr(one, name)
        if name == "when" and value is not None:
            changed[name] = normalized_condition(value, f"{field}.when")
        elif isinstance(value, SparseAutoencoder):
            changed |= {"sae": value.description, "weights": value.encoded}
        elif name in changed:
            continue
        elif name in _LISTS:
            changed[name] = _integers(value)
        elif isinstance(value, Live):
            changed[name] = {"live": value.live} if name == _VECTORS.get(type(one)) else value
        elif isinstance(value, ArrayRef):
            changed[name] = value if keep_saved and not is_vector(value) else encode_ref(value)
        elif is_array(value) or isinstance(value, (list, tuple)):
            try:
                array = _vector(value, f"{field}.{name}")
                # A NumPy or torch scalar is a number.
                changed[name] = float(array) if not array.shape else _encoded(array)
            except Unsavable as error:
                raise DeclarationError(f"{field}.{name}", str(error)) from None
    plain: Declared = msgspec.structs.replace(one, **changed) if changed else one
    try:
        _check_types(type(plain), tuple([_without_arrays(getattr(plain, name)) for name in plain.__struct_fields__]))
    except msgspec.ValidationError as error:
        named = re.search(r" - at `\$\.(\w+)", str(error))
        if named is None:
            raise DeclarationError(field, str(error)) from None
        name = named[1]
        hint = get_type_hints(type(one))[name]
        expected = _EXPECTED.get(name, _expected(hint)) if get_origin(hint) is not Literal else _expected(hint)
        raise DeclarationError(f"{field}.{name}", f"expected {expected}, got {getattr(one, name)!r}"[:200]) from None
    return plain


#: The longest text that is remembered.
_LONGEST: Final = 200


def _check_types(kind: type[Declared], values: tuple[Any, ...]) -> None:
    """Check the types of an intervention's fields, since the constructor of a msgspec struct checks none.

    A client submits the same interventions again and again, so those without nested values are checked once.

    Raises:
        msgspec.ValidationError: a field is of another type, or has a value that is none of its literals.
    """
    types = tuple([type(value) for value in values])
    if SIMPLE.issuperset(types) and all(type(value) is not str or len(value) <= _LONGEST for value in values):
        _check_simple(kind, types, values)
    else:
        _convert(kind, values)


@lru_cache(maxsize=4096)
def _check_simple(kind: type[Declared], types: tuple[type, ...], values: tuple[Any, ...]) -> None:
    """`_check_types` of values that can be compared. `1`, `1.0` and `True` are equal, so their `types` are compared."""
    _convert(kind, values)


def _convert(kind: type[Declared], values: tuple[Any, ...]) -> None:
    config = kind.__struct_config__
    msgspec.convert(
        dict(zip(kind.__struct_fields__, values, strict=True)) | {str(config.tag_field): config.tag}, Declared
    )


def _integers(value: Any) -> Any:
    """Integers of NumPy and of ranges as plain ones, and lists of them; other values as they are."""
    if type(value) is bool or isinstance(value, str):
        return value
    if isinstance(value, SupportsIndex) and not getattr(value, "shape", ()):
        return int(value)
    if isinstance(value, (list, tuple, range)) or is_array(value):
        return [_integers(item) for item in value]
    return value


def _encoded(array: np.ndarray[Any, Any]) -> Any:
    """`wire(array)` for an array that `array_of` returned."""
    name = dtype_names.get(array.dtype) or array.dtype.name
    return encoded_array(array_payload(name, array.shape, raw_bytes(array)))


_EXPECTED_TYPES: Final[dict[Any, str]] = {
    str: "a string",
    int: "an integer",
    bool: "True or False",
    list[int]: "a list of integers",
    list[int] | None: "a list of integers",
    str | Autoencoder: "a SparseAutoencoder, or the name of one that the engine has",
}


def _expected(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return f"one of {', '.join(map(repr, get_args(kind)))}"
    if kind in _EXPECTED_TYPES:
        return _EXPECTED_TYPES[kind]
    return "a number or Live(name)"


def _without_arrays(value: Any) -> Any:
    if isinstance(value, msgspec.msgpack.Ext):
        return None
    return msgspec.to_builtins(value) if isinstance(value, msgspec.Struct) else value


def _vector(value: Any, field: str) -> np.ndarray[Any, Any]:
    import numpy as np

    if isinstance(value, (list, tuple)):
        try:
            value = np.asarray(value, dtype=np.float32)
        except (ValueError, TypeError):
            raise DeclarationError(field, "expected an array of numbers, got a list of something else") from None
    return array_of(value)


# --- checks against a model -------------------------------------------------------------------------------------------


def check(
    interventions: Sequence[Declared],
    tree: ModuleTree,
    *,
    hidden_size: int,
    live: Mapping[str, Any],
    model: KnownModel = UNKNOWN,
) -> list[tuple[list[Site], bool]]:
    """Check interventions against a model.

    Args:
        interventions: the interventions, with decoded arrays (`decode_interventions`) or references to vectors.
        tree: the model's modules.
        hidden_size: the width of the model's residual stream.
        live: the values of the trace's live parameters, by name.
        model: what else is known of the model.

    Returns:
        for each intervention its locations (none for a `StopWhen`) and whether its `at` is a pattern, by `find_sites`.

    Raises:
        DeclarationError: an intervention is invalid or does not fit the model; the error is of the first such.
    """
    if len(interventions) > MAX_INTERVENTIONS:
        raise DeclarationError(
            "interventions", f"a trace has at most {MAX_INTERVENTIONS} interventions, got {len(interventions)}"
        )
    places: list[tuple[list[Site], bool]] = []
    probes: dict[str, tuple[Probe, bool]] = {}
    names: set[str] = set()
    for index, one in enumerate(interventions):
        field = f"interventions[{index}]"
        if isinstance(one, StopWhen):
            _check_stop(one, probes, field)
            places.append(([], False))
            continue
        if isinstance(one, Reading):
            if not _NAME.fullmatch(one.name):
                raise DeclarationError(f"{field}.name", f"expected a name as in Python, got {one.name!r}")
            if one.name in names:
                raise DeclarationError(f"{field}.name", f"{one.name!r} is saved twice")
            names.add(one.name)
        sites, pattern = _served_sites(tree, one, field)
        if isinstance(one, Probe):
            probes[one.name] = one, pattern
        _check_values(one, sites, hidden_size, live, field)
        if isinstance(one, CHECKED):
            width = hidden_size if any(site.value == "residual" for site in sites) else None
            if sites[0].heads:
                width = sites[0].heads * sites[0].head_size
            check_kind(one, (len(sites), width), partial(_is_place, tree, sites), model, field)
        places.append((sites, pattern))
    if sum(len(sites) for sites, _ in places) > MAX_SITES:
        raise DeclarationError("interventions", f"the interventions of a trace have at most {MAX_SITES} locations")
    _check_live_names(interventions, live)
    for index, one in enumerate(interventions):
        if isinstance(one, Hold):
            check_hold(one, probes, partial(_is_place, tree, places[index][0]), f"interventions[{index}]")
    check_conditions(interventions, probes)
    return places


def _served_sites(tree: ModuleTree, one: Any, field: str) -> tuple[list[Site], bool]:
    """The locations of an intervention, and whether its `at` is a pattern. Refuses those that it cannot have."""
    try:
        sites, pattern = find_sites(tree, one.at)
        if isinstance(one, AttentionPattern):
            paths = head_checks.attention_paths(tree, [site.path for site in sites])
            sites = [msgspec.structs.replace(site, path=path) for site, path in zip(sites, paths, strict=True)]
    except ValueError as error:
        raise DeclarationError(f"{field}.at", str(error)) from None
    untapped = next((site.location for site in sites if not tree.serves(site.location)), None)
    if untapped is not None:
        raise DeclarationError(f"{field}.at", tree.not_tapped_reason(untapped))
    if isinstance(one, (LogitLens, Lens)):
        if any(site.value != "residual" for site in sites):
            raise DeclarationError(f"{field}.at", f"a logit lens reads the residual stream, not {one.at!r}")
        if not 1 <= one.top_k <= MAX_TOP_K:
            raise DeclarationError(f"{field}.top_k", f"expected 1 to {MAX_TOP_K}, got {one.top_k}")
    if isinstance(one, Hold) and (pattern or len(sites) != 1):
        raise DeclarationError(f"{field}.at", f"expected one location, got {one.at!r}")
    return sites, pattern


def _is_place(tree: ModuleTree, sites: Sequence[Site], at: str) -> bool:
    """Whether `at` is the one location of `sites`."""
    try:
        return same_places(sites, find_sites(tree, at)[0])
    except ValueError:
        return False


def _check_live_names(interventions: Sequence[Declared], live: Mapping[str, Any]) -> None:
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


#: Lists of interventions that one tree caches as fitting.
_CACHED_LISTS: Final = 1024
#: Encoded size up to which a list of interventions, with its live parameters, is cached.
_CACHED_BYTES: Final = 256 * 1024


def check_encoded(
    interventions: Sequence[Declared],
    live: bytes,
    trees: Sequence[ModuleTree],
    *,
    hidden_size: int,
    model: KnownModel = UNKNOWN,
) -> None:
    """Check interventions against several models, with a cache: services send the same interventions repeatedly.

    Args:
        interventions: the interventions as `normalize` returned them.
        live: the packed dict of the trace's live parameters.
        trees: the models' modules. Each tree caches the digests of interventions that fit.
        hidden_size: the width of the models' residual streams.
        model: what else is known of all of them.

    Raises:
        DeclarationError: as for `check`.
    """
    encoded = _encoder.encode(interventions)
    known = b""
    if len(encoded) + len(live) <= _CACHED_BYTES:
        known = digest_bytes(_encoder.encode((hidden_size, encoded, live)))
    if known and all(known in tree.fitting_interventions for tree in trees):
        return
    own, values = decode_interventions(interventions), unpack(live)
    for tree in trees:
        check(own, tree, hidden_size=hidden_size, live=values, model=model)
        if known:
            if len(tree.fitting_interventions) >= _CACHED_LISTS:
                tree.fitting_interventions.clear()
            tree.fitting_interventions.add(known)


def array_fields(interventions: Sequence[Declared]) -> Iterator[tuple[int, str, Any]]:
    """The fields of interventions that can hold an array: the intervention's index, the field's name, and the value."""
    for index, one in enumerate(interventions):
        for name in _ARRAY_FIELDS.get(type(one), ()):
            yield index, name, getattr(one, name)


def substitute_live(one: Declared, live: Mapping[str, Any]) -> Declared:
    """A copy of `one` with the values of live parameters, given by name, in place of each `Live`."""
    changed: dict[str, Any] = {}
    for name in one.__struct_fields__:
        found = live_name(getattr(one, name))
        if found is not None:
            changed[name] = live[found]
    if one.when is not None and condition_live(one.when):
        changed["when"] = with_values(one.when, live)
    return msgspec.structs.replace(one, **changed) if changed else one


def live_name(value: Any) -> str | None:
    """The name of the live parameter that a field's value refers to, or None if the value is none.

    A field of type `Any` has a decoded `Live` as the dict `{"live": name}`.
    """
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
        for path, found in live_conditions(one):
            yield f"interventions[{index}].{path}", found, False


def _check_stop(one: StopWhen, probes: Mapping[str, tuple[Probe, bool]], field: str) -> None:
    if one.probe not in probes:
        known = ", ".join(sorted(probes)) or "none"
        raise DeclarationError(f"{field}.probe", f"no probe {one.probe!r} is declared before it (declared: {known})")
    probe, pattern = probes[one.probe]
    outputs = outputs_of(probe, pattern)
    if outputs is None:
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
        check_number(getattr(one, name), f"{field}.{name}")


def _check_values(
    one: Declared,
    sites: Sequence[Site],
    hidden_size: int,
    live: Mapping[str, Any],
    field: str,
) -> None:
    width = hidden_size if any(site.value == "residual" for site in sites) else None
    size = (sites[0].heads, sites[0].head_size) if sites[0].heads else None
    what = "the model's hidden size is"
    if size is not None:
        width, what = size[0] * size[1], f"{getattr(one, 'at', '')!r} has {size[0]} heads of {size[1]}, together"
    for name in _NUMBERS[type(one)]:
        check_number(getattr(one, name), f"{field}.{name}")
    if isinstance(one, Clamp) and one.min is None and one.max is None:
        raise DeclarationError(f"{field}.min", "expected a bound: min, max or both")
    if isinstance(one, Probe):
        if one.weight is not None:
            if one.reduce not in ("none", "mean"):
                taken = "moments are" if one.reduce == "moments" else "a norm is"
                raise DeclarationError(f"{field}.reduce", f"{taken} taken of the value itself: leave the weight out")
            shape = check_array(one.weight, f"{field}.weight", (1, 2), width, what=what)
            if one.bias is not None:
                _check_bias(one.bias, f"{field}.bias", shape)
        elif one.bias is not None or one.activation != "none":
            part = "bias" if one.bias is not None else "activation"
            raise DeclarationError(f"{field}.{part}", f"a {part} needs a weight")
    name = _VECTORS.get(type(one), "")
    if isinstance(one, head_checks.HEAD_KINDS):
        head_checks.check_heads(one, size, live, field)
    if isinstance(one, Patch):
        heads = head_checks.head_list(one)
        row = (width,) if heads is None or size is None else (len(heads), size[1])
        patch_checks.check_patch(one, live, row, field, what=what)
    elif name and not isinstance(one, HeadAblate):
        given = getattr(one, name)
        found = live_name(given)
        value = live.get(found) if found is not None else given
        if value is None and isinstance(one, Ablate):
            return
        if found is not None and not is_array(value):
            return  # `check` reports the type of a live parameter itself
        check_array(value, f"{field}.{name}", (1, 2) if isinstance(one, Ablate | Project) else (1,), width, what=what)


def _check_bias(value: Any, field: str, shape: tuple[int, ...]) -> None:
    if is_array(value) or isinstance(value, ArrayRef):
        if len(shape) != 2 or tuple(value.shape) != shape[:1]:
            raise DeclarationError(field, f"expected one number for each output, got shape {list(value.shape)}")
        check_array(value, field, (1,), None)
    elif isinstance(value, bool) or not isinstance(value, (int, float)):
        raise DeclarationError(field, f"expected a number or an array, got {type(value).__qualname__}")
    else:
        check_number(float(value), field)
