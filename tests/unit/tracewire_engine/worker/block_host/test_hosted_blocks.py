"""Blocks in hosts, beside a small model: what they read, write and save, and what a host that ends costs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import msgspec
import numpy as np
import pytest
import torch
from transformers import AutoTokenizer, LlamaConfig

from tests.support import ROOT
from tests.support.hosted_model import HostedModel
from tracewire_bus.wire.messages import Block
from tracewire_engine.protocol.keys import BLOCK_ARG
from tracewire_engine.protocol.messages import Generated
from tracewire_engine.worker.step_states import StepStates

READS = """
hidden = [].save()
for step in tracer.iter[:]:
    hidden.append(model.model.layers[1].output[0].clone())
"""

WRITES = """
hidden = [].save()
for step in tracer.iter[:]:
    first = model.model.layers[0].output[0]
    first[:] = 0.5
    hidden.append(model.model.layers[1].input.clone())
"""

SWAPS = """
hidden = [].save()
for step in tracer.iter[:]:
    output = model.model.layers[0].output
    model.model.layers[0].output = (output[0] * 2, output[1])
    hidden.append(model.model.layers[1].input.clone())
"""


EXIT = "__import__('os')._exit(3)"

BOMB = """
import torch
kept = []
for step in tracer.iter[:]:
    h = model.model.layers[1].output[0]
    kept += [torch.empty(1 << 31)]
"""

#: This one has known functions only.
SHARED_BOMB = """
kept = [].save()
for step in tracer.iter[:]:
    h = model.model.layers[1].output[0]
    kept.append(torch.ones(1 << 31))
"""

FAILS = """
for step in tracer.iter[:]:
    h = model.model.layers[1].output[0]
    1 / (step - 1)
