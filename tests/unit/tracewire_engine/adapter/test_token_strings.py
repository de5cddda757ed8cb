"""A string for each token: with its space, its special name, and whatever part of a character it is."""

from __future__ import annotations

from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path

import anyio
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

import tracewire
from tests.support.scripted_engine import ScriptedEngine, serving
from tracewire import Client
from tracewire_bus.bus import Bus
from tracewire_engine.adapter.token_strings import TokenStrings

MODEL = Path(__file__).resolve().parents[4] / "examples" / "demo_model" / "model"
PATIENCE = 60


@pytest.fixture
async def client(embedded: str, prefix: str) -> AsyncIterator[Client]:
    """A client on the session's Redis."""
    async with tracewire.connect(embedded, prefix=prefix) as client:
        yield client


def test_strings_of_a_byte_level_vocabulary() -> None:
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    strings = TokenStrings(tokenizer)
    ids = tokenizer.encode("def parse(text):\n    return text")
    assert "".join(strings(ids)) == "def parse(text):\n    return text"
    assert any(one.startswith(" ") for one in strings(ids))
    assert strings(ids) == strings(ids)
    assert strings([tokenizer.eos_token_id]) == [tokenizer.eos_token]
    spread = tokenizer.encode("\N{SNOWMAN}")
    assert len(strings(spread)) == len(spread)
    assert all("\ufffd" in one for one in strings(spread)) or len(spread) == 1
    assert strings([]) == []


def test_a_leading_space_that_decoding_drops_is_there() -> None:
    """As in vocabularies of SentencePiece."""
    inner = Tokenizer(models.WordLevel({"\u2581of": 0, "f": 1, "<unk>": 2}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Metaspace()
    inner.decoder = decoders.Metaspace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="<unk>")
    assert tokenizer.decode([0]) == "of"
    assert TokenStrings(tokenizer)([0, 1, 2, 0]) == [" of", "f", "<unk>", " of"]


async def test_a_trace_has_strings_if_it_asks_for_them(client: Client, bus: Bus) -> None:
    async with serving(bus, ScriptedEngine(partial(anyio.sleep, 0))):
        await client.models.get("tiny", timeout=PATIENCE)
        with anyio.fail_after(PATIENCE):
            for asked in (True, False):
                async with client.trace("tiny", "hello", max_tokens=3, token_strings=asked) as trace:
                    outputs = [output async for output in trace.outputs()]
                    result = await trace.result()
                strings = [f"<{token_id}>" for token_id in result.token_ids]
                assert result.token_strings == (strings if asked else None)
                for output in outputs:
                    own = [f"<{token_id}>" for token_id in output.token_ids]
                    assert output.token_strings == (own if asked else None)
                state = await client.get_state(trace.id)
                assert state.token_strings == result.token_strings
                assert ("token_string" in result.to_pandas().columns) is asked
    with pytest.raises(tracewire.TraceRejected, match="token_strings: expected True or False"):
        client.trace("tiny", "hello", token_strings="yes")  # type: ignore[call-overload]
