"""What a body asks for is what the SDK would submit."""

from __future__ import annotations

import base64
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import openai
import pytest

import tracewire
from tests.support.bus_engine import Stage, tiny
from tests.support.gateways import Served
from tracewire import Clamp, Client, Live, Probe, Steer, StopWhen
from tracewire_bus.domain.intervention_checks import normalize
from tracewire_bus.wire.codec import schema_text
from tracewire_bus.wire.messages import Set, Submission
from tracewire_bus.wire.packing import unpack, wire
from tracewire_bus.wire.refs import ArrayRef

Engine = Callable[..., Any]

VECTOR = [0.5, -1.0, 0.0, 2.0, 0.0, 0.0, 0.25, 1.0]


def encoded(array: np.ndarray[Any, Any]) -> dict[str, Any]:
    return {
        "dtype": array.dtype.name,
        "shape": list(array.shape),
        "base64": base64.b64encode(array.tobytes()).decode(),
    }


def wired(submission: Submission, name: str) -> bytes:
    """A field of a submission as it travels."""
    value = getattr(submission, name)
    return msgspec.msgpack.encode(normalize(value) if name == "interventions" else value)


async def test_interventions_and_live_parameters_are_those_of_the_sdk(
    engine: Engine, served: Served, client: Client
) -> None:
    vector = np.array(VECTOR, np.float32)
    declared = [
        Steer("residual(1)", vector, scale=Live("alpha")),
        Probe("score", "residual(2)", weight=vector),
        Clamp("residual(1)", Live("way"), min=-1.0),
        StopWhen("score", above=3.0, steps=2),
    ]
    given = [
        {"do": "steer", "at": "residual(1)", "vector": VECTOR, "scale": {"live": "alpha"}},
        {"do": "probe", "name": "score", "at": "residual(2)", "weight": encoded(vector)},
        {"do": "clamp", "at": "residual(1)", "direction": {"live": "way"}, "min": -1.0},
        {"do": "stop_when", "probe": "score", "above": 3.0, "steps": 2},
    ]
    live = {"alpha": 0.0, "way": vector, "name": "x", "on": True}
    extension = {
        "interventions": given,
        "live": {"alpha": 0.0, "way": VECTOR, "name": "x", "on": True},
        "edits": ["calm"],
        "deadline": 30,
        "on_engine_loss": "fail",
        "token_strings": True,
        "on_lag": "thin",
        "trace_id": "mine",
    }
    async with engine(tiny) as scripted, served.openai() as api:
        answer = await api.completions.create(model="tiny", prompt="x", extra_body={"tracewire": extension})
        trace = client.trace(
            "tiny",
            "x",
            interventions=declared,
            live=live,
            edits=["calm"],
            deadline=30,
            on_engine_loss="fail",
            token_strings=True,
            on_lag="thin",
            trace_id="same",
        )
        await trace.result()
        ours, theirs = scripted.taken
        assert answer.id == "cmpl-mine"
        for name in ours.__struct_fields__:
            if name not in ("trace", "client", "lease"):
                assert wired(ours, name) == wired(theirs, name), name
        assert ours.lease


async def test_a_block_travels_as_source_with_its_values(engine: Engine, served: Served) -> None:
    block = {
        "source": "for step in tracer.iter[:]:\n    seen.append(factor * vector)\n",
        "name": "watch",
        "variables": {"factor": 2, "vector": encoded(np.arange(3, dtype=np.int16)), "seen": []},
        "modules": {"np": "numpy"},
        "imports": {"Tensor": ["torch", "Tensor"]},
        "helpers": [{"name": "f", "source": "def f(x):\n    return x\n"}],
    }
    async with engine(tiny) as scripted, served.openai() as api:
        await api.completions.create(model="tiny", prompt="x", extra_body={"tracewire": {"block": block}})
        (taken,) = scripted.taken
        assert (taken.block.name, taken.block.source) == ("watch", block["source"])
        assert taken.block.modules == {"np": "numpy"}
        assert taken.block.imports == {"Tensor": ("torch", "Tensor")}
        assert [helper.name for helper in taken.block.helpers] == ["f"]
        variables = unpack(taken.block.variables)
        assert variables.pop("vector").tolist() == [0, 1, 2]
        assert variables == {"factor": 2, "seen": []}


