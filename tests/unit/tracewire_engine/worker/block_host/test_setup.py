"""How a worker describes its model to hosts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from tests.support.hosted_model import Model
from tracewire_engine.block_host.stand_ins import tree_of
from tracewire_engine.worker.block_host.setup import hosted_blocks, outline_of


class Odd(torch.nn.Module):
    def extra_repr(self) -> str:
        raise RuntimeError


def test_an_outline_has_all_paths_and_knows_modules_with_two() -> None:
    model = Model(2)
    model.tied = model.model.norm
    model.odd = Odd()
    found = {one.path: one for one in outline_of(model)}
    assert list(found) == [path for path, _ in model.named_modules(remove_duplicate=False)]
    assert found["tied"].same == "model.norm"
    assert (found["model.layers"].kind, found["model.layers.0"].name) == ("list", "Layer")
    tree = tree_of(outline_of(model), lambda *_: None)
    assert [path for path, _ in tree.named_modules()] == [path for path, _ in model.named_modules()]


def test_a_worker_runs_blocks_itself_by_default() -> None:
    runner: Any = SimpleNamespace(vllm_config=SimpleNamespace(additional_config={}))
    assert hosted_blocks(runner) is None
