"""Whether a Redis is private to the user who runs this process, so that no other user can submit anything to it.

That is so for a unix socket that no other user can open, and for Tracewire's own private Redis (`tracewire redis`,
`tracewire up`, `embedded://`) of this user on a loopback port of this host. A loopback port proves nothing else: it may
belong to a tunnel, or to a Redis that others share. Every user of this host can connect to a loopback port, so a
private Redis with a port belongs on a host without other users.
"""

from __future__ import annotations

import ipaddress
import os
import stat
from pathlib import Path

import psutil

from tracewire_bus.transport.urls import parse_url, redacted

__all__ = ["why_shared"]

#: The beginning of the name of the folder of Tracewire's private Redis (`tracewire_bus.transport.embedded`).
_FOLDER = "tracewire-redis-"
_PORT = 6379


def why_shared(url: str) -> str:
    """Why others than this process's user may be able to use the Redis at `url`; `""` if nobody else can."""
    parts = parse_url(url)
    if parts.scheme == "unix":
        return _why_open(Path(parts.netloc + parts.path))
    shown = redacted(url)
    if parts.scheme != "redis" or not _is_loopback(parts.hostname or "localhost"):
        return f"the Redis at {shown} may be shared"
    port = parts.port or _PORT
    if not _is_own(port):
        return f"no Redis that `tracewire redis` or `tracewire up` of this user has started listens at {shown}"
    return ""


def _why_open(socket: Path) -> str:
    """Why others may be able to open a unix socket, or to put another one in its place."""
    try:
        socket = socket.resolve(strict=True)
        found = socket.stat()
        closed = found.st_uid == os.geteuid() and not found.st_mode & 0o077
        for folder in socket.parents:
            entry = folder.stat()
            if entry.st_uid not in (0, os.geteuid()):
                return f"{folder} belongs to another user"
            if entry.st_uid == os.geteuid() and not entry.st_mode & 0o077:
                # No other user gets below this folder.
                return ""
            if entry.st_mode & 0o022 and not entry.st_mode & stat.S_ISVTX:
                return f"other users can write to {folder}"
    except OSError as error:
        return f"the socket {socket} cannot be looked at: {error.strerror}"
    return "" if closed else f"other users can open the socket {socket}"


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _is_own(port: int) -> bool:
    """Whether only Tracewire's private Redis of this user listens on a TCP port of this host, on loopback alone."""
    try:
        found = [one for one in psutil.net_connections("tcp") if one.status == psutil.CONN_LISTEN]
    except (psutil.Error, OSError):
        return False
    listening = [one for one in found if one.laddr.port == port]
    return bool(listening) and all(_is_loopback(one.laddr.ip) and _is_private_redis(one.pid) for one in listening)


def _is_private_redis(pid: int | None) -> bool:
    """Whether a process of this user is Tracewire's private Redis: it runs in a folder that is its own."""
    if pid is None:
        return False
    try:
        process = psutil.Process(pid)
        folder = Path(process.cwd())
        mine = process.uids().effective == process.uids().real == os.geteuid()
    except (psutil.Error, OSError):
        return False
    if not mine or process.name() != "redis-server" or not folder.name.startswith(_FOLDER):
        return False
    return (folder / "redis.sock").is_socket() and not _why_open(folder / "redis.sock")
