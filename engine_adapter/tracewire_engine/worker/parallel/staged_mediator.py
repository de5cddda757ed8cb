"""Blocks under pipeline parallelism: every stage runs the block, and each is told what the others served.

A stage's forward pass comes by its own modules only. A block parks at locations of all of them, so its copy on a stage
also parks at locations that this stage will never come by. Each stage therefore keeps a log of what it served to the
block (what was asked, where, and the value) and sends it to the others, whose copies are fed from it as if the model
had come by:

    stage 0    forward of step t ──┬──────────────────────────▶  before its next step with that request: fed by stage 1
                                   │ log: what stage 0 served                 ▲
    stage 1                        └▶ fed by stage 0, forward of step t, samples ┘ log: what stage 1 served

Logs go over the CPU group of vLLM's pipeline group, beside the activations. Only what blocks asked for travels, and a
step in which nobody shares anything sends nothing. Whether a step does is known to every stage alike, from what the
scheduler has told all of them and what the logs have told since, so that no stage waits for a log that nobody sends.

The copies must do the same. Where one takes another way than its log (a random number that the block did not seed, a
clock), or fails alone, the request fails on all stages. The last stage samples and has been told everything, so it
alone reports.
"""

from __future__ import annotations

import io
import math
import pickle  # noqa: TID251 (from one worker of an engine to another, as vLLM's own messages between them)
import zlib
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from operator import itemgetter
from typing import Any, NamedTuple, Protocol

import torch
from nnsight.intervention.cache import Cache
from nnsight.intervention.interleaver import Event
from nnsight.util import apply
from vllm.distributed.parallel_state import GroupCoordinator

from tracewire_bus.wire.messages import Failure
from tracewire_engine.worker.blocks.compiler import RESULT, BlockMediator, failure_of, is_stop
from tracewire_engine.worker.blocks.live_params import LIVE
from tracewire_engine.worker.blocks.plain_values import CopyingCache

from .head_replicas import replicate
from .topology import OtherStage, Topology, described

__all__ = ["Entry", "Pipeline", "PipelineMixin", "Said", "StagedMediator", "StagesDiffer", "shared"]

#: Tells our messages in the group from vLLM's.
_TAG = 7321

#: Where every copy is served by itself.
_OURS = (LIVE, RESULT, None)

#: What a log has besides nnsight's events: something that `tracer.cache()` recorded.
_CACHED = "CACHED"


class StagesDiffer(RuntimeError):
    """A block did something else on one pipeline stage than on another."""


class Entry(NamedTuple):
    """One thing that a stage served to a block: the event's name, where, at which occurrence, and the value read.

    `order` counts what the stage served, to whichever block: it is served in the same order elsewhere.
    """

    event: str
    location: str
    occurrence: int
    value: Any
    order: int = 0


class Said(NamedTuple):
    """What a stage tells of one request's blocks in a step: its own, whose name is empty, and standing ones.

    `ended` when none of the blocks will ask for anything more; `errors` are those that were not told before.
    """

    request: str
    logs: dict[str, list[Entry]]
    ended: bool
    errors: dict[str, Failure]


class Share(NamedTuple):
    """What a stage has of one request: its blocks' copies by name, and what failed on it."""

    copies: dict[str, StagedMediator]
    errors: dict[str, Failure]


class Message(NamedTuple):
    """What a stage tells the others of a step; `read` and `failures` are of declared interventions (`plan.py`)."""

    said: list[Said]
    read: list[Any]
    failures: dict[str, Failure]


def _kept(value: Any) -> Any:
    """A served value as it is now: the block, and the model after it, may change it in place."""
    return apply(value, torch.clone, torch.Tensor)


class _LoggedCache(CopyingCache):
    """A `tracer.cache()` that also sees what passes on other stages."""

    def _record(self, path: str, key: str, value: Any) -> None:
        super()._record(path, key, value)
        mediator: StagedMediator = self.__dict__["mediator"]
        mediator.note(_CACHED, path, mediator.caches.index(self), (key, value))

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in super().__getstate__().items() if key != "mediator"}


