"""Traces written inline: prompts, sampling and saves of their own, and what only a block's tracer has."""

# mypy: ignore-errors

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import anyio
import numpy as np
import pytest

import tracewire
from tests.support.bus_engine import Stage, engine_info
from tests.support.captured import block_of
from tracewire import (
    BlockError,
    BlockOnly,
    Client,
    Model,
    Prompt,
    SaveMissing,
    StateMismatch,
    TraceRejected,
    TracewireError,
    intervention,
)
from tracewire_bus.wire.messages import Manifest

PATIENCE = 60


async def saving(stage: Stage) -> None:
    """One token that saves a value, and one save that could not travel."""
    await stage.accept()
    await stage.save("one", {"projection": 1.5})
    await stage.final(save_errors={"0.0.model": "a value of type Llama cannot travel"})


async def test_a_tracer_s_saves_are_compared_too(client: Client, engine: Callable[..., Any]) -> None:
    async def script(stage: Stage) -> None:
        await stage.accept()
        await stage.save("one", {"x": 1})
        wrong = Manifest(invoke=0, choice=0, name="x", kind="int", length=1, digest=bytes(16))
        await stage.final(manifest=[wrong])

    async with engine(script), engine(saving, engine="e2", model="other"):
        model = await client.models.get("tiny")
        with model.trace("hello") as tracer:
            x = model.logits.save()
        with anyio.fail_after(PATIENCE):
            async for _ in tracer:
                pass
        with pytest.raises(StateMismatch, match=r"0\.0\.x"):
            _ = tracer.saves

        model = await client.models.get("other")
        with model.trace("hello") as tracer:
            z = model.logits.save()
        await tracer.result()
        with pytest.raises(SaveMissing, match="cannot travel"):
            _ = tracer.saves["model"]


async def test_a_with_whose_saves_nobody_could_read_is_refused(client: Client, engine: Callable[..., Any]) -> None:
    async with engine():
        model = await client.models.get("tiny")
        with pytest.raises(BlockError, match=r"write `with model\.trace\(\.\.\.\) as tracer:`") as caught:  # noqa: SIM117
            with model.trace("hello"):
                model.logits.save()
        assert caught.value.filename == __file__
        with model.trace("hello", trace_id="followed"):
            model.logits.save()
        tracer = model.trace("hello")
        with tracer:
            model.logits.save()
        await tracer.start()
        async with client.subscribe("followed"):
            pass


async def test_what_only_a_block_s_tracer_has_says_so(client: Client, engine: Callable[..., Any]) -> None:
    async with engine():
        model = await client.models.get("tiny")
        tracer = model.trace("hello")
        for name in ("iter", "all", "stop", "cache", "live"):
            with pytest.raises(BlockOnly, match=f"tracer.{name} belongs in a block"):
                getattr(tracer, name)
        assert not hasattr(tracer, "anything_else")
        with pytest.raises(BlockOnly, match="barrier is not served"), model.trace() as tracer:
            barrier = tracer.barrier(2)
            with tracer.invoke("one"):
                model.logits.save()


async def test_its_outputs_and_saves_are_read_as_of_any_trace(model: Model, engine: Callable[[], Any]) -> None:
    with model.trace("hello", max_tokens=3) as tracer:
        logits = model.logits.save()
    with pytest.raises(TracewireError, match="read at its end"):
        _ = tracer.saves
    async with engine():
        with anyio.fail_after(PATIENCE):
            accepted = await tracer.accepted()
            items = [item async for item in tracer]
            result = await tracer.result()
    assert accepted.model == "tiny"
    assert len(items) == 3
    assert tracer.saves == result.saves
    assert tracer.status == "finished"


async def test_it_can_be_cancelled_and_steered_right_away(client: Client, model: Model) -> None:
    with model.trace("hello", live={"alpha": 0.0}) as tracer:
        logits = (model.logits * tracer.live.alpha).save()
    assert await tracer.steer(alpha=1.0) == 1
    with model.trace("hello") as other:
        logits = model.logits.save()
    assert await other.cancel("enough")
    with pytest.raises(tracewire.TraceFailed, match="enough"), anyio.fail_after(PATIENCE):
        await other.result()
    await tracer.aclose()
    assert (await client.get_state(tracer.id)).status == "cancelled"


async def test_a_prompt_for_each_of_several(model: Model) -> None:
    with model.trace(prompts=["a", Prompt("b", max_tokens=2)], max_tokens=1) as tracer:
        logits = model.logits.save()
    assert [(one.prompt, one.sampling["max_tokens"]) for one in tracer._submission.invokes] == [("a", 1), ("b", 2)]
    assert block_of(tracer).source == "logits = model.logits.save()\n"


async def test_prompts_with_blocks_of_their_own(client: Client, model: Model) -> None:
    @intervention
    def one(model, tracer, live):
        a = model.logits.save()

    trace = client.trace(model, prompts=[Prompt("a", one), "b", Prompt("c", block=one, max_tokens=2)])
    assert [invoke.block is not None for invoke in trace._submission.invokes] == [True, False, True]
    with pytest.raises(TraceRejected, match="expected an intervention"):
        client.trace(model, prompts=[Prompt("a", block=3)])


@pytest.mark.parametrize(
    ("form", "ids"),
    [
        ({"prompt_token_ids": [1, 2]}, [1, 2]),
        ({"input_ids": [1, 2, 3], "attention_mask": [0, 1, 1]}, [2, 3]),
        ({"input_ids": np.array([[1, 2]])}, [1, 2]),
        ({"input_ids": [[1, 2]], "attention_mask": [[1, 1]]}, [1, 2]),
    ],
)
async def test_prompts_as_vllm_and_tokenizers_have_them(model: Model, form: Any, ids: list[int]) -> None:
    with model.trace(form) as tracer:
        logits = model.logits.save()
    assert tracer._submission.invokes[0].token_ids == ids


async def test_nnsight_s_other_words(model: Model) -> None:
    with model.generate({"prompt": "hello"}, max_new_tokens=3) as tracer:
        logits = model.logits.save()
    assert tracer._submission.invokes[0].sampling == {"max_tokens": 3}
    assert tracer._submission.invokes[0].prompt == "hello"


def test_a_handle_without_a_client() -> None:
    from tracewire.traces.served_models import ModelInfo
    from tracewire_bus.domain.tree import ModuleTree

    info = engine_info()
    bare = Model(ModelInfo.of([info]), [ModuleTree(info)])
    with pytest.raises(TracewireError, match="no client"):
        bare.trace("x")
