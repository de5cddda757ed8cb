"""Which of an engine's adapters a request belongs to.

An engine can have several adapters (`--adapters`), numbered from 0. Adapter 0 starts the engine. The name of each
request, and of each run, says which adapter started it. A worker sends what it reports to that adapter.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Final

__all__ = ["adapter_of", "address_of", "name_prefix"]

_NAME: Final = re.compile(r"a([1-9][0-9]{0,2})t[0-9]")


def name_prefix(adapter: int) -> str:
    """How the names of an adapter's requests and runs begin; a number follows."""
    return f"a{adapter}t" if adapter else "t"


@lru_cache(1 << 12)
def adapter_of(name: str) -> int:
    """The number of the adapter that a request's or a run's name belongs to."""
    found = _NAME.match(name)
    return int(found[1]) if found is not None else 0


def address_of(link_address: str, adapter: int) -> str:
    """The address of an adapter's link, given that of adapter 0. Both are unix sockets."""
    folder, _, socket = link_address.rpartition("/")
    return f"{folder}/adapter-{adapter}/{socket}" if adapter else link_address
