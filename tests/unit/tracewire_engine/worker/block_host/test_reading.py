"""Which blocks only read for certain, and what they may ask for."""

from __future__ import annotations

import pytest

from tracewire_bus.wire.messages import Block, Helper
from tracewire_bus.wire.packing import pack
from tracewire_engine.protocol.block_host import ModuleOutline
from tracewire_engine.worker.block_host.reading import MOST, Account, ModelPaths, account_of, union

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


def account(source: str, **more: object) -> Account:
    fields = {"modules": {"torch": "torch", "F": "torch.nn.functional"}, **more}
    return account_of(Block(name="block", source=source, **fields), PATHS)  # type: ignore[arg-type]


def reads(source: str, **more: object) -> frozenset[str] | None:
    found = account(source, **more)
    assert found.computes or found.reads is None
    return found.reads


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
        ("x = sum(range(8)) + model.logits ** 2 + model.logits ** -0.5", LOGITS),
        ("for i in range(10 ** 11):\n    x = model.logits", LOGITS),
        ("x = [model.logits for i in range(int(live.n))]", LOGITS),
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
        H + "g = h[1:]\ng -= 1",
        H + "g = h if True else 1\ng -= 1",
        H + "g = h.float()\ng *= 2",
        H + "g = (h, 1)\ng[0][:] = 1",
        H + "g = [h]\nfor one in g:\n    one += 1",
        H + "d = {'a': h}\nd['a'][0] = 1",
        H + "g = [h]\ng[0] += 1",
        "model.model.layers[0].skip(1)",
        "for step in tracer.iter[:]:\n    o = model.lm_head.output\n    model.lm_head.output = (o[0] * 2, o[1])",
        "model.logits[:, 3] = -1e9\nmodel.samples[:] = 7",
        "model.logits = model.logits * 2",
        "m = model\nm.model.layers[0].output = 1",
        H + "h[:] = h * 1.001\nh.zero_()",
    ],
)
def test_blocks_that_write_and_only_compute(source: str) -> None:
    found = account(source, modules={"torch": "torch"})
    assert (found.reads, found.computes) == (None, True)


@pytest.mark.parametrize(
    "source",
    [
        H + "h.data",
        H + "torch.add(h, 1, out=h)",
        H + "F.relu(h, True)",
        H + "F.relu(h, inplace=True)",
        H + "F.normalize(h, 2, 1, 1e-12, h)",
        H + "torch.norm(h, 2, 0, False, h[-1])",
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
        "w = model.lm_head.weight",
        "c = tracer.cache()",
        "r = tracer.result",
        "x = model.nothing.output",
        "x = model.model.layers[9].output",
        "model = 1",
        "for model.x in [1]:\n    pass",
        "def f():\n    pass",
        "while True:\n    pass",
        "this is no Python",
        "for model.logits in [1]:\n    import os",
        "live.x = 1",
        "model.model = 1",
        "model.model.layers[0].forward = 1",
        "model.model.layers += [1]",
        "layers = model.model.layers\nlayers += [1]",
        "torch.add = 1",
        "torch.nn.functional.relu = 1",
        H + "h.grad = 1",
        H + "h.resize_(9)",
        H + "h.set_(h)",
        H + "h.as_strided_((9,), (1,))",
        H + "h.untyped_storage()",
        H + "h.register_hook(1)",
        "tracer.iter = 1",
        "x = sum(range(10 ** 11))",
        "x = list(range(int(live.n)))",
        "x = 7 ** 10 ** 8",
        "x = 7 ** int(live.n)",
        "x = 1 << 10 ** 12",
        "().__class__.__bases__[0].__subclasses__()",
    ],
)
def test_blocks_of_which_nothing_is_certain(source: str) -> None:
    assert account(source, modules={"torch": "torch", "F": "torch"}) == Account()


def test_a_block_s_own_things_may_have_the_names_of_python_s() -> None:
    assert account("sum(model.logits)", modules={}, paths={"sum": "model.layers.1"}) == Account()
    assert account("x = max", modules={}, variables=pack({"max": 3})) == Account()


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
    assert account_of(Block(name="block", source=source), many) == Account(None, computes=True, keeps=True)


def test_one_block_that_may_write_decides() -> None:
    first, second = (Account(frozenset({name}), computes=True) for name in "ab")
    assert union([first, second]) == Account(frozenset("ab"), computes=True)
    assert union([first, Account(None, computes=True)]) == Account(None, computes=True)
    assert union([first, Account()]) == Account()
    assert union([]) == Account(frozenset(), computes=True, edits=frozenset(), keeps=True, asks=frozenset())


@pytest.mark.parametrize(
    ("source", "keeps"),
    [
        ("k = [].save()\nfor step in tracer.iter[:]:\n    k.append(model.model.layers[0].output[0][-1].clone())", True),
        (H + "n = 0\nfor i in range(3):\n    n += 1\nk = []\nk += [h]\nd = {}\nd[n] = h", True),
        (H + "n = 0\nn += h.sum()", False),
        (H + "g = h.clone()\ng += 1", False),
        (H + "g = h.clone()\ng[0] = 1", False),
        (H + "g = [h]\ng[0] += 1", False),
        (H + "g = h.clone().mul_(2)", False),
        (H + "model.model.layers[0].output = (h * 2, h)", False),
        (H + "exec('h += 1')", False),
    ],
)
def test_which_blocks_keep_arrays_as_they_saved_them(source: str, keeps: bool) -> None:
    found = account(source, modules={"torch": "torch"})
    assert found.keeps == keeps
    assert union([found, account("pass", modules={})]).keeps == keeps


