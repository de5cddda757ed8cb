"""Tracewire's runner on vLLM's second one: what it remembers of requests. The steps themselves need an engine."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm.v1.worker.gpu.model_runner import GPUModelRunner

import tracewire_engine  # noqa: F401 (before nnsight)
from tracewire_engine.protocol.keys import BLOCK_ARG
from tracewire_engine.worker import second_runner
from tracewire_engine.worker.drafted_tokens import DraftedTokens
from tracewire_engine.worker.second_runner import SecondRunner
from tracewire_engine.worker.step_states import RequestState, StepStates


def _runner(computed: list[int], prompts: list[int], **known: RequestState) -> Any:
    """A runner whose requests are `r0`, `r1` and so on, in these states."""
    indices = {f"r{place}": place for place in range(len(computed))}
    states = SimpleNamespace(
        req_id_to_index=indices,
        num_computed_tokens_np=np.array(computed),
        prompt_len=SimpleNamespace(np=np.array(prompts)),
    )
    drafted, states_of = DraftedTokens(), _no_states()
    return SimpleNamespace(
        req_states=states,
        tracewire_known=dict(known),
        tracewire_states=states_of,
        tracewire_drafted=drafted,
        tracewire_rows=None,
    )


def _no_states() -> StepStates:
    return StepStates([], [], [], {}, {})


def test_states_are_in_the_order_of_the_batch_and_count_what_was_generated() -> None:
    runner = _runner([0, 7, 12], [5, 5, 10], r1=RequestState(0, 0), r2=RequestState(0, 0), gone=RequestState(3, 2, 4))
    SecondRunner._note_states(runner, ["r2", "r0", "r1"], {"r0": 4, "r1": 1, "r2": 1})
    states = SecondRunner.request_states(runner)
    assert {name: (one.num_computed_tokens, one.num_prompt_tokens) for name, one in states.items()} == {
        "r0": (0, 5),
        "r1": (7, 5),
        "r2": (12, 10),
        "gone": (3, 2),
    }
    # `r1` generates its fourth token in this step, `r2` its fourth, too. `gone` rests, and keeps what it had.
    assert [SecondRunner.generated(runner, name) for name in ("r1", "r2", "gone")] == [4, 4, 4]


def test_a_prompt_that_is_computed_in_parts_has_generated_nothing() -> None:
    runner = _runner([0], [10], r0=RequestState(0, 0))
    SecondRunner._note_states(runner, ["r0"], {"r0": 4})
    assert SecondRunner.generated(runner, "r0") == 0


def test_steps_without_a_traced_request_look_nothing_up() -> None:
    runner = SimpleNamespace(
        tracewire_known={}, tracewire_rows=None, tracewire_states=StepStates(["old"], [1], [1], {"old": 1}, {})
    )
    SecondRunner._note_states(runner, ["r0"], {"r0": 1})
    assert runner.tracewire_states == {}


def test_a_traced_request_that_leaves_the_batch_keeps_its_state_and_a_plain_one_does_not() -> None:
    runner = _runner([7, 9], [5, 5], r0=RequestState(0, 0))
    SecondRunner._note_states(runner, ["r0", "r1"], {"r0": 1, "r1": 1})
    for order in (["r1"], ["r1"], []):
        SecondRunner._note_states(runner, order, dict.fromkeys(order, 1))
        states = SecondRunner.request_states(runner)
        assert states["r0"] == RequestState(7, 5, 4)
        assert set(states) == {"r0", *order}


class _Theirs(GPUModelRunner):
    """Stands where the platform's runner does, and notes what is called."""

    def __init__(self) -> None:
        self.said: list[Any] = []
        self.tracewire_serving = True
        self.tracewire_come, self.tracewire_known, self.tracewire_states = set(), {}, _no_states()
        self.tracewire_rows = None
        self.sampler: Any = object()
        self.tracewire_drafted = DraftedTokens()
        self.tracewire_preempted = SimpleNamespace(restore=lambda name, blocks: self.said.append((name, blocks)))

    def finish_requests(self, scheduler_output: Any) -> None:
        self.said.append("vLLM finishes")

    def add_requests(self, scheduler_output: Any) -> None:
        self.said.append("vLLM adds")

    def update_requests(self, scheduler_output: Any) -> None:
        self.said.append("vLLM updates")

    def prepare_inputs(self, scheduler_output: Any, *rest: Any) -> Any:
        self.said.append("vLLM prepares")
        return SimpleNamespace(req_ids=sorted(scheduler_output.num_scheduled_tokens))


