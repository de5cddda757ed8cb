"""Clients that people use, before a real engine: pydantic-ai, LangChain, Inspect, curl, and a process that steers."""

from __future__ import annotations

import json
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Literal

import anyio
import anyio.to_thread
import numpy as np
import openai
import pytest
from pydantic import BaseModel

import tracewire
from tests.support import ROOT
from tests.support.gateways import Served, serving
from tracewire import Client, Live, Model, Probe, Steer

MESSAGES = [{"role": "user", "content": "Say something."}]
GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 16}
DIRECTION = np.load(ROOT / "examples" / "demo_model" / "direction.npy").astype(np.float32)
INTERVENTIONS: list[dict[str, Any]] = [
    {"do": "steer", "at": "residual(4)", "vector": DIRECTION.tolist(), "scale": {"live": "alpha"}},
    {"do": "probe", "name": "projection", "at": "residual(4)", "weight": DIRECTION.tolist()},
]
DECLARED = [
    Steer("residual(4)", DIRECTION, scale=Live("alpha")),
    Probe("projection", "residual(4)", weight=DIRECTION),
]


class Numbers(BaseModel, extra="forbid"):
    """Some numbers."""

    first: Literal[1, 2, 3]
    second: Literal[4, 5, 6]


@pytest.fixture
async def served(engine_bus: str, model: Model) -> AsyncIterator[Served]:
    """A gateway of the shared engine's bus."""
    async with serving(engine_bus, "tw") as served:
        yield served


async def test_pydantic_ai_gets_text_streams_and_tool_calls(served: Served, client: Client) -> None:
    from pydantic_ai import Agent, ToolOutput
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    theirs = await client.trace("demo", messages=MESSAGES, ignore_eos=True, **GREEDY).result()
    provider = OpenAIProvider(base_url=f"{served.url}/v1", api_key="none")
    model = OpenAIChatModel("demo", provider=provider)
    settings: Any = {**GREEDY, "extra_body": {"ignore_eos": True}}
    agent = Agent(model, model_settings=settings)
    assert (await agent.run(MESSAGES[0]["content"])).output == theirs.text
    async with agent.run_stream(MESSAGES[0]["content"]) as stream:
        assert await stream.get_output() == theirs.text
    # An output type is a tool that the model must call.
    one: Any = {**GREEDY, "max_tokens": 200, "parallel_tool_calls": False}
    typed = Agent(model, output_type=ToolOutput(Numbers, strict=True), model_settings=one)
    found = (await typed.run("Give me numbers.")).output
    assert (found.first in (1, 2, 3), found.second in (4, 5, 6)) == (True, True)


async def test_langchain_gets_text_streams_tool_calls_and_saves(served: Served, client: Client) -> None:
    from langchain_openai import ChatOpenAI

    theirs = await client.trace(
        "demo", messages=MESSAGES, interventions=DECLARED, live={"alpha": 8.0}, ignore_eos=True, **GREEDY
    ).result()
    ours = {"interventions": INTERVENTIONS, "live": {"alpha": 8.0}}
    given: dict[str, Any] = {"base_url": f"{served.url}/v1", "api_key": "none", "max_retries": 0, "temperature": 0.0}
    body = {"ignore_eos": True, "tracewire": ours}
    steered = ChatOpenAI(model="demo", max_completion_tokens=16, extra_body=body, **given)
    assert (await steered.ainvoke(MESSAGES)).text == theirs.text
    parts = [part async for part in steered.astream(MESSAGES)]
    assert "".join(part.text for part in parts) == theirs.text
    # A schema is a tool that the model must call.
    plain = ChatOpenAI(model="demo", max_completion_tokens=200, **given)
    typed = plain.with_structured_output(Numbers, method="function_calling", strict=True)
    found = await typed.ainvoke("Give me numbers.")
    assert isinstance(found, Numbers)
    assert (found.first in (1, 2, 3), found.second in (4, 5, 6)) == (True, True)
    shaped = await plain.with_structured_output(Numbers, method="json_schema").ainvoke("Give me numbers.")
    assert isinstance(shaped, Numbers)


