"""A batch: a prompt per line of one file, a JSON object per line of another. `python batch.py PROMPTS RESULTS`"""

import asyncio
import json
import sys

from anyio import Path

import tracewire


async def main(prompts: Path, results: Path) -> None:
    some = asyncio.Semaphore(16)
    async with tracewire.Client() as client:

        async def complete(prompt: str) -> dict[str, str]:
            async with some:
                try:
                    result = await client.trace("demo", prompt, max_tokens=32).result()
                    return {"prompt": prompt, "text": result.text}
                except tracewire.TraceFailed as error:
                    return {"prompt": prompt, "error": str(error)}

        done = await asyncio.gather(*map(complete, (await prompts.read_text()).splitlines()))
    await results.write_text("".join(json.dumps(one) + "\n" for one in done))


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), Path(sys.argv[2])))
