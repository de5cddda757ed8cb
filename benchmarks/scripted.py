"""A scripted engine behind the adapter's own seam: no model, only outputs, at times that its own clock sets.

It is two halves in two processes, as the real one is. [`Pacer`][benchmarks.scripted.Pacer] stands where EngineCore and
the worker do: it puts out a token of every request at absolute deadlines, whether anybody keeps up or not, and reports
each token's delta (one array appended to the list `acts`) over the workers' own link. `ScriptedEngine` stands where
`VllmEngine` does, in the adapter's process.

The first eight bytes of every array are when it was handed over, in seconds since the epoch, so that a consumer knows
the age of each token, also of one that came merged with later ones.
"""

from __future__ import annotations

import os
import struct
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from tests.support.fake_engine import FakeEngine, MergedOutputs
from tracewire_bus.wire.arrays import array_header, array_payload, encoded_array
from tracewire_bus.wire.digests import array_digest, list_digest
from tracewire_bus.wire.messages import Append, EngineInfo, Manifest, ModuleInfo, Set, Submission
from tracewire_engine.adapter.engine_api import Choice, Prepared
from tracewire_engine.link.step_link import LinkReceiver, LinkSender
from tracewire_engine.protocol.messages import (
    Batch,
    FinishRecord,
    Layout,
    LayoutEntry,
    Part,
    Read,
    Report,
    StepRecord,
)

__all__ = ["ELEMENTS", "WIDTH", "Pacer", "ScriptedEngine", "scripted_info"]

#: Each token's array: this many float64.
ELEMENTS = 64
#: Each declared read: this many bfloat16.
WIDTH = 2048

_TEXT = " word"


class Command(msgspec.Struct, array_like=True):
    """To the pacer: `link` (where to report), `start` (a request and its number of tokens), or `go`.

    `go` begins a round of `count` requests at `rate` outputs a second each, as soon as all have started. They put out
    together, as a batch does, or one after another if `spread`. With `layers`, what is saved are the reads of as many
    declared probes, named `h0`, `h1`, ..., of `WIDTH` bfloat16 each. `quit` ends it.
    """

    name: str
    text: str = ""
    count: int = 0
    rate: float = 0.0
    spread: bool = False
    layers: int = 0


class Token(msgspec.Struct, array_like=True):
    """One token of one request."""

    request: str
    token_id: int
    text: str
    finish_reason: str | None = None


_commands = msgspec.msgpack.Decoder(Command)
_tokens = msgspec.msgpack.Decoder(list[Token])
_encode = msgspec.msgpack.Encoder().encode
#: What the digest of one saved array begins with.
_, _HEAD = array_header("float64", (ELEMENTS,), 8 * ELEMENTS)


def scripted_info(model: str, capacity: int) -> EngineInfo:
    """What it registers."""
    return EngineInfo(
        engine=f"scripted-{os.getpid()}",
        model=model,
        modules=[
            ModuleInfo("", "None"),
            ModuleInfo("layers", "Layers"),
            *(ModuleInfo(f"layers.{number}", "Layer") for number in range(64)),
        ],
        hidden_size=WIDTH,
        capacity=capacity,
    )


class _Request:
    """A request at the pacer: how much of it is out, and what its saves' digest is made of."""

    def __init__(self, name: str, tokens: int) -> None:
        self.name = name
        self.tokens = tokens
        self.index = 0
        self.digests: list[bytes] = []
        self._filler = os.urandom(ELEMENTS * 8 - 16)

    def token(self) -> Token:
        """Its next token, of which nothing is saved by a block."""
        index, self.index = self.index, self.index + 1
        return Token(self.name, 1000 + index, _TEXT, "length" if self.index == self.tokens else None)

    def step(self, now: float) -> tuple[Token, StepRecord]:
        """Its next token, and what the block saved with it."""
        data = struct.pack("<dd", now, self.index) + self._filler
        self.digests.append(array_digest(_HEAD, data))
        item = encoded_array(array_payload("float64", (ELEMENTS,), data))
        delta = Append(path=("acts",), items=[item]) if self.index else Set(path=("acts",), value=[item])
        index, self.index = self.index, self.index + 1
        reason = "length" if self.index == self.tokens else None
        record = StepRecord(self.name, 0, index, msgspec.Raw(_encode([delta])))
        return Token(self.name, 1000 + index, _TEXT, reason), record

    def finish(self) -> FinishRecord:
        """Its end."""
        manifest = Manifest(
            invoke=0, choice=0, name="acts", kind="list", length=self.index, digest=list_digest(self.digests)
        )
        return FinishRecord(self.name, 0, msgspec.Raw(_encode([])), [manifest])


