"""What blocks write, as far as their source shows it."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from tests.support.hosted_model import Model
from tracewire_bus.wire.messages import Block
from tracewire_bus.wire.packing import pack
from tracewire_engine.protocol.known_edits import Edit
from tracewire_engine.worker.block_host.known_edits import KnownEdits, edits_of
from tracewire_engine.worker.block_host.reading import ModelPaths, account_of
from tracewire_engine.worker.block_host.setup import outline_of

PATHS = ModelPaths(outline_of(Model(4)), "model.layers")
VECTOR = np.ones(4, np.float32)
VARIABLES = pack({"vec": VECTOR, "by": {"a": VECTOR}, "which": [1, 2], "scale": 2.0, "n": 1, "some": ["a", VECTOR]})

L1 = "model.model.layers.1.output"
H = "h = model.model.layers[1].output[0]\n"
EACH = "for step in tracer.iter[:]:\n    "
ZERO = "model.model.layers[1].output[0].zero_()\n"


def block_of(source: str) -> Block:
    return Block(name="block", source=source, variables=VARIABLES, modules={"torch": "torch"})


def known(source: str) -> KnownEdits | None:
    """What is known of a block of which `edits_of` may be asked."""
    block = block_of(source)
    assert account_of(block, PATHS).computes
    return edits_of(block, PATHS)


def edits(source: str) -> tuple[Edit, ...]:
    found = known(source)
    assert found is not None
    return found.edits


def names(edit: Edit) -> list[str]:
    return [one.name for one in edit.operations]


@pytest.mark.parametrize(
    ("source", "operations", "leaves"),
    [
        (H + "h[:] = h * 2.0", ["getitem", "mul", "setitem"], []),
        (H + "h *= 2.0", ["getitem", "imul"], []),
        (H + "h *= scale * n + 1", ["getitem", "imul"], []),
        ("model.model.layers[1].output[0][:] *= 2.0", ["getitem", "getitem", "imul"], []),
        (H + "h += vec", ["getitem", "iadd"], [["vec"]]),
        (H + "h += vec.to(h.dtype)", ["getitem", "attribute", "to", "iadd"], [["vec"]]),
        (H + "h += vec.to(torch.float16)", ["getitem", "to", "iadd"], [["vec"]]),
        (H + "h += by['a']\nh += some[-1]", ["getitem", "iadd", "iadd"], [["by", "a"], ["some", -1]]),
        (H + "h.add_(vec, alpha=0.5)", ["getitem", "add_"], [["vec"]]),
        (
            "d = vec / vec.norm()\n" + H + "h -= (h @ d).unsqueeze(-1) * d",
            ["getitem", "norm", "truediv", "matmul", "unsqueeze", "mul", "isub"],
            [["vec"]],
        ),
        (
            H + "v = vec.to(h.dtype)\nh[:] = h - (h * v).sum(dim=-1, keepdim=True) * v",
            ["getitem", "attribute", "to", "mul", "sum", "mul", "sub", "setitem"],
            [["vec"]],
        ),
        (H + "h.zero_()", ["getitem", "zero_"], []),
        (H + "h[-1] = 0.0", ["getitem", "setitem"], []),
        (H + "h[-1] += vec", ["getitem", "getitem", "iadd"], [["vec"]]),
        (H + "g = h\ng *= 2\nh += 1", ["getitem", "imul", "iadd"], []),
        (H + "h.clamp_(min=-1, max=1)\nh.copy_(vec)", ["getitem", "clamp_", "copy_"], [["vec"]]),
        ("h, rest = model.model.layers[1].output\nrest *= 2", ["unpack", "getitem", "imul"], []),
        ("h = model.residual(1).output\nh += vec", ["stream", "iadd", "put_stream"], [["vec"]]),
        ("model.residual(1).output[-1] += vec", ["stream", "getitem", "iadd", "put_stream"], [["vec"]]),
        ("model.residual(1).output *= 0.5", ["stream", "imul", "put_stream"], []),
        ("model.residual(1).output = model.residual(1).output * 0.5", ["stream", "mul", "put_stream"], []),
        # What does not matter, and can raise no error, is no part of it.
        (H + "x = h.clone().save()\nh *= 2.0\ny = h.float().norm().save()", ["getitem", "imul"], []),
        ("y = 3\nk = [].save()\n" + H + "k.append(h)\nh *= y", ["getitem", "imul"], []),
        ("layer = model.model.layers[n]\nlayer.output[0].zero_()", ["getitem", "zero_"], []),
    ],
)
def test_what_is_done_to_a_value(source: str, operations: list[str], leaves: list[Any]) -> None:
    (edit,) = edits(source)
    assert (names(edit), edit.leaves) == (operations, leaves)
    assert (edit.location, edit.first, edit.end) == (L1, 0, 1)


def test_operations_have_their_arguments() -> None:
    (edit,) = edits(H + "h[-1, 1:3] = (h * scale).clamp(min=-n) + vec.to(torch.bfloat16)")
    assert [[one.name, one.arguments, one.options] for one in edit.operations] == [
        ["getitem", [["r", 0], 0], {}],
        ["mul", [["r", 1], 2.0], {}],
        ["clamp", [["r", 2]], {"min": -1}],
        ["to", [["v", 0], ["d", "bfloat16"]], {}],
        ["add", [["r", 3], ["r", 4]], {}],
        ["setitem", [["r", 1], ["r", 5], -1, ["s", 1, 3, None]], {}],
    ]
    (edit,) = edits("model.logits[:, 7] += 2.0")
    assert edit.location == "model.logits"
    assert edit.operations[0].arguments == [["r", 0], ["s", None, None, None], 7]
    assert edit.operations[1].arguments == [["r", 1], 2.0]


@pytest.mark.parametrize(
    ("source", "layers"),
    [
        ("for i in [0, 2]:\n    model.model.layers[i].output[0].mul_(2)", [0, 2]),
        ("for i in (1,):\n    model.residual(i).output[:] += vec", [1]),
        ("for i in range(1, 4):\n    model.model.layers[i].output[0].mul_(2)", [1, 2, 3]),
        ("for i in which:\n    model.model.layers[i + n].output[0].mul_(2)", [2, 3]),
        (EACH + "for i in which:\n        model.model.layers[i].output[0].mul_(2)", [1, 2]),
        ("model.model.layers[0].output[0].mul_(2)\nmodel.model.layers[-1].output[0].mul_(2)", [0, 3]),
        ("x = model.model.layers[0].output[0].save()\nmodel.residual(-2).output[:] = 0.0", [2]),
        ("x = model.model.layers[3].output[0].save()", []),
    ],
)
def test_locations(source: str, layers: list[int]) -> None:
    assert [edit.location for edit in edits(source)] == [f"model.model.layers.{layer}.output" for layer in layers]


@pytest.mark.parametrize(
    ("head", "first", "end"),
    [
        ("for step in tracer.iter[2:4]", 2, 4),
        ("for step in tracer.iter[:]", 0, None),
        ("for step in tracer.iter[n:]", 1, None),
        ("for step in tracer.iter[:3]", 0, 3),
        ("for step in tracer.iter[3]", 3, 4),
        ("for step in tracer.all()", 0, None),
        ("for i in [1]", 0, 1),
    ],
)
def test_steps(head: str, first: int, end: int | None) -> None:
    (edit,) = edits(f"kept = [].save()\n{head}:\n    {H}    h *= 2.0\n    kept.append(h.clone())")
    assert (names(edit), edit.first, edit.end) == (["getitem", "imul"], first, end)


@pytest.mark.parametrize(
    "source",
    [
        EACH + H + "    h *= 2.0\n    tracer.stop()",
        EACH + H + "    h *= 2.0\n    if step == 2:\n        tracer.stop()",
        EACH + H + "    h *= 2.0\n    x = 1 / (step - 1)",
        EACH + H + "    h *= 2.0\n    x = which[7]",
        EACH + H + "    h *= 2.0\n    x = torch.zeros(4) @ h",
        EACH + H + "    h *= 2.0\n    x = h.topk(2).values.save()",
    ],
)
def test_what_may_end_the_block_behind_an_edit_makes_no_difference(source: str) -> None:
    (edit,) = edits(source)
    assert (names(edit), edit.first, edit.end) == (["getitem", "imul"], 0, None)


UNCLEAR = {
    # It may not come to the edit.
    "a condition": H + "if h.norm() > 1:\n    h *= 2.0",
    "a condition of the step": EACH + H + "    if step > 1:\n        h *= 2.0",
    "a condition of the step around all of it": EACH + "if step > 1:\n        " + ZERO,
    "the other branch of a condition of the step": EACH + "if step > 1:\n        pass\n    else:\n        " + ZERO,
    "a condition's other branch": H + "if n:\n    pass\nelse:\n    h *= 2.0",
    "a condition before it": H + "if h.norm() > 1:\n    tracer.stop()\nh *= 2.0",
    "the end before it": EACH + "tracer.stop()\n    " + ZERO,
    "a division by the step": EACH + "x = 1 / step\n    " + ZERO,
    "an unknown call": "x = torch.zeros(3)\n" + ZERO,
    "another unknown call": H + "x = h.topk(50)\nh.zero_()",
    "a method that may fail": H + "x = h.mean(dim=7)\nh.zero_()",
    "two vectors": "v = vec + vec\n" + ZERO,
    "an item of a list": "x = which[5]\n" + ZERO,
    "a column that may not be there": "x = model.logits[:, 10 ** 3]\nmodel.logits[:, 1] = 0.0",
    "a name that stands for nothing": "x = y\ny = 1\n" + ZERO,
    "a live value": "x = live.x\n" + ZERO,
    "a text and a number": "'a' + 1\n" + ZERO,
    "layers in the wrong order": "model.model.layers[2].output[0].zero_()\n" + ZERO,
    "a later layer before it": "x = model.model.layers[2].output[0].save()\n" + ZERO,
    "layers that count down": "for i in [2, 1]:\n    model.model.layers[i].output[0].zero_()",
    "the same layer twice": "for i in [1, 2, 1]:\n    model.model.layers[i].output[0].zero_()",
    "no order that is known": "x = model.model.norm.output\n" + ZERO,
    "the end of the loop": EACH + ZERO + "    break",
    "the next turn of the loop": EACH + "continue\n    " + ZERO,
    "a logical and": H + "x = vec is None and h.mul_(2)",
    "another logical and": "a = vec\n" + H + "x = a and h.mul_(2)",
    "a choice": H + "x = h.mul_(2) if n else 1",
    "a comparison of three": H + "x = 1 < n < h.mul_(2)",
    "a comprehension": "x = [model.model.layers[i].output[0].mul_(2) for i in [0, 1]]",
    "a comprehension's condition": H + "x = [i for i in which if h.mul_(2)]",
    "all layers": "for layer in model.model.layers:\n    layer.output[0].zero_()",
    "a loop through something unknown": H + "for i in range(int(live.n)):\n    h *= 2.0",
    # Nobody knows in which steps.
    "two loops": "for step in tracer.iter[:2]:\n    " + ZERO + "for step in tracer.iter[2:]:\n    " + ZERO,
    "two loops and two layers": "for step in tracer.iter[:2]:\n    "
    + ZERO
    + "for step in tracer.iter[2:]:\n    model.model.layers[2].output[0].zero_()",
    "a step before the loop": ZERO + EACH + ZERO,
    "an edit behind the loop": EACH + "pass\n" + ZERO,
    "every other step": "for step in tracer.iter[::2]:\n    " + ZERO,
    "the last step": "for step in tracer.iter[-1]:\n    " + ZERO,
    "a loop in a loop": "for i in [0, 1]:\n    " + EACH + "    model.model.layers[i].output[0].zero_()",
    # Nobody knows of which value.
    "a stale value": H + "x = model.model.layers[2].output[0].save()\nh.zero_()",
    "a stale value in a loop": H + EACH + "h.zero_()",
    "a value from before a condition": H + "if n > 1:\n    x = model.logits\nh.zero_()",
    "an alias": "kept = [].save()\n" + H + "kept.append(h)\nkept[0].mul_(2)",
    "a view": H + "g = h.view(-1)\ng.mul_(2)",
    "perhaps the same": H + "g = h.float()\ng.mul_(2)",
    "a name rebound in the loop": H + EACH + "h *= 2.0\n    " + H,
    "a name rebound by a condition": H + "g = h * 2\nif n > 1:\n    g = h\ng *= 2.0",
    "a name rebound by another loop": "g = 1\n" + H + "for i in range(int(live.n)):\n    g = h\ng *= 2.0",
    "a loop's value of the turn before": "g = 1\n" + EACH + "x = model.logits\n    g *= 2\n    g = x",
    "a mask": H + "h[h > 0] = 0.0",
    "a list of places": "model.logits[:, which] = 0.0",
    "a module without rows": "model.model.norm.output[:] = 0.0",
    "samples": "model.samples[:] = 7",
    "a module's input": "model.model.layers[1].input[:] = 7.0",
    "a stream and the output": "h = model.residual(1).output\nh *= 2\n" + ZERO,
    # Nobody knows how.
    "an assigned output": "model.model.layers[1].output = (model.model.layers[1].output[0] * 2, None)",
    "assigned logits": "model.logits = model.logits * 2",
    "a stream of another layer": "model.residual(1).output = model.residual(0).output * 2",
    "a vector for a stream": "model.residual(1).output = vec",
    "a skipped layer": "model.model.layers[1].skip((model.model.layers[1].input, None))",
    "an unknown method": H + "h.exp_()",
    "another unknown method": H + "h.uniform_()",
    "an unknown option": H + "h.div_(2, rounding_mode='floor')",
    "a power": H + "h **= 2",
    "a power of a part": H + "h[:] **= 2",
    "a new tensor": H + "h += torch.ones(4)",
    "a live factor": H + "h *= live.x",
    "arguments with a star": H + "h.mul_(*which)",
    "a list that the block appends to": "which.append(3)\nfor i in which:\n    model.model.layers[i].output[0].zero_()",
    "a list that it appends to in its loop": "for i in which:\n    model.model.layers[i].output[0].zero_()\n"
    "    which.append(3)",
    "a list that it appends to by another name": "w = which\nfor i in which:\n"
    "    model.model.layers[i].output[0].zero_()\n    w.append(3)",
    "a dict that it changes": H + "by.update(a=h)\nh += by['a']",
    "a dict that it changes later": EACH + H + "    h += by['a']\n    by.update(a=h)",
    "a dict of which it sets an item": EACH + H + "    h += by['a']\n    by['a'] = h",
    "a vector that it changes": "vec.mul_(2)\n" + ZERO,
    "a vector that it changes later": ZERO + "vec.mul_(2)",
    "a vector to which it adds": "v = vec\n" + H + "v += 1\nh += v",
    "a vector of its own to which it adds": "v = vec * 2\n" + EACH + H + "    v += 1\n    h += v",
    "a constant that it changes": EACH + H + "    v = vec.to(h.dtype)\n    v *= 2\n    h += v",
}


@pytest.mark.parametrize("name", UNCLEAR)
def test_blocks_that_are_waited_for(name: str) -> None:
    source = UNCLEAR[name]
    if name in ("the end of the loop", "the next turn of the loop"):
        assert edits_of(block_of(source), PATHS) is None
    else:
        assert known(source) is None


@pytest.mark.parametrize(
    "source",
    [
        *(H + "x = (h := h)\nh.zero_()", H + "f = lambda: h\nh.zero_()", "while True:\n    " + ZERO),
        *("try:\n    " + ZERO + "finally:\n    pass", "def f():\n    " + ZERO, H + "del h[0]", H + "h.data.zero_()"),
        *("this is no Python", "import os\n" + ZERO, "model.residual(9).output[:] = 0", "model.model.forward = 1"),
        "setattr(model, 'x', 1)\n" + ZERO,
    ],
)
def test_of_what_is_not_known_to_only_compute_nothing_is_known_either(source: str) -> None:
    assert edits_of(block_of(source), PATHS) is None


@pytest.mark.parametrize("variables", [b"\xc1", b"", pack([1])])
def test_of_variables_that_cannot_be_read_nothing_is_known(variables: bytes) -> None:
    assert edits_of(msgspec.structs.replace(block_of(ZERO), variables=variables), PATHS) is None


def test_a_block_may_name_a_module() -> None:
    block = msgspec.structs.replace(block_of("layer.output[0].zero_()"), paths={"layer": "model.layers.2"})
    found = edits_of(block, PATHS)
    assert found is not None
    assert [edit.location for edit in found.edits] == ["model.model.layers.2.output"]


def test_an_engine_that_does_not_serve_a_location_fails_the_block_there() -> None:
    source = "x = model.model.layers[0].output[0].save()\n" + ZERO
    served = "model.model.layers.0.output"
    paths = [ModelPaths(outline_of(Model(4)), "model.layers", taps) for taps in ([served, L1], [L1])]
    assert [edits_of(block_of(source), one) is not None for one in paths] == [True, False]


def test_without_a_list_of_layers_only_logits_are_known() -> None:
    paths = ModelPaths(outline_of(Model(4)), "")
    assert edits_of(block_of(ZERO), paths) is None
    assert edits_of(block_of("model.residual(1).output[:] = 0"), paths) is None


TOTAL = "total = 0\n" + EACH + H + "    h *= 2.0\n    total += {}\nx = total.save()"


@pytest.mark.parametrize(
    ("source", "keeps"),
    [
        (H + "h *= 2.0\nx = h.save()", True),
        ("kept = [].save()\n" + EACH + H + "    h *= 2.0\n    kept.append(h.clone())", True),
        ("kept = {}.save()\n" + EACH + H + "    h *= 2.0\n    kept[step] = h.norm()", True),
        (TOTAL.format("1"), True),
        (TOTAL.format("h.norm()"), False),
        (TOTAL.format("float(h.norm())"), False),
        ("total = 0\n" + H + "h *= 2.0\ntotal += h.norm()\ntotal += h.norm()", False),
        ("kept = []\n" + EACH + H + "    h *= 2.0\n    kept += [h.clone()]", True),
        (EACH + H + "    h *= 2.0\n    x = (h == 1).save()\n    x.zero_()", False),
    ],
)
def test_arrays_stay_as_they_were_saved_unless_the_block_changes_its_own(source: str, keeps: bool) -> None:
    found = known(source)
    assert found is not None
    assert len(found.edits) == 1
    assert found.keeps == keeps


@pytest.mark.parametrize(
    "source",
    [
        "x = " + "(" * 5000 + "1" + ")" * 5000 + "\n" + ZERO,
        "x = " + "-" * 20000 + "1\n" + ZERO,
        "x = " + "1 + " * 20000 + "1\n" + ZERO,
        "x = by" + "['a']" * 20000 + "\n" + ZERO,
        "x = model" + ".model" * 20000 + "\n" + ZERO,
        "x = " + "[" * 5000 + "]" * 5000 + "\n" + ZERO,
        "".join(" " * depth + "if n:\n" for depth in range(90)) + " " * 90 + "pass\n" + H + "h.zero_()",
        H + "h *= 2.0\n" * 5000,
        EACH + H + "    for i in range(256):\n        for j in range(256):\n            h *= 2.0",
        H + "".join(f"h += by['{key}']\n" for key in range(5000)),
    ],
)
def test_a_source_that_nests_deep_or_does_very_much_is_waited_for(source: str) -> None:
    assert edits_of(block_of(source), PATHS) is None
