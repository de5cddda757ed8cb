"""URLs of a Redis: taken apart, shown without their passwords, and those that name several servers.

Nothing else takes a URL apart or shows one: Python's parser repeats in its errors what it could not read, which may be
a part of a password.
"""

from __future__ import annotations

import re
from typing import Final
from urllib.parse import SplitResult, parse_qsl, urlencode, urlsplit

__all__ = ["Addresses", "parsed", "redacted", "unreadable"]

_OF_SENTINELS: Final = "sentinel_"
#: Options whose values are no secrets.
_SHOWN: Final = frozenset(
    (
        *("client_name", "db", "decode_responses", "encoding", "health_check_interval", "lib_name", "lib_version"),
        *("max_connections", "protocol", "retry_on_timeout", "socket_connect_timeout", "socket_keepalive"),
        *("socket_timeout", "ssl_ca_certs", "ssl_ca_path", "ssl_cert_reqs", "ssl_certfile", "ssl_check_hostname"),
        *("ssl_ciphers", "ssl_keyfile", "ssl_min_version", "ssl_validate_ocsp", "timeout", "username"),
        "sentinel_username",
    )
)
_SECRET: Final = frozenset(("password", "sentinel_password", "ssl_password"))
_SCHEME: Final = re.compile(r"[A-Za-z][A-Za-z0-9+.-]{0,30}")
_HOST: Final = re.compile(r"(\[[0-9A-Fa-f:.%]*\]|[\w.-]*)(:[0-9]{0,5})?")
_NAME: Final = re.compile(r"[A-Za-z_]{1,40}")
_VALUE: Final = re.compile(r"[\w./:%+-]*")


def parsed(url: str) -> SplitResult:
    """A URL taken apart.

    Raises:
        ValueError: it cannot be, or only by guessing where its password ends. The message shows no part of it that
            may be one.
    """
    scheme, separator, rest = url.partition("://")
    hosts, tail = _divided(rest)
    try:
        # Newer Pythons refuse an address in brackets that is not the only one.
        several = separator and "," in hosts
        parts = urlsplit(f"{scheme}://{tail}")._replace(netloc=hosts) if several else urlsplit(url)
    except ValueError:
        raise ValueError(unreadable(url)) from None
    if _is_ambiguous(url):
        raise ValueError(unreadable(url))
    return parts


def unreadable(url: str) -> str:
    """What is wrong with a URL that cannot be taken apart."""
    return (
        f"the URL {redacted(url)} cannot be read: expected redis://[user:password@]host:port/db, with the special "
        "characters of a user and a password percent-encoded (@ as %40, : as %3A, / as %2F, ? as %3F, # as %23)"
    )


def redacted(url: str) -> str:
    """`url` for messages: without its password, and whatever may be a part of it because it is not encoded."""
    scheme, separator, rest = url.partition("://")
    if not separator:
        return url if _HOST.fullmatch(url) else "***"
    if not _SCHEME.fullmatch(scheme):
        return "***"
    if _is_ambiguous(url):
        return f"{scheme}://***"
    location, tail = _divided(rest)
    login, at, hosts = location.rpartition("@")
    user, colon, _ = login.partition(":")
    if not all(_HOST.fullmatch(host) for host in hosts.split(",")):
        return f"{scheme}://***"
    tail, fragment, _ = tail.partition("#")
    path, mark, query = tail.partition("?")
    shown = f"{scheme}://{user}{':***' if colon else ''}{at}{hosts}{path}{mark}{_redacted_options(query)}"
    return shown + ("#***" if fragment else "")


def _divided(rest: str) -> tuple[str, str]:
    """User and hosts, and what follows them."""
    end = re.search(r"[/?#]|$", rest)
    assert end is not None
    return rest[: end.start()], rest[end.start() :]


def _is_ambiguous(url: str) -> bool:
    """Whether a password may reach beyond where its user and hosts end."""
    scheme, _, rest = url.partition("://")
    location, tail = _divided(rest)
    # The socket's path may hold it.
    return "@" in tail and not (scheme == "unix" and not location)


def _redacted_options(query: str) -> str:
    options: list[str] = []
    secret = False
    for option in query.split("&") if query else ():
        name, equals, value = option.partition("=")
        if name in _SHOWN and _VALUE.fullmatch(value):
            options.append(option)
            continue
        # An unknown part after a secret may be the rest of the secret.
        known = name in _SHOWN or name in _SECRET or (equals and not secret and _NAME.fullmatch(name))
        options.append(f"{name}=***" if known else "***")
        secret = True
    return "&".join(options)


class Addresses:
    """`redis+KIND://[user:password@]host:port,host:port/PATH?OPTION=...`, taken apart.

    Options that begin with `sentinel_` are the sentinels' alone, those that begin with `ssl_` everybody's.

    Raises:
        ValueError: it is none.
    """

    def __init__(self, url: str, default_port: int) -> None:
        parts = parsed(url)
        self._scheme = parts.scheme.partition("+")[0]
        login, at, hosts = parts.netloc.rpartition("@")
        self._login = login + at
        #: Host and port of each server that is named.
        self.servers = [_address(host, default_port, url) for host in hosts.split(",")]
        self.path = parts.path.strip("/")
        self._options = parse_qsl(parts.query)

    def url(self, host: str, port: int) -> str:
        """What to connect to one of the servers by, with the user and the options of this URL."""
        return self._url(
            self._login, host, port, [one for one in self._options if not one[0].startswith(_OF_SENTINELS)]
        )

    def sentinel_url(self, host: str, port: int) -> str:
        """What to connect to a sentinel by: with its own user, if any."""
        shared = [one for one in self._options if one[0].startswith("ssl_")]
        own = [
            (name.removeprefix(_OF_SENTINELS), value) for name, value in self._options if name.startswith(_OF_SENTINELS)
        ]
        return self._url("", host, port, [*shared, *own])

    def _url(self, login: str, host: str, port: int, options: list[tuple[str, str]]) -> str:
        shown = f"[{host}]" if ":" in host else host
        return f"{self._scheme}://{login}{shown}:{port}" + (f"?{urlencode(options)}" if options else "")


def _address(text: str, default_port: int, url: str) -> tuple[str, int]:
    try:
        one = urlsplit(f"//{text}")
        if one.hostname:
            return one.hostname, one.port or default_port
    except ValueError:
        # The message of this error would show the text, which may contain a password.
        pass
    raise ValueError(f"a host and a port must stand between the commas of a URL, got {redacted(url)}")
