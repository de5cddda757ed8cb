"""Operations inside a module's forward (`.source`): blocks in hosts have them as blocks in the model's process do."""

from __future__ import annotations

import tracewire_engine  # noqa: F401 (before nnsight, which puts its save on everything)

# isort: split
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
import torch
from nnsight.intervention.envoy import Envoy
from nnsight.modeling.vllm.interleaver import VLLMInterleaver
from nnsight.tracing.tracer import inc

from tests.support.hosted_model import HIDDEN, HostedModel
from tests.unit.tracewire_engine.worker.block_host.test_equal_to_inline import plain
from tracewire_bus.wire.messages import Block
from tracewire_engine.worker.blocks import save_marks
from tracewire_engine.worker.blocks.batched_serving import RowBatcher
from tracewire_engine.worker.blocks.compiler import BlockCache
from tracewire_engine.worker.blocks.live_params import LiveRun
from tracewire_engine.worker.declared.hooks import DeclaredInterleaver
from tracewire_engine.worker.declared.plan import DeclaredRequests

KEPT = "kept = [].save()\nfor step in tracer.iter[:]:\n    op = model.model.layers[1].source.torch_tanh_0\n    "

BLOCKS = {
    "reads": KEPT + "kept.append([op.input.clone(), op.output.clone()])\n",
    "writes": KEPT + "op.output[:] *= 0.5\n    kept.append(model.model.layers[2].output.clone())\n",
    "assigns": KEPT + "op.output = op.output + 1\n    kept.append(model.model.layers[1].output.clone())\n",
    "assigns input": KEPT + "op.input = op.input * 0.1\n    kept.append(op.output.clone())\n",
    "skips": KEPT + "op.skip(op.input * step)\n    kept.append(model.model.layers[1].output.clone())\n",
    "names": KEPT + "kept.append([one.name for one in model.model.layers[1].source])\n    model.model.norm.output\n",
    "text": KEPT + "kept.append([str(model.model.layers[1].source), str(op)])\n    model.model.norm.output\n",
    "wrong name": KEPT + "model.model.layers[1].source.torch_relu_0.output\n",
}

#: A network that the block hangs into the tree, and what it does with it in each step.
ATTACHED = (
    "import torch\ntorch.manual_seed(3)\n"
    "layer = model.model.layers[1]\nlayer.{0} = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh())\n"
    "kept = [].save()\nfor step in tracer.iter[:]:\n    layer.output = layer.{0}(layer.output, hook={1})\n"
    "    kept.append([layer.{0}.path, str(layer.{0}.source), layer.{0}[1](layer.output).clone()])\n"
)
BLOCKS |= {
    "attaches": ATTACHED.format("adapter", False),
    "attaches, hook=True": ATTACHED.format("adapter_with_hooks", True),
}

STEPS = 3


class _Root(torch.nn.Module):
    """A body that runs."""

    def __init__(self, body: Any) -> None:
        super().__init__()
        self.model = body

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """All layers."""
        for layer in self.model.layers:
            x = layer(x)
        result: torch.Tensor = self.model.norm(x)
        return result


class OperationsModel(HostedModel):
    """A model that reaches its locations itself, as vLLM's does."""

    def __init__(self) -> None:
        super().__init__()
        self.root = _Root(self.module.model)
        self.interleaver: Any = VLLMInterleaver()
        self.envoy = Envoy(self.root, interleaver=self.interleaver)
        DeclaredInterleaver.install(self.interleaver, DeclaredRequests(torch.device("cpu")), self.root)
        self.interleaver.batcher, self.interleaver.defer_exceptions = RowBatcher(None), True
        self.hosts.answers.__init__(self.envoy)  # type: ignore[misc]

    def forward(self, tokens: int, step: int) -> torch.Tensor:
        """One step."""
        with torch.inference_mode(), self.interleaver:
            self.interleaver.busy = True
            x = torch.linspace(-1, 1, tokens * HIDDEN).view(tokens, HIDDEN) + step
            result: torch.Tensor = self.root(x.clone())
            return result

    def hosted(self, source: str) -> tuple[Any, list[Any]]:
        """What a block in a host saves, or its error, beside a request without one; and what the model comes to."""
        self.interleaver.hosts = self.hosts
        self.open("block", source)
        left = []
        for step in range(STEPS):
            scheduled = {"block-00000000": 2, "plain": 1}
            self.hosts.begin(scheduled, list(scheduled), lambda _, step=step: step)  # type: ignore[misc]
            left.append(self.forward(3, step))
            self.hosts.end()
        self.finish("block", STEPS)
        self.wait("block")
        found = self.outcomes["block"]
        assert found.finish is not None
        error = found.finish.error
        return plain(found.saves) if error is None else (error.type, error.message, error.line), left

    def inline(self, source: str) -> tuple[Any, list[Any]]:
        """The same in this process."""
        inc()
        save_marks.install()
        self.interleaver.hosts = None
        cache = BlockCache(self.envoy, torch.device("cpu"))
        mediator = cache.mediator(
            msgspec.msgpack.encode(Block(name="block", source=source, filename="mine.py")), LiveRun("")
        )
        self.interleaver.batcher.total = 3
        mediator.batch_group, mediator.row = [0, 2], 0
        try:
            mediator.start(self.interleaver)
        except AttributeError as error:
            mediator.exception = error
        self.interleaver.mediators = [mediator]
        left = [self.forward(3, step) for step in range(STEPS)]
        saves = {name: _arrays(value) for name, value in mediator.saved().items()}
        error, self.interleaver.mediators = mediator.exception, []
        return plain(saves) if error is None else (type(error).__name__, str(error), 4), left


