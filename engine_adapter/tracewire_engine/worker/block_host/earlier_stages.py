"""What the earlier pipeline stages tell the last one, which has the hosts of blocks (`stage_rows.py`)."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import msgspec
import torch

from tracewire_bus.wire.messages import Failure
from tracewire_engine.link.shared_rows import RowBytes, unpack_value
from tracewire_engine.worker.parallel.rank_sockets import RankSockets

from .rank_link import Called, Served, StepBegan, StepWatch
from .reading import Account
from .rows import StepRows
from .stage_rows import HostedRequests, StageAnswer, StageBegan, StageMessage, StagePart, named, stand_in, unpacked

__all__ = ["EarlierStages", "Reached"]

_encode = msgspec.msgpack.Encoder().encode
_message: msgspec.msgpack.Decoder[StageMessage] = msgspec.msgpack.Decoder(StageMessage)


class Reached(NamedTuple):
    """What a stage has come to: the locations that it has passed, then one with its value, of which it waits or not.

    `location` is empty at the end of the stage's part of a step.
    """

    passed: list[str]
    location: str = ""
    value: Any = None
    waits: bool = False
    failures: Mapping[str, Failure] = {}


class EarlierStages:
    """On the last stage, its end of the connections to the earlier ones.

    Args:
        group: of the stages.
        address: of the link to the adapter.
    """

    def __init__(self, group: Any, address: str) -> None:
        self._count = group.world_size - 1
        sockets = RankSockets(group, address, "stages")
        self._pull, self._push = sockets.pull, sockets.push
        #: Closes the connections. Only the first rank of the stage needs them.
        self.close = sockets.close
        self._requests = HostedRequests()
        self._names: list[list[str]] = [[] for _ in range(self._count)]
        #: Messages that have come before they were wanted, by stage.
        self._early: list[deque[tuple[StageMessage, RowBytes]]] = [deque() for _ in range(self._count)]
        self._rows: StepRows | None = None
        #: The stage that waits for blocks, if one does.
        self.waiting: int | None = None

    def open(self, request_id: str, account: Account) -> None:
        """Take a new request with blocks."""
        self._requests.add(request_id, account)

    def discard(self, request_id: str) -> None:
        """Forget a request that is over."""
        self._requests.discard(request_id)

    def wait_in(self, scheduled: Collection[str]) -> bool:
        """Whether the earlier stages wait for blocks in a step with these requests."""
        return self._requests.wait_in(scheduled)

    def reads_in(self, scheduled: Collection[str]) -> frozenset[str] | None:
        """The locations that blocks of the step's requests may ask for; `None` if the earlier stages wait for them."""
        return None if self.wait_in(scheduled) else self._requests.reads_in(scheduled)

    def begin(self, scheduled: Mapping[str, int], order: Iterable[str]) -> None:
        """Begin a step with these requests."""
        self._rows = self._requests.rows_of(scheduled, order)

    @property
    def due(self) -> bool:
        """Whether the earlier stages' parts of the step have not been taken."""
        return self._rows is not None

    def take(self) -> Iterator[Reached]:
        """What the earlier stages come to in the step, in their order. Waits for them."""
        rows, self._rows = self._rows, None
        assert rows is not None
        for stage, names in enumerate(self._names):
            while True:
                message, data = self._next(stage)
                if isinstance(message, StageBegan):
                    # The first stage's was taken before the step began here.
                    self._tell(stage, StepBegan(self._watch))
                    continue
                names += message.names
                reached = message.reached if isinstance(message, StagePart) else [message]
                for one in reached:
                    value = unpacked(one.value, rows, data)
                    self.waiting = stage if one.waits else None
                    yield Reached(named(one.before, names), names[one.place], value, one.waits, one.failures)
                if isinstance(message, StagePart):
                    yield Reached(named(message.passed, names), failures=message.failures)
                    break

    # --- steps in which blocks may write ------------------------------------------------------------------------------

    def began(self) -> list[tuple[str, int, int]]:
        """The requests of a step that the first stage begins, as `StageBegan` has them. Waits for it."""
        message, _ = self._next(0)
        if not isinstance(message, StageBegan):
            raise RuntimeError(f"a stage says {message!r:.200} where the beginning of a step was expected")
        return message.requests

    def tell_began(self, watch: StepWatch) -> None:
        """Tell the first stage where hosts want something."""
        self._watch = watch
        self._tell(0, StepBegan(watch))

    def serve(self, served: Served, data: torch.Tensor) -> None:
        """Tell the stage that waits what blocks leave. `data` has the bytes of the tensors."""
        assert served.watch is not None
        assert self.waiting is not None
        self._watch = served.watch
        self._tell(self.waiting, served, data)
        self.waiting = None

    def call(self, called: Called, data: torch.Tensor) -> Any:
        """What a module of the stage that waits returns. `data` has the bytes of the tensors of its arguments.

        Raises:
            Exception: of the type and with the message of what the module has raised.
        """
        assert self.waiting is not None
        self._tell(self.waiting, called, data)
        answer, found = self._next(self.waiting)
        if not isinstance(answer, StageAnswer):
            raise RuntimeError(f"a stage says {answer!r:.200} where an answer was expected")
        if answer.error is not None:
            raise type(answer.error[0], (Exception,), {})(answer.error[1])
        assert answer.value is not None
        return unpack_value(answer.value, lambda _, shape: found.read(shape), stand_in)

    # --- messages -----------------------------------------------------------------------------------------------------

    def _tell(self, stage: int, message: StepBegan | Served | Called, data: torch.Tensor | None = None) -> None:
        parts = [_encode(message)]
        if data is not None and data.numel():
            parts.append(data.numpy().tobytes())
        self._push[stage].send_multipart(parts)

    def _next(self, stage: int) -> tuple[Any, RowBytes]:
        while not self._early[stage]:
            head, *data = self._pull.recv_multipart(copy=True)
            message = _message.decode(head)
            self._early[message.stage].append((message, RowBytes.of(data)))
        return self._early[stage].popleft()
