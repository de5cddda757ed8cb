"""A thread pool: several threads share one client. `python threads.py "a prompt" "another" ...`"""

import sys
from concurrent.futures import ThreadPoolExecutor

import tracewire


def main(prompts: list[str]) -> None:
    with tracewire.blocking.Client() as client, ThreadPoolExecutor(max_workers=4) as pool:

        def complete(prompt: str) -> str:
            return client.trace("demo", prompt, max_tokens=32).result().text

        for prompt, text in zip(prompts, pool.map(complete, prompts), strict=True):
            print(f"{prompt}: {text}")


if __name__ == "__main__":
    main(sys.argv[1:])
