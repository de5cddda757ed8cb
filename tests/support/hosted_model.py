"""A small model without vLLM whose blocks run in hosts, as the runner has them run."""

from __future__ import annotations

import gc
import queue
import socket
import sys
import sysconfig
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping
from functools import cached_property
from typing import Any

import msgspec
import torch
from nnsight.intervention.envoy import Envoy
from nnsight.intervention.source import NO_SKIP

from tracewire_bus.domain.fold import apply_delta
from tracewire_bus.wire.messages import Block, Delta
from tracewire_bus.wire.packing import decoder, pack
from tracewire_engine.link.step_link import LinkReceiver, LinkSender, encode_changes
from tracewire_engine.protocol.block_host import HostSettings
from tracewire_engine.protocol.keys import BLOCK_ARG, LIVE_ARG, RUN_ARG
from tracewire_engine.protocol.messages import FinishRecord, Report, StepRecord
from tracewire_engine.protocol.save_relay import Settings
from tracewire_engine.save_relay.relay import SaveRelay
from tracewire_engine.worker.block_host.accounts import Accounts
from tracewire_engine.worker.block_host.earlier_stages import EarlierStages
from tracewire_engine.worker.block_host.hosted_blocks import HostedBlocks
from tracewire_engine.worker.block_host.pool import HostPool
from tracewire_engine.worker.block_host.rank_link import RankLink
from tracewire_engine.worker.block_host.reading import ModelPaths
from tracewire_engine.worker.block_host.relay_link import RelayLink
from tracewire_engine.worker.block_host.report_thread import ReportThread
from tracewire_engine.worker.block_host.setup import outline_of
from tracewire_engine.worker.block_host.stream_flags import ThreadFlags
from tracewire_engine.worker.block_host.stream_visits import StreamVisits
from tracewire_engine.worker.blocks.live_params import LiveRun, LiveRuns

__all__ = ["HostedModel", "Outcome", "changes_of", "live_arguments", "relay_to", "settings_of"]

HIDDEN, VOCABULARY = 4, 50

_deltas = decoder(list[Delta])


