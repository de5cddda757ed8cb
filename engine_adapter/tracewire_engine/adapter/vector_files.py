"""Fetches the vectors of declared interventions from the bus into files, and keeps them for further traces.

A submission refers to its large vectors by digest (`tracewire_bus.store.vectors`). The adapter fetches a vector that it
does not have, compares it with the digest, checks that its numbers are finite, and writes it to a file in the link's
folder. The workers read the file when a request first needs the vector. So what passes through vLLM's queues has only
the reference. The adapter keeps files within a budget, and removes none that a running trace uses.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio.to_thread

from tracewire_bus.domain.intervention_checks import DeclarationError, array_fields, check_content
from tracewire_bus.store.vectors import MISSING, VectorMissing, Vectors
from tracewire_bus.transport.errors import BusUnavailable
from tracewire_bus.wire.arrays import raw_bytes
from tracewire_bus.wire.messages import Declared
from tracewire_bus.wire.refs import ArrayRef
from tracewire_engine.protocol.input_files import vector_path

from .engine_api import Carrier, Rejection
from .shared_file import SharedFile, written_whole

if TYPE_CHECKING:
    import numpy as np

__all__ = ["VectorFiles"]

#: Bytes of files that are kept, those in use included.
KEPT_BYTES = 256 * 1024 * 1024


class _File(SharedFile):
    """The file of one vector."""

    def __init__(self, ref: ArrayRef, path: Path, carrier: Carrier | None) -> None:
        super().__init__(path, carrier)
        #: What the file has, once it was checked: a reference that somebody made up may have another dtype or shape.
        self.content: tuple[str, tuple[int, ...]] | None = None
        self.nbytes = ref.nbytes
        self.name = ref.blob


class VectorFiles:
    """The files of vectors in `folder`. A `carrier` also sends them to workers on other machines."""

    def __init__(self, vectors: Vectors, folder: Path, carrier: Carrier | None = None) -> None:
        self._vectors = vectors
        self._folder = folder
        self._carrier = carrier
        self._files: dict[str, _File] = {}
        #: Those that no trace uses, the least recently used first.
        self._unused: OrderedDict[str, _File] = OrderedDict()
        #: The bytes of all whole files.
        self._bytes = 0

    @asynccontextmanager
    async def of(self, interventions: Sequence[Declared]) -> AsyncIterator[None]:
        """Keep the vectors to which `interventions` refer in files while the context lasts.

        Raises:
            Rejection: one cannot be fetched, or is not of finite numbers; names its field.
            BusUnavailable: Redis does not answer.
        """
        held: list[_File] = []
        seen: set[tuple[str, str, tuple[int, ...]]] = set()
        try:
            for index, name, ref in array_fields(interventions):
                # Several interventions may have the same vector.
                if type(ref) is not ArrayRef or (content := (ref.blob, ref.dtype, ref.shape)) in seen:
                    continue
                seen.add(content)
                file = self._hold(ref)
                held.append(file)
                if file.content != (ref.dtype, ref.shape) or not file.is_everywhere:
                    await self._ready(file, f"interventions[{index}].{name}", ref)
            yield
        finally:
            await self._release(held)

    def _hold(self, ref: ArrayRef) -> _File:
        file = self._files.get(ref.blob)
        if file is None:
            file = self._files[ref.blob] = _File(ref, vector_path(self._folder, ref), self._carrier)
        file.users += 1
        self._unused.pop(ref.blob, None)
        return file

    async def _release(self, held: Sequence[_File]) -> None:
        """End a use of each file. Remove those that were not fetched, and the least recently used beyond the budget."""
        removed: list[_File] = []
        for file in held:
            file.users -= 1
            if not file.users:
                if file.content is None:
                    removed.append(file)
                else:
                    self._unused[file.name] = file
        while self._bytes > KEPT_BYTES and self._unused:
            _, oldest = self._unused.popitem(last=False)
            self._bytes -= oldest.nbytes
            removed.append(oldest)
        for file in removed:
            del self._files[file.name]
            file.unlink()
        for file in removed:
            # Another trace may have fetched the vector again since, for the workers to keep it under the same name.
            if file.name not in self._files:
                await file.drop()

    async def _ready(self, file: _File, field: str, ref: ArrayRef) -> None:
        async with file.turn:
            if file.content is None:
                await self._fetch(file, field, ref)
                file.content, file.nbytes = (ref.dtype, ref.shape), ref.nbytes
                self._bytes += ref.nbytes
            elif file.content != (ref.dtype, ref.shape):
                raise _missing(field, ref, "its content does not match the reference")
            await file.carry()

    async def _fetch(self, file: _File, field: str, ref: ArrayRef) -> None:
        try:
            await anyio.to_thread.run_sync(_write, file.path, field, await self._vectors.fetch(ref))
        except VectorMissing as error:
            raise _missing(field, ref, str(error)) from error
        except DeclarationError as error:
            raise Rejection(error.field, error.message) from error
        except BusUnavailable:
            # An OSError, too, but none of this engine's disk.
            raise
        except OSError as error:
            raise Rejection(field, f"this engine cannot store its value, {ref!r}: {error}") from error


def _missing(field: str, ref: ArrayRef, why: str) -> Rejection:
    advice = "submit the trace again, and the client sends the array again"
    return Rejection(field, f"its value, {ref!r}, cannot be fetched: {why}; {advice}", type=MISSING)


def _write(path: Path, field: str, array: np.ndarray[Any, Any]) -> None:
    """Check the content of an array, and write it.

    Raises:
        DeclarationError: it has something else than finite numbers.
        OSError: it cannot be written.
    """
    check_content(array, field)
    with written_whole(path) as out:
        out.write(raw_bytes(array))
