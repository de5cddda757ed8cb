"""Whom a guard asks, and how their answers are read."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import anyio
import pytest

from tests.support.bus_engine import Stage
from tracewire import Alarm, Client, Decision
from tracewire.errors import InvalidRules
from tracewire.guards.asking import Terminal, asker, check_function
from tracewire.guards.rules import Ask, Rule

ALARM = Alarm(trace_id="t", model="m", rule="r", save="s", token=7, value=2.5, text="so far")
PATIENCE = 60


def rule(ask: Any, **more: Any) -> Rule:
    return Rule(name="r", save="s", above=1.0, ask=ask, **more)


async def answer(client: Client, ask: Any, **more: Any) -> Decision:
    with anyio.fail_after(PATIENCE):
        return await asker(rule(ask, **more), client, Terminal())(ALARM)


async def test_a_rule_that_asks_nobody(client: Client) -> None:
    decided = await answer(client, None, do="steer", live={"a": 1.0}, reason="so")
    assert decided == Decision("steer", {"a": 1.0}, "so")
    assert await answer(client, None, do="cancel", live={"a": 1.0}) == Decision("cancel")


async def test_functions_are_called_async_or_not(
    client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "judges_of_test.py").write_text(
        "async def later(alarm): return {'do': 'cancel', 'reason': alarm.text}\n"
        "def now(alarm): return 'resume' if alarm.value < 3 else 'cancel'\n"
        "nothing = 5\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert await answer(client, Ask(function="judges_of_test:later")) == Decision("cancel", {}, "so far")
    assert await answer(client, Ask(function="judges_of_test:now")) == Decision("resume")
    odd = {"judges_of_test:none": "none", "no_such_module:x": "No module", "judges_of_test:nothing": "int"}
    for path, said in odd.items():
        with pytest.raises(InvalidRules, match=said) as caught:
            asker(rule(Ask(function=path)), client, Terminal())
        assert (caught.value.rule, caught.value.field) == ("r", "ask.function")


def test_a_module_that_raises_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "raising_judges_of_test.py").write_text("1 / 0")
    (tmp_path / "torn_judges_of_test.py").write_text("def (")
    monkeypatch.syspath_prepend(str(tmp_path))
    for path, said in {
        "raising_judges_of_test:f": "division by zero",
        "torn_judges_of_test:f": "invalid syntax",
    }.items():
        with pytest.raises(InvalidRules, match=said) as caught:
            check_function(rule(Ask(function=path)))
        assert (caught.value.rule, caught.value.field) == ("r", "ask.function")
    for nobody in (None, "terminal", Ask(http="http://nowhere")):
        check_function(rule(nobody))


class _Judge(BaseHTTPRequestHandler):
    said: Any = b""
    status = 200
    asked: ClassVar[list[Any]] = []

    def do_POST(self) -> None:
        self.asked.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
        self.send_response(self.status)
        self.end_headers()
        self.wfile.write(self.said)

    def log_message(self, *args: Any) -> None:
        """Nothing."""


@pytest.fixture
def judge() -> Iterator[tuple[type[_Judge], str]]:
    """An HTTP service on this machine, and its URL."""
    handler = type("Judge", (_Judge,), {"asked": []})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield handler, f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()
    thread.join()
    server.server_close()


async def test_a_service_is_asked_by_http(client: Client, judge: tuple[type[_Judge], str]) -> None:
    handler, url = judge
    handler.said = b'{"do": "steer", "live": {"alpha": 3.0}, "reason": "calmer"}'
    assert await answer(client, Ask(http=url)) == Decision("steer", {"alpha": 3.0}, "calmer")
    assert handler.asked[0]["token"] == 7
    assert handler.asked[0]["text"] == "so far"
    handler.said = b"yes"
    with pytest.raises(ValueError, match="Expecting value"):
        await answer(client, Ask(http=url))
    handler.said, handler.status = b'"cancel"', 500
    with pytest.raises(OSError, match="500"):
        await answer(client, Ask(http=url))


async def test_a_model_is_asked(client: Client, engine: Any) -> None:
    said = ["Yes, it is.", "maybe"]
    prompts: list[str | None] = []

    async def script(stage: Stage) -> None:
        prompts.append(stage.submission.invokes[0].prompt)
        await stage.accept()
        await stage.output(said[len(prompts) - 1])
        await stage.final()

    ask = Ask(model="judge", prompt="Is {text!r} at {value:.1f} bad?", answers={"yes": "cancel", "no": "resume"})
    async with engine(script, model="judge"):
        assert await answer(client, ask) == Decision("cancel", {}, "Yes, it is.")
        with pytest.raises(ValueError, match="expected judge to answer yes or no, got 'maybe'"):
            await answer(client, ask)
    assert prompts == ["Is 'so far' at 2.5 bad?"] * 2


async def test_a_person_is_asked_at_the_terminal(
    client: Client, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One question at a time; what is no answer is asked again; at the end of the input nobody answers."""
    read, write = os.pipe()
    with os.fdopen(read) as typed, os.fdopen(write, "w", buffering=1) as keyboard, anyio.fail_after(PATIENCE):
        monkeypatch.setattr("sys.stdin", typed)
        terminal = Terminal()
        asking = asker(rule("terminal", live={"alpha": 0.0}), client, terminal)
        found: list[Decision] = []

        async def ask() -> None:
            found.append(await asking(ALARM))

        async with anyio.create_task_group() as group:
            group.start_soon(ask)
            await _printed(capsys, "[s]teer to {'alpha': 0.0}? ")
            keyboard.write("what?\ns\n")
        async with anyio.create_task_group() as group:
            group.start_soon(ask)
            await _printed(capsys, "[c]ancel")
            keyboard.write("C\n")
        assert [decision.do for decision in found] == ["steer", "cancel"]
        keyboard.close()
        with pytest.raises(EOFError):
            await asking(ALARM)
        with pytest.raises(EOFError):
            await asker(rule("terminal"), client, terminal)(ALARM)


async def _printed(capsys: pytest.CaptureFixture[str], text: str) -> None:
    said = ""
    while text not in said:
        await anyio.sleep(0.001)
        said += capsys.readouterr().err