class Layer(torch.nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.weight = torch.nn.Parameter(torch.randn(HIDDEN, HIDDEN, generator=generator), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x @ self.weight)


class Body(torch.nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList([Layer(seed) for seed in range(layers)])
        self.norm = Layer(77)


class Model(torch.nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.model = Body(layers)


def settings_of(module: torch.nn.Module, **options: Any) -> HostSettings:
    """The settings of hosts for a model with a list of layers at `model.layers`."""
    readable = ["/usr", "/lib", "/lib64", "/proc/self", *filter(None, sys.path), *sysconfig.get_paths().values()]
    given: dict[str, Any] = {"vocabulary": VOCABULARY, "block_timeout": 9.0, "step_timeout": 3.0, "readable": readable}
    given |= options
    return HostSettings(modules=outline_of(module), layers="model.layers", **given)


def live_arguments(run: str, values: Mapping[str, Any] | None) -> dict[str, Any]:
    """The arguments of a request of a run with these live parameters."""
    return {} if values is None else {RUN_ARG: run, LIVE_ARG: pack(values)}


def changes_of(run: str, version: int, values: Mapping[str, Any]) -> bytes:
    """A change of a run's live parameters, as the adapter sends it."""
    return encode_changes({run: (version, {name: msgspec.Raw(pack(value)) for name, value in values.items()})})


class Outcome:
    """What a request's reports fold to."""

    def __init__(self) -> None:
        self.steps: list[StepRecord] = []
        self.finish: FinishRecord | None = None

    @property
    def complete(self) -> bool:
        """Whether all reports have come. The end may overtake the saves of steps, which come by another way."""
        return self.finish is not None and len(self.steps) >= self.finish.steps

    @property
    def saves(self) -> dict[str, Any]:
        """The saves after all reports."""
        saves: dict[str, Any] = {}
        for record in [*self.steps, *([] if self.finish is None else [self.finish])]:
            for delta in _deltas(record.deltas):
                apply_delta(saves, delta)
        return saves


class _Link:
    """Takes the reports in place of the link to an adapter."""

    def __init__(self) -> None:
        self._reports: queue.SimpleQueue[Report] = queue.SimpleQueue()

    def send(self, *reports: Report) -> None:
        for report in reports:
            self._reports.put(report)

    def get(self, timeout_s: float) -> Report:
        """The next report."""
        return self._reports.get(timeout=timeout_s)

    def relay(self, _: HostPool) -> RelayLink:
        """A thread in place of the save relay."""
        return relay_to(self)

    def close(self) -> None:
        """Nothing is to be closed."""


class _AdapterLink(_Link):
    """Both ends of the link to an adapter. A process is the save relay, as in an engine."""

    def __init__(self) -> None:
        self._receiver = LinkReceiver()
        self._sender = LinkSender(self._receiver.address)
        self._come: deque[Report] = deque()
        self.send = self._sender.send  # type: ignore[method-assign]

    def get(self, timeout_s: float) -> Report:
        until = time.monotonic() + timeout_s
        while not self._come:
            self._come.extend(self._receiver.ready())
            if not self._come:
                if time.monotonic() > until:
                    raise TimeoutError
                time.sleep(0.0005)
        return self._come.popleft()

    def relay(self, pool: HostPool) -> RelayLink:
        """The save relay."""
        return RelayLink(pool.start_relay(), Settings(self._receiver.address))

    def close(self) -> None:
        """Close the receiver."""
        self._receiver.close()


def relay_to(link: Any) -> RelayLink:
    """A thread that passes on to `link` what hosts save, as the save relay does."""
    control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    relay = SaveRelay(theirs, lambda _: link)

    def run() -> None:
        with theirs:
            relay.run()

    threading.Thread(target=run, name="save relay", daemon=True).start()
    return RelayLink(control, Settings(""))


class _Request:
    def __init__(self, request: str) -> None:
        self.engine_id, self.index = request, 0


class HostedModel:
    """A model with two tokens a prompt, and all that a worker has for blocks in hosts.

    With `visits`, its thread does as the stream of a GPU (`stream_visits.py`). With `known_edits`, the worker does what
    blocks write where their source shows that (`known_edits.py`), and does not wait for them.
    """

    def __init__(
        self,
        *,
        layers: int = 3,
        step_s: float = 20.0,
        pool: HostPool | None = None,
        others: RankLink | None = None,
        earlier: EarlierStages | None = None,
        most_hosts: int | None = None,
        visits: bool = False,
        known_edits: bool = False,
        adapter_link: bool = False,
    ) -> None:
        self.module = Model(layers)
        self.envoy = Envoy(self.module)
        settings = settings_of(self.module)
        self.pool = pool or HostPool(settings)
        self.link = _AdapterLink() if adapter_link else _Link()
        link: Any = self.link
        # No C code that takes forever is waited for.
        self.reports = ReportThread(lambda: link, None, 15.0, lambda: self.link.relay(self.pool))
        #: What stands for the stream, and what waits for hosts in its place.
        self.flags = ThreadFlags(3 * step_s)
        self.visits = StreamVisits(self.flags, self.reports) if visits else None
        paths = ModelPaths(settings.modules, settings.layers)
        self.hosts = HostedBlocks(self.envoy, paths, self.pool, self.reports, step_s, others, earlier, self.visits)
        if not known_edits:
            self.hosts._accounts = Accounts(paths)
        if most_hosts is not None:
            self.hosts._hosts._most = most_hosts
        self.outcomes: dict[str, Outcome] = {}
        self.live = LiveRuns()

    def open(
        self,
        name: str,
        block: Block | str,
        *,
        trace: str = "",
        choices: int = 1,
        tenant: str = "",
        live: Mapping[str, Any] | None = None,
        **more: Any,
    ) -> None:
        """Take a request with a block."""
        if isinstance(block, str):
            block = Block(name="block", source=block, filename="mine.py", first_line=1)
        arguments = {BLOCK_ARG: msgspec.msgpack.encode(block), **live_arguments(trace or name, live), **more}
        request: Any = _Request(name)
        self.outcomes[name] = Outcome()
        run = LiveRun("") if live is None else self.live.join(trace or name, pack(live), name, name, 0)
        self.hosts.open(f"{name}-00000000", request, arguments, (trace or name, choices, tenant), [], run)

    def steer(self, trace: str, version: int, **values: Any) -> None:
        """Change live parameters of a trace from the next step on."""
        changes = changes_of(trace, version, values)
        self.live.steer(changes)
        self.hosts.steer(changes)

    @cached_property
    def began(self) -> dict[str, int]:
        """The first step of each request, on a stage of a pipeline."""
        return {}

    def step(self, tokens: Mapping[str, int], index: int) -> Any:
        """Run one step of the model with these requests. Returns the samples."""
        scheduled = {f"{name}-00000000": count for name, count in tokens.items()}
        reach = self._begin(scheduled, index)
        total = sum(scheduled.values())
        x = torch.linspace(-1, 1, total * HIDDEN).view(total, HIDDEN) + index
        with torch.inference_mode():
            samples = self._head(self._layers(x.clone(), reach), scheduled, reach)
        self._end()
        return samples

    def _layers(self, x: torch.Tensor, reach: Callable[..., Any], places: slice = slice(None)) -> torch.Tensor:
        """Run these layers."""
        for place, layer in list(enumerate(self.module.model.layers))[places]:
            path = f"model.model.layers.{place}"
            (x,), _ = reach(f"{path}.input", ((x,), {}))
            reach(f"{path}.skip", NO_SKIP)
            hidden, x = reach(f"{path}.output", (layer(x), x))
            x = hidden + x
        return x

    @staticmethod
    def _head(x: torch.Tensor, scheduled: Mapping[str, int], reach: Callable[..., Any]) -> Any:
        """The samples of what leaves the last layer."""
        last = torch.tensor(list(scheduled.values())).cumsum(0) - 1
        logits = x[last] @ torch.linspace(-1, 1, HIDDEN * VOCABULARY).view(HIDDEN, VOCABULARY)
        logits = reach("model.logits", logits, by_request=True)
        return reach("model.samples", logits.argmax(-1, keepdim=True), by_request=True)

    def _begin(self, scheduled: dict[str, int], index: int) -> Callable[..., Any]:
        """Begin a step. Returns the function that serves a location to the blocks."""
        hosts = self.hosts
        self.live.apply()
        hosts.begin(scheduled, list(scheduled), lambda _: index)
        return hosts.reach if hosts.active else lambda location, value, **_: value

    def _end(self) -> None:
        self.hosts.end()

    def finish(self, name: str, tokens: int | None = None) -> None:
        """The scheduler ends a request."""
        assert self.hosts.finish(f"{name}-00000000", tokens, None, None)
        self.hosts.tell_ends()

    def wait(self, *names: str, timeout_s: float = 60.0, hostile: Collection[str] = ()) -> None:
        """Wait until the ends of these requests have been reported, and what they held is given up.

        Of the `hostile` ones, saves may never come. An adapter gives them up after some seconds.
        """
        until = time.monotonic() + timeout_s
        for name in names:
            outcome = self.outcomes[name]
            while outcome.finish is None if name in hostile else not outcome.complete:
                self._take(until)
        # A host is closed behind the report of its trace's end.
        settled = threading.Event()
        self.reports.do(settled.set)
        assert settled.wait(timeout_s)

    def wait_for_step(self, name: str, timeout_s: float = 60.0, *, steps: int = 1) -> None:
        """Wait until so many steps of this request have been reported."""
        until = time.monotonic() + timeout_s
        while len(self.outcomes[name].steps) < steps:
            self._take(until)

    def _take(self, until: float) -> None:
        report = self.link.get(max(0.1, until - time.monotonic()))
        for step in report.steps:
            self.outcomes[step.request].steps.append(step)
        for finish in report.finishes:
            self.outcomes[finish.request].finish = finish

    def run(
        self, blocks: Mapping[str, Block | str], steps: int = 3, *, hostile: Collection[str] = ()
    ) -> dict[str, Outcome]:
        """Run blocks, each of a trace of its own, in one batch, to their ends: see `wait`."""
        for name, block in blocks.items():
            self.open(name, block)
        for index in range(steps):
            self.step(dict.fromkeys(blocks, 2 if index == 0 else 1), index)
        for name in blocks:
            self.finish(name, steps)
        self.wait(*blocks, hostile=hostile)
        return {name: self.outcomes[name] for name in blocks}

    def close(self) -> None:
        """End all hosts. Nothing waits for them any more."""
        for trace in list(self.hosts.traces.values()):
            trace.host.process.close()
        if self.visits is not None:
            self.visits.settle()
            self.visits.give_back()
        self.reports.close()
        self.pool.close()
        self.link.close()
        # The memory of hosts is in circles of objects, and each piece has descriptors.
        gc.collect()