"""

CALLS = """
h = model.model.layers[2].output[0]
normed = model.model.norm(h * 2).clone().save()
weight = model.model.norm.weight.sum().save()
missing = hasattr(model.model.norm, "bias").save()
name = repr(model.model.layers[0]).save()
"""


@pytest.fixture(scope="module", params=[False, True], ids=["waits", "visits"])
def served(request: pytest.FixtureRequest) -> Iterator[HostedModel]:
    model = HostedModel(visits=request.param)
    yield model
    assert not len(model.hosts)
    model.close()


def test_a_step_of_plain_requests_needs_no_states(served: HostedModel) -> None:
    """The second runner has none of them."""
    assert not served.hosts.begin_for(StepStates([], [], [], {}, {}), {"plain": 1}, ["plain"])
    served.hosts.end()


def test_blocks_read_and_write_their_own_rows(served: HostedModel) -> None:
    found = served.run({"reads": READS, "writes": WRITES, "swaps": SWAPS, "plain": READS})
    assert all(one.finish is not None and one.finish.error is None for one in found.values())
    for one in found.values():
        assert [step.index for step in one.steps] == [0, 1, 2]
        assert [items.shape for items in one.saves["hidden"]] == [(2, 4), (1, 4), (1, 4)]
    layers = served.module.model.layers
    with torch.inference_mode():
        for index in range(3):
            total = 8 if index == 0 else 4
            x = torch.linspace(-1, 1, total * 4).view(total, 4) + index
            first = layers[0](x)
            size = total // 4
            rows = {name: slice(place * size, (place + 1) * size) for place, name in enumerate(found)}
            sums = {"reads": first + x, "writes": x + 0.5, "swaps": first * 2 + x, "plain": first + x}
            for name in ("reads", "plain"):
                there = layers[1](sums[name][rows[name]])
                assert np.allclose(found[name].saves["hidden"][index], there)
            for name in ("writes", "swaps"):
                assert np.array_equal(found[name].saves["hidden"][index], sums[name][rows[name]].numpy())


@pytest.mark.parametrize("last", ["model.model.layers[1].output", "model.model.layers[1].output[0].zero_()"])
def test_a_host_that_ends_costs_its_own_trace(served: HostedModel, last: str) -> None:
    """Whether the model waits for it or not."""
    ends = f"saved = [].save()\nfor step in tracer.iter[:]:\n    saved.append(step)\n    {last}\n    {EXIT}\n"
    found = served.run({"ends": ends, "reads": READS, "writes": WRITES})
    ended = found["ends"]
    assert ended.finish is not None
    assert ended.finish.error is not None
    assert ended.finish.error.type == "BlockHostLost"
    assert [step.ended for step in ended.steps] == ["error"]
    for name in ("reads", "writes"):
        other = found[name]
        assert other.finish is not None
        assert other.finish.error is None
        assert len(other.saves["hidden"]) == 3


def test_an_error_of_a_block_names_its_line(served: HostedModel) -> None:
    found = served.run({"fails": FAILS})
    finish = found["fails"].finish
    assert finish is not None
    assert finish.error is not None
    assert (finish.error.type, finish.error.filename, finish.error.line) == ("ZeroDivisionError", "mine.py", 4)
    assert [step.ended for step in found["fails"].steps] == ["", "error"]


def test_a_block_calls_modules_and_reads_their_weights(served: HostedModel) -> None:
    found = served.run({"calls": CALLS}, steps=1)
    saves = found["calls"].saves
    norm = served.module.model.norm
    assert np.allclose(saves["weight"], norm.weight.sum())
    assert saves["normed"].shape == (2, 4)
    assert saves["missing"] is False
    assert saves["name"] == "Layer()"


def test_a_killed_host_is_noticed_in_the_midst_of_a_step(served: HostedModel) -> None:
    served.open("killed", WRITES)
    served.open("reads", READS)
    served.step({"killed": 2, "reads": 2}, 0)
    served.wait_for_step("killed")
    served.hosts.traces["killed"].host.process.kill()
    for index in (1, 2):
        served.step({"killed": 1, "reads": 1}, index)
    for name in ("killed", "reads"):
        served.finish(name, 3)
    served.wait("killed", "reads")
    finish = served.outcomes["killed"].finish
    assert finish is not None
    assert finish.error is not None
    assert [step.ended for step in served.outcomes["killed"].steps] == ["", "error"]
    assert len(served.outcomes["reads"].saves["hidden"]) == 3


def test_a_host_that_is_lost_costs_the_traces_of_its_tenant_that_share_it_and_no_other(served: HostedModel) -> None:
    tenants = {"one": "a", "two": "a", "other": "b"}
    for name, tenant in tenants.items():
        served.open(name, WRITES, tenant=tenant)
    hosts = [served.hosts.traces[name].host for name in tenants]
    assert hosts[0] is hosts[1] is not hosts[2]
    served.step(dict.fromkeys(tenants, 2), 0)
    hosts[0].process.kill()
    for index in (1, 2):
        served.step(dict.fromkeys(tenants, 1), index)
    for name in tenants:
        served.finish(name, 3)
    served.wait(*tenants)
    for name in ("one", "two"):
        finish = served.outcomes[name].finish
        assert finish is not None
        assert finish.error is not None
        assert finish.error.type == "BlockHostLost"
        assert "of this trace and of 1 others of its tenant" in finish.error.message
    assert len(served.outcomes["other"].saves["hidden"]) == 3
    # The tenant's next trace has another host.
    found = served.run({"next": WRITES})["next"]
    assert len(found.saves["hidden"]) == 3


def test_a_trace_that_rejoins_the_batch_is_waited_for(served: HostedModel) -> None:
    """Although the last reply of its host was of a step without it."""
    for name in ("stays", "leaves"):
        served.open(name, WRITES, tenant="c")
    served.step({"stays": 2, "leaves": 2}, 0)
    served.step({"stays": 1}, 1)
    for index in (1, 2):
        served.step({"stays": 1, "leaves": 1}, index)
    for name in ("stays", "leaves"):
        served.finish(name, 3)
    served.wait("stays", "leaves")
    assert [len(served.outcomes[name].saves["hidden"]) for name in ("stays", "leaves")] == [4, 3]


@pytest.mark.parametrize(("source", "line"), [(BOMB, 6), (SHARED_BOMB, 5)])
def test_a_memory_bomb_is_its_own_blocks_error(served: HostedModel, source: str, line: int) -> None:
    """Whether its host is its own, or the neighbour's too."""
    bomb = Block(name="block", source=source, filename="mine.py", modules={"torch": "torch"})
    found = served.run({"bomb": bomb, "reads": READS})
    finish = found["bomb"].finish
    assert finish is not None
    assert finish.error is not None
    assert "can't allocate memory" in finish.error.message
    assert (finish.error.type, finish.error.line) == ("RuntimeError", line)
    assert len(found["reads"].saves["hidden"]) == 3


