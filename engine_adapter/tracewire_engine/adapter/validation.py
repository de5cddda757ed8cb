"""Checks whether a submission can run on this engine, without asking the engine or Redis.

A refusal names the field at fault. Long submissions are examined on a thread, or in a process of its own, while
the event loop serves the other traces.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from types import MappingProxyType
from typing import Any, TypeAlias, TypeVar

import anyio
import msgspec

from tracewire_bus.domain.code_identity import code_hash
from tracewire_bus.domain.identity import Key
from tracewire_bus.domain.limit_table import DEFAULTS, Limits
from tracewire_bus.domain.limits import MAX_LIVE_VALUES, LimitExceeded, check_size, check_submission, measure
from tracewire_bus.domain.schedule_checks import ScheduleError, check_plan
from tracewire_bus.domain.tree import ModuleTree
from tracewire_bus.wire.codec import NewerSchema, check_schema
from tracewire_bus.wire.live_values import LiveError, unpack_live
from tracewire_bus.wire.messages import REQUEST_SCHEMA, Block, EngineInfo, Failure, Submission
from tracewire_bus.wire.packing import unpack

from .block_sources import Sources
from .code_policy import CodePolicy
from .engine_api import Rejection
from .known_interventions import KnownInterventions
from .placing import Placer

__all__ = ["Blocks", "Validated", "Validator", "refusal"]

T = TypeVar("T")

#: Parts of a submission up to this many bytes are not measured.
_SHORT = 8 * 1024
#: Submissions up to this many bytes and values are checked on the event loop. An array of any size is one value.
_LIGHT_BYTES, _LIGHT_VALUES = 1024 * 1024, 2048
#: How many placed interventions are remembered, and of how many bytes at most.
_REMEMBERED, _LONG = 64, 128 * 1024
_NOTHING: Mapping[Any, Any] = MappingProxyType({})

Blocks: TypeAlias = list[bytes | None]
"""The encoded blocks of a submission's invokes."""


class Validated(msgspec.Struct):
    """A submission that can run: the encoded block of each invoke, and its encoded declared interventions, if any.

    `code` has the hash of each invoke's code, `""` for an invoke without a block.
    """

    submission: Submission
    blocks: Blocks
    declared: bytes | None
    code: list[str]


