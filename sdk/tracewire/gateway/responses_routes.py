"""OpenAI's responses. Every response is a trace, and its id is the trace's behind a prefix."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Query
from pydantic import ValidationError
from starlette.requests import Request
from starlette.responses import Response

from tracewire import Item, Output, State, Trace, TracewireError
from tracewire.gateway.keys import Caller

from .documents import ResponseId, answers, problems, stream
from .event_json import event_json, failure_json
from .guarded_routes import GuardedRoute
from .openai_routes import Completion, CompletionStream, json_response
from .problems import Problem, of_validation
from .responses_answers import PREFIX, ResponseAnswer, ResponseEvents, end_of, items_of, response_of, response_usage
from .responses_bodies import ResponsesBody
from .state import Gateway, TheCaller, TheGateway, needs
from .streams import encoded

__all__ = ["router"]

router = APIRouter(prefix="/v1/responses", tags=["openai"], route_class=GuardedRoute)

_FOUND = answers("The response.", "ModelResponse") | problems(404, openai=True)
_CREATED = stream(
    "The response; with `stream`, its events.",
    'event: response.created\ndata: {"type": "response.created", "sequence_number": 0}\n\n',
    _FOUND,
) | problems(404, 408, 409, openai=True)


@router.post("", operation_id="create_response", dependencies=[needs("submit")], responses=_CREATED)
async def respond(body: ResponsesBody, request: Request, gateway: TheGateway, caller: TheCaller) -> Response:
    """Answer an input. The answer's trace can be followed and steered by its id."""
    return await _Response(gateway, caller, body).answer(request)


@router.get("/{response_id}", operation_id="get_response", dependencies=[needs("read")], responses=_FOUND)
async def retrieve(
    response_id: ResponseId,
    gateway: TheGateway,
    caller: TheCaller,
    stream: Annotated[bool, Query(description="refused: `GET /traces/{id}/events` is the stream")] = False,
) -> Response:
    """A response as it is now, from its trace. It lacks what only the request had, such as the tools."""
    if stream:
        more = f"GET /traces/{response_id.removeprefix(PREFIX)}/events follows its trace, after any event"
        raise Problem(400, f"a response is not streamed again: {more}", code="invalid_request", field="stream")
    return json_response(_as_response(await _state(response_id, gateway, caller)))


@router.post(
    "/{response_id}/cancel",
    operation_id="cancel_response",
    dependencies=[needs("steer")],
    responses=_FOUND | problems(409, openai=True),
)
async def cancel(response_id: ResponseId, gateway: TheGateway, caller: TheCaller) -> Response:
    """Cancel a response. One that has ended stays as it is."""
    state = await _state(response_id, gateway, caller)
    if state.status is None:
        with gateway.patience():
            await gateway.client.cancel(state.trace_id, by=caller.name)
            async for _ in gateway.client.subscribe(state.trace_id, since=state.position, names=()):
                pass
        state = await _state(response_id, gateway, caller)
    return json_response(_as_response(state))


async def _state(response_id: str, gateway: Gateway, caller: Caller) -> State:
    """The state of a response's trace.

    Raises:
        Problem: the id is none of a response.
        UnknownTrace: there is no such trace, or the caller must not see it.
    """
    if not response_id.startswith(PREFIX):
        raise Problem(404, f"no response {response_id[:100]!r}", code="unknown_response", field="response_id")
    trace_id = response_id.removeprefix(PREFIX)
    gateway.check_visible(caller, trace_id)
    with gateway.patience():
        return await gateway.client.get_state(trace_id)


#: The status of a response by that of its trace; `finished` and `stopped` depend on the choice.
_STATUS = {None: "in_progress", "cancelled": "cancelled"}


