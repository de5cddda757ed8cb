"""What a caller can say of a trace arrives in its submission, or is refused naming the field."""

from __future__ import annotations

import math
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

import tracewire
from tests.support.captured import block, wrapping
from tests.support.clients import watch
from tests.support.served import served, submission
from tracewire import Client, LogitLens, Probe, Prompt, Steer, TraceRejected, intervention
from tracewire_bus.bus import Bus
from tracewire_bus.domain.limit_table import Limits
from tracewire_bus.domain.limits import MAX_HELPERS, MAX_INVOKES, MAX_SOURCE, LimitExceeded, check_size
from tracewire_bus.wire.messages import Block, Helper, Invoke
from tracewire_bus.wire.packing import unpack


async def test_everything_that_a_submission_can_say(client: Client, engine: Callable[..., Any]) -> None:
    live = {"alpha": 0.5, "direction": torch.ones(2, dtype=torch.bfloat16)}
    async with engine() as serving:
        async with client.trace(
            "tiny",
            prompts=["text", [1, 2], torch.tensor([3, 4]), [{"role": "user", "content": "hi"}], Prompt("own", n=2)],
            block=watch.block(),
            live=live,
            deadline=timedelta(minutes=2),
            priority=-3,
            detach=True,
            trace_id="my:trace-1",
            by="alice",
            temperature=np.float32(0.5),
            stop=("a", "b"),
            logit_bias={5: 1.0},
        ) as trace:
            await trace.result()
        submission = serving.taken[0]
    assert trace.id == submission.trace == "my:trace-1"
    invokes = submission.invokes
    assert [(each.prompt, each.token_ids, each.messages) for each in invokes] == [
        ("text", None, None),
        (None, [1, 2], None),
        (None, [3, 4], None),
        (None, None, [{"role": "user", "content": "hi"}]),
        ("own", None, None),
    ]
    shared = {"temperature": 0.5, "stop": ["a", "b"], "logit_bias": {5: 1.0}}
    assert invokes[0].sampling == shared
    assert invokes[4].sampling == {**shared, "n": 2}
    assert (submission.deadline_s, submission.priority, submission.detach) == (120.0, -3, True)
    assert submission.client == "alice"
    values = unpack(submission.live)
    assert values["alpha"] == 0.5
    assert values["direction"].dtype.name == "bfloat16"


def undecorated(model, tracer, live):
    pass


PIXELS = np.zeros((4, 5, 3), np.uint8)


def with_media(media: Any) -> dict[str, Any]:
    """A prompt with such media."""
    return {"prompt": {"prompt": "x", "multi_modal_data": media}}


