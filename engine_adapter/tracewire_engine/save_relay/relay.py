"""Passes on to the adapters what hosts have saved, so that the engine's process neither reads nor copies it.

A host may be in the hands of a hostile block. So the relay checks what a host sends as the worker checks its reports
(`untrusted_reports.py`), and passes on records of the host's own requests alone. It counts them: the worker asks for
that when a host has ended, and ends the host's requests itself.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import socket
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator

import msgspec

from tracewire_engine.link.host_channel import ChannelClosed, HostChannel, receive_descriptors, send_descriptors
from tracewire_engine.link.message_memory import MessageMemory
from tracewire_engine.link.step_link import LinkSender
from tracewire_engine.link.turn_counts import TurnCounts
from tracewire_engine.protocol.block_host import MOST_REPORTED, Saved
from tracewire_engine.protocol.messages import Report, StepRecord
from tracewire_engine.protocol.save_relay import (
    RELAYED,
    Closed,
    Expected,
    Lost,
    Opened,
    Order,
    Over,
    Passed,
    Refused,
    Relayed,
    Settings,
)
from tracewire_engine.worker.block_host.untrusted_reports import UntrustedReport, UntrustedReports

__all__ = ["SaveRelay"]

logger = logging.getLogger("vllm.tracewire")

_orders = msgspec.msgpack.Decoder(Order)
_saves = msgspec.msgpack.Decoder(Saved)
_encode = msgspec.msgpack.Encoder().encode

#: What the decoding and the checks of saves raise.
_NO_SAVES = (msgspec.DecodeError, UnicodeDecodeError, RecursionError, UntrustedReport)

#: How many bytes of a host's socket are read at once: more than its kernel holds.
_REST = 16 << 20

#: The longest reason that the worker is given.
_TEXT = 1000


class _Sent:
    """What a host has sent of one choice of a request."""

    __slots__ = ("before", "ended", "index", "steps")

    def __init__(self, before: int) -> None:
        #: How many messages the host might send before it was told of the request.
        self.before = before
        self.index, self.steps, self.ended = -1, 0, False


class _Host:
    def __init__(self, number: int, channel: HostChannel) -> None:
        self.number, self.channel = number, channel
        self.records: dict[tuple[str, int], _Sent] = {}
        #: How many of these there were at most at a time; and how many records have come.
        self.most = self.come = 0
        self.checks = UntrustedReports(0)
        #: Whether it is gone, or has sent what no host sends.
        self.refused = False

    def expect(self, expected: Expected) -> None:
        """Expect these records from now on."""
        for record in expected.records:
            self.records.setdefault(record, _Sent(expected.allowed))
        self.most = max(self.most, len(self.records))

    def rest(self) -> Iterator[bytes | memoryview]:
        """What it has sent and is not read yet. Does not wait."""
        return self.channel.last(_REST)


class SaveRelay:
    """The relay.

    Args:
        control: the socket over which the worker tells it what to do. The relay ends when the worker closes it.
        connect: makes the link to the adapters.
    """

    def __init__(self, control: socket.socket, connect: Callable[[Settings], LinkSender]) -> None:
        self._control, self._connect = control, connect
        self._control.setblocking(False)
        self._link: LinkSender | None = None
        self._counts: TurnCounts | None = None
        self._hosts: dict[int, _Host] = {}
        self._by_descriptor: dict[int, _Host] = {}
        self._unsent: list[StepRecord] = []
        #: What the worker has told that is not done yet, with the descriptors that came with it.
        self._orders: deque[tuple[Order, list[int]]] = deque()
        self._epoll = select.epoll()
        self._epoll.register(control, select.EPOLLIN)

    def run(self) -> None:
        """Pass saves on until the worker closes its end."""
        own = self._control.fileno()
        try:
            while True:
                # Orders that were heard while a host was read wait already.
                ready = [descriptor for descriptor, _ in self._epoll.poll(0 if self._orders else None)]
                open_yet = own not in ready or self._hear()
                while self._orders:
                    self._try(*self._orders.popleft())
                if not open_yet:
                    return
                for descriptor in ready:
                    host = self._by_descriptor.get(descriptor)
                    if host is not None:
                        self._read(host, host.channel.arrived)
                self._send()
        finally:
            for host in list(self._hosts.values()):
                self._close(host)
            self._epoll.close()

    # --- what the worker tells ----------------------------------------------------------------------------------------

    def _hear(self) -> bool:
        """Take what the worker has told into `_orders`. Returns whether its end is open."""
        while True:
            try:
                message, descriptors = receive_descriptors(self._control)
            except BlockingIOError:
                return True
            except ConnectionResetError:
                return False
            if not message:
                return False
            self._orders.append((_orders.decode(message), descriptors))

    def _hear_expected(self, host: _Host) -> None:
        """Do what the worker has told of the records of this host alone."""
        self._hear()
        for order, _ in self._orders:
            if isinstance(order, Expected) and order.host == host.number:
                host.expect(order)

    def _try(self, order: Order, descriptors: list[int]) -> None:
        try:
            self._do(order, descriptors)
        except Exception as error:  # it costs a host, and not the others
            logger.exception("the save relay could not do what it was told")
            for one in descriptors if isinstance(order, Opened) and order.host not in self._hosts else ():
                with contextlib.suppress(OSError):
                    os.close(one)
            if not isinstance(order, Settings):
                self._tell(Refused(order.host, f"the save relay failed: {error}"[:_TEXT]))

    def _do(self, order: Order, descriptors: list[int]) -> None:
        if isinstance(order, Settings):
            self._counts = TurnCounts(descriptors[0])
            self._link = self._connect(order)
        elif isinstance(order, Opened):
            self._open(order.host, *descriptors)
        elif (host := self._hosts.get(order.host)) is None:
            if isinstance(order, Lost):
                self._tell(Passed(order.host, []))
        elif isinstance(order, Expected):
            host.expect(order)
        elif isinstance(order, Over):
            self._read(host, host.rest)
            for record in order.records:
                host.records.pop(record, None)
        elif isinstance(order, Lost):
            if order.trusted:
                self._read(host, host.rest)
                self._send()
            self._tell_passed(host)
            self._close(host)
        elif isinstance(order, Closed):
            self._read(host, host.rest)
            self._close(host)

    def _open(self, number: int, connection: int, memory: int) -> None:
        reported = MessageMemory(memory, os.fstat(memory).st_size)
        channel = HostChannel(socket.socket(fileno=connection), MOST_REPORTED, memory=reported)
        host = self._hosts[number] = self._by_descriptor[channel.fileno()] = _Host(number, channel)
        self._epoll.register(host.channel, select.EPOLLIN)

    def _tell_passed(self, host: _Host) -> None:
        found = [
            Relayed(request, choice, sent.index, sent.steps, sent.ended)
            for (request, choice), sent in host.records.items()
        ]
        parts = [found[start : start + RELAYED] for start in range(0, len(found), RELAYED)] or [[]]
        for place, part in enumerate(parts, 1):
            self._tell(Passed(host.number, part, place == len(parts)))

    def _tell(self, message: Passed | Refused) -> None:
        # The worker reads all of them soon.
        self._control.setblocking(True)
        try:
            send_descriptors(self._control, _encode(message), [])
        except OSError:  # the worker is gone, which `run` finds
            pass
        finally:
            self._control.setblocking(False)

    def _close(self, host: _Host) -> None:
        self._unwatch(host)
        host.channel.close()
        self._hosts.pop(host.number, None)

    def _unwatch(self, host: _Host) -> None:
        if self._by_descriptor.pop(host.channel.fileno(), None) is not None:
            self._epoll.unregister(host.channel)

    # --- what hosts send ----------------------------------------------------------------------------------------------

    def _read(self, host: _Host, messages: Callable[[], Iterable[bytes | memoryview]]) -> None:
        """Take what a host has sent. If that is no message, nothing more of the host is read."""
        if host.refused:
            return
        try:
            for message in messages():
                saved = _saves.decode(message)
                if any((step.request, step.choice) not in host.records for step in saved.steps):
                    # The worker says what to expect before it tells the host.
                    self._hear_expected(host)
                self._check(host, saved)
                for step in saved.steps:
                    self._take(host, step)
        except ChannelClosed as error:
            # The worker learns from the host's other connections that a host is gone.
            self._refuse(host, error if host.channel.broken else None)
        except _NO_SAVES as error:
            self._refuse(host, error)
        except Exception as error:  # it costs this host, and not the others
            logger.exception("the saves of a host could not be read")
            self._refuse(host, error)

    def _check(self, host: _Host, saved: Saved) -> None:
        assert self._counts is not None
        allowed = self._counts[host.number]
        host.checks.check_saved(saved, allowed)
        host.come += len(saved.steps)
        for step in saved.steps:
            sent = host.records.get((step.request, step.choice))
            if sent is not None and step.index >= allowed - sent.before:
                raise UntrustedReport(f"a record of token {step.index} in {allowed - sent.before} turns of its request")
        # In each step, a choice has one record.
        if host.come > allowed * host.most:
            raise UntrustedReport(f"{host.come} records in {allowed} turns of at most {host.most} requests")

    def _refuse(self, host: _Host, why: Exception | None) -> None:
        """Read nothing more of a host. Tells the worker `why`, if it does not know."""
        host.refused = True
        self._unwatch(host)
        if why is not None:
            self._tell(Refused(host.number, f"{why}"[:_TEXT]))

    def _take(self, host: _Host, step: StepRecord) -> None:
        sent = host.records.get((step.request, step.choice))
        if sent is not None:
            sent.index, sent.steps = step.index, sent.steps + 1
            sent.ended = sent.ended or bool(step.ended)
            self._unsent.append(step)

    def _send(self) -> None:
        steps, self._unsent = self._unsent, []
        if steps and self._link is not None:
            try:
                self._link.send(Report(time=time.time(), steps=steps))
            except Exception:  # the relay serves all traces
                logger.exception("saves of blocks could not be passed on")