def test_samples_that_are_no_token_ids_do_not_reach_the_model(served: HostedModel) -> None:
    served.open("forces", "samples = model.samples\nsamples[:] = 10**6\n")
    served.open("valid", "samples = model.samples\nsamples[:] = 7\n")
    drawn = served.step({"forces": 2, "valid": 2}, 0)
    assert drawn[1].item() == 7
    assert 0 <= drawn[0].item() < 50
    for name in ("forces", "valid"):
        served.finish(name, 1)
    served.wait("forces", "valid")
    finish = served.outcomes["forces"].finish
    assert finish is not None
    assert finish.error is not None
    assert (finish.error.type, finish.error.line) == ("NotInVocabulary", 1)


def test_a_block_has_the_model_s_configuration_and_tokenizer(served: HostedModel) -> None:
    own = AutoTokenizer.from_pretrained(ROOT / "examples" / "demo_model" / "model")
    served.module.config = LlamaConfig(hidden_size=64)
    served.envoy.__dict__["tokenizer"] = own
    source = """
model.model.layers[0].output
ids = model.tokenizer.encode("import os").save()
text = model.tokenizer.decode(ids).save()
size = model.config.hidden_size.save()
"""
    found = served.run({"asks": source}, steps=1)["asks"]
    assert found.finish is not None
    assert found.finish.error is None
    assert found.saves == {"ids": own.encode("import os"), "text": "import os", "size": 64}


@pytest.mark.parametrize("first", [True, False], ids=["in its first step", "in a step like the one before"])
def test_a_block_that_does_otherwise_than_its_source_was_taken_to_is_found_out(
    first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If what is known of its writes were wrong, the trace would end, and not go on with wrong values."""
    model = HostedModel(known_edits=True)
    steps = "[:]" if first else "[2:]"
    source = f"for step in tracer.iter{steps}:\n    model.model.layers[1].output[0][:] *= 2\n"
    known = model.hosts._accounts.of({BLOCK_ARG: msgspec.msgpack.encode(Block(name="block", source=source))})
    assert known.known is not None
    (edit,) = known.known
    *others, scales = edit.operations
    wrong = msgspec.structs.replace(
        edit, operations=[*others, msgspec.structs.replace(scales, arguments=[scales.arguments[0], 3])]
    )
    taken = replace(known, known=(wrong,))
    monkeypatch.setattr(model.hosts._accounts, "of", lambda arguments, room=0, live=None: taken)
    model.open("wrong", source)
    for index in range(5):
        model.step({"wrong": 2 if index == 0 else 1}, index)
    model.finish("wrong", 5)
    model.wait("wrong")
    finish = model.outcomes["wrong"].finish
    assert finish is not None
    assert finish.error is not None
    assert finish.error.type == "BlockHostLost"
    model.close()


def test_the_output_of_a_trace_that_is_over_is_sent_to_nobody(served: HostedModel) -> None:
    """Its block mentions the output, and has not asked for it."""
    other = "import math\nkept = model.logits.clone().save()\n"
    served.open("beside", other, tenant="another")
    served.step({"beside": 2}, 0)
    served.run({"over": other}, steps=1)
    assert served.hosts.traces["over"].closed
    assert served.hosts.take_result(msgspec.msgpack.encode(Generated("over", "", [])))
    served.step({"beside": 1}, 1)
    served.finish("beside", 2)
    served.wait("beside")
    finish = served.outcomes["beside"].finish
    assert finish is not None
    assert finish.error is None
