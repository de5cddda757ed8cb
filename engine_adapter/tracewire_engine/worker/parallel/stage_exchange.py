"""The updates that pipeline stages send each other about blocks in each step, and how they travel."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from operator import itemgetter
from typing import Any, NamedTuple, Protocol, TypeAlias

import msgspec
import torch
from vllm.distributed.parallel_state import GroupCoordinator, get_pp_group

from tracewire_bus.wire.messages import Failure
from tracewire_engine.worker.blocks.failures import failure_of, is_stop

from .head_replicas import replicate
from .plain_messages import Tensors, Unsendable, decoded, encoded, gathered, unpacked
from .staged_mediator import Entry, StagedMediator
from .topology import Topology, described, packed_tree, unpacked_tree

__all__ = ["Pipeline", "RequestRegistry", "StageState", "StageUpdate", "made_pipeline", "stage_state"]

#: Tells our messages in the group from vLLM's.
_TAG = 7321
#: The head of a message: the table of its tensors (dtype, shape, first byte), and the encoded message.
_Head: TypeAlias = tuple[list[tuple[str, list[int], int]], bytes]


class StageUpdate(NamedTuple):
    """A stage's update about the blocks of one request in a step: its own block, named `""`, and those of edits.

    `ended` is set when none of the blocks will ask for anything more. `errors` are those not sent before.
    """

    request: str
    logs: dict[str, list[Entry]]
    ended: bool
    errors: dict[str, Failure]


class StageState(NamedTuple):
    """One request on one stage: the copies of its blocks, and their failures, by the block's name."""

    copies: dict[str, StagedMediator]
    errors: dict[str, Failure]


class Message(NamedTuple):
    """A stage's message to another in a step. `read` and `failures` belong to declared interventions (`plan.py`)."""

    updates: list[StageUpdate]
    read: list[Any]
    failures: dict[str, Failure]


def _encoded(message: Message, tensors: Tensors) -> bytes:
    """Encode a message.

    Raises:
        Unsendable: it has a value that cannot travel.
    """
    updates = [
        [
            update.request,
            {name: [list(entry) for entry in log] for name, log in update.logs.items()},
            update.ended,
            {name: msgspec.to_builtins(error) for name, error in update.errors.items()},
        ]
        for update in message.updates
    ]
    failures = {name: msgspec.to_builtins(failure) for name, failure in message.failures.items()}
    return encoded([updates, message.read, failures], tensors)


def _decoded(data: bytes | memoryview, tensors: Sequence[torch.Tensor]) -> Message:
    """Decode a message.

    Raises:
        ValueError: it is malformed.
    """
    found, read, failed = decoded(data, tensors)
    updates = []
    for request, packed, ended, errors in found:
        logs = {name: [Entry(*one) for one in log] for name, log in packed.items()}
        updates.append(StageUpdate(request, logs, ended, _failures(errors)))
    return Message(updates, read, _failures(failed))


def _failures(found: Mapping[str, Any]) -> dict[str, Failure]:
    return {name: msgspec.convert(one, Failure) for name, one in found.items()}


class RequestRegistry(Protocol):
    """The live requests of a stage."""

    def copies(self, request: str) -> Mapping[str, StagedMediator]:
        """The copies of a request's blocks, by name."""

    def fail(self, update: StageUpdate) -> None:
        """Take the failures of a request's blocks on another stage."""


