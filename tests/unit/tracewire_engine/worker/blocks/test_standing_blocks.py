"""Edits of a request: one that cannot be made counts as having raised, and the others are made."""

from __future__ import annotations

from typing import Any

import msgspec
import torch

from tracewire_bus.wire.messages import Block
from tracewire_engine.protocol.messages import EditBlock
from tracewire_engine.worker.blocks.compiler import BlockCache
from tracewire_engine.worker.blocks.standing_blocks import EditedRequest


def _taken(*edits: tuple[str, str, bool]) -> EditedRequest:
    """A request with these edits: name, source, and whether the request ends with an error of it."""
    request = EditedRequest("r")
    encoded = [
        EditBlock(name=name, block=msgspec.Raw(msgspec.msgpack.encode(Block(name, source, modules={}))), fatal=fatal)
        for name, source, fatal in edits
    ]
    request.take(msgspec.msgpack.encode(encoded), BlockCache(None, torch.device("cpu")))
    return request


def _made(request: EditedRequest) -> list[str]:
    copies: dict[str, Any] = request.copies
    return list(copies)


def test_one_that_cannot_be_compiled_is_named_and_the_others_are_made() -> None:
    request = _taken(("bad", "x = (", False), ("good", "x = 1", False))
    try:
        assert _made(request) == ["good"]
        assert request.edit_errors["bad"].type == "SyntaxError"
        request.note_errors()
        assert not request.has_failed
        assert request.error is None
    finally:
        request.dispose()
    assert _made(request) == []


def test_the_request_ends_with_one_that_is_fatal() -> None:
    request = _taken(("bad", "x = (", True))
    request.note_errors()
    assert request.has_failed
    assert (request.error.field, request.error.message[:12]) == ("edits.bad", "edit 'bad': ")


def test_edits_that_cannot_be_read_are_the_request_s_error() -> None:
    request = EditedRequest("r")
    request.take(b"\xc1", BlockCache(None, torch.device("cpu")))
    assert request.error.field == "edits"
    assert "cannot be read" in request.error.message
