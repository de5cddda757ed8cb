"""The manifest of a trace, gathered from the finish records of its requests for its final event."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence

import msgspec

from tracewire_bus.wire.messages import SHARED_INVOKE, ChatMessage, ColumnsManifest, Failure, Manifest, Status, Usage
from tracewire_engine.protocol.messages import FinishRecord

from .engine_api import Rejection
from .pending import PendingChoice
from .running_request import RunningRequest
from .trace_stream import UNNUMBERED, RawFinal

__all__ = ["SAVES_LOST", "UNREPORTED", "BlocksLost", "TraceEnd"]

#: Why a trace runs again whose saves did not come.
SAVES_LOST = "what its block saved was lost on its way"
UNREPORTED = Failure(type="EngineError", message="the workers did not report the request's end")
_NO_DELTAS = msgspec.Raw(msgspec.msgpack.encode([]))


class BlocksLost(Exception):
    """The process of a trace's blocks was lost, perhaps by the blocks of another trace; or what they had saved."""


class TraceEnd:
    """The fields of a final event.

    Args:
        error: the error with which vLLM ended the trace, if it did.
        restarts: whether the trace can run again.
    """

    def __init__(self, error: Failure | None, restarts: Callable[[], bool] = lambda: False) -> None:
        self._restarts = restarts
        self.deltas: list[tuple[int, int, msgspec.Raw]] = []
        self.manifest: list[Manifest] = []
        self.columns: list[ColumnsManifest] = []
        self.save_errors: dict[str, str] = {}
        self.warnings: list[str] = []
        self.messages: list[tuple[int, int, ChatMessage]] = []
        self.error = error
        #: The workers' reports of choices that ended, each with the number of its prompt.
        self.finished: list[tuple[int, FinishRecord]] = []
        self._stopped = False
        self._status: Status | None = None

    @property
    def status(self) -> Status:
        """How the trace ends."""
        return self._status or ("failed" if self.error else "stopped" if self._stopped else "finished")

    @status.setter
    def status(self, status: Status) -> None:
        self._status = status

    def add(self, invoke: int, index: int, choice: PendingChoice, whole: bool, tokens: int) -> None:
        """Add the workers' report of the end of a choice, of which `tokens` tokens are published.

        If the report is not `whole`, the manifest would not match the published saves, and the trace fails.

        Raises:
            BlocksLost: the trace shall run again.
        """
        record = choice.finish
        if record is not None and record.restart and record.error is not None and self._restarts():
            raise BlocksLost(record.error.message)
        if not whole and self.error is None and choice.lacks_saves and self._restarts():
            raise BlocksLost(SAVES_LOST)
        if record is None or not whole:
            self.error = self.error or (record.error if record is not None else None) or UNREPORTED
            return
        self.finished.append((invoke, record))
        # The reports of steps whose tokens no output had, because vLLM dropped the output.
        unpublished = choice.take_rest(0)
        self.deltas.extend((invoke, index, raw) for raw in (*unpublished, record.deltas) if raw != _NO_DELTAS)
        choice.digests.complete(record.deltas, record.manifest)
        for entry in [*record.manifest, *choice.reads.manifest(index, tokens)]:
            entry.invoke = invoke
            self.manifest.append(entry)
        columns = choice.reads.columns_manifest(invoke, index, tokens)
        if columns is not None:
            self.columns.append(columns)
        self.save_errors.update({f"{invoke}.{index}.{name}": reason for name, reason in record.save_errors.items()})
        self.save_errors.update(
            {
                f"{invoke}.{index}.{edit}": f"the edit raised {failure.type}: {failure.message}"
                for edit, failure in record.edit_errors.items()
            }
        )
        # Several choices and prompts can give the same warning.
        self.warnings = list(dict.fromkeys([*self.warnings, *record.warnings]))
        self.error = self.error or record.error
        self._stopped = self._stopped or record.stopped or choice.reads.stopped is not None

    def add_shared(self, record: FinishRecord | None) -> None:
        """Add the workers' report of the end of the trace's shared values, if there is one.

        Raises:
            BlocksLost: the trace shall run again.
        """
        if record is None:
            return
        if record.error is UNREPORTED and self.error is None and self._restarts():
            raise BlocksLost(SAVES_LOST)
        self.error = self.error or record.error
        if record.deltas != _NO_DELTAS:
            self.deltas.append((SHARED_INVOKE, 0, record.deltas))
        self.manifest.extend(msgspec.structs.replace(entry, invoke=SHARED_INVOKE) for entry in record.manifest)
        self.save_errors.update({f"{SHARED_INVOKE}.0.{name}": reason for name, reason in record.save_errors.items()})

    def add_messages(self, requests: Iterable[RunningRequest]) -> None:
        """Add the whole messages of the requests' choices. If vLLM's parser fails on one, the trace fails."""
        try:
            for request in requests:
                self.messages += request.messages()
        except Rejection as refused:
            self.error = self.error or refused.failure

    def final(self, usage: Usage, requests: Sequence[RunningRequest]) -> RawFinal:
        """The final event of a trace with these requests, not numbered yet."""
        self.add_messages(requests)
        prompt_logprobs = [request.outputs.prompt_logprobs for request in requests]
        return RawFinal(
            **UNNUMBERED,
            status=self.status,
            error=self.error,
            usage=usage,
            deltas=self.deltas,
            manifest=self.manifest,
            save_errors=self.save_errors,
            time=time.time(),
            prompt_logprobs=prompt_logprobs if any(prompt_logprobs) else [],
            warnings=self.warnings,
            columns=self.columns,
            messages=self.messages,
        )