class _Runner(SecondRunner, _Theirs):
    def leave_step(self, scheduler_output: Any) -> None:
        self.said.append("leave")

    def take_requests(self, fresh: list[Any]) -> None:
        self.said.append([data.req_id for data in fresh])

    def begin_rows(self, scheduler_output: Any, order: list[str]) -> None:
        self.said.append(("rows", order))


def _new(name: str, *, traced: bool = True) -> Any:
    extra = {BLOCK_ARG: b""} if traced else None
    return SimpleNamespace(req_id=name, sampling_params=SimpleNamespace(extra_args=extra), block_ids=([1, 2],))


def _step(
    runner: Any, *new: Any, finished: tuple[str, ...] = (), drafted: dict[str, int] | None = None, **tokens: int
) -> list[Any]:
    """One step as vLLM takes it, `drafted` of whose tokens are drafts; what was called meanwhile."""
    runner.said.clear()
    step = SimpleNamespace(
        scheduled_new_reqs=list(new),
        finished_req_ids=set(finished),
        num_scheduled_tokens=tokens,
        total_num_scheduled_tokens=sum(tokens.values()),
        scheduled_spec_decode_tokens={name: [-1] * drafts for name, drafts in (drafted or {}).items()},
    )
    runner.finish_requests(step)
    runner.add_requests(step)
    runner.update_requests(step)
    if tokens:
        runner.prepare_inputs(step)
    return list(runner.said)


def test_a_step_takes_new_requests_and_begins_when_the_order_is_known() -> None:
    runner = _Runner()
    runner.tracewire_preempted = None
    runner.req_states = _runner([0, 0], [3, 4]).req_states
    said = _step(runner, _new("r1"), _new("r0", traced=False), r0=3, r1=4)
    finishing = ["leave", "vLLM finishes"]
    assert said == [
        *(*finishing, "vLLM adds", ["r1", "r0"], "vLLM updates"),
        *("vLLM prepares", ("rows", ["r0", "r1"])),
    ]
    assert runner.tracewire_known.keys() == {"r1"}
    # Without tokens, vLLM prepares nothing.
    assert _step(runner, finished=("r0", "r1")) == [*finishing, "vLLM adds", "vLLM updates", ("rows", [])]
    assert not runner.tracewire_come
    assert not runner.tracewire_known
    assert not runner.tracewire_states


def test_a_preempted_request_that_goes_on_is_not_taken_anew_and_gets_its_kv_back() -> None:
    runner = _Runner()
    runner.req_states = _runner([0], [3]).req_states
    _step(runner, _new("r0"), r0=3)
    said = _step(runner, _new("r0"), r0=1)
    assert [] in said
    assert said.index(("r0", ([1, 2],))) > said.index("vLLM updates")


def test_vllm_adds_nothing_if_its_sampler_changes_with_requests_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def alone(sampler: Any) -> bool:
        asked.append(sampler)
        return True

    class Remembered:
        """Notes when the sampler forgets what it knows of the requests."""

        def __init__(self, sampler: Any) -> None:
            self.forgotten = 0

        def forget(self) -> None:
            self.forgotten += 1

    monkeypatch.setattr(second_runner, "changes_with_requests_alone", alone)
    monkeypatch.setattr(second_runner, "RememberedRows", Remembered)
    runner = _Runner()
    runner.req_states = _runner([0], [3]).req_states
    assert "vLLM adds" in _step(runner, _new("r0"), r0=3)
    for _ in range(2):
        assert "vLLM adds" not in _step(runner, r0=1)
    assert runner.tracewire_remembered.forgotten == 1
    assert "vLLM adds" in _step(runner, _new("r0"), r0=1)
    assert runner.tracewire_remembered.forgotten == 2
    assert asked == [runner.sampler]