class _Random:
    """Torch's random numbers for one block: the same on all stages, whose generators other requests use differently."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._state: torch.Tensor | None = None
        self._device: torch.Tensor | None = None
        self._before: tuple[torch.Tensor, torch.Tensor | None] | None = None

    def __enter__(self) -> None:
        accelerated = torch.cuda.is_available()
        self._before = torch.get_rng_state(), torch.cuda.get_rng_state() if accelerated else None
        if self._state is None:
            torch.manual_seed(self._seed)
            return
        torch.set_rng_state(self._state)
        if self._device is not None:
            torch.cuda.set_rng_state(self._device)

    def __exit__(self, *_: object) -> None:
        assert self._before is not None
        self._state = torch.get_rng_state()
        torch.set_rng_state(self._before[0])
        if self._before[1] is not None:
            self._device = torch.cuda.get_rng_state()
            torch.cuda.set_rng_state(self._before[1])


class StagedMediator(BlockMediator):
    """A block's copy on one stage."""

    pending: Any

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.log: list[Entry] = []
        #: What other stages served and this copy has not been fed.
        self.incoming: deque[Entry] = deque()
        #: The live parameters of the step that the block is at, which may be behind the one that the model is at.
        self.live_values: dict[str, Any] | None = None
        self._fed = False
        self._random = _Random(0)
        #: How often each location had been passed when the block began to wait for a later stage's module.
        self._waited: tuple[str, dict[str, int]] | None = None

    @property
    def over(self) -> bool:
        """Whether the block will ask for nothing more."""
        if self.exception is not None:
            return True
        return self.worker is not None and self.worker.dead and not self.caches

    def name(self, request: str) -> None:
        """Say whose block it is, on all stages alike, before it is started."""
        self._random = _Random(zlib.crc32(request.encode()))

    def begin_step(self) -> None:
        """The model begins a step with this request."""
        self._waited = None
        self.live_values = self.live.values

    def switch(self, *args: Any) -> Any:
        pending = self.pending
        if pending is not None and not self._fed and pending.provider not in _OURS:
            value = _kept(args[0]) if args and pending.event is Event.VALUE else None
            self.note(pending.event.name, pending.provider, pending.iteration, value)
        self._fed = False
        try:
            with self._random:
                return super().switch(*args)
        finally:
            for cache in self.caches:
                if type(cache) is CopyingCache:
                    cache.__class__ = _LoggedCache
                    cache.__dict__["mediator"] = self

    def note(self, event: str, location: str, occurrence: int, value: Any) -> None:
        """Enter in the log what this stage has served."""
        topology: Topology = self.interleaver.topology
        topology.served += 1
        self.log.append(Entry(event, location, occurrence, value, topology.served))

    def dispose(self) -> None:
        for cache in self.caches:
            cache.__dict__.pop("mediator", None)
            cache.__class__ = CopyingCache
        super().dispose()
        self.log.clear()
        self.incoming.clear()

    # --- called by the block ----------------------------------------------------------------------------------------

    def wanted(self, location: str) -> int:
        asked = super().wanted(location)
        topology: Topology = self.interleaver.topology
        owner = topology.owner(location)
        if owner == topology.index and self._waited is not None:
            self._check_passed(location)
        if owner is None or owner == topology.index or self.iteration is not None:
            return asked
        # Not counted here: a module is taken to be passed once a step.
        steps: int = self.occurrence(LIVE)
        return max(0, steps if owner < topology.index or topology.told else steps - 1)

    def _check_passed(self, location: str) -> None:
        """Refuse what the model has come by here while the block waited for a later stage."""
        assert self._waited is not None
        module, passed = self._waited
        before, now = passed.get(location, 0), self.occurrence(location)
        asked = before if self.iteration is None else self.iteration
        if before <= asked < now:
            topology: Topology = self.interleaver.topology
            raise OtherStage(
                f"{_short(location)} is on pipeline stage {topology.index}, and the model had passed it before "
                f"{_short(module)}, which stage {topology.owner(f'{module}()')} holds, could be called in this step: "
                "ask for what is on earlier stages before calling modules of later ones"
            )

    def called(self, path: str, result: Any) -> None:
        """The block has called a module that this stage holds, and others do not."""
        self.note(Event.VALUE.name, f"{path}()", 0, _kept(result))

    def calls_elsewhere(self, path: str) -> None:
        """The block calls a module that another stage holds; what it returned there will be fed.

        Raises:
            OtherStage: an earlier one's, which has done its part of this step.
        """
        topology: Topology = self.interleaver.topology
        owner = topology.owner(f"{path}()")
        assert owner is not None
        if owner < topology.index:
            if not self.incoming or self.incoming[0].location != f"{path}()":
                raise OtherStage(
                    f"{_short(path)} is on pipeline stage {owner}, which has done its part of this step: it can be "
                    f"called only before the block asks for anything of stage {topology.index}"
                )
        elif self._waited is None:
            counts, start = self.interleaver.counts, self.counts_at_start
            self._waited = path, {where: count - start.get(where, 0) for where, count in counts.items()}

    # --- fed by other stages ----------------------------------------------------------------------------------------

    def feed(self) -> None:
        """Serve the first of what is `incoming`. Raises nothing: see `exception`."""
        if not self.incoming:
            return
        entry = self.incoming[0]
        if entry.event == _CACHED:
            if entry.occurrence < len(self.caches):
                Cache._record(self.caches[entry.occurrence], entry.location, *entry.value)
            self.incoming.popleft()
            return
        pending = self.pending
        if pending is None:
            if self.exception is None:
                self._differ(f"it has ended here, and asked for {_short(entry.location)} on another stage")
            self.incoming.clear()
            return
        if pending.provider != entry.location or pending.event.name != entry.event or self._other_step(entry):
            self._differ(f"it asks for {_short(pending)} here, and for {_short(entry.location)} on another stage")
            self.incoming.clear()
            return
        self.incoming.popleft()
        if self.iteration:
            self.iteration = None
        self._fed = True
        try:
            if pending.event is Event.VALUE:
                self.pending = self.switch(entry.value)
            else:
                self.pending = self.switch()
        except Exception as exception:
            self.exception = exception
            self.pending = None

    def _other_step(self, entry: Entry) -> bool:
        pinned = self.iteration is not None and entry.event == Event.VALUE.name and not entry.location.endswith("()")
        return pinned and self.pending is not None and self.pending.iteration != entry.occurrence

    def _differ(self, how: str) -> None:
        error = StagesDiffer(
            f"under pipeline parallelism a block runs once on each stage and must do the same on all of them: {how}. "
            "Seed random numbers in the block, and let nothing depend on a clock or on what is outside the model"
        )
        self.halt(error)

    def halt(self, error: BaseException) -> None:
        self._fed = True
        super().halt(error)


