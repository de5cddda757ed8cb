"""URLs that name several servers: sentinels, or nodes of a cluster."""

from __future__ import annotations

from typing import Final
from urllib.parse import parse_qsl, urlencode, urlsplit

__all__ = ["Addresses"]

_OF_SENTINELS: Final = "sentinel_"


class Addresses:
    """`redis+KIND://[user:password@]host:port,host:port/PATH?OPTION=...`, taken apart.

    Options that begin with `sentinel_` are the sentinels' alone, those that begin with `ssl_` everybody's.

    Raises:
        ValueError: it is none.
    """

    def __init__(self, url: str, default_port: int) -> None:
        parts = urlsplit(url)
        self._scheme = parts.scheme.partition("+")[0]
        login, at, hosts = parts.netloc.rpartition("@")
        self._login = login + at
        #: Host and port of each server that is named.
        self.servers = [_address(host, default_port) for host in hosts.split(",")]
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


def _address(text: str, default_port: int) -> tuple[str, int]:
    one = urlsplit(f"//{text}")
    if not one.hostname:
        raise ValueError(f"a host and a port must stand between the commas of a URL, got {text!r}")
    return one.hostname, one.port or default_port