async def test_inspect_evaluates_a_steered_model(engine_bus: str, model: Model, client: Client, tmp_path: Path) -> None:
    from inspect_ai import Task, eval_async
    from inspect_ai.dataset import Sample
    from inspect_ai.log import read_eval_log_async
    from inspect_ai.model import GenerateConfig, ResponseSchema, get_model
    from inspect_ai.scorer import includes
    from inspect_ai.solver import generate
    from inspect_ai.util import json_schema

    theirs = await client.trace(
        "demo", messages=MESSAGES, interventions=DECLARED, live={"alpha": 8.0}, ignore_eos=True, **GREEDY
    ).result()
    given: dict[str, Any] = {"url": engine_bus, "interventions": DECLARED, "live": {"alpha": 8.0}, "ignore_eos": True}
    samples = [Sample(input="Say something.", target=theirs.text[:8]), Sample(input="Write a parser.", target="-")]
    async with get_model("tracewire/demo", memoize=False, **given) as evaluated:
        task = Task(samples, solver=generate(), scorer=includes())
        (log,) = await eval_async(task, model=evaluated, log_dir=str(tmp_path), logprobs=True, top_logprobs=2, **GREEDY)
        assert log.status == "success", log.error
        first, second = (await read_eval_log_async(log.location)).samples
        assert (first.output.completion, first.scores["includes"].value) == (theirs.text, "C")
        assert first.output.metadata["saves"]["projection"] == theirs.saves["projection"]
        saves = await tracewire.inspect.saves(first.output)
        assert saves["projection"] == theirs.saves["projection"]
        assert (first.output.stop_reason, first.output.usage.output_tokens) == ("max_tokens", 16)
        tokens = first.output.choices[0].logprobs.content
        assert "".join(token.token for token in tokens) == theirs.text
        assert all(token.top_logprobs[0].logprob == token.logprob for token in tokens)
        assert len(second.output.metadata["saves"]["projection"]) == 16
    schema = ResponseSchema(name="numbers", json_schema=json_schema(Numbers))
    async with get_model("tracewire/demo", memoize=False, url=engine_bus) as plain:
        config = GenerateConfig(max_tokens=200, temperature=0.0, response_schema=schema)
        shaped = await plain.generate("Give me numbers.", config=config)
        assert (Numbers.model_validate_json(shaped.completion).first in (1, 2, 3), shaped.stop_reason) == (True, "stop")
        several = await plain.generate("Give me numbers.", config=GenerateConfig(max_tokens=4, seed=1, num_choices=2))
        assert (len(several.choices), several.usage.output_tokens) == (2, 8)


async def test_curl_gets_a_steered_chat_and_its_saves(served: Served, client: Client) -> None:
    theirs = await client.trace(
        "demo", messages=MESSAGES, interventions=DECLARED, live={"alpha": 8.0}, ignore_eos=True, **GREEDY
    ).result()
    ours = {"interventions": INTERVENTIONS, "live": {"alpha": 8.0}}
    body = json.dumps({"model": "demo", "messages": MESSAGES, "ignore_eos": True, "tracewire": ours, **GREEDY})
    command = ["curl", "-sN", f"{served.url}/v1/chat/completions", "-H", "Content-Type: application/json", "-d", body]
    (choice,) = json.loads((await anyio.run_process(command)).stdout)["choices"]
    assert choice["message"]["content"] == theirs.text == theirs.message.content
    assert choice["tracewire"]["saves"]["projection"] == theirs.saves["projection"]


