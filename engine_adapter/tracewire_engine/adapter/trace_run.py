"""One attempt of one trace: from its validated invokes to its final event.

An output is published when vLLM has put out its tokens and the workers have reported what was saved in the steps that
sampled them (`pending.py`).

Appending waits for Redis. While it does, vLLM merges further outputs of the same request, so that a bus that lags makes
fewer, larger entries, and one that does not gets each output at once.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import anyio
import msgspec

from tracewire_bus.bus import BusError, BusFull, Fenced, Writer
from tracewire_bus.domain.intervention_checks import resolved
from tracewire_bus.store.blobs import CHUNK_BYTES, Blobs
from tracewire_bus.store.lifecycle import telling
from tracewire_bus.transport.connection import Backoff, BusUnavailable
from tracewire_bus.wire.codec import encode
from tracewire_bus.wire.messages import (
    SHARED_INVOKE,
    Accepted,
    EngineInfo,
    Event,
    Failure,
    Final,
    FirstToken,
    LogitLens,
    Manifest,
    Paused,
    Probe,
    RawOutput,
    RawShared,
    RawSteered,
    Restarted,
    Resumed,
    Status,
    StopWhen,
    Submission,
    Usage,
)
from tracewire_bus.wire.values import unpack
from tracewire_engine.protocol.messages import Applied, FinishRecord, Generated, GeneratedChoice

from .engine_api import Choice, Engine, EngineLost, Outputs, Prepared, Rejection
from .large_inputs import Inputs
from .live_changes import LiveTrace, Steering
from .pending import Half, ReportMissing
from .read_decoder import ChoiceReads
from .report_router import Reports
from .retention import Retention
from .standing_edits import Chosen, Standing
from .validation import Blocks

__all__ = ["Attempt", "RunServices", "TraceRun", "first"]

logger = logging.getLogger("tracewire")

#: How long the workers may take to be told something at a trace's end, in seconds.
SHARED_S = 10.0

_NO_DELTAS = msgspec.Raw(msgspec.msgpack.encode([]))
_NO_VALUES = msgspec.msgpack.encode({})
_UNREPORTED = Failure(type="EngineError", message="the workers did not report the request's end")
#: What an event is made with: it is numbered as it is queued.
_UNNUMBERED: dict[str, Any] = {"attempt": 0, "seq": 0}


class RawFinal(Final, tag="final"):
    """A `Final` whose deltas are already encoded."""

    deltas: list[tuple[int, int, msgspec.Raw]] = []  # type: ignore[assignment]  # noqa: RUF012


class RawAccepted(Accepted, tag="accepted"):
    """An `Accepted` whose live parameters are already encoded."""

    live: msgspec.Raw = msgspec.Raw(b"\x80")  # type: ignore[assignment]
    edits: list[list[tuple[str, int]]] = []  # noqa: RUF012


#: What the firehose is told of.
_TOLD: dict[type[Event], str] = {
    RawAccepted: "accepted",
    Restarted: "restarted",
    Paused: "paused",
    Resumed: "resumed",
    Final: "final",
    RawFinal: "final",
}


class _Request:
    """One invoke of the trace, running in the engine."""

    def __init__(self, name: str, invoke: int, prepared: Prepared, outputs: Outputs, half: Half | None) -> None:
        self.name = name
        self.invoke = invoke
        self.prepared = prepared
        self.outputs = outputs
        self.half = half
        self.token_ids: list[list[int]] = [[] for _ in range(prepared.choices)]
        self.text: list[list[str]] = [[] for _ in range(prepared.choices)]
        self.done = [False] * prepared.choices
        #: Why each choice ended, and its logprobs where they were asked for: for a block that asks for the result.
        self.ends: list[tuple[str | None, int | str | None]] = [(None, None)] * prepared.choices
        self.logprobs: list[list[Any]] = [[] for _ in range(prepared.choices)]
        self.given = False


@dataclass(frozen=True)
class RunServices:
    """What all runs of one adapter share. `halves` is the table from request name to `Half` that `reports` fills."""

    engine: Engine
    info: EngineInfo
    writer: Writer
    halves: dict[str, Half]
    reports: Reports
    #: Numbers for the names of requests, unique to the engine.
    names: Iterator[int]
    blobs: Blobs
    inputs: Inputs
    steering: Steering
    retention: Retention
    standing: Standing


@dataclass(frozen=True)
class Attempt:
    """One attempt of a trace that is to run: its validated submission, and what its record says."""

    submission: Submission
    #: The encoded block of each invoke, and the encoded declared interventions, if there are any.
    blocks: Blocks
    declared: bytes | None
    #: The standing interventions of each invoke, if there are any.
    edits: Sequence[Chosen]
    number: int
    queued_at: float
    #: Why the attempt before was given up.
    why: str
    live: LiveTrace | None
    #: Has the record take no more changes of live parameters; returns all that it has taken.
    close: Callable[[], Awaitable[list[bytes]]]


class TraceRun:
    """Runs one attempt of a submission and publishes its events."""

    def __init__(self, services: RunServices, attempt: Attempt) -> None:
        submission = attempt.submission
        self._engine = services.engine
        self._info = services.info
        self._writer = services.writer
        self._halves = services.halves
        self._reports = services.reports
        self._names = services.names
        self._blobs = services.blobs
        self._standing = services.standing
        self._tally = services.retention.tally(submission.trace, attempt.number)
        self._submission = submission
        self.trace = submission.trace
        self._blocks = attempt.blocks
        self._declared = attempt.declared
        self._edits = attempt.edits
        self._queued_at = attempt.queued_at
        self._why = attempt.why
        self._close = attempt.close
        #: What the workers have reported of its shared values, and the name as which they report it.
        self._shared: Half | None = None
        self._share = ""
        self._reads = any(isinstance(one, (Probe, LogitLens)) for one in submission.interventions)
        self._stops = _stops(submission)
        self.live = attempt.live
        if self.live is not None:
            self.live.on_applied = self._applied
        #: The lease that it hangs on, if any.
        self.lease = "" if submission.detach else submission.lease
        self._seq = -1
        self.attempt = attempt.number
        self.requests: list[_Request] = []
        #: Whether a final event was queued for the stream, by this attempt; whether the stream refused this attempt.
        self.ended = False
        self.fenced = False
        #: Whether its record takes no more changes.
        self.closed = False
        #: What vLLM itself ended a request with, where it was neither done nor asked to.
        self._broken: Failure | None = None
        #: How it is to end, when it was told to before its own end; and whether `Accepted` is out.
        self._ending: tuple[Status, Failure] | None = None
        self._accepted = False
        #: Who wants it paused, if somebody does; how often that was changed; whether it is; and who asked last.
        self._held: str | None = None
        self.pauses = 0
        self._paused = False
        self._settling = False
        self._holder = ""

    async def _append(self, event: Event, *, final: bool = False) -> None:
        # No await between numbering events and queueing them: ids must go up in the stream.
        waiting = [self._queue(told) for told in (*self._steered(final), *self._gains())]
        self.ended = self.ended or final
        waiting.append(self._queue(event, final=final))
        if len(waiting) == 1:
            await waiting[0]
            return
        for outcome in await asyncio.gather(*waiting, return_exceptions=True):
            if isinstance(outcome, BaseException):
                raise outcome

    def _queue(self, event: Event, *, final: bool = False) -> Coroutine[Any, Any, str]:
        event.attempt, event.seq = self.attempt, self._seq + 1
        data = encode(event)
        queued = self._writer.queue(
            self.trace,
            event.attempt,
            event.seq,
            data,
            final=final,
            # With its final a trace leaves the queue, in one go.
            done=(self._info.model, self.trace, self._info.engine, self.attempt) if final else None,
            told=event.version if isinstance(event, RawSteered) else None,
            life=self._life(event) if type(event) in _TOLD else None,
        )
        self._seq += 1
        if self._tally is not None:
            # There is nothing to gain behind its end, where it expires.
            self._tally.over = self._tally.over or final
            self._tally.add(len(data))
        return queued

    def _life(self, event: Event) -> list[Any]:
        """What the firehose is told of an event."""
        end = event if isinstance(event, Final) else None
        return telling(
            _TOLD[type(event)],
            self.trace,
            model=self._info.model,
            engine=self._info.engine,
            attempt=self.attempt,
            status=end.status if end else None,
            error=end.error.type if end and end.error else "",
            usage=end.usage if end else None,
        )

    def _steered(self, final: bool) -> list[RawSteered]:
        """What is to be told of live parameters before the next event."""
        live = self.live
        if live is None or not self._accepted:
            return []
        told = live.told(self._places)
        return [*told, *live.rest()] if final else told

    def _gains(self) -> list[RawShared]:
        """What the trace's shared values have gained since it was told last."""
        shared = self._shared
        if shared is None or not self._accepted or not (gains := shared.gains()):
            return []
        time_ = shared.choices[0].time
        return [RawShared(**_UNNUMBERED, invoke=SHARED_INVOKE, deltas=gains, time=time_)]

    def _places(self, first: list[tuple[str, int, int]]) -> list[FirstToken]:
        """From which token of each choice on a change holds: where a request has not begun, from its first."""
        known = {(request, choice): index for request, choice, index in first}
        places = []
        for request in self.requests:
            for choice in range(request.prepared.choices):
                index = known.get((request.name, choice))
                if index is None and not request.token_ids[choice] and not request.done[choice]:
                    index = 0
                if index is not None:
                    places.append(FirstToken(invoke=request.invoke, choice=choice, index=index))
        return places

    def _applied(self, applied: Applied) -> None:
        """The workers have begun a step with other live parameters."""
        assert self.live is not None
        stops = self.live.stops_at(applied.version)
        for request in self.requests:
            if request.half is not None:
                request.half.renew(stops)

    @property
    def seq(self) -> int:
        """The number of its last event, -1 before the first."""
        return self._seq

    @property
    def paused_by(self) -> str | None:
        """Who has it paused, if somebody has."""
        return self._held

    @property
    def held(self) -> int:
        """How much memory the outputs that nobody has taken yet take, in bytes, about."""
        return sum(request.outputs.size() for request in self.requests)

    def end(self, status: Status, failure: Failure) -> bool:
        """Have it end as `status`, as soon as it can: `abort_all` is the caller's. Returns whether that is news."""
        if self._ending is not None or self.ended:
            return False
        self._ending = status, failure
        for request in self.requests:
            if request.half is not None:
                request.half.ending = True
        self._writer.hurry(self.trace)
        return True

    def hold(self, by: str, *, resume: bool = False, number: int = 0) -> None:
        """Have it paused, or go on: `settle` sees to it. `number` is which pause or resumption of the trace this is."""
        self.pauses = max(self.pauses, number)
        self._held = None if resume else by
        self._holder = by

    async def settle(self) -> None:
        """Pause its requests in the engine, or let them go on, as was asked last, and tell of it."""
        if self._settling:
            # Whoever does so already goes on until it is as was asked last: what is told is told in order.
            return
        self._settling = True
        try:
            while self._accepted and not self.ended and not self.fenced and (self._held is not None) != self._paused:
                self._paused = not self._paused
                paused, by = self._paused, self._holder
                for request in self.requests:
                    await (self._engine.pause if paused else self._engine.resume)(request.name)
                if not self.ended:
                    await self._tell(Paused if paused else Resumed, by)
        finally:
            self._settling = False

    async def _tell(self, kind: type[Paused] | type[Resumed], by: str) -> None:
        try:
            await self._append(kind(**_UNNUMBERED, by=by, time=time.time()))
        except BusFull as error:
            logger.warning("trace %s does not tell that it was paused or resumed: %s", self.trace, error)
            self._seq = self._writer.resume(self.trace, self.attempt)

    async def run(self) -> None:
        """Run to the end. Publishes exactly one final event, unless the stream is fenced against this attempt.

        A later attempt begins with a `Restarted`.

        Raises:
            EngineLost: the engine died; nothing is published of that.
        """
        lost: EngineLost | None = None
        full: BusFull | None = None
        try:
            if self.attempt > 1:
                await self._append(Restarted(**_UNNUMBERED, reason=self._why or "its engine was lost"))
            try:
                if self._ending is None:
                    await self._start()
            except Rejection as rejection:
                await self.abort_all()
                await self.fail(rejection.failure, status="rejected")
                return
            if self._ending is not None:
                await self.abort_all()
                if not self._accepted:
                    status, failure = self._ending
                    await self.fail(failure, status=status)
                    return
            if len(self.requests) == 1:
                # As most traces are.
                await self._pump(self.requests[0])
            else:
                async with anyio.create_task_group() as group:
                    for request in self.requests:
                        group.start_soon(self._pump, request)
            await self._conclude()
        except* Fenced:
            # Another attempt, or somebody else's final, is on the stream: this one has nothing to say any more.
            self.fenced = True
            await self.abort_all()
        except* EngineLost as errors:
            lost = first(errors)
        except* BusFull as errors:
            full = first(errors)
        finally:
            for request in self.requests:
                self._halves.pop(request.name, None)
                await self._give_result(request)
            await self._forget_shared()
            if self.live is not None:
                self._reports.live.pop(self.live.run, None)
        if lost is not None:
            raise lost
        if full is not None and not self.fenced:
            await self._end_without_memory(full)

    async def _end_without_memory(self, error: BusFull) -> None:
        """End it after its last event that Redis has. An end always fits."""
        await self.abort_all()
        self._seq = self._writer.resume(self.trace, self.attempt)
        self.ended = False
        message = f"{error}; make room on it, or keep finished traces for a shorter time"
        status, failure = self._ending or ("failed", Failure(type="BusFull", message=message))
        await self.fail(failure, status=status)

    async def _start(self) -> None:
        run = self.live.run if self.live is not None else ""
        if self.live is not None:
            self._reports.live[run] = self.live
        names = [f"t{next(self._names)}" for _ in self._submission.invokes]
        shared = self._begin_shared(names)
        prepared = []
        for index, block in enumerate(self._blocks):
            edits = self._edits[index] if self._edits else None
            declared = edits.declared(self._declared) if edits else self._declared
            blocks = edits.blocks if edits else None
            prepared.append(
                await self._engine.prepare(self._submission, index, block, declared, run, edits=blocks, shared=shared)
            )
        for invoke, (name, block, ready) in enumerate(zip(names, self._blocks, prepared, strict=True)):
            if self._ending is not None:
                return
            half = None
            edits = self._edits[invoke] if self._edits else None
            if block is not None or self._declared is not None or edits:
                half = self._halves[name] = Half(
                    ready.choices,
                    self.trace,
                    block=block is not None or (edits is not None and edits.blocks is not None),
                    reads=self._reads or (edits is not None and edits.reads),
                    stops=self._stops,
                    reports=self._reports,
                    live=self.live,
                )
            try:
                outputs = await self._engine.start(name, ready, self._submission.priority)
            except BaseException:
                self._halves.pop(name, None)
                raise
            self.requests.append(_Request(name, invoke, ready, outputs, half))
        info = self._info
        await self._append(
            RawAccepted(
                **_UNNUMBERED,
                engine=info.engine,
                model=info.model,
                queued_at=self._queued_at,
                accepted_at=time.time(),
                revision=info.revision,
                dtype=info.dtype,
                versions=info.versions,
                sampling=[request.prepared.sampling for request in self.requests],
                prompt_tokens=[request.prepared.prompt_tokens for request in self.requests],
                live_version=self.live.first_version if self.live is not None else 0,
                live=msgspec.Raw(self._submission.live),
                edits=[edits.versions for edits in self._edits],
            )
        )
        self._accepted = True
        for steered in self.live.begun(self._places([])) if self.live is not None else ():
            await self._queue(steered)
        await self.settle()

    def _begin_shared(self, names: list[str]) -> bytes | None:
        """What is sent with each request, of the given names, of what they share; `None` if they share nothing."""
        members = {
            name: n if isinstance(n := invoke.sampling.get("n"), int) else 1
            for name, block, invoke in zip(names, self._blocks, self._submission.invokes, strict=True)
            if block is not None
        }
        if self._submission.shared == _NO_VALUES or not members:
            return None
        self._share = f"t{next(self._names)}"
        self._shared = self._halves[self._share] = Half(1, self.trace, reports=self._reports)
        return msgspec.msgpack.encode(Share(self._share, members, self._submission.shared))

    async def _forget_shared(self) -> None:
        """Have the workers drop what was shared, if they have not reported its end: some of its requests never came."""
        shared = self._shared
        if shared is None:
            return
        self._halves.pop(self._share, None)
        if shared.choices[0].finish is None and self.requests:
            with anyio.move_on_after(SHARED_S, shield=True):
                try:
                    await self._engine.steer({}, [self._share], time.time())
                except Exception as error:
                    logger.debug("what trace %s shared was not forgotten: %s", self.trace, error)

    async def _pump(self, request: _Request) -> None:
        """Publish one request's outputs as they come, until it or all its blocks have ended."""
        try:
            finished = False
            while not finished:
                choices, finished = await request.outputs.get()
                for choice in choices:
                    if not request.done[choice.index]:
                        await self._publish(request, choice)
                if not finished and all(request.done):
                    await self._engine.abort(request.name)
                    return
        except Rejection as refused:
            self._broken = self._broken or refused.failure
            await self._engine.abort(request.name)
        except ReportMissing as missing:
            if self._ending is None and not await self._engine.takes_requests():
                raise EngineLost(f"{missing}, and vLLM does not answer") from missing
            self._broken = self._broken or Failure(type="EngineError", message=str(missing))
            await self._engine.abort(request.name)
        finally:
            await self._give_result(request)

    async def _give_result(self, request: _Request) -> None:
        """Tell the workers what a request has put out, if they wait for that, whatever has become of the trace."""
        asks = request.prepared.asks_result
        if not (asks or request.prepared.tells_end) or request.given:
            return
        request.given = True
        invoke = self._submission.invokes[request.invoke]
        choices = [
            GeneratedChoice(index, "".join(request.text[index]), ids, *request.ends[index], logprobs or None)
            for index, (ids, logprobs) in enumerate(zip(request.token_ids, request.logprobs, strict=True))
        ]
        tokens = list(map(len, request.token_ids))
        result = Generated(request.name, invoke.prompt, request.prepared.token_ids, choices if asks else [], tokens)
        with anyio.move_on_after(SHARED_S, shield=True):
            try:
                await self._engine.give_result(msgspec.msgpack.encode(result))
            except EngineLost as error:
                logger.debug("the block of %s has not got its result: %s", request.name, error)

    async def _publish(self, request: _Request, choice: Choice) -> None:
        token_ids, text, logprobs = choice.token_ids, choice.text, choice.logprobs
        if logprobs is not None:
            # vLLM 0.25 repeats all of them behind an abort.
            logprobs = logprobs[: len(token_ids)]
        finish_reason, stop_reason = choice.finish_reason, choice.stop_reason
        if request.half is None and self.live is not None:
            # Nobody waits for what is reported of it: where a change holds from was sent before its step began.
            self._reports.pull()
        published = request.token_ids[choice.index]
        first = len(published)
        steps = [_NO_DELTAS] * len(token_ids)
        sampled_at = time.time()
        if request.half is not None:
            steps = await request.half.steps(choice.index, first, len(token_ids))
            half = request.half.choices[choice.index]
            sampled_at = half.time
            if half.ended_at is not None and first + len(token_ids) > half.ended_at:
                # The block ended its request at that token: what vLLM sampled since is not part of the trace.
                keep = half.ended_at + 1 - first
                token_ids, steps = token_ids[:keep], steps[:keep]
                logprobs = logprobs[:keep] if logprobs else logprobs
                # vLLM's text goes on to its own last token, or holds back what might begin a stop string.
                whole = self._engine.decode(published + token_ids, request.prepared)
                before = "".join(request.text[choice.index])
                if whole.startswith(before):
                    text = whole[len(before) :]
                finish_reason, stop_reason = ("stop", half.reason) if half.ended == "stop" else ("error", None)
                request.done[choice.index] = True
        if finish_reason in ("abort", "error") and not request.done[choice.index] and self._ending is None:
            # Not by us. vLLM gave it up: for what is wrong with it, or because its processes were told to stop.
            if finish_reason == "abort" and not await self._engine.takes_requests():
                raise EngineLost("vLLM takes no requests any more: its engine was told to stop")
            reason = f"vLLM ended the request with {finish_reason!r} after {first + len(token_ids)} tokens"
            self._broken = Failure(type="EngineError", message=reason)
        if finish_reason is not None:
            request.done[choice.index] = True
        if request.half is not None and request.half.choices[choice.index].reads.blobs:
            await self._keep(request.half.choices[choice.index].reads)
        published.extend(token_ids)
        request.text[choice.index].append(text)
        if request.prepared.asks_result:
            request.ends[choice.index] = finish_reason, stop_reason
            request.logprobs[choice.index].extend(logprobs or ())
        if not token_ids and not text and finish_reason is None:
            return
        await self._append(
            RawOutput(
                **_UNNUMBERED,
                invoke=request.invoke,
                choice=choice.index,
                index=first,
                token_ids=token_ids,
                text=text,
                deltas=steps,
                logprobs=logprobs,
                finish_reason=finish_reason,
                stop_reason=stop_reason,
                time=sampled_at,
            )
        )

    async def _keep(self, reads: ChoiceReads) -> None:
        """Bring large arrays to the bus before what refers to them."""
        taken, reads.blobs = reads.blobs, []
        for blob, raw in taken:
            for number, start in enumerate(range(0, len(raw), CHUNK_BYTES)):
                chunk = raw[start : start + CHUNK_BYTES]
                await self._blobs.put(self.trace, blob, number, chunk)

    async def _conclude(self) -> None:
        """Gather the finish records and publish the final."""
        deltas: list[tuple[int, int, msgspec.Raw]] = []
        manifest: list[Manifest] = []
        save_errors: dict[str, str] = {}
        warnings: list[str] = []
        error = self._broken
        stopped = False
        for request in self.requests:
            if request.half is None:
                continue
            with anyio.move_on_after(1 if self._broken else None):
                await request.half.finished()
            for index, choice in enumerate(request.half.choices):
                record = choice.finish
                if record is None or not request.half.ended_whole(index):
                    # What it holds in all would not be what was published.
                    error = error or (record.error if record is not None else None) or _UNREPORTED
                    continue
                # Steps of which no output told, where the workers count them: those of an output that was lost.
                untold = choice.left(0)
                deltas.extend((request.invoke, index, raw) for raw in (*untold, record.deltas) if raw != _NO_DELTAS)
                choice.digests.complete(record.deltas, record.manifest)
                for entry in [*record.manifest, *choice.reads.manifest(index, len(request.token_ids[index]))]:
                    entry.invoke = request.invoke
                    manifest.append(entry)
                save_errors.update(
                    {f"{request.invoke}.{index}.{name}": reason for name, reason in record.save_errors.items()}
                )
                if self._edits:
                    self._standing.ended(self._edits[request.invoke], record, trace=self.trace, invoke=request.invoke)
                save_errors.update(
                    {
                        f"{request.invoke}.{index}.{edit}": f"the edit raised {failure.type}: {failure.message}"
                        for edit, failure in record.edit_errors.items()
                    }
                )
                # Choices, and prompts, do the same.
                warnings.extend(warning for warning in record.warnings if warning not in warnings)
                error = error or record.error
                stopped = stopped or record.stopped or choice.reads.stopped is not None
        end = await self._shared_end()
        if end is not None:
            error = error or end.error
            if end.deltas != _NO_DELTAS:
                deltas.append((SHARED_INVOKE, 0, end.deltas))
            manifest.extend(msgspec.structs.replace(entry, invoke=SHARED_INVOKE) for entry in end.manifest)
            save_errors.update({f"{SHARED_INVOKE}.0.{name}": reason for name, reason in end.save_errors.items()})
        status: Status = "failed" if error else "stopped" if stopped else "finished"
        await self._closed()
        if self._ending is not None:
            # Also since the last of it was asked: whoever did was told that it ends so.
            status, error = self._ending
        await self._append(
            RawFinal(
                **_UNNUMBERED,
                status=status,
                error=error,
                usage=self._usage(),
                deltas=deltas,
                manifest=manifest,
                save_errors=save_errors,
                time=time.time(),
                prompt_logprobs=[request.outputs.prompt_logprobs for request in self.requests]
                if any(request.outputs.prompt_logprobs for request in self.requests)
                else [],
                warnings=warnings,
            ),
            final=True,
        )

    async def _shared_end(self) -> FinishRecord | None:
        """What the workers said of its shared values when the last of its requests was over."""
        shared = self._shared
        halves = [request.half for request in self.requests if request.half is not None]
        if shared is None or not any(choice.stepped for half in halves for choice in half.choices):
            return None
        shared.ending = True
        await shared.finished()
        choice = shared.choices[0]
        end = choice.finish
        if end is None or not shared.ended_whole(0):
            logger.warning("the workers did not report what trace %s shared in the end", self.trace)
            return FinishRecord(self._share, 0, _NO_DELTAS, error=_UNREPORTED) if choice.has_gap(False) else None
        choice.digests.complete(end.deltas, end.manifest)
        return end

    async def _closed(self) -> None:
        """Accept no more changes, and have all that were accepted, so that the stream tells of each."""
        live, close = self.live, self._close
        if live is None:
            return
        self.closed = True
        backoff = Backoff()
        try:
            while True:
                try:
                    changes = await close()
                    break
                except BusUnavailable as problem:
                    # The final would wait for Redis too; what is accepted until then is part of the trace.
                    logger.log(backoff.level, "trace %s waits for Redis to end: %s", self.trace, problem)
                    await anyio.sleep(backoff.next())
        except BusError as problem:
            logger.warning("trace %s ends without a last look at its record: %s", self.trace, problem)
            return
        for change in changes:
            try:
                live.take(change)
            except (ValueError, msgspec.MsgspecError):
                logger.exception("a change of live parameters of trace %s could not be read", self.trace)

    def _usage(self) -> Usage:
        return Usage(
            prompt_tokens=sum(request.prepared.prompt_tokens for request in self.requests),
            completion_tokens=sum(len(ids) for request in self.requests for ids in request.token_ids),
            cached_tokens=sum(request.outputs.cached_tokens for request in self.requests),
        )

    async def fail(self, failure: Failure, *, status: Status = "failed") -> None:
        """End the trace with an error instead. What was published so far stands."""
        await self._closed()
        final = Final(**_UNNUMBERED, status=status, error=failure, usage=self._usage(), time=time.time())
        try:
            await self._append(final, final=True)
        except Fenced:
            # Others have ended it, or run it by now.
            self.fenced = True

    async def abort_all(self) -> None:
        """End all of the trace's requests in the engine."""
        aborted = [self._engine.abort(request.name) for request in self.requests]
        for outcome in await asyncio.gather(*aborted, return_exceptions=True):
            if isinstance(outcome, BaseException):
                raise outcome


def _stops(submission: Submission) -> list[StopWhen]:
    """The submission's stop conditions, live thresholds at their first values."""
    stops = [one for one in submission.interventions if isinstance(one, StopWhen)]
    if not stops:
        return []
    live = unpack(submission.live)
    return [one for stop in stops if isinstance(one := resolved(stop, live), StopWhen)]


def first(error: BaseException) -> Any:
    """The first of an exception group, or an exception that is none."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
