"""An answer of the stock `openai` client that a second process steers by HTTP. `python steered_answer.py`

The writer knows of OpenAI's API alone, and the process that steers of HTTP alone: neither imports Tracewire, and Redis
need not be reachable for either. `OPENAI_BASE_URL` names the gateway, as for every program with this client, and
`OPENAI_API_KEY` has the key, if the gateway has keys. `python steered_answer.py --steer TRACE` is the second process
by itself.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

import httpx
import numpy as np
from openai import OpenAI

#: The client takes no empty key. A gateway without keys ignores it.
KEY = os.environ.get("OPENAI_API_KEY", "none")

DIRECTION = np.load(Path(__file__).parents[1] / "demo_model" / "direction.npy").tolist()
#: Adds `alpha` times the direction, which begins as nothing, and reads how much of it each token has.
INTERVENTIONS = [
    {"do": "steer", "at": "residual(4)", "vector": DIRECTION, "scale": {"live": "alpha"}},
    {"do": "probe", "name": "code", "at": "residual(4)", "weight": DIRECTION},
]


def write(prompt: str, tokens: int) -> None:
    """Stream an answer, and show where another process has steered it."""
    extra = {"ignore_eos": True, "tracewire": {"interventions": INTERVENTIONS, "live": {"alpha": 0.0}}}
    # Begun before the answer, which may be over by the time that a process takes to start.
    command = [sys.executable, __file__, "--steer", "-"]
    other = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert other.stdin is not None
    assert other.stdout is not None
    other.stdout.readline()
    answer = OpenAI(api_key=KEY).completions.create(
        model="demo", prompt=prompt, stream=True, max_tokens=tokens, temperature=0.0, extra_body=extra
    )
    for chunk in answer:
        about = chunk.tracewire
        if "trace_id" in about:
            # It is in the first chunk. A process that has it, and a key with the right, can steer the answer.
            print(f"trace {about['trace_id']}\n{prompt}", end="", flush=True)
            other.stdin.write(f"{about['trace_id']}\n")
            other.stdin.flush()
        elif about.get("event", {}).get("type") == "steered":
            event = about["event"]
            last = event["changes"][-1]
            print(f"\n--- {last['by']} steers to {last['values']} from token {event['first'][0]['index']}", flush=True)
        print("".join(choice.text for choice in chunk.choices), end="", flush=True)
    print()
    other.wait()


def steer(trace_id: str, after: int) -> None:
    """Follow an answer that another process streams, and steer it to code after so many tokens.

    For `-` the trace's id is the next line of standard input.
    """
    if trace_id == "-":
        print("ready", flush=True)
        trace_id = sys.stdin.readline().strip()
    gateway = os.environ["OPENAI_BASE_URL"].removesuffix("/").removesuffix("/v1")
    headers = {"Authorization": f"Bearer {KEY}"}
    with (
        httpx.Client(base_url=gateway, headers=headers) as http,
        http.stream("GET", f"/traces/{trace_id}/events", params={"content": "text"}) as followed,
    ):
        for line in followed.raise_for_status().iter_lines():
            event = json.loads(line.removeprefix("data: ")) if line.startswith("data: ") else {}
            if event.get("type") == "output" and event["index"] >= after:
                http.post(f"/traces/{trace_id}/steer", json={"values": {"alpha": 20.0}}).raise_for_status()
                return


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--prompt", default="This module provides")
    parser.add_argument("--tokens", type=int, default=192)
    parser.add_argument("--steer", metavar="TRACE", help="steer this trace alone; - reads its id from standard input")
    parser.add_argument("--after", type=int, default=16, help="how many tokens the process that steers lets pass")
    options = parser.parse_args()
    if options.steer is None:
        write(options.prompt, options.tokens)
    else:
        steer(options.steer, options.after)
