"""Recordings and forks of any trace, as the client has them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Literal

from tracewire.traces.control import check_trace_id
from tracewire.traces.model import Model, model_name
from tracewire.traces.recorder.fan import Fan, forked
from tracewire.traces.recorder.recording import Recording, record
from tracewire.traces.recorder.replaying import Replay, replay
from tracewire.traces.session import Session
from tracewire.traces.trace import Trace

from .checks import check_seconds, shown

__all__ = ["RecorderMethods"]


class RecorderMethods:
    """The methods of `Client` that record a trace, run a recording again, and fork a trace."""

    _session: Session

    async def record(
        self, trace_id: str, *, arrays: Literal["inside", "reference"] = "inside", until_now: bool = False
    ) -> Recording:
        """Record a trace: events, steering with times and authors, submission, versions. Waits for the trace's end.

            recording = await client.record(trace_id)
            recording.save("trace.twrec")

        With `until_now`, the recording ends with the last event at the time of the call. Large arrays are downloaded,
        or with `arrays="reference"` left out. Redis keeps the submission until the trace ends: a recording that began
        later is shown, but not run again (`Client.replay`), unless `Trace.record` made it.

        Raises:
            UnknownTrace: no such trace was submitted, or it has expired.
            ValueMissing: an array has expired.
            ValueError: `arrays` is another word.
        """
        check_trace_id(trace_id)
        await _known(self._session, trace_id)
        return await record(self._session, trace_id, arrays=arrays, until_now=until_now)

    async def replay(self, recording: Recording, *, model: Model | str | None = None, tolerance: float = 0.0) -> Replay:
        """Run a recording again, by the same model or `model`, and compare: the first token and the first values that
        differ, and by how much.

        The second run has the recorded prompts' tokens, the seeds that the engine used, and each change of live
        parameters at the token at which it was recorded. It is a trace of this client. Numbers that differ by at most
        `tolerance` are the same. Pauses are not repeated.

        Raises:
            InvalidRecording: the recording lacks the submission.
            UnknownModel: no live engine serves the model.
            TraceRejected: the engine refuses the trace.
            ValueMissing: the recording has only references to its large arrays.
        """
        if not isinstance(recording, Recording):
            raise TypeError(f"recording: expected one of Recording.open or client.record, got {shown(recording)}")
        check_seconds("tolerance", tolerance)
        make, name = partial(Trace, self._session), None if model is None else model_name(model)
        return await replay(make, self._session.name, recording, name, float(tolerance))

    async def fork(
        self,
        trace: str | Recording,
        live: Sequence[Mapping[str, Any]],
        *,
        at: int | None = None,
        invoke: int = 0,
        choice: int = 0,
        logprobs: int | None = None,
    ) -> Fan:
        """Fork a trace at the token `at`: siblings that are the same before it, each with other live values from it on.

            fan = await client.fork(trace_id, [{"alpha": 0.0}, {"alpha": 8.0}], at=20)
            async with fan:
                async for step in fan: ...

        `trace` runs, or is a recording of one. By default `at` is the trace's next token. Each sibling is a trace of
        its own: it computes the recorded tokens again with the recorded live values, so that its keys and values are
        those of the trace, and then goes on. With `logprobs`, steps have the distances of the siblings' distributions.

        Raises:
            UnknownTrace: no such trace was submitted, or it has expired.
            InvalidRecording: the trace has ended, and its submission is not kept; no engine had accepted it.
            ValueError: the trace has no such token, prompt or choice, or `live` is no list of dicts.
            TraceRejected: a live parameter was not declared, or has another form.
        """
        if not isinstance(trace, Recording):
            check_trace_id(trace)
            await _known(self._session, trace)
            trace = await record(self._session, trace, until_now=True)
        make, name = partial(Trace, self._session), self._session.name
        return forked(make, name, trace, live, at=at, invoke=invoke, choice=choice, logprobs=logprobs)


async def _known(session: Session, trace_id: str) -> None:
    from tracewire.error_mapping import bus_errors
    from tracewire.errors import UnknownTrace

    bus = session.open_bus()
    with bus_errors():
        known, _ = await bus.records.left(trace_id)
        if not known and not await bus.exists(trace_id):
            raise UnknownTrace(trace_id)
