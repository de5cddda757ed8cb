"""Blocks in hosts leave and save what the same blocks do in the process of the model, bit for bit."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from nnsight.tracing.tracer import inc

from tests.e2e.isolation.generated import generate
from tests.support.generated_edits import edit_block
from tests.support.hosted_model import HostedModel, Model, Outcome, changes_of, live_arguments, settings_of
from tracewire_bus.wire.messages import Block
from tracewire_bus.wire.packing import pack
from tracewire_engine.block_host.session import Session
from tracewire_engine.block_host.stand_ins import tree_of
from tracewire_engine.protocol.block_host import Arrived, Began, Finished
from tracewire_engine.protocol.keys import BLOCK_ARG
from tracewire_engine.worker.block_host.accounts import Accounts
from tracewire_engine.worker.block_host.pool import HostPool
from tracewire_engine.worker.block_host.reading import ModelPaths
from tracewire_engine.worker.blocks import save_marks

STEPS = 4
EACH = "for step in tracer.iter[:]:\n    "
KEPT = "kept = [].save()\n" + EACH

BLOCKS = {
    "reads": KEPT + "kept.append(model.model.layers[1].output[0].clone())\n",
    "all layers": KEPT + "kept.append([layer.output[0].clone() for layer in model.model.layers])\n",
    "writes": KEPT + "h = model.model.layers[0].output[0]\n    h[:] = h * 1.5\n    kept.append(h.clone())\n",
    "adds to one": EACH + "model.model.layers[1].output[0][-1] += 0.5\n    x = model.logits.clone().save()\n",
    "assigns": EACH + "o = model.model.layers[1].output\n    model.model.layers[1].output = (o[0] * 0.5, o[1])\n",
    "assigns input": EACH + "model.model.layers[2].input = model.model.layers[2].input * 2\n",
    "reads what it wrote": KEPT
    + "o = model.model.layers[0].output\n    model.model.layers[0].output = (o[0] + 1, o[1])\n"
    "    kept.append(model.model.layers[0].output[0].clone())\n",
    "stream": KEPT + "h = model.residual(1).output\n    h[-1] += 0.25\n    kept.append(model.residual(2).output)\n",
    "stream replaced": EACH + "model.residual(0).output = model.residual(0).output * 0.1\n",
    "logits": KEPT + "l = model.logits\n    l[:, 3] = 9.0\n    kept.append(model.samples.clone())\n",
    "samples": EACH + "model.samples = (model.samples + 1) % 50\n    text = str(step).save()\n",
    "skips": EACH + "i = model.model.layers[1].input\n    model.model.layers[1].skip((i * 0.5, i))\n",
    # Where a cache observes, nnsight serves all blocks of the batch, and their errors name no line inline.
    "caches": "cache = tracer.cache(modules=[model.model.layers[2]]).save()\n" + EACH + "model.logits\n",
    "calls": KEPT + "kept.append(model.model.norm(model.model.layers[1].output[0]).clone())\n",
    "stops": EACH + "x = model.logits.clone().save()\n    if step == 2:\n        tracer.stop()\n",
    "fails": EACH + "x = model.logits.clone().save()\n    1 / (step - 2)\n",
    "fails at once": "x = 1 .save()\nnothing\n",
    "one step": "x = model.model.layers[2].output[0].clone().save()\ny = model.samples.clone().save()\n",
    "third step": "for step in tracer.iter[2]:\n    x = model.model.layers[0].output[0].clone().save()\n",
    "out of order": "y = model.logits.clone().save()\nfor step in tracer.iter[0:1]:\n"
    "    x = model.model.layers[0].output\n",
    "changed later": "d = {}.save()\n" + EACH + "d[step % 2] = float(model.logits.sum())\n    d['n'] = len(d)\n",
    "wrong shape": EACH + "model.model.layers[1].output = (model.model.layers[1].output[0][:0], None)\n",
    "halves": KEPT + "kept.append(model.model.layers[1].output[0].half())\n    kept.append(model.logits.half() * 2)\n",
    "sorts": "k = [].save()\n" + EACH + "k.insert(0, model.logits.argmax(-1))\n    x = sorted(range(step))\n",
}

#: Blocks of whose edits the source says more or less, with the variables of `block_of`.
EDITS = {
    "adds a vector": KEPT + "h = model.model.layers[1].output[0]\n    h += vector * 0.5\n    kept.append(h.clone())\n",
    "adds a vector to the last": EACH + "model.model.layers[1].output[0][-1] += by['key'].to(torch.float32)\n",
    "adds to the stream": KEPT + "model.residual(1).output[:] += vector\n    kept.append(model.residual(2).output)\n",
    "scales the stream": EACH + "model.residual(1).output *= 1.5\n",
    "removes a direction": "d = vector / vector.norm()\n"
    + KEPT
    + "h = model.residual(0).output\n    h[:] = h - (h @ d)[:, None] * d\n    kept.append(model.logits.clone())\n",
    "zeroes": EACH + "model.model.layers[2].output[0].zero_()\n    x = model.logits.clone().save()\n",
    "some steps": KEPT.replace("[:]", "[1:3]")
    + "h = model.residual(1).output\n    h -= 0.5\n    kept.append(h.clone())\n",
    "first step": "model.model.layers[1].output[0][:] *= 3\nx = model.samples.clone().save()\n",
    "two layers": KEPT + "for layer in [0, 2]:\n        h = model.model.layers[layer].output[0]\n"
    "        h[:] = h * 1.25\n        kept.append(h[-1].clone())\n",
    "favours a token": EACH + "model.logits[:, 7] += 2.0\n    if step == 2:\n        tracer.stop()\n",
    "fails behind": EACH + "model.model.layers[1].output[0][:] *= 2\n    1 / (step - 1)\n",
    "fails before": EACH + "1 / (step - 1)\n    model.model.layers[1].output[0][:] *= 2\n",
    "a vector too long": KEPT + "h = model.model.layers[0].output[0]\n    h *= 2\n    h += torch.ones(5)\n",
    "another vector too long": KEPT + "h = model.model.layers[0].output[0]\n    h *= 2\n    h += longer\n",
}


#: Blocks that read live parameters, and the number of those that the worker need not wait for.
LIVE = {
    "adds": EACH + "s = model.residual(1).output\n    model.residual(1).output = s + live.alpha * vector.to(s.dtype)\n",
    "adds a live vector": KEPT + "h = model.model.layers[0].output[0]\n    h += live.way\n    kept.append(h.clone())\n",
    "scales": EACH + "h = model.model.layers[1].output[0]\n    h *= live.alpha\n",
    "scales twice": EACH + "a = 2 * live.alpha - live.count\n    model.residual(1).output += (a * 0.5) * live.way\n",
    "divides": EACH + "model.logits[:] = model.logits / live.alpha\n",
    "at first": "model.residual(1).output += live.alpha * vector\n",
    "in some steps": "for step in tracer.iter[1:3]:\n    model.residual(0).output += live.alpha * vector\n",
    "in two places": EACH
    + "model.model.layers[0].output[0][-1] += live.way\n    h = model.model.layers[2].output[0]\n    h *= live.alpha\n",
}
KNOWN_LIVE = len(LIVE)
LIVE |= {
    "read before": "a = live.alpha\n" + EACH + "model.residual(1).output += a * vector\n",
    "read in the turn before": "a = 0.0\n" + EACH + "model.residual(1).output += a * vector\n    a = live.alpha\n",
    "made before": "v = live.alpha * vector\n" + EACH + "model.residual(1).output += v\n",
    "changed": KEPT + "v = live.way\n    v *= 2\n    model.residual(1).output += v\n    kept.append(v.clone())\n",
    "under a condition": EACH + "if live.alpha > 1:\n        model.residual(1).output *= 2\n",
    "a flag": EACH + "model.residual(1).output += live.on * vector\n",
    "an unknown one": EACH + "model.residual(1).output += live.other * vector\n",
    "numbers divided": EACH + "model.residual(1).output += (1 / live.alpha) * vector\n",
    "kept": KEPT
    + "h = model.model.layers[1].output[0]\n    h *= live.alpha\n    kept.append([live.way, live.alpha])\n",
    "a live vector too long": EACH + "model.residual(1).output += live.alpha * vector\n    x = vector + live.long\n",
}
WAY = np.linspace(2, -1, 4, dtype=np.float32)
LIVE_VALUES = {"alpha": 0.5, "count": 1, "way": WAY, "on": True, "long": np.ones(5, np.float32)}


SCALES = "model.model.layers[1].output[0][:] *= -3\n"

#: What a block may do before it writes, of which the source may say too much.
BEFORE = [
    "x = model.model.layers[0].output[0] + longer",
    "x = model.model.layers[0].output + 1",
    "x = model.model.layers[0].output.abs()",
    "x = model.model.layers[0].output.dtype",
    "x = model.model.layers[0].output.cpu()",
    "x = model.model.layers[0].output[0].dtype + 1",
    "x = model.model.layers[0].output[0].sum()[0]",
    "x = model.model.layers[0].output[0][5:][0]",
    "x = model.model.layers[0].output[0][:, ::-1]",
    "x = model.model.layers[0].output[0] - True",
    "(x,) = model.model.layers[0].output",
    "x, y = model.model.layers[0].output",
    "x = 1 / 0",
    "n = 2\n    x = n.abs()",
    "n = 1\n    n /= 0",
    "n = 1\n    n += 'x'",
    "k = []\n    k += 5",
    "k = []\n    k.append(1, 2)",
    "x = {}.append(1)",
    "x = by['no']",
    "x = vector[10]",
    "x = vector[1][0]",
    "x = vector - True",
    "x = vector.norm(torch.float16)",
    "if step in 5:\n        pass",
    "if step == 1:\n        y = 1\n    z = [y]",
    "model.model.layers[0].output[0] *= 1.5",
    "if step == 2:\n        tracer.stop()",
    "x = longer @ model.model.layers[0].output[0]",
]

#: Blocks that do less than they seem to, or later.
ODD = {
    "out of order": EACH + SCALES + "    x = model.model.layers[0].output\n",
    "out of order at first": "y = model.model.layers[2].output[0].clone()\n" + EACH + SCALES,
    "stream assigned and changed": EACH
    + "s = model.residual(1).output\n    model.residual(1).output = s * 2\n    s *= -3\n",
    "two streams changed": EACH
    + "a = model.residual(1).output\n    b = model.residual(1).output\n    a += 5\n    b *= -3\n",
    "a half of a changed stream": EACH
    + "s = model.residual(1).output\n    s += 1\n    h = model.model.layers[1].output[0]\n    s += h\n",
    "a stream of another shape": EACH + "s = model.residual(1).output\n    model.residual(1).output = s[0]\n",
    "sums as a stream": EACH + "s = model.residual(1).output\n    model.residual(1).output = s.sum(dim=-1)[:, None]\n",
    "a list that grows": EACH + "for i in numbers:\n        model.model.layers[i].output[0][:] *= -3\n"
    "    if step == 1:\n        numbers.extend([2])\n",
    "a list that is sorted": EACH + "model.model.layers[1].output[0][:] *= factors[0]\n    factors.sort()\n",
    "keys that are alike": EACH + "h = model.model.layers[1].output[0]\n    h += vector[1]\n    h += vector[True]\n",
    "changed behind its save": "x = torch.abs(vector)\nkept = [].save()\nkept.append(x)\n"
    + SCALES
    + "for step in tracer.iter[1:]:\n    model.logits.sum()\n    x[0] = step\n",
    "a sum that goes on": "kept = [].save()\na = 0\na += vector\nkept.append(a)\n" + EACH + SCALES + "    a += 1\n",
    "columns that overlap": "for step in tracer.iter[1:]:\n    h = model.model.layers[1].output[0]\n"
    "    h[:, 1:] = h[:, :-1]\n",
    "fails in the midst": "for step in tracer.iter[1:]:\n    h = model.model.layers[1].output[0]\n    h *= -3\n"
    "    h += longer\n",
    "a name of two steps": EACH + "h = model.model.layers[1].output[0]\n    if step > 1:\n        h += before\n"
    "    before = h.clone()\n    h *= 2\n",
} | {f"before {number}": EACH + source + "\n    " + SCALES for number, source in enumerate(BEFORE)}


class InlineModel(HostedModel):
    """The same model, all of whose blocks run in this process, in one batch, as in a worker."""

    def __init__(self, layers: int = 3) -> None:
        self.module = Model(layers)
        self.outcomes = {}
        settings = settings_of(self.module)
        self._new: list[Arrived] = []

        def call(path: str, value: Any) -> Any:
            args, kwargs = value
            return self.module.get_submodule(path.removeprefix("model."))(*args, **kwargs)

        def fetch(path: str, name: str) -> Any:
            return getattr(self.module.get_submodule(path), name)

        link: Any = self
        self._session = Session(tree_of(settings.modules, fetch), settings, call, link, None)

    def send(self, *reports: Any) -> None:
        for report in reports:
            for step in report.steps:
                self.outcomes[step.request].steps.append(step)
            for finish in report.finishes:
                self.outcomes[finish.request].finish = finish

    def open(self, name: str, block: Any, *, live: Mapping[str, Any] | None = None, **_: Any) -> None:
        encoded = msgspec.msgpack.encode(block if isinstance(block, Block) else block_of(block))
        self.outcomes[name] = Outcome()
        self._new.append(Arrived(f"{name}-00000000", {BLOCK_ARG: encoded, **live_arguments(name, live)}))

    def steer(self, trace: str, version: int, **values: Any) -> None:
        self._session.steer(changes_of(trace, version, values))

    def _begin(self, scheduled: dict[str, int], index: int) -> Callable[..., Any]:
        self._session.begin(Began(self._new, [(name, count, index) for name, count in scheduled.items()]))
        self._new = []
        return lambda location, value, by_request=False: self._session.reach(location, value, by_request=by_request)

    def _end(self) -> None:
        self._session.end()

    def finish(self, name: str, tokens: int | None = None) -> None:
        self._session.finish(Finished(f"{name}-00000000", tokens))

    def wait(self, *names: str, timeout_s: float = 0.0) -> None:
        assert all(self.outcomes[name].finish is not None for name in names)


@pytest.fixture(scope="module", params=["waits", "visits", "known"])
def hosted(request: pytest.FixtureRequest) -> Iterator[HostedModel]:
    model = HostedModel(visits=request.param == "visits", known_edits=request.param == "known")
    yield model
    model.close()


def block_of(source: str) -> Block:
    vector = np.linspace(-1, 1, 4, dtype=np.float32)
    variables = pack(
        {
            "vector": vector,
            "by": {"key": vector.astype(np.float64)},
            "longer": np.ones(5, np.float32),
            "numbers": [0, 1],
            "factors": [2.0, -1.0],
        }
    )
    return Block(name="block", source=source, filename="mine.py", variables=variables, modules={"torch": "torch"})


def plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return str(value.dtype), value.shape, value.tobytes()
    if isinstance(value, float):
        # What is no number equals nothing.
        return value.hex()
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, list | tuple) else value


def ended(outcome: Outcome) -> Any:
    assert outcome.finish is not None
    error = outcome.finish.error
    how = None if error is None else (error.type, error.line, error.message)
    return how, outcome.finish.stopped, outcome.finish.tokens, [(step.index, step.ended) for step in outcome.steps]


def run(model: HostedModel, blocks: dict[str, str]) -> tuple[dict[str, Outcome], list[list[int]]]:
    """Run blocks. Returns their outcomes, and the samples of all steps."""
    for name, block in blocks.items():
        model.open(name, block_of(block))
    samples = []
    for index in range(STEPS):
        drawn = model.step(dict.fromkeys(blocks, 2 if index == 0 else 1), index)
        samples.append(drawn.flatten().tolist())
    for name in blocks:
        model.finish(name, STEPS)
    model.wait(*blocks)
    return {name: model.outcomes[name] for name in blocks}, samples


def run_noted(model: HostedModel, blocks: dict[str, str]) -> tuple[dict[str, Outcome], dict[str, list[Any]]]:
    """Run blocks. Returns their outcomes, and each one's logits and samples of all steps until it ended."""
    for name, block in blocks.items():
        model.open(name, block_of(block))
    steps: list[list[Any]] = []
    begin = model._begin

    def begun(scheduled: dict[str, int], index: int) -> Callable[..., Any]:
        reach = begin(scheduled, index)

        def reached(location: str, value: Any, **more: Any) -> Any:
            left = reach(location, value, **more)
            if location == "model.logits":
                # The sign of what is no number depends on how many numbers a processor takes at once.
                rows = left.where(~left.isnan(), torch.full_like(left, torch.nan))
                steps.append([row.numpy().tobytes() for row in rows])
            return left

        return reached

    model._begin = begun  # type: ignore[method-assign]
    try:
        for index in range(STEPS):
            drawn = model.step(dict.fromkeys(blocks, 2 if index == 0 else 1), index)
            steps[index] = list(zip(steps[index], drawn.flatten().tolist(), strict=True))
    finally:
        model._begin = begin  # type: ignore[method-assign]
    for name in blocks:
        model.finish(name, STEPS)
    model.wait(*blocks)
    found = {name: model.outcomes[name] for name in blocks}
    # What comes behind the end of a block is no part of its trace.
    ends = {name: min([step.index for step in one.steps if step.ended], default=STEPS) for name, one in found.items()}
    rows = {name: [step[place] for step in steps[: ends[name] + 1]] for place, name in enumerate(blocks)}
    return found, rows


