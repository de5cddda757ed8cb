"""`tracewire up` without an engine; tests/e2e/cli has one."""

from __future__ import annotations

import json
import os
import shlex
import signal
import socket
import sys
from importlib.util import find_spec

import anyio
import anyio.to_thread
import pytest

from tests.support.cli import command
from tests.support.gateways import serving
from tests.support.until import until
from tracewire.cli import installed, up
from tracewire.cli.main import build_parser
from tracewire_bus.transport.urls import redacted


def test_options_of_the_engine_are_passed_on() -> None:
    from tracewire.cli.main import _parsed

    options = _parsed(build_parser(), ["up", "demo", "--max-model-len", "64", "--port", "9000", "--capacity=3"])
    assert (options.model, options.port, options.more) == ("demo", 9000, ["--max-model-len", "64", "--capacity=3"])


def test_the_command_for_curl_is_typed_as_it_is_printed() -> None:
    words = shlex.split(up.curl_of("http://127.0.0.1:8080", "it's"))
    assert words[:3] == ["curl", "-s", "http://127.0.0.1:8080/v1/completions"]
    assert json.loads(words[-1]) == {"model": "it's", "prompt": "def parse(text):", "max_tokens": 32}


def test_a_port_that_is_taken_is_not_insisted_on(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        number = taken.getsockname()[1]
        monkeypatch.setattr(up, "_PORT", number)
        assert up._gateway_port(None) == 0
        assert up._gateway_port(number) == number
    assert up._gateway_port(None) == number


async def test_a_port_that_is_taken_meanwhile_is_not_insisted_on(
    redis_url: str, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two commands that start together both find the usual port free. The engine refuses its option at once."""
    options = build_parser().parse_args(["up", "demo", "--url", redis_url, "--prefix", prefix])
    options.more = ["--capcity", "3"]
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        number = taken.getsockname()[1]
        monkeypatch.setattr(up, "_PORT", number)
        monkeypatch.setattr(up, "_gateway_port", lambda given: number)
        async with up._children(options, redis_url) as children:
            engine, gateway = children
            await until(lambda: gateway.status is not None)
            assert children.retry(gateway)
            await until(lambda: children[1].answer)
            assert children[1].answer.startswith("http://127.0.0.1:")
            assert not children[1].answer.endswith(f":{number}")
            # Once; and an engine that ends is not started again.
            assert not children.retry(children[1])
            assert not children.retry(engine)
        options.port = number
        async with up._children(options, redis_url) as children:
            assert not children.retry(children[1])


async def test_a_private_redis_that_ends_is_noticed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("TRACEWIRE_URL", raising=False)
    options = build_parser().parse_args(["up", "demo"])
    children = up._Children()
    async with up._redis(options) as (_, server):
        assert server is not None
        assert up._gone(children, server) is None
        os.kill(server.pid, signal.SIGKILL)
        await until(lambda: up._gone(children, server) is server)
        assert up._failed(server, children, options) == 1
    assert capsys.readouterr().err == "tracewire: the private Redis ended with status -9, and its data is lost\n"
    # The engine cannot hand back its traces: nothing waits for that.
    assert children.grace_s == up._GRACE_WITHOUT_REDIS_S


async def test_the_dashboard_is_named_where_the_gateway_has_one(redis_url: str, prefix: str) -> None:
    async with serving(redis_url, prefix) as served:
        assert await anyio.to_thread.run_sync(up._dashboard, served.url) == f"{served.url}/dashboard"
        assert await anyio.to_thread.run_sync(up._dashboard, f"{served.url}/nowhere") == ""


def test_a_gateway_that_does_not_answer_has_no_dashboard() -> None:
    with socket.socket() as nothing:
        nothing.bind(("127.0.0.1", 0))
        assert up._dashboard(f"http://127.0.0.1:{nothing.getsockname()[1]}") == ""


async def test_what_is_not_installed_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lacking = {"uvicorn"}
    monkeypatch.setattr(installed, "find_spec", lambda name: None if name in lacking else find_spec(name))
    assert await command("up", "demo") == 2
    assert (
        "the gateway is not installed (missing: uvicorn): pip install 'tracewire[gateway]', or give --no-gateway"
        in (capsys.readouterr().err)
    )
    lacking.add("vllm")
    assert await command("up", "demo", "--no-gateway") == 2
    assert "no engine is installed here (missing: vllm)" in capsys.readouterr().err
    assert await command("up", "demo") == 2
    first, second = capsys.readouterr().err.splitlines()
    assert first.startswith("tracewire: no engine is installed here")
    assert second.startswith("the gateway is not installed")


async def ran(*arguments: str) -> tuple[int, str]:
    """Run the command as a process, since it handles signals. Returns its status and what it said of errors."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    environment.pop("TRACEWIRE_URL", None)
    words = [sys.executable, "-m", "tracewire.cli", "up", *arguments]
    done = await anyio.run_process(words, env=environment, check=False)
    return done.returncode, done.stderr.decode()


async def test_a_given_redis_that_does_not_answer() -> None:
    status, error = await ran("demo", "--url", "unix:///nowhere/redis.sock")
    assert status == 1
    assert "no Redis answers at unix:///nowhere/redis.sock" in error
    assert error.count("\n") == 1


@pytest.mark.parametrize("given", [True, False])
async def test_an_engine_that_refuses_its_options_ends_all(redis_url: str, given: bool) -> None:
    status, error = await ran("demo", "--capcity", "3", *(("--url", redis_url) if given else ()))
    assert status == 2
    assert "has an option --capcity; did you mean --capacity?" in error
    assert "tracewire: the engine ended with status 2; its log is above" in error


async def test_the_model_comes_first(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        await command("up", "--capacity")
    assert "MODEL" in capsys.readouterr().err


def test_progress_is_told_now_and_then(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(up, "_EVERY_S", 0.0)
    with up._progress("loading demo") as progress:
        progress.tell()
        progress.tell("weights: 45%")
    assert capsys.readouterr().err == "loading demo ...\nloading demo ... 0 s\nloading demo ... 0 s  weights: 45%\n"


def test_the_ready_lines_name_all_that_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    told = {
        "model": "demo",
        "engine": "e1",
        "redis": "unix:///tmp/a b",
        "gateway": "http://127.0.0.1:8080",
        "dashboard": "http://127.0.0.1:8080/dashboard",
        "curl": "curl -s URL",
    }
    up._print_ready(told, 21.4)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "ready: demo after 21 s"
    assert lines[1:4] == [
        "  Redis      unix:///tmp/a b",
        "  gateway    http://127.0.0.1:8080",
        "  dashboard  http://127.0.0.1:8080/dashboard",
    ]
    assert "  export TRACEWIRE_URL='unix:///tmp/a b'" in lines
    assert "  curl -s URL" in lines
    assert lines[-1] == "Ctrl-C ends everything."
    up._print_ready({**told, "gateway": "", "dashboard": "", "curl": "", "redis": redacted("redis://a:b@host")}, 1.0)
    shown = capsys.readouterr().out
    assert "gateway" not in shown
    assert "export" not in shown
