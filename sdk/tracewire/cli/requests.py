"""The options of commands that run a trace: prompt, interventions, live parameters, a block, sampling."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from tracewire.capture.intervention import Intervention
from tracewire.errors import TraceRejected, UnknownOption
from tracewire_bus.wire.messages import DeclaredIntervention, Lens, LogitLens

from .blocks import BLOCK, load_block
from .chat_options import Conversation, add_chat_options, conversation_of
from .commands import UsageError, positive
from .model_names import add_model
from .specs import (
    DECLARE,
    LENS,
    PROBE,
    STEER,
    Spec,
    declare_specs,
    declared,
    lens_spec,
    named_value,
    probe_spec,
    steer_spec,
    values_by_name,
)

__all__ = [
    "Request",
    "add_interventions",
    "add_request",
    "add_sampling",
    "bound_block",
    "prompt_of",
    "request_of",
    "sampling_of",
    "specs_of",
]

#: How many tokens are sampled at most by default.
MAX_TOKENS = 256
#: The sampling params that have options of their own.
_SAMPLING = ("max_tokens", "temperature", "seed", "stop")


class Request(NamedTuple):
    """A trace as the options ask for it."""

    block: Intervention | None
    interventions: list[DeclaredIntervention]
    #: The option that declares each of the interventions.
    options: list[str]
    live: dict[str, Any]
    sampling: dict[str, Any]
    conversation: Conversation = Conversation([], {})

    @property
    def saves(self) -> bool:
        """Whether the trace may have saves."""
        return self.block is not None or any(hasattr(one, "name") for one in self.interventions)

    def arguments(self, context: int) -> dict[str, Any]:
        """The keyword arguments of `Client.trace`, for a model whose context has this many tokens."""
        found: dict[str, Any] = {"block": self.block, "interventions": self.interventions}
        found |= {"max_tokens": min(MAX_TOKENS, context // 2), **self.sampling, **self.conversation.options}
        if self.live:
            found["live"] = self.live
        if any(isinstance(one, LogitLens | Lens) for one in self.interventions):
            found["token_strings"] = True
        return found

    @contextmanager
    def refusals(self) -> Iterator[None]:
        """Name the option at fault where the client refuses an intervention or an unknown sampling param.

        Raises:
            UsageError: in place of the client's error.
        """
        try:
            yield
        except UnknownOption as error:
            raise UsageError(f"--sampling {error.message}") from error
        except TraceRejected as error:
            for number, option in enumerate(self.options):
                if error.field.startswith(f"interventions[{number}]"):
                    raise UsageError(f"{option}: {error.message}") from error
            name = error.field.removeprefix("sampling.")
            if name != error.field and name in self.sampling:
                option = f"--{name.replace('_', '-')}" if name in _SAMPLING else f"--sampling {name}"
                raise UsageError(f"{option}: {error.message}") from error
            raise


def add_request(parser: argparse.ArgumentParser) -> None:
    """Add the model and all options of a trace: interventions, sampling, and those of a chat."""
    add_model(parser)
    add_interventions(parser)
    add_sampling(parser)
    add_chat_options(parser)


def add_interventions(parser: argparse.ArgumentParser, *, block: bool = True) -> None:
    """Add the options that declare interventions, and with `block` those of a block in a file."""
    group = parser.add_argument_group(
        "interventions",
        "AT is a location: residual(4), residual(*), model.layers.4.mlp. FILE is .npy, .json or .safetensors[:NAME].",
    )
    add = group.add_argument
    what = f"add a vector, times a number or a live parameter (alpha, alpha=0): '{STEER[1]}'; [,positions=...]"
    add("--steer", type=steer_spec, action="append", default=[], metavar=STEER[0], help=what)
    what = f"save the values, or their projection on a vector: '{PROBE[1]}'; [,reduce=norm|mean|...][,positions=...]"
    add("--probe", type=probe_spec, action="append", default=[], metavar=PROBE[0], help=what)
    what = f"save the likeliest tokens by the logit lens: '{LENS[1]}'; [,positions=...]"
    add("--lens", type=lens_spec, action="append", default=[], metavar=LENS[0], help=what)
    what = f"declare any intervention by its JSON form, as over HTTP: '{DECLARE[1]}' (repeatable)"
    add("--declare", type=declare_specs, action="append", default=[], metavar=DECLARE[0], help=what)
    if block:
        what = "run an intervention of a Python file, which is executed: 'probes.py::watch'"
        add("--block", metavar=BLOCK, help=what)
        what = "a variable of the block: layer=3 (repeatable)"
        add("--set", type=named_value, action="append", default=[], metavar="NAME=VALUE", help=what)


def add_sampling(parser: argparse.ArgumentParser, *, live: bool = True) -> None:
    """Add the options of sampling, and with `live` those of live parameters."""
    group = parser.add_argument_group("trace")
    add = group.add_argument
    if live:
        what = "declare a live parameter by its first value: alpha=0 or direction=@direction.npy (repeatable)"
        add("--live", type=named_value, action="append", default=[], metavar="NAME=VALUE", help=what)
    what = f"the most tokens to sample (default: {MAX_TOKENS}, or half of the model's context)"
    add("--max-tokens", type=positive, metavar="N", help=what)
    add("--temperature", type=float, metavar="T", help="randomness; 0 samples the likeliest token")
    add("--seed", type=int, metavar="N", help="seed of the sampling")
    add("--stop", action="append", metavar="TEXT", help="a text that ends the output (repeatable)")
    add("--ignore-eos", action="store_true", help="go on after the model's end-of-sequence token")
    what = "any other option of client.trace: top_p=0.9, deadline=30, priority=1 (repeatable)"
    add("--sampling", type=named_value, action="append", default=[], metavar="NAME=VALUE", help=what)


def specs_of(options: argparse.Namespace) -> list[Spec]:
    """The interventions of the options: edits first, in their order, then reads, then those in JSON."""
    return [*options.steer, *options.probe, *options.lens, *(spec for specs in options.declare for spec in specs)]


def bound_block(options: argparse.Namespace) -> Intervention | None:
    """The block of the options with its variables.

    Raises:
        UsageError: there is no such block, or it has no such variable.
    """
    variables = values_by_name(options.set)
    if options.block is None:
        if variables:
            raise UsageError("--set binds a variable of a block: give --block FILE.py::NAME")
        return None
    try:
        block = load_block(options.block)
    except (OSError, ValueError) as error:
        raise UsageError(f"--block: {error}") from None
    try:
        return block(**variables) if variables else block
    except TypeError as error:
        raise UsageError(f"--set: {error}") from None


def request_of(options: argparse.Namespace, *, chats: bool) -> Request:
    """The request of the options of `add_request`. `chats` is whether it is one of a chat.

    Raises:
        UsageError: an option is wrong.
    """
    block = bound_block(options)
    found = declared(specs_of(options), values_by_name(options.live))
    conversation = conversation_of(options, chats=chats)
    return Request(block, found.interventions, found.options, found.live, sampling_of(options), conversation)


def sampling_of(options: argparse.Namespace) -> dict[str, Any]:
    """The sampling params that the options give."""
    sampling: dict[str, Any] = {}
    for name in _SAMPLING:
        if getattr(options, name) is not None:
            sampling[name] = getattr(options, name)
    if options.ignore_eos:
        sampling["ignore_eos"] = True
    return sampling | values_by_name(options.sampling)


def prompt_of(text: str) -> str:
    """The prompt: the argument, or standard input if the argument is `-`."""
    return sys.stdin.read() if text == "-" else text
