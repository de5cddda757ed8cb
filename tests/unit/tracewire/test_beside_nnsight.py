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


def started(*statements: str) -> subprocess.Popen[str]:
    """A fresh process that runs the statements."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command = [sys.executable, "-c", "\n".join(statements)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


def printed(process: subprocess.Popen[str]) -> str:
    """What it prints by its end."""
    out, errors = process.communicate()
    assert process.returncode == 0, errors[-2000:]
    return out


def test_a_client_connects_whichever_is_imported_first(redis_url: str) -> None:
    orders = ("import nnsight, tracewire", "import tracewire, nnsight")
    # At once, since all of nnsight takes many seconds to import.
    both = [started(first, CONNECT.format(url=redis_url)) for first in orders]
    assert [printed(one) for one in both] == ["[]\n", "[]\n"]


@pytest.mark.parametrize("mounted_first", [True, False])
def test_what_anyio_imports_later_is_imported(mounted_first: bool) -> None:
    first = [MOUNT, "import tracewire"] if mounted_first else ["import tracewire", MOUNT]
    printed(started(*first, "assert 1 .save() == 1", *(f"import {module}" for module in LAZILY)))