REFUSED: dict[str, tuple[dict[str, Any], str, str]] = {
    "no prompt": ({}, "prompt", "expected a prompt"),
    "empty text": ({"prompt": ""}, "prompt", "is empty"),
    "no tokens": ({"prompt": []}, "prompt", "is empty"),
    "empty tensor": ({"prompt": torch.zeros(0, dtype=torch.int64)}, "prompt", "is empty"),
    "bytes": ({"prompt": b"abc"}, "prompt", "expected text, token ids or chat messages"),
    "a number": ({"prompt": 5}, "prompt", "expected text"),
    "a dict": ({"prompt": {"text": "x"}}, "prompt", "prompt_token_ids or input_ids"),
    "a mask of another length": (
        {"prompt": {"input_ids": [1, 2], "attention_mask": [1]}},
        "prompt.attention_mask",
        "2 numbers",
    ),
    "a shared number": ({"shared": {"n": 1}}, "shared.n", "a list, a dict or an array"),
    "a shared name that is none": ({"shared": {"a b": []}}, "shared", "names that a block can use"),
    "shared values that are large": ({"shared": {"xs": [b"x" * 2**21]}}, "shared", "at most 1048576 bytes"),
    "shared values in a list": ({"shared": [1]}, "shared", "expected a dict"),
    "an image beside nothing": (
        {"prompt": {"multi_modal_data": {"image": PIXELS}}},
        "prompt",
        "prompt_token_ids or input_ids",
    ),
    "images that are a list": (with_media([PIXELS]), "prompt.multi_modal_data", "expected a dict"),
    "sound": (with_media({"audio": PIXELS}), "prompt.multi_modal_data.audio", "only images"),
    "no images": (with_media({"image": []}), "prompt.multi_modal_data.image", "an empty list"),
    "an image's address": (with_media({"image": "x.png"}), "prompt.multi_modal_data.image", "of uint8, or Pillow's"),
    "an image of floats": (
        with_media({"image": [PIXELS, PIXELS / 255]}),
        "prompt.multi_modal_data.image[1]",
        "got float64 [4, 5, 3]",
    ),
    "an image in grey": (with_media({"image": PIXELS[..., 0]}), "prompt.multi_modal_data.image", "got uint8 [4, 5]"),
    "images without end": (
        with_media({"image": np.broadcast_to(np.uint8(0), (1 << 15, 1 << 12, 3))}),
        "prompt.multi_modal_data.image",
        "at most 268435456 bytes",
    ),
    "an image to a model of text": (with_media({"image": PIXELS}), "prompt.multi_modal_data", "takes no images"),
    "a float token": ({"prompt": [1, 2.5]}, "prompt[1]", "expected token ids"),
    "a bool token": ({"prompt": [True]}, "prompt[0]", "expected token ids"),
    "a negative token": ({"prompt": [1, -1]}, "prompt[1]", "not negative, got -1"),
    "a message without a role": ({"prompt": [{"content": "x"}]}, "prompt[0].role", "with a role"),
    "a message without content": ({"prompt": [{"role": "user"}]}, "prompt[0].content", "with a content"),
    "messages and tokens": ({"prompt": [{"role": "user", "content": "x"}, 5]}, "prompt[0]", "expected token ids"),
    "both": ({"prompt": "x", "prompts": ["y"]}, "prompts", "got both"),
    "no prompts": ({"prompts": []}, "prompts", "at least one"),
    "prompts is text": ({"prompts": "abc"}, "prompts", "expected a list of prompts"),
    "prompts is a number": ({"prompts": 3}, "prompts", "expected a list of prompts"),
    "an empty one of several": ({"prompts": ["a", ""]}, "prompts[1]", "is empty"),
    "sampling is no plain value": ({"prompt": "x", "stop": [object()]}, "sampling.stop[0]", "got object"),
    "sampling of one prompt": ({"prompts": [Prompt("x", stop=print)]}, "prompts[0].sampling.stop", "expected a number"),
    "a plain function": ({"prompt": "x", "block": undecorated}, "block", "decorate it with @tracewire.intervention"),
    "source text": ({"prompt": "x", "block": "x = 1"}, "block", "expected an intervention"),
    "live is a list": ({"prompt": "x", "live": [1]}, "live", "expected a dict"),
    "a live name": ({"prompt": "x", "live": {"a b": 1}}, "live", "live.NAME"),
    "a live value": ({"prompt": "x", "live": {"alpha": object()}}, "live.alpha", "got object"),
    "a variable": ({"prompt": "x", "block": watch(direction=object())}, "variables.direction", "What can travel"),
    "no deadline": ({"prompt": "x", "deadline": 0}, "deadline", "positive"),
    "a deadline of text": ({"prompt": "x", "deadline": "1h"}, "deadline", "positive"),
    "an endless deadline": ({"prompt": "x", "deadline": float("inf")}, "deadline", "positive"),
    "a priority": ({"prompt": "x", "priority": "high"}, "priority", "an integer"),
    "an id": ({"prompt": "x", "trace_id": "a b"}, "trace_id", "1 to 128"),
    "an empty id": ({"prompt": "x", "trace_id": ""}, "trace_id", "1 to 128"),
    "a model": ({"model": None, "prompt": "x"}, "model", "its name"),
}


