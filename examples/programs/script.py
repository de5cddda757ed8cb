"""A script: one prompt, printed as it comes.

python script.py "def parse(text):"     # TRACEWIRE_URL names the Redis
"""

import sys

import tracewire


def main(prompt: str) -> None:
    with tracewire.blocking.Client() as client:
        trace = client.trace("demo", prompt, max_tokens=64)
        for text in trace.text_stream():
            print(text, end="", flush=True)
        print(f"\n{trace.result().usage.completion_tokens} tokens")


if __name__ == "__main__":
    main(sys.argv[1])