def _as_response(state: State) -> dict[str, Any]:
    accepted = state.accepted
    more: dict[str, Any] = {"usage": response_usage(state.usage)} if state.finished else {}
    choices = [choice for invoke in state.invokes for choice in invoke.choices]
    ended = state.status in ("finished", "stopped")
    end = end_of(choices[0].finish_reason if choices else None) if ended else {}
    status = end.pop("status", None) or _STATUS.get(state.status, "failed")
    if status == "failed" and (failure := failure_json(state.error)) is not None:
        more["error"] = {"code": "server_error", "message": failure["message"]}
    if len(choices) == 1 and choices[0].message is not None:
        more["output"] = items_of(state.trace_id, choices[0].message, "completed" if ended else "incomplete")
    if accepted is not None and accepted.sampling:
        sampling = accepted.sampling[0]
        more |= {name: sampling[name] for name in ("temperature", "top_p") if name in sampling}
        more["max_output_tokens"] = sampling.get("max_tokens")
    model, created = ("", 0.0) if accepted is None else (accepted.model, accepted.queued_at)
    return response_of(state.trace_id, model, created, status=status, **end, **more)


class _Response(Completion):
    """One request for a response, and its trace."""

    def __init__(self, gateway: Gateway, caller: Caller, body: ResponsesBody) -> None:
        try:
            chat = body.chat_body()
        except ValidationError as error:
            found = [{**one, "loc": ("body", *one["loc"])} for one in error.errors()]
            raise of_validation(found, openai=True) from None
        super().__init__(gateway, caller, chat, partial(ResponseAnswer, asked=body))

    def problem(self, error: TracewireError) -> Problem:
        """The problem for an error, in the terms of the request's body."""
        problem = super().problem(error)
        if problem.field is not None:
            for ours, theirs in (("messages", "input"), ("reasoning_effort", "reasoning.effort")):
                if problem.field.startswith(ours):
                    problem.field = theirs + problem.field.removeprefix(ours)
        return problem

    def stream(self, trace: Trace) -> CompletionStream:
        """See `Completion.stream`."""
        return _ResponseStream(self, trace)


class _ResponseStream(CompletionStream):
    """The answer to a request with `stream`."""

    def __init__(self, completion: Completion, trace: Trace) -> None:
        answer = completion.answer_of(trace)
        assert isinstance(answer, ResponseAnswer)
        super().__init__(completion, trace, answer)
        self._events = ResponseEvents(answer)

    def opening(self) -> bytes:
        """See `EventSource.opening`."""
        return b"".join(map(_encoded, self._events.begin(tracewire={"trace_id": self._trace.id})))

    async def rendered(self, item: Item) -> bytes:
        """See `EventSource.rendered`."""
        self._completion.read(item)
        return b"".join(_encoded(event, item.id) for event in await self._events_of(item))

    async def ending(self) -> bytes:
        """See `EventSource.ending`."""
        final = await self._trace.final()
        more = {"tracewire": await self._final(final)} if self._extended else {}
        return b"".join(map(_encoded, self._events.end(final.usage, **more)))

    def failed(self, error: TracewireError) -> bytes:
        """See `EventSource.failed`."""
        return _encoded(self._failed_event(self._completion.problem(error)))

    def closed(self) -> bytes:
        """See `EventSource.closed`."""
        return _encoded(self._failed_event(self.closing()))

    async def _events_of(self, item: Item) -> list[dict[str, Any]]:
        found = []
        for piece in self._continuity.pieces(item, saves=self._saves):
            events = list(self._events.added(piece))
            if self._extended:
                # A piece without text has its saves in an event of our own, which clients of OpenAI's pass over.
                events = events or [self._events.event("tracewire")]
                events[-1]["tracewire"] = await self._about(piece, item)
            found += events
        if self._extended and not isinstance(item, Output):
            event = event_json(item, self._completion.form, self._trace.id)
            found.append(self._events.event("tracewire", tracewire={"event": event}))
        return found

    def _failed_event(self, problem: Problem) -> dict[str, Any]:
        about = {"trace_id": self._trace.id, "position": self._completion.position, **problem.more}
        return self._events.failed(problem.openai()["error"], tracewire=about)


def _encoded(event: dict[str, Any], event_id: str | None = None) -> bytes:
    return encoded(event, name=event["type"], event_id=event_id)
