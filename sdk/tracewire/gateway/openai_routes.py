"""OpenAI's API: models, completions and chat completions. Every completion is a trace."""

from __future__ import annotations

import logging
from collections.abc import Callable
from time import monotonic, time
from typing import Any

import anyio
import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tracewire import (
    Final,
    Gap,
    Item,
    Output,
    Restarted,
    Result,
    Trace,
    TraceRejected,
    TracewireError,
    UnknownModel,
    Values,
)
from tracewire.traces.output import merged
from tracewire_bus.log_fields import add_log_fields
from tracewire_bus.wire.messages import SHARED_INVOKE, Usage

from .bodies import ChatBody, CompletionBody, Extension, OpenAIBody
from .continuity import Continuity, Piece
from .documents import ModelPath, answers, problems, stream
from .event_json import event_json
from .guarded_routes import GuardedRoute
from .json_values import Form, inlined, to_json
from .keys import Caller
from .measured import Measured
from .openai_answers import Answer, ChatAnswer, CompletionAnswer, usage_of
from .problems import Problem, of_error
from .state import Gateway, TheCaller, TheGateway, needs
from .streams import EventSource, encoded, unless_left
from .submitting import openai_trace

__all__ = ["Completion", "CompletionStream", "json_response", "router"]

logger = logging.getLogger("tracewire.gateway")

router = APIRouter(prefix="/v1", tags=["openai"], route_class=GuardedRoute)

#: The header with the id of an answer's trace.
TRACE_HEADER = "Tracewire-Trace-Id"
_DONE = b"data: [DONE]\n\n"


def _completions(form: str, chunk: str) -> dict[int | str, Any]:
    """The answers of a route, for the API's document."""
    description = "The answer; with `stream`, its chunks."
    found = stream(description, f"data: {chunk}\n\ndata: [DONE]\n\n", answers(description, form))
    return found | problems(404, 408, 409, openai=True)


_COMPLETION = _completions("Completion", '{"choices": [{"index": 0, "text": " return"}]}')
_CHAT = _completions("ChatCompletion", '{"choices": [{"index": 0, "delta": {"content": "Hello"}}]}')


def json_response(value: Any, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(value), 200, headers, "application/json")


# --- models -----------------------------------------------------------------------------------------------------------


async def _cards(gateway: Gateway) -> list[dict[str, Any]]:
    with gateway.patience():
        infos = await gateway.client.models.list()
    found = []
    for info in infos:
        about = {
            "engines": list(info.engines),
            "layers": info.layer_count,
            "hidden_size": info.hidden_size,
            "vocabulary": info.vocabulary,
            "dtype": info.dtype,
            "revision": info.revision,
            "capacity": info.capacity,
            "running": info.running,
            "modalities": list(info.modalities),
        }
        card = {"object": "model", "created": 0, "owned_by": "tracewire", "max_model_len": info.max_model_len}
        found.append({"id": info.name, **card, "root": info.path or info.name, "parent": None, "tracewire": about})
        found += [{"id": lora, **card, "root": lora, "parent": info.name} for lora in info.loras]
    return found


@router.get(
    "/models",
    operation_id="list_models",
    dependencies=[needs("read")],
    responses=answers("The models.", "ModelList"),
)
async def list_models(gateway: TheGateway) -> Response:
    """List the served models and their LoRA adapters."""
    return json_response({"object": "list", "data": await _cards(gateway)})


@router.get(
    "/models/{model:path}",
    operation_id="get_model",
    dependencies=[needs("read")],
    responses=answers("The model.", "ModelCard") | problems(404, openai=True),
)
async def get_model(model: ModelPath, gateway: TheGateway) -> Response:
    """Describe one model."""
    cards = await _cards(gateway)
    for card in cards:
        if card["id"] == model:
            return json_response(card)
    raise of_error(UnknownModel(model, [card["id"] for card in cards]), openai=True)


# --- completions ------------------------------------------------------------------------------------------------------


@router.post("/completions", operation_id="create_completion", dependencies=[needs("submit")], responses=_COMPLETION)
async def complete(body: CompletionBody, request: Request, gateway: TheGateway, caller: TheCaller) -> Response:
    """Complete prompts. The answer's trace can be followed and steered by its id."""
    return await Completion(gateway, caller, body, CompletionAnswer).answer(request)


