"""A sweep of patches: which traces run, what becomes of their outcomes, and how it ends where one fails."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import anyio
import anyio.to_thread
import numpy as np
import pytest

import tracewire
from tests.support.bus_engine import Stage
from tracewire import Client, Patch, Probe
from tracewire.blocking import Client as BlockingClient
from tracewire_bus.wire.messages import Failure

WIDTH = 8


class Scripted:
    """Plays a model whose log-probability of token 5 is -10 for `cccc`, and 100 times the layer and the position of a
    patched value more; and that of token 6 always -1. The clean prompt measures -2.
    """

    def __init__(self, fail: tuple[int, int] | None = None) -> None:
        self.running = self.most = 0
        self.fail = fail
        self.patched: list[tuple[int, int]] = []
        self.sampling: list[dict[str, Any]] = []

    async def __call__(self, stage: Stage) -> None:
        self.running += 1
        self.most = max(self.most, self.running)
        failure = await self._play(stage)
        # The client may know the end, and submit the next trace, before the script does.
        self.running -= 1
        await stage.final("failed" if failure else "finished", failure)

    async def _play(self, stage: Stage) -> Failure | None:
        prompt = stage.submission.invokes[0].prompt or ""
        self.sampling.append(stage.submission.invokes[0].sampling)
        await stage.accept(prompt_token_strings=[list(prompt)])
        value, saved = (-2.0, {}) if prompt.startswith("clean") else (-10.0, {})
        for one in stage.submission.interventions:
            if isinstance(one, Probe):
                layer = int(one.at.removeprefix("residual(").rstrip(")"))
                rows = [[layer * 10.0 + position] * WIDTH for position in range(len(prompt))]
                saved[one.name] = np.array(rows, np.float32)
            elif isinstance(one, Patch):
                layer, position = divmod(int(one.values[0]), 10)
                assert one.at == f"residual({layer})"
                assert one.positions == position
                self.patched.append((layer, position))
                value += 100.0 * layer + position
                if (layer, position) == self.fail:
                    return Failure(type="ValueError", message="no", field="interventions")
        await stage.save("!", saved, logprobs=[{5: (value, 1, "a"), 6: (-1.0, 2, "b")}])
        return None


async def test_each_layer_and_position_is_measured_once(client: Client, engine: Callable[..., Any]) -> None:
    script = Scripted()
    async with engine(script):
        sweep = await client.patch_sweep("tiny", "clean", "cccc.", metric=(5, 6), concurrency=3)
    assert sorted(script.patched) == [(layer, position) for layer in range(4) for position in range(5)]
    assert script.most <= 3
    assert (sweep.clean, sweep.corrupted) == (-1.0, -9.0)
    assert sweep.values.tolist() == [[-9.0 + 100 * layer + position for position in range(5)] for layer in range(4)]
    np.testing.assert_allclose(sweep.normalized, (sweep.values + 9) / 8)
    assert (sweep.layers, sweep.positions, sweep.tokens) == ([0, 1, 2, 3], [0, 1, 2, 3, 4], [*"cccc."])
    assert sweep.traces == 22 == len(script.sampling)
    assert all(one["logprob_token_ids"] == [5, 6] and one["max_tokens"] == 1 for one in script.sampling)
    assert "4 layers, 5 positions" in repr(sweep)


async def test_some_layers_and_positions_and_a_function_as_metric(client: Client, engine: Callable[..., Any]) -> None:
    script = Scripted()
    async with engine(script):
        sweep = await client.patch_sweep(
            "tiny", "clean", "cccc.", metric=lambda result: len(result.text), layers=[-1, 1], positions=[-1, 0]
        )
    assert sorted(script.patched) == [(1, 0), (1, 4), (3, 0), (3, 4)]
    assert (sweep.layers, sweep.positions) == ([3, 1], [4, 0])
    assert sweep.values.tolist() == [[1.0, 1.0], [1.0, 1.0]]
    with pytest.raises(ZeroDivisionError, match="does not tell them apart"):
        _ = sweep.normalized
    assert all("logprob_token_ids" not in one for one in script.sampling)


async def test_the_first_failure_ends_the_sweep_and_says_where(client: Client, engine: Callable[..., Any]) -> None:
    script = Scripted(fail=(2, 1))
    async with engine(script):
        with pytest.raises(tracewire.TraceFailed) as caught:
            await client.patch_sweep("tiny", "clean", "cccc.", metric=5, concurrency=1)
    assert caught.value.__notes__ == ["in the sweep: layer 2, position 1"]
    assert script.patched[-1] == (2, 1)


@pytest.mark.parametrize(
    ("options", "field", "says"),
    [
        ({"layers": "7"}, "layers", "4 layers"),
        ({"layers": [0, 0]}, "layers", "each once"),
        ({"layers": []}, "layers", "one or more"),
        ({"at": "residual(1)"}, "at", "with {layer} in it"),
        ({"at": "model.layers.{layer}.nothing"}, "at", "no module"),
        ({"positions": 9}, "positions", "position 9 is beyond the prompt of 5 tokens"),
        ({"positions": "all"}, "positions", "positions of the prompt"),
        ({"metric": 9999}, "metric", "token id below 4096"),
        ({"metric": (1, 2, 3)}, "metric", "two tokens"),
        ({"metric": 1.5}, "metric", "a token"),
        ({"metric": 7}, "metric", "no log-probability of token 7"),
        ({"clean": "longer than that"}, "corrupted", "as many tokens as the clean prompt has, which are 16, got 5"),
    ],
)
async def test_what_cannot_be_swept_is_refused_by_its_field(
    client: Client, engine: Callable[..., Any], options: dict[str, Any], field: str, says: str
) -> None:
    script = Scripted()
    given: dict[str, Any] = {"clean": "clean", "metric": 5, **options}
    async with engine(script):
        with pytest.raises(tracewire.TraceRejected, match=says) as caught:
            await client.patch_sweep("tiny", given.pop("clean"), "cccc.", **given)
    assert caught.value.field == field
    assert script.patched == []


async def test_a_misspelt_option_is_named(client: Client, engine: Callable[..., Any]) -> None:
    with pytest.raises(TypeError, match="did you mean 'layers'"):
        await client.patch_sweep("tiny", "a", "b", metric=5, layer=3)  # type: ignore[call-arg]


async def test_the_blocking_client_sweeps(engine: Callable[..., Any], redis_url: str, prefix: str) -> None:
    def sweep() -> tracewire.PatchSweep:
        with BlockingClient(redis_url, prefix=prefix) as blocking:
            return blocking.patch_sweep("tiny", "clean", "cccc.", metric=5, layers=1, positions=2)

    async with engine(Scripted()):
        found = await anyio.to_thread.run_sync(sweep)
    assert found.values.tolist() == [[92.0]]