@pytest.mark.parametrize(
    ("source", "edits", "assigns"),
    [
        (H + "h[:] *= 2", outputs(0), False),
        (H + "h.mul_(2)\nx = model.lm_head.input.clone().save()", None, False),
        ("model.logits[:, 3] = -1e9", LOGITS, False),
        (H + "x = h.clone().save()", outputs(0), False),
        ("for i in range(2):\n    i += 1\n    model.model.layers[i].output[0][:] *= 2", outputs(0, 1, 2, 3), False),
        ("for i in range(4):\n    model.model.layers[i].output[0][:] = 0", outputs(0, 1, 2, 3), False),
        ("i = int(live.layer)\nmodel.model.layers[i].output[0][:] = 0", outputs(0, 1, 2, 3), False),
        ("model.residual(1).output = 1\nmodel.residual(2).output += 1", outputs(1, 2), False),
        (H + "model.model.layers[1].output = (h * 2, h)", outputs(0, 1), True),
        ("model.logits = model.logits * 2", LOGITS, True),
        ("model.samples[:] = 7", {"model.samples"}, True),
        (H + "h += 1\nmodel.model.layers[1].skip(h)", None, False),
        ("for layer in model.model.layers:\n    layer.output[0][:] = 0\nx = model.logits", None, False),
        (H + "exec('h += 1')", None, False),
    ],
)
def test_where_blocks_may_write(source: str, edits: set[str] | None, assigns: bool) -> None:
    found = account(source, modules={"torch": "torch"})
    assert (found.edits, found.assigns) == (None if edits is None else frozenset(edits), assigns)


def test_blocks_that_write_at_many_locations_together() -> None:
    first, second = (Account(None, computes=True, edits=frozenset(names)) for names in ("ab", "bc"))
    assert union([first, second]).edits == frozenset("abc")
    assert union([first, Account(frozenset("z"), computes=True)]).edits is None
    assert union([first, Account()]).edits is None
    assert union([first, Account(None, computes=True, edits=frozenset("a"), assigns=True)]).assigns


@pytest.mark.parametrize(
    ("source", "parts"),
    [
        ("x = model.model.layers[0].output[0]", {0: {0}}),
        ("x = [layer.output[1] for layer in model.model.layers]", None),
        ("for layer in model.model.layers[:]:\n    x = layer.output[1]", {0: {1}, 1: {1}, 2: {1}, 3: {1}}),
        ("l = model.model.layers[2]\nx = l.output[0] + l.output[1]\nl.output[0][:] = 0", {2: {0, 1}}),
        ("x = model.model.layers[0].output[0]\ny = model.model.layers[0].output", {}),
        ("y = model.model.layers[0].output\nx = model.model.layers[0].output[0]", {}),
        ("x = model.model.layers[0].output[0]\nmodel.model.layers[0].output = (x, x)", {}),
        ("x = model.model.layers[0].output[0]\ny = model.residual(0).output", {}),
        ("h, r = model.model.layers[0].output", {}),
        ("x = model.model.layers[0].output[-1] + model.model.layers[1].output[:1]", {}),
        ("x = model.model.layers[0].output[True]", {}),
        ("x = model.model.layers[0].output[0]\nmodel.model.layers[0].output[0] += 1", {}),
        ("x = model.model.layers[0].input[0] + model.logits[0]", {}),
        ("i = int(live.layer)\nx = model.model.layers[i].output[0]", {0: {0}, 1: {0}, 2: {0}, 3: {0}}),
        (
            "for i in [1, 2]:\n    x = model.model.layers[i + 1].output[0], model.model.layers[3 - i].output[1]",
            {2: {0, 1}, 3: {0}, 1: {1}},
        ),
        ("for i in [2, 3]:\n    x = model.model.layers[i + 1].output[0]", {0: {0}, 1: {0}, 2: {0}, 3: {0}}),
    ],
)
def test_which_items_of_values_blocks_use(source: str, parts: dict[int, set[int]] | None) -> None:
    found = account(source, modules={"torch": "torch"})
    if parts is None:
        # A list comprehension has modules as values.
        assert not found.parts
    else:
        assert found.computes
        assert found.parts == {f"model.model.layers.{layer}.output": items for layer, items in parts.items()}


def test_items_that_several_blocks_use() -> None:
    both = frozenset("ab")
    first = Account(both, computes=True, parts={"a": frozenset({0}), "b": frozenset({1})})
    second = Account(None, computes=True, edits=both, parts={"a": frozenset({2})})
    assert union([first, second]).parts == {"a": frozenset({0, 2})}
    assert union([first, Account(frozenset("c"), computes=True)]).parts == first.parts
    assert union([first, Account(computes=True)]).parts == {}
    assert union([first, union([])]).parts == first.parts


def test_a_source_that_nests_deep_is_read_at_once() -> None:
    """Reading a place of a value twice would double the time with each level."""
    source = "model.residual(0).output[0]"
    for _ in range(40):
        source = f"model.residual({source}).output[0]"
    assert account(f"x = {source}", modules={"torch": "torch"}).computes


@pytest.mark.parametrize(
    "source",
    [
        "for i in range(99999999999999999999):\n    pass",
        "x = model.model.layers[{[]: 0}].output",
        "x = [0 for torch.add in [1]]",
        "x = [0 for model.logits in [5]]",
        "x = [0 for (a, model.logits) in [(5, 6)]]",
    ],
)
def test_a_source_of_which_nothing_is_certain_raises_nothing(source: str) -> None:
    assert not account(source, modules={"torch": "torch"}).edits
    assert account(source, modules={"torch": "torch"}).reads in (None, frozenset())


def test_a_module_under_another_path_is_the_same() -> None:
    found = account("x = head.output[0]", modules={"torch": "torch"}, paths={"head": "tied"})
    assert found.reads == {"model.lm_head.output"}
