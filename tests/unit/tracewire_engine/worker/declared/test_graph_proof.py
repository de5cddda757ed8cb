"""An engine relies on whole graphs once they have come to what graphs with breaks come to."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support.declared_plans import HIDDEN
from tests.unit.tracewire_engine.worker.declared.test_tap_buffers import FITS, TAPS, VECTOR, declared_of
from tracewire_bus.wire.messages import Failure, Probe, Steer, When
from tracewire_engine.worker.declared.graph_proof import BothGraphs, GraphProof, inputs_in, tensors_in
from tracewire_engine.worker.declared.plan import DeclaredRequests
from tracewire_engine.worker.declared.tap_buffers import StepTable, TapBuffers


class Model:
    """A model whose layers add 1 to the residual stream, by a whole graph with kernels or by one with breaks."""

    def __init__(self, declared: DeclaredRequests, *, wrong: str = "") -> None:
        self.declared, self.wrong, self.ran = declared, wrong, []
        #: As a later stage is given it. The first layer adds to it in place.
        self.given = torch.ones(4, HIDDEN)
        #: What an earlier stage has read in each step.
        self.supplied: list[Any] = []

    def _layers(self, serve: Any) -> tuple[torch.Tensor, torch.Tensor]:
        hidden, residual = torch.zeros(4, HIDDEN), self.given
        residual += 1
        # Rows of padding have any value.
        hidden[2:] = torch.rand(2, HIDDEN)
        for tap in TAPS:
            hidden += 1
            serve(tap, (hidden, residual))
        return hidden, residual

    def whole(self) -> Any:
        self.ran.append("whole")
        buffers = self.declared.buffers
        assert buffers is not None
        output = self._layers(buffers.launch)
        if self.wrong == "read":
            buffers._buffer += 1
        if self.wrong == "error":
            raise RuntimeError("the kernel does not work here")
        if self.wrong == "output":
            output[0][1] += 1
        return output

    def broken(self) -> Any:
        self.ran.append("broken")
        hooks = self.declared.hooks
        return self._layers(lambda tap, value: hooks[tap].replay(value) if tap in hooks else None)

    def step(self) -> tuple[Any, Any]:
        declared = self.declared
        self.given.fill_(1)
        states = {name: SimpleNamespace(num_computed_tokens=5, num_prompt_tokens=5) for name in declared.live}
        declared.stale = True
        declared.begin(list(states), dict.fromkeys(states, 1), len(states), states)
        declared.supply(self.supplied)
        if not declared.fits_buffers():
            output = self.broken()
        elif not declared.unproven:
            output = self.whole()
        else:
            output = declared.run_both(BothGraphs(self.whole, self.broken, lambda: [self.given]), max(1, len(states)))
        return output, declared.collect(lambda rows: rows)


@pytest.mark.parametrize("what", ["a probe", "a vector", "reads behind the vector"])
def test_first_steps_run_by_both_graphs_and_later_ones_by_the_whole_one(what: str) -> None:
    model = Model(declared_of(FITS[what], FITS[what]))
    found = []
    for _ in range(4):
        output, collected = model.step()
        found.append((output[0][:2].clone(), None if collected is None else collected[2].clone()))
        # What the graphs are given is changed once a step, by whichever counts.
        assert torch.equal(model.given, torch.full((4, HIDDEN), 2.0))
    assert model.ran == ["whole", "broken"] * 2 + ["whole"] * 2
    for hidden, flat in found[1:]:
        assert torch.equal(hidden, found[0][0])
        assert flat is found[0][1] is None or torch.equal(flat, found[0][1])


def test_each_use_is_proven_by_itself() -> None:
    declared = declared_of(FITS["a probe"])
    model = Model(declared)
    for _ in range(3):
        model.step()
    other = declared_of(FITS["a vector"])
    other.proof = declared.proof
    model = Model(other)
    for _ in range(3):
        model.step()
    assert model.ran == ["whole", "broken"] * 2 + ["whole"]


@pytest.mark.parametrize(
    "nothing", [Steer("layer.0", VECTOR, when=When(start=3)), Steer("layer.0", VECTOR, scale=0.0)], ids=["when", "zero"]
)
def test_a_vector_that_is_not_added_proves_nothing(nothing: Steer) -> None:
    proof = declared_of([]).proof
    for _ in range(3):
        declared = declared_of([(nothing, [0])])
        declared.proof = proof
        model = Model(declared)
        model.step()
        assert model.ran == ["whole"]
        if nothing.when is None:
            # Of strength 0: the device is not asked.
            assert "edits" not in declared.plan.table.uses
    assert proof.left(frozenset(("edits",)))
    other = declared_of(FITS["a vector"])
    other.proof = proof
    model = Model(other)
    for _ in range(3):
        model.step()
    assert model.ran == ["whole", "broken"] * 2 + ["whole"]


@pytest.mark.parametrize("when", [None, When(tokens=[[1]])])
def test_the_device_is_asked_what_is_added_only_until_that_is_proven(
    when: When | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To ask it takes as long as the step before. No step reads here, so reads are never proven."""
    asked: list[bool] = []
    used = TapBuffers.used

    def noted(self: TapBuffers, table: StepTable, uses: frozenset[str]) -> frozenset[str]:
        asked.append("edits" in uses and not table.adds)
        return used(self, table, uses)

    monkeypatch.setattr(TapBuffers, "used", noted)
    model = Model(declared_of([(Steer("", VECTOR, when=when), [1])]))
    for _ in range(4):
        model.step()
    assert model.ran == ["whole", "broken"] * 2 + ["whole"] * 2
    assert sum(asked) == (0 if when is None else 2)


