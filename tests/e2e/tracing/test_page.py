"""Rows of `docs/nnsight.md`, each by the claim that it makes, and what else a block may save and use."""

# mypy: ignore-errors

from __future__ import annotations

import importlib.util
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

import tracewire
from tracewire import Client, InterventionError, Model, TraceRejected

PROMPT = "def parse(text):"
GREEDY = {"temperature": 0.0, "ignore_eos": True}


async def test_max_new_tokens_and_generate_are_nnsight_s_words_for_the_same(client: Client, model: Model) -> None:
    with model.trace(PROMPT, max_new_tokens=3, **GREEDY) as tracer:
        logits = model.logits.save()
    first = await tracer.result()
    with model.generate(PROMPT, max_tokens=3, **GREEDY) as tracer:
        logits = model.logits.save()
    second = await tracer.result()
    assert len(first.token_ids) == 3
    assert first.token_ids == second.token_ids
    with pytest.raises(TraceRejected, match="did you mean 'max_tokens'"):
        async with client.trace(model, PROMPT, max_new_tokens=3) as trace:
            await trace.result()


async def test_an_invoke_without_a_prompt_and_a_block_is_no_request(model: Model) -> None:
    with model.trace(max_tokens=2, **GREEDY) as tracer:
        with tracer.invoke():
            pass
        with tracer.invoke(PROMPT):
            pass
        with tracer.invoke(PROMPT):
            logits = model.logits.save()
    result = await tracer.result()
    assert [len(invoke.choices[0].token_ids) for invoke in result.invokes] == [2, 2]
    assert [sorted(invoke.choices[0].saves) for invoke in result.invokes] == [[], ["logits"]]
    with pytest.raises(TraceRejected, match="an invoke without a prompt has no request"), model.trace() as tracer:  # noqa: SIM117
        with tracer.invoke():
            logits = model.logits.save()


async def test_a_cache_is_plain_dicts_and_lists(model: Model) -> None:
    with model.trace(PROMPT, max_tokens=2, **GREEDY) as tracer:
        cache = tracer.cache(modules=[model.model.layers[0]])
    cache = (await tracer.result()).saves["cache"]
    assert type(cache) is dict
    assert type(cache["model.model.layers.0"]) is list
    assert [type(visit) for visit in cache["model.model.layers.0"]] == [dict, dict]


async def test_an_error_of_a_block_is_an_intervention_error_of_the_builtin_type_that_it_has(model: Model) -> None:
    with model.trace(PROMPT, max_tokens=2, **GREEDY) as tracer:
        hidden = model.model.layers[2].output
        raise KeyError("mine")
    with pytest.raises(KeyError) as caught:
        await tracer.result()
    assert isinstance(caught.value, InterventionError)
    assert caught.value.type == "KeyError"
    assert caught.value.source == 'raise KeyError("mine")'

    with model.trace(PROMPT, max_tokens=2, **GREEDY) as tracer:

        class Mine(ValueError):
            pass

        hidden = model.model.layers[2].output
        raise Mine("mine")
    with pytest.raises(ValueError, match="Mine: mine") as caught:
        await tracer.result()
    assert caught.value.type == "Mine"

    with model.trace(PROMPT, max_tokens=2, **GREEDY) as tracer:
        later = model.model.layers[3].output
        earlier = model.model.layers[1].output
    with pytest.raises(InterventionError) as caught:
        await tracer.result()
    assert type(caught.value) is InterventionError
    assert caught.value.type == "OutOfOrderError"


async def test_saves_of_several_choices_are_a_list(model: Model) -> None:
    with model.trace(PROMPT, max_tokens=2, n=3, temperature=1.0, seed=1) as tracer:
        sampled = [].save()
        for step in tracer.iter[0:2]:
            sampled.append(int(model.samples))
    async for _ in tracer:
        pass
    result = await tracer.result()
    assert tracer.saves["sampled"] == [choice.saves["sampled"] for choice in result.invokes[0].choices]
    assert len(tracer.saves["sampled"]) == 3


