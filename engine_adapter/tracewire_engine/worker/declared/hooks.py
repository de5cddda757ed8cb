"""Where the model's forward pass meets declared interventions: nnsight's interleaver, with the plan's locations."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

import torch
from nnsight.intervention.batching import SkipParts
from nnsight.modeling.vllm.interleaver import VLLMInterleaver

from tracewire_engine.worker.blocks.batched_serving import BlockServing
from tracewire_engine.worker.parallel.topology import Topology

from .cuda_graphs import GraphKind, StepGraphs, current_capture
from .graph_proof import BothGraphs
from .plan import DeclaredRequests, LocationHook

if TYPE_CHECKING:
    from tracewire_engine.worker.block_host.setup import BlocksElsewhere

__all__ = ["BY_REQUEST", "DeclaredInterleaver"]

#: What steps run. Where tensor-parallel ranks need different ones of these, all of them run the last one.
_GRAPHS: Final[tuple[StepGraphs, ...]] = ("bare", "whole", "both", "broken")

#: The locations whose values have one row for each request.
BY_REQUEST = frozenset(("model.logits", "model.samples"))


class DeclaredInterleaver(VLLMInterleaver, BlockServing):
    """nnsight's interleaver, which serves a location to declared interventions before it serves it to blocks.

    While a block runs, every module hands its values to the interleaver. While no block runs, no module does: the
    interleaver then reaches the locations of declared interventions by forward hooks, which `arm` installs.
    """

    declared: DeclaredRequests
    module: torch.nn.Module
    armed: set[str]
    #: The number of the step in which the forward pass has come to a location last.
    visited: dict[str, int]
    #: What the CUDA graph under capture has at its taps.
    captured: GraphKind = "broken"
    #: Under pipeline parallelism: which stage holds which module, and the locations that another stage serves
    #: although the forward pass reaches them on this stage.
    topology: Topology | None = None
    elsewhere: frozenset[str] = frozenset()
    #: With `--blocks host`: the blocks of all requests, none of which runs in this process.
    hosts: BlocksElsewhere | None = None

    @classmethod
    def install(cls, interleaver: VLLMInterleaver, declared: DeclaredRequests, module: torch.nn.Module) -> None:
        """Turn `interleaver` into a `DeclaredInterleaver` over `module`, whose submodules its locations name."""
        interleaver.__class__ = cls
        interleaver.declared, interleaver.module, interleaver.armed = declared, module, set()
        interleaver.skipped, interleaver.visited = {}, {}

    def arm(self, locations: Iterable[str]) -> None:
        """Install forward hooks at these locations, to reach them while no block runs."""
        for location in locations:
            if location in self.armed:
                continue
            self.armed.add(location)
            path, _, side = location.removeprefix("model.").rpartition(".")
            module = self.module.get_submodule(path)
            if side == "input":
                module.register_forward_pre_hook(self._entering(location), with_kwargs=True)
            else:
                module.register_forward_hook(self._leaving(location))

    def _entering(self, location: str) -> Callable[..., Any]:
        def hook(_: Any, positional: Any, named: Any) -> Any:
            return self._hooked(location, (positional, named))

        return hook

    def _leaving(self, location: str) -> Callable[..., Any]:
        def hook(_: Any, __: Any, output: Any) -> Any:
            return self._hooked(location, output)

        return hook

    def _hooked(self, location: str, value: Any) -> Any:
        hook = None if location in self.elsewhere else self.declared.hooks.get(location)
        return None if hook is None or self.busy or not self.interleaving else self._serve(hook, value)

    def handle(self, provider: str, value: Any) -> Any:
        if self.hosts is not None and self.hosts.active:
            return self._reach(self.hosts, provider, value)
        # Most locations in most steps: no block and no declared intervention uses them, so they are only counted.
        if not (
            provider in self.parked
            or provider in self.declared.hooks
            or provider in self.observers
            or self.skipped
            or self.taps
            or self.elsewhere
        ):
            self.counts[provider] = self.counts.get(provider, 0) + 1
            return value
        if provider in self.elsewhere:
            return value
        if self.skipped:
            value = self.put_skipped(provider, value)
        hook = self.declared.hooks.get(provider)
        if hook is not None and self.interleaving:
            value = self._serve(hook, value)
        if provider in self.taps:
            if self.captured == "bare":
                return value
            # Marks the capture under way, if it is one of vLLM's breakable ones.
            current_capture()
            if self.captured == "whole":
                assert self.declared.buffers is not None
                self.declared.buffers.launch(provider, value)
                return value
        value = super().handle(provider, value)
        return self.keep_skipped(provider, value) if type(value) is SkipParts else value

    def _reach(self, hosts: BlocksElsewhere, provider: str, value: Any) -> Any:
        """Serve a location to declared interventions, then to blocks that run in hosts."""
        if provider in self.elsewhere:
            return value
        hook = self.declared.hooks.get(provider)
        if hook is not None and self.interleaving:
            value = self._serve(hook, value)
        if self.taps and provider not in self.taps and provider.rpartition(".")[2] in ("input", "output", "skip"):
            return value
        if self.is_sharded(provider) and hosts.wants(provider):
            whole, undo = self.fragments.whole(provider, value)
            return undo(hosts.reach(provider, whole))
        return hosts.reach(provider, value, by_request=provider in BY_REQUEST)

    @property
    def has_kernels(self) -> bool:
        """Whether kernels can serve the taps of whole graphs on this engine."""
        return self.declared.buffers is not None

    @contextmanager
    def capturing(self, kind: GraphKind) -> Iterator[None]:
        """Have the graphs that are captured meanwhile be of a kind."""
        self.captured = kind
        try:
            yield
        finally:
            self.captured = "broken"

    def graphs_for(self, tokens: int) -> StepGraphs:
        """Which graphs the step under way runs. If the whole one is among them, its kernels are set up.

        Ranks that ran a step by different graphs would exchange what other steps have left. What a rank needs differs
        from rank to rank where an intervention has failed on one of them.

        Args:
            tokens: how many the graph computes, padding included.
        """
        needed = self._needed_graphs(tokens)
        ranks = self.ranks
        if ranks is None or not ranks.traced or not self.interleaving:
            return needed
        agreed = _GRAPHS[ranks.greatest(_GRAPHS.index(needed))]
        if agreed == "broken":
            self.declared.leave_buffers()
        elif needed == "bare" and agreed != "bare":
            self.declared.pass_buffers()
        return agreed

    def _needed_graphs(self, tokens: int) -> StepGraphs:
        if self.busy or self.skipped:
            return "broken"
        # vLLM makes up steps, too. Nothing is served in them.
        if not self.interleaving or not self.declared.hooks:
            return "bare"
        if not self.declared.fits_buffers(tokens):
            return "broken"
        return "both" if self.declared.unproven else "whole"

    def run_both(self, graphs: BothGraphs) -> Any:
        """Run a step by the whole graph and by the broken one, and compare. Returns the output that counts."""
        return self.declared.run_both(graphs, self.batcher.total)

    def replay(self, location: str, live: Any) -> None:
        # In most steps no block waits at a tap, so nnsight's own replay is not needed.
        hook = self.declared.hooks.get(location)
        if self.busy or (hook is not None and self.is_sharded(location)):
            super().replay(location, live)
        elif hook is not None and self.interleaving and self._first_visit(location):
            hook.replay(live)

    def _first_visit(self, location: str) -> bool:
        """Note that the step has come to a location. Returns whether it has not been there before.

        A model may call one module several times, as layers that share a rotary embedding do.
        """
        step = self.declared.served.step
        first = self.visited.get(location) != step
        self.visited[location] = step
        return first

    def _serve(self, hook: LocationHook, value: Any) -> Any:
        if not self._first_visit(hook.location):
            return value
        if not self.is_sharded(hook.location):
            hook.run(value)
            return value
        if hook.by_head:
            hook.run(value, self.fragments.rules[hook.location][0].tp_rank)
            return value
        if not self.declared.agree(hook.location, [one for group in hook.groups for one in group.members]):
            hook.reached = True
            return value
        whole, undo = self.fragments.whole(hook.location, value)
        hook.run(whole)
        return undo(whole) if hook.edits else value
