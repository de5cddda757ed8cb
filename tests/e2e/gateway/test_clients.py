"""Clients that people use, before a real engine: pydantic-ai, curl, responses, and a second process that steers."""

from __future__ import annotations

import json
import sys
from collections.abc import AsyncIterator
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
