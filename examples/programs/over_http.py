"""An answer that a second client steers half-way; neither needs Tracewire. `python over_http.py GATEWAY PROMPT`"""

import asyncio
import sys

import httpx
import openai

FADE = {"do": "ablate", "at": "residual(1)", "keep": {"live": "keep"}}
TRACING = {"tracewire": {"interventions": [FADE], "live": {"keep": 1.0}}}


def steer(gateway: str, trace_id: str, keep: float) -> None:
    httpx.post(f"{gateway}/traces/{trace_id}/steer", json={"values": {"keep": keep}}).raise_for_status()


async def main(gateway: str, prompt: str) -> None:
    async with openai.AsyncOpenAI(base_url=f"{gateway}/v1", api_key="none") as client:
        chunks = await client.completions.create(model="demo", prompt=prompt, stream=True, extra_body=TRACING)
        begun = False
        async for chunk in chunks:
            print(text := chunk.choices[0].text, end="", flush=True)
            if text and not begun:
                await asyncio.to_thread(steer, gateway, chunks.response.headers["Tracewire-Trace-Id"], 0.5)
            begun = begun or bool(text)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
