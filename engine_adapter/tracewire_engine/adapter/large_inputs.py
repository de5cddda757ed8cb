"""Fetches the large variables and images of a submission from the bus into files.

Blobs of a client do not pass through the engine's queues. The adapter writes each to a file in the link's folder, chunk
by chunk, and the workers map the file. A file is named by the digest of its array, which is checked. So traces with the
same variable share its file, and the last of them removes it. A trace shares a file only after the adapter has fetched
the trace's own blob and compared it with the digest: who knows no more than a digest gets no other trace's value.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import anyio

from tracewire_bus.domain.limit_table import DEFAULTS, LimitExceeded
from tracewire_bus.store.blobs import BlobMissing, Blobs
from tracewire_bus.transport.errors import BusUnavailable
from tracewire_bus.wire.messages import MAX_MEDIA_BYTES, NO_MEDIA, Submission
from tracewire_bus.wire.packing import unpack
from tracewire_bus.wire.refs import ArrayRef
from tracewire_engine.protocol.input_files import input_path

from .engine_api import Carrier, Rejection
from .shared_file import SharedFile, written_whole

__all__ = ["Inputs"]


class _File(SharedFile):
    """The file of one variable or image."""

    def __init__(self, path: Path, carrier: Carrier | None) -> None:
        super().__init__(path, carrier)
        self.whole = False


class Inputs:
    """The files of all running traces, in `folder`. A `carrier` also sends them to workers on other machines.

    A trace's large variables take at most `most_bytes` bytes.
    """

    def __init__(
        self,
        blobs: Blobs,
        folder: Path,
        carrier: Carrier | None = None,
        most_bytes: int = DEFAULTS.variable_bytes,
    ) -> None:
        self._blobs = blobs
        self._most_bytes = most_bytes
        self._folder = folder
        self._carrier = carrier
        self._files: dict[Path, _File] = {}

    @asynccontextmanager
    async def of(self, submission: Submission) -> AsyncIterator[None]:
        """Keep the large variables and images of `submission` in files while the context lasts.

        Raises:
            Rejection: one cannot be fetched; names its field.
            LimitExceeded: they are larger together than a trace's may be.
            BusUnavailable: Redis does not answer.
        """
        references = list(_references(submission))
        if (size := sum(ref.nbytes for _, ref in references)) > self._most_bytes:
            message = f"a trace's large variables have at most {self._most_bytes} bytes, got {size}"
            raise LimitExceeded("variables", message, "variable_bytes")
        async with AsyncExitStack() as held:
            for field, ref in references:
                await held.enter_async_context(self._file(submission.trace, field, ref))
            for field, ref in _images(submission):
                # The adapter itself reads images, so workers do not need them.
                await held.enter_async_context(self._file(submission.trace, field, ref, travels=False))
            yield

    @asynccontextmanager
    async def _file(self, trace: str, field: str, ref: ArrayRef, *, travels: bool = True) -> AsyncIterator[None]:
        path = input_path(self._folder, ref)
        file = self._files.setdefault(path, _File(path, self._carrier))
        file.users += 1
        try:
            async with file.turn:
                if file.whole:
                    await self._compare(trace, field, ref)
                else:
                    await self._fetch(trace, field, ref, path)
                    file.whole = True
                if travels:
                    await file.carry()
            yield
        finally:
            file.users -= 1
            if not file.users:
                del self._files[path]
                file.unlink()
                await file.drop()

    async def _compare(self, trace: str, field: str, ref: ArrayRef) -> None:
        """Check that the trace has the value to which it refers.

        Raises:
            Rejection: its blob is missing, or has another digest.
        """
        try:
            async for _ in self._blobs.chunks(trace, ref):
                pass
        except BlobMissing as error:
            raise Rejection(field, f"its value, {ref!r}, cannot be fetched: {error}") from error

    async def _fetch(self, trace: str, field: str, ref: ArrayRef, path: Path) -> None:
        try:
            with written_whole(path) as out:
                async for chunk in self._blobs.chunks(trace, ref):
                    await anyio.to_thread.run_sync(out.write, chunk)
        except BlobMissing as error:
            raise Rejection(field, f"its value, {ref!r}, cannot be fetched: {error}") from error
        except BusUnavailable:
            # An OSError, too, but none of this engine's disk.
            raise
        except OSError as error:
            raise Rejection(field, f"this engine cannot store its value, {ref!r}: {error}") from error


def _references(submission: Submission) -> Iterator[tuple[str, ArrayRef]]:
    """Every reference in a submission's variables, with its field. The workers report malformed values."""
    for block in (submission.block, *(invoke.block for invoke in submission.invokes)):
        try:
            values = unpack(block.variables) if block is not None else {}
        except ValueError:
            continue
        for name, value in values.items() if isinstance(values, dict) else ():
            for ref in _inside(value):
                yield f"variables.{name}", ref


def _images(submission: Submission) -> Iterator[tuple[str, ArrayRef]]:
    """Every reference in the media of a submission's prompts, with its field.

    Raises:
        Rejection: a prompt's images are larger than `MAX_MEDIA_BYTES`.
    """
    for index, invoke in enumerate(submission.invokes):
        if invoke.media == NO_MEDIA:
            continue
        try:
            media = unpack(invoke.media)
        except ValueError:
            continue
        where = f"invokes[{index}]." if len(submission.invokes) > 1 else ""
        field, refs = f"{where}prompt.multi_modal_data", list(_inside(media))
        size = sum(ref.nbytes for ref in refs)
        if size > MAX_MEDIA_BYTES:
            raise Rejection(field, f"a prompt's images have at most {MAX_MEDIA_BYTES} bytes, got {size}")
        for ref in refs:
            yield field, ref


def _inside(value: Any) -> Iterator[ArrayRef]:
    if isinstance(value, ArrayRef):
        yield value
    elif isinstance(value, list | tuple | dict):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _inside(item)
