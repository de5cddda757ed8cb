"""Redis behind sentinels: `redis+sentinel://host:port,host:port/service`.

To open a connection, `Sentinels` asks a sentinel for the address of the service's master, and then that server for its
role, since it may have been demoted a moment ago. A connection that breaks, or whose server refuses writes, is replaced
in the same way, so a failover is an outage of a few seconds.

When sentinels fail over while the old master still runs, they demote it about ten seconds later. Until then the old
master accepts writes that will be lost. `Sentinels` therefore asks a sentinel once a second, over one permanent
connection, whether the connections in use still go to the master. A link asks that before each use, and while it
awaits replies: a master that hangs gives none.
"""

from __future__ import annotations

import logging
import math
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
#: The time for one sentinel's answer, in seconds, after which the next one is asked.
_ANSWER_S: Final = 3.0
#: The time between two checks that connections in use go to the master, in seconds.
_CHECK_S: Final = 1.0


class Sentinels:
    """The transport to the master of a service.

    Args:
        url: a URL with the scheme `redis+sentinel` or `rediss+sentinel`.

    Attributes:
        service: the name of the service, `mymaster` by default.
        moved_at: when a sentinel last named another master than before, or a server answered that is the master no
            longer, by the event loop's clock; -inf for never.
    """

    may_change = True

    def __init__(self, url: str) -> None:
        addresses = Addresses(url, _PORT)
        self.service = addresses.path or _SERVICE
        self._addresses = addresses
        # The sentinel that answered last comes first.
        self._sentinels = [
            (f"{host}:{port}", Server(addresses.sentinel_url(host, port), socket_connect_timeout=_ANSWER_S))
            for host, port in addresses.servers
        ]
        # The master's address as far as known, and when a sentinel was last asked for it.
        self._master_address: tuple[str, int] | None = None
        self._polled_at = 0.0
        self.moved_at = -math.inf
        # The permanent link to a sentinel, that sentinel's name, and whether a check is under way.
        self._link: Link | None = None
        self._link_name = ""
        self._polling = self._closed = False

    async def open(self, spare: Any = None) -> Any:
        """Open a connection to the master.

        Raises:
            redis.exceptions.ConnectionError: no sentinel answers, or none names a server that is a master.
            redis.exceptions.AuthenticationError: a sentinel or the master refuses the credentials.
            WrongTopology: all sentinels answer, and none knows the service.
        """
        from redis.exceptions import AuthenticationError, AuthorizationError, ConnectionError

        problems: list[str] = []
        unknown = 0
        for sentinel in list(self._sentinels):
            name, server = sentinel
            try:
                with anyio.fail_after(_ANSWER_S):
                    master = await self._master(server)
            except (AuthenticationError, AuthorizationError):
                raise
            except (ConnectionError, TimeoutError, OSError) as error:
                problems.append(f"{name}: {str(error) or type(error).__name__}")
                continue
            except anyio.get_cancelled_exc_class():
                # The caller has less time. Its next call asks another sentinel first.
                self._ask_last(sentinel)
                raise
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
            self._note_master(master)
            self._polled_at = anyio.current_time()
            return connection
        if unknown == len(self._sentinels):
            raise WrongTopology(f"no sentinel knows a service {self.service!r}: the URL names it as .../SERVICE")
        raise ConnectionError(f"no master of {self.service!r}: {'; '.join(problems)}")

    async def is_current(self, connection: Any) -> bool:
        """Whether a connection goes to the master, as of at most a second ago."""
        if anyio.current_time() >= self._polled_at + _CHECK_S and not self._polling and not self._closed:
            self._polling = True
            name, server = sentinel = self._sentinels[0]
            try:
                with anyio.fail_after(_ANSWER_S):
                    self._note_master(await self._poll_master(name, server) or self._master_address)
            except Exception as error:
                # The master may still be the same. The next check asks another sentinel.
                logger.debug("sentinel %s does not answer: %s", name, error)
                self._ask_last(sentinel)
            finally:
                self._polling = False
                self._polled_at = anyio.current_time()
        return self._is_master(connection)

    def note_replies(self, connection: Any) -> None:
        """Note that replies have come over a connection; see `Transport.note_replies`."""
        if not self._is_master(connection):
            self.moved_at = anyio.current_time()

    def _is_master(self, connection: Any) -> bool:
        return self._master_address is None or (connection.host, connection.port) == self._master_address

    def _note_master(self, address: tuple[str, int] | None) -> None:
        """Note the address that a sentinel names."""
        if self._master_address not in (None, address):
            self.moved_at = anyio.current_time()
        self._master_address = address

    def _ask_last(self, sentinel: tuple[str, Server]) -> None:
        """Ask the other sentinels before this one."""
        self._sentinels.remove(sentinel)
        self._sentinels.append(sentinel)

    async def aclose(self) -> None:
        """Close the connection to a sentinel, and stop the checks."""
        self._closed = True
        link, self._link = self._link, None
        if link is not None:
            await link.drop()

    async def _poll_master(self, name: str, server: Server) -> tuple[str, int] | None:
        """Ask a sentinel for the master's address over the permanent link."""
        if self._link is None or self._link_name != name:
            if self._link is not None:
                await self._link.drop()
            self._link, self._link_name = Link(server), name
        (reply,) = await self._link.execute(("SENTINEL", "GET-MASTER-ADDR-BY-NAME", self.service))
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
