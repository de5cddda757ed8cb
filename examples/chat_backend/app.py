"""The service: conversations over HTTP, answers as server-sent events, and one page to try them.

Any number of processes may serve it. The bus has all that a consumer needs; a process holds a client and a cache of the
conversations that it has read.
"""

from __future__ import annotations

import logging
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Annotated, Any

from fastapi import Depends, FastAPI, Header, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse, JSONResponse

import tracewire
from tracewire import Client, Subscription, TracewireError

from .conversations import Conversations, Message, Opening, Steering, trace_id
from .problems import Problem, of_bus, of_request, within
from .settings import Settings
from .stream import EventStream

__all__ = ["create_app"]

logger = logging.getLogger(__name__)

PAGE = Path(__file__).parent / "page.html"

_EVENT_ID = re.compile(r"[0-9]{1,20}-[0-9]{1,20}")
#: The id of every answer's last event. Nothing comes after it.
_LAST = f"{2**64 - 1}-{2**64 - 1}"


class Chat:
    """The state that the requests of one process share."""

    def __init__(self, client: Client, settings: Settings) -> None:
        self.client = client
        self.settings = settings
        self.conversations = Conversations(client, settings)
        #: What is being streamed now.
        self.streams: set[Subscription] = set()

    async def leave(self) -> None:
        """End all streams, so that the server can stop. The browsers reconnect, to another process."""
        for subscription in list(self.streams):
            await subscription.aclose()


def _is_event_id(text: str) -> bool:
    """Whether an event can have this id: two numbers that fit 64 bits."""
    return _EVENT_ID.fullmatch(text) is not None and all(int(part) < 2**64 for part in text.split("-"))


def _chat(request: Request) -> Chat:
    chat: Chat = request.app.state.chat
    return chat


ThisChat = Annotated[Chat, Depends(_chat)]


def create_app(settings: Settings | None = None) -> FastAPI:
    """The application. Without settings, those of the environment."""
    settings = settings or Settings.from_environment()

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with tracewire.connect(settings.url, prefix=settings.prefix, name=settings.name) as client:
            app.state.chat = Chat(client, settings)
            yield

    app = FastAPI(title="Tracewire chat", lifespan=lifespan)

    @app.exception_handler(Problem)
    async def refused(_: Request, error: Problem) -> JSONResponse:
        return error.response()

    @app.exception_handler(TracewireError)
    async def bus_refused(_: Request, error: TracewireError) -> JSONResponse:
        problem = of_bus(error)
        if problem.status == 500:
            logger.error("a request failed", exc_info=error)
        return problem.response()

    @app.exception_handler(RequestValidationError)
    async def not_understood(_: Request, error: RequestValidationError) -> JSONResponse:
        return of_request(error).response()

    _routes(app)
    return app


def _routes(app: FastAPI) -> None:
    @app.get("/", include_in_schema=False)
    async def page() -> FileResponse:
        return FileResponse(PAGE, media_type="text/html")

    @app.post("/conversations", status_code=201)
    async def open_conversation(chat: ThisChat, opening: Opening | None = None) -> dict[str, Any]:
        """Open a conversation."""
        conversation = chat.conversations.open(opening or Opening())
        return {"id": conversation.id, **conversation.opening.model_dump()}

    @app.get("/conversations/{name}")
    async def history(name: str, chat: ThisChat) -> dict[str, Any]:
        """What was said and answered so far."""
        with within(chat.settings.patience_s):
            return await chat.conversations.history(name)

    @app.post("/conversations/{name}/messages", status_code=202)
    async def say(name: str, message: Message, chat: ThisChat) -> dict[str, Any]:
        """Have a message answered. Returns the answer's number at once; its stream shows it."""
        with within(chat.settings.patience_s):
            return await chat.conversations.say(name, message)

    @app.get("/conversations/{name}/stream")
    async def stream(
        name: str,
        chat: ThisChat,
        answer: Annotated[int | None, Query(ge=0)] = None,
        after: Annotated[str | None, Query()] = None,
        last_event_id: Annotated[str | None, Header()] = None,
    ) -> Response:
        """An answer from its beginning, or after an event; the newest one, unless `answer` says which.

        `Last-Event-ID` is what a browser sends by itself when it comes back; `after` is for those who cannot.
        """
        since = last_event_id or after
        if since is not None and not _is_event_id(since):
            field = "Last-Event-ID" if last_event_id else "after"
            raise Problem(422, f"expected the id of an event, <attempt>-<seq>, got {since[:60]!r}", field=field)
        if since == _LAST:
            # Nothing is left, and a browser that is told so does not come back.
            return Response(status_code=204)
        with within(chat.settings.patience_s):
            trace = await chat.conversations.newest(name) if answer is None else trace_id(name, answer)
            subscription = chat.client.subscribe(trace, since=since or "start")
            await subscription.start()
        return EventStream(subscription, chat.settings, chat.streams)

    @app.post("/conversations/{name}/steer")
    async def steer(name: str, steering: Steering, chat: ThisChat) -> dict[str, Any]:
        """Bend the answer that is being written. Its stream says from which token on."""
        with within(chat.settings.patience_s):
            trace = await chat.conversations.newest(name)
            version = await chat.client.steer(trace, alpha=steering.alpha, if_version=steering.if_version)
        return {"version": version, "alpha": steering.alpha}

    @app.post("/conversations/{name}/cancel")
    async def cancel(name: str, chat: ThisChat) -> dict[str, Any]:
        """Have the answer end where it is. What was written stays."""
        with within(chat.settings.patience_s):
            trace = await chat.conversations.newest(name)
            return {"cancelled": await chat.client.cancel(trace, "the user stopped it")}
