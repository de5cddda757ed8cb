"""The forms of answers: each answer of the gateway has exactly the members of its form."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jsonschema
import pytest

from tests.support.api_cases import documented
from tests.support.bus_engine import Stage
from tests.support.gateways import Served
from tracewire.gateway.schemas import INTERVENTION, components
from tracewire_bus.wire.messages import ChatMessage, Failure, MessageDelta, ToolCall, ToolCallDelta

Engine = Callable[..., Any]

SCHEMAS = components()
#: Each form, with no member that it does not have.
CLOSED = {name: {**one, "additionalProperties": False} if "properties" in one else one for name, one in SCHEMAS.items()}


def check(value: Any, form: str) -> None:
    """Check that a value has a form's members and no others."""
    schema = {"$ref": f"#/components/schemas/{form}", "components": {"schemas": CLOSED}}
    jsonschema.validate(value, schema)


def test_a_member_that_no_form_has_is_found() -> None:
    check({"version": 1}, "NewVersion")
    with pytest.raises(jsonschema.ValidationError):
        check({"version": 1, "more": 2}, "NewVersion")
    with pytest.raises(jsonschema.ValidationError):
        check({}, "NewVersion")


@pytest.mark.parametrize("do", SCHEMAS[INTERVENTION]["discriminator"]["mapping"])
def test_an_intervention_is_what_it_says(do: str) -> None:
    fields: dict[str, Any] = {
        "name": "n",
        "at": "residual(1)",
        "probe": "n",
        "sae": "calm",
        "indices": [1],
        "heads": [0],
    }
    fields |= {name: [1.0] for name in ("vector", "direction", "values", "matrix", "basis")}
    fields |= dict.fromkeys(("target", "min", "max"), 1.0)
    (form,) = [one for one in SCHEMAS.values() if one.get("properties", {}).get("do", {}).get("enum") == [do]]
    jsonschema.validate(
        {"do": do, **{name: fields[name] for name in form["required"] if name != "do"}},
        {**SCHEMAS[INTERVENTION], "components": {"schemas": SCHEMAS}},
    )


def test_texts_are_not_indented() -> None:
    assert not [one for one in SCHEMAS.values() if "\n    " in one.get("description", "").replace("\n    -", "")]


async def ended(stage: Stage) -> None:
    """A trace that fails, with all that a failure has."""
    await stage.accept(sampling=[{"temperature": 0.5}])
    await stage.save("one", {"a": [1.0]}, finish_reason=None)
    failure = Failure(type="ValueError", message="no", filename="f.py", line=3, source="x", builtin="ValueError")
    await stage.final("failed", failure)


async def test_a_trace_that_failed_and_its_list(engine: Engine, served: Served) -> None:
    async with engine(ended), served.http() as http:
        check(
            (await http.post("/traces", json={"model": "tiny", "prompt": "x", "trace_id": "t"})).json(),
            "SubmittedTrace",
        )
        async for _ in served.gateway.client.subscribe("t"):
            pass
        for path, form in (("", "TraceDescription"), ("/state", "TraceState"), ("/live", "LiveParameters")):
            check((await http.get(f"/traces/t{path}")).json(), form)
        page = (await http.get("/traces?limit=1")).json()
        assert "next" in page
        check(page, "TracePage")
        check((await http.post("/traces/t/steer", json={"values": {"a": 1}})).json(), "Problem")
        check((await http.post("/v1/completions", json={"model": "tiny"})).json(), "OpenAIError")
        check((await http.get("/v1/responses/resp_t")).json(), "ModelResponse")


async def called(stage: Stage) -> None:
    """A chat that calls a tool."""
    call = ToolCallDelta(index=0, id="c1", name="f", arguments="{}")
    await stage.accept()
    await stage.output("", finish_reason="stop", message=MessageDelta(tool_calls=[call], reasoning="so"))
    whole = ChatMessage(content=None, reasoning="so", tool_calls=[ToolCall("c1", "f", "{}")])
    await stage.final(messages=[(0, 0, whole)])


async def test_chats_with_tools_and_logprobs(engine: Engine, served: Served) -> None:
    body = {"model": "tiny", "messages": [{"role": "user", "content": "x"}], "return_token_ids": True}
    async with engine(called), served.http() as http:
        check((await http.post("/v1/chat/completions", json={**body, "tracewire": {}})).json(), "ChatCompletion")
        check((await http.post("/v1/responses", json={"model": "tiny", "input": "x"})).json(), "ModelResponse")
        check((await http.get("/v1/models")).json(), "ModelList")


async def test_control_and_engines(redis_url: str, prefix: str) -> None:
    async with documented(redis_url, prefix) as served, served.http() as http:
        check((await http.get("/key")).json(), "CallerKey")
        check((await http.get("/engines")).json(), "EngineList")
        check((await http.post("/engines/gpu-0/drain")).json(), "DrainingEngine")
        check(
            (
                await http.put("/edits/demo/calm", json={"interventions": [{"do": "ablate", "at": "residual(1)"}]})
            ).json(),
            "StandingEdit",
        )
        check((await http.get("/edits/demo")).json(), "EditList")
