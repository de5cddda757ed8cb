"""Kernels at the taps of whole CUDA graphs: what they serve, what they leave to graphs that break, and what is read."""

from __future__ import annotations

import gc
import inspect
import random
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from tests.support.declared_plans import HEAD, HIDDEN, LAYERS, Graphs, play
from tests.support.later_plans import play as play_later
from tracewire_bus.domain.intervention_checks import normalize
from tracewire_bus.wire.messages import Ablate, Clamp, LogitLens, Probe, Steer, When
from tracewire_bus.wire.packing import pack
from tracewire_engine.protocol.messages import Placed
from tracewire_engine.worker.blocks.live_params import LiveRuns
from tracewire_engine.worker.declared import plan as plan_module
from tracewire_engine.worker.declared.ops import Declaration, Op
from tracewire_engine.worker.declared.plan import DeclaredRequests
from tracewire_engine.worker.declared.tap_buffers import TapBuffers, VectorPool, graph_rows, made_buffers
from tracewire_engine.worker.declared.tap_rows import serve_rows

TAPS = [f"layer.{layer}.output" for layer in range(LAYERS)]
VECTOR = np.arange(HIDDEN, dtype=np.float32)
CPU = torch.device("cpu")


def buffers(rows: int = 64, taps: list[str] = TAPS, dtype: torch.dtype = torch.float32) -> TapBuffers:
    """Buffers of an engine whose graphs have been captured."""
    made = TapBuffers(taps, rows, HIDDEN, dtype, CPU, serve_rows)
    for tap in taps:
        made.launch(tap, (torch.zeros(4, HIDDEN, dtype=dtype), torch.zeros(4, HIDDEN, dtype=dtype)))
    return made


def declared_of(*lists: list[tuple[Any, list[int]]], residual: bool | list[bool] = True) -> DeclaredRequests:
    """Requests that generate, each with these interventions at these layers; one step of them has begun.

    `residual`: whether they are at the residual stream and not at a half of it, for each of a list if it is a list.
    """
    declared = DeclaredRequests(CPU)
    states = {}
    for number, intended in enumerate(lists):
        sums = residual if isinstance(residual, list) else [residual] * len(intended)
        placed = [
            Placed(one, [(TAPS[layer], whole) for layer in at], len(at) > 1)
            for one, (_, at), whole in zip(normalize([one for one, _ in intended]), intended, sums, strict=True)
        ]
        run = LiveRuns().join("run", pack({}), f"r{number}", f"r{number}", 0)
        name, encoded = f"r{number}", msgspec.msgpack.encode(placed)
        declared.add(name, Declaration(name, 0, encoded, run, declared.decoded))
        states[name] = SimpleNamespace(num_computed_tokens=5, num_prompt_tokens=5)
    declared.buffers, declared.ids = buffers(), lambda: torch.ones(len(states), dtype=torch.int32)
    declared.begin(list(states), dict.fromkeys(states, 1), len(states), states)
    return declared


def test_steps_by_kernels_give_what_a_loop_over_requests_gives() -> None:
    served = 0
    for seed in range(40):
        declared = DeclaredRequests(CPU)
        declared.buffers = buffers()
        served += play(seed, declared)
    assert served > 40


def test_steps_with_drafts_are_served_by_kernels_too() -> None:
    """Each row as if it were a step, reads of those rows that the model took."""
    served = 0
    for seed in range(40):
        declared = DeclaredRequests(CPU)
        declared.buffers = buffers()
        served += play(seed, declared, drafts=3)
    assert served > 40


def test_recorded_reads_of_the_buffers_are_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_module, "RECORD_AFTER", 1)
    graphs, served = Graphs(), 0
    for seed in range(20):
        declared = DeclaredRequests(CPU)
        declared.buffers, declared.recorders[False] = buffers(), graphs
        served += play(seed, declared)
    assert served > 20
    assert sum(graph.replays for graph in graphs.made) > 20


