"""What the worker answers to requests of hosts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from nnsight.intervention.envoy import Envoy

from tests.support.hosted_model import Model
from tracewire_engine.link.shared_rows import RowMemory, SharedValueError, unpack_value
from tracewire_engine.protocol.block_host import SOURCE, Answer, Reply, Request, Shape, Shared, Wait
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
        (Request("model.model.norm"), "ValueError"),
        (Request("model.model.norm", "__dict__"), "AttributeError"),
        # What is no module of the model, or has what other requests have put there.
        (Request("model.model.norm.half", value=NOTHING), "LookupError"),
        (Request("model.__init__.__globals__.clear", value=NOTHING), "LookupError"),
        (Request("model.get.__func__.__globals__.clear", value=NOTHING), "LookupError"),
        (Request("model.model.norm._module", "weight"), "LookupError"),
        (Request("os", "environ"), "LookupError"),
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


def test_of_what_a_host_waits_for_the_model_s_own_locations_are_kept() -> None:
    """Not those of networks that a block has hung into the tree. Very many are refused."""
    answers = ModelAnswers(Envoy(Model(1)))
    kept = [
        *("model.logits", "model.samples", "model.input", "model.source.self_model_0.output"),
        *("model.model.norm.output", "model.model.layers.0.skip", "model.model.layers.0.source.torch_tanh_0.input"),
    ]
    other = ["model.model.sae.output", "model.model.layers.0.sae.source.x_0.output", "other.x.output", "x" * 9]
    reply = Reply([Wait(one, 2) for one in kept + other], kept + other, begins=True)
    found = answers.known(reply)
    assert found.waits == [Wait(one, 2) for one in kept]
    assert (found.observed, found.begins) == (kept, True)
    with pytest.raises(SharedValueError, match="waits for 0 and observes 9000 locations"):
        answers.known(Reply([], [f"model.x{number}" for number in range(9000)]))


def test_operations_are_not_served_under_tensor_parallelism() -> None:
    host: Any = Process()
    answers = ModelAnswers(Envoy(Model(1)))
    answers.others = object()  # type: ignore[assignment]
    error = answers.answer(host, Request("model.model.norm", SOURCE)).error
    assert error is not None
    assert "under tensor parallelism" in error[1]


def called(answers: ModelAnswers, host: Any, *tensors: torch.Tensor, path: str = "model.model.norm") -> Answer:
    shapes = []
    for tensor in tensors:
        start = host.returned.room(tensor.nbytes)
        host.returned.write(tensor, start)
        shapes.append(Shape(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), start))
    skeleton = [1, [1, *([0, place] for place in range(len(shapes)))], [3]]
    return answers.answer(host, Request(path, value=Shared(skeleton, shapes)))


def test_modules_are_called_but_for_those_with_attention() -> None:
    module, host = Model(1), Process()
    anyhost: Any = host
    rows = torch.ones(3, 4)
    answers = ModelAnswers(Envoy(module))
    assert torch.equal(value_of(called(answers, host, rows), host), module.model.norm(rows))
    answers.holds_state = lambda one: one is module.model.layers[0]
    refused = called(answers, host, rows, path="model.model")
    assert refused.error is not None
    assert (refused.error[0], "KV cache" in refused.error[1]) == ("NotImplementedError", True)
    assert called(answers, anyhost, rows).error is None


def test_a_module_s_other_tensors_are_not_given() -> None:
    """Such as an attention layer's KV cache, which has the rows of all requests."""
    module, host = Model(1), Process()
    anyhost: Any = host
    norm: Any = module.model.norm
    norm.kv_cache, norm.kv_caches, norm.scale = torch.ones(3), [torch.ones(3)], 0.5
    norm.register_buffer("table", torch.ones(2))
    answers = ModelAnswers(Envoy(module))
    for name in ("kv_cache", "kv_caches"):
        found = answers.answer(anyhost, Request("model.model.norm", name))
        assert found.error is not None
        assert "neither a parameter nor a buffer" in found.error[1]
    assert value_of(answers.answer(anyhost, Request("model.model.norm", "scale")), host) == 0.5
    assert value_of(answers.answer(anyhost, Request("model.model.norm", "table")), host).tolist() == [1, 1]


def test_few_bytes_do_not_become_many_tensors() -> None:
    host: Any = Process()
    answers = ModelAnswers(Envoy(Model(1)))
    shape = Shape("float32", (4, 4), 0)
    for skeleton, shapes in (([1, [1, [0, 0], [0, 0]], [3]], [shape]), ([1, [1, [0, 0], [0, 1]], [3]], [shape] * 2)):
        found = answers.answer(host, Request("model.model.norm", value=Shared(skeleton, shapes)))
        assert found.error is not None
        assert found.error[0] == "SharedValueError"
