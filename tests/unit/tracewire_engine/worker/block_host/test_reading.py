"""Which blocks only read for certain, and what they may ask for."""

from __future__ import annotations

import pytest

from tracewire_bus.wire.messages import Block, Helper
from tracewire_bus.wire.packing import pack
from tracewire_engine.protocol.block_host import ModuleOutline
from tracewire_engine.worker.block_host.reading import MOST, ModelPaths, reads_of, union

LAYERS = [f"model.layers.{index}" for index in range(4)]
PATHS = ModelPaths(
    [
        *(ModuleOutline(path, "Module") for path in ("", "model")),
        ModuleOutline("model.layers", "ModuleList", "list"),
        *(ModuleOutline(f"{layer}{end}", "Layer") for layer in LAYERS for end in ("", ".mlp")),
        ModuleOutline("lm_head", "Head"),
        ModuleOutline("tied", "Head", same="lm_head"),
    ],
    "model.layers",
)


def reads(source: str, **more: object) -> frozenset[str] | None:
    fields = {"modules": {"torch": "torch", "F": "torch.nn.functional"}, **more}
    return reads_of(Block(name="block", source=source, **fields), PATHS)  # type: ignore[arg-type]


def outputs(*layers: int) -> frozenset[str]:
    return frozenset(f"model.model.layers.{layer}.output" for layer in layers)


LOGITS = {"model.logits"}


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("h = model.model.layers[2].output[0].clone().save()", outputs(2)),
        ("k = [].save()\nfor step in tracer.iter[:]:\n    k.append(model.model.layers[-1].output[0][-1])", outputs(3)),
        ("h = model.residual(-2).output[-1].float().norm().save()", outputs(2)),
        ("h = [model.residual(i).output for i in range(4)]", outputs(0, 1, 2, 3)),
        ("for layer in model.model.layers[1:]:\n    h = layer.output[0]", outputs(0, 1, 2, 3)),
        ("layer = model.model.layers[1]\nh = layer.mlp.input", frozenset({"model.model.layers.1.mlp.input"})),
        ("x = model.tied.inputs", frozenset({"model.lm_head.input"})),
        (
            "n = 0\nfor step in tracer.iter[:3]:\n    n += model.logits.sum()\n    if n > 2:\n        tracer.stop()",
            LOGITS,
        ),
        ("by = {}.save()\nfor step in tracer.all():\n    by[step] = model.samples.tolist()", {"model.samples"}),
        ("p = torch.softmax(model.logits[-1] / live.heat, -1).topk(3).indices", LOGITS),
        ("text = f'{model.logits.shape}'", LOGITS),
        ("pass", frozenset()),
    ],
)
def test_blocks_that_only_read(source: str, found: set[str]) -> None:
    assert reads(source, modules={"torch": "torch"}) == found


H = "h = model.model.layers[0].output[0]\n"


@pytest.mark.parametrize(
    "source",
    [
        "model.model.layers[0].output = 1",
        "model.model.layers[0].output[0][:] = 1",
        "model.residual(1).output += 1",
        H + "h[0] = 1",
        H + "h += 1",
        H + "h.mul_(2)",
        H + "h.data",
        H + "g = h[1:]\ng -= 1",
        H + "g = h if True else 1\ng -= 1",
        H + "g = h.float()\ng *= 2",
        H + "g = (h, 1)\ng[0][:] = 1",
        H + "g = [h]\nfor one in g:\n    one += 1",
        H + "d = {'a': h}\nd['a'][0] = 1",
        H + "torch.add(h, 1, out=h)",
        H + "F.relu(h, True)",
        H + "F.relu(h, inplace=True)",
        H + "F.normalize(h, 2, 1, 1e-12, h)",
        H + "torch.relu_(h)",
        H + "h.numpy()[:] = 1",
        H + "h.__setitem__(0, 1)",
        H + "setattr(model, 'x', h)",
        H + "list = print\nlist(h)",
        H + "helper(h)",
        H + "del h[0]",
        H + "(h := h)",
        H + "f = lambda: h\nf()",
        H + "with torch.no_grad():\n    h.add_(1)",
        H + "try:\n    h[0] = 1\nfinally:\n    pass",
        H + "import torch",
        H + "exec('h[0] = 1')",
        H + "getattr(h, 'zero_')()",
        H + "sorted(h, key=h.zero_)",
        "model.lm_head(1)",
        "model.model.layers[0].skip(1)",
        "w = model.lm_head.weight",
        "c = tracer.cache()",
        "r = tracer.result",
        "m = model\nm.model.layers[0].output = 1",
        "x = model.nothing.output",
        "x = model.model.layers[9].output",
        "model = 1",
        "for model.x in [1]:\n    pass",
        "def f():\n    pass",
        "while True:\n    pass",
        "this is no Python",
    ],
)
def test_blocks_that_may_write(source: str) -> None:
    assert reads(source, modules={"torch": "torch", "F": "torch"}) is None


def test_what_comes_with_a_block_counts() -> None:
    source = "x = model.logits * scale"
    assert reads(source, modules={}) is None
    assert reads(source, modules={}, variables=pack({"scale": 2.0})) == {"model.logits"}
    assert reads(source, modules={"np": "numpy"}, variables=pack({"scale": 2.0})) is None
    helper = Helper(name="f", source="def f(): pass")
    assert reads(source, modules={}, variables=pack({"scale": 2.0}), helpers=[helper]) is None
    assert reads("x = layer.output", modules={}, paths={"layer": "model.layers.1"}) == outputs(1)


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("for i in which:\n    h = model.model.layers[i].output[0]", outputs(1, 3)),
        ("h = [model.model.layers[i].output[0] for i in which]", outputs(1, 3)),
        ("h = model.model.layers[one].output", outputs(2)),
        ("for i in range(1, 3):\n    h = model.residual(i).output", outputs(1, 2)),
        ("for i in [0]:\n    h = model.model.layers[i].output", outputs(0)),
        ("for i in [0]:\n    h = model.model.layers[i].output\nfor i in [1]:\n    pass", outputs(0, 1, 2, 3)),
        ("for i in mixed:\n    h = model.model.layers[i].output", outputs(0, 1, 2, 3)),
        ("which.append(0)\nfor i in which:\n    h = model.model.layers[i].output", outputs(0, 1, 2, 3)),
        ("w = which\nfor i in which:\n    h = model.model.layers[i].output", outputs(0, 1, 2, 3)),
        ("for i in [7]:\n    h = model.model.layers[i].output", outputs(0, 1, 2, 3)),
    ],
)
def test_numbers_that_are_known_say_which_layers(source: str, found: frozenset[str]) -> None:
    variables = pack({"which": [1, 3], "one": 2, "mixed": [1, "a"]})
    assert reads(source, modules={}, variables=variables) == found


def test_a_block_of_very_many_locations_is_waited_for() -> None:
    many = ModelPaths(
        [
            *(ModuleOutline(path, "Module") for path in ("", "model", "model.layers")),
            *(ModuleOutline(f"model.layers.{index}", "Layer") for index in range(MOST + 1)),
        ],
        "model.layers",
    )
    source = "i = int(live.layer)\nx = model.model.layers[i].output"
    assert reads_of(Block(name="block", source=source), many) is None


def test_one_block_that_may_write_decides() -> None:
    assert union([frozenset({"a"}), frozenset({"b"})]) == {"a", "b"}
    assert union([frozenset({"a"}), None]) is None
