"""The model arguments of the provider: `-M NAME=VALUE` on Inspect's command line, keywords of `get_model` in Python.

Inspect reads each value on its command line as YAML, and splits a text at its commas into a list.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NamedTuple

from tracewire.capture.intervention import Intervention
from tracewire.chats import CHAT_NAMES
from tracewire.checks import shown
from tracewire.cli.blocks import BLOCK, load_block
from tracewire.cli.specs import Spec, declared, lens_spec, named_value, probe_spec, steer_spec, values_by_name
from tracewire.client import ClientOptions
from tracewire.errors import TraceRejected
from tracewire.options import TraceOptions
from tracewire_bus.wire.messages import Block, DeclaredIntervention, Lens, LogitLens

from .declarations import interventions_in, read_file

__all__ = ["ModelArguments", "arguments_of", "named_refusals"]

#: Arguments with the short forms of `tracewire run`.
_SPECS = {"steer": steer_spec, "probe": probe_spec, "lens": lens_spec}
_CLIENT: frozenset[str] = getattr(ClientOptions, "__optional_keys__")  # noqa: B009  (mypy does not know it of a class)
_TRACE: frozenset[str] = getattr(TraceOptions, "__optional_keys__")  # noqa: B009
#: Options of a trace that Inspect's own configuration has, or that hold for one trace alone.
_NOT_HERE = (CHAT_NAMES - {"chat_template_kwargs", "documents"}) | {
    *("frequency_penalty", "interventions", "live", "logit_bias", "logprobs", "max_tokens", "n", "presence_penalty"),
    *("seed", "stop", "structured_outputs", "temperature", "top_k", "top_p", "trace_id", "forced_tokens", "shared"),
}
_OPTIONS = _TRACE - _NOT_HERE
_OWN = frozenset({"url", "interventions", "live", "block", "set", *_SPECS})
#: A part of a short form that Inspect has split off at a comma.
_SETTING = re.compile(r"(positions|reduce|activation|top_k)=\w+$")


class ModelArguments(NamedTuple):
    """The arguments of one model.

    Attributes:
        url: the URL of the Redis, or None for that of the environment.
        client: keyword arguments of the client.
        interventions: the declared interventions of every generation.
        names: of each intervention, the argument that declares it.
        live: first values of live parameters.
        block: the block that every generation runs.
        options: further keyword arguments of every trace.
    """

    url: str | None
    client: dict[str, Any]
    interventions: list[DeclaredIntervention]
    names: list[str]
    live: dict[str, Any]
    block: Intervention | Block | None
    options: dict[str, Any]

    def trace_options(self) -> dict[str, Any]:
        """The keyword arguments that each trace has by these arguments."""
        found: dict[str, Any] = {**self.options, "block": self.block, "interventions": self.interventions}
        if self.live:
            found["live"] = self.live
        if any(isinstance(one, LogitLens | Lens) for one in self.interventions):
            found["token_strings"] = True
        return found


def arguments_of(given: Mapping[str, Any], url: str | None = None) -> ModelArguments:
    """The arguments by name. `url` is Inspect's base URL, in whose place the argument `url` may stand.

    Raises:
        TraceRejected: one of them is unknown or wrong; `field` names it.
    """
    _refuse_unknown(given)
    address = given.get("url", url)
    if address is not None and not isinstance(address, str):
        raise _wrong("url", f"the URL of a Redis, as redis://host:6379, got {shown(address)}")
    specs = [spec for name in _SPECS for spec in _short_forms(name, given.get(name))]
    objects, first = _objects(given.get("interventions"))
    found = declared([*specs, *objects], {**first, **_by_name("live", given.get("live"))})
    return ModelArguments(
        url=address,
        client={name: given[name] for name in sorted(given.keys() & _CLIENT)},
        interventions=found.interventions,
        names=found.options,
        live=found.live,
        block=_block(given.get("block"), _by_name("set", given.get("set"))),
        options={name: given[name] for name in sorted(given.keys() & _OPTIONS)},
    )


@contextmanager
def named_refusals(arguments: ModelArguments) -> Iterator[None]:
    """Name the model argument at fault where the client or the engine refuses one of its interventions."""
    try:
        yield
    except TraceRejected as error:
        found = re.match(r"interventions\[(\d+)\]", error.field)
        if found and int(found[1]) < len(arguments.names):
            raise _refused(arguments.names[int(found[1])], error.message) from error
        if error.field.partition(".")[0] in arguments.options:
            raise _refused(error.field, error.message) from error
        raise


def _refused(name: str, message: str) -> TraceRejected:
    return TraceRejected(f"model argument {name}", message)


def _wrong(name: str, expected: str) -> TraceRejected:
    return _refused(name, f"expected {expected}")


def _refuse_unknown(given: Iterable[str]) -> None:
    for name in given:
        if name in _OWN | _CLIENT | _OPTIONS:
            continue
        if name in _NOT_HERE:
            raise _refused(name, "the provider takes it from Inspect's generation options, or not at all")
        near = get_close_matches(name, sorted(_OWN | _CLIENT | _OPTIONS), 1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        known = ", ".join(sorted(_OWN | _CLIENT))
        raise _wrong(name, f"one of {known}, or an option of client.trace{hint}")


def _texts(name: str, value: Any, form: str) -> list[str]:
    """The texts of an argument that is one or several, with parts that were split at a comma put together again."""
    if value is None:
        return []
    found: list[str] = []
    for one in [value] if isinstance(value, str) else value if isinstance(value, list | tuple) else [None]:
        if not isinstance(one, str):
            raise _wrong(name, f"{form}, or a list of such texts, got {shown(value)}")
        if found and _SETTING.match(one):
            found[-1] += f",{one}"
        else:
            found.append(one)
    return found


def _short_forms(name: str, value: Any) -> list[Spec]:
    found = []
    for text in _texts(name, value, f"the form of `tracewire run --{name}`"):
        try:
            found.append(_SPECS[name](text)._replace(option=name))
        except argparse.ArgumentTypeError as error:
            raise _refused(name, str(error)) from None
    return found


def _objects(value: Any) -> tuple[list[Spec], dict[str, Any]]:
    """The argument `interventions`, and the first values of live parameters in its file."""
    try:
        if isinstance(value, str):
            found, live = read_file(Path(value), "interventions")
        else:
            found, live = interventions_in([] if value is None else value, "interventions"), {}
    except TraceRejected as error:
        raise _refused(error.field, error.message) from None
    return [Spec(f"interventions[{index}]", one, {}) for index, one in enumerate(found)], live


def _by_name(name: str, value: Any) -> dict[str, Any]:
    """The values of a mapping, or of one or several texts `NAME=VALUE`."""
    if isinstance(value, Mapping):
        if not all(isinstance(key, str) for key in value):
            raise _wrong(name, f"names of variables, got {shown(value)}")
        return dict(value)
    try:
        return values_by_name(named_value(text) for text in _texts(name, value, "NAME=VALUE, or a dict"))
    except argparse.ArgumentTypeError as error:
        raise _refused(name, str(error)) from None


def _block(value: Any, variables: dict[str, Any]) -> Intervention | Block | None:
    if value is None:
        if variables:
            raise _wrong("set", "variables of a block: give block as well")
        return None
    if isinstance(value, str):
        try:
            value = load_block(value)
        except (OSError, ValueError) as error:
            raise _refused("block", str(error)) from error
    if isinstance(value, Intervention):
        try:
            return value(**variables) if variables else value
        except TypeError as error:
            raise _refused("set", str(error)) from None
    if not isinstance(value, Block) or variables:
        raise _wrong("block", f"{BLOCK}, or a function under @tracewire.intervention, got {shown(value)}")
    return value
