"""The anywidget of a live view, in a process without a front end."""

from __future__ import annotations

from typing import Any

import pytest

from tracewire.notebook.bundle import bundle
from tracewire.notebook.widget import TraceWidget


@pytest.fixture
def widget(monkeypatch: pytest.MonkeyPatch) -> TraceWidget:
    """A widget, with what it sends in `sent`."""
    made = TraceWidget(key="k", trace_id="mine")
    made.sent = []
    monkeypatch.setattr(made, "send", lambda content, buffers=None: made.sent.append((content, buffers)))
    return made


def test_its_state_is_what_a_view_needs(widget: Any) -> None:
    state = widget.get_state()
    assert (state["key"], state["trace_id"], state["pushed"]) == ("k", "mine", False)
    assert state["_esm"] == bundle()


def test_a_view_that_opens_later_learns_that_it_has_missed_events(widget: Any) -> None:
    widget.push({"view": "a", "id": 1}, [b"{}"])
    assert not widget.pushed
    widget.push({"view": "*"}, [b"[]"])
    assert widget.pushed
    assert widget.sent == [({"view": "a", "id": 1}, [b"{}"]), ({"view": "*"}, [b"[]"])]


def test_a_feed_gets_what_views_send(widget: Any) -> None:
    taken: list[Any] = []

    class Feed:
        take = staticmethod(taken.append)

    widget.feed_from(Feed())
    widget._handle_custom_msg({"do": "live"}, [])
    assert taken == [{"do": "live"}]


def test_its_output_shows_nothing_without_a_kernel(widget: Any) -> None:
    data = widget.bundle()
    assert data["text/plain"] == ""
    assert data["application/vnd.jupyter.widget-view+json"]["model_id"] == widget.model_id
