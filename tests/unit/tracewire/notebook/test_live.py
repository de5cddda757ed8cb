"""A trace as a cell's output: what is published, and when."""

from __future__ import annotations

import asyncio
import sys
from types import SimpleNamespace
from typing import Any

import pytest

import tracewire
from tests.support.bus_engine import Stage
from tests.support.until import until
from tracewire import Client
from tracewire.notebook import live, widget  # noqa: F401  (imported before IPython is replaced)

VIEW = "application/vnd.jupyter.widget-view+json"


class Shell:
    """A kernel's IPython, as far as outputs go."""

    def __init__(self) -> None:
        self.kernel = object()
        self.display_pub = self
        self.published: list[SimpleNamespace] = []

    def publish(self, **given: Any) -> None:
        """Keep an output."""
        self.published.append(SimpleNamespace(**{"transient": {}, "update": False, **given}))

    @property
    def static(self) -> list[Any]:
        """The static renderings, in order."""
        return [one for one in self.published if "text/html" in one.data]


@pytest.fixture
def shell(monkeypatch: pytest.MonkeyPatch) -> Shell:
    """The shell of a kernel that runs here."""
    made = Shell()
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: made))
    return made


async def play(stage: Stage) -> None:
    """Two tokens."""
    await stage.accept()
    await stage.save(" one", {"norm": 1.0})
    await stage.save(" two", {"norm": 2.0}, finish_reason="length")
    await stage.final()


async def ended() -> None:
    """Wait until no output is being written."""
    await until(lambda: not live._running)


async def test_showing_a_trace_runs_it_and_keeps_it(client: Client, engine: Any, shell: Shell) -> None:
    async with engine(play):
        trace = client.trace("tiny", "x")
        trace._ipython_display_()
        first, view = shell.published
        assert "running" in first.data["text/plain"]
        assert view.data[VIEW]["model_id"]
        await ended()
        assert (await trace.result()).text == " one two"
    last = shell.static[-1]
    assert last.update
    assert last.transient == first.transient
    assert "<b>Trace " + trace.id in last.data["text/html"]
    assert last.data["text/plain"].splitlines()[1] == " one two"


async def test_a_subscription_leaves_its_own_position(client: Client, engine: Any, shell: Shell) -> None:
    async with engine(play), client.trace("tiny", "x") as trace:
        await trace.until_done()
        subscription = client.subscribe(trace.id)
        subscription._ipython_display_()
        await ended()
        assert subscription.position == "start"
    assert "finished" in shell.static[-1].data["text/plain"]


async def test_a_trace_that_is_refused_says_why(client: Client, shell: Shell) -> None:
    client.trace("nothing", "x")._ipython_display_()
    await ended()
    text = shell.static[-1].data["text/plain"]
    assert "no engine serves the model 'nothing'" in text
    assert "not shown to its end" in text


async def test_a_client_that_is_closed_ends_the_view(embedded: str, prefix: str, registered: str, shell: Shell) -> None:
    async with tracewire.connect(embedded, prefix=prefix) as client:
        trace = client.trace("tiny", "x")
        trace._ipython_display_()
        await trace.start()
    await ended()
    assert "closed" in shell.static[-1].data["text/plain"]
    with pytest.raises(NotImplementedError):
        trace._ipython_display_()


async def test_without_the_extra_the_static_rendering_grows(
    client: Client, engine: Any, shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tracewire.notebook.widget", None)
    monkeypatch.setattr(live, "_ALONE_S", 0.0)
    async with engine(play):
        client.trace("tiny", "x")._ipython_display_()
        await ended()
    assert not [one for one in shell.published if VIEW in one.data]
    texts = [one.data["text/plain"] for one in shell.static]
    assert any(" one\n" in text for text in texts)
    assert "finished" in texts[-1]


async def test_a_blocking_client_shows_traces_too(embedded: str, prefix: str, engine: Any, shell: Shell) -> None:
    def program() -> str:
        with tracewire.blocking.Client(embedded, prefix=prefix) as client:
            trace = client.trace("tiny", "x")
            trace._ipython_display_()
            text = trace.result().text
            while live._running:
                client.get_live(trace.id)
            return text

    async with engine(play):
        assert await asyncio.to_thread(program) == " one two"
    assert "finished" in shell.static[-1].data["text/plain"]


@pytest.mark.parametrize("modules", [{}, {"IPython": SimpleNamespace(get_ipython=lambda: None)}])
async def test_without_a_kernel_ipython_shows_the_object(
    modules: dict[str, Any], client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "IPython", raising=False)
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    trace = client.trace("tiny", "x")
    with pytest.raises(NotImplementedError):
        trace._ipython_display_()
    assert trace._repr_mimebundle_()["text/plain"] == repr(trace)