def run_steered(
    model: HostedModel, blocks: dict[str, str], changes: Mapping[tuple[int, str], dict[str, Any]]
) -> tuple[dict[str, Outcome], dict[str, list[Any]]]:
    """The same with `LIVE_VALUES` and with changes of them before the steps of these indices, by block."""
    opened, stepped = model.open, model.step

    def open_live(name: str, block: Any, **more: Any) -> None:
        opened(name, block, live=LIVE_VALUES, **more)

    def step(tokens: Mapping[str, int], index: int) -> Any:
        for version, ((at, name), values) in enumerate(changes.items(), 1):
            if at == index:
                model.steer(name, version, **values)
        return stepped(tokens, index)

    model.open, model.step = open_live, step  # type: ignore[method-assign]
    try:
        return run_noted(model, blocks)
    finally:
        model.open, model.step = opened, stepped  # type: ignore[method-assign]


#: What `run_noted` returns.
Noted = tuple[dict[str, Outcome], dict[str, list[Any]]]


def expect_equal(names: Iterable[str], ours: Noted, inline: Noted) -> None:
    """Compare what blocks in hosts came to with the same blocks inline."""
    (found, sampled), (expected, drawn) = ours, inline
    for name in names:
        assert (name, sampled[name]) == (name, drawn[name])
        assert (name, ended(found[name])) == (name, ended(expected[name]))
        assert (name, plain(found[name].saves)) == (name, plain(expected[name].saves))


