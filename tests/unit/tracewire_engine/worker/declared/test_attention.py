"""Attention patterns against the same computed request by request, over prompts, chunks, generation and preemption."""

from __future__ import annotations

import random
import struct
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tracewire_bus.domain.intervention_checks import normalize
from tracewire_bus.wire.messages import AttentionPattern, Probe, When
from tracewire_bus.wire.packing import pack
from tracewire_engine.protocol.messages import Placed
from tracewire_engine.worker.blocks.live_params import LiveRuns
from tracewire_engine.worker.declared import attention, key_pool
from tracewire_engine.worker.declared.ops import Declaration
from tracewire_engine.worker.declared.plan import DeclaredRequests

HEADS, SHARED, SIZE, WINDOW = 4, 2, 8, 5
AT = "attn.input"
CPU = torch.device("cpu")


def module(**impl: Any) -> Any:
    return SimpleNamespace(head_size=SIZE, impl=SimpleNamespace(scale=0.3, **impl), sliding_window=None)


class Sequence:
    """A request with all of its queries and keys, of which steps compute some."""

    def __init__(self, name: str, prompt: int, length: int, interventions: list[Any]) -> None:
        self.name, self.length = name, length
        self.queries = torch.randn(length, HEADS, SIZE)
        self.keys = torch.randn(length, SHARED, SIZE)
        self.state = SimpleNamespace(num_computed_tokens=0, num_prompt_tokens=prompt)
        self.interventions = interventions
        self.found: dict[str, list[torch.Tensor]] = {}

    def add(self, declared: DeclaredRequests) -> None:
        placed = [Placed(one, [(AT, False)], False, (HEADS, SIZE)) for one in normalize(self.interventions)]
        run = LiveRuns().join(self.name, pack({}), self.name, self.name, 0)
        encoded = msgspec.msgpack.encode(placed)
        declared.add(self.name, Declaration(self.name, 0, encoded, run, declared.decoded))

    def weights(self, position: int, heads: list[int], kind: Any) -> torch.Tensor:
        """`[heads, position + 1]`."""
        keys = self.keys[: position + 1].repeat_interleave(HEADS // SHARED, 1)
        scores = torch.einsum("hd,lhd->hl", self.queries[position], keys) * kind.impl.scale
        if cap := getattr(kind.impl, "logits_soft_cap", None):
            scores = cap * (scores / cap).tanh()
        if kind.sliding_window:
            scores[:, : max(0, position + 1 - kind.sliding_window)] = -torch.inf
        return scores.softmax(-1)[heads]


def step(declared: DeclaredRequests, batch: list[tuple[Sequence, int]]) -> None:
    """Compute so many positions of each request, and keep what was read."""
    rows = [one.state.num_computed_tokens + row for one, count in batch for row in range(count)]
    owners = [one for one, count in batch for _ in range(count)]
    states: Any = {one.name: one.state for one, _ in batch}
    declared.begin([one.name for one, _ in batch], {one.name: count for one, count in batch}, len(rows), states)
    pair = list(zip(owners, rows, strict=True))
    queries = torch.stack([one.queries[row] for one, row in pair]).flatten(1)
    keys = torch.stack([one.keys[row] for one, row in pair]).flatten(1)
    for hook in declared.hooks.values():
        hook.run(((queries, keys, torch.empty_like(keys)), {}))
    for one, count in batch:
        one.state.num_computed_tokens += count
    by_name = {one.name: one for one, _ in batch}
    for collector in declared.plan.collectors if declared.plan is not None else []:
        results = collector.results(lambda _: None)
        if results is None:
            continue
        row = 0
        for member, count in zip(collector.members, collector.counts, strict=True):
            for part, values in results.items():
                name = f"{collector.one.name}.{part}"
                by_name[member.declaration.request].found.setdefault(name, []).append(values[row : row + count])
            row += count
        collector.reset()


@pytest.mark.parametrize("seed", range(12))
def test_patterns_are_those_of_each_request_alone(seed: int) -> None:
    rng = random.Random(seed)
    torch.manual_seed(seed)
    kind = module(**rng.choice([{}, {"logits_soft_cap": 2.0}, {"logits_soft_cap": 0}]))
    kind.sliding_window = rng.choice([None, WINDOW])
    declared = DeclaredRequests(CPU)
    declared.module_at = lambda location: kind
    kinds = [
        AttentionPattern("last", "", heads=[3, 0], top_k=3),
        AttentionPattern("all", "", top_k=2, positions="all"),
        AttentionPattern("whole", "", heads=1, top_k=0),
        AttentionPattern("prompt", "", heads=[1, 2], top_k=0, positions="prompt"),
    ]
    live: list[Sequence] = []
    done: list[Sequence] = []
    started = 0
    while started < 6 or live:
        if started < 6 and rng.random() < 0.4:
            prompt = rng.randint(1, 9)
            live.append(Sequence(f"r{started}", prompt, prompt + rng.randint(1, 12), rng.sample(kinds, 2)))
            live[-1].add(declared)
            started += 1
        batch = [one for one in live if rng.random() < 0.9]
        if not batch:
            continue
        counts = []
        for one in batch:
            left = one.state.num_prompt_tokens - one.state.num_computed_tokens
            # A prompt may come in pieces.
            counts.append(1 if left <= 0 else rng.randint(1, left) if rng.random() < 0.3 else left)
        step(declared, list(zip(batch, counts, strict=True)))
        assert not any(one.failure for one in declared.live.values())
        for one in list(live):
            if one.state.num_computed_tokens == one.length:
                live.remove(one)
                done.append(one)
                declared.pop(one.name)
    assert not declared.pools.pools
    for one in done:
        check(one, kind)


def check(one: Sequence, kind: Any) -> None:
    prompt, last = one.state.num_prompt_tokens, range(one.state.num_prompt_tokens - 1, one.length)
    for declared in one.interventions:
        heads = {"last": [3, 0], "all": [0, 1, 2, 3], "whole": [1], "prompt": [1, 2]}[declared.name]
        positions = {"all": range(one.length), "prompt": range(prompt)}.get(declared.name, last)
        expected = [one.weights(position, heads, kind) for position in positions]
        if not declared.top_k:
            found = [row for piece in one.found[f"{declared.name}."] for row in piece]
            assert len(found) == len(expected)
            for mine, other in zip(found, expected, strict=True):
                torch.testing.assert_close(mine[:, : other.shape[1]], other)
                assert not mine[:, other.shape[1] :].any()
            continue
        weights = torch.cat(one.found[f"{declared.name}.weights"])
        places = torch.cat(one.found[f"{declared.name}.positions"])
        assert places.dtype == torch.int32
        assert weights.shape == (len(expected), len(heads), declared.top_k)
        for mine, where, other in zip(weights, places, expected, strict=True):
            seen = min(declared.top_k, int((other[0] > 0).sum()))
            torch.testing.assert_close(mine[:, :seen], other.topk(seen).values)
            torch.testing.assert_close(other.gather(1, where[:, :seen].long()), mine[:, :seen])
            assert not mine[:, seen:].any()
            assert (where[:, seen:] == -1).all()


def test_a_prompt_that_is_computed_again_after_a_preemption_is_read_once() -> None:
    declared = DeclaredRequests(CPU)
    declared.module_at = lambda location: module()
    one = Sequence("r", 4, 8, [AttentionPattern("whole", "", heads=[0, 3], top_k=0)])
    one.add(declared)
    for count in (4, 1, 1):
        step(declared, [(one, count)])
    one.state.num_computed_tokens = 0
    step(declared, [(one, 6)])
    step(declared, [(one, 1)])
    pieces = one.found["whole."]
    torch.testing.assert_close(pieces[-1][0], one.weights(6, [0, 3], module()))


def test_keys_that_were_computed_elsewhere_end_their_own_request() -> None:
    """As where a prefix cache served the prompt's beginning: a pattern without these keys would be wrong."""
    declared = DeclaredRequests(CPU)
    declared.module_at = lambda location: module()
    cached, other = (Sequence(name, 4, 8, [AttentionPattern("p", "", heads=[0], top_k=1)]) for name in "ab")
    cached.state.num_computed_tokens = 2
    for one in (cached, other):
        one.add(declared)
    step(declared, [(cached, 2), (other, 4)])
    failure = declared.live["a"].failure
    assert failure is not None
    assert "the keys of the positions before 2 were not computed here" in failure.message
    assert declared.live["b"].failure is None
    assert other.found


def test_too_many_keys_and_too_large_a_pattern_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for limited, message in (((key_pool, "MOST_BYTES"), "name fewer layers"), ((attention, "_MOST_ITEM"), "set top_k")):
        declared = DeclaredRequests(CPU)
        declared.module_at = lambda location: module()
        one = Sequence("r", 4, 8, [AttentionPattern("p", "", top_k=0, positions="all"), Probe("q", "")])
        one.add(declared)
        with monkeypatch.context() as patch:
            patch.setattr(*limited, 100)
            step(declared, [(one, 4)])
        failure = declared.live["r"].failure
        assert failure is not None
        assert message in failure.message


#: Bytes of the keys of a position.
POSITION = SHARED * SIZE * 4


@pytest.mark.parametrize("top_k", [2, 0])
def test_a_trace_without_room_for_its_keys_ends_alone(monkeypatch: pytest.MonkeyPatch, top_k: int) -> None:
    """Those that run go on, in the same step too, and each with its own keys."""
    monkeypatch.setattr(key_pool, "MOST_BYTES", 3000 * POSITION)
    declared = DeclaredRequests(CPU)
    declared.module_at = lambda location: module()
    one = AttentionPattern("p", "", heads=[3, 0], top_k=top_k, positions="all")
    long, begins = Sequence("long", 2000, 2010, [one]), Sequence("begins", 10, 30, [one])
    long.add(declared)
    step(declared, [(long, 2000)])
    begins.add(declared)
    # In either order of the batch.
    step(declared, [(begins, 10), (long, 1)])
    failure = declared.live["begins"].failure
    assert failure is not None
    assert "the keys of 2 requests and 2000 positions need" in failure.message
    assert failure.field == "interventions"
    assert not begins.found
    assert declared.live["long"].failure is None
    declared.pop("begins")
    step(declared, [(long, 1)])
    part = "weights" if top_k else ""
    for piece, position in zip(long.found[f"p.{part}"][1:], (2000, 2001), strict=True):
        expected = long.weights(position, [3, 0], module())
        torch.testing.assert_close(piece[0], expected.topk(2).values if top_k else expected)


class Largest(TorchDispatchMode):
    """Notes the bytes of the largest tensor that is made, and is no view."""

    nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        given = {one.untyped_storage().data_ptr() for one in args if isinstance(one, torch.Tensor)}
        if isinstance(made, torch.Tensor) and made.untyped_storage().data_ptr() not in given:
            self.nbytes = max(self.nbytes, made.untyped_storage().nbytes())
        return made


def measured(monkeypatch: pytest.MonkeyPatch, limit: int, dtype: torch.dtype) -> tuple[Any, int]:
    """What three requests read with so many bytes at once, and the bytes of the largest tensor behind the prompts."""
    monkeypatch.setattr(attention, "_CHUNK", limit)
    declared, largest, scores = DeclaredRequests(CPU), Largest(), attention.PatternGroup._scores
    declared.module_at = lambda location: module()
    torch.manual_seed(3)
    kinds = [AttentionPattern("top", "", top_k=2), AttentionPattern("all", "", heads=[3, 1], top_k=2, positions="all")]
    several = [Sequence(name, count, 160, kinds) for name, count in (("a", 70), ("b", 61), ("c", 150))]
    for one in several:
        one.keys, one.queries = one.keys.to(dtype), one.queries.to(dtype)
        one.add(declared)

    def noted(*given: Any) -> Any:
        with largest:
            return scores(*given)

    with monkeypatch.context() as patch:
        patch.setattr(attention.PatternGroup, "_scores", noted)
        step(declared, [(one, one.state.num_prompt_tokens) for one in several])
        step(declared, [(one, 1) for one in several])
    assert [one.failure for one in declared.live.values()] == [None] * 3
    return {
        (one.name, name): torch.cat(values) for one in several for name, values in one.found.items()
    }, largest.nbytes


@pytest.mark.parametrize("limit", [1000, 4096, 20_000, 1 << 20])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_computed_at_once_is_bounded(monkeypatch: pytest.MonkeyPatch, limit: int, dtype: torch.dtype) -> None:
    """The keys have more bytes than the weights, and are copied in float32 for each head of the queries."""
    expected, most = measured(monkeypatch, 1 << 30, dtype)
    found, largest = measured(monkeypatch, limit, dtype)
    assert most >= 3 * HEADS * 151 * SIZE * 4
    # At least the weights of a row, and the queries of a prompt, are there at once.
    assert largest <= max(limit, HEADS * 151 * 4, 150 * HEADS * SIZE * 4 if limit > 4096 else 0)
    assert expected.keys() == found.keys()
    for key, values in found.items():
        torch.testing.assert_close(values, expected[key])


def test_one_of_several_prompts_may_have_too_many_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key_pool, "MOST_BYTES", 100 * POSITION)
    declared = DeclaredRequests(CPU)
    declared.module_at = lambda location: module()
    several = [
        Sequence(name, count, count + 5, [AttentionPattern("p", "", top_k=2)])
        for name, count in zip("abc", (9, 101, 20), strict=True)
    ]
    for one in several:
        one.add(declared)
    step(declared, [(one, one.state.num_prompt_tokens) for one in several])
    step(declared, [(one, 1) for one in several])
    assert [one.failure is None for one in declared.live.values()] == [True, False, True]
    assert not several[1].found
    for one in (several[0], several[2]):
        for piece, position in zip(one.found["p.weights"], (one.length - 6, one.length - 5), strict=True):
            torch.testing.assert_close(piece[0], one.weights(position, [0, 1, 2, 3], module()).topk(2).values)


