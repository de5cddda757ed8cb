"""What the worker answers to requests of hosts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from nnsight.intervention.envoy import Envoy

from tests.support.hosted_model import Model
from tracewire_engine.link.shared_rows import RowMemory, unpack_value
from tracewire_engine.protocol.block_host import SOURCE, Answer, Request, Shared
from tracewire_engine.worker.block_host.answers import ModelAnswers

#: The arguments of a call without any.
NOTHING = Shared([1, [1], [3]])


class Process:
    def __init__(self) -> None:
        self.given, self.returned = RowMemory.create(1 << 16), RowMemory.create(1 << 16)


def value_of(answer: Answer, host: Any) -> Any:
    assert answer.error is None, answer.error
    assert answer.value is not None
    return unpack_value(answer.value, lambda _, shape: host.given.read(shape), lambda given: given)


def test_attributes_and_large_variables_are_given(tmp_path: Path) -> None:
    module, host = Model(2), Process()
    anyhost: Any = host
    answers = ModelAnswers(Envoy(module))
    weight = value_of(answers.answer(anyhost, Request("model.model.norm", "weight")), host)
    assert torch.equal(weight, module.model.norm.weight)
    answers.inputs = tmp_path
    (tmp_path / "input-00ff").write_bytes(b"large")
    assert bytes(value_of(answers.answer(anyhost, Request("", "input-00ff")), host).tolist()) == b"large"


@pytest.mark.parametrize(
    ("request_", "error"),
    [
        (Request("model.model.norm", "nothing"), "AttributeError"),
        (Request("model.model.norm", "forward"), "TypeError"),
        (Request("", "../secret"), "ValueError"),
        (Request("", "input-ab"), "FileNotFoundError"),
        (Request("model.model.norm"), "AssertionError"),
        # What is no module of the model, or has what other requests have put there.
        (Request("model.model.norm.half", value=NOTHING), "LookupError"),
        (Request("model.__init__.__globals__.clear", value=NOTHING), "LookupError"),
        (Request("model.model.norm", value=Shared([1, [1, [4, ["model.model.norm.half"]]], [3]])), "LookupError"),
        (Request("model.model.layers.0", "kept"), "TypeError"),
        (Request("model.model.layers.0", value=NOTHING), "NotImplementedError"),
        (Request("model.model", value=NOTHING), "NotImplementedError"),
        (Request("model.model.layers.0", SOURCE), "NotImplementedError"),
    ],
)
def test_what_cannot_be_given_is_an_error(request_: Request, error: str, tmp_path: Path) -> None:
    host: Any = Process()
    module: Any = Model(1)
    # As vLLM's attention has it.
    module.model.layers[0].kv_cache = module.model.layers[0].kept = [torch.zeros(2, 3)]
    answers = ModelAnswers(Envoy(module))
    answers.inputs = tmp_path
    found = answers.answer(host, request_)
    assert found.error is not None
    assert found.error[0] == error


def test_the_operations_inside_a_module_are_named() -> None:
    host: Any = Process()
    answers = ModelAnswers(Envoy(Model(1)))
    names, lines, text = value_of(answers.answer(host, Request("model.model.norm", SOURCE)), host)
    assert names == ["torch_tanh_0"]
    assert lines == {"torch_tanh_0": 2}
    assert "return torch.tanh(x @ self.weight)" in text


def test_operations_are_not_served_under_tensor_parallelism() -> None:
    host: Any = Process()
    answers = ModelAnswers(Envoy(Model(1)))
    answers.others = object()  # type: ignore[assignment]
    error = answers.answer(host, Request("model.model.norm", SOURCE)).error
    assert error is not None
    assert "under tensor parallelism" in error[1]
