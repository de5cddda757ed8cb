"""Secrets show in no process list, environment, log, error, repr or event, whatever characters they have."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import traceback
from collections.abc import AsyncIterator
from pathlib import Path
from urllib.parse import quote

import anyio
import pytest

import tracewire
from tests.support.redis.process import HOST, RedisServer, free_port

#: Each begins and ends with words that appear nowhere else.
AWKWARD = [
    "hunter@swan",
    "hunter:swan",
    "hunter/swan?db=1#@swan",
    "hunter%41%swan",
    "hunter #!$&'()*+,;=[]{}|\\^`~<>\"swan",
    "hunter\N{GREEK SMALL LETTER PI}\N{CJK UNIFIED IDEOGRAPH-8D26}swan",
    "hunter\N{PERSON WITH BALL}\N{VARIATION SELECTOR-16}swan",
]
_PARTS = ("hunter", "swan")


def _shown(text: str) -> list[str]:
    """The parts of a password that a text shows."""
    return [part for part in _PARTS if part in text]


@pytest.fixture(params=AWKWARD, ids=range(len(AWKWARD)))
async def guarded(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[str]:
    """The URL of a Redis with a password."""
    secret = str(request.param)
    url = f"redis://default:{quote(secret, safe='')}@{HOST}:"
    port = free_port()
    server = RedisServer(tmp_path, f"{url}{port}", [("bind", HOST), ("port", port)])
    folder = tmp_path / "redis.conf"
    escaped = "".join(f"\\x{byte:02x}" for byte in secret.encode())
    folder.write_text(f'requirepass "{escaped}"\n')
    server = RedisServer(tmp_path, f"{url}{port}", [("bind", HOST), ("port", port)], first=[str(folder)])
    await server.start()
    try:
        yield server.url
    finally:
        await server.aclose()


async def test_a_command_reads_a_url_from_a_descriptor(guarded: str) -> None:
    """The kernel shows anybody the command line; the descriptor is the command's own."""
    reading, writing = os.pipe()
    os.write(writing, guarded.encode())
    os.close(writing)
    environment = {name: value for name, value in os.environ.items() if name != "TRACEWIRE_URL"}
    command = [sys.executable, "-m", "tracewire.cli", "models", "--json", "--url-file", f"/dev/fd/{reading}"]
    done = await anyio.run_process(command, check=False, pass_fds=[reading], env=environment)
    os.close(reading)
    assert (done.returncode, done.stdout.decode().strip()) == (0, "[]"), done.stderr


async def test_errors_logs_and_reprs_show_no_part_of_a_password(guarded: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG")
    async with tracewire.connect(guarded) as client:
        told = [repr(client), str(client)]
        with pytest.raises(tracewire.TracewireError) as missing:
            await client.models.get("nowhere")
        told += traceback.format_exception(missing.value)
    wrong = guarded.replace("@", "x@", 1)
    with pytest.raises(tracewire.TracewireError) as refused:
        await tracewire.connect(wrong, retry_timeout=0)
    told += traceback.format_exception(refused.value)
    assert not _shown("".join(told) + caplog.text)


_LOOK = """
import json, os, sys
from tracewire_engine.launch.secret import Given
given = Given.take(sys.argv[1:])
own = "/proc/self/"
seen = open(own + "cmdline", "rb").read() + open(own + "environ", "rb").read()
child = os.popen("env").read()
print(json.dumps([given.arguments, given.secrets, seen.decode("utf-8", "replace") + child, os.listdir(own + "fd")]))
"""


def _looked(tmp_path: Path, arguments: list[str], secrets: dict[str, str], pass_fds: list[int]) -> list[object]:
    """What a process of the engine's command holds, and shows, once it has taken its secrets."""
    module = tmp_path / "tracewire_engine" / "launch"
    module.mkdir(parents=True)
    (module.parent / "__init__.py").touch()
    (module / "__init__.py").touch()
    from tracewire_engine.launch import secret

    (module / "secret.py").write_text(Path(secret.__file__).read_text())
    (module / "__main__.py").write_text(_LOOK)
    plain = {name: os.environ[name] for name in ("PATH", "HOME", "LANG") if name in os.environ}
    command = [sys.executable, "-m", "tracewire_engine.launch", *arguments]
    done = subprocess.run(
        command,
        env={**plain, "PYTHONPATH": str(tmp_path), "PYTHONUTF8": "1", **secrets},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
        pass_fds=pass_fds,
    )
    found: list[object] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("secret", AWKWARD)
def test_no_process_that_runs_blocks_inherits_a_secret(secret: str, tmp_path: Path) -> None:
    url = f"redis://me:{quote(secret, safe='')}@{HOST}"
    secrets = {
        "TRACEWIRE_URL": url,
        "TRACEWIRE_PASSWORD": secret,
        "VLLM_API_KEY": secret,
        "HF_TOKEN": secret,
        "MODELSCOPE_API_TOKEN": secret,
        "AWS_SECRET_ACCESS_KEY": secret,
        "OTEL_EXPORTER_OTLP_HEADERS": f"authorization=Bearer {secret}",
        "DATABASE_URL": f"postgres://me:{quote(secret, safe='')}@host/db",
        "OPENAI_API_KEY": secret,
        "GITHUB_PAT": secret,
    }
    kept = {"TOKENIZERS_PARALLELISM": "false", "HF_TOKEN_PATH": "/run/token", "CUDA_VISIBLE_DEVICES": "0"}
    arguments, taken, seen, _ = _looked(tmp_path, ["demo", f"--openai-option=--api-key={secret}"], secrets | kept, [])
    assert arguments == ["demo", f"--openai-option=--api-key={secret}"]
    assert taken == secrets
    assert not _shown(str(seen))
    assert all(f"{name}={value}" in str(seen) for name, value in kept.items())


def test_an_operator_leaves_a_variable_to_the_workers(tmp_path: Path) -> None:
    secrets = {"AWS_SECRET_ACCESS_KEY": "hunter", "AWS_ACCESS_KEY_ID": "swan", "OPENAI_API_KEY": "other"}
    _, taken, seen, _ = _looked(tmp_path, ["demo", "--keep-env", "AWS_*"], secrets, [])
    assert taken == {"OPENAI_API_KEY": "other"}
    assert _shown(str(seen)) == [*_PARTS]
    assert "other" not in str(seen)


def test_an_engine_reads_a_url_from_a_descriptor_and_closes_it(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    os.write(writing, b"redis://me:hunter@host\n")
    os.close(writing)
    arguments, taken, seen, descriptors = _looked(tmp_path, ["demo", f"--url-file=/dev/fd/{reading}"], {}, [reading])
    os.close(reading)
    assert arguments == ["demo"]
    assert taken == {"TRACEWIRE_URL": "redis://me:hunter@host"}
    assert not _shown(str(seen))
    assert isinstance(descriptors, list)
    assert str(reading) not in descriptors