async def test_a_block_is_checked_like_one_of_the_sdk(engine: Engine, served: Served) -> None:
    block = {"source": "x = model.modle.layers[0].output.save()\n"}
    async with engine(), served.openai() as api:
        with pytest.raises(openai.BadRequestError, match="modle") as caught:
            await api.completions.create(model="tiny", prompt="x", extra_body={"tracewire": {"block": block}})
        assert caught.value.param == "tracewire.block"
        with pytest.raises(openai.BadRequestError, match=r"live\.alpha"):
            block = {"source": "x = live.alpha\n"}
            await api.completions.create(model="tiny", prompt="x", extra_body={"tracewire": {"block": block}})


async def test_large_vectors_of_all_callers_are_stored_once_and_errors_name_the_field(
    engine: Engine, served: Served, client: Client
) -> None:
    vector = np.linspace(-1, 1, 2048, dtype=np.float32)

    def steering(given: np.ndarray[Any, Any]) -> dict[str, Any]:
        steer = {"do": "steer", "at": "residual(1)", "vector": encoded(given)}
        return {"tracewire": {"interventions": [{"do": "ablate", "at": "residual(0)"}, steer]}}

    async with engine(tiny, hidden_size=2048, schema=schema_text()) as scripted, served.openai() as api:
        for _ in range(2):
            await api.completions.create(model="tiny", prompt="x", extra_body=steering(vector))
        references = [taken.interventions[1].vector for taken in scripted.taken]
        assert all(isinstance(ref, ArrayRef) for ref in references)
        assert references[0].blob == references[1].blob
        assert np.array_equal(await client._session.open_bus().vectors.fetch(references[0]), vector)
        for wrong in (np.full(2048, np.nan), np.ones(2049)):
            with pytest.raises(openai.BadRequestError) as caught:
                await api.completions.create(model="tiny", prompt="x", extra_body=steering(wrong))
            assert caught.value.param == "tracewire.interventions[1].vector"


LARGE = np.arange(100_000, dtype=np.float32)


async def saving(stage: Stage) -> None:
    """Saves of several kinds, a large array, and one save at the end."""
    await stage.accept()
    ref = await stage.store(LARGE, "large")
    await stage.output(
        "one",
        [
            Set(("scores",), wire([np.array([1.5, float("nan")], np.float32)])),
            Set(("facts",), wire({"n": 3, "big": 2**70, "raw": b"\x00\xff"})),
            Set(("large",), wire(ref)),
        ],
        finish_reason="stop",
    )
    await stage.final(deltas=[(0, 0, [Set(("total",), 7)])])


async def ask(served: Served, **extension: Any) -> tuple[Any, list[Any]]:
    """The saves of an answer, and our parts of a stream's chunks."""
    async with served.openai() as api:
        options = {"model": "tiny", "prompt": "x", "extra_body": {"tracewire": extension}}
        answer = await api.completions.create(**options)
        chunks = [chunk.tracewire async for chunk in await api.completions.create(**options, stream=True)]
    return getattr(answer.choices[0], "tracewire", None), chunks


async def test_saves_inline(engine: Engine, served: Served) -> None:
    async with engine(saving):
        whole, chunks = await ask(served)
        facts = {"n": 3, "big": str(2**70), "raw": {"base64": "AP8="}}
        saves = {"scores": [[1.5, None]], "facts": facts, "large": LARGE.tolist()}
        assert whole["saves"] == {**saves, "total": 7}
        assert chunks[1]["delta"] == saves
        assert (chunks[1]["index"], chunks[1]["token_ids"]) == (0, [100])
        assert chunks[-1]["saves"] == [{"choice": 0, "delta": {"total": 7}}]
        assert chunks[-1]["status"] == "finished"


