"""`tracewire edits` installs, lists and removes standing interventions."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import anyio
import anyio.to_thread
import msgspec
import numpy as np
import pytest

import tracewire
from tests.support.bus_engine import BusEngine, engine_info, tiny
from tracewire import Client, Edits, digest
from tracewire.cli import main as cli
from tracewire_bus.bus import Bus
from tracewire_bus.wire.codec import encode
from tracewire_bus.wire.messages import EditRecord, Failure, Manifest, Set
from tracewire_bus.wire.packing import wire

#: An engine that follows whatever comes.
FOLLOWS = {"edits": 10**9}


@pytest.fixture
def edits(client: Client) -> Edits:
    """Those of the scripted engine's model."""
    return client.edits("tiny")


async def command(*arguments: str) -> int:
    """Run the command as a program would, with an event loop of its own."""
    return await anyio.to_thread.run_sync(partial(cli.main, list(arguments)))


async def test_the_command_installs_lists_and_removes(
    edits: Edits, redis_url: str, prefix: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    where = ("--url", redis_url, "--prefix", prefix)
    file = tmp_path / "service.py"
    file.write_text(
        "import tracewire\n\n\n@tracewire.intervention\ndef watch(model, tracer, live, layer=2):\n"
        "    norm = model.residual(layer).output[-1].norm().save()\n"
    )
    async with BusEngine.running(redis_url, prefix, tiny, engine_info("tiny", "e1", **FOLLOWS)):
        options = ("--set", "layer=3", "--scope", "asked")
        assert await command("edits", "install", "tiny", "norms", str(file), *options, *where) == 0
        line = capsys.readouterr().out
        assert line == "norms\t1\tasked\twatch\ton 1 engine\n"
        assert await command("edits", "list", "tiny", *where) == 0
        assert capsys.readouterr().out == line
        assert (await edits.get("norms")).filename == str(file)
        for arguments, message in (
            ((f"{file}:other",), "no intervention 'other' (it has: watch)"),
            (("nothing.py",), "expected a Python file"),
            ((str(file), "--set", "layer=x"), "--set: expected NAME=JSON, as in --set layer=3"),
            ((str(file), "--set", "depth=1"), "takes no variable 'depth'"),
        ):
            assert await command("edits", "install", "tiny", "norms", *arguments, *where) == 1
            assert message in capsys.readouterr().err
        assert await command("edits", "remove", "tiny", "norms", *where) == 0
        assert await command("edits", "remove", "tiny", "norms", *where) == 1
        assert "there is no edit 'norms'" in capsys.readouterr().err
    assert await edits.list() == []


@tracewire.intervention
def reads_layer(model, tracer, live, layer=2, module=0):
    norms = [].save()
    for step in tracer.iter[:]:
        norms.append(model.residual(layer).output[-1].norm().item())
        norms.append(model.model.layers[-module].output[0])


async def test_a_layer_that_a_variable_names_is_looked_at(
    client: Client, edits: Edits, redis_url: str, prefix: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By `--set layer=99`, too: before it is installed, and not as saves that stay empty."""
    async with BusEngine.running(redis_url, prefix, tiny, engine_info("tiny", "e", **FOLLOWS)):
        with pytest.raises(tracewire.UnknownModulePath, match=r"'residual\(99\)'; the nearest .* 'residual\(3\)'"):
            await edits.install("a", reads_layer(layer=99))
        with pytest.raises(tracewire.UnknownModulePath, match=r"model\.layers\.-77") as caught:
            await client.trace("tiny", "hello", reads_layer(module=77)).start()
        assert caught.value.filename == __file__
        await edits.install("a", reads_layer(layer=-1))
        assert await edits.list()
        file = tmp_path / "edit.py"
        file.write_text(
            "import tracewire\n@tracewire.intervention\ndef watch(model, tracer, live, layer=2):\n"
            "    x = model.residual(layer).output.save()\n"
        )
        arguments = ["edits", "install", "tiny", "b", str(file), "--url", redis_url, "--prefix", prefix]
        assert await anyio.to_thread.run_sync(cli.main, [*arguments, "--set", "layer=99"]) != 0
        assert "residual(99)" in capsys.readouterr().err
        assert [edit.name for edit in await edits.list()] == ["a"]


async def test_declared_interventions_are_installed(
    edits: Edits, redis_url: str, prefix: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    where = ("--url", redis_url, "--prefix", prefix)
    np.save(tmp_path / "direction.npy", np.ones(8))
    steer = f"residual(1)@{tmp_path / 'direction.npy'}"
    async with BusEngine.running(redis_url, prefix, tiny, engine_info("tiny", "e1", **FOLLOWS)):
        options = ("--steer", f"{steer}*-4", "--probe", "norm=residual(2),reduce=norm")
        assert await command("edits", "install", "tiny", "calm", *options, *where) == 0
        assert capsys.readouterr().out == "calm\t1\tall\tSteer, Probe\ton 1 engine\n"
        edit = await edits.get("calm")
        assert [type(one).__name__ for one in edit.interventions] == ["Steer", "Probe"]
        assert edit.interventions[0].scale == -4.0  # type: ignore[union-attr]
        assert edit.block is None
        assert await command("edits", "list", "tiny", "--json", *where) == 0
        (shown,) = json.loads(capsys.readouterr().out)
        assert (shown["name"], shown["version"], shown["engines"]) == ("calm", 1, ["e1"])
        assert shown["interventions"][1] == "Probe(name='norm', at='residual(2)', reduce='norm')"
        file = tmp_path / "service.py"
        file.write_text(
            "import tracewire\n@tracewire.intervention\ndef watch(model, tracer, live):\n    x = [].save()\n"
        )
        assert await command("edits", "install", "tiny", "both", str(file), *options, "--json", *where) == 0
        shown = json.loads(capsys.readouterr().out)
        assert (shown["block"], len(shown["interventions"])) == ("watch", 2)
        for words, says in (
            ((), "nothing to install: give FILE.py::NAME, --steer, --probe or --lens"),
            (("--set", "a=1", "--probe", "residual(0)"), "--set binds a variable of a block: name the file"),
            (("--steer", f"{steer}*alpha"), "an edit has no live parameters"),
        ):
            assert await command("edits", "install", "tiny", "wrong", *words, *where) == 2
            assert says in capsys.readouterr().err
        assert await command("edits", "install", "tiny", "wrong", "--probe", "residual(99)", *where) == 1
        assert "residual(99)" in capsys.readouterr().err


async def test_what_an_edit_left_is_printed(client: Client, redis_url: str, prefix: str) -> None:
    """As columns and as JSON, by processes, since they print until they are ended."""
    array = np.arange(2, dtype=np.float32)
    manifest = Manifest(invoke=0, choice=0, name="rows", kind="list", length=1, digest=digest([array]))
    record = EditRecord(
        edit="a",
        version=3,
        engine="e",
        request="r",
        deltas=msgspec.Raw(msgspec.msgpack.encode([[Set(path=("rows",), value=[wire(array)])]])),
        manifest=[manifest],
        error=Failure(type="ValueError", message="no"),
    )
    async with Bus.open(redis_url, prefix=prefix) as bus:
        await bus.edits.publish("tiny", "a", encode(record))
    printed = []
    for more in ((), ("--json",)):
        words = ("edits", "watch", "tiny", "a", "--since", "start", *more, "--url", redis_url, "--prefix", prefix)
        process = subprocess.Popen(  # noqa: ASYNC220
            [sys.executable, "-m", "tracewire.cli", *words],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        )
        try:
            assert process.stdout is not None
            printed.append(await anyio.to_thread.run_sync(process.stdout.readline))
        finally:
            process.kill()
            process.communicate()
    assert printed[0].split("\t")[1:] == ["version 3", "r 0", "rows=[[0, 1]]  ValueError: no\n"]
    shown = json.loads(printed[1])
    assert (shown["version"], shown["saves"], shown["error"]["message"]) == (3, {"rows": [[0.0, 1.0]]}, "no")
    assert set(shown) == set(tracewire.EditOutput.__struct_fields__)
    assert await command("edits", "watch", "tiny", "a", "--since", "yesterday", "--url", redis_url) == 2