def test_a_rank_that_serves_nothing_runs_by_both_graphs_where_another_one_has_to() -> None:
    """Such as one on which the step's only interventions have failed."""
    declared = declared_of(FITS["a vector"])
    assert declared.fits_buffers()
    for declaration in declared.live.values():
        declaration.failure = Failure(type="E", message="m", field="interventions")
    model = Model(declared)
    for name in ("begun", "gone"):
        if name == "gone":
            declared.live.clear()
        states = {name: SimpleNamespace(num_computed_tokens=6, num_prompt_tokens=5) for name in declared.live}
        declared.stale = True
        declared.begin(list(states), dict.fromkeys(states, 1), len(states), states)
        assert not declared.hooks
        declared.pass_buffers()
        model.given.fill_(1)
        output = declared.run_both(BothGraphs(model.whole, model.broken, lambda: [model.given]), 1)
        assert model.ran[-2:] == ["whole", "broken"]
        # Each of the layers added one, and nothing else.
        assert torch.equal(output[0][0], torch.full((HIDDEN,), float(len(TAPS))))
        assert not declared.proof.failed
        assert declared.proof.left(frozenset(("edits",)))


def test_what_an_earlier_stage_has_read_is_kept_while_graphs_are_proven() -> None:
    declared = declared_of([(Probe("a", ""), [0]), (Probe("b", ""), [1]), (Probe("c", ""), [0, 1])])
    declared.here = lambda location: location != TAPS[0]
    model = Model(declared)
    early = torch.full((1, HIDDEN), 7.0)
    model.supplied = [(order, 0, [("r0", 0, 1)], early) for order in (0, 2)]
    flats = []
    for _ in range(4):
        _, (layout, _, flat) = model.step()
        flats.append(flat.clone())
        assert layout is not None
        assert [read.name for reads in layout.sets for read in reads] == ["a", "b", "c"]
    assert model.ran == ["whole", "broken"] * 2 + ["whole"] * 2
    assert not declared.proof.failed
    assert all(torch.equal(one, flats[0]) for one in flats)
    # The values at the second layer are 4: the residual stream's 2, and 2 of the layers.
    assert flats[0].view(torch.float32).view(-1, HIDDEN)[:, 0].tolist() == [7.0, 4.0, 7.0, 4.0]


@pytest.mark.parametrize("wrong", ["read", "output", "error"])
def test_graphs_that_differ_are_not_relied_on(wrong: str, caplog: pytest.LogCaptureFixture) -> None:
    model = Model(declared_of(FITS["a probe"], FITS["a probe"]), wrong=wrong)
    right, _ = Model(declared_of(FITS["a probe"], FITS["a probe"])).step()
    for _ in range(3):
        output, collected = model.step()
        assert torch.equal(output[0][:2], right[0][:2])
        assert collected is not None
    assert model.ran == ["whole", "broken", "broken", "broken"]
    assert model.declared.buffers is None
    assert "every step of this engine stops at each tap" in caplog.text


@pytest.mark.parametrize("differs", [False, True])
def test_a_rank_relies_on_graphs_that_are_alike_on_all_ranks(differs: bool) -> None:
    model = Model(declared_of(FITS["a probe"], FITS["a probe"]))
    model.declared.shards = 0, lambda mine: mine + float(differs)
    for _ in range(3):
        model.step()
    assert model.ran == (["whole", "broken", "broken", "broken"] if differs else ["whole", "broken"] * 2 + ["whole"])
    assert (model.declared.buffers is None) is differs


#: Of a step that reads.
READS = frozenset(("reads",))


def test_infinite_values_prove_as_well() -> None:
    proof, values = GraphProof(), torch.tensor([1.0, float("inf"), float("nan")])
    proof.compare(READS, [values], [values.clone()])
    assert not proof.failed
    proof.compare(READS, [values], [torch.tensor([1.0, 2.0, float("nan")])])
    assert proof.failed


@pytest.mark.parametrize(
    ("one", "other"), [(None, torch.ones(1)), (torch.ones(1), None), (torch.ones(1), torch.ones(2))]
)
def test_what_one_graph_lacks_is_a_difference(one: Any, other: Any) -> None:
    proof = GraphProof()
    proof.compare(READS, [one], [other])
    assert proof.failed


def test_a_model_has_outputs_of_several_forms() -> None:
    one, two = torch.ones(1), torch.zeros(1)
    assert [*tensors_in(one)] == [one]
    assert [*tensors_in((one, [two]))] == [one, two]
    assert [*tensors_in(SimpleNamespace(tensors={"hidden": one, "residual": two}))] == [one, two]


def test_a_model_is_given_tensors_and_those_of_the_stage_before() -> None:
    ids, hidden, residual = torch.ones(1), torch.zeros(1), torch.zeros(2)
    stage = SimpleNamespace(tensors={"hidden_states": hidden, "residual": residual})
    found = inputs_in([ids], {"inputs_embeds": None, "intermediate_tensors": stage, "count": 3})
    assert all(one is other for one, other in zip(found, [ids, hidden, residual], strict=True))