def test_results_are_equal_bit_for_bit(hosted: HostedModel) -> None:
    """All blocks in one batch, so that each has neighbours that write."""
    inc()
    save_marks.install()
    blocks = {name.replace(" ", "."): source for name, source in (BLOCKS | EDITS).items()}
    inline, drawn = run_noted(InlineModel(), blocks)
    found, sampled = run_noted(hosted, blocks)
    expect_equal(blocks, (found, sampled), (inline, drawn))
    assert sum(one.finish is not None and one.finish.error is not None for one in found.values()) >= 3


@pytest.mark.parametrize("apart", [False, True], ids=["side by side", "with others between"])
def test_what_a_source_does_not_show_is_not_done(apart: bool) -> None:
    """Each block twice, so that requests with the same edits are served at once."""
    inc()
    save_marks.install()
    hosted = HostedModel(known_edits=True)
    names = [(name.replace(" ", "."), source) for name, source in ODD.items()]
    for place in range(0, len(names), 4):
        twice = names[place : place + 4]
        order = [*twice, *twice] if apart else [one for one in twice for _ in range(2)]
        blocks = {f"{name}.{number}": source for number, (name, source) in enumerate(order)}
        inline, drawn = run_noted(InlineModel(), blocks)
        found, sampled = run_noted(hosted, blocks)
        expect_equal(blocks, (found, sampled), (inline, drawn))
    hosted.close()


