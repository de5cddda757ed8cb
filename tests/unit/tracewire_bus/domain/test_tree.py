"""The module tree: how it prints, what it says is near, and which paths of a block it refuses."""

from __future__ import annotations

import textwrap

import pytest

from tracewire_bus.domain.tree import ModuleTree, UnknownModule, check_block
from tracewire_bus.wire.messages import EngineInfo, ModuleInfo

HIDDEN = 8


PATHS = ["", "model", "model.embed", "model.layers"] + [
    path for index in range(4) for path in (f"model.layers.{index}", f"model.layers.{index}.mlp")
]


def tree(taps: list[str] | None = None) -> ModuleTree:
    info = EngineInfo(engine="e", model="m", layers="model.layers", layer_count=4, hidden_size=HIDDEN, taps=taps or [])
    info.modules = [ModuleInfo(path=path, cls="Module") for path in PATHS]
    return ModuleTree(info)


@pytest.mark.parametrize(
    ("source", "location"),
    [
        ("x = model.model.layers[1].output", "model.layers.1.output"),
        ("model.model.layers[2].input = 0", "model.layers.2.input"),
        ("model.model.layers[2].output[0][:] += 1\ny = model.residual(-1).output", "model.layers.3.output"),
        ("x = model.get('model.layers.0').output", "model.layers.0.output"),
    ],
)
def test_an_untapped_location_in_a_block_is_told_from_a_wrong_path(source: str, location: str) -> None:
    (problem,) = check_block(tree(["model.layers.2.output"]), source, "model")
    assert problem.path == location
    assert "not a tap" in problem.reason
    assert not check_block(tree(), source, "model")


def llama(layers: int = 6) -> ModuleTree:
    modules = [("", "LlamaForCausalLM"), ("model", "LlamaModel"), ("model.embed_tokens", "VocabParallelEmbedding")]
    modules.append(("model.layers", "ModuleList"))
    for index in range(layers):
        base = f"model.layers.{index}"
        modules += [
            (base, "LlamaDecoderLayer"),
            (f"{base}.self_attn", "LlamaAttention"),
            (f"{base}.self_attn.qkv_proj", "QKVParallelLinear"),
            (f"{base}.mlp", "LlamaMLP"),
        ]
    modules += [("model.norm", "RMSNorm"), ("lm_head", "ParallelLMHead")]
    return ModuleTree(
        EngineInfo(
            engine="e",
            model="demo",
            layers="model.layers",
            layer_count=layers,
            modules=[ModuleInfo(path, cls) for path, cls in modules],
            attributes={"RMSNorm": ["weight", "forward"], "LlamaForCausalLM": ["config", "tied", "model"]},
        )
    )


TREE = llama()


def test_it_prints_as_nnsights_does() -> None:
    expected = """\
    LlamaForCausalLM(
      (model): LlamaModel(
        (embed_tokens): VocabParallelEmbedding()
        (layers): ModuleList(
          (0-5): 6 x LlamaDecoderLayer(
            (self_attn): LlamaAttention(
              (qkv_proj): QKVParallelLinear()
            )
            (mlp): LlamaMLP()
          )
        )
        (norm): RMSNorm()
      )
      (lm_head): ParallelLMHead()
    )"""
    assert repr(TREE) == textwrap.dedent(expected)
    assert repr(TREE.model.norm) == "RMSNorm()"


def test_only_what_repeats_in_a_row_is_collapsed() -> None:
    kinds = ["A", "A", "B", "A"]
    modules = [ModuleInfo("", "Net"), *(ModuleInfo(str(index), cls) for index, cls in enumerate(kinds))]
    tree = ModuleTree(EngineInfo(engine="e", model="m", modules=modules))
    assert repr(tree) == "Net(\n  (0-1): 2 x A()\n  (2): B()\n  (3): A()\n)"


def test_looking_around() -> None:
    assert TREE.paths[:3] == ["", "model", "model.embed_tokens"]
    assert len(TREE) == len(TREE.paths)
    assert TREE.knows("model.layers.3.mlp")
    assert not TREE.knows("model.layers.6")
    assert TREE.children() == ["model", "lm_head"]
    assert TREE.children("model.layers.0") == ["model.layers.0.self_attn", "model.layers.0.mlp"]
    assert TREE.cls("model.norm") == "RMSNorm"
    assert TREE.cls() == "LlamaForCausalLM"


def test_children_by_attribute_and_index() -> None:
    layers = TREE.model.layers
    assert layers[2].mlp.path == "model.layers.2.mlp"
    assert layers[-1].path == "model.layers.5"
    assert [layer.path for layer in layers] == TREE.children("model.layers")
    assert len(layers) == 6
    assert TREE["model.layers.2"] == layers[2]
    assert layers[2].cls == "LlamaDecoderLayer"
    assert "mlp" in dir(layers[0])
    assert not hasattr(TREE.model, "transformer")


@pytest.mark.parametrize(
    "reach", [lambda: TREE.model.layers[6], lambda: TREE["model.layers.6"], lambda: TREE.cls("model.layers.6")]
)
def test_what_does_not_exist_is_named_with_the_nearest_that_does(reach: object) -> None:
    with pytest.raises(
        UnknownModule, match=r"'model\.layers\.6'; the nearest that exists is 'model\.layers\.5'"
    ) as caught:
        reach()  # type: ignore[operator]
    assert isinstance(caught.value, AttributeError)
    assert isinstance(caught.value, LookupError)
    assert (caught.value.path, caught.value.nearest) == ("model.layers.6", "model.layers.5")