@pytest.mark.parametrize("rows", [0, 1, 1000])
def test_lenses_are_recorded_with_the_head_for_as_many_rows_as_may_be(
    monkeypatch: pytest.MonkeyPatch, rows: int
) -> None:
    monkeypatch.setattr(plan_module, "RECORD_AFTER", 1)
    graphs, recorded = Graphs(), set()
    record = DeclaredRequests._record_join

    def noted(self: DeclaredRequests, plan: Any, join: Any, lens: Any) -> None:
        before = len(graphs.made)
        record(self, plan, join, lens)
        if len(graphs.made) > before:
            recorded.add(plan.head_rows)

    monkeypatch.setattr(DeclaredRequests, "_record_join", noted)
    for seed in range(20):
        declared = DeclaredRequests(CPU)
        declared.buffers, declared.recorders[True], declared.head_rows = buffers(), graphs, rows
        play_later(seed, declared, steps=45, arrivals=0.1, make=lambda rng: [(LogitLens("lens", "", top_k=2), [0, 1])])
    # Each row of a request is read at two layers.
    assert bool(recorded) == (rows > 1)
    assert all(one <= rows for one in recorded)
    assert bool(sum(graph.replays for graph in graphs.made)) == (rows > 1)


def conditional(rng: random.Random) -> list[tuple[Any, list[int]]]:
    """Reads and edits with conditions on no probe."""

    def when() -> When:
        return rng.choice(
            [
                When(tokens=[[1], [2]]),
                When(tokens=[[1, 2], [3]]),
                When(start=1, stop=6, every=2),
                When(every=3, tokens=[[0], [1]]),
                When(part="answer", start=2),
                When(part="prompt"),
            ]
        )

    own = np.random.default_rng(rng.randint(0, 5)).standard_normal(HIDDEN).astype(np.float32)
    read = Probe("read", "", when=rng.choice([None, when()]))
    steer = Steer("", own, scale=2.0, when=when())
    both = [(read, [0, 2]), (steer, [rng.randrange(LAYERS)])]
    return [*(both if rng.random() < 0.5 else both[::-1]), (LogitLens("lens", "", top_k=2, when=when()), [1])]


@pytest.mark.parametrize("recorded", [False, True])
def test_conditions_on_no_probe_are_served_by_kernels(recorded: bool) -> None:
    restricted, graphs = 0, Graphs()
    for seed in range(8):
        declared = DeclaredRequests(CPU)
        declared.buffers = taps = buffers()
        if recorded:
            declared.recorders[False] = graphs

        def restrict(table: Any, taps: TapBuffers = taps) -> None:
            nonlocal restricted
            restricted += 1
            TapBuffers.restrict(taps, table)

        taps.restrict = restrict
        play_later(seed, declared, steps=45, arrivals=0.02, make=conditional)
    assert restricted > (8 if recorded else 100)
    assert bool(graphs.made) is recorded


def drafted_step(*, kernels: bool) -> tuple[list[torch.Tensor], torch.Tensor]:
    """What a step with drafts comes to whose reads and edits have conditions: the streams, and the reads."""
    tokens = When(tokens=[[1], [2, 1]])
    some = [(Steer("", VECTOR, when=tokens), [1]), (Probe("a", "", when=tokens), [1]), (Probe("b", ""), [2])]
    every = [(Probe("a", "", when=When(every=2)), [1]), (Steer("", -VECTOR, when=When(start=3, stop=5)), [1])]
    declared = declared_of(some, every, [(LogitLens("c", "", top_k=2), [1])])
    states = {name: SimpleNamespace(num_computed_tokens=7, num_prompt_tokens=5) for name in declared.live}
    drafts = {"r0": [-1] * 3, "r1": [-1] * 2}
    counts = {"r0": 4, "r1": 3, "r2": 1}
    ids = torch.tensor([1, 2, 1, 1, 2, 3, 1, 2], dtype=torch.int32)
    declared.ids = lambda: ids
    declared.begin(list(counts), counts, 8, states, drafts)
    generator = torch.Generator().manual_seed(0)
    streams = [torch.randn(12, HIDDEN, generator=generator) for _ in TAPS]
    assert declared.fits_buffers(12)
    for tap, stream in zip(TAPS, streams, strict=True):
        if kernels:
            declared.buffers.launch(tap, stream)
        elif tap in declared.hooks:
            declared.hooks[tap].run(stream)
    if not kernels:
        declared.plan.buffered = declared.plan.unread = False
    declared.plan.accept([3, 1, 1])
    layout, batch, flat = declared.collect(lambda rows: rows @ HEAD.T)
    # A token each that the model has taken: three of the first, and one of the others.
    assert [entry.index + batch.step for entry in layout.entries] == [3, 4, 5, 3, 3]
    return streams, flat


def test_conditions_in_a_step_with_drafts_are_those_of_each_row() -> None:
    (mine, read), (other, known) = (drafted_step(kernels=kernels) for kernels in (True, False))
    for stream, same in zip(mine, other, strict=True):
        assert torch.equal(stream, same)
    assert torch.equal(read, known)


