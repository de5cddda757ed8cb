"""Parses the URLs of a Redis, and shows URLs without passwords.

No other module parses or shows a URL: the errors of Python's parser repeat the text that it could not parse, which may
be part of a password.
"""

from __future__ import annotations

import re
from typing import Final
from urllib.parse import SplitResult, parse_qsl, urlencode, urlsplit

__all__ = ["Addresses", "parse_url", "redacted", "unreadable_message"]

_SENTINEL_PREFIX: Final = "sentinel_"
#: Options whose values are not secret.
_PUBLIC: Final = frozenset(
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


def parse_url(url: str) -> SplitResult:
    """Parse a URL.

    Raises:
        ValueError: the URL is malformed, or the end of its password is ambiguous. The text shows no part of the URL
            that may be of a password.
    """
    scheme, separator, rest = url.partition("://")
    hosts, tail = _split_location(rest)
    try:
        # Newer Pythons refuse an address in brackets that is not the only one.
        several = separator and "," in hosts
        parts = urlsplit(f"{scheme}://{tail}")._replace(netloc=hosts) if several else urlsplit(url)
    except ValueError:
        raise ValueError(unreadable_message(url)) from None
    if _is_ambiguous(url):
        raise ValueError(unreadable_message(url))
    return parts


def unreadable_message(url: str) -> str:
    """The text of the error for a URL that cannot be parsed."""
    return (
        f"the URL {redacted(url)} cannot be read: expected redis://[user:password@]host:port/db, with the special "
        "characters of a user and a password percent-encoded (@ as %40, : as %3A, / as %2F, ? as %3F, # as %23)"
    )


def redacted(url: str) -> str:
    """A URL for messages, with `***` for its secrets and for anything that may be part of an unencoded password."""
    scheme, separator, rest = url.partition("://")
    if not separator:
        return url if _HOST.fullmatch(url) else "***"
    if not _SCHEME.fullmatch(scheme):
        return "***"
    if _is_ambiguous(url):
        return f"{scheme}://***"
    location, tail = _split_location(rest)
    login, at, hosts = location.rpartition("@")
    user, colon, _ = login.partition(":")
    if not all(_HOST.fullmatch(host) for host in hosts.split(",")):
        return f"{scheme}://***"
    tail, fragment, _ = tail.partition("#")
    path, mark, query = tail.partition("?")
    shown = f"{scheme}://{user}{':***' if colon else ''}{at}{hosts}{path}{mark}{_redacted_options(query)}"
    return shown + ("#***" if fragment else "")


def _split_location(rest: str) -> tuple[str, str]:
    """The user and hosts of a URL, and the rest after them."""
    end = re.search(r"[/?#]|$", rest)
    assert end is not None
    return rest[: end.start()], rest[end.start() :]


def _is_ambiguous(url: str) -> bool:
    """Whether an unencoded password may extend beyond the end of the user and hosts."""
    scheme, _, rest = url.partition("://")
    location, tail = _split_location(rest)
    # The path of a unix socket may contain an @.
    return "@" in tail and not (scheme == "unix" and not location)


def _redacted_options(query: str) -> str:
    options: list[str] = []
    secret = False
    for option in query.split("&") if query else ():
        name, equals, value = option.partition("=")
        if name in _PUBLIC and _VALUE.fullmatch(value):
            options.append(option)
            continue
        # An unknown option after a secret may be the rest of that secret.
        known = name in _PUBLIC or name in _SECRET or (equals and not secret and _NAME.fullmatch(name))
        options.append(f"{name}=***" if known else "***")
        secret = True
    return "&".join(options)


class Addresses:
    """The parts of a URL with several servers: `redis+KIND://[user:password@]host:port,host:port/PATH?OPTION=...`.

    Options that begin with `sentinel_` are for connections to sentinels only, those that begin with `ssl_` for all.

    Attributes:
        servers: the host and port of each server.
        path: the URL's path.

    Raises:
        ValueError: the URL is malformed.
    """

    def __init__(self, url: str, default_port: int) -> None:
        parts = parse_url(url)
        self._scheme = parts.scheme.partition("+")[0]
        login, at, hosts = parts.netloc.rpartition("@")
        self._login = login + at
        self.servers = [_address(host, default_port, url) for host in hosts.split(",")]
        self.path = parts.path.strip("/")
        self._options = parse_qsl(parts.query)

    def url(self, host: str, port: int) -> str:
        """The URL of one server, with the user and the options of this URL."""
        return self._url(
            self._login, host, port, [one for one in self._options if not one[0].startswith(_SENTINEL_PREFIX)]
        )

    def sentinel_url(self, host: str, port: int) -> str:
        """The URL of one sentinel, with the sentinels' own user and options."""
        shared = [one for one in self._options if one[0].startswith("ssl_")]
        own = [
            (name.removeprefix(_SENTINEL_PREFIX), value)
            for name, value in self._options
            if name.startswith(_SENTINEL_PREFIX)
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
    raise ValueError(f"expected hosts and ports between the commas of a URL, got {redacted(url)}")
