"""Worker processes as Celery's: each connects once, as it starts, and serves one task after the other.

python worker.py "a prompt" "another" ...
"""

import multiprocessing
import sys
from concurrent.futures import ProcessPoolExecutor

import tracewire

client = tracewire.blocking.Client()


def connect() -> None:
    client.connect()


def complete(prompt: str) -> tuple[str, str]:
    """A task."""
    trace = client.trace("demo", prompt, max_tokens=32, deadline=60)
    return trace.id, trace.result().text


if __name__ == "__main__":
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(2, mp_context=spawn, initializer=connect) as pool:
        for trace_id, text in pool.map(complete, sys.argv[1:]):
            print(f"{trace_id}: {text}")
