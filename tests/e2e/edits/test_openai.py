"""Standing interventions on requests of plain OpenAI clients, which know nothing of them: the engine's HTTP API."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import anyio
import httpx
import numpy as np
import openai
import pytest

import tracewire
from tests.support.blocks import edits as blocks
from tracewire import Client, Edits, Probe

PROMPT = "def add(a, b):\n    return"
MODEL = "demo"
GREEDY = {"temperature": 0.0, "max_tokens": 5, "extra_body": {"ignore_eos": True}}
PATIENCE = 60


@pytest.fixture
async def url(client: Client) -> str:
    """Where the shared engine serves HTTP."""
    await client.models.get(MODEL, timeout=PATIENCE)
    (engine,) = [one for one in await client._session.open_bus().registry.list() if one.model == MODEL]
    return engine.openai


@pytest.fixture
async def api(url: str) -> AsyncIterator[openai.AsyncOpenAI]:
    """A plain client of it."""
    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=PATIENCE) as api:
        yield api


async def complete(api: openai.AsyncOpenAI, prompt: str = PROMPT, asked: Any = None, **options: Any) -> Any:
    given = {**GREEDY, **options}
    if asked is not None:
        given["extra_body"] = {**given["extra_body"], "vllm_xargs": {"tracewire_edits": asked}}
    return await api.completions.create(model=MODEL, prompt=prompt, **given)


async def trace(client: Client, block: Any = None, **options: Any) -> Any:
    given = {"temperature": 0.0, "ignore_eos": True, "max_tokens": 5, **options}
    async with client.trace(MODEL, PROMPT, block, **given) as trace:
        return await trace.result()


async def test_a_plain_request_is_answered_as_by_vllm(client: Client, edits: Edits, api: openai.AsyncOpenAI) -> None:
    assert [model.id for model in (await api.models.list()).data] == [MODEL]
    answer = await complete(api)
    same = await trace(client)
    assert answer.choices[0].text == same.text
    assert answer.usage.completion_tokens == 5
    assert answer.choices[0].finish_reason == "length"


async def test_an_edit_runs_on_it_and_what_it_saves_comes_from_its_stream(
    client: Client, edits: Edits, api: openai.AsyncOpenAI
) -> None:
    plain = await complete(api)
    own = await trace(client, blocks.watch)
    standing = await edits.install("seen", blocks.watch)
    async with edits.watch("seen") as told:
        answer = await complete(api)
        item = await anext(told)
    assert answer.choices[0].text == plain.choices[0].text
    assert item.request.startswith(answer.id)
    assert (item.edit, item.version, item.choice, item.trace_id) == ("seen", standing.version, 0, "")
    assert (item.tokens, item.finish_reason, item.error, item.dropped) == (5, "length", None, "")
    assert item.engine in standing.engines
    assert set(item.saves) == {"hidden"}
    for vector, wanted in zip(item.saves["hidden"], own.saves["hidden"], strict=True):
        assert np.array_equal(vector, wanted)


async def test_an_edit_changes_what_it_answers_until_it_is_removed(edits: Edits, api: openai.AsyncOpenAI) -> None:
    before = await complete(api)
    await edits.install("bent", blocks.fill(value=3.0))
    during = await complete(api)
    await edits.install("bent", blocks.fill(value=-3.0))
    replaced = await complete(api)
    await edits.remove("bent")
    # Nothing that was computed under an edit is served to anybody.
    after = await complete(api)
    texts = [answer.choices[0].text for answer in (before, during, replaced, after)]
    assert texts[0] == texts[3]
    assert len(set(texts)) == 3


async def test_two_requests_at_once_and_their_choices_have_their_own(edits: Edits, api: openai.AsyncOpenAI) -> None:
    await edits.install("seen", blocks.whole, interventions=[Probe("norm", "residual(2)", reduce="norm")])
    prompts = {"x": 2, PROMPT: 1}
    answers: dict[str, Any] = {}

    async def one(prompt: str, n: int) -> None:
        answers[prompt] = await complete(api, prompt, n=n, temperature=1.0, seed=5)

    async with edits.watch("seen") as told:
        async with anyio.create_task_group() as group:
            for prompt, n in prompts.items():
                group.start_soon(one, prompt, n)
        with anyio.fail_after(PATIENCE):
            items = [await anext(told) for _ in range(3)]
    for prompt, n in prompts.items():
        answer = answers[prompt]
        own = [item for item in items if item.request.startswith(answer.id)]
        assert sorted(item.choice for item in own) == list(range(n))
        assert all(item.saves["hidden"].shape == (answer.usage.prompt_tokens, 256) for item in own)
        assert all(len(item.saves["norm"]) == item.tokens == 5 for item in own)


async def test_it_sees_a_prompt_whole_that_the_engine_has_cached(edits: Edits, api: openai.AsyncOpenAI) -> None:
    prompt = "def add(a, b):\n    return a + b\n\n\n" * 8
    for _ in range(2):
        await complete(api, prompt)
    await edits.install("seen", blocks.whole)
    async with edits.watch("seen") as told:
        for _ in range(2):
            answer = await complete(api, prompt)
            assert (await anext(told)).saves["hidden"].shape[0] == answer.usage.prompt_tokens > 64


@pytest.mark.parametrize(
    ("asked", "names"),
    [
        (None, {"always", "default"}),
        ([], {"always"}),
        (["asked"], {"always", "asked"}),
        ("asked, always", {"always", "asked"}),
    ],
)
async def test_it_may_ask(client: Client, edits: Edits, api: openai.AsyncOpenAI, asked: Any, names: set[str]) -> None:
    await edits.install("always", blocks.whole)
    await edits.install("default", blocks.whole, scope="default")
    await edits.install("asked", blocks.whole, scope="asked")
    async with edits.watch("always") as told:
        answer = await complete(api, asked=asked)
        # What one request leaves is told in the order of its edits, before what the next one does.
        await complete(api, asked=[])
        with anyio.fail_after(PATIENCE):
            assert [(await anext(told)).request.startswith(answer.id) for _ in range(2)] == [True, False]
    found = set()
    bus = client._session.open_bus()
    for name in ("always", "default", "asked"):
        tail = await bus.command("XREVRANGE", bus.keys.edit_saves(MODEL, name), "+", "-", "COUNT", 1)
        if not tail:
            continue
        async with edits.watch(name, since="start") as told:
            async for item in told:
                if item.request.startswith(answer.id):
                    found.add(name)
                if item.id == tail[0][0].decode():
                    break
    assert found == names


async def test_chat_and_streaming(edits: Edits, api: openai.AsyncOpenAI) -> None:
    await edits.install("seen", blocks.watch)
    messages = [{"role": "user", "content": "hello"}]
    async with edits.watch("seen") as told:
        stream = await api.chat.completions.create(model=MODEL, messages=messages, stream=True, **GREEDY)
        chunks = [chunk async for chunk in stream]
        with anyio.fail_after(PATIENCE):
            item = await anext(told)
    assert item.request.startswith(chunks[0].id)
    assert item.tokens == len(item.saves["hidden"]) == 5


async def test_who_hangs_up_in_the_middle_leaves_what_there_was(
    edits: Edits, api: openai.AsyncOpenAI, client: Client
) -> None:
    await edits.install("seen", blocks.watch)
    async with edits.watch("seen") as told:
        stream = await complete(api, stream=True, max_tokens=1500)
        async for _ in stream:
            break
        await stream.close()
        with anyio.fail_after(PATIENCE):
            item = await anext(told)
    assert 0 < len(item.saves["hidden"]) < 1500
    await idle(client)


async def idle(client: Client) -> None:
    """Wait until the engine says that it runs nothing."""
    with anyio.fail_after(PATIENCE):
        while True:
            (info,) = [model for model in await client.models.list() if model.name == MODEL]
            if not info.running:
                return
            await anyio.sleep(0.05)


async def test_requests_count_as_running(client: Client, edits: Edits, api: openai.AsyncOpenAI) -> None:
    await idle(client)
    stream = await complete(api, stream=True, max_tokens=1500)
    with anyio.fail_after(PATIENCE):
        while True:
            (info,) = [model for model in await client.models.list() if model.name == MODEL]
            if info.running == 1:
                break
            await anyio.sleep(0.02)
    await stream.close()
    await idle(client)


# --- what goes wrong --------------------------------------------------------------------------------------------------


async def test_it_goes_on_without_an_edit_that_raised(edits: Edits, api: openai.AsyncOpenAI) -> None:
    plain = await complete(api)
    await edits.install("bad", blocks.raising)
    async with edits.watch("bad") as told:
        answer = await complete(api)
        item = await anext(told)
    assert answer.choices[0].text == plain.choices[0].text
    assert (item.error.type, item.error.message) == ("ValueError", "boom, every request")
    assert item.saves["steps"][1:] == [1, 1]
    assert item.tokens == 5


@pytest.mark.parametrize("tokens", [1500, 3], ids=["in the middle", "in the last step"])
@pytest.mark.parametrize("stream", [False, True])
async def test_with_on_error_fail_it_is_answered_with_the_error(
    edits: Edits, api: openai.AsyncOpenAI, stream: bool, tokens: int
) -> None:
    await edits.install("guard", blocks.raising, on_error="fail")
    async with edits.watch("guard") as told:
        with pytest.raises(openai.APIError, match="edit 'guard': boom, every request"):
            answer = await complete(api, stream=stream, max_tokens=tokens)
            async for _ in answer:
                pass
        with anyio.fail_after(PATIENCE):
            item = await anext(told)
    assert item.error.message == "boom, every request"
    assert item.tokens < 1500


async def test_one_that_raises_each_time_is_disabled(edits: Edits, api: openai.AsyncOpenAI) -> None:
    await edits.install("bad", blocks.raising_at_once, max_failures=2)
    async with edits.watch("bad") as told:
        for _ in range(2):
            await complete(api)
            assert (await anext(told)).error.type == "RuntimeError"
    with anyio.fail_after(PATIENCE):
        while not (await edits.get("bad")).disabled:
            await anyio.lowlevel.checkpoint()


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (["nope"], "no edit 'nope' is installed on 'demo'"),
        ([1], "expected a list of names"),
        (3, "expected a list of names"),
    ],
)
async def test_what_it_cannot_ask_for_is_the_callers_error(
    edits: Edits, api: openai.AsyncOpenAI, asked: Any, message: str
) -> None:
    with pytest.raises(openai.BadRequestError, match=message):
        await complete(api, asked=asked)


@pytest.mark.parametrize("name", ["nnsight_mediator", "nnsight_edits", "tracewire_block", "tracewire_declared"])
async def test_what_is_the_engines_own_cannot_be_brought(edits: Edits, api: openai.AsyncOpenAI, name: str) -> None:
    """nnsight would unpickle one of these."""
    extra = {**GREEDY["extra_body"], "vllm_xargs": {name: "gASVAAAA"}}
    with pytest.raises(openai.BadRequestError, match="clients cannot set this argument"):
        await complete(api, extra_body=extra)
    assert (await complete(api)).usage.completion_tokens == 5


async def test_saves_that_are_too_many_are_dropped_and_said_so(edits: Edits, api: openai.AsyncOpenAI) -> None:
    await edits.install("much", blocks.much)
    async with edits.watch("much") as told:
        answer = await complete(api, max_tokens=200)
        with anyio.fail_after(PATIENCE):
            item = await anext(told)
    assert answer.usage.completion_tokens == item.tokens == 200
    assert item.saves == {}
    assert "bytes" in item.dropped


async def test_a_large_value_is_a_reference(edits: Edits, api: openai.AsyncOpenAI) -> None:
    await edits.install("large", blocks.large)
    async with edits.watch("large") as told:
        answer = await complete(api)
        with anyio.fail_after(PATIENCE):
            item = await anext(told)
    assert isinstance(item.saves["rows"], tracewire.ArrayRef)
    assert (await item.saves["rows"].load()).shape == (answer.usage.prompt_tokens, 256 * 64)


async def test_health(url: str) -> None:
    async with httpx.AsyncClient() as http:
        assert (await http.get(url.removesuffix("/v1") + "/health")).status_code == 200
