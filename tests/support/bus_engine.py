"""A scripted engine: plays an engine on the bus, where the real one stands, and publishes what a test's script says.

It takes submissions, opens traces, reads orders and appends events through the same bus API as the engine adapter does.
No model stands behind it. A script is an async function of a [`Stage`][], which numbers the events, tells of changes
of live parameters before the next output, and, like the real engine, ends with a manifest of what it published. A trace
that is cancelled ends where its script waits.
"""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

import anyio
import msgspec

from tracewire_bus.bus import Bus, Writer
from tracewire_bus.domain.fold import Fold
from tracewire_bus.store.control import Order
from tracewire_bus.store.lifecycle import lifecycle_fields
from tracewire_bus.store.trace_records import Opened, Overtaken, TraceEnded, cancellation
from tracewire_bus.wire.codec import decode_change, decode_event, decode_submission, encode
from tracewire_bus.wire.digests import digest
from tracewire_bus.wire.kinds import kind, length
from tracewire_bus.wire.messages import (
    Accepted,
    Append,
    DecodedOutput,
    Delta,
    EngineInfo,
    Event,
    Failure,
    Final,
    FirstToken,
    Manifest,
    MessageDelta,
    ModuleInfo,
    Paused,
    Restarted,
    Resumed,
    Set,
    Steered,
    Submission,
    Usage,
)
from tracewire_bus.wire.packing import unpack, wire
from tracewire_bus.wire.refs import ArrayRef

__all__ = ["BusEngine", "Script", "Stage", "engine_info", "steered_once", "tiny"]

#: How long one wait for submissions lasts, in milliseconds; leaving the engine cancels it.
BLOCK_MS = 1000


def engine_info(model: str = "tiny", engine: str | None = None, **fields: Any) -> EngineInfo:
    """What an engine of a Llama-like model would publish: of four layers, unless `layer_count` is among the fields."""
    modules = [ModuleInfo("", "LlamaForCausalLM"), ModuleInfo("model", "LlamaModel")]
    modules += [ModuleInfo("model.embed_tokens", "VocabParallelEmbedding"), ModuleInfo("model.layers", "ModuleList")]
    for layer in range(fields.get("layer_count", 4)):
        path = f"model.layers.{layer}"
        modules += [
            ModuleInfo(path, "LlamaDecoderLayer"),
            ModuleInfo(f"{path}.self_attn", "LlamaAttention"),
            ModuleInfo(f"{path}.mlp", "LlamaMLP"),
            ModuleInfo(f"{path}.mlp.down_proj", "RowParallelLinear"),
        ]
    modules += [ModuleInfo("model.norm", "RMSNorm"), ModuleInfo("lm_head", "ParallelLMHead")]
    described: dict[str, Any] = {
        "dtype": "bfloat16",
        "vocabulary": 4096,
        "hidden_size": 8,
        "max_model_len": 128,
        "layers": "model.layers",
        "layer_count": 4,
        "modules": modules,
        "attributes": {"RowParallelLinear": ["weight", "bias"], "LlamaDecoderLayer": ["hidden_size"]},
        "capacity": 16,
    }
    return EngineInfo(engine=engine or f"scripted-{uuid.uuid4().hex[:8]}", model=model, **{**described, **fields})


