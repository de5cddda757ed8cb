"""What is told in fewer words between a worker and its adapter is the same, and what blocks are handed is nnsight's."""

# mypy: ignore-errors

from __future__ import annotations

import random
from functools import partial
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch

import tracewire_engine  # noqa: F401 (before nnsight)
from tests.support.equality import equal
from tracewire_bus.domain.fold import apply_delta
from tracewire_bus.wire.digests import digest, encoded_digest
from tracewire_bus.wire.messages import Append, Delete, Delta, Set
from tracewire_bus.wire.packing import decoder, wire
from tracewire_engine.adapter.digests import PassingDigests
from tracewire_engine.worker.blocks.batched_serving import RowBatcher
from tracewire_engine.worker.blocks.live_params import LiveRun
from tracewire_engine.worker.finishing import RequestFinisher
from tracewire_engine.worker.host_copy import HostCopy, elements, encoded_late
from tracewire_engine.worker.large_arrays import LargeArrayBudget
from tracewire_engine.worker.reporting import StepReporter, _encoded
from tracewire_engine.worker.requests import RequestProgress
from tracewire_engine.worker.runner import TracewireRunner
from tracewire_engine.worker.save_tracker import SaveTracker

ENCODER = msgspec.msgpack.Encoder(enc_hook=encoded_late)
DELTAS = decoder(list[Delta])


class Passage:
    """A worker's tracker, its encoded deltas, an adapter's digests and a consumer's fold."""

    def __init__(self) -> None:
        self.tracker, self.passing = SaveTracker(), PassingDigests()
        self.folded: dict[str, Any] = {}

    def take(self, raw: bytes) -> None:
        self.passing.take(raw)
        for delta in DELTAS(raw):
            apply_delta(self.folded, delta)

    def step(self, saves: dict[str, Any]) -> list[Any]:
        host = HostCopy()
        fresh: list[Any] = []
        self.tracker.collect_new(saves, fresh)
        host.prime(fresh)
        deltas = self.tracker.step(saves, host)
        if deltas:
            self.take(_encoded(deltas))
        return deltas

    def finish(self, saves: dict[str, Any]) -> dict[str, tuple[bytes, bool]]:
        """Each save's digest, and whether the adapter knew it."""
        ending = self.tracker.ending(saves, 0, 0)
        ending.passed = True
        deltas, manifest, _ = ending.compare()
        self.take(ENCODER.encode(deltas))
        return {entry.name: (entry.digest or self.passing.of(entry.name), not entry.digest) for entry in manifest}


@pytest.mark.parametrize("seed", range(60))
def test_the_final_names_the_digests_of_what_the_block_holds(seed: int) -> None:
    rng = random.Random(seed)
    passage, saves = Passage(), {"xs": [], "ys": [torch.ones(3)], "d": {}, "t": torch.zeros(2)}

    def tensor() -> torch.Tensor:
        shape = rng.choice([(4,), (4,), (4,), (2, 3), (), (6,)])
        return torch.randint(-100, 100, shape).to(
            rng.choice([torch.float32, torch.float32, torch.bfloat16, torch.int8])
        )

    for _ in range(rng.randint(1, 12)):
        for name in ("xs", "ys"):
            values = saves[name]
            match rng.choice("aaaaaarpnic" if seed % 2 else "a"):
                case "a":
                    values.extend(tensor() for _ in range(rng.choice([1, 1, 1, 2])))
                case "r" if values:
                    values[rng.randrange(len(values))] = tensor()
                case "p" if values:
                    values.pop()
                case "n":
                    values.append(rng.choice([1.5, "text", [tensor()], {"k": tensor()}]))
                case "i" if values and isinstance(values[-1], torch.Tensor):
                    values[-1].add_(1)
                case "c":
                    saves[name] = [tensor()]
        saves["d"][rng.choice("ab")] = tensor()
        passage.step(saves)
    found = passage.finish(saves)
    assert {name: known for name, (known, _) in found.items()} == {name: digest(value) for name, value in saves.items()}
    assert equal(passage.folded, saves)
    assert found["xs"][1] or seed % 2, "a list that only grew is the adapter's to know"


