"""The process that starts hosts."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import msgspec

from tests.support.hosted_model import Model, settings_of
from tracewire_engine.link.host_channel import HostChannel, receive_descriptors, send_descriptors
from tracewire_engine.link.shared_rows import RowMemory
from tracewire_engine.protocol.block_host import Ready, Report


def test_the_server_forks_hosts_that_have_nothing_but_their_connections() -> None:
    control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    command = [sys.executable, "-m", "tracewire_engine.block_host.server", str(theirs.fileno())]
    server = subprocess.Popen(command, pass_fds=[theirs.fileno()], env={"PYTHONPATH": os.pathsep.join(sys.path)})
    theirs.close()
    described = os.memfd_create("settings")
    os.write(described, msgspec.msgpack.encode(settings_of(Model(1))))
    os.lseek(described, 0, os.SEEK_SET)
    send_descriptors(control, b"settings", [described])
    control.settimeout(120)
    assert receive_descriptors(control)[0] == b"ready"
    calls, their_calls = socket.socketpair()
    reports, their_reports = socket.socketpair()
    _saves, their_saves = socket.socketpair()
    given, returned, reported, saved = [RowMemory.create(1 << 16) for _ in range(4)]
    places, their_places = os.pipe()
    sockets = [their_calls, their_reports, their_saves]
    memory = [one.descriptor for one in (given, returned, reported, saved)]
    send_descriptors(control, b"host", [*(one.fileno() for one in sockets), *memory, their_places])
    message, (process,) = receive_descriptors(control)
    for one in sockets:
        one.close()
    os.close(their_places)
    ready = msgspec.msgpack.decode(HostChannel(reports).receive(60), type=Report)
    assert isinstance(ready, Ready)
    open_files = {os.readlink(f"/proc/{int(message)}/fd/{one}") for one in os.listdir(f"/proc/{int(message)}/fd")}
    assert all(
        one.startswith(("socket:", "/memfd:tracewire", "/dev/null", "anon_inode", "pipe:")) for one in open_files
    )
    assert sum(one.startswith("pipe:") for one in open_files) == 1
    # The host ends with its connection, and the server with its own.
    calls.close()
    control.close()
    assert server.wait(60) == 0
    assert os.read(places, 1) == b""
    os.close(places)
    os.close(process)
    os.close(described)
