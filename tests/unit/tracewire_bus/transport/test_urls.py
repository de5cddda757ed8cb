"""URLs of several servers."""

from __future__ import annotations

import logging
import traceback
from functools import partial

import pytest

import tracewire
from tracewire_bus.bus import Bus, BusError
from tracewire_bus.transport.urls import Addresses, parse_url, redacted


def test_a_url_of_several_servers() -> None:
    secret = (
        "rediss+sentinel://me:geheim@one,[::1]:7000/s?db=2&ssl_ca_certs=/ca&sentinel_username=u&sentinel_password=p"
    )
    parsed = Addresses(secret, 26379)
    assert parsed.servers == [("one", 26379), ("::1", 7000)]
    assert parsed.path == "s"
    assert parsed.url("h", 1) == "rediss://me:geheim@h:1?db=2&ssl_ca_certs=%2Fca"
    assert parsed.sentinel_url("::1", 1) == "rediss://[::1]:1?ssl_ca_certs=%2Fca&username=u&password=p"
    shown = redacted(secret)
    assert "geheim" not in shown
    assert "sentinel_password=***" in shown
    for bad in ("redis+sentinel://one,,two/s", "redis+sentinel:///s", "redis+sentinel://one:port/s"):
        with pytest.raises(ValueError, match=r"between the commas|[Pp]ort"):
            Addresses(bad, 26379)


#: What may stand in the middle of a password, encoded or not.
MIDDLES = [
    *"/?#@:&=%[]{},;+!$^*|\\\"' ~<>`\N{ACCOUNT OF}\n",
    "%2F",
    "&sword=",
    "@127.0.0.1:1/",
    "/x@y?z#",
    "?db=1&",
    "#@",
]


#: Nobody listens there.
AT = "127.0.0.1:1"


SHAPES = {
    "of nobody": "redis://:{secret}@" + AT,
    "of a user": "redis://me:{secret}@" + AT + "/0?db=1",
    "by TLS": "rediss://me:{secret}@" + AT,
    "of a socket": "unix://me:{secret}@/nowhere/redis.sock",
    "behind a socket": "unix:///nowhere/redis.sock?password={secret}",
    "of sentinels": "redis+sentinel://me:{secret}@" + f"{AT},{AT}/service",
    "of sentinels themselves": "redis+sentinel://" + AT + "/service?sentinel_password={secret}",
    "of a cluster": "redis+cluster://me:{secret}@" + f"{AT},{AT}",
    "an option": "redis://" + AT + "?password={secret}&db=1",
    "an option of another case": "redis://" + AT + "?Password={secret}",
    "an option that is misspelt": "redis://" + AT + "?pasword={secret}",
    "an option of another name": "redis://" + AT + "/0?auth={secret}&db=1",
    "a misspelt one of sentinels": "redis+sentinel://" + AT + "/s?sentinel_pasword={secret}",
    "another scheme": "redos://me:{secret}@" + AT,
    "no scheme": "me:{secret}@" + AT,
    "one slash": "redis:/me:{secret}@" + AT,
    "a fragment": "redis://" + AT + "#{secret}",
    "no host": "redis://:{secret}@",
}


async def _told(url: str) -> str:
    """All that anybody is told who tries to use a URL."""
    told = [redacted(url)]
    try:
        parse_url(url)
    except ValueError as error:
        told += traceback.format_exception(error)
    for use in (partial(Bus.open, url, patience_s=0), partial(tracewire.connect, url, retry_timeout=0)):
        try:
            async with use():  # type: ignore[operator]
                told.append("connected")
        except (tracewire.TracewireError, BusError, ValueError) as error:
            told += traceback.format_exception(error)
    return "\n".join(told)


@pytest.mark.parametrize("shape", SHAPES)
async def test_nothing_shows_a_password(shape: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    for middle in MIDDLES:
        url = SHAPES[shape].format(secret=f"hunter{middle}swan")
        told = (await _told(url)) + caplog.text
        assert "hunter" not in told, (url, told)
        assert "swan" not in told, (url, told)
        caplog.clear()


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://host:1/2", "redis://host:1/2"),
        ("redis://me:secret@host:1/2?db=3", "redis://me:***@host:1/2?db=3"),
        ("redis://:s@cret@host", "redis://:***@host"),
        ("redis://:s/cret@host", "redis://***"),
        ("redis://:123/45@host", "redis://***"),
        ("redis://me:s/cret", "redis://***"),
        ("redis://host?password=s@cret", "redis://***"),
        ("unix:///run/redis.sock?db=1", "unix:///run/redis.sock?db=1"),
        ("unix:///run/redis@1.sock?db=1", "unix:///run/redis@1.sock?db=1"),
        ("unix://me@/run/redis.sock?password=secret&db=1", "unix://me@/run/redis.sock?password=***&db=1"),
        ("rediss://host?ssl_ca_certs=/ca.pem&ssl_password=s", "rediss://host?ssl_ca_certs=/ca.pem&ssl_password=***"),
        ("redis://host?pasword=secret&db=3", "redis://host?pasword=***&db=3"),
        ("redis://host?password=a&b=c", "redis://host?password=***&***"),
        ("redis://host?secret", "redis://host?***"),
        ("redis+cluster://me:s@one:1,[::1]:2/", "redis+cluster://me:***@one:1,[::1]:2/"),
        ("localhost:6379", "localhost:6379"),
        ("me:secret@host", "***"),
    ],
)
def test_what_is_shown_of_a_url(url: str, shown: str) -> None:
    assert redacted(url) == shown


@pytest.mark.parametrize("url", ["redis://:s/cret@host", "redis://:12?3@host", "redis://u:1#2@host", "redis://u:[x]@h"])
async def test_a_password_that_is_not_encoded_is_told_how(url: str) -> None:
    with pytest.raises(tracewire.ConnectError, match=r"cannot read|percent-encoded \(@ as %40"):
        async with tracewire.connect(url):
            pass


async def test_a_client_shows_no_password(embedded: str) -> None:
    # This user takes any password.
    url = f"{embedded}?username=default&password="
    async with tracewire.connect(f"{url}hunter") as client:
        assert client.url == f"{url}hunter"
        assert repr(client) == f"<Client of {url}***>"