FITS = {
    "a probe": [(Probe("a", ""), [0, 1, 2])],
    "several reads of a value": [
        (Probe("a", ""), [1]),
        (Probe("b", "", weight=VECTOR), [1]),
        (LogitLens("c", "", top_k=2), [1]),
    ],
    "a vector": [(Steer("", VECTOR, scale=2.0), [0, 2])],
    "reads before the vector": [(Probe("a", ""), [1]), (Steer("", VECTOR), [1])],
    "reads behind the vector": [(Steer("", VECTOR), [1]), (Probe("a", ""), [1])],
    "a vector at some tokens": [(Steer("", VECTOR, when=When(tokens=[[1]])), [1]), (Probe("a", ""), [1])],
    "a read at some tokens": [(Probe("a", "", when=When(every=2)), [1])],
}
BREAKS = {
    "reads before and behind": [(Probe("a", ""), [1]), (Steer("", VECTOR), [1]), (Probe("b", ""), [1])],
    "two vectors": [(Steer("", VECTOR), [1]), (Steer("", -VECTOR), [1])],
    "a clamp": [(Clamp("", VECTOR, min=0.0), [1])],
    "an ablation": [(Ablate("", VECTOR), [1])],
    "an ablation of whole rows": [(Ablate("", None, keep=0.5), [0])],
    "a condition on a probe": [
        (Probe("a", "", weight=VECTOR), [1]),
        (Steer("", VECTOR, when=When(probe="a", above=0.0)), [2]),
    ],
}


@pytest.mark.parametrize("what", FITS)
def test_what_fits_needs_no_break(what: str) -> None:
    assert declared_of(FITS[what], FITS["a probe"]).fits_buffers()


@pytest.mark.parametrize("what", BREAKS)
def test_what_does_not_fit_breaks_the_graph(what: str) -> None:
    declared = declared_of(BREAKS[what], FITS["a probe"])
    assert not declared.fits_buffers()
    # The kernels would otherwise still do what an earlier step asked for.
    values = torch.ones(2, HIDDEN)
    for stage in declared.hooks.values():
        stage.run((values.clone(), values.clone()))
    collected = declared.collect(lambda rows: rows @ HEAD.T)
    assert collected is not None
    assert not any(one.failure for one in declared.live.values())


def test_a_read_and_a_vector_of_other_requests_do_not_meet() -> None:
    declared = declared_of([(Probe("a", ""), [1])], [(Steer("", VECTOR), [1])])
    assert declared.fits_buffers()
    hidden, residual = torch.ones(3, HIDDEN), torch.full((3, HIDDEN), 2.0)
    declared.buffers.launch(TAPS[1], (hidden, residual))
    torch.testing.assert_close(hidden, torch.stack([torch.ones(HIDDEN), 1 + torch.tensor(VECTOR), torch.ones(HIDDEN)]))
    _, _, flat = declared.collect(lambda rows: rows)
    assert flat.view(torch.float32).tolist() == [3.0] * HIDDEN


def test_one_half_of_a_residual_stream_is_read_where_it_was_asked_for() -> None:
    declared = declared_of([(Probe("a", ""), [1])], residual=False)
    assert declared.fits_buffers()
    declared.buffers.launch(TAPS[1], (torch.ones(1, HIDDEN), torch.full((1, HIDDEN), 2.0)))
    _, _, flat = declared.collect(lambda rows: rows)
    assert flat.view(torch.float32).tolist() == [1.0] * HIDDEN


@pytest.mark.parametrize("first", [True, False])
def test_reads_of_the_residual_stream_and_of_a_half_of_it_break_the_graph(first: bool) -> None:
    """A row of a tap has one place in the buffer."""
    both = [(Probe("a", ""), [1]), (Probe("b", ""), [1])]
    assert not declared_of(both, residual=[first, not first]).fits_buffers()
    assert declared_of(both, residual=[first, first]).fits_buffers()


def test_a_step_that_leaves_the_buffers_has_to_reach_its_locations() -> None:
    """As where another rank needs the graph with breaks."""
    for left in (False, True):
        declared = declared_of(FITS["a probe"])
        assert declared.fits_buffers()
        if left:
            declared.leave_buffers()
        declared.check_reached()
        failure = declared.live["r0"].failure
        assert (failure is not None) == left


def test_a_step_without_interventions_does_not_use_them() -> None:
    declared = declared_of(FITS["a vector"])
    assert declared.fits_buffers()
    declared.pop("r0")
    declared.begin([], {}, 0, {})
    assert not declared.fits_buffers()


