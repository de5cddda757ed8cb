"""The client for threads and scripts: the same classes and methods as the async client's, without `await`.

    with tracewire.blocking.Client("redis://localhost") as client:
        for output in client.trace("demo", "def add(a, b):", max_tokens=64).outputs():
            print(output.text)

A client runs on an event loop of its own, on a thread of its own. Any thread may use it and its handles, several at
once. `aclose()` is called `close()` here, and `await tracewire.load(value)` is `client.load(value)`.
"""

from typing import Unpack

from tracewire.client import ClientOptions

from .api import (
    Client,
    DeadLetters,
    Draining,
    Edits,
    EditWatch,
    Engines,
    Fan,
    Library,
    Listing,
    Model,
    Models,
    Server,
    Subscription,
    Trace,
    Tracer,
    Traces,
    Watch,
    WatchGroups,
)

__all__ = [
    "Client",
    "DeadLetters",
    "Draining",
    "EditWatch",
    "Edits",
    "Engines",
    "Fan",
    "Library",
    "Listing",
    "Model",
    "Models",
    "Server",
    "Subscription",
    "Trace",
    "Tracer",
    "Traces",
    "Watch",
    "WatchGroups",
    "connect",
]


def connect(url: str | None = None, **options: Unpack[ClientOptions]) -> Client:
    """A client that is connected: `with tracewire.blocking.connect(url) as client`, or until `client.close()`."""
    return Client(url, **options).connect()