async def test_generate_takes_one_prompt(model: Model) -> None:
    with pytest.raises(TraceRejected, match=r"prompt\[0\]: expected token ids or chat messages"):  # noqa: SIM117
        with model.generate(["one", "two"]) as tracer:
            logits = model.logits.save()


async def test_the_tokenizer_and_the_configuration_are_the_engine_s(model: Model) -> None:
    """Here and in a block; the demo model's files are on this machine."""
    with model.trace(PROMPT, max_tokens=1, **GREEDY) as tracer:
        width = tracewire.save(model.config.hidden_size)
        ids = tracewire.save([int(token) for token in model.tokenizer.encode("def parse(text):")])
    saves = (await tracer.result()).saves
    assert model.config.hidden_size == model.config["hidden_size"] == saves["width"] == model.info.hidden_size
    assert model.tokenizer.encode(PROMPT) == saves["ids"]
    assert model.tokenizer is model.tokenizer
    assert model.tokenizer.decode(saves["ids"]) == PROMPT


async def test_the_source_of_a_module_is_the_one_that_a_block_sees(
    model: Model, capsys: pytest.CaptureFixture[str]
) -> None:
    with model.trace(PROMPT, max_tokens=1, **GREEDY) as tracer:
        mlp = tracewire.save(str(model.model.layers[0].mlp.source))
        attention = tracewire.save(str(model.model.layers[0].self_attn.source))
        root = tracewire.save(str(model.source))
    saves = (await tracer.result()).saves
    assert "def forward(self, x):" in saves["mlp"]
    assert "self_gate_up_proj_0" in saves["mlp"]
    print(model.model.layers[0].mlp.source)
    assert capsys.readouterr().out == saves["mlp"] + "\n"
    assert str(model.model.layers[1].self_attn.source) == saves["attention"]
    assert str(model.source) == saves["root"]
    with pytest.raises(AttributeError, match="'self_gate_up_proj_0' exists on the engine, inside a block"):
        _ = model.model.layers[0].mlp.source.self_gate_up_proj_0


def written(folder: Path, source: str):
    """A module of the user's own, which no engine has."""
    path = folder / "mine.py"
    path.write_text(source)
    spec = importlib.util.spec_from_file_location("mine", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


async def test_sets_dtypes_tuples_as_keys_and_modules_of_one_s_own(model: Model, tmp_path: Path) -> None:
    """Streamed with their tokens, folded, and equal to what nnsight collected."""
    mine = written(tmp_path, "import math\nSCALE = 2\ndef scaled(x):\n    return math.floor(x) * SCALE\n")
    known = {7, (1, "a")}
    with model.trace(PROMPT, max_tokens=3, **GREEDY) as tracer:
        norms: dict[tuple[int, str], float] = tracewire.save({})
        seen: set[int] = tracewire.save(set())
        nested = [{}].save()
        given = known.save()
        for step in tracer.iter[0:3]:
            stream = model.residual(2).output
            norms[step, "head"] = mine.scaled(3.5)
            nested[0][step, (step,)] = {len(stream.shape)}
            seen.add(step)
            dtypes = (stream.dtype, frozenset({"a"}))
            dtypes.save()
    deltas = [item.delta async for item in tracer if isinstance(item, tracewire.Output)]
    # vLLM merges outputs while their reader is late.
    streamed = [pair for delta in deltas for pair in delta.get("norms", {}).items()]
    assert streamed == [((step, "head"), 6) for step in range(3)]
    saves = tracer.saves
    assert saves["norms"] == {(step, "head"): 6 for step in range(3)}
    assert saves["seen"] == {0, 1, 2}
    assert saves["given"] == known
    assert saves["dtypes"] == (np.dtype(ml_dtypes.bfloat16), frozenset({"a"}))
    assert saves["nested"] == [{(step, (step,)): {2} for step in range(3)}]
    assert (await tracer.result()).save_errors == {}