class Validator:
    """Checks submissions against one engine's model."""

    def __init__(
        self,
        info: EngineInfo,
        tree: ModuleTree,
        code: CodePolicy | None = None,
        limits: Limits = DEFAULTS,
        placer: Placer | None = None,
    ) -> None:
        self._placer = placer or Placer(info, tree)
        self._info = info
        self._limits = limits
        self._tree = tree
        self._code = code or CodePolicy()
        #: Are called with each block whose code may run, or is refused, and the hash of the code.
        self.keep: Callable[[str, Block], None] = lambda hash, block: None
        self.keep_refused = self.keep
        self._sources = Sources(info, tree)
        #: One thread at a time for submissions that take long to examine: several would only wait for each other.
        self._looking = anyio.CapacityLimiter(1)
        self._encoder = msgspec.msgpack.Encoder()
        self._known = KnownInterventions()
        #: Encoded interventions with their locations, by the interventions and live parameters as they were sent.
        self._placed: dict[bytes, bytes] = {}

    async def validate(self, trace: str, schema: str, data: bytes, key: Key | None = None) -> Validated:
        """Decode and check a submission.

        Args:
            trace: the trace id of its queue entry.
            schema: the version of the schema in which it is encoded.
            data: the encoded submission.
            key: the key that has signed it.

        Raises:
            Rejection, LimitExceeded, NewerSchema: it cannot run here; see `refusal`.
            ValueError: it cannot be decoded, or is of another trace.
        """
        check_schema(schema, REQUEST_SCHEMA)
        submission, interventions, light = await self._decode(data)
        if submission.trace != trace:
            raise ValueError(f"its entry names trace {trace[:300]!r}, its body {submission.trace[:300]!r}")
        blocks, code = await self._check(submission, key)
        return Validated(submission, blocks, await self._look(light, self._place, submission, interventions), code)

    async def _look(self, light: bool, look: Callable[..., T], *arguments: Any) -> T:
        """Call `look(*arguments)`: at once if `light`, else on a thread, one call at a time.

        Meanwhile the event loop serves other traces.
        """
        if light:
            return look(*arguments)
        return await anyio.to_thread.run_sync(look, *arguments, limiter=self._looking)

    async def _decode(self, data: bytes) -> tuple[Submission, bytes, bool]:
        """Decode a submission, and check its size.

        Also returns its encoded interventions, and whether it is small enough for the event loop.

        Raises:
            LimitExceeded: it is too large.
            ValueError: it cannot be decoded.
        """
        check_size(len(data), self._limits)
        light = len(data) <= _LIGHT_BYTES
        light &= await self._measure([("submission", data)])
        submission, interventions = self._known.decode(data)
        check_submission(submission, self._limits)
        measure(submission.live, "live", MAX_LIVE_VALUES)
        packed = [("live", submission.live), ("shared", submission.shared)]
        for block in (submission.block, *(invoke.block for invoke in submission.invokes)):
            packed += [("block.variables", block.variables)] if block is not None else []
        packed += [("prompt.multi_modal_data", invoke.media) for invoke in submission.invokes]
        light &= await self._measure(packed)
        return submission, interventions, light

    async def _measure(self, parts: Sequence[tuple[str, bytes]]) -> bool:
        """Check the sizes of parts of a submission. Returns whether they have few values in all.

        Raises:
            LimitExceeded: a part has too many values.
        """
        # A shorter part holds at most as many values as bytes.
        long = [(field, data) for field, data in parts if len(data) > _SHORT]
        with suppress(LimitExceeded):
            left = _LIGHT_VALUES
            for field, data in long:
                left -= measure(data, field, left)
            return True
        await self._look(False, lambda: [measure(data, field) for field, data in long])
        return False

    async def _check(self, submission: Submission, key: Key | None) -> tuple[Blocks, list[str]]:
        """Check a submission without the engine. Returns the encoded block, and the hash of the code, of each invoke.

        Raises:
            Rejection: naming the field.
        """
        if submission.model != self._info.model:
            raise Rejection("model", f"this engine serves {self._info.model!r}, not {submission.model!r}")
        if not submission.invokes:
            raise Rejection("prompt", "a trace takes at least one prompt")
        try:
            unpack_live(submission.live)
        except LiveError as error:
            raise Rejection(f"live.{error.name}" if error.name else "live", error.message) from error
        try:
            check_plan(submission, self._info.vocabulary)
        except ScheduleError as error:
            raise Rejection(error.field, error.message) from error
        try:
            shared = unpack(submission.shared)
        except ValueError as error:
            raise Rejection("shared", f"the shared values could not be decoded: {error}") from error
        if not isinstance(shared, dict):
            raise Rejection("shared", "expected a dict of values by name")
        encoded: dict[int, bytes] = {}
        hashes: dict[int, str] = {}
        for index, block in enumerate([submission.block, *(invoke.block for invoke in submission.invokes)]):
            if block is not None:
                hashes[index] = await self.check_block(block, shared, key)
                encoded[index] = self._encoder.encode(block)
        numbers = range(1, len(submission.invokes) + 1)
        return (
            [encoded.get(number, encoded.get(0)) for number in numbers],
            [hashes.get(number, hashes.get(0, "")) for number in numbers] if hashes else [],
        )

    async def check_block(self, block: Block, shared: Mapping[Any, Any] = _NOTHING, key: Key | None = None) -> str:
        """Refuse a block that cannot run here. Returns the hash of its code.

        Args:
            block: the block.
            shared: the shared values of its trace.
            key: the key that has signed it.

        Raises:
            Rejection: the block cannot run.
        """
        may_ship = key is not None and key.may("code")
        try:
            code = await self._look(len(block.variables) <= _LIGHT_BYTES, self._code.check, block, may_ship)
        except Rejection as rejection:
            if rejection.failure.type == "CodeRefused" and self._code.code != "none":
                # An operator may want to see it, and to approve it.
                self.keep_refused(code_hash(block), block)
            raise
        self.keep(code, block)
        self._code.check_imports(block.name, block.modules.values())
        self._code.check_imports(block.name, (module for module, _ in block.imports.values()))
        await self._check_source(block)
        for name, path in block.paths.items():
            if not self._tree.knows(path):
                near = self._tree.nearest(path)
                hint = f"; the nearest that does is {near!r}" if near else ""
                message = f"{name!r} stands for the module {path!r}, which does not exist in {self._info.model}{hint}"
                raise Rejection("block", message, type="UnknownModulePath")
        missing = sorted(set(block.shared.values()) - shared.keys())
        if missing:
            raise Rejection("shared", f"{block.name} uses shared values that the trace does not have: {missing}")
        return code

    async def check_edit(self, block: Block, key: Key | None = None) -> str:
        """Refuse the block of an edit that cannot run here. Returns the hash of its code. `key` has signed the edit.

        Raises:
            Rejection: the block cannot run.
        """
        return await self.check_block(block, key=key)

    def _place(self, submission: Submission, encoded: bytes) -> bytes | None:
        """The declared interventions of a submission with their locations, encoded for the workers.

        Args:
            submission: with interventions or without.
            encoded: its interventions, as they were sent.

        Raises:
            Rejection: one of them cannot run on this model.
        """
        if not submission.interventions:
            return None
        # As with blocks, services send the same ones again and again.
        key = encoded + submission.live
        placed = self._placed.get(key)
        if placed is None:
            live = {name: value.value for name, value in unpack_live(submission.live).items()}
            placed = self._encoder.encode(self._placer.place(submission.interventions, live))
            if len(key) <= _LONG:
                if len(self._placed) >= _REMEMBERED:
                    self._placed.clear()
                self._placed[key] = placed
        return placed

    async def _check_source(self, block: Block) -> None:
        models = (block.parameters[0], *(name for name, path in block.paths.items() if not path))
        for name, source, first_line, names in [
            (block.name, block.source, block.first_line, models),
            *((helper.name, helper.source, helper.first_line, ()) for helper in block.helpers),
        ]:
            error, problem, imports = await self._sources.examine(source, names)
            if error is not None:
                kind, number, message = error
                line = None if number is None else number + first_line - 1
                where = "" if line is None else f" at line {line} of {block.filename}"
                raise Rejection("block", f"{name} does not compile{where}: {message}", type=kind, line=line)
            self._code.check_imports(name, imports)
            if problem is not None:
                near = f"; the nearest that does is {problem.nearest!r}" if problem.nearest else ""
                raise Rejection(
                    "block",
                    problem.reason or f"module path {problem.path!r} does not exist in {self._info.model}{near}",
                    type="UntappedLocation" if problem.reason else "UnknownModulePath",
                    line=problem.line + first_line - 1,
                )


def refusal(error: Exception) -> Failure:
    """The failure that the submitter of a trace gets for an exception of `validate`."""
    if isinstance(error, Rejection):
        return error.failure
    if isinstance(error, LimitExceeded):
        return Failure(type="TraceRejected", message=error.message, field=error.field)
    if isinstance(error, NewerSchema):
        return Failure(type="TraceRejected", message=str(error), field="schema")
    message = f"the submission could not be decoded: {str(error)[:1000]}"
    return Failure(type="TraceRejected", message=message, field="submission")
