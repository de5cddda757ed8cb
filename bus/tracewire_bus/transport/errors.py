"""Errors of the bus, and which of Redis's replies they are made of."""

from __future__ import annotations

import copy
import re
from collections.abc import Sequence
from typing import Any, Final

__all__ = [
    "BusError",
    "BusFull",
    "BusUnavailable",
    "NotAllowed",
    "NotAuthenticated",
    "WrongTopology",
    "as_bus_error",
    "copy_of",
    "is_demoted",
    "is_full",
    "is_transient",
    "named",
]


class BusError(Exception):
    """Redis refused, and would refuse again. Says what it said."""


class NotAllowed(BusError):
    """Redis does not allow our user that. Says which command on which key."""


class NotAuthenticated(BusError):
    """Redis accepts neither these credentials nor these certificates."""


class WrongTopology(BusError):
    """The URL's scheme is for another kind of server than the one that answers: a cluster, a sentinel's service."""


class BusUnavailable(BusError, ConnectionError):
    """Redis could not be reached, or not for as long as the caller would wait."""


class BusFull(BusError):
    """Redis has no memory left for it. Nothing was written; there may be room later."""


def copy_of(error: Exception) -> Exception:
    """The same error once more, with what it came of."""
    try:
        one = copy.copy(error)
    except Exception:  # one that is made of more than it tells
        return error
    one.__cause__, one.__context__ = error.__cause__, error.__context__
    one.__suppress_context__ = error.__suppress_context__
    return one.with_traceback(error.__traceback__)


#: What Redis says of a script that it stopped at a command which it does not take for now.
_OF_A_SCRIPT: Final = re.compile(r"@user_script: ?\d+: -(READONLY|OOM|MISCONF|NOREPLICAS) ")


def is_transient(error: Exception) -> bool:
    """Whether the same command may well be taken in a moment: the connection broke, or the server is not itself."""
    from redis import exceptions as redis

    if _is_unwelcome(error):
        return False
    if isinstance(error, (redis.ConnectionError, redis.TimeoutError, redis.InvalidResponse, OSError)):
        return True
    return isinstance(
        error, (redis.ReadOnlyError, redis.OutOfMemoryError, redis.TryAgainError, redis.ClusterDownError)
    ) or (
        isinstance(error, redis.ResponseError)
        and (
            str(error).startswith(("MISCONF", "BUSY ", "CLUSTERDOWN", "MASTERDOWN", "UNBLOCKED ", "NOREPLICAS "))
            or bool(_OF_A_SCRIPT.search(str(error)))
        )
    )


def is_full(error: object) -> bool:
    """Whether this is Redis's word that it has no memory left for a command, or for one of a script's."""
    if not isinstance(error, Exception):
        return False
    from redis.exceptions import OutOfMemoryError

    text = str(error)
    # Redis-py may have cut the code off.
    return isinstance(error, OutOfMemoryError) or text.startswith(("OOM ", "-OOM ")) or ": -OOM " in text


def is_demoted(reply: Any) -> bool:
    """Whether a reply says that its server is, or has become, a replica."""
    from redis.exceptions import ReadOnlyError, ResponseError

    if not isinstance(reply, ResponseError):
        return False
    said = _OF_A_SCRIPT.search(str(reply))
    return (
        isinstance(reply, ReadOnlyError)
        or str(reply).startswith("UNBLOCKED ")
        or (said is not None and said[1] == "READONLY")
    )


#: What Redis says of a script that its user may not run to its end.
_NOT_IN_A_SCRIPT: Final = "The user executing the script can't"

#: Why a server ends a handshake, as OpenSSL calls it.
_BAD_CERTIFICATE: Final = re.compile(r"CERTIFICATE|UNKNOWN_CA|BAD_SIGNATURE")


def named(error: Any, command: Sequence[Any]) -> Any:
    """A refusal with the command that it is one of: Redis names no key."""
    from redis.exceptions import NoPermissionError

    if not (isinstance(error, NoPermissionError) or _NOT_IN_A_SCRIPT in str(error)):
        return error
    name, key = str(command[0]), command[1] if len(command) > 1 else ""
    if name in ("EVAL", "EVALSHA"):
        name, key = "a script", command[3]
    elif name == "XREAD":
        key = command[list(command).index("STREAMS") + 1]
    shown = key.decode("utf-8", "replace") if isinstance(key, bytes) else str(key)
    return NoPermissionError(f"{name} {'on ' if ':' in shown else ''}{shown}: {error}")


def _is_unwelcome(error: BaseException) -> bool:
    """Whether Redis does not take our credentials, or we its certificate; redis-py may wrap that as a failed
    connection.
    """
    from ssl import SSLError

    from redis.exceptions import AuthenticationError, AuthorizationError

    one: BaseException | None = error
    seen: set[int] = set()
    while one is not None and id(one) not in seen:
        seen.add(id(one))
        if isinstance(one, (AuthenticationError, AuthorizationError)):
            return True
        if isinstance(one, SSLError) and _BAD_CERTIFICATE.search(str(one.reason)):
            return True
        one = one.__cause__ or one.__context__
    return False


def as_bus_error(error: Exception) -> Exception:
    """What redis-py raised, as an error of ours; anything else as it is."""
    from redis.exceptions import MovedError, NoPermissionError, RedisError

    if _is_unwelcome(error):
        return NotAuthenticated(f"Redis lets nobody in by these credentials or certificates: {error}")
    if isinstance(error, NoPermissionError):
        return NotAllowed(f"Redis does not allow this user {error}")
    if isinstance(error, MovedError):
        return WrongTopology(f"this Redis is a node of a cluster: its URL begins with redis+cluster:// ({error})")
    if isinstance(error, RedisError):
        return BusError(f"Redis refused: {error}")
    return error
