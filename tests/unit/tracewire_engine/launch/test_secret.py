"""An engine's secrets on their way from its command line and environment to its adapter: nobody else sees them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.killed_owner import left_by_killed
from tracewire_engine.launch.secret import API_KEY, URL, Given, _without_hub_token, hub_token, shown

SECRET = "sesame-4711"


@pytest.mark.parametrize(
    ("arguments", "others_see"),
    [
        (["demo", "--url", "redis://localhost"], ["demo", "--url", "redis://localhost"]),
        (["demo", "--url", f"redis://:{SECRET}@host:1"], ["demo", "--url", "***"]),
        (["demo", f"--url=redis://me:{SECRET}/#@host"], ["demo", "--url=***"]),
        (["--url", f"unix:///s?password={SECRET}"], ["--url", "***"]),
        ([f"--openai-option=--api-key={SECRET}"], ["--openai-option=--api-key=***"]),
        (["--openai-option", f"--api-key={SECRET}"], ["--openai-option", "--api-key=***"]),
        (
            ["--openai-option=--api-key", f"--openai-option={SECRET}"],
            ["--openai-option=--api-key", "--openai-option=***"],
        ),
        (["--openai-option=--chat-template=a.jinja"], ["--openai-option=--chat-template=a.jinja"]),
        (["--hf-token", SECRET, "--drain", "3"], ["--hf-token", "***", "--drain", "3"]),
        (["--hf-token", "--drain", "3"], ["--hf-token", "--drain", "3"]),
    ],
)
def test_what_others_see_of_a_command(arguments: list[str], others_see: list[str]) -> None:
    assert shown(arguments) == others_see


LOOK = """
import pathlib, sys
from tracewire_engine.launch.secret import Given
given = Given.take(sys.argv[1:])
own = pathlib.Path("/proc/self")
print(given.arguments, given.secrets)
print((own / "cmdline").read_bytes(), (own / "environ").read_bytes())
import os; print(dict(os.environ))
"""


SUPERVISED = """
import sys
from tracewire_engine.launch import supervisor
from tracewire_engine.launch.secret import Given
given = Given(["demo", "--url", "redis://:sesame-4711@h"], {"VLLM_API_KEY": "sesame-4711"})
sys.exit(supervisor.supervise([sys.executable, "-c", sys.argv[1]], 0, 60.0, given))
"""


def test_an_adapter_is_handed_what_its_supervisor_was_given() -> None:
    done = subprocess.run([sys.executable, "-c", SUPERVISED, LOOK], capture_output=True, text=True, timeout=60)
    given, kernels, environment = done.stdout.splitlines()
    assert given == f"['demo', '--url', 'redis://:{SECRET}@h'] {{'VLLM_API_KEY': '{SECRET}'}}"
    assert SECRET not in kernels
    assert SECRET not in environment


def test_a_command_with_secrets_becomes_one_without(tmp_path: Path) -> None:
    """In the same process: what its parent holds of it stays true. It is started anew as the engine's command."""
    module = tmp_path / "tracewire_engine" / "launch"
    module.mkdir(parents=True)
    (module.parent / "__init__.py").touch()
    secret = Path(sys.modules[Given.__module__].__file__ or "")
    (module / "__init__.py").touch()
    (module / "secret.py").write_text(secret.read_text())
    (module / "__main__.py").write_text(LOOK + "print(os.getpid())")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), URL: f"redis://:{SECRET}@h", "HF_TOKEN": SECRET}
    environment["MODELSCOPE_API_TOKEN"] = SECRET
    begun = subprocess.Popen(
        [sys.executable, "-m", "tracewire_engine.launch", "demo", f"--openai-option=--api-key={SECRET}"],
        env=environment,
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        text=True,
    )
    out, _ = begun.communicate(timeout=60)
    given, kernels, left, number = out.splitlines()
    assert given == (
        f"['demo', '--openai-option=--api-key={SECRET}'] "
        f"{{'{URL}': 'redis://:{SECRET}@h', 'HF_TOKEN': '{SECRET}', 'MODELSCOPE_API_TOKEN': '{SECRET}'}}"
    )
    assert SECRET not in kernels
    assert SECRET not in left
    assert int(number) == begun.pid


@pytest.mark.parametrize(
    "given", [["--hf-token", SECRET], [f"--hf-token={SECRET}"], ["--hf_token", SECRET], [f"--hf_token={SECRET}"]]
)
def test_vllm_is_not_given_a_token_that_it_would_hand_to_the_workers(given: list[str]) -> None:
    kept, token = _without_hub_token(["demo", *given, "--port", "1"])
    assert (kept, token) == (["demo", "--port", "1"], SECRET)


def test_the_token_that_is_stored_is_left_to_vllm() -> None:
    for arguments in (["demo", "--hf-token"], ["demo", "--hf-token", "--port", "1"]):
        assert _without_hub_token(arguments) == (arguments, "")


def test_more_than_a_pipe_holds_is_handed_over() -> None:
    given = Given(["x" * 200_000], {API_KEY: "k"})
    descriptor, environment = given.hand()
    assert "k" not in environment.values()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRACEWIRE_HANDED", descriptor)
        assert Given.take([]) == given
        assert "TRACEWIRE_HANDED" not in os.environ


def test_the_hubs_token_is_in_a_file_until_the_model_has_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_TOKEN_PATH", raising=False)
    with hub_token({}):
        assert "HF_TOKEN_PATH" not in os.environ
    monkeypatch.setenv("HF_TOKEN_PATH", "")
    with hub_token({"HF_TOKEN": SECRET}):
        path = Path(os.environ["HF_TOKEN_PATH"])
        assert path.read_text() == SECRET
        assert path.stat().st_mode & 0o077 == 0
        # As a process that loads a model finds it.
        find = "import huggingface_hub; print(huggingface_hub.get_token())"
        environment = {name: value for name, value in os.environ.items() if name != "HF_TOKEN"}
        found = subprocess.run(
            [sys.executable, "-c", find], capture_output=True, text=True, env=environment, timeout=60
        )
        assert found.stdout.strip() == SECRET
    assert not path.exists()


def test_the_next_engine_removes_the_hubs_token_of_one_that_was_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN_PATH", "")
    makes = f"""
from tracewire_engine.launch.secret import hub_token
held = hub_token({{"HF_TOKEN": {SECRET!r}}})
held.__enter__()
path = os.environ["HF_TOKEN_PATH"]
"""
    left = left_by_killed(makes)
    assert left.read_text() == SECRET
    with hub_token({"HF_TOKEN": SECRET}):
        assert not left.exists()
