"""Each field of vLLM's own requests is served, or refused by name, or listed with its reason."""

from __future__ import annotations

import re
from typing import Any, get_args

import pytest
from pydantic import BaseModel, ValidationError

from tests.support import ROOT
from tracewire.gateway.bodies import ChatBody, CompletionBody, NotServed
from tracewire.gateway.responses_bodies import ResponsesBody

PAGE = (ROOT / "docs" / "gateway.md").read_text()
LISTED = set(re.findall(r"`(\w+)`", PAGE[PAGE.index("Refused by name") :].split("\n## ")[0]))
#: Fields that clients send and that change nothing, neither here nor in vLLM.
WITHOUT_EFFECT = {
    *("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "modalities"),
    *("include", "truncation"),
}
NEEDED: dict[type[BaseModel], dict[str, Any]] = {
    CompletionBody: {"model": "m", "prompt": "x"},
    ChatBody: {"model": "m", "messages": [{"role": "user", "content": "x"}]},
    ResponsesBody: {"model": "m", "input": "x"},
}


def theirs(ours: type[BaseModel]) -> type[BaseModel]:
    """vLLM's class for the same requests."""
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest
    from vllm.entrypoints.openai.responses.protocol import ResponsesRequest

    found: type[BaseModel] = {
        CompletionBody: CompletionRequest,
        ChatBody: ChatCompletionRequest,
        ResponsesBody: ResponsesRequest,
    }[ours]
    return found


def unserved(ours: type[BaseModel]) -> set[str]:
    """The fields that are refused unless they ask for nothing."""
    refusal = get_args(NotServed)[1]
    return {name for name, field in ours.model_fields.items() if refusal in field.metadata}


@pytest.mark.parametrize("ours", NEEDED)
def test_no_field_of_vllm_is_ignored_in_silence(ours: type[BaseModel]) -> None:
    missing = theirs(ours).model_fields.keys() - ours.model_fields.keys()
    assert missing == set(), "serve them, or refuse them by name and list them in docs/gateway.md"
    assert unserved(ours) - LISTED == set(), "list them in docs/gateway.md"
    assert WITHOUT_EFFECT & ours.model_fields.keys() - set(re.findall(r"`(\w+)`", PAGE)) == set()


@pytest.mark.parametrize("ours", NEEDED)
def test_what_is_not_served_is_refused_by_name(ours: type[BaseModel]) -> None:
    assert unserved(ours)
    for name in unserved(ours):
        with pytest.raises(ValidationError) as raised:
            ours(**NEEDED[ours], **{name: 1})
        assert [one["loc"] for one in raised.value.errors()] == [(name,)]
        ours(**NEEDED[ours], **{name: None})


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({"stream": True, "prompt_logprobs": 1}, "a stream has no prompt_logprobs"),
        ({"stream_options": {"include_usage": True}}, "those of a stream"),
        ({"echo": True, "logprobs": 1}, "echo is served without logprobs"),
        ({"echo": True, "prompt": [1, 2]}, "echo is served for prompts of text"),
    ],
)
def test_what_does_not_go_together_is_refused(body: dict[str, Any], says: str) -> None:
    with pytest.raises(ValidationError, match=says):
        CompletionBody(**NEEDED[CompletionBody] | body)
