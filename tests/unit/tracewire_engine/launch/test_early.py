"""Help and refusals of `tracewire engine` come without vLLM."""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import subprocess
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from tracewire_engine.launch import early
from tracewire_engine.launch.cli import main
from tracewire_engine.launch.secret import URL

URLS = ("--url", "redis://localhost")


def test_the_help_has_each_of_our_options_and_imports_no_vllm() -> None:
    ran = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "tracewire.cli", "engine", "--help"],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path), URL: "redis://localhost"},
    )
    actions = early.help_parser()._actions
    for action in actions:
        assert action.help, action
        assert all(name in ran.stdout for name in action.option_strings)
    assert "--max-model-len" not in ran.stdout
    assert "--help-vllm" in ran.stdout
    imported = {line.rpartition("|")[2].strip().partition(".")[0] for line in ran.stderr.splitlines()}
    assert "tracewire_engine" in imported
    assert not imported & {"vllm", "torch", "nnsight", "transformers"}


def test_help_for_vllm_s_options(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help-vllm=max-model-len"]) == 0
    assert "--max-model-len" in capsys.readouterr().out
    assert main(["--help-vllm", "scheduler-cls"]) == 0
    shown = capsys.readouterr().out
    assert "--scheduler-cls" in shown
    assert "--max-model-len" not in shown
    assert main(["--help-vllm"]) == 0
    assert len(capsys.readouterr().out.splitlines()) > 200


def test_the_names_of_vllm_s_options_are_those_that_its_parser_takes() -> None:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = FlexibleArgumentParser(add_help=False)
    AsyncEngineArgs.add_cli_args(parser)
    names = {name for name in parser._option_string_actions if name.startswith("--")}
    assert len(names) > 100
    assert names - early.vllm_options() == set()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["demo", *URLS, "--capcity", "3"], "has an option --capcity; did you mean --capacity?"),
        (["demo", *URLS, "--max-modl-len=3"], "has an option --max-modl-len; did you mean --max-model-len?"),
        (["demo", *URLS, "--zzz.a", "3"], "has an option --zzz "),
        (["demo", *URLS, "--queue-limit", "-1"], "a whole number of at least 0, got '-1'"),
        (["demo", *URLS, "--default-chat-template-kwargs", "3"], "expected a JSON object, got '3'"),
        (["demo", *URLS, "--log-format", "xml"], "invalid choice: 'xml'"),
        ([*URLS], "MODEL is missing"),
        (["./nowhere", *URLS], "MODEL: ./nowhere does not exist"),
        (["/proc/self/fd", *URLS], "MODEL: the folder /proc/self/fd has no config.json"),
        (["demo"], "--url, --url-file or TRACEWIRE_URL is required"),
    ],
)
def test_what_is_wrong_is_refused_before_an_adapter_starts(
    arguments: list[str], says: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(URL, raising=False)
    monkeypatch.setattr("tracewire_engine.launch.cli.supervise", lambda *_: pytest.fail("an adapter was started"))
    with pytest.raises(SystemExit) as left:
        main(arguments)
    assert left.value.code == 2
    error = capsys.readouterr().err
    assert says in error
    assert error.startswith("tracewire engine: error: ")
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    "arguments",
    [
        ["demo", "--max-model-len", "64"],
        ["--max-model-len", "64", "demo"],
        ["demo", "--max_model_len=64", "--no-enable-prefix-caching", "-tp", "2"],
        ["demo", "--compilation-config.level", "3", "-O3"],
        # argparse takes an unambiguous beginning of a name.
        ["demo", "--max-model-l", "64"],
        ["demo", "--retain_traces", "3", "--", "--anything"],
    ],
)
def test_what_vllm_may_take_is_left_to_its_parser(arguments: list[str]) -> None:
    assert early.checked([*URLS, *arguments]).url == "redis://localhost"


def test_a_file_of_options_may_have_the_model_and_the_url(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(URL, raising=False)
    assert isinstance(early.checked(["--config", "engine.yaml"]), argparse.Namespace)


def test_secrets_hold_the_url() -> None:
    assert early.checked(["demo"], {URL: "redis://secret"}).url == "redis://secret"


@pytest.mark.parametrize("how", ["no vllm", "a platform's plugin", "no source"])
def test_names_that_cannot_be_known_are_left_to_vllm(how: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    if how == "no vllm":
        monkeypatch.setattr(early, "find_spec", lambda name: None)
    elif how == "no source":
        spec = ModuleSpec("vllm", None, origin=str(tmp_path / "vllm" / "__init__.py"))
        monkeypatch.setattr(early, "find_spec", lambda name: spec)
    else:
        plugin = importlib.metadata.EntryPoint("tpu", "x:y", "vllm.platform_plugins")
        monkeypatch.setattr(early, "entry_points", lambda group: [plugin])
    assert early.vllm_options() == frozenset()
    assert early.checked(["demo", *URLS, "--capcity", "3"]).capacity == 256
