"""What the worker answers to requests of hosts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from nnsight.intervention.envoy import Envoy

from tests.support.hosted_model import Model
from tracewire_engine.link.shared_rows import RowMemory, unpack_value
from tracewire_engine.protocol.block_host import Answer, Request
from tracewire_engine.worker.block_host.answers import ModelAnswers


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
    ],
)
def test_what_cannot_be_given_is_an_error(request_: Request, error: str, tmp_path: Path) -> None:
    host: Any = Process()
    answers = ModelAnswers(Envoy(Model(1)))
    answers.inputs = tmp_path
    found = answers.answer(host, request_)
    assert found.error is not None
    assert found.error[0] == error