def _short(location: Any) -> str:
    return str(location).removeprefix("model.")


class _Tensors:
    """The tensors of a message, on their way from one device to another in one copy."""

    def __init__(self) -> None:
        self.found: list[torch.Tensor] = []
        #: dtype, shape, first byte
        self.table: list[tuple[str, tuple[int, ...], int]] = []
        self.size = 0

    def add(self, tensor: torch.Tensor) -> int:
        flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        self.table.append((str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), self.size))
        if flat.numel() % 16:
            flat = torch.nn.functional.pad(flat, (0, 16 - flat.numel() % 16))
        self.found.append(flat)
        self.size += flat.numel()
        return len(self.table) - 1

    def bytes(self) -> torch.Tensor:
        """All of them, in host memory."""
        if not self.found:
            return torch.empty(0, dtype=torch.uint8)
        if any(flat.device != self.found[0].device for flat in self.found):
            return torch.cat([flat.cpu() for flat in self.found])
        return torch.cat(self.found).cpu()


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO, tensors: _Tensors) -> None:
        super().__init__(file, protocol=5)
        self._tensors = tensors

    def persistent_id(self, value: Any) -> int | None:
        plain = type(value) is torch.Tensor and value.layout is torch.strided and not value.is_quantized
        return self._tensors.add(value) if plain else None


class _Unpickler(pickle.Unpickler):
    def __init__(self, data: Any, tensors: Sequence[torch.Tensor]) -> None:
        super().__init__(io.BytesIO(data))
        self._tensors = tensors

    def persistent_load(self, key: int) -> torch.Tensor:
        return self._tensors[key]


def _unpacked(
    table: Sequence[tuple[str, tuple[int, ...], int]], data: torch.Tensor, device: torch.device
) -> list[torch.Tensor]:
    """The tensors of a message, on `device`, each in memory of its own, so that none keeps the whole message."""
    flat = data.to(device)
    found = []
    for name, shape, start in table:
        dtype: torch.dtype = getattr(torch, name)
        size = math.prod(shape) * dtype.itemsize
        found.append(flat[start : start + size].clone().view(dtype).reshape(shape))
    return found