def _arrays(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.numpy()
    return [_arrays(one) for one in value] if isinstance(value, list) else value


@pytest.fixture(scope="module")
def served() -> Iterator[OperationsModel]:
    model = OperationsModel()
    yield model
    model.close()


@pytest.mark.parametrize("name", BLOCKS)
def test_they_are_as_inline(name: str, served: OperationsModel) -> None:
    saves, left = served.hosted(BLOCKS[name])
    expected, untouched = served.inline(BLOCKS[name])
    assert saves == expected
    assert all(map(torch.equal, left, untouched))


REFUSED: dict[str, Callable[[str], bool]] = {
    "op.source.x_0.output": lambda said: "model.layers.1.source.torch_tanh_0.source: operations inside" in said,
    "model.model.layers[1](op.input, hook=True)": lambda said: "call each of them in turn" in said,
}


def test_a_module_of_the_model_is_not_replaced(served: OperationsModel) -> None:
    (kind, said, at), _ = served.hosted(
        "import torch\nmodel.model.norm = torch.nn.Identity()\nmodel.model.norm.output\n"
    )
    assert (kind, at) == ("NotImplementedError", 2)
    assert "model.norm is a module of the model" in said
    assert "assign to its output" in said


@pytest.mark.parametrize("line", REFUSED)
def test_what_is_refused_says_what_to_do(line: str, served: OperationsModel) -> None:
    (kind, said, at), _ = served.hosted(KEPT + line + "\n")
    assert kind == "NotImplementedError"
    assert at == 4
    assert REFUSED[line](said)


READS = "kept = [].save()\nfor step in tracer.iter[:]:\n"
#: What a host sends in place of a call that it would refuse: a call that all requests' interventions would see.
HOOKED = """
import torch
kept = [].save()
for step in tracer.iter[:]:
    model.model.layers[0].output
    given = (torch.full((3, 4), 9.0),), {"hook": True}
    kept.append(model.interleaver.call("model.model.layers.1", given).clone())
"""


@pytest.mark.parametrize(
    "victim",
    [
        READS + "    kept.append(model.model.layers[1].output.clone())\n",
        READS + "    o = model.model.layers[1].output\n    o[:] = o + 3\n    kept.append(o.clone())\n",
    ],
    ids=["reads", "writes"],
)
def test_a_call_of_one_host_is_not_served_to_other_requests(victim: str) -> None:
    def saved(beside: str) -> tuple[list[Any], Any]:
        model = OperationsModel()
        model.interleaver.hosts = model.hosts
        model.open("victim", victim, tenant="red")
        model.open("beside", beside, tenant="blue")
        for step in range(STEPS):
            scheduled = {"victim-00000000": 2, "beside-00000000": 1}
            model.hosts.begin(scheduled, list(scheduled), lambda _, step=step: step)  # type: ignore[misc]
            model.forward(3, step)
            model.hosts.end()
        for name in ("victim", "beside"):
            model.finish(name, STEPS)
        model.wait("victim", "beside", hostile=["beside"])
        outcomes = dict(model.outcomes)
        model.close()
        assert outcomes["victim"].finish is not None
        assert outcomes["victim"].finish.error is None
        finish = outcomes["beside"].finish
        return [array.tolist() for array in outcomes["victim"].saves["kept"]], finish and finish.error

    alone, nothing = saved("for step in tracer.iter[:]:\n    model.model.layers[0].output\n")
    attacked, error = saved(HOOKED)
    assert nothing is None
    assert len(alone) == STEPS
    assert attacked == alone
    assert error is not None
    assert "hook" in error.message
