"""Blocks under tensor parallelism: the ranks agree on the blocks that take part in each collective operation.

Every rank runs a copy of every block, on values that are whole on all ranks. Gathering a sharded value takes a
collective operation, and each rank enters it because its own copy of a block asks for the value. The copies of a block
can diverge: one runs out of its time, or out of memory. The other ranks would then wait in the operation for ever, and
all requests with them.

So each rank has a socket to every other rank, beside vLLM's own connections. Messages on it keep their order:

- A rank tells all others at once when a copy of a block fails on it.
- Before an operation that depends on blocks, each rank sends the blocks that ask for it there. It then waits until each
  other rank has sent the same, or has sent that the copies there failed. A block that does not ask on all ranks takes
  part on none and is ended.
- Before a step with such requests that replays a CUDA graph, each rank sends which graph it needs, and waits for the
  others. All of them replay the same one.
- At a step's end the other ranks send the first rank, which alone reports, which blocks have ended in the step and how.
  The first rank compares that with its own blocks before it reports the step, after its answer to EngineCore
  (`deferred_report.py`).

If a block ends differently on two ranks, its request ends with an error that names the rank. If a copy takes another
path without failing, the ranks never agree; they wait for each other for a limited time.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import msgspec
import torch
import zmq
from greenlet import getcurrent
from nnsight.intervention.envoy import Envoy
from nnsight.modeling.vllm.envoys import ParallelEnvoy
from vllm.distributed.parallel_state import GroupCoordinator

from tracewire_bus.wire.messages import Failure
from tracewire_engine.worker.blocks import time_limit as watchdog

from .rank_sockets import RankSockets

__all__ = ["DECLARED", "BlockKey", "Ranks", "RanksDiffer", "is_parallel"]

#: The name of a request's declared interventions, among those of its blocks: its own (empty), and standing ones.
DECLARED = "\0interventions"

#: How long a rank waits for the others at a collective operation: `_TIMES` times a block's time limit, and at least
#: `_LEAST_S` seconds.
_TIMES, _LEAST_S = 3, 30.0


class RanksDiffer(RuntimeError):
    """A block or a declared intervention behaved differently on two tensor-parallel ranks."""


class BlockKey(NamedTuple):
    """Names one block of a request, or the request's declared interventions. `request` is the scheduler's id."""

    request: str
    name: str

    @property
    def cache(self) -> BlockKey:
        """The key of the block's caches, which go on recording when the block's code has ended."""
        return BlockKey(self.request, f"{self.name}\0cache")


class _Message(msgspec.Struct, array_like=True, tag=True):
    rank: int
    step: int


class _CopyFailed(_Message, tag="f"):
    """The copy of a block has failed on the sending rank."""

    key: tuple[str, str]
    failure: Failure


class _AtOperation(_Message, tag="a"):
    """The sending rank is at the operation `what`, on behalf of the blocks `keys`."""

    what: str
    keys: list[tuple[str, str]]


class _StepOver(_Message, tag="o"):
    """The step is over on the sending rank; the blocks that ended in it, each `"failed"`, `"stopped"` or `"ended"`."""

    ended: list[tuple[tuple[str, str], str]]


class _Number(_Message, tag="n"):
    """The number that the sending rank gives to `greatest`."""

    number: int


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(_CopyFailed | _AtOperation | _StepOver | _Number)


class Ranks:
    """This rank's connection to the other ranks. Used on the model's thread alone."""

    def __init__(self, group: GroupCoordinator, address: str, limit_s: float) -> None:
        self.index: int = group.rank_in_group
        self.count: int = group.world_size
        #: How long to wait for the others, in seconds; `None` for no limit.
        self._patience_s = max(_LEAST_S, _TIMES * limit_s) if limit_s else None
        #: Requests that brought blocks or declared interventions to all ranks, even if this rank could not take them.
        self.requests: set[str] = set()
        #: The number of the current step, which is the same on all ranks; and whether it has one of these requests.
        self.step = 0
        self.traced = False
        self._announced: set[BlockKey] = set()
        #: The blocks that failed on another rank: that rank, and the failure there.
        self._elsewhere: dict[BlockKey, tuple[int, Failure]] = {}
        #: Blocks that failed or ended differently on other ranks and that `differing` has not returned yet.
        self._unread: list[tuple[BlockKey, bool]] = []
        self._inbox: list[deque[Any]] = [deque() for _ in range(self.count)]
        sockets = RankSockets(group, address, "rank")
        self._pull, self._push = sockets.pull, sockets.push
        self._to_first = self._push[0] if self.index else None
        self._calling = False

    # --- telling ----------------------------------------------------------------------------------------------------

    def fail(self, key: BlockKey, failure: Callable[[], Failure]) -> None:
        """Tell the other ranks, once, that the copy of a block has failed here."""
        if key not in self._announced and key.request in self.requests:
            self._announced.add(key)
            self._send(_CopyFailed(self.index, self.step, key, failure()))

    def forget(self, request: str) -> None:
        """Forget a request that is over."""
        self.requests.discard(request)
        if self._announced or self._elsewhere:
            self._announced = {key for key in self._announced if key.request != request}
            self._elsewhere = {key: what for key, what in self._elsewhere.items() if key.request != request}

    def _send(self, message: _Message) -> None:
        data = _encoder.encode(message)
        for socket in self._push:
            socket.send(data)

    # --- a step -----------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Begin a step: note the messages that other ranks sent before it."""
        self.step += 1
        self._receive(0)
        for inbox in self._inbox:
            while inbox and inbox[0].step < self.step:
                self._note(inbox.popleft())

    def send_ended(self, ended: dict[BlockKey, str]) -> None:
        """Tell the first rank which blocks have ended here in this step. Called on the other ranks."""
        assert self._to_first is not None
        self._to_first.send(_encoder.encode(_StepOver(self.index, self.step, list(ended.items()))))

    def compare_ended(self, ended: dict[BlockKey, str]) -> None:
        """Compare the blocks that have ended in this step with those of all other ranks, for `differing` to return.

        Called on the first rank. Waits for the messages that the other ranks send with `send_ended`.
        """
        for rank in range(1, self.count):
            while True:
                message = self._next(rank, None)
                if isinstance(message, _StepOver):
                    break
                if isinstance(message, _AtOperation):
                    # The other rank waits at an operation for this rank, which has finished the step without it.
                    for key in message.keys:
                        self.fail(BlockKey(*key), self._unmatched)
                self._note(message)
            theirs = {BlockKey(*key): how for key, how in message.ended}
            # A block that had ended here before does not end again when another rank repeats that.
            for key in (theirs.keys() - (self._announced - ended.keys())) | ended.keys():
                if theirs.get(key) != ended.get(key) and (key in theirs or ended[key] == "ended"):
                    self._elsewhere.setdefault(key, (rank, _how(theirs.get(key), ended.get(key))))
                    self._unread.append((key, True))

    def differing(self) -> list[tuple[BlockKey, RanksDiffer, bool]]:
        """The blocks that failed or ended differently on another rank, since the last call.

        Returns:
            For each block its key, the error that must end it here, and whether the ends of both ranks were compared,
            so that the block is known to have ended differently (or not at all) here.
        """
        unread, self._unread = self._unread, []
        known = [(key, sure) for key, sure in unread if key.request in self.requests and key in self._elsewhere]
        return [(key, self.difference(key), sure) for key, sure in known]

    def difference(self, key: BlockKey) -> RanksDiffer:
        """The error that ends a block whose ranks differ."""
        rank, failure = self._elsewhere.get(key, (-1, self._unmatched()))
        where = f"rank {rank} of {self.count}" if rank >= 0 else "another rank"
        at = f" (line {failure.line})" if failure.line else ""
        return RanksDiffer(
            f"under tensor parallelism a block runs once on each rank and must do the same on all of them; on {where} "
            f"this block did not: {failure.type}: {failure.message}{at}"
        )

    @staticmethod
    def _unmatched() -> Failure:
        return Failure(type="RanksDiffer", message="its copies did not ask for the same value on all ranks")

    # --- collective operations --------------------------------------------------------------------------------------

    def agree(self, what: str, keys: Iterable[BlockKey]) -> set[BlockKey]:
        """Agree with the other ranks, before a collective operation, on the blocks that take part in it.

        Waits for the other ranks. If the result is empty, no rank enters the operation.

        Args:
            what: a name of the operation.
            keys: the blocks that ask for it on this rank.

        Returns:
            The blocks that ask for it on all ranks. The caller ends the others with `difference`.
        """
        asked = set(keys) - self._announced
        agreed = set(asked)
        if not asked:
            return agreed
        self._send(_AtOperation(self.index, self.step, what, sorted(asked)))
        until = None if self._patience_s is None else time.monotonic() + self._patience_s
        for rank in range(self.count):
            while rank != self.index and agreed:
                message = self._next(rank, until)
                if message is None:
                    agreed.clear()
                elif isinstance(message, _StepOver | _Number):
                    # The other rank has gone on without this operation.
                    self._inbox[rank].appendleft(message)
                    agreed.clear()
                elif isinstance(message, _AtOperation):
                    theirs = {BlockKey(*key) for key in message.keys}
                    if message.step < self.step or theirs <= self._announced:
                        continue
                    agreed &= theirs if message.what == what else set()
                    break
                else:
                    self._note(message)
                    agreed -= self._elsewhere.keys()
        for key in asked - agreed:
            self.fail(key, self._unmatched)
        return agreed

    def greatest(self, number: int) -> int:
        """The greatest of the numbers that all ranks give in this step. All of them call it. Waits for them."""
        self._send(_Number(self.index, self.step, number))
        for rank in range(self.count):
            while rank != self.index:
                message = self._next(rank, None)
                if isinstance(message, _Number):
                    if message.step == self.step:
                        number = max(number, message.number)
                        break
                    continue
                if isinstance(message, _AtOperation) and message.step == self.step:
                    # The other rank waits at an operation for this rank, which has gone on without it.
                    for key in message.keys:
                        self.fail(BlockKey(*key), self._unmatched)
                self._note(message)
        return number

    def call(self, envoy: Any, forward: Callable[[], Any]) -> Any:
        """Run a module that a block calls. If it is sharded, first agree that the block calls it on all ranks.

        Raises:
            RanksDiffer: the block does not call the module on all ranks.
        """
        mediator = getattr(getcurrent(), "mediator", None)
        mediator = None if mediator is None else mediator()
        key = getattr(mediator, "key", None)
        if self._calling or key is None or not is_parallel(envoy._module):
            return forward()
        with watchdog.shielded(waiting=True):
            agreed = self.agree(f"{envoy.path}()", [key])
        if not agreed:
            raise self.difference(key)
        self._calling = True
        try:
            # If the time limit interrupted this rank inside the operation, the others would wait in it for ever.
            with watchdog.shielded():
                return forward()
        finally:
            self._calling = False

    def watch_calls(self) -> None:
        """Route the calls of modules by blocks of this process through `call`."""
        for kind in (Envoy, ParallelEnvoy):
            kind.__call__ = _called(kind.__call__, self)

    # --- receiving --------------------------------------------------------------------------------------------------

    def _note(self, message: Any) -> None:
        if isinstance(message, _CopyFailed):
            key = BlockKey(*message.key)
            if key.request in self.requests and key not in self._elsewhere:
                self._elsewhere[key] = message.rank, message.failure
                self._unread.append((key, False))

    def _next(self, rank: int, until: float | None) -> Any:
        """The next message of a rank; `None` if none has come by `until` (`time.monotonic()`; `None` for no limit)."""
        inbox = self._inbox[rank]
        while not inbox:
            left = None if until is None else until - time.monotonic()
            if left is not None and left <= 0:
                return None
            self._receive(None if left is None else int(left * 1000) + 1)
        return inbox.popleft()

    def _receive(self, timeout_ms: int | None) -> None:
        """Wait for a message, at most `timeout_ms` (`None` for no limit), and put all that have come in the inboxes."""
        if not self._pull.poll(timeout_ms):
            return
        try:
            while True:
                message = _decoder.decode(self._pull.recv(zmq.NOBLOCK))
                self._inbox[message.rank].append(message)
        except zmq.Again:
            pass


def _how(theirs: str | None, ours: str | None) -> Failure:
    return Failure(type="RanksDiffer", message=f"the block {theirs or 'goes on'} there and {ours or 'goes on'} here")


def _called(call: Callable[..., Any], ranks: Ranks) -> Callable[..., Any]:
    def wrapped(self: Any, *args: Any, hook: bool = False, **kwargs: Any) -> Any:
        return ranks.call(self, lambda: call(self, *args, hook=hook, **kwargs))

    return wrapped


def is_parallel(module: torch.nn.Module) -> bool:
    """Whether running a module takes a collective operation of all ranks."""
    known = module.__dict__.get("_tracewire_parallel")
    if known is None:
        known = any(
            getattr(one, "tp_size", 1) > 1 or type(one).__name__ == "LogitsProcessor" for one in module.modules()
        )
        module.__dict__["_tracewire_parallel"] = known
    return bool(known)
