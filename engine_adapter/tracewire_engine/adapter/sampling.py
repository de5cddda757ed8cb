"""Converts the sampling params of a submission to vLLM's, with errors in the caller's terms."""

from __future__ import annotations

import asyncio
import dataclasses
import difflib
import math
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from hashlib import blake2b
from typing import Any

import anyio
import msgspec
from vllm import SamplingParams
from vllm.sampling_params import StructuredOutputsParams

from tracewire_bus.wire.messages import Invoke

from .engine_api import Rejection

__all__ = [
    "CONSTRAINT_S",
    "FIELDS",
    "RESERVED",
    "Constrained",
    "ConstraintChecks",
    "pinned_seed",
    "resolved",
    "sampling_params",
]

#: The names of vLLM's sampling params.
FIELDS = [name for name in SamplingParams.__struct_fields__ if not name.startswith("_")]

#: The fields that describe vLLM's structured outputs.
_CONSTRAINTS = [one.name for one in dataclasses.fields(StructuredOutputsParams) if one.init]

#: How long vLLM may look at a constraint, in seconds, and how many constraints it looks at at once.
CONSTRAINT_S, _CONSTRAINTS_AT_ONCE = 10.0, 4
#: Sampling params that are the engine's own business.
RESERVED = frozenset(
    {
        *("extra_args", "flat_logprobs", "output_kind", "output_text_buffer_length", "skip_clone"),
        *("skip_reading_prefix_cache", "stream_interval"),
    }
)


class Constrained(SamplingParams):
    """Sampling params with a constraint. vLLM would check it on the event loop; `ConstraintChecks` have done so."""

    def verify(self, *arguments: Any, **named: Any) -> None:
        params: Any = self
        constraint, params.structured_outputs = params.structured_outputs, None
        try:
            super().verify(*arguments, **named)
        finally:
            params.structured_outputs = constraint


class ConstraintChecks:
    """Has vLLM check grammars, regular expressions and schemas on threads, for an `AsyncLLM`."""

    def __init__(self, llm: Any) -> None:
        self._llm = llm
        # A thread cannot be ended: hostile constraints keep these busy, and no more.
        self._threads = ThreadPoolExecutor(_CONSTRAINTS_AT_ONCE, "constraints")

    async def check(self, params: SamplingParams) -> None:
        """Have vLLM check the constraint of a request.

        Raises:
            VLLMValidationError: vLLM refuses it.
            Rejection: vLLM takes too long.
        """
        config, tokenizer = self._llm.vllm_config, self._llm.input_processor.tokenizer
        configs = config.model_config, config.speculative_config, config.structured_outputs_config
        verify = partial(SamplingParams.verify, params, *configs, tokenizer)
        try:
            with anyio.fail_after(CONSTRAINT_S):
                await asyncio.get_running_loop().run_in_executor(self._threads, verify)
        except TimeoutError as error:
            why = f"vLLM took more than {CONSTRAINT_S:g} s to look at the constraint"
            raise Rejection("sampling.structured_outputs", why) from error


def sampling_params(invoke: Invoke, where: str) -> SamplingParams:
    """The sampling params of an invoke, whose fields are named with `where` before them.

    Raises:
        Rejection: vLLM does not take them.
    """
    given = dict(invoke.sampling)
    for name, value in given.items():
        field = f"{where}sampling.{name}"
        if name in RESERVED:
            raise Rejection(field, f"{name} is the engine's own to set")
        if name not in FIELDS:
            raise Rejection(field, f"{name!r} is not one of vLLM's sampling params{_did_you_mean(name, FIELDS)}")
        # vLLM compares, which no NaN fails.
        numbers = value.values() if isinstance(value, dict) else [value]
        if any(isinstance(number, float) and math.isnan(number) for number in numbers):
            raise Rejection(field, "expected a number, got NaN")
    constraint = given.get("structured_outputs")
    for name in constraint if isinstance(constraint, dict) else ():
        if name not in _CONSTRAINTS:
            field = f"{where}sampling.structured_outputs.{name}"
            hint = _did_you_mean(str(name), _CONSTRAINTS)
            raise Rejection(field, f"{name!r} is not one of vLLM's constraints{hint}")
    try:
        return msgspec.convert(given, SamplingParams if constraint is None else Constrained)
    except msgspec.ValidationError as error:
        # "... - at `$.temperature`"
        named = re.search(r"\$\.(\w+)", str(error))
        message = str(error).replace("`$.", "`sampling.")
        raise Rejection(f"{where}sampling.{named[1] if named else '?'}", message) from error
    except Exception as error:  # any error of vLLM here is about the caller's params
        raise Rejection(f"{where}sampling.{_culprit(error, given)}", str(error)) from error


def _did_you_mean(name: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(name, known, 1)
    return f"; did you mean {near[0]!r}?" if near else ""


def _culprit(error: Exception, given: dict[str, Any]) -> str:
    """Which of the given params an error of vLLM's is about: the one it names, else one that its text names."""
    named = getattr(error, "parameter", None)
    if named in given:
        return str(named)
    text = str(error)
    return next((name for name in sorted(given, key=len, reverse=True) if name in text), "?")


def resolved(params: SamplingParams) -> dict[str, Any]:
    """The sampling params as vLLM resolved them: every field with a plain value."""
    found: dict[str, Any] = {}
    for name in SamplingParams.__struct_fields__:
        value = getattr(params, name)
        if not name.startswith("_") and name not in RESERVED and isinstance(value, (bool, int, float, str, list)):
            found[name] = value
    return found


def pinned_seed(trace: str, invoke: int) -> int:
    """The seed of an invoke without one. It is the same in each attempt, so a later attempt samples the same tokens."""
    return int.from_bytes(blake2b(f"{trace}/{invoke}".encode("utf-8", "surrogatepass"), digest_size=8).digest()) >> 1