def test_live_parameters_change_between_steps(hosted: HostedModel) -> None:
    """Each block three times, with other values in each."""
    inc()
    save_marks.install()
    blocks = {f"{name.replace(' ', '.')}.{number}": source for name, source in LIVE.items() for number in range(3)}
    changes = {
        (index, name): {"alpha": 0.25 * index - place % 3, "way": WAY * (index + place % 3)}
        for index in (0, 1, 3)
        for place, name in enumerate(blocks)
        if place % 3
    }
    inline = run_steered(InlineModel(), blocks, changes)
    found = run_steered(hosted, blocks, changes)
    expect_equal(blocks, found, inline)
    saved = found[0]["adds.a.live.vector.1"].saves["kept"]
    assert not np.array_equal(saved[0], saved[1])


def test_a_block_with_live_parameters_is_not_waited_for() -> None:
    known = Accounts(ModelPaths(settings_of(Model(3)).modules, "model.layers"), edits=True)
    found = {
        name: known.of({BLOCK_ARG: msgspec.msgpack.encode(block_of(source))}, live=LIVE_VALUES).known
        for name, source in LIVE.items()
    }
    names = [name for name, edits in found.items() if edits]
    assert names[:KNOWN_LIVE] == list(LIVE)[:KNOWN_LIVE]
    assert names[KNOWN_LIVE:] == ["kept", "a live vector too long"]


