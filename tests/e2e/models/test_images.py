"""Prompts with images, on a tiny Idefics 3: what blocks and interventions see of them, beside transformers.

One engine for all tests of the module, which is full.
"""

# mypy: ignore-errors

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest

import tracewire
from tests.e2e.models.test_models import close, reads, replaces
from tests.support.checkpoints import LAYERS, make_idefics
from tests.support.engine_inside import engine_inside, forgotten
from tracewire import Client, InterventionError, Model, Probe, Steer, TraceFailed, TraceRejected

pytestmark = pytest.mark.full

TEXT = "import os <image> def add(a, b):"
GREEDY = {"temperature": 0.0, "ignore_eos": True}
#: One that stands in its submission, and one that travels apart.
SMALL, LARGE = (
    np.random.default_rng(size).integers(0, 256, (size, size + 10, 3), dtype=np.uint8) for size in (40, 400)
)


@pytest.fixture(scope="module")
async def served(starts_engine: None, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[tuple[Any, str, Path]]:
    """The engine, the URL of its Redis, and the checkpoint."""
    path = make_idefics(tmp_path_factory.mktemp("images"))
    options = {"dtype": "float32", "max_model_len": 256, "max_num_seqs": 8}
    async with engine_inside(model=path, name="idefics", **options) as (engine, url):
        yield engine, url, path


@pytest.fixture
async def client(served: Any) -> AsyncIterator[Client]:
    """A client of the engine's bus; behind each test nothing is left in the engine."""
    async with tracewire.connect(served[1]) as client:
        yield client
    await forgotten(served[0])


@pytest.fixture
async def model(client: Client) -> Model:
    """The model as the client sees it."""
    return await client.models.get("idefics", timeout=30)


def prompt(*images: np.ndarray, text: str = TEXT) -> Any:
    """One of vLLM's prompts."""
    return {"prompt": text, "multi_modal_data": {"image": images[0] if len(images) == 1 else list(images)}}


async def run(client: Client, model: Model, prompt: Any, block: Any = None, count: int = 4, **options: Any) -> Any:
    async with client.trace(model, prompt, block, max_tokens=count, **{**GREEDY, **options}) as trace:
        return await trace.result()


def reference(path: Path, text: str, images: list[np.ndarray], count: int) -> tuple[Any, Any, list[int]]:
    """What transformers computes: the stream after each layer but the last, the last logits, greedy tokens."""
    import torch
    import transformers

    processor = transformers.AutoProcessor.from_pretrained(path)
    model = transformers.Idefics3ForConditionalGeneration.from_pretrained(path, dtype=torch.float32).eval()
    inputs = processor(images=images, text=text, return_tensors="pt")
    with torch.no_grad():
        output = model(**inputs, output_hidden_states=True, use_cache=False)
        tokens = model.generate(**inputs, max_new_tokens=count, do_sample=False, eos_token_id=None)[0]
    streams = [hidden[0].numpy() for hidden in output.hidden_states[1:-1]]
    return streams, output.logits[0, -1].numpy(), tokens[inputs["input_ids"].shape[1] :].tolist()


async def test_the_registry_says_that_it_takes_images(client: Client, model: Model) -> None:
    assert model.info.modalities == ("image",)
    # Counted in the language model, though the tower has more layers.
    assert model.info.layer_count == LAYERS


@pytest.mark.parametrize(
    ("images", "text"), [([SMALL], TEXT), ([LARGE], TEXT), ([SMALL, LARGE], "<image> or <image>?")]
)
async def test_an_image_s_positions_are_read_as_the_others(
    served: Any, client: Client, model: Model, images: list[np.ndarray], text: str
) -> None:
    streams, logits, tokens = reference(served[2], text, images, 4)
    plain = await run(client, model, prompt(*images, text=text))
    assert plain.token_ids == tokens
    assert plain.usage.prompt_tokens == len(streams[0])
    traced = await run(client, model, prompt(*images, text=text), reads(layers=LAYERS))
    assert traced.token_ids == traced.saves["sampled"] == tokens
    for layer, stream in enumerate(streams):
        assert close(traced.saves["streams"][0][layer], stream), f"residual({layer})"
    assert close(traced.saves["logits"][0], logits)
    declared = await run(
        client, model, prompt(*images, text=text), interventions=[Probe("all", "residual(2)", positions="all")]
    )
    assert close(declared.saves["all"][0], streams[2])


async def test_what_is_changed_there_counts(client: Client, model: Model) -> None:
    clean = await run(client, model, prompt(SMALL), reads(layers=LAYERS), 1)
    written = await run(client, model, prompt(SMALL), replaces(layer=1), 1)
    assert np.array_equal(written.saves["after"], -2 * written.saves["before"])
    assert not close(written.saves["logits"], clean.saves["logits"][0])
    vector = np.zeros(model.info.hidden_size, np.float32)
    vector[0] = 50.0
    steer = [Steer("residual(1)", vector), Probe("there", "residual(1)", positions="all")]
    steered = await run(client, model, prompt(SMALL), interventions=steer, count=1)
    moved = np.asarray(steered.saves["there"][0]) - np.asarray(clean.saves["streams"][0][1])
    assert close(moved[:, 0], np.full(len(moved), 50.0), 1e-2)
    # Nobody else's, with the same image.
    again = await run(client, model, prompt(SMALL), reads(layers=LAYERS), 1)
    assert close(again.saves["streams"][0], clean.saves["streams"][0])


async def test_others_share_the_batch(client: Client, model: Model) -> None:
    kinds = {
        "small": (prompt(SMALL), reads(layers=LAYERS)),
        "large": (prompt(LARGE), reads(layers=LAYERS)),
        "text": ("import os", reads(layers=LAYERS)),
        "plain": (prompt(LARGE), None),
    }
    alone = {name: await run(client, model, *kind) for name, kind in kinds.items()}
    together: dict[str, Any] = {}

    async def one(name: str) -> None:
        together[name] = await run(client, model, *kinds[name])

    async with anyio.create_task_group() as group:
        for name in kinds:
            group.start_soon(one, name)
    assert alone["plain"].token_ids == alone["large"].token_ids
    for name, result in together.items():
        assert result.token_ids == alone[name].token_ids
        for ours, theirs in zip(result.saves.get("streams", ()), alone[name].saves.get("streams", ()), strict=True):
            assert close(ours, theirs)


async def test_the_tower_is_not_served(client: Client, model: Model) -> None:
    @tracewire.intervention
    def looks(model, tracer, live):
        seen = model.model.connector.output.save()

    with pytest.raises(InterventionError, match="once on the images of all requests") as caught:
        await run(client, model, prompt(SMALL), looks)
    assert caught.value.type == "NotByToken"
    assert caught.value.source == "seen = model.model.connector.output.save()"
    with pytest.raises(TraceFailed, match="once on the images of all requests") as failed:
        await run(client, model, prompt(SMALL), interventions=[Probe("tower", "model.vision_model")])
    assert "model.vision_model" in str(failed.value)

    @tracewire.intervention
    def keeps(model, tracer, live):
        cache = tracer.cache().save()

    cached = (await run(client, model, prompt(SMALL), keeps, 1)).saves["cache"]
    assert "model.model.text_model.layers.0" in cached
    assert not [path for path in cached if path.startswith(("model.model.vision_model", "model.model.connector"))]


async def test_what_does_not_fit_the_prompt_is_refused(client: Client, model: Model) -> None:
    for wrong in (prompt(SMALL, text="no place"), prompt(SMALL, SMALL)):
        with pytest.raises(TraceRejected, match="the model's processor refused") as caught:
            await run(client, model, wrong, reads(layers=LAYERS))
        assert caught.value.field == "prompt.multi_modal_data.image"
    with pytest.raises(TraceRejected, match="256 of prompt and output") as caught:
        await run(client, model, prompt(SMALL, text="<image>" + " x" * 253))
    assert caught.value.field == "prompt"
    parts = [{"type": "image_url", "image_url": {"url": "data:,"}}]
    with pytest.raises(TraceRejected, match="media are not taken in chat messages"):
        await run(client, model, [{"role": "user", "content": parts}])