@pytest.mark.parametrize("case", REFUSED)
async def test_bad_input_is_refused_naming_the_field(client: Client, engine: Callable[..., Any], case: str) -> None:
    arguments, field, message = REFUSED[case]
    async with engine() as serving:
        with pytest.raises(TraceRejected) as caught:
            async with client.trace(**{"model": "tiny", **arguments}):
                pass
        assert caught.value.field == field
        assert message in str(caught.value)
        assert str(caught.value).startswith(f"{field}: ")
        assert serving.taken == []
        # A good one right after.
        async with client.trace("tiny", "hello") as trace:
            assert (await trace.result()).text == "one two three"


async def test_a_submission_that_is_too_large_is_refused(
    client: Client, engine: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    few = partial(check_size, limits=Limits(submission_bytes=1000))
    monkeypatch.setattr("tracewire_bus.submitting.check_size", few)
    async with engine():
        with pytest.raises(TraceRejected, match=r"may take 1000; large values travel beside it") as caught:
            async with client.trace("tiny", "hello" * 1000):
                pass
        assert caught.value.field == "submission"


@intervention
def reads_live(model, tracer, live):
    first = 1
    scale = live.alhpa
    other = tracer.live.alpha


@intervention
def tries_live(model, tracer, live):
    try:
        scale = live.alhpa
    except AttributeError:
        scale = 1.0
    beta = getattr(live, "beta", 2.0)


async def test_a_live_parameter_that_is_not_declared_is_refused_at_its_line(client: Client) -> None:
    with pytest.raises(TraceRejected, match="declares alpha; did you mean 'alpha'") as caught:
        client.trace("tiny", "hello", reads_live, live={"alpha": 1.0})
    assert caught.value.field == "live.alhpa"
    assert caught.value.filename == __file__
    assert caught.value.line == reads_live.first_line + 1
    with pytest.raises(TraceRejected, match=r"live\.alpha.*declares alhpa"):
        client.trace("tiny", prompts=["one", Prompt("two", reads_live)], live={"alhpa": 1.0})
    client.trace("tiny", "hello", reads_live, live={"alhpa": 1.0, "alpha": 1.0})
    client.trace("tiny", "hello", tries_live)


NAN = math.nan


#: What is submitted, the field at fault, and what is said of it.
MISUSED: dict[str, tuple[dict[str, Any], str, str]] = {
    "half of a surrogate pair in a prompt": ({"prompt": "a\ud800"}, "prompt", "expected text, got half of a surrogate"),
    "and in a message": ({"prompt": [{"role": "user", "content": "\ud800"}]}, "prompt[0].content", "surrogate"),
    "and in a key of one": ({"prompt": [{"role": "user", "content": "", "\ud800": 1}]}, "prompt[0]", "surrogate"),
    "and in sampling": ({"stop": ["\ud800"]}, "sampling.stop[0]", "surrogate"),
    "and in a model's name": ({"model": "\ud800"}, "model", "its name"),
    "and in an edit's name": ({"edits": ["\ud800"]}, "edits", "names of edits"),
    "a token id beyond 64 bits": ({"prompt": [2**70]}, "prompt[0]", "expected a token id"),
    "a seed beyond 64 bits": ({"seed": 2**70}, "sampling.seed", "at most 64 bits"),
    "a temperature that is NaN": ({"temperature": NAN}, "sampling.temperature", "got NaN"),
    "and one of a prompt's own": ({"prompt": Prompt("a", top_p=NAN)}, "sampling.top_p", "got NaN"),
    "a prompt in a prompt": ({"prompt": Prompt(Prompt("a"))}, "prompt", "expected text"),  # type: ignore[arg-type]
    "an empty list in a Prompt": ({"prompt": None, "prompts": [Prompt([])]}, "prompts[0]", "is empty"),
    "a detach of text": ({"detach": "no"}, "detach", "expected True or False, got 'no'"),
    "an author without a name": ({"by": ""}, "by", "name of a client"),
    "an author of half of a surrogate pair": ({"by": "\ud800"}, "by", "name of a client"),
    "a live parameter in a container": ({"live": {"a": {"b": 1}}}, "live.a", "or an array, got dict"),
    "a live parameter that is a keyword": ({"live": {"class": 1}}, "live", "live.NAME"),
    "a decorator above the intervention": ({"block": wrapping(block)}, "block", "take the one above"),
    "a plain function as a prompt's own block": (
        {"prompt": None, "prompts": ["a", Prompt("b", block=print)]},  # type: ignore[arg-type]
        "prompts[1].block",
        "expected an intervention",
    ),
    "a scale of text": (
        {"interventions": [Steer("residual(1)", np.ones(8), scale="big")]},  # type: ignore[arg-type]
        "interventions[0].scale",
        "expected a number or Live(name), got 'big'",
    ),
    "a name that is a number": (
        {"interventions": [Probe(1, "residual(1)")]},  # type: ignore[arg-type]
        "interventions[0].name",
        "expected a string, got 1",
    ),
    "a count that is no integer": (
        {"interventions": [LogitLens("lens", "residual(1)", top_k=1.5)]},  # type: ignore[arg-type]
        "interventions[0].top_k",
        "expected an integer, got 1.5",
    ),
    "positions that there are not": (
        {"interventions": [Probe("p", "residual(1)", positions="some")]},  # type: ignore[arg-type]
        "interventions[0].positions",
        "expected one of 'last', ",
    ),
}


@pytest.mark.parametrize("case", MISUSED)
async def test_what_cannot_be_submitted_is_refused_naming_the_field(client: Client, engine: Any, case: str) -> None:
    given, field, message = MISUSED[case]
    async with engine() as serving:
        with pytest.raises(TraceRejected) as caught:
            async with client.trace(**{"model": "tiny", "prompt": "a", **given}):
                pass
        assert caught.value.field == field
        assert message in caught.value.message
        assert serving.taken == []


def test_what_is_expected_of_a_live_parameter_is_said_once(client: Client) -> None:
    with pytest.raises(tracewire.UntransportableVariable) as caught:
        client.trace("tiny", "a", live={"alpha": [1.0]})
    assert str(caught.value) == "live.alpha: expected a number, a boolean, a string, bytes or an array, got list"


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize("priority", [10**30, -(10**30), 2**53 + 1])
def test_a_priority_has_bounds(client: Client, priority: int) -> None:
    with pytest.raises(tracewire.TraceRejected) as caught:
        client.trace("tiny", "hello", priority=priority)
    assert caught.value.field == "priority"


async def test_a_client_is_told_before_it_submits(bus: Bus, embedded: str, prefix: str) -> None:
    helpers = [Helper(name="h", source="pass")] * (MAX_HELPERS + 1)
    for fields, field in [
        ({"invokes": [Invoke(prompt="x")] * (MAX_INVOKES + 1)}, "invokes"),
        ({"interventions": [Steer(at="residual(1)", vector=1.0)] * 65}, "interventions"),
        ({"block": Block(name="b", source="pass", helpers=helpers)}, "block"),
        ({"block": Block(name="b", source="x" * (MAX_SOURCE + 1))}, "block"),
        ({"invokes": [Invoke(prompt="x", block=Block(name="b", source="x" * MAX_SOURCE))] * 11}, "block"),
        ({"invokes": [Invoke(prompt="x" * 40_000_000)]}, "submission"),
    ]:
        with pytest.raises(LimitExceeded) as caught:
            await bus.submit(submission(**fields))
        assert caught.value.field == field
    async with served(bus, embedded, prefix) as (_, client):
        with pytest.raises(tracewire.TraceRejected, match="33554432") as refused:
            async with client.trace("tiny", "x" * 40_000_000):
                pass
        assert refused.value.field == "submission"