def test_before_the_engine_serves_vllm_is_left_alone() -> None:
    """It warms up by requests of its own."""
    runner = _Runner()
    runner.tracewire_serving = False
    said = _step(runner, _new("r0"), r0=3)
    assert said == ["vLLM finishes", "vLLM adds", "vLLM updates", "vLLM prepares"]
    assert not runner.tracewire_come


class _Sampling(_Runner):
    """Samples the most likely token of each row; blocks forbid token 1 and replace the first request's sample by 5."""

    def __init__(self) -> None:
        super().__init__()
        self.model = torch.nn.Module()
        self.model.compute_logits = lambda hidden: hidden
        self.tracewire_unwatched = False

    def serve_logits(self, logits: torch.Tensor) -> torch.Tensor:
        logits = logits.clone()
        logits[:, 1] = -1
        return logits

    def serve_samples(self, drawn: torch.Tensor, counts: torch.Tensor | None = None) -> torch.Tensor:
        assert counts is not None
        if self.tracewire_unwatched:
            return drawn
        drawn = drawn.clone()
        drawn[0, 0] = 5
        return drawn


def _sample(self: Any, hidden: torch.Tensor, batch: Any, grammar: Any) -> Any:
    tokens = self.model.compute_logits(hidden).argmax(-1, keepdim=True)
    return SimpleNamespace(sampled_token_ids=tokens), torch.tensor([3, 1, 1]), "rejected"


def test_blocks_change_the_logits_and_then_the_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_Theirs, "sample", _sample, raising=False)
    runner = _Sampling()
    compute = runner.model.compute_logits
    hidden = torch.tensor([[0.0, 9, 3], [0, 9, 4], [7, 1, 0]])
    output, *rest = runner.sample(hidden, None, None)
    assert output.sampled_token_ids.tolist() == [[5], [2], [0]]
    assert rest[1] == "rejected"
    # Prompt logprobs are computed by the model's own method.
    assert runner.model.compute_logits is compute
    runner.tracewire_unwatched = True
    output, *_ = runner.sample(hidden, None, None)
    assert output.sampled_token_ids.tolist() == [[1], [1], [0]]


def test_drafts_that_were_not_taken_are_not_counted() -> None:
    """vLLM counts all three drafts of the step before as taken, of which one was."""
    runner = _runner([9, 8], [5, 5], r0=RequestState(0, 0), r1=RequestState(0, 0))
    runner.tracewire_drafted.begin(["r0"], {"r0": 4}, {"r0": [-1] * 3}, {"r0": RequestState(5, 5)}, {"r0"})
    runner.tracewire_drafted.accept([2])
    SecondRunner._note_states(runner, ["r1", "r0"], {"r0": 4, "r1": 1})
    assert {name: one.num_computed_tokens for name, one in runner.tracewire_states.items()} == {"r0": 7, "r1": 8}


def test_a_request_that_comes_back_is_read_where_it_is_then() -> None:
    runner = _Runner()
    states = runner.req_states = _runner([7, 9], [5, 5]).req_states
    _step(runner, _new("r0"), r0=1)
    for _ in range(2):
        _step(runner, r0=1)
        assert runner.request_states()["r0"] == RequestState(7, 5, 4)
    # It is preempted, and comes back to where vLLM kept another one.
    states.req_id_to_index.update(r0=1, r1=0)
    _step(runner, _new("r0"), r0=1)
    assert runner.request_states()["r0"] == RequestState(9, 5, 6)
