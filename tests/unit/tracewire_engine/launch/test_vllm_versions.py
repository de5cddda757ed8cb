"""A version of vLLM that nobody has tried is refused before vLLM is imported, unless the operator says otherwise."""

from __future__ import annotations

from importlib import metadata

import pytest

from tracewire_engine.launch import early, vllm_versions
from tracewire_engine.launch.vllm_versions import KNOWN, installed_vllm, unknown_vllm


def _install(monkeypatch: pytest.MonkeyPatch, **versions: str) -> None:
    def version(name: str) -> str:
        if name not in versions:
            raise metadata.PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(vllm_versions.metadata, "version", version)


def test_the_version_of_this_environment_is_known() -> None:
    assert dict(installed_vllm())
    assert not unknown_vllm()


@pytest.mark.parametrize("version", ["0.25.1", "0.25.1+cu129"])
def test_a_build_of_a_known_version_is_known(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    _install(monkeypatch, vllm=version)
    assert not unknown_vllm()


def test_another_version_is_refused_by_the_command_with_what_to_do(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _install(monkeypatch, vllm="0.99.0")
    arguments = ["demo", "--url", "redis://localhost"]
    with pytest.raises(SystemExit):
        early.checked(arguments)
    said = capsys.readouterr().err
    assert "vllm 0.99.0 is installed" in said
    assert KNOWN["vllm"][-1] in said
    assert "--unknown-vllm" in said
    assert early.checked([*arguments, "--unknown-vllm"]).unknown_vllm


def test_an_environment_without_vllm_has_no_unknown_one(monkeypatch: pytest.MonkeyPatch) -> None:
    _install(monkeypatch)
    assert not unknown_vllm()
