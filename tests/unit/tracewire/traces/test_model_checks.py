"""A submission is checked against the engines that serve its model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import tracewire
from tests.support.bus_engine import engine_info
from tests.support.drained import reads_norm
from tracewire import Client, Prompt, TraceRejected, UnknownModulePath, When, intervention
from tracewire_bus.bus import Bus


async def test_a_path_that_does_not_exist_is_refused_with_the_nearest(
    client: Client, engine: Callable[..., Any]
) -> None:
    @intervention
    def wrong(net, tracer, live):
        kept = net.model.layers[1].mlp.output.save()
        other = net.model.layers[1].mpl.output.save()

    async with engine() as serving:
        model = await client.models.get("tiny")
        with pytest.raises(UnknownModulePath, match=r"model\.layers\.1\.mpl.*model\.layers\.1\.mlp") as caught:
            async with client.trace(model, "hello", wrong):
                pass
        error = caught.value
        assert error.field == "block"
        assert error.filename == __file__
        assert error.line == wrong.first_line + 1
        assert error.source == "other = net.model.layers[1].mpl.output.save()"
        assert error.nearest == "model.layers.1.mlp"
        with pytest.raises(UnknownModulePath):
            async with client.trace("tiny", "hello", wrong):
                pass
        assert serving.taken == []


async def test_more_tokens_than_the_context_has_are_refused(client: Client, engine: Callable[..., Any]) -> None:
    async with engine(max_model_len=2048):
        with pytest.raises(TraceRejected, match=r"at most 2048.*got 99999") as caught:
            await client.trace("tiny", "hello", max_tokens=99999).start()
        assert caught.value.field == "sampling.max_tokens"
        async with client.trace("tiny", prompts=["a", Prompt("b", max_tokens=2048)], max_tokens=3) as trace:
            await trace.result()


async def test_a_block_must_fit_every_engine_that_may_take_it(client: Client, bus: Bus) -> None:
    one = engine_info("tiny", "one", started_at=1.0)
    fewer = [module for module in one.modules if module.path != "model.norm"]
    other = engine_info("tiny", "other", started_at=2.0, modules=fewer, revision="next")
    await bus.registry.register(one)
    async with client.trace("tiny", "a", reads_norm, detach=True) as trace:
        pass
    await client.cancel(trace.id)
    await bus.registry.register(other)
    (model,) = await client.models.list()
    assert model.differs == ("revision", "module tree")
    with pytest.raises(tracewire.UnknownModulePath, match=r"model\.norm"):
        async with client.trace(await client.models.get("tiny"), "a", reads_norm, detach=True):
            pass
    await bus.registry.unregister("other")
    async with client.trace(await client.models.get("tiny"), "a", reads_norm, detach=True) as trace:
        pass
    await client.cancel(trace.id)


async def test_an_engine_that_would_ignore_a_condition_is_not_asked(client: Client, bus: Bus) -> None:
    await bus.registry.register(engine_info("old", engine="old", schema="2.3"), ttl_s=600)
    reads = [
        tracewire.Probe("p", "residual(0)", reduce="norm"),
        tracewire.Probe("q", "residual(0)", when=When(every=2)),
    ]
    with pytest.raises(TraceRejected, match="engine old is of a version that knows no conditions") as caught:
        await client.trace("old", "x", interventions=reads).start()
    assert caught.value.field == "interventions[1].when"
