"""Starts hosts of blocks: a process that has imported all that a block needs, and forks.

    python -m tracewire_engine.block_host.server DESCRIPTOR

The worker starts it with an empty environment. It runs no block itself. Each message `host` over the socket
`DESCRIPTOR` asks for one host and brings its descriptors, and is answered with the host's process id and a descriptor
of the process, or with why there is none. A message `relay` asks for a save relay, which shares this process's memory
as hosts do, and brings its socket.
"""

from __future__ import annotations

import gc
import os
import signal
import socket
import sys
import traceback

__all__ = ["main"]


def main() -> None:
    """Serve the worker until it closes the socket."""
    from tracewire_engine.block_host.stand_ins import install_vllm

    install_vllm()
    import msgspec
    import torch

    from tracewire_engine.block_host import confinement
    from tracewire_engine.block_host.driver import Driver, start  # noqa: F401 (imported before the forks)
    from tracewire_engine.link.host_channel import receive_descriptors, send_descriptors
    from tracewire_engine.link.thread_names import name_thread
    from tracewire_engine.protocol.block_host import FAILED, HostSettings

    control = socket.socket(fileno=int(sys.argv[1]))
    confinement.die_with_parent()
    name_thread("blocks")
    _, (described,) = receive_descriptors(control)
    with open(described, "rb") as file:
        settings = msgspec.msgpack.decode(file.read(), type=HostSettings)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # The kernel ends the children's records when they die; the worker holds descriptors of them.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    # For this torch reads files about the processor, once. A confined host cannot.
    torch.zeros(1).half().float()
    send_descriptors(control, b"ready", [])
    gc.collect()
    gc.freeze()
    while True:
        try:
            message, descriptors = receive_descriptors(control)
        except ConnectionResetError:
            return
        if not message:
            return
        try:
            host = os.fork()
        except OSError as error:  # too little memory, or too many processes: a later one may start
            _close(descriptors)
            if message != b"relay":
                send_descriptors(control, f"{FAILED}{error}".encode(), [])
            continue
        if not host:
            control.close()
            if message == b"relay":
                _become_relay(*descriptors)
            _become_host(settings, descriptors)
        _close(descriptors)
        if message == b"relay":
            continue
        try:
            process = os.pidfd_open(host)
        except OSError as error:  # the kernel has ended it already, or there are too many descriptors
            send_descriptors(control, f"{FAILED}{error}".encode(), [])
            continue
        send_descriptors(control, str(host).encode(), [process])
        os.close(process)


def _close(descriptors: list[int]) -> None:
    for one in descriptors:
        os.close(one)


def _become_host(settings: object, descriptors: list[int]) -> None:
    """Run blocks in this process until the worker closes the connection, and end."""
    import msgspec

    from tracewire_engine.block_host import confinement
    from tracewire_engine.block_host.driver import Driver, start
    from tracewire_engine.link.host_channel import HostChannel
    from tracewire_engine.link.message_memory import MessageMemory
    from tracewire_engine.link.shared_rows import RowMemory
    from tracewire_engine.protocol.block_host import Broken, HostSettings, Ready
    from tracewire_engine.worker.blocks import time_limit

    code = 1
    reports: HostChannel | None = None
    try:
        assert isinstance(settings, HostSettings)
        calls_at, reports_at, saves_at, *shared, reported_at, saved_at, place_at = _moved(descriptors)
        given, returned = [RowMemory(one, os.fstat(one).st_size) for one in shared]
        reported, saved = [MessageMemory(one, os.fstat(one).st_size) for one in (reported_at, saved_at)]
        reports = HostChannel(socket.socket(fileno=reports_at), memory=reported)
        saves = HostChannel(socket.socket(fileno=saves_at), memory=saved)
        start(settings)
        time_limit.note_places(place_at)
        driver = Driver(settings, HostChannel(socket.socket(fileno=calls_at)), reports, saves, given, returned)
        missing = confinement.confine(settings.readable, memory=settings.memory)
        reports.send(msgspec.msgpack.encode(Ready(missing)))
        driver.run()
        code = 0
    except BaseException as error:
        if reports is not None:
            reports.send(msgspec.msgpack.encode(Broken(f"{type(error).__name__}: {error}"[:10_000])))
            reports.settle()
    finally:
        os._exit(code)


def _become_relay(control: int) -> None:
    """Pass on what hosts save until the worker closes the socket, and end."""
    from tracewire_engine.block_host import confinement
    from tracewire_engine.link.adapter_links import link_to
    from tracewire_engine.link.thread_names import name_thread
    from tracewire_engine.save_relay.relay import SaveRelay

    code = 1
    try:
        confinement.die_with_parent()
        name_thread("saves")
        SaveRelay(socket.socket(fileno=control), lambda settings: link_to(settings.address, settings.adapters)).run()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def _moved(descriptors: list[int]) -> list[int]:
    """The descriptors as the lowest but for the standard ones; all others are closed."""
    first = 3
    nothing = os.open(os.devnull, os.O_RDWR)
    spare = [os.dup2(one, 100 + place) for place, one in enumerate(descriptors)]
    for standard in range(first):
        os.dup2(nothing, standard)
    moved = [os.dup2(one, first + place) for place, one in enumerate(spare)]
    os.closerange(first + len(moved), 1 << 16)
    return moved


if __name__ == "__main__":
    main()
