"""What ranks and stages without hosts have in common: they know the requests with blocks, which others run."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from tracewire_bus.wire.messages import Failure
from tracewire_engine.link.shared_rows import RowBytes

from .left_values import Left, merged
from .rank_link import Edit
from .rows import SharedRows, StepRows

__all__ = ["BlocksOfOthers", "with_edits"]

_generated: msgspec.msgpack.Decoder[list[Any]] = msgspec.msgpack.Decoder(list)


class BlocksOfOthers:
    """The requests whose blocks run in hosts of another rank or stage, the *owner*."""

    def __init__(self) -> None:
        self._by_request: dict[str, str] = {}

    def wait_ready(self) -> None:
        """Return at once: the owner has the hosts."""

    def steer(self, encoded: bytes) -> None:
        """Do nothing: the owner tells its hosts."""

    def tell_ends(self) -> None:
        """Do nothing: the owner tells its hosts."""

    def take_result(self, generated: bytes) -> bool:
        """Return whether the adapter's message is about a request with blocks, which the owner tells its host."""
        return _generated.decode(generated)[0] in self._by_request.values()

    def fail(self, request_id: str, failure: Failure) -> bool:
        """Return whether a request has blocks. The owner ends it."""
        return request_id in self._by_request

    def __len__(self) -> int:
        return len(self._by_request)


def with_edits(
    value: Any, edits: Iterable[Edit], data: RowBytes, fail: Callable[[Edit, Exception], None], *, by_request: bool
) -> Any:
    """A value of this rank with the rows that the owner's hosts leave in it.

    Args:
        value: the model's.
        edits: what the hosts leave.
        data: has the tensors of the edits.
        fail: takes an error of an edit's rows, as in `merged`.
        by_request: whether the value has one row for each request.
    """
    left = [
        Left(edit, SharedRows(value, StepRows(*edit.rows), by_request=by_request), edit.reply, data) for edit in edits
    ]
    return merged(value, left, fail)
