"""Hosts that have ended, of which a relay is asked."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tracewire_engine.protocol.save_relay import Relayed
from tracewire_engine.worker.block_host import ended_hosts
from tracewire_engine.worker.block_host.ended_hosts import EndedHosts
from tracewire_engine.worker.block_host.relay_link import RelayLost


class Ended:
    """A host with two requests, of which it was told of the first one's token 7."""

    def __init__(self, link: Any = None, *, lost: bool = False) -> None:
        self.records = {
            (name, 0): SimpleNamespace(id=f"{name}-1", index=3, steps=1, ended=False) for name in ("a", "b")
        }
        self.begun = [("a-1", 1, 7)]
        self.asked: list[bool] = []

        def ask(*, trusted: bool) -> None:
            self.asked.append(trusted)
            if lost:
                raise RelayLost

        self.saves: Any = SimpleNamespace(link=link, ask=ask)


def figures(host: Any) -> list[tuple[int, int, bool]]:
    return [(one.index, one.steps, one.ended) for one in host.records.values()]


def test_what_was_passed_on_is_counted_once() -> None:
    ended, link = EndedHosts(), object()
    host: Any = Ended(link)
    assert host not in ended
    assert ended.ask(host, trusted=False)
    assert (host.asked, host in ended) == ([False], True)
    assert (ended.of(link), ended.of(object())) == ([host], [])  # type: ignore[arg-type]
    passed = [Relayed("a", 0, 5, 2, ended=True), Relayed("gone", 0, 9, 9, ended=False)]
    assert ended.take(host, passed)
    assert not ended.take(host, passed)
    assert figures(host) == [(5, 3, True), (3, 1, False)]
    assert host not in ended


def test_without_an_answer_the_last_step_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = EndedHosts()
    host: Any = Ended()
    assert ended.ask(host, trusted=True)
    assert ended.late() == []
    monkeypatch.setattr(ended_hosts, "_ANSWER_S", -1.0)
    assert ended.late() == [host]
    assert ended.take(host, None)
    assert figures(host) == [(7, 1, False), (3, 1, False)]


def test_no_relay_answers() -> None:
    ended = EndedHosts()
    gone: Any = Ended(lost=True)
    assert not ended.ask(gone, trusted=True)
    assert figures(gone) == [(7, 1, False), (3, 1, False)]
    none: Any = Ended()
    none.saves = None
    assert not ended.ask(none, trusted=True)
    forgotten: Any = Ended()
    ended.ask(forgotten, trusted=True)
    ended.forget(forgotten)
    assert forgotten not in ended