class Pacer:
    """The engine's own process, run by `run`. `folder` is where its sockets are."""

    def __init__(self, folder: Path) -> None:
        context = zmq.Context.instance()
        self._commands = context.socket(zmq.PULL)
        self._commands.bind(f"ipc://{folder}/commands")
        self._outputs = context.socket(zmq.PUSH)
        self._outputs.setsockopt(zmq.SNDHWM, 0)
        self._outputs.bind(f"ipc://{folder}/outputs")
        self._link: LinkSender | None = None
        self._layouts = 0

    def run(self) -> None:
        """Play one round after another, until told to quit."""
        requests: list[_Request] = []
        go: Command | None = None
        while True:
            command = _commands.decode(self._commands.recv())
            if command.name == "quit":
                return
            if command.name == "link":
                self._link = LinkSender(command.text)
            elif command.name == "start":
                requests.append(_Request(command.text, command.count))
            elif command.name == "go":
                go = command
            if go is not None and len(requests) == go.count:
                (self._read if go.layers else self._play)(requests, go)
                requests, go = [], None

    def _play(self, requests: list[_Request], go: Command) -> None:
        groups = [[request] for request in requests] if go.spread else [requests]
        interval = 1 / (go.rate * len(groups))
        began = time.monotonic()
        for number in range(requests[0].tokens * len(groups)):
            left = began + number * interval - time.monotonic()
            if left > 0:
                time.sleep(left)
            self._step(groups[number % len(groups)])

    def _read(self, requests: list[_Request], go: Command) -> None:
        """A round of declared reads: one report a step, whose bytes go by the ring buffer."""
        import torch

        assert self._link is not None
        size, tokens = 2 * WIDTH, requests[0].tokens
        stride = go.layers * size
        reads = [Read(f"h{n}", [Part("", "bfloat16", (WIDTH,), size, n * size, stride)]) for n in range(go.layers)]
        entries = [LayoutEntry(request.name, 0, 0, [(0, row, 1)]) for row, request in enumerate(requests)]
        self._layouts += 1
        values = torch.randint(0, 255, (len(requests) * go.layers * size,), dtype=torch.uint8)
        began = time.monotonic()
        for number in range(tokens):
            left = began + number / go.rate - time.monotonic()
            if left > 0:
                time.sleep(left)
            report = Report(time.time(), layout=Layout(self._layouts, [reads], entries) if not number else None)
            report.batch = Batch(self._layouts, number)
            copy = self._link.put(values, report)
            if copy is None:
                report.batch.data = memoryview(values.numpy()).cast("B")
            else:
                copy.fill(report.batch)
            self._link.send(report)
            self._outputs.send(_encode([request.token() for request in requests]))
        finishes = [FinishRecord(request.name, 0, msgspec.Raw(_encode([]))) for request in requests]
        self._link.send(Report(time.time(), finishes=finishes))

    def _step(self, requests: list[_Request]) -> None:
        assert self._link is not None
        now = time.time()
        tokens, records = zip(*(request.step(now) for request in requests), strict=True)
        self._link.send(Report(now, list(records)))
        self._outputs.send(_encode(tokens))
        if finishes := [request.finish() for request in requests if request.index == request.tokens]:
            self._link.send(Report(now, finishes=finishes))


class _Outputs(MergedOutputs):
    """A request's outputs at the adapter."""

    def put(self, token: Token) -> None:
        """Take a token."""
        if self.waiting is None:
            self.waiting = Choice(0, [token.token_id], token.text, finish_reason=token.finish_reason)
            self.ready.set()
        else:
            self.waiting.token_ids.append(token.token_id)
            self.waiting.text += token.text
            self.waiting.finish_reason = token.finish_reason


class ScriptedEngine(FakeEngine):
    """The adapter's half: an `Engine` whose outputs come from a pacer, and whose reports come over the link."""

    def __init__(self, folder: Path, link: LinkReceiver) -> None:
        super().__init__()
        context = zmq.asyncio.Context.instance()
        self._link = link
        self._commands = zmq.Context.instance().socket(zmq.PUSH)
        self._commands.connect(f"ipc://{folder}/commands")
        self._commands.send(_encode(Command("link", link.address)))
        self._incoming = context.socket(zmq.PULL)
        self._incoming.setsockopt(zmq.RCVHWM, 0)
        self._incoming.connect(f"ipc://{folder}/outputs")
        self._outputs: dict[str, _Outputs] = {}

    async def receive(self) -> None:
        """Hand tokens to their requests, for as long as the adapter runs."""
        while True:
            for token in _tokens.decode(await self._incoming.recv()):
                outputs = self._outputs[token.request]
                outputs.put(token)
                if token.finish_reason is not None:
                    del self._outputs[token.request]

    async def prepare(
        self,
        submission: Submission,
        index: int,
        block: bytes | None,
        declared: bytes | None,
        run: str,
        edits: bytes | None = None,
        shared: bytes | None = None,
        **more: Any,
    ) -> Prepared:
        """Every submission is as good as another; `max_tokens` counts."""
        sampling = submission.invokes[index].sampling
        return Prepared(prompt=None, prompt_tokens=1, params=sampling["max_tokens"], choices=1, sampling=sampling)

    async def start(self, request: str, prepared: Prepared, priority: int) -> _Outputs:
        """Tell the pacer."""
        outputs = self._outputs[request] = _Outputs()
        self._commands.send(_encode(Command("start", request, prepared.params)))
        return outputs

    def decode(self, token_ids: list[int], prepared: Prepared) -> str:
        """The text of these tokens."""
        return _TEXT * len(token_ids)

    def ready(self) -> Iterable[Report]:
        """What the pacer has reported over the link."""
        return self._link.ready()

    async def arrived(self) -> None:
        """Wait for it."""
        await self._link.arrived()
