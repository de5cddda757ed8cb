"""Traces in a nursery of trio, of which the first answer cancels the others. `python nursery.py "a prompt" "another"`

Needs `pip install "tracewire[trio]"`.
"""

import sys

import trio

import tracewire


async def main(prompts: list[str]) -> None:
    async with tracewire.Client() as client, trio.open_nursery() as nursery:

        async def race(prompt: str) -> None:
            async with client.trace("demo", prompt, max_tokens=32) as trace:
                result = await trace.result()
            print(f"{prompt}: {result.text}")
            nursery.cancel_scope.cancel()

        for prompt in prompts:
            nursery.start_soon(race, prompt)


if __name__ == "__main__":
    trio.run(main, sys.argv[1:])
