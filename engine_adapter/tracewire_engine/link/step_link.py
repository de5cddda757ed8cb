"""The one-way link from the workers to their adapter: what blocks saved, step by step, without an RPC.

The reporting worker pushes one message a step for all its requests, over a ZeroMQ socket whose own thread does the
sending, so that the model never waits for the adapter's event loop. The adapter pairs each record with vLLM's output of
the same request, choice and token index. Values inside are already encoded for the bus and pass through untouched.
"""

from __future__ import annotations

import asyncio
import logging
import os
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self, TypeAlias
from urllib.parse import urlencode

import msgspec
import zmq

from tracewire_bus.wire.messages import Declared, Failure, Manifest

from .addresses import Guard, bind, connect, is_remote
from .shared_ring import LEAST_BYTES, InRing, Place, RingBuffer, RingReader

if TYPE_CHECKING:
    import torch

__all__ = [
    "Applied",
    "Batch",
    "Changes",
    "EditBlock",
    "FinishRecord",
    "Generated",
    "GeneratedChoice",
    "Layout",
    "LayoutEntry",
    "LinkReceiver",
    "LinkSender",
    "Part",
    "Placed",
    "Report",
    "Share",
    "Slot",
    "StepRecord",
    "encode_changes",
    "encode_reports",
]

logger = logging.getLogger("tracewire")


class StepRecord(msgspec.Struct, array_like=True):
    """What one choice of one request newly saved in the step that sampled its token `index`.

    `deltas` is an encoded `list[Delta]`. `ended` says that the block ended in this step before its request did:
    `"stop"` for `tracer.stop()`, `"error"` for an exception, whose details follow in the finish record.
    """

    request: str
    choice: int
    index: int
    deltas: msgspec.Raw
    ended: str = ""


class FinishRecord(msgspec.Struct, array_like=True):
    """The end of one choice of one request: what was saved since its last step, and what it holds in all.

    `deltas` is an encoded `list[Delta]` that brings a fold of all step records to what nnsight collects. `request` is
    unknown to the adapter when it was no trace. An entry of `manifest` without a digest is a list of arrays that holds
    what was sent, compared byte for byte: the adapter knows the digest.
    """

    request: str
    choice: int
    deltas: msgspec.Raw
    manifest: list[Manifest] = []
    save_errors: dict[str, str] = {}
    error: Failure | None = None
    stopped: bool = False
    #: How many step records there are of this choice: those with large arrays come by another way than the rest.
    steps: int = 0
    #: What standing interventions raised on it, by the edit's name.
    edit_errors: dict[str, Failure] = {}
    #: How many tokens it covers: what later steps saved is not in it. -1: all steps.
    tokens: int = -1
    #: What its block did that its author hardly meant.
    warnings: list[str] = []


class Share(msgspec.Struct, array_like=True):
    """What all requests of a trace share, on its way to the workers with each of them.

    `name` is that of the request as which it is reported. `members` has the names of all the trace's requests, with the
    number of their choices; `values` the packed first values by name.
    """

    name: str
    members: dict[str, int]
    values: bytes


class GeneratedChoice(msgspec.Struct, array_like=True):
    """What one choice of a request put out in all."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    logprobs: list[dict[int, tuple[float, int | None, str | None]]] | None = None


class Generated(msgspec.Struct, array_like=True):
    """What a request put out, on its way to its block; without choices, nothing that the block could be given.

    `tokens` counts those of each choice. What the block saved in later steps does not count.
    """

    request: str
    prompt: str | None
    prompt_token_ids: list[int]
    choices: list[GeneratedChoice] = []
    tokens: list[int] = []


class Placed(msgspec.Struct, array_like=True):
    """A declared intervention on its way to the workers, with its locations in the model.

    Each site is a location (`"model.model.layers.3.output"`) and whether the residual stream is meant. `pattern` says
    that the caller's words could name several.
    """

    intervention: Declared
    sites: list[tuple[str, bool]] = []
    pattern: bool = False


class EditBlock(msgspec.Struct, array_like=True):
    """The block of a standing intervention on its way to the workers. `fatal`: if it raises, the request ends."""

    name: str
    block: msgspec.Raw
    fatal: bool = False


class Part(msgspec.Struct, array_like=True):
    """Where one array of one item lies in a batch's bytes. `key` is its key in the item, `""` if it is the item."""

    key: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    size: int


