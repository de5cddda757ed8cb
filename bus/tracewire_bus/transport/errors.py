"""Errors of the bus, and the classification of Redis's errors."""

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
    "first_error",
    "is_demoted",
    "is_full",
    "is_transient",
    "name_command",
    "unloaded",
]


class BusError(Exception):
    """Redis refused a command, and would refuse it again. The text is Redis's."""


class NotAllowed(BusError):
    """Redis does not allow this user a command on a key; the text names both."""


class NotAuthenticated(BusError):
    """Redis refused the credentials, or one side refused the other's certificate."""


class WrongTopology(BusError):
    """The URL's scheme does not fit the server: a cluster, no cluster, or sentinels that do not know the service."""


class BusUnavailable(BusError, ConnectionError):
    """Redis could not be reached for as long as the caller was willing to wait."""


class BusFull(BusError):
    """Redis has no memory left for a write. Nothing was written; a retry may succeed later."""


def copy_of(error: Exception) -> Exception:
    """A copy of an error with its cause, context and traceback; `error` itself if it cannot be copied."""
    try:
        one = copy.copy(error)
    except Exception:  # its constructor takes other arguments than its `args`
        return error
    one.__cause__, one.__context__ = error.__cause__, error.__context__
    one.__suppress_context__ = error.__suppress_context__
    return one.with_traceback(error.__traceback__)


#: Redis's error for a script that it stopped at a command that it temporarily refuses.
_SCRIPT_REFUSAL: Final = re.compile(r"@user_script: ?\d+: -(READONLY|OOM|MISCONF|NOREPLICAS) ")


def is_transient(error: Exception) -> bool:
    """Whether a retry of the same command may succeed: the connection broke, or the server is temporarily unable."""
    from redis import exceptions as redis

    if _is_authentication_failure(error):
        return False
    if isinstance(error, (redis.ConnectionError, redis.TimeoutError, redis.InvalidResponse, OSError)):
        return True
    return isinstance(
        error, (redis.ReadOnlyError, redis.OutOfMemoryError, redis.TryAgainError, redis.ClusterDownError)
    ) or (
        isinstance(error, redis.ResponseError)
        and (
            str(error).startswith(("MISCONF", "BUSY ", "CLUSTERDOWN", "MASTERDOWN", "UNBLOCKED ", "NOREPLICAS "))
            or bool(_SCRIPT_REFUSAL.search(str(error)))
        )
    )


def is_full(error: object) -> bool:
    """Whether an error or a reply says that Redis has no memory left for a command or a script."""
    if not isinstance(error, Exception):
        return False
    from redis.exceptions import OutOfMemoryError

    text = str(error)
    # Redis-py removes the error code from some texts.
    return isinstance(error, OutOfMemoryError) or text.startswith(("OOM ", "-OOM ")) or ": -OOM " in text


def is_demoted(reply: Any) -> bool:
    """Whether a reply says that the server is a replica, or has just become one."""
    from redis.exceptions import ReadOnlyError, ResponseError

    if not isinstance(reply, ResponseError):
        return False
    said = _SCRIPT_REFUSAL.search(str(reply))
    return (
        isinstance(reply, ReadOnlyError)
        or str(reply).startswith("UNBLOCKED ")
        or (said is not None and said[1] == "READONLY")
    )


#: The start of Redis's error for a script with a command that its user may not execute: up to 7.0, and later.
_SCRIPT_PERMISSION: Final = re.compile(r"The user executing the script can't|ACL failure in script")

#: OpenSSL's names of the reasons for which a TLS handshake fails at a certificate.
_BAD_CERTIFICATE: Final = re.compile(r"CERTIFICATE|UNKNOWN_CA|BAD_SIGNATURE")


def name_command(error: Any, command: Sequence[Any]) -> Any:
    """A missing permission's error with the command and the key in its text, which Redis's text lacks.

    Returns any other error unchanged.
    """
    from redis.exceptions import NoPermissionError

    if not (isinstance(error, NoPermissionError) or _SCRIPT_PERMISSION.search(str(error))):
        return error
    name, key = str(command[0]), command[1] if len(command) > 1 else ""
    if name in ("EVAL", "EVALSHA"):
        name, key = "a script", command[3] if len(command) > 3 else ""
    elif name == "XREAD":
        key = command[list(command).index("STREAMS") + 1]
    shown = key.decode("utf-8", "replace") if isinstance(key, bytes) else str(key)
    return NoPermissionError(f"{name} {'on ' if ':' in shown else ''}{shown}: {error}")


def unloaded(reply: object) -> Exception | None:
    """A transient error in place of the reply to a script's text that this user may not send; `None` for others.

    An engine loads the scripts soon after it or Redis has started.
    """
    from redis.exceptions import NoPermissionError, TryAgainError

    if not isinstance(reply, NoPermissionError) or not re.search(r"'eval'", str(reply)):
        return None
    return TryAgainError(
        "Redis has not loaded a script of this version, and this user may not load it: start an engine of this "
        "version, or load the scripts by `tracewire acl --load`"
    )


def _is_authentication_failure(error: BaseException) -> bool:
    """Whether Redis refused the credentials, or one side refused the other's certificate.

    Redis-py may wrap such an error as a `ConnectionError`, so the causes are searched, too.
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
    """The `BusError` for an error of redis-py's; any other error unchanged."""
    from redis.exceptions import MovedError, NoPermissionError, RedisError

    if _is_authentication_failure(error):
        return NotAuthenticated(f"Redis refused the credentials or a certificate: {error}")
    if isinstance(error, NoPermissionError):
        return NotAllowed(f"Redis does not allow this user {error}")
    if isinstance(error, MovedError):
        return WrongTopology(f"this Redis is a node of a cluster: use a URL with redis+cluster:// ({error})")
    if isinstance(error, RedisError):
        return BusError(f"Redis refused: {error}")
    return error


def first_error(error: BaseException) -> Any:
    """The first error in an exception group, also where groups are nested; any other exception as it is."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