def _pickled(value: Any, tensors: _Tensors) -> bytes:
    file = io.BytesIO()
    _Pickler(file, tensors).dump(value)
    return file.getvalue()


class Book(Protocol):
    """The live requests of a stage."""

    def copies(self, request: str) -> Mapping[str, StagedMediator]:
        """The copies of a request's blocks, by name."""

    def fail(self, said: Said) -> None:
        """Take what failed on another stage."""


class Pipeline:
    """This stage's end of the logs."""

    def __init__(self, group: GroupCoordinator, topology: Topology, device: torch.device) -> None:
        self._group = group
        self.topology = topology
        self._device = device
        #: Steps of which later stages have yet to tell, each with the requests that shared.
        self._due: deque[frozenset[str]] = deque()
        self._sent: list[tuple[Any, torch.Tensor]] = []
        #: Requests with a block that has not ended on all stages, each with the stages on which it has.
        self.blocks: dict[str, set[int]] = {}
        #: Requests with declared interventions on other stages than the last.
        self.early: set[str] = set()
        #: Of the step under way: which requests have something to share, in the same order on all stages.
        self.sharing: list[str] = []
        self.reads = False
        self._told: dict[str, set[str]] = {}

    @property
    def index(self) -> int:
        """The number of this stage."""
        return self.topology.index

    @property
    def count(self) -> int:
        """How many requests it holds anything for."""
        return max(len(self.blocks), len(self.early), len(self._told))

    def forget(self, request: str) -> None:
        """A request is over."""
        self.blocks.pop(request, None)
        self.early.discard(request)
        self._told.pop(request, None)

    def begin(self, scheduled: Collection[str]) -> None:
        """A step begins with these requests: decide, as all stages do alike, what of it is shared."""
        blocks = self.blocks
        self.sharing = [request for request in scheduled if request in blocks] if blocks else []
        self.reads = bool(self.early) and not self.early.isdisjoint(scheduled)

    # --- receiving --------------------------------------------------------------------------------------------------

    def catch_up(self, requests: Collection[str], book: Book) -> None:
        """Take what later stages served in earlier steps of these requests. Waits for it.

        A stage has been sent all it needs for those steps, so it is not waiting for this one.
        """
        due = self._due
        if not due:
            return
        last = max((place for place, step in enumerate(due) if not step.isdisjoint(requests)), default=-1)
        self.topology.told = True
        try:
            for _ in range(last + 1):
                due.popleft()
                self._take(range(self.index + 1, self.topology.count), book)
        finally:
            self.topology.told = False

    def take_earlier(self, book: Book) -> list[Message]:
        """Take what earlier stages served in the step under way. Waits for it."""
        if not self.sharing and not self.reads:
            return []
        return self._take(range(self.index), book)

    def _take(self, stages: range, book: Book) -> list[Message]:
        # All of them first: who is fed from one looks at what will come of the others.
        told = [(stage, self._receive(stage)) for stage in stages]
        queue: list[tuple[int, int, StagedMediator]] = []
        for stage, message in told:
            for said in message.said:
                copies = book.copies(said.request)
                for name, entries in said.logs.items():
                    mediator = copies.get(name)
                    if mediator is not None:
                        mediator.incoming.extend(entries)
                        queue.extend((stage, entry.order, mediator) for entry in entries)
        queue.sort(key=itemgetter(0, 1))
        for _, _, mediator in queue:
            mediator.feed()
        for stage, message in told:
            for said in message.said:
                if said.errors:
                    book.fail(said)
                if said.ended:
                    self._end(said.request, stage)
        return [message for _, message in told]

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
        table, body = pickle.loads(data[:head].numpy().data)  # noqa: S301
        tensors = _unpacked(table, data[head:], self._device)
        message: Message = _Unpickler(body, tensors).load()
        return message

    # --- sending ----------------------------------------------------------------------------------------------------

    def tell(self, share: Callable[[str], Share], read: list[Any], failures: dict[str, Failure]) -> None:
        """This stage's part of the step is over: send the others what it served. Waits for nobody."""
        self._sent = [(work, data) for work, data in self._sent if not work.is_completed()]
        later = range(self.index + 1, self.topology.count) if self.sharing or self.reads else ()
        earlier = range(self.index) if self.sharing else ()
        if not later and not earlier:
            return
        self.topology.messages += len(later) + len(earlier)
        said = [self._said(request, share(request)) for request in self.sharing]
        tensors = _Tensors()
        try:
            body = _pickled(Message(said, read, failures), tensors)
        except Exception:  # of a value that a block was served
            said = [self._sendable(one) for one in said]
            tensors = _Tensors()
            body = _pickled(Message(said, read, failures), tensors)
        head = pickle.dumps((tensors.table, body), protocol=5)
        flat = tensors.bytes()
        data = torch.cat([torch.frombuffer(bytearray(head), dtype=torch.uint8), flat])
        sizes = torch.tensor([len(head), data.numel()], dtype=torch.int64)
        data_of = (sizes, data)
        for stage in (*earlier, *later):
            for part in data_of:
                work = torch.distributed.isend(part, self._group.ranks[stage], group=self._group.cpu_group, tag=_TAG)
                self._sent.append((work, part))
        # Told with the step, as everybody else learns it with the step.
        for one in said:
            if one.ended:
                self._end(one.request, self.index)
        if self.index < self.topology.last and self.sharing:
            self._due.append(frozenset(self.sharing))

    def _said(self, request: str, share: Share) -> Said:
        logs: dict[str, list[Entry]] = {}
        for name, mediator in share.copies.items():
            if mediator.log:
                logs[name], mediator.log = mediator.log, []
        ended = "" in share.errors or all(mediator.over for mediator in share.copies.values())
        told = self._told.setdefault(request, set())
        fresh = {name: error for name, error in share.errors.items() if name not in told}
        told.update(fresh)
        return Said(request, logs, ended, fresh)

    @staticmethod
    def _sendable(said: Said) -> Said:
        """The same without what cannot be pickled, which the request fails with."""
        logs, errors = {}, dict(said.errors)
        for name, log in said.logs.items():
            try:
                _pickled(log, _Tensors())
                logs[name] = log
            except Exception as exception:
                message = f"what the block was served cannot be sent to other pipeline stages: {exception}"
                errors.setdefault(name, Failure(type=type(exception).__name__, message=message, field="block"))
        return said._replace(logs=logs, errors=errors)


