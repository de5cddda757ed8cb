"""Large arrays on a real engine: referred to, loaded by those who want them, and nothing else changes."""

from __future__ import annotations

import numpy as np
import pytest

import tracewire
from tests.support.engine_process import BLOB_THRESHOLD
from tracewire import Client, Model
from tracewire_bus.wire.digests import digest


@tracewire.intervention
def whole_prompt(model, tracer, live, copies):
    """A whole prompt's activation as it is, larger than the threshold by repetition, in a list and in a tuple."""
    hidden = model.model.layers[1].output[0].clone()
    small = hidden.clone().save()
    large = hidden.repeat(copies, 1).save()
    rows = [].save()
    rows.append(hidden.repeat(copies, 1))
    pair = (hidden.repeat(copies, 1), 1.5)
    pair = tracer_save(pair)


def tracer_save(value):
    import nnsight

    return nnsight.save(value)


PROMPT = list(range(10, 42))


async def test_a_large_save_is_a_reference_that_loads_as_the_inline_value(client: Client, model: Model) -> None:
    async with client.trace(model, PROMPT, whole_prompt(copies=64), max_tokens=3) as trace:
        outputs = [output async for output in trace]
        result = await trace.result()
    small = result.saves["small"]
    assert isinstance(small, np.ndarray)
    expected = np.tile(small, (64, 1))
    assert expected.nbytes > BLOB_THRESHOLD
    for ref in (result.saves["large"], result.saves["rows"][0], result.saves["pair"][0], outputs[0].delta["large"]):
        assert isinstance(ref, tracewire.ArrayRef)
        assert (ref.dtype, ref.shape, ref.nbytes) == (expected.dtype.name, expected.shape, expected.nbytes)
        loaded = await ref.load()
        assert digest(loaded) == digest(expected) == ref.digest
    assert result.saves["pair"][1] == 1.5


@tracewire.intervention
def changed_later(model, tracer, live):
    """A large save that later steps change in place, and one that only the end brings."""
    total = None
    for step in tracer.iter[:]:
        hidden = model.model.layers[1].output[0]
        if total is None:
            total = hidden[-1].repeat(4096, 1).save()
        else:
            total += 1
    late = total.clone().save()


async def test_a_large_save_changed_in_place_ends_as_it_is_in_the_end(client: Client, model: Model) -> None:
    async with client.trace(model, PROMPT, changed_later(), max_tokens=4) as trace:
        outputs = [output async for output in trace]
        result = await trace.result()
    first, last = outputs[0].delta["total"], result.saves["total"]
    assert isinstance(first, tracewire.ArrayRef)
    assert isinstance(last, tracewire.ArrayRef)
    before, after = await first.load(), await last.load()
    assert before.shape == after.shape
    assert not np.array_equal(before, after)
    assert last.digest == digest(after)


@tracewire.intervention
def steered(model, tracer, live, table):
    """Reads a large variable and a live array, and changes its own copy of one."""
    table[0] += 1
    sums = [table.double().sum().item(), live.bias.double().sum().item()]
    kept = [].save()
    kept.extend(sums)
    same = table[1:3].clone().save()


async def test_a_large_variable_reaches_the_block_and_stays_its_own(client: Client, model: Model) -> None:
    table = np.arange(400_000, dtype=np.float32).reshape(-1, 100) / 1000
    bias = np.ones(100_000, dtype=np.float64)
    found = []
    for _ in range(2):
        async with client.trace(model, PROMPT, steered(table=table), live={"bias": bias}, max_tokens=1) as trace:
            found.append((await trace.result()).saves)
    for saves in found:
        assert saves["kept"] == pytest.approx([table.astype(np.float64).sum() + 100, 100_000.0])
        assert np.array_equal(saves["same"], table[1:3])


@tracewire.intervention
def stops(model, tracer, live):
    """Saves something large in the step that it stops in."""
    kept = [].save()
    for step in tracer.iter[:]:
        kept.append(model.model.layers[1].output[0][-1].repeat(2048, 1))
        if len(kept) == 3:
            tracer.stop()


@tracewire.intervention
def raises(model, tracer, live):
    """Raises after something large."""
    kept = [].save()
    for step in tracer.iter[:]:
        kept.append(model.model.layers[1].output[0][-1].repeat(2048, 1))
        if len(kept) == 2:
            raise ValueError("enough")


async def test_a_block_with_large_saves_can_stop_and_raise(client: Client, model: Model) -> None:
    async with client.trace(model, PROMPT, stops(), max_tokens=20) as trace:
        result = await trace.result()
    assert (result.status, len(result.token_ids), len(result.saves["kept"])) == ("stopped", 3, 3)
    async with client.trace(model, PROMPT, raises(), max_tokens=20) as trace:
        with pytest.raises(tracewire.InterventionError, match="enough") as caught:
            await trace.result()
    kept = caught.value.result.saves["kept"]
    assert [len(await ref.load()) for ref in kept] == [2048, 2048]
