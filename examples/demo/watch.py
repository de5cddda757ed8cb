"""A consumer in a process of its own: told a trace's id on standard input, it replays the trace and follows it to its
end.

Prints one JSON line: how many outputs it saw, how many of them it replayed, and the digests of what it folded.
"""

from __future__ import annotations

import argparse
import json
import sys

import anyio

import tracewire
from tracewire_bus.fold import Fold
from tracewire_bus.messages import Final, Output
from tracewire_bus.values import digest


async def watch(url: str, name: str, only: list[str]) -> dict[str, object]:
    """Follow the trace whose id comes on standard input; returns what was seen."""
    names = set(only) or None
    async with tracewire.connect(url) as client:
        print("connected", flush=True)
        trace = (await anyio.to_thread.run_sync(sys.stdin.readline)).strip()
        fold = Fold(names=names)
        outputs = 0
        async for event in client.subscribe(trace, since="start", names=names):
            fold.apply(event)
            if isinstance(event, Output):
                outputs += 1
            if isinstance(event, Final):
                fold.verify()
        saves = fold.choices[0, 0].saves
        return {
            "name": name,
            "outputs": outputs,
            "tokens": len(fold.choices[0, 0].token_ids),
            "digests": {key: digest(value).hex() for key, value in sorted(saves.items())},
        }


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--url", required=True)
    parser.add_argument("--name", required=True)
    parser.add_argument("--only", action="append", default=[])
    options = parser.parse_args()
    print(json.dumps(anyio.run(watch, options.url, options.name, options.only)), flush=True)


if __name__ == "__main__":
    main()
