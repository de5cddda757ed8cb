"""Large values at the client's end, with a scripted engine: loaded by those who want them, free for the others."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

import tracewire
from tests.support.bus_engine import Stage, engine_info, tiny
from tests.support.redis.proxy import proxy
from tracewire import ArrayRef, Client, ConnectError, UntransportableVariable, ValueMissing
from tracewire_bus.bus import Bus
from tracewire_bus.store.blobs import CHUNK_BYTES, THRESHOLD_BYTES, chunk_count
from tracewire_bus.wire.digests import digest
from tracewire_bus.wire.messages import Final
from tracewire_bus.wire.packing import unpack

LARGE = np.random.default_rng(7).random((700, 500), dtype=np.float32)


assert LARGE.nbytes > CHUNK_BYTES


async def saves_large(stage: Stage) -> None:
    """Three items of a list, each a large array in a blob, and a small value."""
    await stage.accept()
    for number in range(3):
        await stage.save("x", {"acts": await stage.store(LARGE + number, "acts"), "small": number})
    await stage.final()


async def test_references_fold_verify_and_load(client: Client, engine: Any) -> None:
    async with engine(saves_large):
        async with client.trace("tiny", "hello") as trace:
            seen = [output.delta["acts"][0] async for output in trace]
            result = await trace.result()
        state = await client.get_state(trace.id)
    refs = result.saves["acts"]
    assert refs == seen == state.saves["acts"]
    assert result.saves["small"] == [0, 1, 2]
    assert result.digest() == digest({"0.0": {"acts": [LARGE, LARGE + 1, LARGE + 2], "small": [0, 1, 2]}})
    for number, ref in enumerate(refs):
        assert isinstance(ref, ArrayRef)
        assert (ref.dtype, ref.shape, ref.nbytes) == ("float32", LARGE.shape, LARGE.nbytes)
        loaded = await ref.load()
        assert np.array_equal(loaded, LARGE + number)
        assert not loaded.flags.writeable
    assert np.array_equal(await state.saves["acts"][2].load(), LARGE + 2)


async def test_one_call_makes_arrays_of_whatever_came(client: Client, engine: Any) -> None:
    """References and arrays alike, and those that NumPy computes wrong with as float32."""
    rng = np.random.default_rng(3)
    narrow = [rng.random(4096).astype(getattr(ml_dtypes, name)) for name in ("bfloat16", "float8_e4m3fn")]

    async def script(stage: Stage) -> None:
        await stage.accept()
        large = await stage.store(LARGE.astype(ml_dtypes.bfloat16), "acts")
        await stage.save("x", {"acts": {"all": (large, LARGE[0]), 1: [large]}, "narrow": narrow, "text": "a", "n": {3}})
        await stage.final()

    async with engine(script), client.trace("tiny", "hello") as trace:
        result = await trace.result()
        saves = await tracewire.load(result.saves)
        exact = await tracewire.load(result.saves["acts"][0], exact=True)
    assert isinstance(result.saves["acts"][0]["all"][0], ArrayRef)
    whole, row = saves["acts"][0]["all"]
    assert whole.dtype == row.dtype == np.float32
    assert np.array_equal(whole, LARGE.astype(ml_dtypes.bfloat16).astype(np.float32))
    assert np.array_equal(saves["acts"][0][1][0], whole)
    assert exact["all"][0].dtype == ml_dtypes.bfloat16
    assert digest(exact["all"][0]) == result.saves["acts"][0]["all"][0].digest
    (given,) = saves["narrow"]
    assert [one.dtype for one in given] == [np.float32, np.float32]
    assert abs(given[0].mean() - 0.5) < 0.02
    assert (saves["text"], saves["n"]) == (["a"], [{3}])


async def test_a_reference_that_is_used_as_an_array_says_how_to_load_it(client: Client, engine: Any) -> None:
    async with engine(saves_large), client.trace("tiny", "hello") as trace:
        ref = (await trace.result()).saves["acts"][0]
    with pytest.raises(AttributeError, match=r"saved as 'acts' is a reference.*tracewire\.load\(value\)"):
        ref.mean()
    with pytest.raises(TypeError, match="is a reference"):
        np.asarray(ref)
    assert copy.copy(ref) == ref
    assert not hasattr(ref, "tolist")


async def test_another_client_loads_from_what_it_reads(
    client: Client, engine: Any, redis_url: str, prefix: str
) -> None:
    async with engine(saves_large):
        async with client.trace("tiny", "hello") as trace:
            await trace.result()
        async with tracewire.connect(redis_url, prefix=prefix) as onlooker:
            async with onlooker.subscribe(trace.id, names={"acts"}) as subscription:
                refs = [event.delta["acts"][0] async for event in subscription if isinstance(event, tracewire.Output)]
            assert np.array_equal(await refs[1].load(), LARGE + 1)
        with pytest.raises(ConnectError, match="closed"):
            await refs[1].load()


async def test_who_does_not_load_pays_nothing(
    client: Client, engine: Any, redis_url: str, prefix: str, tmp_path: Path
) -> None:
    async with engine(saves_large):
        async with client.trace("tiny", "hello") as trace:
            await trace.result()
        async with proxy(redis_url, tmp_path) as way, tracewire.connect(way.url, prefix=prefix) as onlooker:
            async with onlooker.subscribe(trace.id) as subscription:
                events = [event async for event in subscription]
            assert isinstance(events[-1], Final)
            state = await onlooker.get_state(trace.id)
            assert way.delivered < 10_000
            await state.saves["acts"][0].load()
            assert LARGE.nbytes < way.delivered < LARGE.nbytes + 20_000


async def test_a_value_that_expired_names_the_trace_and_the_save(client: Client, bus: Bus, engine: Any) -> None:
    async with engine(saves_large), client.trace("tiny", "hello") as trace:
        result = await trace.result()
    await bus.command("DEL", bus.keys.blobs(trace.id))
    with pytest.raises(ValueMissing, match=f"'acts' by trace {trace.id} cannot be loaded: .* expired") as caught:
        await result.saves["acts"][0].load()
    assert (caught.value.trace_id, caught.value.name) == (trace.id, "acts")


async def test_a_value_that_was_changed_is_not_handed_out(client: Client, bus: Bus, engine: Any) -> None:
    async with engine(saves_large), client.trace("tiny", "hello") as trace:
        ref = (await trace.result()).saves["acts"][0]
    await bus.command("HSET", bus.keys.blobs(trace.id), f"{ref.blob}:0", bytes(CHUNK_BYTES))
    with pytest.raises(ValueMissing, match="do not match the reference"):
        await ref.load()


@tracewire.intervention
def uses(model, tracer, live, table, nested, few):
    print(table, nested, few)


async def test_large_variables_go_ahead_of_the_submission(client: Client, bus: Bus, engine: Any) -> None:
    tensor = torch.arange(THRESHOLD_BYTES, dtype=torch.bfloat16).reshape(2, -1)
    few = np.arange(10)
    async with engine(tiny) as serving:
        block = uses(table=LARGE, nested={"a": [tensor, 1]}, few=few)
        async with client.trace("tiny", "hello", block, live={"bias": few}) as trace:
            await trace.result()
    (submission,) = serving.taken
    variables = unpack(submission.block.variables)
    assert len(submission.block.variables) + len(submission.live) < 2000
    assert np.array_equal(variables["few"], few)
    table, nested = variables["table"], variables["nested"]["a"]
    assert [ref.name for ref in (table, nested[0])] == ["table", "nested"]
    assert nested[1] == 1
    assert np.array_equal(await bus.blobs.load(trace.id, table), LARGE)
    loaded = await bus.blobs.load(trace.id, nested[0])
    assert digest(loaded) == digest(tensor)


async def test_what_several_prompts_use_is_sent_once(client: Client, bus: Bus, engine: Any) -> None:
    async with engine(tiny) as serving:
        block = uses(table=LARGE, nested={"a": [LARGE.copy()]}, few=1)
        async with client.trace("tiny", prompts=[tracewire.Prompt("one", block=block), "two"], block=block) as trace:
            await trace.result()
    (submission,) = serving.taken
    refs = [unpack(one.variables)["table"] for one in (submission.block, submission.invokes[0].block)]
    refs.append(unpack(submission.block.variables)["nested"]["a"][0])
    assert len({ref.blob for ref in refs}) == 1
    assert await bus.command("HLEN", bus.keys.blobs(trace.id)) == chunk_count(LARGE.nbytes)


async def test_blobs_of_a_trace_that_nobody_takes_expire(client: Client, bus: Bus) -> None:
    await bus.registry.register(engine_info(), ttl_s=600)
    async with client.trace("tiny", "hello", uses(table=LARGE, nested=1, few=2)) as trace:
        assert 0 < await bus.command("TTL", bus.keys.blobs(trace.id)) <= 24 * 3600


def test_a_reference_is_no_variable(client: Client) -> None:
    ref = ArrayRef("float32", (2,), bytes(16), "blob", "acts")
    with pytest.raises(UntransportableVariable, match="pass the array that its load"):
        uses(table=ref, nested=1, few=2).block()
    with pytest.raises(UntransportableVariable, match="pass what its load") as caught:
        client.trace("tiny", "hello", live={"bias": ref})
    assert caught.value.field == "live.bias"


async def test_small_submissions_bring_no_blobs(client: Client, bus: Bus, engine: Any) -> None:
    async with engine(tiny), client.trace("tiny", "hello", uses(table=LARGE[:1], nested=1, few=2)) as trace:
        await trace.result()
    assert not await bus.command("EXISTS", bus.keys.blobs(trace.id))