@router.post(
    "/chat/completions", operation_id="create_chat_completion", dependencies=[needs("submit")], responses=_CHAT
)
async def chat(body: ChatBody, request: Request, gateway: TheGateway, caller: TheCaller) -> Response:
    """Answer chat messages. The answer's trace can be followed and steered by its id."""
    return await Completion(gateway, caller, body, ChatAnswer).answer(request)


class Completion:
    """One request under `/v1`, and its trace."""

    measured: Measured

    def __init__(self, gateway: Gateway, caller: Caller, body: OpenAIBody, kind: Callable[..., Answer]) -> None:
        self.gateway = gateway
        self.caller = caller
        self.body = body
        self.extension: Extension = body.extension
        self._kind = kind
        self._begun = monotonic()
        #: The position of the last event of the trace that was read.
        self.position = "start"

    async def answer(self, request: Request) -> Response:
        """The answer, whole or as a stream.

        Raises:
            Problem: there is none.
            ClientLeft: the client has left.
        """
        try:
            trace = await unless_left(request, self._started)
        except TracewireError as error:
            raise self.problem(error) from error
        add_log_fields(trace_id=trace.id)
        # Only now, since a metric of a model that nobody serves would never go away.
        shared = self.gateway
        self.measured = Measured(
            *(shared.metrics, shared.limits, self.caller, trace.model, self._begun),
            trace_id=trace.id,
            steers=shared.steer_times,
        )
        if self.body.stream:
            return self.stream(trace)
        try:
            return await unless_left(request, lambda: self._whole(trace))
        except TracewireError as error:
            raise self.problem(error) from error
        finally:
            self.left(trace)
            with anyio.CancelScope(shield=True):
                await trace.aclose()

    def left(self, trace: Trace) -> None:
        """The request reads its trace no further. A detached one may run on, and its tokens still count."""
        if self.extension.detach:
            self.gateway.detached.count(self.caller, trace.id, self.position)

    def stream(self, trace: Trace) -> CompletionStream:
        """The answer as a stream."""
        return CompletionStream(self, trace, self.answer_of(trace))

    def problem(self, error: TracewireError) -> Problem:
        """The problem for an error, in the terms of the request's body."""
        problem = of_error(error, openai=True)
        if isinstance(self.body, ChatBody) and (problem.field or "").startswith("prompt"):
            assert problem.field is not None
            problem.field = "messages" + problem.field.removeprefix("prompt")
        if problem.status >= 500:
            logger.warning("a request of %s failed: %s", self.caller.name, error)
        return problem

    async def _started(self) -> Trace:
        """The trace, accepted by an engine or waiting for one. Closed again if it is not returned."""
        name = self.body.model
        trace = self._made(self.gateway.base_of(name))
        try:
            with self.gateway.patience():
                try:
                    await trace.start()
                except (UnknownModel, TraceRejected) as error:
                    if isinstance(error, TraceRejected) and error.field != "lora":
                        raise
                    # The name is that of an adapter, which may have moved to another model since.
                    trace = self._made(await self.gateway.find_base(UnknownModel(name, ())))
                    await trace.start()
            if self.body.stream:
                # An engine that refuses the trace says so with a status, if it comes to it in time.
                with anyio.move_on_after(self.gateway.settings.accept_s):
                    await trace.accepted()
        except BaseException:
            self.left(trace)
            with anyio.CancelScope(shield=True):
                await trace.aclose()
            raise
        return trace

    def _made(self, base: tuple[str, str | None]) -> Trace:
        trace = openai_trace(self.gateway.client, self.body, base, self.caller)
        if self.body.stream:
            # The stream has each event once, and nobody asks for the whole.
            trace._keep_no_contents()
        return trace

    def answer_of(self, trace: Trace) -> Answer:
        """The form of the answer."""
        body = self.body
        more: dict[str, Any] = {}
        if isinstance(body, ChatBody):
            more["named"] = isinstance(body.tool_choice, dict)
        elif isinstance(body, CompletionBody) and body.echo:
            more["echoed"] = body.prompts()
        return self._kind(
            trace.id,
            body.model,
            int(time()),
            choices=body.choices,
            top=body.wanted_logprobs(),
            ids=bool(body.return_token_ids),
            **more,
        )

    def read(self, item: Item) -> None:
        """Count an event that was read."""
        self.position = item.id
        self.measured.item(item)

    @property
    def form(self) -> Form:
        """How arrays stand in the answer."""
        return "reference" if self.extension.saves == "reference" else self.extension.arrays

    async def values_json(self, trace_id: str, values: Values) -> Any:
        """Saves as the answer has them."""
        if self.extension.saves == "inline":
            values = await inlined(values, self.gateway.settings.inline_bytes)
        return to_json(values, self.form, trace_id)

    async def _whole(self, trace: Trace) -> Response:
        logprobs: dict[tuple[int, int], list[Any]] = {}
        events = []
        async for item in trace:
            self.read(item)
            match item:
                case Output():
                    if item.logprobs:
                        logprobs.setdefault((item.invoke, item.choice), []).extend(item.logprobs)
                case Restarted() | Gap():
                    logprobs.clear()
            if not isinstance(item, Output | Gap):
                events.append(event_json(item, self.form, trace.id))
        result = await trace.result()
        answer = self.answer_of(trace)
        choices = [
            await self._choice(answer, result, invoke.index, number, logprobs)
            for invoke in result.invokes
            for number in range(len(invoke.choices))
        ]
        more: dict[str, Any] = {"trace_id": trace.id, "status": result.status, "live_version": result.live_version}
        if result.prompt_logprobs:
            self._add_prompt_logprobs(choices, result)
        if self.extension.saves != "none":
            more |= {"save_errors": result.save_errors, "warnings": result.warnings, "events": events}
            if result.shared:
                more["shared"] = await self.values_json(trace.id, result.shared)
        body = answer.body(choices, result.usage, tracewire=more)
        return json_response(body, {TRACE_HEADER: trace.id})

    def _add_prompt_logprobs(self, choices: list[dict[str, Any]], result: Result) -> None:
        """Give each choice the logprobs of its prompt, as vLLM has them: null for the first token."""
        for index, choice in enumerate(choices):
            steps = result.prompt_logprobs[index // self.body.choices]
            choice["prompt_logprobs"] = [
                {
                    str(token): {"logprob": logprob, "rank": rank, "decoded_token": text}
                    for token, (logprob, rank, text) in step.items()
                }
                or None
                for step in steps
            ]

    async def _choice(
        self, answer: Answer, result: Result, invoke: int, number: int, logprobs: dict[tuple[int, int], list[Any]]
    ) -> dict[str, Any]:
        choice = result.invokes[invoke].choices[number]
        steps = logprobs.get((invoke, number))
        piece = Piece(
            invoke,
            number,
            0,
            choice.text,
            choice.token_ids,
            steps if steps is None or len(steps) == len(choice.token_ids) else None,
            Values(),
            choice.finish_reason or "stop",
            choice.stop_reason,
            whole=choice.message,
        )
        found = answer.whole(answer.index(invoke, number), piece)
        if self.extension.saves != "none":
            found["tracewire"] = {"saves": await self.values_json(result.trace_id, choice.saves)}
            if choice.token_strings is not None:
                found["tracewire"]["token_strings"] = choice.token_strings
        return found


class CompletionStream(EventSource):
    """The answer to a request with `stream`."""

    def __init__(self, completion: Completion, trace: Trace, answer: Answer) -> None:
        super().__init__(completion.gateway.streams, trace, {TRACE_HEADER: trace.id})
        self._completion = completion
        self._trace = trace
        self._answer = answer
        self._continuity = Continuity(trace.id)
        self._opened: set[int] = set()
        self._extended = completion.body.tracewire is not None
        self._saves = completion.extension.saves != "none"
        options = completion.body.stream_options
        self._counts = options is not None and options.continuous_usage_stats

    def opening(self) -> bytes:
        """See `EventSource.opening`."""
        return encoded(self._first())

    async def rendered(self, item: Item) -> bytes:
        """See `EventSource.rendered`."""
        self._completion.read(item)
        return b"".join(encoded(chunk, event_id=item.id) for chunk in await self._chunks_of(item))

    async def ending(self) -> bytes:
        """See `EventSource.ending`."""
        return b"".join(encoded(chunk) for chunk in await self._end()) + _DONE

    def failed(self, error: TracewireError) -> bytes:
        """See `EventSource.failed`."""
        return encoded(self._failure(self._completion.problem(error))) + _DONE

    def closed(self) -> bytes:
        """See `EventSource.closed`."""
        return encoded(self._failure(self.closing()))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See `EventSource`."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._completion.left(self._trace)

    def _first(self) -> dict[str, Any]:
        """The chunk before all text: the roles, and the trace's id."""
        choices = [self._answer.opening(0) or self._answer.empty(0)]
        self._opened.add(0)
        return self._answer.chunk(choices, tracewire={"trace_id": self._trace.id})

    async def _chunks_of(self, item: Item) -> list[dict[str, Any]]:
        found = []
        for piece in self._continuity.pieces(item, saves=self._saves):
            found += self._opening(self._answer.index(piece.invoke, piece.choice))
            more = {"tracewire": await self._about(piece, item)} if self._extended else {}
            if self._counts:
                more["usage"] = await self._usage_so_far(piece)
            found.append(self._answer.chunk([self._answer.added(piece)], **more))
        if self._extended and not isinstance(item, Output):
            event = event_json(item, self._completion.form, self._trace.id)
            found.append(self._answer.chunk([self._answer.empty()], tracewire={"event": event}))
        return found

    async def _usage_so_far(self, piece: Piece) -> dict[str, Any]:
        """The usage of a piece's choice up to the piece."""
        accepted = await self._trace.accepted()
        return usage_of(Usage(accepted.prompt_tokens[piece.invoke], piece.index + len(piece.token_ids)))

    def _opening(self, index: int) -> list[dict[str, Any]]:
        if index in self._opened:
            return []
        self._opened.add(index)
        opening = self._answer.opening(index)
        return [] if opening is None else [self._answer.chunk([opening])]

    async def _about(self, piece: Piece, item: Item) -> dict[str, Any]:
        """Our part of a chunk: where it stands, and what was saved."""
        about: dict[str, Any] = {"position": item.id, "index": piece.index, "token_ids": piece.token_ids}
        if isinstance(item, Output):
            about["time"] = item.time
            if item.token_strings is not None:
                about["token_strings"] = item.token_strings[len(item.token_strings) - len(piece.token_ids) :]
        if piece.delta:
            about["delta"] = await self._completion.values_json(self._trace.id, piece.delta)
        return about

    async def _end(self) -> list[dict[str, Any]]:
        """The chunks behind a good end."""
        final = await self._trace.final()
        answer = self._answer
        found = []
        for where in self._continuity.unfinished(len(self._completion.body.prompts()), self._completion.body.choices):
            index = answer.index(*where)
            found += [*self._opening(index), answer.chunk([answer.ended(index, "stop")])]
        options = self._completion.body.stream_options
        if self._extended:
            found.append(answer.chunk([answer.empty()], tracewire=await self._final(final)))
        if options is not None and options.include_usage:
            found.append(answer.chunk([], usage=usage_of(final.usage)))
        return found

    async def _final(self, final: Final) -> dict[str, Any]:
        found: dict[str, Any] = {"position": final.id, "status": final.status, "usage": usage_of(final.usage)}
        found |= {"save_errors": final.save_errors, "warnings": final.warnings}
        if self._saves:
            saves = []
            for invoke, choice, deltas in final.deltas:
                values = await self._completion.values_json(self._trace.id, merged([deltas]))
                if invoke == SHARED_INVOKE:
                    found["shared"] = values
                else:
                    saves.append({"choice": self._answer.index(invoke, choice), "delta": values})
            found["saves"] = saves
        return found

    def _failure(self, problem: Problem) -> dict[str, Any]:
        """The event in place of the rest, as the `openai` client raises it."""
        body = problem.openai()
        body["error"]["tracewire"] = {"trace_id": self._trace.id, "position": self._completion.position, **problem.more}
        return body

    def closing(self) -> Problem:
        """What a stream that the gateway cuts ends with."""
        fate = "it runs on" if self._completion.extension.detach else "it is cancelled"
        return Problem(
            503,
            f"the gateway stops; {fate}: GET /traces/{self._trace.id}/events with Last-Event-ID has the rest",
            code="gateway_closing",
        )