def test_taps_serve_blocks_as_all_locations_do(hosted: HostedModel) -> None:
    """An engine with CUDA graphs serves the locations that the operator named, and those behind the layers."""
    taps = ["model.model.layers.0.output", "model.model.layers.1.output"]
    tapped = HostedModel(pool=HostPool(settings_of(Model(3), taps=taps)))
    blocks = {name: BLOCKS[name] for name in ("reads", "writes", "assigns", "logits", "samples")}
    found, sampled = run(tapped, blocks)
    expected, drawn = run(hosted, blocks)
    tapped.close()
    assert sampled == drawn
    for name in blocks:
        assert (name, ended(found[name])) == (name, ended(expected[name]))
        assert (name, plain(found[name].saves)) == (name, plain(expected[name].saves))


@pytest.mark.parametrize(
    ("first", "count"), [(1, 64), pytest.param(1001, 2000, marks=[pytest.mark.full, pytest.mark.timeout(3600)])]
)
def test_generated_blocks_come_to_the_same(first: int, count: int) -> None:
    """In batches of eight, which share hosts. A block that names a module that this model lacks fails in both."""
    inc()
    save_marks.install()
    hosted = HostedModel(layers=8, known_edits=True)
    inline = InlineModel(8)
    for batch in range(first, first + count, 8):
        blocks = {f"seed{seed}": generate(seed, []).source for seed in range(batch, batch + 8)}
        expected, drawn = run_noted(inline, blocks)
        found, sampled = run_noted(hosted, blocks)
        assert sampled == drawn, batch
        for name in blocks:
            assert (name, ended(found[name])) == (name, ended(expected[name]))
            assert (name, plain(found[name].saves)) == (name, plain(expected[name].saves))
    assert not len(hosted.hosts)
    hosted.close()