def test_where_it_is_checked_the_final_names_the_digests_of_what_nnsight_collected() -> None:
    """Whatever the tracker holds: a consumer's fold is compared with that."""
    held, collected = {"xs": [torch.ones(2)]}, {"xs": [torch.zeros(2)]}
    digests = []
    for checks in (False, True):
        reporter = StepReporter(None, None, SimpleNamespace(declared=None), lambda _: None)
        finisher = RequestFinisher(SimpleNamespace(), reporter, None, (lambda _: collected) if checks else None)
        request = SimpleNamespace(engine_id="t0", index=0, error=None, mediator=None, saves=lambda: held)
        finisher._report_finish(request, RequestProgress(LargeArrayBudget()), None, lambda own: own)
        ((entry,),) = [finish.manifest for finish in reporter.unsent.report.finishes]
        digests.append(entry.digest)
    assert digests == [digest(held["xs"]), digest(collected["xs"])]


def test_a_change_is_told_of_with_the_token_that_its_step_samples() -> None:
    """Of requests whose prompt is computed, that generate, that are in no step for now, and that have gone."""
    run = LiveRun("run")
    run.version = 3
    run.requests = {name: (f"t-{name}", choice) for choice, name in enumerate(("prompt", "going", "preempted", "gone"))}
    state = partial(SimpleNamespace, num_prompt_tokens=5)
    worker = SimpleNamespace(
        requests={
            "prompt": state(num_computed_tokens=0, output_token_ids=[]),
            "going": state(num_computed_tokens=7, output_token_ids=[1, 2, 3]),
            "preempted": state(num_computed_tokens=0, output_token_ids=[1, 2, 3, 4]),
        },
        nnsight_requests=SimpleNamespace(live=SimpleNamespace(late=1)),
    )
    applied = TracewireRunner._applied(worker, run, {"prompt": 4, "going": 1})
    assert (applied.run, applied.version) == ("run", 3)
    # The prompt's next step samples its first token.
    assert applied.first == [("t-prompt", 0, 0), ("t-going", 1, 3), ("t-preempted", 2, 4)]


def test_what_changed_in_place_after_it_was_sent_is_corrected() -> None:
    passage, value = Passage(), torch.zeros(4)
    saves = {"xs": [torch.ones(4), value]}
    passage.step(saves)
    value[2] = 7
    assert passage.finish(saves) == {"xs": (digest(saves["xs"]), False)}
    assert equal(passage.folded, saves)


@pytest.mark.parametrize("change", [lambda t: t.unsqueeze_(0), lambda t: t.t_(), lambda t: t.resize_(2)])
def test_a_shape_that_changed_in_place_is_corrected(change: Any) -> None:
    passage, value = Passage(), torch.zeros(2, 2)
    saves = {"xs": [value]}
    passage.step(saves)
    change(value)
    assert passage.finish(saves)["xs"][0] == digest(saves["xs"])
    assert equal(passage.folded, saves)


def test_digests_follow_deltas_of_any_kind() -> None:
    passing = PassingDigests()

    def take(*deltas: Any) -> None:
        passing.take(msgspec.msgpack.encode(list(deltas)))

    one, two = torch.ones(2), torch.zeros(3, dtype=torch.int8)
    take(Append(path=("unknown",), items=[wire(one)]), Set(path=("xs",), value=[]))
    assert passing.of("xs") == digest([])
    take(Append(path=("xs",), items=[wire(one), 5]))
    assert passing.of("xs") == passing.of("unknown") == b""
    take(Set(path=("xs", 1), value=wire(two)), Set(path=("xs", 0, "inside"), value=1))
    assert passing.of("xs") == b""
    take(Set(path=("xs", 0), value=wire(two)))
    assert passing.of("xs") == digest([two, two])
    take(Delete(path=("xs",)))
    assert passing.of("xs") == b""


@pytest.mark.parametrize("size", [*range(24), 250, 300, 70_000])
def test_an_encoded_array_has_the_array_s_digest(size: int) -> None:
    value = torch.arange(size).to(torch.int8)
    assert encoded_digest(msgspec.msgpack.encode(wire(value))) == digest(value)


@pytest.mark.parametrize("value", [None, 1, "text", b"bytes", [torch.ones(2)], (torch.ones(2),), 1j, 2**70])
def test_what_is_no_array_has_no_such_digest(value: Any) -> None:
    assert encoded_digest(msgspec.msgpack.encode(wire(value))) is None


