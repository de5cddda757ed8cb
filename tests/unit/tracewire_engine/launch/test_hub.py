"""A model's name is looked for on the hub before vLLM is imported, and a hub that is away is told at once."""

from __future__ import annotations

import http.server
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants

from tracewire_engine.launch import hub
from tracewire_engine.launch.hub import HubAway, check_hub

MODEL = "some/model"


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty cache of the hub's, and an environment that names no other source."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(hub, "_PATIENCE_S", 0.3)
    monkeypatch.setattr(hub, "_PAUSE_S", 0.0)
    # Set, so that it is taken back after the test.
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    return tmp_path


@pytest.fixture
def away(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The address of a hub that takes connections and does not answer."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        monkeypatch.setattr(constants, "ENDPOINT", url)
        yield url


class Hub(http.server.BaseHTTPRequestHandler):
    """A hub without models."""

    asked: list[str]

    def do_HEAD(self) -> None:
        self.asked.append(self.path)
        self.send_error(404)

    def log_message(self, *_: object) -> None:
        """Print nothing."""


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The paths that a hub is asked for."""
    Hub.asked = []
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.server_address[1]}")
        serving = threading.Thread(target=server.serve_forever)
        serving.start()
        yield Hub.asked
        server.shutdown()
        serving.join()


def test_a_hub_that_is_away_is_told_with_what_to_do(away: str) -> None:
    with pytest.raises(HubAway) as raised:
        check_hub([MODEL, "--max-model-len", "128"])
    said = str(raised.value)
    assert said.startswith(f"MODEL: no folder is called '{MODEL}', and the hub at {away}, ")
    assert "cannot be reached (" in said
    for advice in ("folder", "'demo'", "HF_ENDPOINT", "HF_HOME"):
        assert advice in said


def test_a_hub_that_answers_is_asked_once_whatever_it_says(asked: list[str]) -> None:
    check_hub([MODEL])
    check_hub([f"{MODEL}:Q4_K_M", "--revision=v2"])
    assert asked == [f"/{MODEL}/resolve/main/config.json", f"/{MODEL}/resolve/v2/config.json"]


def test_a_model_in_the_cache_needs_no_hub(away: str, cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = cache / "models--some--model"
    for name, text in (("refs/main", "abc"), ("snapshots/abc/config.json", "{}")):
        (folder / name).parent.mkdir(parents=True)
        (folder / name).write_text(text)
    check_hub([MODEL])
    assert os.environ["HF_HUB_OFFLINE"] == "1"
    (record,) = caplog.records
    assert record.getMessage().endswith(f"{MODEL} is taken from its cache")
    with pytest.raises(HubAway):
        check_hub([MODEL, "--revision", "v2"])


@pytest.mark.parametrize("model", ["demo", "s3://bucket/model", "FOLDER", "--config"])
def test_what_is_no_name_of_the_hub_s_is_not_looked_for(model: str, away: str, tmp_path: Path) -> None:
    check_hub([str(tmp_path) if model == "FOLDER" else model])


def test_nothing_is_asked_of_a_hub_that_is_not_used(away: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_USE_MODELSCOPE", "True")
    check_hub([MODEL])
    monkeypatch.delenv("VLLM_USE_MODELSCOPE")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    check_hub([MODEL])


def test_the_command_ends_before_vllm_is_imported() -> None:
    command = [sys.executable, "-X", "importtime", "-m", "tracewire.cli", "engine", MODEL, "--url", "redis://localhost"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    # Nobody listens there.
    environment |= {"HF_ENDPOINT": "http://127.0.0.1:1", "HF_HUB_OFFLINE": "0"}
    ran = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert ran.returncode == 1
    (error,) = [line for line in ran.stderr.splitlines() if not line.startswith("import time:")]
    assert error.startswith(f"tracewire engine: MODEL: no folder is called '{MODEL}'")
    imported = {line.rpartition("|")[2].strip().partition(".")[0] for line in ran.stderr.splitlines()}
    assert "huggingface_hub" in imported
    assert not imported & {"vllm", "torch"}
