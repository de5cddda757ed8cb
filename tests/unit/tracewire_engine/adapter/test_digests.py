"""Digests taken of deltas as they pass are those of the values."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest
import torch

import tracewire_engine  # noqa: F401 (before nnsight)
from tests.support.equality import equal
from tracewire_bus.domain.fold import apply_delta
from tracewire_bus.wire.digests import digest
from tracewire_bus.wire.messages import Append, Delete, Delta, Set
from tracewire_bus.wire.packing import decoder, wire
from tracewire_engine.adapter.digests import PassingDigests
from tracewire_engine.worker.host_copy import HostCopy, encoded_late
from tracewire_engine.worker.reporting import _encoded
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
