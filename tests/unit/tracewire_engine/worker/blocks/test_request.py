"""A worker's record of a request: whose it is, and the order of its blocks."""

from __future__ import annotations

import pytest
from vllm import envs

import tracewire_engine  # noqa: F401 (before nnsight)
from tracewire_engine.worker.blocks.request import Request


@pytest.mark.parametrize(
    ("scheduler", "engine", "index"),
    [
        ("t1.0-0123abcd", "t1.0", 0),
        ("2_t1.0-0123abcd", "t1.0", 2),
        ("t1-0123abcd-89abcdef", "t1-0123abcd", 0),
        ("t_1-0123abcd", "t_1", 0),
        ("t1-0123ABCD", "t1-0123ABCD", 0),
    ],
)
def test_the_scheduler_s_id_tells_the_adapter_s_and_the_choice(scheduler: str, engine: str, index: int) -> None:
    request = Request(scheduler)
    assert (request.id, request.engine_id, request.index) == (scheduler, engine, index)


def test_where_vllm_appends_nothing_the_id_is_taken_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_DISABLE_REQUEST_ID_RANDOMIZATION", "1")
    assert envs.VLLM_DISABLE_REQUEST_ID_RANDOMIZATION
    assert Request("t1-0123abcd").engine_id == "t1-0123abcd"


def test_edits_come_before_the_request_s_own_block() -> None:
    request = Request("a")
    assert request.workers() == []
    assert request.saves() == {}
    request.mediator, request.copies["edit"] = "own", "edit's"
    assert request.workers() == ["edit's", "own"]