class PipelineMixin:
    """For a platform's model runner: its stage of the pipeline is completed once it has loaded its part of the model.

    Stands before vLLM's runner and after nnsight's, whose tree is built over what this leaves.
    """

    tracewire_pipeline: Pipeline | None = None

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        super().load_model(*args, **kwargs)  # type: ignore[misc]
        from vllm.distributed.parallel_state import get_pp_group

        group = get_pp_group()
        if group.world_size == 1:
            return
        runner: Any = self
        model: torch.nn.Module = runner.get_model()
        if not group.is_first_rank and runner.intermediate_tensors is None:
            # vLLM makes the buffer to receive in when it warms up, which it does not on a CPU.
            buffers: Any = model
            runner.intermediate_tensors = buffers.make_empty_intermediate_tensors(
                batch_size=runner.max_num_tokens, dtype=runner.model_config.dtype, device=runner.device
            )
        replicate(group, model, runner.vllm_config, runner.device)
        trees: list[Any] = [None] * group.world_size
        torch.distributed.all_gather_object(trees, described(model), group=group.cpu_group)
        topology = Topology(group.rank_in_group, trees)
        topology.complete(model)
        self.tracewire_pipeline = Pipeline(group, topology, runner.device)


def shared(copies: dict[str, StagedMediator], error: Any) -> Share:
    """What a stage has of a request: its blocks' copies by name, and its error, of ours or nnsight's form."""
    errors: dict[str, Failure] = {}
    for name, mediator in copies.items():
        if mediator.exception is not None and not is_stop(mediator.exception):
            errors[name] = failure_of(mediator.exception, mediator.compiled)
    if isinstance(error, Failure):
        errors[""] = error
    elif error is not None:
        errors[""] = Failure(type=error["type_name"], message=error["message"], field="block")
    return Share(copies, errors)