class Pipeline:
    """Sends this stage's logs to the other stages and takes theirs."""

    def __init__(self, group: GroupCoordinator, topology: Topology, device: torch.device) -> None:
        self._group = group
        self.topology = topology
        self._device = device
        #: Steps of which the logs of later stages have not come yet, each with the requests in its logs.
        self._due: deque[frozenset[str]] = deque()
        self._sent: list[tuple[Any, torch.Tensor]] = []
        #: Requests with a block that has not ended on all stages, each with the stages on which it has.
        self.blocks: dict[str, set[int]] = {}
        #: Requests with declared interventions on other stages than the last.
        self.early: set[str] = set()
        #: Of the current step: the requests whose blocks may have log entries, in the same order on all stages.
        self.sharing: list[str] = []
        #: Whether the current step has reads of declared interventions on earlier stages.
        self.reads = False
        self._sent_errors: dict[str, set[str]] = {}

    @property
    def index(self) -> int:
        """The number of this stage."""
        return self.topology.index

    @property
    def count(self) -> int:
        """How many requests this stage holds state for."""
        return max(len(self.blocks), len(self.early), len(self._sent_errors))

    def forget(self, request: str) -> None:
        """Forget a request that is over."""
        self.blocks.pop(request, None)
        self.early.discard(request)
        self._sent_errors.pop(request, None)

    def begin(self, scheduled: Collection[str]) -> None:
        """Begin a step with these requests. Every stage decides in the same way which of them are in the logs."""
        blocks = self.blocks
        self.sharing = [request for request in scheduled if request in blocks] if blocks else []
        self.reads = bool(self.early) and not self.early.isdisjoint(scheduled)

    # --- receiving --------------------------------------------------------------------------------------------------

    def catch_up(self, requests: Collection[str], registry: RequestRegistry) -> None:
        """Take the logs of later stages of earlier steps with these requests. Waits for them.

        The later stages have all that they need for those steps, so they do not wait for this one in turn.
        """
        due = self._due
        if not due:
            return
        last = max((place for place, step in enumerate(due) if not step.isdisjoint(requests)), default=-1)
        self.topology.catching_up = True
        try:
            for _ in range(last + 1):
                due.popleft()
                self._take(range(self.index + 1, self.topology.count), registry)
        finally:
            self.topology.catching_up = False

    def take_earlier(self, registry: RequestRegistry) -> list[Message]:
        """Take the messages of earlier stages in the current step. Waits for them."""
        if not self.sharing and not self.reads:
            return []
        return self._take(range(self.index), registry)

    def _take(self, stages: range, registry: RequestRegistry) -> list[Message]:
        # Receive from all stages first: a block that is fed from one looks at the entries of the others.
        received = [(stage, self._receive(stage)) for stage in stages]
        queue: list[tuple[int, int, StagedMediator]] = []
        for stage, message in received:
            for update in message.updates:
                copies = registry.copies(update.request)
                for name, entries in update.logs.items():
                    mediator = copies.get(name)
                    if mediator is not None:
                        mediator.incoming.extend(entries)
                        queue.extend((stage, entry.order, mediator) for entry in entries)
        queue.sort(key=itemgetter(0, 1))
        for _, _, mediator in queue:
            mediator.feed()
        for stage, message in received:
            for update in message.updates:
                if update.errors:
                    registry.fail(update)
                if update.ended:
                    self._end(update.request, stage)
        return [message for _, message in received]

    def _end(self, request: str, stage: int) -> None:
        ended = self.blocks.get(request)
        if ended is not None:
            ended.add(stage)
            if len(ended) == self.topology.count:
                del self.blocks[request]

    def _receive(self, stage: int) -> Message:
        source, group = self._group.ranks[stage], self._group.cpu_group
        sizes = torch.empty(2, dtype=torch.int64)
        torch.distributed.recv(sizes, source, group=group, tag=_TAG)
        head, total = (int(size) for size in sizes)
        data = torch.empty(total, dtype=torch.uint8)
        torch.distributed.recv(data, source, group=group, tag=_TAG)
        table, body = msgspec.msgpack.decode(data[:head].numpy().data, type=_Head)
        return _decoded(body, unpacked(table, data[head:], self._device))

    # --- sending ----------------------------------------------------------------------------------------------------

    def send_step(self, share: Callable[[str], StageState], read: list[Any], failures: dict[str, Failure]) -> None:
        """Send the other stages the values that this one served in its part of the step. Does not wait for them.

        Args:
            share: returns the state of a request on this stage.
            read: the values that declared interventions read here.
            failures: of declared interventions, by the scheduler's request id.
        """
        self._sent = [(work, data) for work, data in self._sent if not work.is_completed()]
        later = range(self.index + 1, self.topology.count) if self.sharing or self.reads else ()
        earlier = range(self.index) if self.sharing else ()
        if not later and not earlier:
            return
        self.topology.messages += len(later) + len(earlier)
        updates = [self._update_of(request, share(request)) for request in self.sharing]
        tensors = Tensors()
        try:
            body = _encoded(Message(updates, read, failures), tensors)
        except Unsendable:
            # A value that a block was served has a type that does not travel.
            updates = [self._sendable(one) for one in updates]
            tensors = Tensors()
            body = _encoded(Message(updates, read, failures), tensors)
        head = msgspec.msgpack.encode((tensors.table, body))
        flat = tensors.bytes()
        data = torch.cat([torch.frombuffer(bytearray(head), dtype=torch.uint8), flat])
        sizes = torch.tensor([len(head), data.numel()], dtype=torch.int64)
        data_of = (sizes, data)
        for stage in (*earlier, *later):
            for part in data_of:
                work = torch.distributed.isend(part, self._group.ranks[stage], group=self._group.cpu_group, tag=_TAG)
                self._sent.append((work, part))
        # Noted after sending, since the other stages learn it from this message.
        for one in updates:
            if one.ended:
                self._end(one.request, self.index)
        if self.index < self.topology.last and self.sharing:
            self._due.append(frozenset(self.sharing))

    def _update_of(self, request: str, share: StageState) -> StageUpdate:
        logs: dict[str, list[Entry]] = {}
        for name, mediator in share.copies.items():
            if mediator.log:
                logs[name], mediator.log = mediator.log, []
        ended = "" in share.errors or all(mediator.over for mediator in share.copies.values())
        sent = self._sent_errors.setdefault(request, set())
        new = {name: error for name, error in share.errors.items() if name not in sent}
        sent.update(new)
        return StageUpdate(request, logs, ended, new)

    @staticmethod
    def _sendable(update: StageUpdate) -> StageUpdate:
        """The update without the logs that cannot travel. Each of these becomes an error of the request."""
        logs, errors = {}, dict(update.errors)
        for name, log in update.logs.items():
            try:
                encoded([list(entry) for entry in log], Tensors())
                logs[name] = log
            except Unsendable as exception:
                message = f"a value that the block was served cannot be sent to other pipeline stages: {exception}"
                errors.setdefault(name, Failure(type=type(exception).__name__, message=message, field="block"))
        return update._replace(logs=logs, errors=errors)


