"""The options of commands that run a trace."""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import pytest

from tracewire import TraceRejected
from tracewire.cli.commands import Parser, UsageError
from tracewire.cli.requests import Request, add_request
from tracewire.cli.requests import request_of as asked


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The present folder, with a vector and a block."""
    monkeypatch.chdir(tmp_path)
    np.save("direction.npy", np.ones(2))
    Path("probes.py").write_text(
        "import tracewire\n\n@tracewire.intervention\ndef watch(model, tracer, live, layer=1):\n    x = [].save()\n"
    )
    return tmp_path


def parsed(*words: str) -> argparse.Namespace:
    parser = Parser(prog="tracewire")
    add_request(parser)
    return parser.parse_args(("tiny", *words))


def request_of(options: argparse.Namespace) -> Request:
    return asked(options, chats=False)


def test_nothing_is_asked_for_by_default() -> None:
    request = request_of(parsed())
    assert request == Request(None, [], [], {}, {})
    assert not request.saves
    assert request.arguments(100) == {"block": None, "interventions": [], "max_tokens": 50}
    assert request.arguments(100_000)["max_tokens"] == 256


def test_what_is_asked_for(folder: Path) -> None:
    words = ("--steer", "residual(1)@direction.npy*alpha", "--lens", "residual(1)", "--block", "probes.py::watch")
    request = request_of(parsed(*words, "--set", "layer=2", "--live", "alpha=3", "--max-tokens", "5"))
    arguments = request.arguments(100)
    assert arguments["block"].variables == {"layer": 2}
    assert (arguments["live"], arguments["max_tokens"], arguments["token_strings"]) == ({"alpha": 3.0}, 5, True)
    assert request.saves
    assert not request_of(parsed("--steer", "residual(1)@direction.npy")).saves


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--block", "probes.py::watch", "--set", "depth=1"), "--set: watch() takes no variable 'depth'"),
        (("--block", "probes.py::nobody"), "--block: probes.py has no intervention 'nobody'"),
        (("--set", "layer=1"), "--set binds a variable of a block"),
    ],
)
def test_what_is_wrong_is_named(folder: Path, words: tuple[str, ...], says: str) -> None:
    with pytest.raises(UsageError) as caught:
        request_of(parsed(*words))
    assert says in str(caught.value)


def test_a_refusal_names_the_option() -> None:
    request = request_of(parsed("--probe", "a=residual(0)", "--probe", "b=residual(99)"))
    with pytest.raises(UsageError, match=r"--probe 'b=residual\(99\)': no such layer"), request.refusals():
        raise TraceRejected("interventions[1].at", "no such layer")
    with pytest.raises(TraceRejected), request.refusals():
        raise TraceRejected("prompt", "too long")
    request = request_of(parsed("--max-tokens", "5000", "--sampling", "min_p=2"))
    with pytest.raises(UsageError, match=r"^--max-tokens: expected at most 2048$"), request.refusals():
        raise TraceRejected("sampling.max_tokens", "expected at most 2048")
    with pytest.raises(UsageError, match=r"^--sampling min_p: expected at most 1$"), request.refusals():
        raise TraceRejected("sampling.min_p", "expected at most 1")


def test_options_of_a_chat() -> None:
    options = parsed("--system", "Be brief.", "--template", "thinking=false")
    request = asked(options, chats=True)
    assert request.conversation.messages == [{"role": "system", "content": "Be brief."}]
    assert request.arguments(100)["chat_template_kwargs"] == {"thinking": False}
    with pytest.raises(UsageError, match="--system is an option of a chat: give --chat"):
        request_of(options)
