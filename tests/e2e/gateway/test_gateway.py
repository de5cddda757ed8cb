"""The gateway before a real engine: the same text, saves and steering as through the SDK."""

from __future__ import annotations

import base64
import json
from collections.abc import AsyncIterator
from typing import Any

import anyio
import numpy as np
import openai
import pytest

import tracewire
from tests.support import ROOT
from tests.support.gateways import Served, serving
from tests.support.sse import events
from tracewire import Client, Live, Model, Probe, Steer

PROMPT = "def parse(text):"
GREEDY = {"temperature": 0.0, "max_tokens": 24}
DIRECTION = np.load(ROOT / "examples" / "demo_model" / "direction.npy").astype(np.float32)
INTERVENTIONS: list[dict[str, Any]] = [
    {"do": "steer", "at": "residual(4)", "vector": DIRECTION.tolist(), "scale": {"live": "alpha"}},
    {"do": "probe", "name": "projection", "at": "residual(4)", "weight": DIRECTION.tolist()},
    {"do": "probe", "name": "stream", "at": "residual(3)"},
]
DECLARED = [
    Steer("residual(4)", DIRECTION, scale=Live("alpha")),
    Probe("projection", "residual(4)", weight=DIRECTION),
    Probe("stream", "residual(3)"),
]


@pytest.fixture
async def served(engine_bus: str, model: Model) -> AsyncIterator[Served]:
    """A gateway of the shared engine's bus."""
    async with serving(engine_bus, "tw") as served:
        yield served


@pytest.fixture
async def api(served: Served) -> AsyncIterator[openai.AsyncOpenAI]:
    """The stock client of it."""
    async with served.openai() as api:
        yield api


def ours(**extension: Any) -> dict[str, Any]:
    return {"ignore_eos": True, "tracewire": extension}


async def test_a_completion_has_the_text_and_the_logprobs_of_the_sdk(api: openai.AsyncOpenAI, client: Client) -> None:
    theirs = await client.trace("demo", PROMPT, ignore_eos=True, logprobs=2, **GREEDY).result()
    answer = await api.completions.create(
        model="demo", prompt=PROMPT, logprobs=2, extra_body={"ignore_eos": True, "return_token_ids": True}, **GREEDY
    )
    (choice,) = answer.choices
    assert (choice.text, choice.finish_reason, choice.token_ids) == (theirs.text, "length", theirs.token_ids)
    assert "".join(choice.logprobs.tokens) == theirs.text
    assert [max(top.values()) for top in choice.logprobs.top_logprobs] == choice.logprobs.token_logprobs
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (theirs.usage.prompt_tokens, 24)
    text = ""
    async for chunk in await api.completions.create(
        model="demo", prompt=PROMPT, stream=True, extra_body={"ignore_eos": True}, **GREEDY
    ):
        text += chunk.choices[0].text
    assert text == theirs.text


async def test_a_chat_has_the_text_of_the_sdk(api: openai.AsyncOpenAI, client: Client) -> None:
    messages = [{"role": "user", "content": "Say hello."}]
    theirs = await client.trace("demo", messages, ignore_eos=True, **GREEDY).result()
    answer = await api.chat.completions.create(
        model="demo", messages=messages, extra_body={"ignore_eos": True}, **GREEDY
    )
    assert answer.choices[0].message.content == theirs.text


async def test_saves_are_those_of_the_sdk(api: openai.AsyncOpenAI, client: Client) -> None:
    theirs = await client.trace(
        "demo", PROMPT, interventions=DECLARED, live={"alpha": 8.0}, ignore_eos=True, **GREEDY
    ).result()
    body = ours(interventions=INTERVENTIONS, live={"alpha": 8.0}, arrays="base64")
    answer = await api.completions.create(model="demo", prompt=PROMPT, extra_body=body, **GREEDY)
    assert answer.choices[0].text == theirs.text
    saves = answer.choices[0].tracewire["saves"]
    assert saves["projection"] == theirs.saves["projection"]
    for one, other in zip(saves["stream"], theirs.saves["stream"], strict=True):
        assert base64.b64decode(one["base64"]) == other.tobytes()
    # The same in a stream, a step at a time.
    projections: list[float] = []
    async for chunk in await api.completions.create(
        model="demo", prompt=PROMPT, stream=True, extra_body=body, **GREEDY
    ):
        projections += chunk.tracewire.get("delta", {}).get("projection", [])
    assert projections == theirs.saves["projection"]


