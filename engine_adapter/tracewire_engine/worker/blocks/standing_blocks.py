"""Standing interventions in the worker: the blocks of edits that run beside a request's own block.

Each edit has a mediator with a scope and marks of its own. The worker starts and serves these mediators before the
request's own block, which therefore reads values as the edits left them. The worker reports the saves of an edit with
the request's own, under the name `<edit>/<name>`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from tracewire_bus.wire.messages import Failure
from tracewire_engine.protocol.messages import EditBlock

from . import save_marks as marks
from .compiler import BlockCache
from .failures import failure_of, is_stop
from .live_params import LiveRun
from .mediator import BlockMediator
from .request import Request

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["EditedRequest", "edits_of"]

_blocks = msgspec.msgpack.Decoder(list[EditBlock])


def edits_of(encoded: bytes | None) -> list[EditBlock]:
    """The edits of a request; none if they cannot be decoded, which `EditedRequest.take` reports."""
    try:
        return _blocks.decode(encoded) if encoded is not None else []
    except (ValueError, TypeError):
        return []


class EditedRequest(Request):
    """A request to which edits apply."""

    def __init__(self, request_id: str) -> None:
        super().__init__(request_id)
        #: The errors of edits noted so far, by the edit's name; and the first error that ends the request.
        self.edit_errors: dict[str, Failure] = {}
        self.fatal: Any = None

    def take(self, encoded: bytes, cache: BlockCache) -> None:
        """Make the mediators of the request's edits. An edit whose mediator cannot be made counts as having raised.

        Args:
            encoded: a list of `EditBlock`, encoded with msgpack.
            cache: makes the mediators.
        """
        try:
            edits = _blocks.decode(encoded)
        except (ValueError, TypeError) as error:
            self.error = Failure(
                type=type(error).__name__, message=f"the request's edits cannot be read: {error}", field="edits"
            )
            return
        for edit in edits:
            try:
                mediator = cache.mediator(bytes(edit.block), LiveRun(""), permit=edit.permit)
            except BaseException as exception:  # a module or a helper's definition can raise anything, SystemExit too
                self._failed(edit.name, failure_of(exception, None), edit.fatal)
                continue
            mediator.fatal = edit.fatal
            self.copies[edit.name] = mediator

    def saves(self) -> dict[str, Any]:
        """The saves of the request's own block and of its edits."""
        found = super().saves()
        for name, mediator in self.mediators():
            found.update({f"{name}/{own}": value for own, value in mediator.saved().items()})
        return found

    @property
    def has_failed(self) -> bool:
        """Whether a fatal edit has raised, which ends the request."""
        return self.fatal is not None or any(
            mediator.fatal and mediator.exception is not None and not is_stop(mediator.exception)
            for _, mediator in self.mediators()
        )

    def mediators(self) -> Iterator[tuple[str, BlockMediator]]:
        """The mediators of the request's edits with the edits' names, in the order in which they run."""
        copies: dict[str, BlockMediator] = self.copies
        yield from copies.items()

    def note_errors(self) -> None:
        """Note the exceptions of edits since the last call. One of a fatal edit becomes the request's error."""
        for name, mediator in self.mediators():
            exception: Any = mediator.exception
            if exception is not None and name not in self.edit_errors and not is_stop(exception):
                self._failed(name, failure_of(exception, mediator.compiled), mediator.fatal)
        if self.fatal is not None:
            self.error = self.error or self.fatal

    def _failed(self, name: str, failure: Failure, fatal: bool) -> None:
        self.edit_errors[name] = failure
        if fatal and self.fatal is None:
            self.fatal = _named(name, failure)

    def prune(self) -> None:
        """Drop the marks of objects that the edits no longer hold. Called between steps."""
        for _, mediator in self.mediators():
            found = mediator.found
            mediator.found = None
            marks.prune(mediator, marks.saved(mediator) if found is None else found)

    def dispose(self) -> None:
        """Free all that the edits held."""
        for _, mediator in self.mediators():
            marks.release(mediator)
            mediator.dispose()
        self.copies.clear()


def _named(edit: str, failure: Failure) -> Failure:
    return msgspec.structs.replace(failure, field=f"edits.{edit}", message=f"edit {edit!r}: {failure.message}")
