"""Opens connections to one Redis server."""

from __future__ import annotations

import logging
import math
import re
import time
from functools import cache
from typing import Any, Final, Protocol

import anyio
import anyio.lowlevel

from .loops import on_trio
from .urls import redacted, unreadable_message

__all__ = ["CONNECT_S", "SCHEMES", "Server", "Transport", "discard"]

logger = logging.getLogger("tracewire")


#: The time for opening a connection, in seconds.
CONNECT_S: Final = 5.0
#: How long connections share the certificates that one of them has read from disk, in seconds. Connections that open
#: later read them again.
CERTIFICATES_S: float = 60.0

#: The schemes of the URLs of a Redis.
SCHEMES: Final = (
    *("redis", "rediss", "unix"),
    *("redis+sentinel", "rediss+sentinel", "redis+cluster", "rediss+cluster"),
)


#: By TLS settings: until when connections share a TLS context of redis-py's, and the context.
_tls_contexts: dict[str, tuple[float, Any]] = {}


class Transport(Protocol):
    """Opens connections to the server that commands should go to at that time.

    Attributes:
        may_change: whether that may be another server later.
        moved_at: when it was last found to be another one, or when one that it was before last replied, by the event
            loop's clock; -inf for never. The other one may lack writes that the first one acknowledged until then.
    """

    may_change: bool
    moved_at: float

    async def open(self, spare: Any = None) -> Any:
        """Open a connection: an `AsyncioConnection`, or on trio an `AnyioConnection`.

        Args:
            spare: a closed connection that this transport opened earlier, and may open again.

        Raises:
            redis.exceptions.RedisError: no connection could be opened.
        """

    async def is_current(self, connection: Any) -> bool:
        """Whether a connection of this transport still goes to the right server.

        Links call this before each use, and while they await replies.
        """

    def note_replies(self, connection: Any) -> None:
        """Note that replies have come over a connection of this transport."""

    async def aclose(self) -> None:
        """Close the connections that the transport uses itself."""


class Server:
    """The transport to one server.

    Args:
        url: the server's URL (`redis://`, `rediss://` or `unix://`).
        options: options of redis-py's connections, which override the URL's.

    Raises:
        ValueError: redis-py refuses the URL or an option. The text shows no part of a password.
    """

    may_change = False
    moved_at = -math.inf

    def __init__(self, url: str, **options: Any) -> None:
        from redis.asyncio.connection import ConnectionPool
        from redis.asyncio.retry import Retry
        from redis.backoff import NoBackoff
        from redis.exceptions import RedisError

        options = {
            # Tracewire retries by itself. If redis-py sent a command twice, Redis might refuse it or execute it again.
            "retry": Retry(NoBackoff(), 0),
            # No limit for a single read: each call has a time limit as a whole.
            "socket_timeout": None,
            "socket_connect_timeout": CONNECT_S,
            # With this protocol all versions of Redis give replies of the same shape.
            "protocol": 2,
            **options,
        }
        if not url.startswith("unix:"):
            options["socket_keepalive"] = True
        if "lib_name=" not in url and "lib_version=" not in url:
            options |= _driver_info()
        try:
            # Redis-py's pool parses the URL and makes connections; it keeps none.
            self._factory: Any = ConnectionPool.from_url(url, **options)
            self._factory.make_connection()  # type: ignore[no-untyped-call]
        except (TypeError, ValueError, RedisError) as error:
            raise ValueError(_url_error(url, error)) from None

    async def open(self, spare: Any = None) -> Any:
        """Open a connection to the server, or open `spare` again; see `Transport.open`."""
        # Making a connection object takes longer than connecting it.
        connection = self._make() if spare is None else spare
        try:
            await connection.connect()
        except BaseException:
            await discard(connection)
            raise
        return connection

    def _make(self) -> Any:
        made = self._factory.make_connection()
        if hasattr(made, "ssl_context"):
            made.ssl_context = self._shared_tls(made.ssl_context)
        if on_trio():
            from .anyio_connection import AnyioConnection

            return AnyioConnection(made)
        from .asyncio_connection import AsyncioConnection

        return AsyncioConnection(made)

    def _shared_tls(self, own: Any) -> Any:
        """The TLS context of this server's settings: `own`, or one that another connection has used.

        Reading the system's certificates takes longer than connecting, and no other task runs meanwhile.
        """
        settings = self._factory.connection_kwargs
        key = repr(sorted((name, value) for name, value in settings.items() if name.startswith("ssl_")))
        now = time.monotonic()
        for old in [one for one, (until, _) in _tls_contexts.items() if until <= now]:
            del _tls_contexts[old]
        return _tls_contexts.setdefault(key, (now + CERTIFICATES_S, own))[1]

    async def is_current(self, connection: Any) -> bool:
        """True: there is only one server."""
        return True

    def note_replies(self, connection: Any) -> None:
        """Do nothing: there is only one server."""

    async def aclose(self) -> None:
        """Do nothing: this transport uses no connection itself."""


def _url_error(url: str, error: Exception) -> str:
    """The text of the error for a URL that redis-py refuses, without anything that may be part of a password."""
    option = re.search(r"(?:keyword argument|Invalid value for) '(\w+)'", str(error))
    if option is None and isinstance(error, ValueError):
        return unreadable_message(url)
    if option is None:
        # Redis-py's text has the value after a colon.
        return f"the URL {redacted(url)} is refused: {str(error).partition(':')[0]}"
    shown = redacted(url)
    name = repr(option[1]) if re.search(rf"[?&]{option[1]}=", shown) else "its name may be a part of a password"
    what = "an option that redis-py does not know" if isinstance(error, TypeError) else "an option with a wrong value"
    return f"the URL {shown} has {what}: {name}"


@cache
def _driver_info() -> dict[str, Any]:
    """The option with the library's name and version, which redis-py would read from disk for each connection."""
    try:
        from redis.driver_info import DriverInfo
    except ImportError:  # before 7.1
        return {}
    return {"driver_info": DriverInfo()}


async def discard(connection: Any) -> None:
    """Close a connection at once, in any state."""
    with anyio.CancelScope(shield=True):
        try:
            await connection.disconnect(nowait=True)
        except Exception as error:
            logger.debug("closing a connection to Redis: %r", error)