class Slot(msgspec.Struct, array_like=True):
    """The item that one saved name gains in a step."""

    name: str
    parts: list[Part]


class LayoutEntry(msgspec.Struct, array_like=True):
    """What declared interventions save for one choice. `index` is that of the token sampled in the layout's first step.

    In the step after it the index is one more, and so on.
    """

    request: str
    choice: int
    index: int
    slots: list[Slot]


class Layout(msgspec.Struct, array_like=True):
    """Whose the bytes of a batch are, for as long as the composition of the steps stays the same."""

    id: int
    entries: list[LayoutEntry]


class Batch(msgspec.Struct, array_like=True):
    """What declared interventions read in one step, for all requests: bytes by the layout `layout`, its `step`-th.

    They are in `data`, or in the ring buffer at `place`, from which the link's receiver takes them.
    """

    layout: int
    step: int
    data: memoryview = memoryview(b"")
    place: Place | None = None


class Applied(msgspec.Struct, array_like=True):
    """Live parameters of a run are at this version from the step on that is about to run.

    `first` has, for each of its choices in the workers, the request, the choice and the index of the next token that it
    samples, which is the first with these values. `steps` counts the steps begun since the adapter
    read the change, this one included.
    """

    run: str
    version: int
    first: list[tuple[str, int, int]] = []
    steps: int = 1


#: By run, a version of its live parameters, and the packed values that changed.
Changes: TypeAlias = dict[str, tuple[int, dict[str, msgspec.Raw]]]


class Report(msgspec.Struct, array_like=True):
    """All records of one step. `time` is when it ended, in seconds since the epoch by the worker's clock."""

    time: float = 0.0
    steps: list[StepRecord] = []
    finishes: list[FinishRecord] = []
    #: Sent before the first batch that it describes.
    layout: Layout | None = None
    batch: Batch | None = None
    #: Of what this step's records, and those of all later ones, were made with.
    applied: list[Applied] = []
    #: Where the worker's ring buffer is to be opened, said once.
    ring: str = ""


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(list[Report])
_NO_DELTAS = msgspec.Raw(_encoder.encode([]))


def encode_reports(reports: Sequence[Report], buffer: bytearray) -> None:
    """Encode reports into `buffer`. A record that cannot be encoded ends its request; the others go as they are."""
    try:
        _encoder.encode_into(reports, buffer)
    except Exception:
        logger.exception("a record of a report could not be encoded")
        for report in reports:
            report.steps = [_encodable_step(step) for step in report.steps]
            report.finishes = [_encodable_finish(finish) for finish in report.finishes]
        _encoder.encode_into(reports, buffer)


def _encodable_step(record: StepRecord) -> StepRecord:
    try:
        _encoder.encode(record)
    except Exception:
        return StepRecord(record.request, record.choice, record.index, _NO_DELTAS, "error")
    return record


def _encodable_finish(record: FinishRecord) -> FinishRecord:
    try:
        _encoder.encode(record)
    except Exception as error:
        failure = Failure(type=type(error).__name__, message=f"what its block saved could not be encoded: {error!r}")
        steps, tokens = record.steps, record.tokens
        return FinishRecord(record.request, record.choice, _NO_DELTAS, error=failure, steps=steps, tokens=tokens)
    return record


class LinkSender:
    """The worker's end. Sending never blocks the model: the socket queues without a limit; the adapter drains it."""

    def __init__(self, address: str) -> None:
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PUSH)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.LINGER, 0)
        connect(self._socket, address)
        self._buffer = bytearray()
        #: What an adapter on this machine can open; made when there is something to put in.
        self._ring: RingBuffer | None = None
        self._may_share = not is_remote(address) and hasattr(os, "memfd_create")

    def put(self, tensor: torch.Tensor, report: Report) -> InRing | None:
        """Begin to copy a tensor of bytes to the ring buffer, or return nothing: then they go in the message.

        Before that, the buffer is made, once, and `report` says so.
        """
        if self._may_share and tensor.nbytes >= LEAST_BYTES:
            self._may_share = False
            try:
                self._ring = RingBuffer()
                report.ring = self._ring.name
            except OSError as error:
                logger.warning("what is read goes in messages: there is no shared memory (%s)", error)
        return None if self._ring is None else self._ring.put(tensor)

    def send(self, *reports: Report) -> None:
        """Queue reports of steps, in one message. What they refer to may change as soon as this returns."""
        encode_reports(reports, self._buffer)
        # Copied: sending without one wakes a Python thread for each message, which the model would wait for.
        self._socket.send(self._buffer)


