"""Requests of plain clients of the HTTP API: which edits they ask for, and what they may not bring."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from tests.support.standing_edits import PlayedClient, standing
from tracewire_bus.bus import Bus
from tracewire_bus.domain.intervention_checks import normalize
from tracewire_bus.wire.messages import AttentionPattern, Failure, Steer
from tracewire_engine.adapter.http_requests import EditedClient, PlainRequests, _arguments, _asked
from tracewire_engine.adapter.report_router import ReportRouter
from tracewire_engine.adapter.runner_bounds import RunnerBounds
from tracewire_engine.adapter.standing_edits import RequestEdits, RunnableEdit
from tracewire_engine.protocol.keys import DECLARED_ARG, DRAFTS_ARG, EDITS_ARG
from tracewire_engine.protocol.messages import EditBlock, FinishRecord, Placed

#: A runner that takes everything.
NO_BOUNDS: Any = SimpleNamespace(check=lambda params, where: None)


async def test_a_plain_client_ends_its_own_requests_only(bus: Bus) -> None:
    """vLLM's server aborts whatever it is given the name of, and an engine's own names are short."""
    edits = await standing(bus, scope="asked")
    ended: list[int] = []
    plain = PlainRequests(bus, edits, ReportRouter(None, {}, 0), {}, "e", lambda: ended.append(plain.running))
    played = PlayedClient()
    client: Any = EditedClient(played, plain, NO_BOUNDS)
    params = SimpleNamespace(extra_args=None)
    outputs = [client.generate("hello", params, "t0"), client.generate("hello", params, "t0")]
    assert [(await anext(one)).request_id for one in outputs] == ["t0", "t0"]
    assert [name for kind, name in played.asked if kind == "generate"] == ["o0", "o1"]
    assert plain.running == 2
    await client.abort(["t1", "o0"])
    await client.abort("t0")
    for one in outputs:
        await one.aclose()
    await client.abort("t0")
    assert played.asked[2:] == [("abort", ["o0", "o1"]), ("over", "o0"), ("over", "o1")]
    assert ended == [1, 0]
    assert not plain.busy


async def test_what_the_runner_does_not_take_is_the_client_s_error(bus: Bus) -> None:
    plain = PlainRequests(bus, await standing(bus), ReportRouter(None, {}, 0), {}, "e", lambda: None)
    llm = SimpleNamespace(vllm_config=SimpleNamespace(use_v2_model_runner=False))
    client, params = EditedClient(PlayedClient(), plain, RunnerBounds(llm)), SimpleNamespace(extra_args=None)
    params.seed, params.n = 2**63 - 1, 2
    with pytest.raises(ValueError, match=r"^seed: expected an integer from .* to 9223372036854775806, got"):
        client.generate("hello", params, "cmpl-1")
    assert not plain.busy


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"nnsight_mediator": "gA=="}, "nnsight_mediator: clients cannot set this argument"),
        ({"tracewire_block": "gA=="}, "tracewire_block: clients cannot set this argument"),
        ({"tracewire_edits": 3}, "expected a list of names"),
        ({"tracewire_edits": ["b"]}, "no edit 'b' is installed"),
    ],
)
async def test_what_a_plain_client_may_not_bring(bus: Bus, extra: dict[str, Any], message: str) -> None:
    edits = await standing(bus)
    plain = PlainRequests(bus, edits, ReportRouter(None, {}, 0), {}, "e", lambda: None)
    params = SimpleNamespace(extra_args=extra)
    params.clone = lambda: SimpleNamespace(extra_args=extra)
    with pytest.raises(ValueError, match=message):
        EditedClient(PlayedClient(), plain, NO_BOUNDS).generate("hello", params, "cmpl-1")
    assert not plain.busy


@pytest.mark.parametrize("asked", [["calm", "b"], "calm,b", " calm , b,"])
def test_edits_are_asked_for_by_a_list_or_by_one_string(asked: Any) -> None:
    params = SimpleNamespace(extra_args={"tracewire_edits": asked, "other": 1})
    params.clone = lambda: SimpleNamespace(extra_args=params.extra_args)
    names, left = _asked(params)
    assert names == ["calm", "b"]
    assert left.extra_args == {"other": 1}


def test_a_request_under_declared_edits_alone_may_be_drafted() -> None:
    steer, pattern = (
        msgspec.Raw(msgspec.msgpack.encode(Placed(one, [("layer.1.output", True)], False)))
        for one in normalize([Steer("", [1.0]), AttentionPattern("pattern", "")])
    )
    block = EditBlock(name="guard", block=msgspec.Raw(b"\xc0"), fatal=True)

    def found(block: EditBlock | None, *placed: msgspec.Raw) -> set[str]:
        return set(_arguments(RequestEdits([RunnableEdit("one", 1, "all", True, 10, block, list(placed), False)])))

    assert found(None, steer) == {DECLARED_ARG, DRAFTS_ARG}
    assert found(None, steer, pattern) == {DECLARED_ARG}
    assert found(block, steer) == {DECLARED_ARG, EDITS_ARG}
    assert found(block) == {EDITS_ARG}


@pytest.mark.parametrize("counted", [True, False])
async def test_a_client_learns_which_edit_ended_its_request_wherever_the_abort_came(bus: Bus, counted: bool) -> None:
    """The step in which an edit raises may sample a token that the aborted request does not have."""
    block = EditBlock(name="guard", block=msgspec.Raw(b"\xc0"), fatal=True)
    chosen = RequestEdits([RunnableEdit("guard", 1, "all", True, 10, block, [], False)])
    plain = PlainRequests(bus, await standing(bus), ReportRouter(None, {}, 0), {}, "e", lambda: None)
    one = plain.edited("o0", "cmpl-1", chosen, 1)
    record = FinishRecord("o0", 0, msgspec.Raw(b"\x90"), tokens=2)
    record.edit_errors = {"guard": Failure(type="ValueError", message="boom")}
    if counted:
        record.error = Failure(type="ValueError", message="edit 'guard': boom")
    one.pending.finish(record)
    assert await one.failure() == "edit 'guard': boom"