@pytest.mark.parametrize(
    ("path", "nearest"),
    [
        ("model.layers.2.mpl", "model.layers.2.mlp"),
        ("model.layers.9.mpl", "model.layers.5.mlp"),
        ("model.layer.3.mlp", "model.layers.3.mlp"),
        ("model.layers.2.attn.qkv_prj", "model.layers.2.self_attn.qkv_proj"),
        ("layers.2.mlp", "model.layers.2.mlp"),
        ("transformer.layers.3.mlp", "model.layers.3.mlp"),
        ("model.layers.2.mlp.outptu", "model.layers.2.mlp.output"),
        ("model.norm.wieght", "model.norm.weight"),
        ("logit", "logits"),
        ("lmhead", "lm_head"),
        ("model.norm", "model.norm"),
        ("", ""),
        ("entirely.different", None),
    ],
)
def test_the_nearest_path(path: str, nearest: str | None) -> None:
    assert TREE.nearest(path) == nearest


@pytest.mark.parametrize(
    "source",
    [
        "x = model.model.layers[2].output[0][-1].save()",
        "x = model.model.layers[-6].mlp.output",
        "x = model.model.layers['3'].mlp.input",
        "x = model.model.layers[i].nonsense",
        "x = model.model.layers[1:3].nonsense",
        "x = model.model.layers[2 + 2].nonsense",
        "x = model.logits.argmax(-1) + model.samples.nonsense + model.config.nonsense",
        "x = model.model.norm.weight.nonsense",
        "x = model._module.nonsense",
        "x = model.tied.nonsense",
        "model.residual(5).output += model.residual(-6).output + model.residual(i).output",
        "model.model.layers[0].output = 3; model.fresh = 4",
        "x = model.get('model.layers.3.mlp').output + model.get('model.norm.output') + model.get(path).nonsense",
        "x = other.model.nonsense",
        "x = getattr(model, 'nonsense')",
        "try:\n    model.nonsense\nexcept AttributeError:\n    pass",
        "def f(model):\n    return model.nonsense",
        "f = lambda model: model.nonsense",
        "model = other\nmodel.nonsense",
        "for model in models:\n    model.nonsense",
        "import model\nmodel.nonsense",
        "with open('f') as model:\n    model.nonsense",
        "[model.nonsense for model in models]",
        "def f():\n    model = other\n    return model.nonsense",
        "this does not parse, model.nonsense",
        "",
    ],
)
def test_good_blocks_have_no_problems(source: str) -> None:
    assert check_block(TREE, source, "model") == []


@pytest.mark.parametrize(
    ("source", "path", "line", "column", "nearest"),
    [
        ("x = model.model.layers[6].output", "model.layers.6", 1, 23, "model.layers.5"),
        ("x = model.model.layers[-7].output", "model.layers.-7", 1, 23, "model.layers.0"),
        ("\n\nfor s in tracer.iter[:]:\n    y = model.lmhead.output", "lmhead", 4, 14, "lm_head"),
        ("model.model.layers[0].mpl.output[:] *= 2", "model.layers.0.mpl", 1, 22, "model.layers.0.mlp"),
        ("model.model.layers[0].mpl.output = 2", "model.layers.0.mpl", 1, 22, "model.layers.0.mlp"),
        ("f(x, key=model.model.nrom.output)", "model.nrom", 1, 21, "model.norm"),
        ("x = y[model.model.nrom.output]", "model.nrom", 1, 18, "model.norm"),
        ("x = model.model.layers[model.wrong].output", "wrong", 1, 29, None),
        ("x = (model\n     .model\n     .nrom)", "model.nrom", 3, 6, "model.norm"),
        ("x = model.model.layers.mlp", "model.layers.mlp", 1, 23, None),
        ("x = model.get('model.layers.3.mpl').output", "model.layers.3.mpl", 1, 10, "model.layers.3.mlp"),
        ("def f():\n    return model.nrom", "nrom", 2, 17, None),
        ("x = model.model.logits", "model.logits", 1, 16, None),
        ("y = model.residual(6).output", "residual(6)", 1, 4, "residual(5)"),
        ("y = model.residual(-7).output", "residual(-7)", 1, 4, "residual(-6)"),
        ("x = f'{model.nrom}'", "nrom", 1, 13, None),
        ("try:\n    pass\nfinally:\n    model.nrom", "nrom", 4, 10, None),
    ],
)
def test_literal_paths_that_lead_nowhere(source: str, path: str, line: int, column: int, nearest: str | None) -> None:
    (problem,) = check_block(TREE, source, "model")
    assert (problem.path, problem.line, problem.column) == (path, line, column)
    if nearest is not None:
        assert problem.nearest == nearest


def test_problems_come_in_the_order_of_the_source() -> None:
    problems = check_block(TREE, "b = model.two\na = model.model.one, model.three", "model")
    assert [problem.path for problem in problems] == ["two", "model.one", "three"]


def test_the_model_may_have_another_name() -> None:
    assert check_block(TREE, "model.wrong", "llm") == []
    assert [problem.path for problem in check_block(TREE, "llm.wrong", "llm")] == ["wrong"]


def test_the_source_of_a_forward_prints_with_its_operations() -> None:
    text = " relu_0 ->  0     return relu(x)"
    info = EngineInfo(engine="e", model="m", attributes={"MLP": [], "Model": []}, sources={"MLP": text})
    info.modules = [ModuleInfo(path="", cls="Model"), ModuleInfo(path="mlp", cls="MLP")]
    found = ModuleTree(info)
    assert str(found.mlp.source) == repr(found.mlp.source) == found.mlp.source.text == text
    with pytest.raises(AttributeError, match="'relu_0' exists on the engine, inside a block"):
        _ = found.mlp.source.relu_0
    # The engine publishes none for the root: an engine of 0.1 publishes none at all.
    with pytest.raises(AttributeError, match=r"save it in a block: text = tracewire\.save\(str\(model\.source\)\)"):
        _ = found.source
