"""The state of a trace, while it runs and at its end."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import anyio
import pytest

from tests.support.bus_engine import Stage
from tests.support.clients import collected, texts, watch
from tracewire import AmbiguousResult, Client, Prompt, SaveMissing


async def test_the_state_of_a_trace_while_it_is_read(client: Client, engine: Callable[..., Any]) -> None:
    async with engine(), client.trace("tiny", "hello") as trace:
        assert trace.state().saves == {}
        seen = []
        async for output in trace:
            state = trace.state()
            seen.append((state.text, len(state.saves["scores"]), state.status))
            state.saves["scores"].clear()
            assert state.position == output.id
        assert seen == [("one", 1, None), ("one two", 2, None), ("one two three", 3, None)]
        assert trace.state().finished


async def test_a_state_shows_its_own_event_whenever_it_is_asked(client: Client, engine: Callable[..., Any]) -> None:
    async with engine(), client.trace("tiny", "hello") as trace:
        states = [trace.state(), *[trace.state() async for _ in trace]]
        # Nothing was made of these saves before.
        assert [len(state.saves.get("scores", ())) for state in states] == [0, 1, 2, 3]
        assert [state.text for state in states] == ["", "one", "one two", "one two three"]
        assert states[-1].saves is states[-1].saves
        assert states[-1].digest() == (await trace.result()).digest() != states[1].digest()


async def test_several_prompts_and_choices(client: Client, engine: Callable[..., Any]) -> None:
    async def script(stage: Stage) -> None:
        await stage.accept()
        for invoke, each in enumerate(stage.submission.invokes):
            for choice in reversed(range(each.sampling.get("n", 1))):
                await stage.save(f"{invoke}{choice}", {"where": [invoke, choice]}, invoke=invoke, choice=choice)
        await stage.final()

    async with engine(script):
        async with client.trace("tiny", prompts=["a", Prompt("b", n=3)], block=watch) as trace:
            await anext(trace)
            early = trace.state()
            assert [len(invoke.choices) for invoke in early.invokes] == [1, 3]
            assert early.invokes[1].choices[2].text == ""
            result = await trace.result()
        assert [[choice.text for choice in invoke.choices] for invoke in result.invokes] == [
            ["00"],
            ["10", "11", "12"],
        ]
        assert result.invokes[1].choices[2].saves == {"where": [[1, 2]]}
        for name in ("text", "token_ids", "saves", "finish_reason"):
            with pytest.raises(
                AmbiguousResult, match=rf"2 prompts and 4 choices: ask .invokes\[i\].choices\[j\].{name}"
            ):
                getattr(result, name)


async def test_the_state_now_while_a_trace_runs(client: Client, engine: Callable[..., Any]) -> None:
    gate = anyio.Event()

    async def script(stage: Stage) -> None:
        await stage.accept()
        for number in range(300):
            await stage.save("x", {"n": number})
        await gate.wait()
        await stage.save("y", {"n": 300})
        await stage.final()

    async with engine(script), client.trace("tiny", "hello") as trace:
        for _ in range(300):
            await anext(trace)
        state = await client.get_state(trace.id)
        assert state.status is None
        assert not state.finished
        assert state.saves["n"] == list(range(300))
        gate.set()
        rest = await collected(client.subscribe(trace.id, since=state.position))
        assert texts(rest) == ["y"]
        final = await client.get_state(trace.id)
        assert final.finished
        assert final.saves == (await trace.result()).saves
        assert final.digest() == (await trace.result()).digest()


async def saving(stage: Stage) -> None:
    """One token that saves a value, and one save that could not travel."""
    await stage.accept()
    await stage.save("one", {"projection": 1.5})
    await stage.final(save_errors={"0.0.model": "a value of type Llama cannot travel"})


async def test_a_save_that_is_missing_says_why(client: Client, engine: Callable[..., Any]) -> None:
    async with engine(saving), client.trace("tiny", "hello") as trace:
        result = await trace.result()
    assert result.saves == {"projection": [1.5]}
    with pytest.raises(KeyError, match=r"'model' could not be sent: a value of type Llama cannot travel"):
        _ = result.saves["model"]
    with pytest.raises(SaveMissing, match=r"did you mean 'projection'\?$") as caught:
        _ = result.invokes[0].choices[0].saves["projction"]
    assert (caught.value.name, caught.value.reason) == ("projction", "")
    assert result.saves.get("model") is None
    with pytest.raises(SaveMissing, match="nothing as 'rows'"):
        _ = result.shared["rows"]
