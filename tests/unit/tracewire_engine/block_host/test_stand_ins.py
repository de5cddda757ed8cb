"""What a host has in place of vLLM and of the model."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from tracewire_engine.block_host.stand_ins import RequestOutput, is_stand_in, tree_of
from tracewire_engine.protocol.block_host import ModuleOutline

OUTLINES = [
    ModuleOutline("", "Llama"),
    ModuleOutline("layers", "ModuleList", "list"),
    ModuleOutline("layers.0", "Layer", extra="size=4"),
    ModuleOutline("embed", "Embedding"),
    ModuleOutline("head", "Embedding", same="embed"),
]


def test_a_network_of_a_block_is_no_stand_in() -> None:
    tree = tree_of(OUTLINES, lambda *_: None)
    assert all(map(is_stand_in, tree.modules()))
    network = torch.nn.Identity()
    network.outline = "of its own"  # type: ignore[assignment]
    assert not is_stand_in(network)


def test_a_tree_of_stand_ins_looks_like_the_model() -> None:
    asked: list[tuple[str, str]] = []

    def fetch(path: str, name: str) -> torch.Tensor:
        asked.append((path, name))
        if name == "weight":
            return torch.ones(2)
        raise AttributeError(name)

    tree = tree_of(OUTLINES, fetch)
    assert not asked
    assert [name for name, _ in tree.named_modules()] == ["", "layers", "layers.0", "embed"]
    assert tree.get_submodule("head") is tree.get_submodule("embed")
    assert repr(tree) == (
        "Llama(\n  (layers): ModuleList(\n    (0): Layer(size=4)\n  )\n  (embed): Embedding()\n  (head): Embedding()\n)"
    )
    assert tree.get_submodule("embed").weight.tolist() == [1, 1]
    with pytest.raises(AttributeError, match="'Layer' object has no attribute 'nothing'"):
        _ = tree.get_submodule("layers.0").nothing
    assert asked == [("embed", "weight"), ("layers.0", "nothing")]


def test_a_host_does_without_vllm() -> None:
    code = (
        "from tracewire_engine.block_host.stand_ins import install_vllm; install_vllm()\n"
        "import tracewire_engine.block_host.driver, sys, vllm\n"
        "from vllm.outputs import RequestOutput\n"
        "assert vllm.__spec__.origin is None and RequestOutput.__module__.startswith('tracewire')\n"
        "assert 'tracewire_engine.worker.runner' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)


def test_outputs_have_what_vllms_have() -> None:
    outputs = pytest.importorskip("vllm.outputs")
    real = outputs.RequestOutput("r", "p", [1], None, [outputs.CompletionOutput(0, "t", [2], 0.0, None)], True)
    ours = RequestOutput("r", "p", [1], None, [], True)
    for name in ("request_id", "prompt", "prompt_token_ids", "prompt_logprobs", "finished", "metrics", "lora_request"):
        assert getattr(ours, name) == getattr(real, name)
