"""Results of traces as Inspect's outputs. Scripted engines play what a real one seldom does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from inspect_ai.model import ContentReasoning, ContentText, ModelOutput

from tests.support.bus_engine import Script, Stage
from tracewire import Client, Gap, Output
from tracewire.inspect.answers import TokenLogprobs, output_of
from tracewire_bus.wire.messages import MessageDelta, ToolCallDelta

MESSAGES = [{"role": "user", "content": "hello"}]


@pytest.fixture
def answered(engine: Callable[..., Any], client: Client) -> Callable[..., Any]:
    """The output of a generation that a script plays."""

    async def generate(script: Script, **options: Any) -> ModelOutput:
        async with engine(script), client.trace("tiny", messages=MESSAGES, **options) as trace:
            logprobs = TokenLogprobs()
            async for item in trace:
                logprobs.add(item)
            result = await trace.result()
        top = options.get("logprobs")
        return output_of(
            "tiny",
            result,
            max_tokens=options.get("max_tokens"),
            logprobs=None if top is None else logprobs,
            top=top or 0,
            where={"url": "redis://there", "prefix": "tw"},
        )

    return generate


def ends(reason: str | None, status: str = "finished") -> Script:
    """Two tokens, and an end."""

    async def script(stage: Stage) -> None:
        await stage.accept()
        await stage.save("a", {"norms": 1.5})
        await stage.save("b", {"norms": 2.5}, finish_reason=reason)
        await stage.final(status)

    return script


@pytest.mark.parametrize(
    ("reason", "status", "most", "stop_reason"),
    [
        ("stop", "finished", 9, "stop"),
        ("length", "finished", 2, "max_tokens"),
        ("length", "finished", 9, "model_length"),
        ("length", "finished", None, "model_length"),
        ("repetition", "finished", 9, "unknown"),
        ("abort", "stopped", 9, "stop"),
    ],
)
async def test_the_reason_for_the_end(
    answered: Callable[..., Any], reason: str, status: str, most: int | None, stop_reason: str
) -> None:
    output = await answered(ends(reason, status), max_tokens=most)
    assert (output.stop_reason, output.completion, output.model) == (stop_reason, "ab", "tiny")
    assert output.usage is not None
    assert (output.usage.input_tokens, output.usage.output_tokens, output.usage.total_tokens) == (3, 2, 5)
    assert output.metadata == {
        "trace_id": output.response_id,
        "url": "redis://there",
        "prefix": "tw",
        "saves": {"norms": [1.5, 2.5]},
    }


async def test_reasoning_and_tool_calls(answered: Callable[..., Any]) -> None:
    async def script(stage: Stage) -> None:
        await stage.accept()
        await stage.output("a", message=MessageDelta(reasoning="hm", content="so"))
        for index, (name, text) in enumerate([("add", '{"x": 1}'), ("add", "[1]"), ("add", '{"x"'), ("go", "")]):
            call = ToolCallDelta(index=index, id=f"c{index}", name=name, arguments=text)
            await stage.output("b", message=MessageDelta(tool_calls=[call]))
        await stage.output("", finish_reason="stop")
        await stage.final()

    output = await answered(script)
    assert output.message.content == [ContentReasoning(reasoning="hm"), ContentText(text="so")]
    assert output.stop_reason == "tool_calls"
    first, no_object, no_json, empty = output.message.tool_calls
    assert (first.id, first.function, first.arguments, first.parse_error) == ("c0", "add", {"x": 1}, None)
    assert no_object.parse_error == "expected the arguments as a JSON object, got [1]"
    assert no_json.parse_error.startswith('expected the arguments as a JSON object, got {"x": ')
    assert (empty.arguments, empty.parse_error) == ({}, None)


async def test_choices_have_their_own_saves_and_log_probabilities(answered: Callable[..., Any]) -> None:
    async def script(stage: Stage) -> None:
        await stage.accept()
        for choice in range(2):
            logprobs = [{100: (-0.5, 1, "a"), 7: (-1.5, 2, "é")}]
            await stage.save("a", {"p": 1.0 + choice}, choice=choice, logprobs=logprobs, finish_reason="stop")
        await stage.final()

    output = await answered(script, n=2, logprobs=2)
    assert [one.message.text for one in output.choices] == ["a", "a"]
    assert output.metadata["saves"] == {"p": [1.0]}
    assert output.metadata["choice_saves"] == [{"p": [1.0]}, {"p": [2.0]}]
    for one in output.choices:
        (token,) = one.logprobs.content
        assert (token.token, token.logprob, token.bytes) == ("a", -0.5, [97])
        assert [(top.token, top.logprob) for top in token.top_logprobs] == [("a", -0.5), ("é", -1.5)]
    (bare,) = (await answered(script, logprobs=0, n=2)).choices[0].logprobs.content
    assert bare.top_logprobs is None


async def test_a_second_attempt_has_its_own_log_probabilities(answered: Callable[..., Any]) -> None:
    async def script(stage: Stage) -> None:
        await stage.accept()
        await stage.output("a", logprobs=[{100: (-0.5, 1, "a")}])
        await stage.restart()
        await stage.accept()
        await stage.output("b", logprobs=[{100: (-0.25, 1, "b")}], finish_reason="stop")
        await stage.final()

    output = await answered(script, logprobs=1)
    assert [one.token for one in output.choices[0].logprobs.content] == ["b"]


async def test_what_a_trace_tells_beside_its_saves(answered: Callable[..., Any], client: Client) -> None:
    async def script(stage: Stage) -> None:
        await stage.accept()
        await client.steer(stage.trace, alpha=2.0)
        await stage.steered()
        await stage.output("a", finish_reason="stop")
        await stage.final(save_errors={"0.0.graph": "it cannot travel"})

    output = await answered(script, live={"alpha": 1.0})
    assert (output.metadata["live_version"], output.metadata["saves"]) == (1, {})
    assert output.metadata["save_errors"] == {"0.0.graph": "it cannot travel"}


def test_without_all_tokens_there_are_no_log_probabilities() -> None:
    logprobs = TokenLogprobs()
    logprobs.add(Output(attempt=1, seq=1, token_ids=[100], logprobs=[{100: (-0.5, 1, "a")}]))
    assert logprobs.of(0, 0) is not None
    assert logprobs.of(1, 0) is None
    logprobs.add(Gap.__new__(Gap))
    assert logprobs.of(0, 0) is None