def test_one_trace_has_all_of_the_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key_pool, "MOST_BYTES", 1200 * POSITION)
    declared = DeclaredRequests(CPU)
    declared.module_at = lambda location: module()
    one = Sequence("r", 1024, 1300, [AttentionPattern("p", "", heads=[0], top_k=1)])
    one.add(declared)
    step(declared, [(one, 1024)])
    for _ in range(176):
        step(declared, [(one, 1)])
    assert declared.live["r"].failure is None
    step(declared, [(one, 1)])
    assert declared.live["r"].failure is not None


def test_the_bound_of_an_item_is_of_one_request_s(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four heads with two weights and positions each have 64 bytes a position."""
    monkeypatch.setattr(attention, "_MOST_ITEM", 64 * 6)
    declared = DeclaredRequests(CPU)
    declared.module_at = lambda location: module()
    several = [
        Sequence(name, count, 12, [AttentionPattern("p", "", top_k=2, positions="all")])
        for name, count in zip("abc", (6, 7, 5), strict=True)
    ]
    for one in several:
        one.add(declared)
    step(declared, [(one, one.state.num_prompt_tokens) for one in several])
    failures = [one.failure for one in declared.live.values()]
    assert [one is None for one in failures] == [True, False, True]
    assert failures[1] is not None
    assert "the pattern of 7 positions over 7 is too large" in failures[1].message
    for one in (several[0], several[2]):
        (weights,) = one.found["p.weights"]
        for position, row in enumerate(weights):
            if position:
                expected = one.weights(position, [0, 1, 2, 3], module()).topk(2)
                torch.testing.assert_close(row, expected.values)


def test_where_a_condition_does_not_hold_nothing_is_told_and_the_keys_are_kept() -> None:
    declared = DeclaredRequests(CPU)
    declared.module_at = lambda location: module()
    one = Sequence("r", 3, 8, [AttentionPattern("p", "", heads=[0], top_k=2, when=When(start=2))])
    one.add(declared)
    for count in (3, 1, 1, 1):
        step(declared, [(one, count)])
    assert declared.live["r"].failure is None
    places, weights = (torch.cat(one.found[f"p.{part}"])[:, 0] for part in ("positions", "weights"))
    assert places[:2].tolist() == [[-1, -1]] * 2
    assert weights[:2].isnan().all()
    for row, position in ((2, 4), (3, 5)):
        expected = one.weights(position, [0], module())[0].topk(2)
        torch.testing.assert_close(weights[row], expected.values)
        assert places[row].tolist() == expected.indices.tolist()


def test_one_weight_leaves_the_device_as_its_bytes() -> None:
    """torch takes a slice of one element for contiguous, though it has the stride of the whole."""
    declared = DeclaredRequests(CPU)
    declared.module_at = lambda location: module()
    one = Sequence("r", 4, 8, [AttentionPattern("p", "", heads=[2], top_k=1)])
    one.add(declared)
    state: Any = {"r": one.state}
    declared.begin(["r"], {"r": 4}, 4, state)
    declared.hooks[AT].run(((one.queries[:4].flatten(1), one.keys[:4].flatten(1)), {}))
    collected = declared.collect(lambda _: None)
    assert collected is not None
    layout, _, flat = collected
    assert layout is not None
    expected = one.weights(3, [2], module()).topk(1)
    ((read,),) = layout.sets
    data = flat.numpy().tobytes()
    found = {part.key: data[part.offset : part.offset + part.size] for part in read.parts}
    assert int.from_bytes(found["positions"], "little", signed=True) == int(expected.indices[0, 0])
    assert struct.unpack("<f", found["weights"])[0] == pytest.approx(float(expected.values[0, 0]), rel=1e-5)


def test_ranks_add_up_the_weights_of_their_own_heads() -> None:
    """Two ranks with two of the heads each, and one of the keys' heads."""
    one = Sequence("r", 4, 8, [AttentionPattern("p", "", heads=[3, 0, 1], top_k=2)])
    parts = []
    for rank in (0, 1):
        declared = DeclaredRequests(CPU)
        declared.module_at = lambda location: module()

        def keep(part: torch.Tensor) -> torch.Tensor:
            parts.append(part)
            return part

        declared.shards = rank, keep
        one.add(declared)
        state: Any = {"r": one.state}
        declared.begin(["r"], {"r": 4}, 4, state)
        queries, keys = one.queries[:4, 2 * rank : 2 * rank + 2], one.keys[:4, rank : rank + 1]
        declared.hooks[AT].run(((queries.flatten(1), keys.flatten(1)), {}))
        assert declared.live["r"].failure is None
    whole = sum(parts)[0]
    expected = one.weights(3, [3, 0, 1], module()).topk(2)
    torch.testing.assert_close(whole[..., 1], expected.values)
    assert whole[..., 0].long().tolist() == expected.indices.tolist()