async def test_an_answer_is_steered_by_another_client(api: openai.AsyncOpenAI, served: Served, client: Client) -> None:
    body = ours(interventions=INTERVENTIONS[:2], live={"alpha": 0.0})
    stream = await api.completions.create(
        model="demo", prompt=PROMPT, stream=True, extra_body=body, temperature=0.0, max_tokens=200
    )
    version = None
    parts = []
    async with served.http() as http:
        async for chunk in stream:
            parts.append(chunk.tracewire)
            if version is None and chunk.tracewire.get("index", 0) >= 5:
                trace_id = chunk.id.removeprefix("cmpl-")
                answer = await http.post(f"/traces/{trace_id}/steer", json={"values": {"alpha": 8.0}})
                version = answer.json()["version"]
        (event,) = [part["event"] for part in parts if "event" in part]
        first = event["first"][0]["index"]
        # As the SDK's own consumers read it.
        steered = [one async for one in client.subscribe(trace_id) if isinstance(one, tracewire.Steered)]
        assert [(one.version, one.first_token()) for one in steered] == [(version, first)] == [(1, first)]
        assert first > 5
        # Up to that token all is as without steering. From it on, the projection is greater by as much as was steered.
        plain = await client.trace(
            "demo", PROMPT, interventions=DECLARED[1:2], temperature=0.0, max_tokens=first + 1, ignore_eos=True
        ).result()
        projections = [value for part in parts for value in part.get("delta", {}).get("projection", [])]
        assert projections[:first] == pytest.approx(plain.saves["projection"][:first], abs=0.1)
        moved = projections[first] - plain.saves["projection"][first]
        assert moved == pytest.approx(8.0 * float(DIRECTION @ DIRECTION), rel=0.05)
        async with http.stream("GET", f"/traces/{trace_id}/events", params={"content": "text"}) as followed:
            text = "".join([one.data["text"] async for one in events(followed) if one.name == "output"])
        assert text == (await client.get_state(trace_id)).text


async def test_a_block_runs_and_its_error_names_its_line(api: openai.AsyncOpenAI, client: Client) -> None:
    source = (
        "norms = list().save()\n"
        "for step in tracer.iter[:]:\n"
        "    norms.append(model.residual(2).output[-1].norm().item())\n"
    )
    body = ours(block={"source": source, "name": "watch"})
    answer = await api.completions.create(model="demo", prompt=PROMPT, extra_body=body, **GREEDY)
    norms = answer.choices[0].tracewire["saves"]["norms"]
    assert len(norms) == 24
    assert all(norm > 0 for norm in norms)
    broken = ours(block={"source": "model.residual(2).output[-1].norm() + 'x'\n", "filename": "mine.py"})
    with pytest.raises(openai.BadRequestError, match="TypeError") as caught:
        await api.completions.create(model="demo", prompt=PROMPT, extra_body=broken, **GREEDY)
    assert (caught.value.body["tracewire"]["filename"], caught.value.body["tracewire"]["line"]) == ("mine.py", 1)


async def test_vllms_refusals_name_the_field(api: openai.AsyncOpenAI) -> None:
    for given, param in (
        ({"temperature": -1.0}, "temperature"),
        ({"top_p": 2.0}, "top_p"),
        ({"extra_body": {"structured_outputs": {"jsn": {}}}}, "structured_outputs.jsn"),
    ):
        for stream in (False, True):
            with pytest.raises(openai.BadRequestError) as caught:
                await api.completions.create(model="demo", prompt=PROMPT, stream=stream, **given)
            assert caught.value.param == param


async def test_a_schema_constrains_the_text(api: openai.AsyncOpenAI) -> None:
    schema = {"type": "object", "properties": {"x": {"enum": [1, 2]}}, "required": ["x"], "additionalProperties": False}
    answer = await api.chat.completions.create(
        model="demo",
        messages=[{"role": "user", "content": "x"}],
        response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": schema}},
        max_tokens=60,
        temperature=0.0,
    )
    assert json.loads(answer.choices[0].message.content)["x"] in (1, 2)


async def test_curl_is_enough(served: Served, client: Client) -> None:
    theirs = await client.trace("demo", PROMPT, **GREEDY).result()
    body = json.dumps({"model": "demo", "prompt": PROMPT, **GREEDY})
    command = ["curl", "-sN", f"{served.url}/v1/completions", "-H", "Content-Type: application/json", "-d", body]
    done = await anyio.run_process(command)
    assert json.loads(done.stdout)["choices"][0]["text"] == theirs.text
