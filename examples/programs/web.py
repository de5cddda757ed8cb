"""A FastAPI route that answers with the text as it comes. `uvicorn web:app`"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI, HTTPException, responses

import tracewire

client = tracewire.Client()


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    async with client:
        yield


app = FastAPI(lifespan=lifespan)


@app.post("/complete")
async def complete(prompt: str) -> responses.StreamingResponse:
    trace = client.trace("demo", prompt, max_tokens=64)
    try:
        await trace.start()
    except tracewire.UnknownModel as error:
        raise HTTPException(503) from error
    return responses.StreamingResponse(trace.text_stream(), media_type="text/plain")