class Stage:
    """One trace as its engine sees it: the submission, and the events that a script publishes for it."""

    def __init__(
        self, submission: Submission, writer: Writer, info: EngineInfo, queued_at: float, bus: Bus, opened: Opened
    ) -> None:
        self.submission = submission
        self.bus = bus
        self.attempt = opened.attempt
        #: The live parameters as the last change left them.
        self.live = unpack(opened.live)
        self.live_version = opened.version
        self.scope = anyio.CancelScope()
        self.cancelled: Failure | None = None
        #: Whether its final was queued for the stream.
        self.ended = False
        self._changes = [decode_change(data) for data in opened.changes]
        #: How many changes have come, and how many of them the script has waited for.
        self._came = len(self._changes)
        self._waited_for = 0
        self._changed = anyio.Event()
        #: By whom it is paused, if it is.
        self.paused = opened.paused
        self._resumed = anyio.Event()
        self.seq = 0
        self._writer = writer
        self._info = info
        self._queued_at = queued_at
        #: What a consumer should hold, for the manifest.
        self.fold = Fold()

    @property
    def trace(self) -> str:
        """The trace's id."""
        return self.submission.trace

    def change(self, data: bytes) -> None:
        """Take an order to steer."""
        change = decode_change(data)
        self.live.update(change.values)
        self.live_version = change.version
        self._changes.append(change)
        self._came += 1
        self._changed.set()

    async def hold(self, by: str, *, resume: bool = False) -> None:
        """Take an order to pause or resume, and tell of it. Before its first event, `accept` tells of it."""
        self.paused = None if resume else by
        if not self.seq:
            return
        event = Resumed if resume else Paused
        await self.publish(event(attempt=self.attempt, seq=self.seq, by=by))
        if resume:
            self._resumed.set()

    async def going(self) -> None:
        """Wait while it is paused."""
        while self.paused is not None:
            self._resumed = anyio.Event()
            await self._resumed.wait()

    async def steered(self) -> None:
        """Wait for a change that no earlier call has waited for. An output may have told of it already."""
        self._waited_for += 1
        while self._came < self._waited_for:
            self._changed = anyio.Event()
            await self._changed.wait()

    async def tell(self) -> None:
        """Publish what has changed: it holds from the next output on."""
        changes, self._changes = self._changes, []
        if not changes:
            return
        version = changes[-1].version
        held = self.fold.choices
        first = [
            FirstToken(
                invoke=invoke,
                choice=choice,
                index=len(held[invoke, choice].token_ids) if (invoke, choice) in held else 0,
            )
            for invoke in range(len(self.submission.invokes))
            for choice in range(self.submission.invokes[invoke].sampling.get("n", 1))
        ]
        wired = [
            msgspec.structs.replace(one, values={name: wire(value) for name, value in one.values.items()})
            for one in changes
        ]
        event = Steered(attempt=self.attempt, seq=self.seq, version=version, first=first, changes=wired)
        data = encode(event)
        self.fold.apply(decode_event(data))
        seq, self.seq = self.seq, self.seq + 1
        await self._writer.append(self.trace, self.attempt, seq, data, live_version=version)

    async def publish(self, event: Event, *, fold: bool = True) -> None:
        """Append an event as it is."""
        if isinstance(event, (DecodedOutput, Final)):
            await self.tell()
            event.seq = self.seq
        data = encode(event)
        if fold:
            # As a consumer will, from the bytes.
            self.fold.apply(decode_event(data))
        kind = {Accepted: "accepted", Restarted: "restarted", Final: "final"}.get(type(event))
        lifecycle = None
        if kind is not None:
            end = event if isinstance(event, Final) else None
            lifecycle = lifecycle_fields(
                kind,
                self.trace,
                model=self._info.model,
                engine=self._info.engine,
                attempt=self.attempt,
                status=end.status if end else None,
                error=end.error.type if end and end.error else "",
                usage=end.usage if end else None,
            )
        await self.append(data, final=isinstance(event, Final), lifecycle=lifecycle)

    async def append(self, data: bytes, *, final: bool = False, lifecycle: list[Any] | None = None) -> None:
        """Append bytes as the next event, whatever they are."""
        seq, self.seq = self.seq, self.seq + 1
        self.ended = self.ended or final
        await self._writer.append(self.trace, self.attempt, seq, data, final=final, lifecycle=lifecycle)

    async def accept(self, **fields: Any) -> None:
        """Say that the trace runs."""
        was_paused = self.paused is not None
        told: dict[str, Any] = {
            "engine": self._info.engine,
            "model": self._info.model,
            "queued_at": self._queued_at,
            "live_version": self.live_version,
            "live": {name: wire(value) for name, value in self.live.items()},
            "sampling": [invoke.sampling for invoke in self.submission.invokes],
            "prompt_tokens": [len(invoke.token_ids or invoke.prompt or "x") for invoke in self.submission.invokes],
        }
        await self.publish(
            Accepted(
                attempt=self.attempt,
                seq=self.seq,
                **{**told, **fields},
            )
        )
        if was_paused and self.paused is not None:
            await self.hold(self.paused)

    async def output(self, text: str, *steps: list[Delta], invoke: int = 0, choice: int = 0, **fields: Any) -> None:
        """One output. Every step is the deltas of one token; without any, the output has one token and no delta.

        The text of a chat is its message's content, unless `message` says otherwise.
        """
        if self.submission.invokes[invoke].chat is not None:
            fields.setdefault("message", MessageDelta(content=text) if text else None)
        deltas = list(steps) or [[]]
        held = self.fold.choices.get((invoke, choice))
        index = len(held.token_ids) if held else 0
        await self.publish(
            DecodedOutput(
                attempt=self.attempt,
                seq=self.seq,
                invoke=invoke,
                choice=choice,
                index=index,
                token_ids=[100 + index + number for number in range(len(deltas))],
                text=text,
                deltas=deltas,
                **fields,
            )
        )

    async def save(self, text: str, saved: Mapping[str, Any], **fields: Any) -> None:
        """One output whose step appends each value to the saved list of that name."""
        held = self.fold.choices.get((fields.get("invoke", 0), fields.get("choice", 0)))
        deltas: list[Delta] = []
        for name, value in saved.items():
            if held is not None and name in held.saves:
                deltas.append(Append(path=(name,), items=[wire(value)]))
            else:
                deltas.append(Set(path=(name,), value=wire([value])))
        await self.output(text, deltas, **fields)

    async def store(self, array: Any, name: str = "") -> ArrayRef:
        """Put an array into a blob of the trace, and return what to save in its place."""
        ref = await self.bus.blobs.store(self.trace, array, name)
        # What is saved has the digest of its value.
        return ArrayRef(ref.dtype, ref.shape, digest(array), ref.blob, name)

    async def restart(self, reason: str = "") -> None:
        """Begin again as the next attempt."""
        self.attempt, self.seq = self.attempt + 1, 0
        await self.publish(Restarted(attempt=self.attempt, seq=0, reason=reason))

    async def final(self, status: str = "finished", error: Failure | None = None, **fields: Any) -> None:
        """The end, with a manifest of all that was published, unless `manifest` says otherwise."""
        deltas = fields.get("deltas", [])
        if "manifest" not in fields:
            ahead = self.fold.copy()
            end = Final(attempt=self.attempt, seq=self.seq, status="finished", deltas=deltas)
            ahead.apply(decode_event(encode(end)))
            fields["manifest"] = [
                Manifest(
                    invoke=invoke,
                    choice=choice,
                    name=name,
                    kind=kind(value),
                    length=length(value),
                    digest=digest(value),
                )
                for (invoke, choice), state in ahead.choices.items()
                for name, value in state.saves.items()
            ]
        tokens = sum(len(state.token_ids) for state in self.fold.choices.values())
        await self.publish(
            Final(
                attempt=self.attempt,
                seq=self.seq,
                status=status,  # type: ignore[arg-type]
                error=error,
                usage=Usage(prompt_tokens=3, completion_tokens=tokens),
                **fields,
            ),
            fold=False,
        )


