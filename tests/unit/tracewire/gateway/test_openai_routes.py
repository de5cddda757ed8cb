"""OpenAI's API over a scripted engine, by the stock client."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from contextlib import AsyncExitStack
from typing import Any

import anyio
import anyio.to_thread
import openai
import pytest

from tests.support.bus_engine import Stage, tiny
from tests.support.gateways import Served
from tests.support.until import until
from tracewire_bus.wire.messages import Append, Failure, Set

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


async def test_a_stream_has_each_token_once_and_names_its_trace(engine: Engine, served: Served, client: Any) -> None:
    async with engine(tiny), served.openai() as api:
        stream = await api.completions.create(
            model="tiny", prompt="count", stream=True, stream_options={"include_usage": True}
        )
        trace_id = stream.response.headers["Tracewire-Trace-Id"]
        chunks = [chunk async for chunk in stream]
    first, *texts, usage = chunks
    assert first.tracewire == {"trace_id": trace_id}
    assert {chunk.id for chunk in chunks} == {f"cmpl-{trace_id}"}
    assert [chunk.choices[0].text for chunk in texts] == ["one", " two", " three"]
    assert [chunk.choices[0].finish_reason for chunk in texts] == [None, None, "length"]
    # A client that asked for none of ours gets none of ours.
    assert all("tracewire" not in chunk.model_extra for chunk in texts)
    assert (usage.choices, usage.usage.total_tokens) == ([], 6)


async def test_chat_by_the_async_and_the_sync_client(engine: Engine, served: Served) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Count."}]

    def sync() -> Any:
        with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as api:
            whole = api.chat.completions.create(model="tiny", messages=messages, max_completion_tokens=7)
            stream = api.chat.completions.create(model="tiny", messages=messages, stream=True)
            return whole, list(stream)

    async with engine(tiny) as scripted, served.openai() as api:
        whole = await api.chat.completions.create(model="tiny", messages=messages)
        stream = await api.chat.completions.create(model="tiny", messages=messages, stream=True)
        chunks = [chunk async for chunk in stream]
        again, more = await anyio.to_thread.run_sync(sync)
        for answer in (whole, again):
            (choice,) = answer.choices
            assert (choice.message.role, choice.message.content) == ("assistant", "one two three")
            assert (choice.finish_reason, answer.object) == ("length", "chat.completion")
        for found in (chunks, more):
            assert [chunk.choices[0].delta.content for chunk in found] == ["", "one", " two", " three"]
            assert found[0].choices[0].delta.role == "assistant"
            assert found[-1].choices[0].finish_reason == "length"
        invokes = [taken.invokes[0] for taken in scripted.taken]
        assert [invoke.chat.messages for invoke in invokes] == [messages] * 4
        assert [invoke.sampling["max_tokens"] for invoke in invokes] == [None, None, 7, None]


async def choices(stage: Stage) -> None:
    """Two choices of each prompt, in turns, each with its logprobs."""
    await stage.accept()
    for number in range(2):
        for invoke in range(len(stage.submission.invokes)):
            for choice in range(2):
                token = 100 + number
                logprobs = [{token: (-0.5, 2, f"t{number}"), 7: (-0.25, 1, "best"), 8: (-float("inf"), 3, "é")}]
                text = f"{invoke}{choice}{number} "
                end = "stop" if number else None
                await stage.output(text, invoke=invoke, choice=choice, logprobs=logprobs, finish_reason=end)
    await stage.final()


async def test_several_prompts_and_choices_have_their_numbers(engine: Engine, served: Served) -> None:
    async with engine(choices) as scripted, served.openai() as api:
        answer = await api.completions.create(model="tiny", prompt=["a", "b"], n=2)
        assert [(one.index, one.text) for one in answer.choices] == [
            (0, "000 001 "),
            (1, "010 011 "),
            (2, "100 101 "),
            (3, "110 111 "),
        ]
        texts = [""] * 4
        ends = {}
        async for chunk in await api.completions.create(model="tiny", prompt=[[5, 6], [7]], n=2, stream=True):
            for one in chunk.choices:
                texts[one.index] += one.text
                ends[one.index] = one.finish_reason
        assert texts == [one.text for one in answer.choices]
        assert ends == dict.fromkeys(range(4), "stop")
        assert [invoke.token_ids for invoke in scripted.taken[1].invokes] == [[5, 6], [7]]


async def half(stage: Stage) -> None:
    """Stops before its second choice has a token, as a block or a `stop_when` may have it."""
    await stage.accept()
    await stage.output("one", finish_reason="stop")
    await stage.final("stopped")


@pytest.mark.parametrize("stream", [False, True])
async def test_a_choice_without_a_token_ends_like_any_other(engine: Engine, served: Served, stream: bool) -> None:
    async with engine(half), served.openai() as api:
        asked: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "x"}], "n": 2}
        answer = await api.chat.completions.create(**asked, stream=stream)
        choices = [one for chunk in [part async for part in answer] for one in chunk.choices] if stream else None
        ends = [(one.index, one.finish_reason) for one in choices or answer.choices if one.finish_reason]
        assert ends == [(0, "stop"), (1, "stop")]
        assert not choices or [one.index for one in choices if one.delta.role] == [0, 1]


async def test_logprobs_have_openais_form(engine: Engine, served: Served) -> None:
    async with engine(choices) as scripted, served.openai() as api:
        answer = await api.completions.create(model="tiny", prompt="a", n=2, logprobs=2)
        logprobs = answer.choices[0].logprobs
        assert (logprobs.tokens, logprobs.token_logprobs) == (["t0", "t1"], [-0.5, -0.5])
        # No number of JSON is infinite.
        assert logprobs.top_logprobs[0] == {"best": -0.25, "t0": -0.5, "é": None}
        assert logprobs.text_offset == [0, 2]

        asked = {"model": "tiny", "messages": [{"role": "user", "content": "x"}], "n": 2, "logprobs": True}
        chat = await api.chat.completions.create(**asked, top_logprobs=1)
        (first, second) = chat.choices[1].logprobs.content
        assert (first.token, first.logprob, first.bytes) == ("t0", -0.5, [116, 48])
        assert [one.token for one in second.top_logprobs] == ["best"]
        streamed = []
        async for chunk in await api.chat.completions.create(**asked, stream=True):
            streamed += [one.token for one in (chunk.choices[0].logprobs.content if chunk.choices[0].logprobs else ())]
        assert streamed == ["t0"] * 2 + ["t1"] * 2
        assert [taken.invokes[0].sampling["logprobs"] for taken in scripted.taken] == [2, 1, 0]


async def test_a_response_format_constrains_the_sampling(engine: Engine, served: Served) -> None:
    schema = {"type": "object", "properties": {"x": {"type": "integer"}}}
    formats: list[Any] = [
        {"type": "text"},
        {"type": "json_object"},
        {"type": "json_schema", "json_schema": {"name": "point", "schema": schema, "strict": True}},
    ]
    async with engine(tiny) as scripted, served.openai() as api:
        for wanted in formats:
            message = {"role": "user", "content": "x"}
            await api.chat.completions.create(model="tiny", messages=[message], response_format=wanted)
        constraints = [taken.invokes[0].sampling.get("structured_outputs") for taken in scripted.taken]
        assert constraints == [None, {"json_object": True}, {"json": schema}]


async def test_an_adapters_name_is_a_model(engine: Engine, served: Served) -> None:
    async with engine(loras=["poet"]) as scripted, served.openai() as api:
        for _ in range(2):
            answer = await api.completions.create(model="poet", prompt="x")
            assert answer.model == "poet"
        assert [(taken.model, taken.invokes[0].lora) for taken in scripted.taken] == [("tiny", "poet")] * 2


@pytest.mark.parametrize("stays", [True, False])
async def test_an_adapter_that_moves_to_another_model_is_found_there(
    engine: Engine, served: Served, stays: bool
) -> None:
    async with served.openai() as api:
        async with engine(loras=["poet"]):
            await api.completions.create(model="poet", prompt="x")
        async with AsyncExitStack() as stack:
            if stays:
                await stack.enter_async_context(engine(engine="without"))
            other = await stack.enter_async_context(engine(model="other", loras=["poet"]))

            async def is_taken() -> bool:
                # As long as the client takes the first engine for one that runs, the trace waits for it.
                try:
                    extra = {"tracewire": {"deadline": 0.2}}
                    await api.completions.create(model="poet", prompt="x", extra_body=extra)
                except openai.APIStatusError as error:
                    if error.status_code != 408:
                        raise
                return bool(other.taken)

            await until(is_taken)
            assert (await api.completions.create(model="poet", prompt="x")).model == "poet"
            assert {(taken.model, taken.invokes[0].lora) for taken in other.taken} == {("other", "poet")}


async def test_an_adapter_that_is_gone_is_no_model(engine: Engine, served: Served) -> None:
    async with served.openai() as api:
        async with engine(loras=["poet"]):
            await api.completions.create(model="poet", prompt="x")
        async with engine(engine="without"):
            statuses: list[int] = []

            async def is_gone() -> bool:
                try:
                    extra = {"tracewire": {"deadline": 0.2}}
                    await api.completions.create(model="poet", prompt="x", extra_body=extra)
                except openai.APIStatusError as error:
                    statuses.append(error.status_code)
                return 404 in statuses

            await until(is_gone)
            assert 400 not in statuses


@pytest.mark.parametrize(
    ("given", "param", "message"),
    [
        ({"temperature": "hot"}, "temperature", "valid number"),
        ({"max_tokens": 0}, "max_tokens", "greater than or equal to 1"),
        ({"frequency": 1}, "frequency", "unknown field"),
        ({"prompt": ""}, "prompt", "the prompt is empty"),
        ({"prompt": []}, "prompts", "at least one prompt"),
        ({"prompt": "\ud800"}, "prompt", "surrogate"),
        ({"prompt": 5}, "prompt", "valid string"),
        ({"logit_bias": {"x": 1}}, "logit_bias.x", "integer"),
        ({"suffix": "x"}, "suffix", "does not serve this"),
        ({"best_of": 2}, "best_of", "does not serve this"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema", "expected a JSON schema"),
        ({"tracewire": {"live": {"alpha": []}, "bend": 1}}, "tracewire.bend", "unknown field"),
        (
            {"tracewire": {"interventions": [{"do": "twist", "at": "residual(0)"}]}},
            "tracewire.interventions[0].do",
            "twist",
        ),
        (
            {"tracewire": {"interventions": [{"do": "probe", "name": "x", "at": "residual(9)"}]}},
            "tracewire.interventions[0].at",
            "residual",
        ),
        ({"tracewire": {"interventions": [{"do": "probe", "at": "x"}]}}, "tracewire.interventions[0]", "name"),
        ({"tracewire": {"trace_id": "no space"}}, "tracewire.trace_id", "128 letters"),
        ({"tracewire": {"block": {"source": "x = 1", "name": 3}}}, "tracewire.block.name", "Expected `str`"),
    ],
)
async def test_a_wrong_field_is_named(engine: Engine, served: Served, given: Any, param: str, message: str) -> None:
    async with engine(), served.http() as http:
        body = json.dumps({"model": "tiny", "prompt": "x", **given})
        answer = await http.post("/v1/completions", content=body, headers={"Content-Type": "application/json"})
        error = answer.json()["error"]
        assert answer.status_code == 400, error
        assert (error["param"], error["type"]) == (param, "invalid_request_error")
        assert re.search(message, error["message"])
        assert answer.headers["X-Should-Retry"] == "false"


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[1]", b"null", b'{"model": "tiny", "prompt": ' + b"[" * 100_000, b"\xff"]
)
async def test_bad_json_is_an_error_of_the_caller(served: Served, body: bytes) -> None:
    async with served.http() as http:
        answer = await http.post("/v1/completions", content=body, headers={"Content-Type": "application/json"})
        assert answer.status_code == 400
        assert answer.json()["error"]["type"] == "invalid_request_error"


async def test_an_engines_refusal_is_a_status_also_of_a_stream(engine: Engine, served: Served) -> None:
    async def refuse(stage: Stage) -> None:
        error = Failure(type="Rejection", message="expected less", field="sampling.temperature")
        await stage.final("rejected", error)

    async with engine(refuse), served.openai() as api:
        for stream in (False, True):
            with pytest.raises(openai.BadRequestError, match="expected less") as caught:
                await api.completions.create(model="tiny", prompt="x", stream=stream)
            assert caught.value.param == "temperature"


async def test_an_unknown_model_is_not_found(engine: Engine, served: Served) -> None:
    async with engine(), served.openai() as api:
        with pytest.raises(openai.NotFoundError, match="no engine serves the model 'other'") as caught:
            await api.completions.create(model="other", prompt="x")
        assert caught.value.code == "unknown_model"


async def failing(stage: Stage) -> None:
    """Fails after its first token, in the block."""
    await stage.accept()
    await stage.output("one")
    await stage.final("failed", Failure(type="ValueError", message="odd", field="block", filename="a.py", line=3))


async def test_a_failure_is_an_error_and_in_a_stream_its_last_event(engine: Engine, served: Served) -> None:
    async with engine(failing), served.openai() as api:
        with pytest.raises(openai.BadRequestError, match="ValueError: odd") as caught:
            await api.completions.create(model="tiny", prompt="x")
        assert caught.value.body["tracewire"]["line"] == 3
        text = ""
        with pytest.raises(openai.APIError, match="ValueError: odd") as streamed:
            async for chunk in await api.completions.create(model="tiny", prompt="x", stream=True):
                text += chunk.choices[0].text
        assert text == "one"
        assert streamed.value.body["tracewire"]["trace_id"] == chunk.id.removeprefix("cmpl-")


async def running(stage: Stage) -> None:
    """One token, and then nothing until it is cancelled."""
    await stage.accept()
    await stage.output("one")
    await anyio.sleep_forever()


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_cancels_its_trace(
    engine: Engine, served: Served, client: Any, stream: bool
) -> None:
    async with engine(running) as scripted, served.http() as http:
        async with anyio.create_task_group() as group:

            async def ask() -> None:
                body = {"model": "tiny", "prompt": "x", "stream": stream}
                async with http.stream("POST", "/v1/completions", json=body) as answer:
                    async for _ in answer.aiter_bytes():
                        pass

            group.start_soon(ask)
            await until(lambda: scripted.taken)
            trace_id = scripted.taken[0].trace
            subscription = client.subscribe(trace_id)
            await anext(subscription)
            group.cancel_scope.cancel()
        assert await client.subscribe(trace_id).until_done() == "cancelled"
        assert (await client.get_state(trace_id)).error.reason == "its submitter has left it"
        await until(lambda: not served.gateway.running)


async def test_a_detached_trace_outlives_its_client(engine: Engine, served: Served, client: Any) -> None:
    go_on = anyio.Event()

    async def script(stage: Stage) -> None:
        await stage.accept()
        await stage.output("one")
        await go_on.wait()
        await stage.output(" two", finish_reason="stop")
        await stage.final()

    async with engine(script), served.openai() as api:
        stream = await api.completions.create(
            model="tiny", prompt="x", stream=True, extra_body={"tracewire": {"detach": True}}
        )
        trace_id = (await anext(stream)).tracewire["trace_id"]
        await stream.close()
        await until(lambda: not served.gateway.running)
        go_on.set()
        assert (await client.subscribe(trace_id).result()).text == "one two"


async def test_somebody_else_cancels_it(engine: Engine, served: Served, client: Any) -> None:
    async with engine(running), served.openai() as api:
        stream = await api.completions.create(model="tiny", prompt="x", stream=True)
        trace_id = (await anext(stream)).tracewire["trace_id"]
        assert (await anext(stream)).choices[0].text == "one"
        await client.cancel(trace_id, "enough", by="guard")
        with pytest.raises(openai.APIError, match="enough") as caught:
            await anext(stream)
        assert (caught.value.body["tracewire"]["by"], caught.value.code) == ("guard", "trace_cancelled")


async def test_an_attempt_that_repeats_brings_each_token_once(engine: Engine, served: Served) -> None:
    async def script(stage: Stage) -> None:
        await stage.accept()
        await stage.save("one", {"acts": 1})
        await stage.save(" two", {"acts": 2})
        await stage.restart("its engine was lost")
        await stage.accept()
        # Merged otherwise than before.
        await stage.output(
            "one two three",
            *([Set(("acts",), [1])], [Append(("acts",), [2])], [Append(("acts",), [3])]),
            finish_reason="stop",
        )
        await stage.final()

    async with engine(script), served.openai() as api:
        plain = await api.completions.create(model="tiny", prompt="x", stream=True)
        assert [chunk.choices[0].text async for chunk in plain] == ["", "one", " two", " three"]
        ours = await api.completions.create(model="tiny", prompt="x", stream=True, extra_body={"tracewire": {}})
        chunks = [chunk async for chunk in ours]
        assert "".join(chunk.choices[0].text for chunk in chunks) == "one two three"
        parts = [chunk.tracewire for chunk in chunks]
        assert [part["delta"]["acts"] for part in parts if "delta" in part] == [[1], [2], [3]]
        (restarted,) = [part["event"] for part in parts if "event" in part]
        assert (restarted["type"], restarted["attempt"]) == ("restarted", 2)
        whole = await api.completions.create(model="tiny", prompt="x", extra_body={"tracewire": {}})
        assert whole.choices[0].text == "one two three"
        assert whole.choices[0].tracewire == {"saves": {"acts": [1, 2, 3]}}


async def test_an_attempt_with_another_text_is_an_error(engine: Engine, served: Served) -> None:
    async def script(stage: Stage) -> None:
        await stage.accept()
        await stage.output("one")
        await stage.restart()
        await stage.accept()
        await stage.output("two")
        await stage.final()

    async with engine(script), served.openai() as api:
        with pytest.raises(openai.APIError) as caught:
            async for _ in await api.completions.create(model="tiny", prompt="x", stream=True):
                pass
        assert caught.value.code == "text_changed"


async def test_an_echo_stands_before_the_text(engine: Engine, served: Served) -> None:
    async with engine(choices), served.openai() as api:
        asked: Any = {"model": "tiny", "prompt": ["ab", "cd"], "n": 2, "echo": True}
        answer = await api.completions.create(**asked)
        assert [choice.text for choice in answer.choices] == ["ab000 001 ", "ab010 011 ", "cd100 101 ", "cd110 111 "]
        texts = [""] * 4
        async for chunk in await api.completions.create(**asked, stream=True):
            for choice in chunk.choices:
                texts[choice.index] += choice.text
        assert texts == [choice.text for choice in answer.choices]


async def test_usage_comes_with_every_chunk_if_asked_for(engine: Engine, served: Served) -> None:
    async with engine(tiny), served.openai() as api:
        options: Any = {"include_usage": True, "continuous_usage_stats": True}
        stream = await api.completions.create(model="tiny", prompt="x", stream=True, stream_options=options)
        chunks = [chunk async for chunk in stream]
    counts = [(chunk.usage.prompt_tokens, chunk.usage.completion_tokens) for chunk in chunks if chunk.usage]
    assert counts == [(1, 1), (1, 2), (1, 3), (3, 3)]


async def test_a_prompt_has_logprobs(engine: Engine, served: Served) -> None:
    async def told(stage: Stage) -> None:
        await stage.accept()
        await stage.output("one", finish_reason="length")
        await stage.final(prompt_logprobs=[[{}, {7: (-0.5, 1, "a"), 8: (-1.5, 2, None)}]])

    async with engine(told) as scripted, served.openai() as api:
        answer = await api.completions.create(model="tiny", prompt="x", extra_body={"prompt_logprobs": 2})
        assert answer.choices[0].prompt_logprobs == [
            None,
            {
                "7": {"logprob": -0.5, "rank": 1, "decoded_token": "a"},
                "8": {"logprob": -1.5, "rank": 2, "decoded_token": None},
            },
        ]
        assert scripted.taken[0].invokes[0].sampling["prompt_logprobs"] == 2


async def test_a_structural_tag_constrains_the_sampling(engine: Engine, served: Served) -> None:
    tag = {"type": "structural_tag", "format": {"type": "json_schema", "json_schema": {"type": "object"}}}
    async with engine(tiny) as scripted, served.openai() as api:
        await api.completions.create(model="tiny", prompt="x", extra_body={"response_format": tag})
        constraint = scripted.taken[0].invokes[0].sampling["structured_outputs"]
        assert json.loads(constraint["structural_tag"]) == tag