async def test_saves_as_base64(engine: Engine, served: Served) -> None:
    async with engine(saving):
        whole, chunks = await ask(served, arrays="base64")
        for saves in (whole["saves"], chunks[1]["delta"]):
            assert saves["large"] == encoded(LARGE)
            (scores,) = saves["scores"]
            found = np.frombuffer(base64.b64decode(scores["base64"]), scores["dtype"])
            assert np.array_equal(found, np.array([1.5, float("nan")], np.float32), equal_nan=True)


async def test_saves_as_references(engine: Engine, served: Served) -> None:
    async with engine(saving):
        whole, chunks = await ask(served, saves="reference")
        digest = tracewire.digest(LARGE).hex()
        large = whole["saves"]["large"]
        assert large["href"].endswith(f"/values/{digest}")
        assert (large["dtype"], large["shape"], large["nbytes"]) == ("float32", [100_000], 400_000)
        assert chunks[1]["delta"]["large"]["digest"] == digest
        assert whole["saves"]["scores"][0]["shape"] == [2]
        assert whole["saves"]["facts"]["n"] == 3


async def test_no_saves(engine: Engine, served: Served) -> None:
    async with engine(saving):
        whole, chunks = await ask(served, saves="none")
        assert whole is None
        assert not any("delta" in chunk or "saves" in chunk for chunk in chunks)


async def test_a_large_array_beyond_the_limit_stays_a_reference(engine: Engine, gateway: Any) -> None:
    async with engine(saving), gateway(inline_bytes=1000) as served:
        whole, _ = await ask(served)
        assert whole["saves"]["large"]["nbytes"] == 400_000
        assert whole["saves"]["scores"] == [[1.5, None]]


async def test_a_trace_is_steered_in_the_middle_of_its_answer(engine: Engine, served: Served, client: Client) -> None:
    async def script(stage: Stage) -> None:
        await stage.accept()
        await stage.output("one")
        await stage.steered()
        await stage.output(" two", finish_reason="stop")
        await stage.final()

    async with engine(script), served.openai() as api:
        stream = await api.completions.create(
            model="tiny", prompt="x", stream=True, extra_body={"tracewire": {"live": {"alpha": 0}}}
        )
        chunks = [await anext(stream), await anext(stream)]
        trace_id = chunks[0].tracewire["trace_id"]
        version = await client.steer(trace_id, alpha=2.5, by="slider")
        chunks += [chunk async for chunk in stream]
        (event,) = [chunk.tracewire["event"] for chunk in chunks if "event" in chunk.tracewire]
        assert (event["type"], event["version"]) == ("steered", version)
        assert event["first"] == [{"invoke": 0, "choice": 0, "index": 1}]
        assert [(one["by"], one["values"]) for one in event["changes"]] == [("slider", {"alpha": 2.5})]
        assert "".join(chunk.choices[0].text for chunk in chunks) == "one two"


async def test_a_name_of_the_library_stands_for_its_array(engine: Engine, served: Served, client: Client) -> None:
    entry = await client.library.put("calm", VECTOR, at="residual(1)")
    extension = {"interventions": [{"do": "steer", "at": "residual(1)", "vector": "calm"}]}
    async with engine(tiny) as scripted, served.openai() as api:
        await api.completions.create(model="tiny", prompt="x", extra_body={"tracewire": extension})
        wrong = {"interventions": [{"do": "steer", "at": "residual(2)", "vector": "calm"}]}
        with pytest.raises(openai.BadRequestError, match="belongs to 'residual"):
            await api.completions.create(model="tiny", prompt="x", extra_body={"tracewire": wrong})
    (taken,) = scripted.taken
    assert taken.interventions[0].vector.tolist() == VECTOR
    assert taken.library == {"interventions[0].vector": entry.id}