def test_a_step_of_one_item_is_encoded_as_any_other() -> None:
    for shape in ((0,), (1,), (7,), (3, 100), (40_000,)):
        value, host = torch.ones(shape, dtype=torch.bfloat16), HostCopy()
        host.prime([value])
        deltas = [Append(path=("name",), items=[host.array(value) or wire(value)])]
        (mine,), (other,) = DELTAS(_encoded(deltas)), DELTAS(ENCODER.encode(deltas))
        assert (type(mine), mine.path) == (type(other), other.path)
        assert equal(mine.items, other.items)
        assert equal(mine.items, [value])


def test_a_value_that_is_none_is_handed_on() -> None:
    batcher = RowBatcher(None)
    batcher.total, batcher.counts = 2, [1, 1]
    batcher.begin(None)
    assert batcher.rows(None, SimpleNamespace(row=1, batch_group=[1, 1])) is None


def test_a_host_copy_joins_tensors_of_all_sorts() -> None:
    base = torch.arange(24, dtype=torch.float32).view(4, 6)
    values = [base, base.t(), base[1], base[:, 2], base[0, 0], base.to(torch.int8), base[3], base[1]]
    host = HostCopy()
    host.prime(values)
    arrays = [host.array(value) for value in values]
    for value, array in zip(values, arrays, strict=True):
        assert array.digest() == digest(value)
    assert elements(arrays) == b"".join(array.raw() for array in arrays)
    assert elements([]) == b""


@pytest.mark.parametrize("inference", [True, False])
def test_blocks_are_handed_the_rows_that_nnsight_would_narrow(inference: bool) -> None:
    counts = [3, 1, 2]
    with torch.inference_mode(inference):
        values = [
            torch.randn(6, 4),
            (torch.randn(6, 4), torch.randn(6)),
            (torch.randn(6, 4), None),
            (torch.randn(1, 6, 4), torch.randn(6)),
            torch.randn(5, 4),
            [torch.randn(6)],
            (),
            None,
        ]
        for value in values:
            batcher = RowBatcher(None)
            batcher.total, batcher.counts = 6, counts
            batcher.begin(value)
            start = 0
            for row, count in enumerate(counts):
                group = [start, count]
                served = batcher.rows(value, SimpleNamespace(row=row, batch_group=group))
                narrowed = batcher.narrow(value, group)
                assert type(served) is type(narrowed)
                for mine, nnsights in zip(_tensors(served), _tensors(narrowed), strict=True):
                    assert torch.equal(mine, nnsights)
                    # The same memory: what a block changes in place is what the model goes on with.
                    assert mine.data_ptr() == nnsights.data_ptr()
                    assert mine.stride() == nnsights.stride()
                start += count
            batcher.end()


def test_blocks_are_handed_copies_where_nnsight_would_have_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NNSIGHT_VLLM_CLONE_READS", "1")
    with torch.inference_mode():
        value = torch.randn(6, 4)
        batcher = RowBatcher(None)
        batcher.total, batcher.counts = 6, [3, 1, 2]
        batcher.begin(value)
        served = batcher.rows(value, SimpleNamespace(row=2, batch_group=[4, 2]))
        batcher.end()
    assert torch.equal(served, value[4:])
    assert served.untyped_storage().data_ptr() != value.untyped_storage().data_ptr()


def test_rows_of_memory_that_is_not_of_inference_can_be_changed_in_place() -> None:
    graph = torch.zeros(8, 4)
    with torch.inference_mode():
        live = graph[:6]
        batcher = RowBatcher(None)
        batcher.total, batcher.counts = 6, [3, 1, 2]
        batcher.begin(live)
        batcher.rows(live, SimpleNamespace(row=1, batch_group=[3, 1])).add_(1)
        batcher.rows(live, SimpleNamespace(row=2, batch_group=[4, 2]))[-1].mul_(0).sub_(2)
        batcher.end()
    assert graph.sum(1).tolist() == [0, 0, 0, 4, 0, -8, 0, 0]


def _tensors(value: Any) -> list[torch.Tensor]:
    return [item for item in (value if isinstance(value, (tuple, list)) else [value]) if item is not None]