def test_the_table_is_written_when_the_plan_changes_and_only_then() -> None:
    declared = declared_of(FITS["a vector"])
    assert declared.fits_buffers()
    numbers = declared.buffers._numbers
    written = numbers.clone()
    for changed in (False, True):
        numbers.fill_(7)
        declared.stale = changed
        states = {"r0": SimpleNamespace(num_computed_tokens=6 + changed, num_prompt_tokens=5)}
        declared.begin(["r0"], {"r0": 1}, 1, states)
        assert declared.fits_buffers()
        assert torch.equal(numbers, written) is changed


@pytest.mark.parametrize(
    ("value", "served"),
    [
        (torch.zeros(4, HIDDEN), True),
        ((torch.zeros(4, HIDDEN), torch.zeros(4, HIDDEN)), True),
        (torch.zeros(1, 4, HIDDEN), True),
        (torch.zeros(4, HIDDEN + 1), False),
        (torch.zeros(4, HIDDEN, dtype=torch.float16), False),
        (torch.zeros(4, 2 * HIDDEN)[:, :HIDDEN], False),
        ("nothing", False),
    ],
)
def test_values_of_another_shape_break_the_graph(value: Any, served: bool) -> None:
    declared = declared_of(FITS["a probe"])
    declared.buffers = TapBuffers(TAPS, 64, HIDDEN, torch.float32, CPU, serve_rows)
    for tap in TAPS:
        declared.buffers.launch(tap, value)
    assert declared.fits_buffers() is served


def test_locations_without_a_kernel_and_long_steps_break_the_graph() -> None:
    declared = declared_of(FITS["a probe"])
    declared.buffers = buffers(taps=TAPS[:2])
    assert not declared.fits_buffers()
    declared = declared_of(*[FITS["a probe"]] * 20)
    declared.buffers = buffers(rows=16)
    assert not declared.fits_buffers()
    # A graph of more tokens than there are rows has no kernels, and others still have.
    declared.buffers.launch(TAPS[0], torch.zeros(32, HIDDEN))
    declared = declared_of(FITS["a probe"])
    assert declared.fits_buffers()
    # One of fewer tokens is padded to a graph without kernels.
    assert declared.fits_buffers(64)
    assert not declared.fits_buffers(65)


@pytest.mark.parametrize("requests", [1, 3, 5, 16, 200])
@pytest.mark.parametrize("drafts", [0, 1, 2, 3, 4, 7])
def test_buffers_have_a_row_for_each_token_of_a_graph_for_requests_that_generate(requests: int, drafts: int) -> None:
    """Of the graphs that vLLM's first runner captures, which rounds their sizes to whole requests."""
    from vllm.config import CompilationConfig, CUDAGraphMode
    from vllm.v1.cudagraph_dispatcher import CudagraphDispatcher

    for sizes in ([1, 2, 4, 8, 16, 24, 32, 40, 48], [1, 2, 4, 8], [8], [1, 2, 4, *range(8, 513, 8)]):
        compilation = CompilationConfig(
            cudagraph_capture_sizes=sizes, max_cudagraph_capture_size=sizes[-1], cudagraph_mode=CUDAGraphMode.FULL
        )
        tokens = 1 + drafts
        config = SimpleNamespace(
            compilation_config=compilation,
            scheduler_config=SimpleNamespace(max_num_seqs=requests),
            num_speculative_tokens=drafts,
            speculative_config=None,
            lora_config=None,
        )
        rows = graph_rows(config)
        assert rows <= sizes[-1]
        adjust = compilation.adjust_cudagraph_sizes_for_spec_decode
        # vLLM 0.25 asks for the number of ranks, too.
        adjust(tokens, *[1] * (len(inspect.signature(adjust).parameters) - 1))
        compilation.cudagraph_mode = CUDAGraphMode.FULL_DECODE_ONLY
        dispatcher = CudagraphDispatcher(config)
        dispatcher.initialize_cudagraph_keys(CUDAGraphMode.FULL_DECODE_ONLY, tokens)
        captured = {batch.num_tokens for batch in dispatcher.cudagraph_keys[CUDAGraphMode.FULL]}
        assert bool(captured) == (min(compilation.cudagraph_capture_sizes) <= requests * tokens)
        assert max(captured, default=0) <= rows


def test_more_vectors_than_the_pool_holds_break_the_graph() -> None:
    declared = declared_of(*[[(Steer("", VECTOR + number), [0, 1, 2])] for number in range(8)])
    assert declared.buffers is not None
    assert declared.fits_buffers()
    declared.plan.tabled, declared.buffers._pool = False, VectorPool(7, HIDDEN, CPU)
    assert not declared.fits_buffers()


