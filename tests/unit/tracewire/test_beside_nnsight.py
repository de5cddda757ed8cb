"""A client in one process with nnsight, whichever is imported first: nnsight gives every object a `save`."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

#: Puts `save` on `object` as nnsight's C extension does, without the seconds that importing all of nnsight takes.
MOUNT = 'import gc; gc.get_referents(object.__dict__)[0]["save"] = lambda self: self'


CONNECT = """
import asyncio

async def main():
    async with tracewire.connect({url!r}) as client:
        print(await client.models.list())

asyncio.run(main())
"""


#: What anyio imports on its first use, and then checks the attributes of: both of its backends import the first.
LAZILY = ("anyio.abc._sockets", "anyio.streams.tls", "anyio.streams.file", "anyio._backends._asyncio")


def run(*statements: str) -> str:
    """What a fresh process prints that runs the statements."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(statements)], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.mark.parametrize("first", ["import nnsight, tracewire", "import tracewire, nnsight"])
def test_a_client_connects_whichever_is_imported_first(redis_url: str, first: str) -> None:
    assert run(first, CONNECT.format(url=redis_url)) == "[]\n"


@pytest.mark.parametrize("module", LAZILY)
@pytest.mark.parametrize("mounted_first", [True, False])
def test_what_anyio_imports_later_is_imported(module: str, mounted_first: bool) -> None:
    first = [MOUNT, "import tracewire"] if mounted_first else ["import tracewire", MOUNT]
    run(*first, "assert 1 .save() == 1", f"import {module}")
