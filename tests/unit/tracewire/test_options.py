"""A keyword that there is not is refused before anything is sent, with the nearest one."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest

import tracewire
from tests.support.bus_engine import BusEngine, engine_info, tiny
from tracewire import Client, Prompt, SamplingOptions, UnknownOption
from tracewire.submission import Settings, make_submission
from tracewire_engine.adapter.sampling import FIELDS, RESERVED

TYPOS: dict[str, tuple[Callable[[Client, tracewire.Model], Any], str, str | None]] = {
    "an option": (lambda client, model: client.trace(model, "a", dedline=3), "dedline", "deadline"),
    "a sampling param": (lambda client, model: client.trace(model, "a", max_token=3), "max_token", "max_tokens"),
    "of a prompt": (lambda client, model: Prompt("a", temprature=3), "temprature", "temperature"),
    "of a with": (lambda client, model: model.trace("a", max_new_token=3), "max_new_token", "max_new_tokens"),
    "nothing alike": (lambda client, model: client.trace(model, "a", zzz=3), "zzz", None),
}


@pytest.mark.parametrize("case", TYPOS)
async def test_a_keyword_that_there_is_not(embedded: str, prefix: str, case: str) -> None:
    call, name, nearest = TYPOS[case]
    async with (
        BusEngine.running(embedded, prefix, tiny, engine_info()) as serving,
        tracewire.connect(embedded, prefix=prefix) as client,
    ):
        model = await client.models.get("tiny")
        with pytest.raises(TypeError) as caught:
            call(client, model)
        assert serving.taken == []
    error = caught.value
    assert isinstance(error, UnknownOption)
    assert isinstance(error, tracewire.TraceRejected)
    assert (error.field, error.name, error.nearest) == (name, name, nearest)
    assert ("did you mean" in str(error)) is (nearest is not None)


async def test_what_is_given_arrives(embedded: str, prefix: str) -> None:
    async with (
        BusEngine.running(embedded, prefix, tiny, engine_info(loras=["l"])) as serving,
        tracewire.connect(embedded, prefix=prefix) as client,
    ):
        prompts = ["a", Prompt("b", temperature=0.5, extra_sampling={"newer": [1]})]
        trace = client.trace("tiny", prompts=prompts, max_tokens=3, deadline=timedelta(minutes=1), lora="l")
        async with trace:
            await trace.result()
    (submission,) = serving.taken
    assert submission.deadline_s == 60
    assert [invoke.lora for invoke in submission.invokes] == ["l", "l"]
    assert [invoke.sampling for invoke in submission.invokes] == [
        {"max_tokens": 3},
        {"max_tokens": 3, "temperature": 0.5, "newer": [1]},
    ]


def test_extra_sampling_is_a_dict() -> None:
    with pytest.raises(tracewire.TraceRejected, match="extra_sampling: expected a dict"):
        make_submission("me", "tiny", "a", None, Settings(), {"extra_sampling": [1]})


def test_all_sampling_params_of_vllm_that_the_engine_takes_are_typed() -> None:
    taken = set(FIELDS) - RESERVED
    assert taken <= SamplingOptions.__optional_keys__
