"""A consumer in a process of its own: it reads a trace's id from standard input, and follows that trace from its first
event to its end.

Prints one JSON line: in how many outputs it received how many tokens, the digest of their ids, and the digests of what
it folded.
"""

from __future__ import annotations

import argparse
import json
import sys

import anyio

import tracewire


async def watch(url: str, name: str, only: list[str]) -> dict[str, object]:
    """Follow the trace whose id comes on standard input; returns what was received."""
    names = set(only) or None
    async with tracewire.connect(url) as client:
        print("connected", flush=True)
        trace = (await anyio.to_thread.run_sync(sys.stdin.readline)).strip()
        fold = tracewire.Fold(names=names)
        outputs = 0
        token_ids: list[int] = []
        async for event in client.subscribe(trace, since="start", names=names):
            fold.apply(event)
            match event:
                case tracewire.Output():
                    outputs += 1
                    token_ids += event.token_ids
                case tracewire.Restarted():
                    outputs, token_ids = 0, []
                case tracewire.Final():
                    fold.verify()
        return {
            "name": name,
            "outputs": outputs,
            "tokens": len(token_ids),
            "token_digest": tracewire.digest(token_ids).hex(),
            "digests": {key: tracewire.digest(value).hex() for key, value in sorted(fold.choices[0, 0].saves.items())},
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