def made_pipeline(runner: Any) -> Pipeline | None:
    """Complete the module tree of a runner's pipeline stage. Called when vLLM has loaded the model.

    Returns:
        The connection to the other stages; `None` if the model has one stage.
    """
    if runner.vllm_config.parallel_config.pipeline_parallel_size == 1:
        return None
    group = get_pp_group()
    model: torch.nn.Module = runner.get_model()
    if not group.is_first_rank and runner.intermediate_tensors is None:
        # vLLM makes the receive buffer when it warms up, which it does not do on a CPU.
        buffers: Any = model
        runner.intermediate_tensors = buffers.make_empty_intermediate_tensors(
            batch_size=runner.max_num_tokens, dtype=runner.model_config.dtype, device=runner.device
        )
    replicate(group, model, runner.vllm_config, runner.device)
    trees = gathered(packed_tree(described(model)), group)
    topology = Topology(group.rank_in_group, [unpacked_tree(tree) for tree in trees])
    topology.complete(model)
    return Pipeline(group, topology, runner.device)


def stage_state(copies: dict[str, StagedMediator], error: Failure | None) -> StageState:
    """The state of one request on one stage.

    Args:
        copies: of the request's blocks, by name.
        error: the request's error, if it has one.
    """
    errors: dict[str, Failure] = {}
    for name, mediator in copies.items():
        if mediator.exception is not None and not is_stop(mediator.exception):
            errors[name] = failure_of(mediator.exception, mediator.compiled)
    if error is not None:
        errors[""] = error
    return StageState(copies, errors)