@pytest.mark.parametrize(
    ("first", "count"), [(1, 240), pytest.param(1001, 6000, marks=[pytest.mark.full, pytest.mark.timeout(3600)])]
)
def test_generated_edits_come_to_the_same(first: int, count: int) -> None:
    """Most of these blocks the worker need not wait for: what they write, it does itself."""
    inc()
    save_marks.install()
    hosted, inline = HostedModel(known_edits=True), InlineModel()
    known = 0
    for batch in range(first, first + count, 8):
        blocks = {f"edits{seed}": edit_block(seed) for seed in range(batch, batch + 8)}
        encoded = [msgspec.msgpack.encode(block_of(source)) for source in blocks.values()]
        known += sum(bool(hosted.hosts._accounts.of({BLOCK_ARG: one}, live=LIVE_VALUES).known) for one in encoded)
        changed = random.Random(batch)  # nosec B311
        changes = {
            (changed.randrange(STEPS), name): {"alpha": changed.uniform(-2, 2), "way": WAY * changed.random()}
            for name in changed.sample(list(blocks), 4)
        }
        expected, drawn = run_steered(inline, blocks, changes)
        found, sampled = run_steered(hosted, blocks, changes)
        for name, source in blocks.items():
            assert (source, sampled[name]) == (source, drawn[name])
            assert (source, ended(found[name])) == (source, ended(expected[name]))
            assert (source, plain(found[name].saves)) == (source, plain(expected[name].saves))
    hosted.close()
    assert known > count // 4
