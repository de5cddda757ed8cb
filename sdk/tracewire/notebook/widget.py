"""The anywidget that a trace's live view is."""

from __future__ import annotations

from typing import Any

import anywidget
import traitlets

from .bundle import bundle
from .feed import Feed

__all__ = ["TraceWidget"]


class TraceWidget(anywidget.AnyWidget):
    """A trace in a notebook's output.

    Attributes:
        key: by which the view finds the static rendering that stands beside it.
        trace_id: the trace's id.
        pushed: whether events were sent to all views, which a view that opens now has missed.
    """

    _esm = bundle()
    key = traitlets.Unicode().tag(sync=True)
    trace_id = traitlets.Unicode().tag(sync=True)
    pushed = traitlets.Bool(False).tag(sync=True)

    def push(self, content: dict[str, Any], /, buffers: list[bytes] | None = None) -> None:
        """Send one message to all views."""
        if content["view"] == "*":
            self.pushed = True
        self.send(content, buffers=buffers)

    def feed_from(self, feed: Feed) -> None:
        """Have a feed take the orders of the views."""

        def take(widget: Any, content: Any, buffers: Any) -> None:
            feed.take(content)

        self.on_msg(take)

    def bundle(self) -> dict[str, Any]:
        """What a notebook's output holds: the view alone. Without a kernel it shows nothing."""
        made = self._repr_mimebundle_()
        data = made[0] if isinstance(made, tuple) else made
        return {**(data or {}), "text/plain": ""}
