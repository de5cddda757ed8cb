"""Redis behind sentinels: `redis+sentinel://host:port,host:port/service`.

Whoever opens a connection asks the sentinels where the service's master is, and that server whether it is one: what was
demoted a moment ago is not written to. A connection that breaks, or whose server says that it takes no writes, is
opened anew in this way, so a failover is an outage of a few seconds like any other.

Sentinels that fail over while the old master lives tell it some ten seconds later. Until then it takes writes that
nobody will find, so connections that are in use ask once a second whether they still go to the master. All that are
opened here ask over one connection to a sentinel, which stays.
"""

from __future__ import annotations

import logging
from typing import Any, Final

import anyio

from .errors import WrongTopology
from .link import Link
from .server import CONNECT_S, Server, discard
from .urls import Addresses

__all__ = ["Sentinels"]

logger = logging.getLogger("tracewire")

_PORT: Final = 26379
_SERVICE: Final = "mymaster"
#: How long one sentinel may take to answer, in seconds, before the next one is asked.
_ASK_S: Final = 3.0
#: How often connections in use make sure, in seconds.
_CHECK_S: Final = 1.0


class Sentinels:
    """The transport to the master of a service, by a URL with the scheme `redis+sentinel` or `rediss+sentinel`."""

    def __init__(self, url: str) -> None:
        addresses = Addresses(url, _PORT)
        self.service = addresses.path or _SERVICE
        self._addresses = addresses
        #: Those that answered last stand first.
        self._sentinels = [
            (f"{host}:{port}", Server(addresses.sentinel_url(host, port), socket_connect_timeout=_ASK_S))
            for host, port in addresses.servers
        ]
        #: Where the master is, as far as is known, and when that was asked.
        self._known: tuple[str, int] | None = None
        self._asked = 0.0
        #: By which a sentinel is asked, again and again, and which sentinel; whether it is being asked.
        self._link: Link | None = None
        self._linked = ""
        self._asking = self._closed = False

    async def open(self, spare: Any = None) -> Any:
        """A connection to the master.

        Raises:
            redis.exceptions.ConnectionError: no sentinel knows of a master that is one.
            BusError: all sentinels answer, and none knows the service.
        """
        from redis.exceptions import AuthenticationError, AuthorizationError, ConnectionError

        problems: list[str] = []
        unknown = 0
        for sentinel in list(self._sentinels):
            name, server = sentinel
            try:
                with anyio.fail_after(_ASK_S):
                    master = await self._master(server)
            except (AuthenticationError, AuthorizationError):
                raise
            except (ConnectionError, TimeoutError, OSError) as error:
                problems.append(f"{name}: {str(error) or type(error).__name__}")
                continue
            if master is None:
                unknown += 1
                problems.append(f"{name} does not know it")
                continue
            try:
                with anyio.fail_after(CONNECT_S):
                    connection = await self._connect(*master)
            except (AuthenticationError, AuthorizationError):
                raise
            except (ConnectionError, TimeoutError, OSError) as error:
                problems.append(f"{name} names {master[0]}:{master[1]}: {str(error) or type(error).__name__}")
                continue
            self._sentinels.remove(sentinel)
            self._sentinels.insert(0, sentinel)
            self._known, self._asked = master, anyio.current_time()
            return connection
        if unknown == len(self._sentinels):
            raise WrongTopology(f"no sentinel knows a service {self.service!r}: the URL names it as .../SERVICE")
        raise ConnectionError(f"no master of {self.service!r}: {'; '.join(problems)}")

    async def holds(self, connection: Any) -> bool:
        """Whether it goes to the master, as of a second ago."""
        if anyio.current_time() >= self._asked + _CHECK_S and not self._asking and not self._closed:
            self._asking = True
            name, server = sentinel = self._sentinels[0]
            try:
                with anyio.fail_after(_ASK_S):
                    self._known = await self._master_again(name, server) or self._known
            except Exception as error:
                # It says nothing about the master. Another is asked the next time.
                logger.debug("sentinel %s does not answer: %s", name, error)
                self._sentinels.remove(sentinel)
                self._sentinels.append(sentinel)
            finally:
                self._asking = False
                self._asked = anyio.current_time()
        return self._known is None or (connection.host, connection.port) == self._known

    async def aclose(self) -> None:
        """Close the connection to a sentinel. None is opened again to ask whether others hold."""
        self._closed = True
        link, self._link = self._link, None
        if link is not None:
            await link.drop()

    async def _master_again(self, name: str, server: Server) -> tuple[str, int] | None:
        """Where a sentinel says that the master is, over a connection that is kept."""
        if self._link is None or self._linked != name:
            if self._link is not None:
                await self._link.drop()
            self._link, self._linked = Link(server), name
        (reply,) = await self._link.ask(("SENTINEL", "GET-MASTER-ADDR-BY-NAME", self.service))
        if isinstance(reply, Exception):
            raise reply
        return None if reply is None else (reply[0].decode(), int(reply[1]))

    async def _master(self, sentinel: Server) -> tuple[str, int] | None:
        connection = await sentinel.open()
        try:
            await connection.send_command("SENTINEL", "GET-MASTER-ADDR-BY-NAME", self.service)
            reply = await connection.read_response()
        finally:
            await discard(connection)
        return None if reply is None else (reply[0].decode(), int(reply[1]))

    async def _connect(self, host: str, port: int) -> Any:
        from redis.exceptions import ConnectionError

        connection = await Server(self._addresses.url(host, port)).open()
        try:
            await connection.send_command("ROLE")
            role, *_ = await connection.read_response()
            if role != b"master":
                raise ConnectionError(f"the server at {host}:{port} is a {role.decode()} now")
        except BaseException:
            await discard(connection)
            raise
        return connection