Script = Callable[[Stage], Awaitable[None]]


class BusEngine:
    """An engine on the bus that runs `script` for every submission that it takes, all at once.

    `taken` holds what it was sent, in order.
    """

    def __init__(self, bus: Bus, script: Script, info: EngineInfo) -> None:
        self.info = info
        self.taken: list[Submission] = []
        self.stages: dict[str, Stage] = {}
        #: Orders for traces that are being opened: they came behind what the opening finds.
        self._early: dict[str, list[Order]] = {}
        self._bus = bus
        self._script = script

    @classmethod
    @asynccontextmanager
    async def running(
        cls, url: str, prefix: str, script: Script, info: EngineInfo | None = None
    ) -> AsyncIterator[BusEngine]:
        """An engine that serves for as long as the context lasts. What its scripts raise comes out of the context."""
        async with Bus.open(url, prefix=prefix) as bus:
            engine = cls(bus, script, info or engine_info())
            await bus.registry.register(engine.info, ttl_s=600)
            async with bus.writer() as writer, anyio.create_task_group() as group:
                group.start_soon(engine._serve, writer, group)
                group.start_soon(engine._obey)
                try:
                    yield engine
                finally:
                    group.cancel_scope.cancel()
            with anyio.CancelScope(shield=True):
                await bus.registry.unregister(engine.info.engine)

    async def _serve(self, writer: Writer, group: anyio.abc.TaskGroup) -> None:
        while True:
            for entry in await self._bus.queue.take(self.info.model, self.info.engine, 16, BLOCK_MS):
                submission = decode_submission(entry.fields[b"d"])
                self.taken.append(submission)
                early = self._early[entry.trace] = []
                try:
                    opened = await self._bus.records.open(submission.trace, self.info.engine, entry.attempt)
                except (TraceEnded, Overtaken):
                    await self._bus.queue.done(self.info.model, entry.trace)
                    continue
                finally:
                    del self._early[entry.trace]
                stage = Stage(submission, writer, self.info, entry.queued_at, self._bus, opened)
                self.stages[stage.trace] = stage
                for order in early:
                    await self._carry_out(order, stage)
                group.start_soon(self._play, stage)

    async def _obey(self) -> None:
        reader = self._bus.control(self.info.engine)
        try:
            while True:
                for order in await reader.read(BLOCK_MS):
                    if order.trace in self._early:
                        self._early[order.trace].append(order)
                    elif (stage := self.stages.get(order.trace)) is not None:
                        await self._carry_out(order, stage)
        finally:
            with anyio.CancelScope(shield=True):
                await reader.aclose()

    async def _carry_out(self, order: Order, stage: Stage) -> None:
        if stage.ended:
            # Its final is on the way: nothing follows it.
            return
        if order.kind == "steer":
            stage.change(order.change)
        elif order.kind in ("pause", "resume"):
            await stage.hold(order.by, resume=order.kind == "resume")
        else:
            stage.cancelled = cancellation(order.by, order.reason)
            stage.scope.cancel()

    async def _play(self, stage: Stage) -> None:
        with stage.scope:
            await self._script(stage)
        if stage.scope.cancelled_caught and not stage.ended:
            await stage.final("cancelled", stage.cancelled)
        del self.stages[stage.trace]
        await self._bus.queue.done(self.info.model, stage.trace)


async def steered_once(stage: Stage) -> None:
    """A token, and the next once it is steered."""
    await stage.accept()
    await stage.output("one")
    await stage.steered()
    await stage.output(" two", finish_reason="stop")
    await stage.final()


async def tiny(stage: Stage) -> None:
    """Three tokens, each with an item of the saved list `scores`."""
    await stage.accept()
    for number, text in enumerate(("one", " two", " three")):
        await stage.save(text, {"scores": number / 2}, finish_reason="length" if number == 2 else None)
    await stage.final()
