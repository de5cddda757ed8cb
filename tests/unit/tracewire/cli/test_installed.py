"""The parts that an installation lacks are named, with what to install."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from tracewire.cli import installed


def lacking(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """Hide these modules."""
    monkeypatch.setattr(installed, "find_spec", lambda name: None if name in names else find_spec(name))


def test_a_whole_installation_lacks_nothing() -> None:
    assert (installed.missing_engine(), installed.missing_gateway()) == ("", "")


def test_what_an_engine_lacks_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    lacking(monkeypatch, "vllm", "zmq")
    assert installed.missing_engine().startswith(
        "no engine is installed here (missing: vllm, zmq): on a GPU host, pip "
    )
    monkeypatch.setattr(installed, "entry_points", lambda group: [])
    assert installed.missing_engine().startswith("no engine is installed here: on a GPU host, pip install ")


def test_what_a_gateway_lacks_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    lacking(monkeypatch, "fastapi")
    assert installed.missing_gateway() == (
        "the gateway is not installed (missing: fastapi): pip install 'tracewire[gateway]'"
    )
