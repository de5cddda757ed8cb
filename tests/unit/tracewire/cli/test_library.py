"""`tracewire library`: a file becomes an entry, which is listed, shown, exported, named and removed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.bus_engine import BusEngine, Stage, engine_info, tiny
from tests.support.cli import command
from tracewire import Client

VECTOR = np.linspace(-1, 1, 8, dtype=np.float32)


@pytest.fixture
def where(redis_url: str, prefix: str) -> tuple[str, ...]:
    """The options that name the test's Redis."""
    return "--url", redis_url, "--prefix", prefix


async def test_from_a_file_to_a_trace(
    client: Client,
    where: tuple[str, ...],
    redis_url: str,
    prefix: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    np.save("direction.npy", VECTOR)
    options = ("--model", "tiny", "--at", "residual(2)", "--licence", "MIT", "--description", "calm")
    more = ("--effect", "score=0.5", "--effect", "judged=by hand", "--provenance", "documents=128")
    assert await command("library", "add", "calm", "direction.npy", *options, *more, *where) == 0
    line = capsys.readouterr().out
    assert line.split("\t")[:6] == ["calm@1", "vector", "tiny", "residual(2)", "8", "MIT"]
    assert await command("library", "list", *where) == 0
    assert capsys.readouterr().out == line
    entry = await client.library.get("calm")
    assert entry.effect == {"score": 0.5, "judged": "by hand"}
    assert entry.provenance == {"file": "direction.npy", "documents": 128}
    taken: list[Any] = []

    async def script(stage: Stage) -> None:
        taken.append(stage.submission)
        await tiny(stage)

    async with BusEngine.running(redis_url, prefix, script, engine_info("tiny")):
        await client.models.get("tiny", timeout=30)
        named = ("--steer", "residual(2)@calm@1*8", "--probe", "p=residual(2)@calm")
        assert await command("run", "tiny", "hello", *named, *where) == 0
        assert await command("run", "tiny", "hello", "--steer", "residual(1)@calm", *where) == 2
        assert "belongs to 'residual(2)'" in capsys.readouterr().err
    assert taken[0].library == {"interventions[0].vector": "calm@1", "interventions[1].weight": "calm@1"}
    for file in ("calm.safetensors", "calm.gguf"):
        assert await command("library", "export", "calm", "--to", file, *where) == 0
        assert capsys.readouterr().out.splitlines()[-1] == f"{file}: calm@1"
        assert await command("library", "add", "again", file, *where) == 0
        assert (next(iter((await client.library.load("again")).values())) == VECTOR).all()
    capsys.readouterr()
    assert await command("library", "remove", "calm@1", "again", *where) == 0
    assert capsys.readouterr().out == "removed calm@1\nremoved again@1\nremoved again@2\n"
    assert await command("library", "list", *where) == 0
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "No entries on" in shown.err


async def test_what_it_prints_as_json(
    client: Client, where: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    np.savez(tmp_path / "layers.npz", layer_1=VECTOR, layer_3=VECTOR)

    async def printed(*arguments: str) -> Any:
        assert await command("library", *arguments, "--json", *where) == 0
        return json.loads(capsys.readouterr().out)

    added = await printed("add", "red:calm", str(tmp_path / "layers.npz"))
    assert (added["id"], added["layers"], added["shapes"]) == (
        "red:calm@1",
        [1, 3],
        {"vector.1": [8], "vector.3": [8]},
    )
    assert await printed("list") == []
    assert await printed("list", "--tenant", "red") == [added]
    assert await printed("show", "red:calm") == {**added, "versions": [added]}
    await client.library.put("red:calm", VECTOR)
    assert await printed("remove", "red:calm@2") == ["red:calm@2"]
    assert [one["removed_by"] != "" for one in (await printed("show", "red:calm@1"))["versions"]] == [True, False]
    file = tmp_path / "out.gguf"
    assert await printed("export", "red:calm", "--to", str(file)) == {"id": "red:calm@1", "file": str(file)}
    assert await command("library", "show", "red:calm", *where) == 0
    text = capsys.readouterr().out
    assert "layers: [1, 3]" in text
    assert "removed: red:calm@2, by " in text


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (("show", "nope"), 1, "the library has no entry 'nope'"),
        (("remove", "nope"), 1, "the library has no entry 'nope'"),
        (("add", "calm", "gone.npy"), 1, "gone.npy"),
        (("add", "calm", "v.npy", "--effect", "score"), 2, "--effect: expected KEY=VALUE, got 'score'"),
        (("add", "calm", "v.npy", "--replacing", "2"), 1, "there is no entry 'calm'"),
        (("add", "a b", "v.npy"), 1, "name: expected"),
    ],
)
async def test_what_is_wrong_is_one_line(
    where: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: tuple[str, ...],
    status: int,
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    np.save("v.npy", VECTOR)
    assert await command("library", *arguments, *where) == status
    error = capsys.readouterr().err
    assert message in error
    assert len(error.splitlines()) == 1