def steers(*vectors: np.ndarray[Any, Any], scale: float = 1.0) -> list[Op]:
    """Interventions of a request, decoded."""
    declared = declared_of([(Steer("", vector, scale=scale), [1]) for vector in vectors])
    return declared.live["r0"].ops


def test_a_vector_has_a_place_as_long_as_its_intervention_lives() -> None:
    pool = VectorPool(2, HIDDEN, CPU)
    first, second, third = (steers(VECTOR + number, scale=2.0)[0] for number in range(3))
    place, other = pool.place(first), pool.place(second)
    assert {place, other} == {0, 1}
    assert pool.place(first) == place
    assert pool.place(third) is None
    pool.write()
    torch.testing.assert_close(pool.rows[place], torch.tensor(VECTOR * 2))
    # Without the pool's own hold on it.
    del first
    gc.collect()
    assert pool.place(third) == place
    torch.testing.assert_close(pool.rows[place], torch.tensor(VECTOR * 2))
    pool.write()
    torch.testing.assert_close(pool.rows[place], torch.tensor((VECTOR + 2) * 2))
    torch.testing.assert_close(pool.rows[other], torch.tensor((VECTOR + 1) * 2))


def test_vectors_of_plans_that_did_not_fit_are_not_kept() -> None:
    """Not either until the next plan fits."""
    pool = VectorPool(2, HIDDEN, CPU)
    for number in range(6):
        ended = steers(VECTOR + number)
        assert pool.place(ended[0]) is not None
        del ended
        gc.collect()
    (lives,) = steers(VECTOR)
    place = pool.place(lives)
    assert place is not None
    pool.write()
    torch.testing.assert_close(pool.rows[place], torch.tensor(VECTOR))


def test_a_vector_of_another_width_has_no_place() -> None:
    pool = VectorPool(2, HIDDEN + 1, CPU)
    assert pool.place(steers(VECTOR)[0]) is None


def test_sharded_values_and_engines_without_graphs_have_no_kernels() -> None:
    made = TapBuffers(TAPS, 16, HIDDEN, torch.float32, CPU, serve_rows, sharded=lambda tap: tap == TAPS[1])
    for tap in TAPS:
        made.launch(tap, torch.zeros(4, HIDDEN))
    declared = declared_of([(Probe("a", ""), [1])])
    declared.buffers = made
    assert not declared.fits_buffers()
    config = SimpleNamespace(
        compilation_config=SimpleNamespace(cudagraph_capture_sizes=[1, 2]),
        scheduler_config=SimpleNamespace(max_num_seqs=2),
        num_speculative_tokens=0,
    )
    assert made_buffers(TAPS, config, CPU, sums=True, sharded=lambda _: False) is None
    # A model whose step cannot run twice.
    config.model_config = SimpleNamespace(is_hybrid=True)
    assert made_buffers(TAPS, config, torch.device("cuda"), sums=True, sharded=lambda _: False) is None


def test_a_vector_of_another_width_ends_its_own_request() -> None:
    declared = declared_of([(Steer("", VECTOR[:4]), [1])], FITS["a probe"])
    assert not declared.fits_buffers()
    for stage in declared.hooks.values():
        stage.run((torch.ones(2, HIDDEN), torch.ones(2, HIDDEN)))
    assert declared.live["r0"].failure is not None
    assert declared.live["r1"].failure is None


def test_half_precision_is_rounded_as_without_kernels() -> None:
    rng = random.Random(0)
    torch.manual_seed(0)
    lists = [[(Steer("", VECTOR / 7, scale=rng.random()), [1]), (Probe("a", ""), [1])] for _ in range(3)]
    halves = torch.randn(3, HIDDEN).bfloat16(), torch.randn(3, HIDDEN).bfloat16()
    outcomes = []
    for kernels in (False, True):
        declared = declared_of(*lists)
        declared.buffers = buffers(dtype=torch.bfloat16)
        value = tuple(half.clone() for half in halves)
        if kernels:
            assert declared.fits_buffers()
            declared.buffers.launch(TAPS[1], value)
        else:
            declared.hooks[TAPS[1]].run(value)
        _, _, flat = declared.collect(lambda rows: rows)
        outcomes.append((value[0].clone(), flat.clone()))
    assert torch.equal(outcomes[0][0], outcomes[1][0])
    assert torch.equal(outcomes[0][1], outcomes[1][1])
