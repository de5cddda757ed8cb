"""A scripted engine: plays an engine on the bus, where the real one stands, and publishes what a test's script says.

It takes submissions and appends events through the same bus API as the engine adapter does. No model stands behind it.
A script is an async function of a [`Stage`][], which numbers the events and, like the real engine, ends with a manifest
of what it published.
"""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

import anyio

from tracewire_bus.codec import decode_event, decode_submission, encode
from tracewire_bus.fold import Fold
from tracewire_bus.messages import (
    Accepted,
    Append,
    Delta,
    EngineInfo,
    Event,
    Failure,
    Final,
    Manifest,
    ModuleInfo,
    Output,
    Restarted,
    Set,
    Submission,
    Usage,
)
from tracewire_bus.streams import Bus, Writer
from tracewire_bus.values import ArrayRef, digest, kind, length, wire

__all__ = ["Script", "ScriptedEngine", "Stage", "engine_info", "tiny"]

#: How long one wait for submissions lasts, in milliseconds; leaving the engine cancels it.
BLOCK_MS = 1000


def engine_info(model: str = "tiny", engine: str | None = None, **fields: Any) -> EngineInfo:
    """What an engine of a Llama-like model with four layers would publish."""
    modules = [ModuleInfo("", "LlamaForCausalLM"), ModuleInfo("model", "LlamaModel")]
    modules += [ModuleInfo("model.embed_tokens", "VocabParallelEmbedding"), ModuleInfo("model.layers", "ModuleList")]
    for layer in range(4):
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

    def __init__(self, submission: Submission, writer: Writer, info: EngineInfo, queued_at: float, bus: Bus) -> None:
        self.submission = submission
        self.bus = bus
        self.attempt = 1
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

    async def publish(self, event: Event, *, fold: bool = True) -> None:
        """Append an event as it is."""
        data = encode(event)
        if fold:
            # As a consumer will, from the bytes.
            self.fold.apply(decode_event(data))
        await self.append(data, final=isinstance(event, Final))

    async def append(self, data: bytes, *, final: bool = False) -> None:
        """Append bytes as the next event, whatever they are."""
        seq, self.seq = self.seq, self.seq + 1
        await self._writer.append(self.trace, self.attempt, seq, data, final=final)

    async def accept(self, **fields: Any) -> None:
        """Say that the trace runs."""
        told: dict[str, Any] = {
            "engine": self._info.engine,
            "model": self._info.model,
            "queued_at": self._queued_at,
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

    async def output(self, text: str, *steps: list[Delta], invoke: int = 0, choice: int = 0, **fields: Any) -> None:
        """One output. Every step is the deltas of one token; without any, the output has one token and no delta."""
        deltas = list(steps) or [[]]
        held = self.fold.choices.get((invoke, choice))
        index = len(held.token_ids) if held else 0
        await self.publish(
            Output(
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
        return await self.bus.blobs.store(self.trace, array, name)

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


class ScriptedEngine:
    """An engine on the bus that runs `script` for every submission that it takes, all at once.

    `taken` holds what it was sent, in order.
    """

    def __init__(self, bus: Bus, script: Script, info: EngineInfo) -> None:
        self.info = info
        self.taken: list[Submission] = []
        self._bus = bus
        self._script = script

    @classmethod
    @asynccontextmanager
    async def running(
        cls, url: str, prefix: str, script: Script, info: EngineInfo | None = None
    ) -> AsyncIterator[ScriptedEngine]:
        """An engine that serves for as long as the context lasts. What its scripts raise comes out of the context."""
        async with Bus.open(url, prefix=prefix) as bus:
            engine = cls(bus, script, info or engine_info())
            await bus.register(engine.info, ttl_s=600)
            async with bus.writer() as writer, anyio.create_task_group() as group:
                group.start_soon(engine._serve, writer, group)
                try:
                    yield engine
                finally:
                    group.cancel_scope.cancel()
            with anyio.CancelScope(shield=True):
                await bus.unregister(engine.info.engine)

    async def _serve(self, writer: Writer, group: anyio.abc.TaskGroup) -> None:
        while True:
            for entry in await self._bus.queue.take(self.info.model, self.info.engine, 16, BLOCK_MS):
                submission = decode_submission(entry.fields[b"d"])
                self.taken.append(submission)
                group.start_soon(self._play, Stage(submission, writer, self.info, entry.queued_at, self._bus))

    async def _play(self, stage: Stage) -> None:
        await self._script(stage)
        await self._bus.queue.done(self.info.model, stage.trace)


async def tiny(stage: Stage) -> None:
    """Three tokens, each with an item of the saved list `scores`."""
    await stage.accept()
    for number, text in enumerate(("one", " two", " three")):
        await stage.save(text, {"scores": number / 2}, finish_reason="length" if number == 2 else None)
    await stage.final()
