"""How long the model waits for hosts in a step, and what it tells them when their rows take more than is shared."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from nnsight.intervention.envoy import Envoy

from tests.support.hosted_model import HostedModel, Model
from tracewire_engine.link import shared_rows
from tracewire_engine.protocol.block_host import Reply, Request, Shared
from tracewire_engine.worker.block_host.host_turns import HostTurns

READS = """
hidden = [].save()
for step in tracer.iter[:]:
    hidden.append(model.model.layers[1].output[0].clone())
"""

LATER = """
hidden = [].save()
for step in tracer.iter[:]:
    last = model.model.layers[2].output[0]
    last[:] = 1
    hidden.append(last.clone())
"""

#: Python can interrupt this one.
LOOPS = """
h = model.model.layers[1].output[0]
h[:] = 0
while True:
    pass
"""

#: C code, which lets no handler of Python's run.
COUNTS = """
h = model.model.layers[1].output[0]
h[:] = 0
sum(range(10**12))
"""

#: It catches what interrupts it.
STUCK = """
h = model.model.layers[1].output[0]
h[:] = 0
while True:
    try:
        while True:
            pass
    except BaseException:
        pass
"""


@pytest.fixture(scope="module", params=[False, True], ids=["waits", "visits"])
def served(request: pytest.FixtureRequest) -> Iterator[HostedModel]:
    model = HostedModel(visits=request.param)
    yield model
    assert not len(model.hosts)
    model.close()


# One at a time: blocks that wait for a core are interrupted before they come to their loops.
@pytest.mark.parametrize(
    ("block", "lines"), [(LOOPS, (4,)), (STUCK, range(4, 10)), (COUNTS, (4,))], ids=["loops", "stuck", "counts"]
)
def test_a_block_that_takes_too_long_ends_with_an_error_and_others_go_on(
    served: HostedModel, block: str, lines: Sequence[int]
) -> None:
    for _ in range(3):
        impatient = HostedModel(step_s=4.0, pool=served.pool, visits=served.visits is not None)
        found = impatient.run({"slow": block, "reads": READS, "later": LATER})
        finish = found["slow"].finish
        assert finish is not None
        assert finish.error is not None
        # On a busy machine, a block's turn may end before its code has run: it has no line.
        if finish.error.line is not None:
            break
    assert finish.error.type == "BlockTimeout"
    assert finish.error.line in lines
    assert finish.error.filename == "mine.py"
    # It has used up the time of the step in which "later" is waited for.
    assert [len(found[name].saves["hidden"]) for name in ("reads", "later")] == [3, 3]


@pytest.mark.parametrize(
    "location",
    ["model.model.layers[1].output[0].zero_()", pytest.param("model.model.layers[1].output", marks=pytest.mark.full)],
)
def test_blocks_that_loop_use_up_the_time_of_their_host_and_no_neighbour_ends(
    served: HostedModel, location: str
) -> None:
    """Two of them take no longer than one, so that the host with their neighbour stays."""
    loops = f"{location}\nfor number in range(10**12):\n    number + 1\n"
    read = "h = model.model.layers[2].output[0]" + ("\n" if location.endswith("output") else "\nh[:] = 1\n")
    for _ in range(3):
        impatient = HostedModel(step_s=4.0, pool=served.pool, visits=served.visits is not None)
        found = impatient.run({"loops": loops, "too": loops, "calm": read + "x = h.clone().save()\n"}, steps=1)
        errors = [one.finish.error for one in found.values() if one.finish is not None]
        # On a busy machine, a block's turn may end before its code has run: it has no line.
        if all(error is None or error.line is not None for error in errors):
            break
    hosts = {one.finish.error.type for one in found.values() if one.finish is not None and one.finish.error is not None}
    assert hosts == {"BlockTimeout"}
    assert [error is not None and error.line in (2, 3) for error in errors] == [True, True, False]
    assert errors[1] is not None
    assert "share a process" in errors[1].message
    assert found["calm"].saves["x"].shape == (2, 4)


def test_a_step_whose_rows_take_more_than_is_shared_has_several_turns(
    served: HostedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a long prompt does whose block reads every layer, and a cache beside a block that waits."""
    monkeypatch.setattr(shared_rows, "_TURN", 64 * 40)
    every = "seen = [].save()\nfor step in tracer.iter[:]:\n"
    every += "    seen.append([layer.output[0].clone() for layer in model.model.layers])\n"
    caches = "cache = tracer.cache(modules=list(model.model.layers)).save()\nfor step in tracer.iter[:]:\n"
    caches += "    model.logits[:, 3] = 9.0\n"
    served.open("every", every)
    served.open("caches", caches)
    for index in range(3):
        served.step({"every": 100 if not index else 1, "caches": 100 if not index else 1}, index)
    for name in ("every", "caches"):
        served.finish(name, 3)
    served.wait("every", "caches")
    for name in ("every", "caches"):
        finish = served.outcomes[name].finish
        assert finish is not None
        assert finish.error is None
    seen = served.outcomes["every"].saves["seen"]
    assert [[rows.shape for rows in step] for step in seen] == [[(100, 4)] * 3, [(1, 4)] * 3, [(1, 4)] * 3]


class _Says:
    """A host that has said something."""

    def __init__(self, *messages: bytes) -> None:
        self.calls = SimpleNamespace(arrived=lambda: list(messages), send=lambda message: None)
        self.process = SimpleNamespace(given=SimpleNamespace(taken=0))
        self.reads, self.turns, self.replied_us = None, 1, 0
        self.took = self.take = lambda *_: None


def nested(depth: int) -> Any:
    return msgspec.Raw(b"\x91" * depth + b"\xc0")


@pytest.mark.parametrize(
    ("messages", "error"),
    [
        ([Request("model", "tokenizer")] * 2, "it has sent 2 messages, where one was awaited"),
        ([Reply(), Reply()], "it has sent 2 messages"),
        ([Reply(replaced=Shared(nested(500), []))], "more than 256 containers in each other"),
        ([Reply(observed=["model.logits"] * 70_000)], "a reply of more than 65536 values"),
    ],
)
def test_what_no_host_says_while_the_model_waits_is_an_error(messages: list[Any], error: str) -> None:
    """The model would wait for answers, or go through it, and other ranks with it."""
    reports: Any = None
    turns = HostTurns(Envoy(Model(1)), reports, 1.0)
    host: Any = _Says(*map(msgspec.msgpack.encode, messages))
    with pytest.raises(ValueError, match=error):
        turns._reply(host)
    fine: Any = _Says(msgspec.msgpack.encode(Reply(observed=["model.logits"] * 100, replaced=Shared(nested(100), []))))
    assert turns._reply(fine) is not None