class Receiver:
    """What is closed when its context is left."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the socket. Idempotent."""
        raise NotImplementedError


class LinkReceiver(Receiver):
    """The adapter's end: binds a socket in a private folder and hands out reports.

    The address must be known before the engine starts, so the folder is made on construction; `close` removes it. With
    `host`, an address of this machine, the socket is there for workers on other machines, and guarded by keys that are
    part of `address`.
    """

    def __init__(self, host: str | None = None) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="tracewire-link-")
        os.chmod(self._folder.name, 0o700)
        self.folder = Path(self._folder.name)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.PULL)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._ring: RingReader | None = None
        self.guard = Guard() if host is not None else None
        if self.guard is None:
            self.address = bind(self._socket, f"ipc://{self.folder / 'link'}")
            return
        self._unprotect: Callable[[], None] | None = self.guard.protect(self._context, self._socket)
        try:
            bound = bind(self._socket, f"tcp://[{host}]:*" if ":" in str(host) else f"tcp://{host}:*")
        except zmq.ZMQError:
            self.close()
            raise
        self.address = f"{bound}?{urlencode(self.guard.parameters())}"

    def close(self) -> None:
        """Close the socket and remove its folder. Idempotent."""
        if self.guard is not None and self._unprotect is not None:
            unprotect, self._unprotect = self._unprotect, None
            unprotect()
        self._context.destroy(linger=0)
        self._folder.cleanup()
        ring, self._ring = self._ring, None
        if ring is not None:
            ring.close()

    def ready(self) -> list[Report]:
        """The reports that have come since the last call, in the order in which the worker sent them."""
        found: list[Report] = []
        while True:
            try:
                message = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return found
            try:
                reports = _decoder.decode(message)
            except msgspec.MsgspecError:
                # A defect, but one step's: the traces that it leaves waiting end with an error, the others go on.
                logger.exception("a report of the workers could not be read")
                continue
            for report in reports:
                try:
                    self._take(report)
                except (IndexError, ValueError):
                    logger.exception("what a step has read could not be found")
                    report.batch = None
            found += reports

    def _take(self, report: Report) -> None:
        """Open the worker's ring buffer, where it tells of it, and take what lies there of this step.

        Raises:
            ValueError: it says that something lies where nothing can.
        """
        if report.ring:
            try:
                self._ring = RingReader(report.ring)
            except (OSError, ValueError) as error:
                # The worker goes on without.
                logger.warning("what is read comes in messages: no shared memory (%s)", error)
        batch = report.batch
        if batch is not None and batch.place is not None:
            if self._ring is None:
                raise ValueError("a report refers to shared memory that is not open")
            batch.data = self._ring.take(batch.place)

    async def arrived(self) -> None:
        """Wait until `ready` has something."""
        loop = asyncio.get_running_loop()
        descriptor = int(self._socket.getsockopt(zmq.FD))
        # The descriptor tells of changes only, so the state is asked for before each wait.
        while not int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            changed = loop.create_future()
            loop.add_reader(descriptor, _wake, changed)
            try:
                await changed
            finally:
                loop.remove_reader(descriptor)


def _wake(changed: asyncio.Future[None]) -> None:
    if not changed.done():
        changed.set_result(None)


def encode_changes(changes: Changes, over: Iterable[str] = (), since: float = 0.0) -> bytes:
    """For the workers' `LiveRuns.steer`: what has changed, and the runs that are over.

    `since` is when the adapter read the first of the changes, in seconds since the epoch.
    """
    return msgspec.msgpack.encode((since, changes, list(over)))