async def test_the_stock_client_gets_responses(served: Served, client: Client) -> None:
    theirs = await client.trace("demo", messages=MESSAGES, ignore_eos=True, **GREEDY).result()
    asked: dict[str, Any] = {"model": "demo", "input": MESSAGES[0]["content"], "temperature": 0.0}
    asked |= {"max_output_tokens": 16, "extra_body": {"ignore_eos": True}}
    tool: Any = {"type": "function", "name": "numbers", "parameters": Numbers.model_json_schema(), "strict": True}

    def sync() -> tuple[Any, list[Any]]:
        with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as api:
            return api.responses.create(**asked), list(api.responses.create(**asked, stream=True))

    async with served.openai() as api:
        answer = await api.responses.create(**asked)
        again, events = await anyio.to_thread.run_sync(sync)
        assert answer.output_text == again.output_text == events[-1].response.output_text == theirs.text
        deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
        assert "".join(deltas) == theirs.text
        assert (answer.status, events[-1].type) == ("incomplete", "response.incomplete")
        assert (await api.responses.retrieve(answer.id)).output_text == theirs.text
        request: dict[str, Any] = {**asked, "tools": [tool], "tool_choice": "required", "max_output_tokens": 200}
        called = await api.responses.create(**request | {"extra_body": {}, "parallel_tool_calls": False})
        (call,) = called.output
        assert (call.type, call.name, called.status) == ("function_call", "numbers", "completed")
        assert Numbers.model_validate_json(call.arguments)


#: A second process: it waits for a token of a trace, steers, and says from which token on that holds.
STEERS = """
import asyncio, sys, tracewire
async def main(url, trace_id):
    async with tracewire.connect(url, name="second") as client:
        version = 0
        async for event in client.subscribe(trace_id):
            if event.type == "output" and event.index >= 5 and not version:
                version = await client.steer(trace_id, alpha=8.0)
            if event.type == "steered":
                print(event.version, event.first_token(), event.changes[-1].by)
                return
asyncio.run(main(*sys.argv[1:]))
"""


@pytest.mark.parametrize("kind", ["chat", "responses"])
async def test_a_second_process_steers_an_answer_in_the_middle(
    kind: str, served: Served, client: Client, engine_bus: str
) -> None:
    more = {"ignore_eos": True, "tracewire": {"interventions": INTERVENTIONS, "live": {"alpha": 0.0}}}
    told: list[str] = []
    events: list[dict[str, Any]] = []
    projections: list[float] = []

    async def steer(trace_id: str) -> None:
        done = await anyio.run_process([sys.executable, "-c", STEERS, engine_bus, trace_id])
        told.append(done.stdout.decode())

    async with served.openai() as api, anyio.create_task_group() as group:
        if kind == "chat":
            stream: Any = await api.chat.completions.create(
                model="demo", messages=MESSAGES, stream=True, max_tokens=1500, temperature=0.0, extra_body=more
            )
        else:
            stream = await api.responses.create(
                model="demo", input=MESSAGES, stream=True, max_output_tokens=1500, temperature=0.0, extra_body=more
            )
        trace_id = stream.response.headers["Tracewire-Trace-Id"]
        group.start_soon(steer, trace_id)
        async for part in stream:
            about = getattr(part, "tracewire", None) or {}
            events += [about["event"]] if "event" in about else []
            projections += about.get("delta", {}).get("projection", [])
    (steered,) = events
    first = steered["first"][0]["index"]
    assert first > 5
    assert told == [f"1 {first} second\n"]
    (seen,) = [event async for event in client.subscribe(trace_id) if isinstance(event, tracewire.Steered)]
    assert (seen.version, seen.first_token()) == (1, first)
    # The first token under the change is the first whose projection has moved.
    plain = await client.trace(
        "demo", messages=MESSAGES, interventions=DECLARED[1:], temperature=0.0, max_tokens=first + 1, ignore_eos=True
    ).result()
    assert projections[:first] == pytest.approx(plain.saves["projection"][:first], abs=0.1)
    moved = projections[first] - plain.saves["projection"][first]
    assert moved == pytest.approx(8.0 * float(DIRECTION @ DIRECTION), rel=0.05)
