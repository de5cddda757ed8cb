"""OpenAI's API over a scripted engine, by the stock client."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import openai
import pytest

from tests.support.bus_engine import Stage, tiny
from tests.support.gateways import Served
from tracewire_bus.wire.messages import Failure

Engine = Callable[..., Any]


async def test_models_are_those_that_engines_serve(engine: Engine, served: Served) -> None:
    async with engine(loras=["poet"]), served.openai() as api:
        models = (await api.models.list()).data
        assert [(model.id, model.parent) for model in models] == [("tiny", None), ("poet", "tiny")]
        one = await api.models.retrieve("tiny")
        assert (one.id, one.max_model_len, one.tracewire["layers"]) == ("tiny", 128, 4)
        with pytest.raises(openai.NotFoundError, match="no engine serves the model 'other'"):
            await api.models.retrieve("other")


async def test_a_completion_is_a_trace(engine: Engine, served: Served, client: Any) -> None:
    async with engine(tiny) as scripted, served.openai() as api:
        raw = await api.completions.with_raw_response.create(
            model="tiny", prompt="count", max_tokens=3, temperature=0.5, stop=["x"], logit_bias={"7": -1}
        )
        answer = raw.parse()
        trace_id = raw.headers["Tracewire-Trace-Id"]
        assert answer.id == f"cmpl-{trace_id}"
        (choice,) = answer.choices
        assert (choice.text, choice.finish_reason, choice.index) == ("one two three", "length", 0)
        assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (3, 3, 6)
        assert answer.tracewire["trace_id"] == trace_id
        (taken,) = scripted.taken
        (invoke,) = taken.invokes
        assert (taken.trace, taken.detach, taken.client) == (trace_id, False, "anonymous")
        assert invoke.prompt == "count"
        assert invoke.sampling == {"max_tokens": 3, "temperature": 0.5, "stop": ["x"], "logit_bias": {7: -1.0}}
        # Anybody can read it afterwards.
        assert (await client.subscribe(trace_id).result()).text == "one two three"
