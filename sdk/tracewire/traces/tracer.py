"""Traces whose block is written inline, as the body of a `with`. The client captures the body and never runs it.

    with model.trace("The Eiffel Tower is in", max_tokens=5) as tracer:
        logits = model.logits.save()
    async for output in tracer:
        ...
    tracer.saves["logits"]

Entering the `with` finds its body in the source. A trace function then raises at the body's first line, which is
Python's only way to skip a body. The client needs neither nnsight, torch nor the model. The body travels as any block
does: as source, with the values that it uses. The client looks up the names as the `with` is left, in the frame around
it. Names that the body binds exist on the engine only; `tracer.saves` has the saved values.

Without a prompt, the body is a *trace scope*: the client runs it, to find each `with tracer.invoke(prompt):` in it. The
bodies of these are the blocks. A value that the scope itself binds and saves (`rows = [].save()`) is shared: the engine
has one object for all invokes, and each of them can read and change it by that name.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable, Mapping, Sequence
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self, Unpack

import anyio

from tracewire.checks import Duration
from tracewire.errors import AlreadyEntered, BlockOnly, NotEnded
from tracewire.options import SamplingOptions, check_names
from tracewire.submission import checked_trace_id, make_submission, split_options
from tracewire_bus.wire.messages import Submission

from .background import QueuedSubmission
from .state import Saves
from .trace import Trace
from .with_blocks import Invoker, TraceScope, WithBody, capture_body

if TYPE_CHECKING:
    from tracewire.submission import PromptInput

    from .session import Session
    from .state import Result

__all__ = ["Tracer"]


#: Attributes that a tracer has in a block only.
_IN_BLOCKS = frozenset({"iter", "all", "stop", "cache", "live", "next"})


class Tracer(Trace):
    """A trace that is written as a `with` statement, and its outputs as they come.

    `Model.trace` makes it. Leaving the `with` queues the submission. The client submits in the background, in the order
    in which the statements were left, and a closing client waits for queued submissions. When a submission is refused,
    `accepted()`, `result()` and the first item raise the error. After the `with`, the tracer is used as any `Trace`.
    Leaving the `with` neither waits for the trace's end nor cancels it. `cancel()` and `aclose()` cancel it, and so
    does the end of its client unless the trace was submitted with `detach=True`.

    Inside a block, `tracer` is nnsight's, with `iter`, `all()`, `stop()`, `cache()`, `result`, and `live` for the
    trace's live parameters. Outside a block, these attributes raise `BlockOnly`.
    """

    if TYPE_CHECKING:
        iter: Any
        live: Any

        def all(self) -> Any: ...
        def cache(self, **options: Any) -> Any: ...
        def stop(self) -> None: ...

    def __init__(
        self,
        session: Session,
        model: str,
        prompt: PromptInput | None,
        prompts: Sequence[PromptInput] | None,
        options: dict[str, Any],
    ) -> None:
        #: Whether the caller chose the trace's id, and so can follow the trace without this handle.
        self._has_given_id = options.get("trace_id") is not None
        options["trace_id"] = checked_trace_id(options.get("trace_id"))
        super().__init__(session, Submission(trace=options["trace_id"], model=model, invokes=[]))
        self._prompt, self._prompts, self._options = prompt, prompts, options
        self._body: WithBody | None = None
        #: While the `with` is open: the caller's handle, if that is another object than this one.
        self._stand_in: object | None = None
        self._scope: TraceScope | None = None
        self._queued: QueuedSubmission | None = None

    def __getattr__(self, name: str) -> Any:
        if name == "barrier":
            raise BlockOnly(
                "tracer.barrier is not served, nor is it by nnsight's own engine: each invoke is a request of its own, "
                "and the engine decides when it runs (invokes share lists, dicts and arrays that the scope saves)"
            )
        if name in _IN_BLOCKS:
            raise BlockOnly(
                f"tracer.{name} belongs in a block: below `with model.trace(prompt) as tracer:`, or below "
                "`with tracer.invoke(prompt):`"
            )
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    # --- the with -----------------------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        self._enter(sys._getframe(1))
        return self

    def _enter(self, frame: FrameType, handle: object | None = None) -> None:
        """Enter the `with` of this frame, in which `handle` stands for this tracer, or the tracer for itself."""
        if self._body is not None or self._queued is not None:
            raise AlreadyEntered(f"trace {self.id} was entered before: make another one for each with")
        body = WithBody(frame, "model.trace(...)")
        context = body.source.node.items[-1]
        if context.optional_vars is None and isinstance(context.context_expr, ast.Call) and not self._has_given_id:
            body.disarm()
            raise body.source.error(
                "nothing could read what this trace saves: write `with model.trace(...) as tracer:`, and iterate over "
                "tracer or await tracer.result() below it (or pass a trace_id, by which it can be followed)"
            )
        self._body, self._stand_in = body, handle

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        if not self._leave(kind, error):
            return False
        self._queue()
        return True

    def _leave(self, kind: type[BaseException] | None, error: BaseException | None) -> bool:
        """Capture the body. Returns whether it was skipped, and is to be queued."""
        body, self._body = self._body, None
        assert body is not None
        if not body.was_skipped(kind):
            return False
        try:
            self._submission = self._captured(body)
        except BaseException as problem:
            # The caller's traceback shows the capture's error alone, and not the one that ended the `with` body.
            if problem.__context__ is error:
                problem.__context__ = None
            raise
        finally:
            self._scope = self._stand_in = None
        return True

    def _queue(self) -> None:
        """Have the submission queued. On the client's event loop."""
        self._queued = self._session.queue(self.id, super().start)

    @property
    def _known_as(self) -> object:
        """The object that stands for this tracer in its `with`."""
        return self if self._stand_in is None else self._stand_in

    def _captured(self, body: WithBody) -> Submission:
        """The submission of a captured body."""
        prompts: Sequence[PromptInput] | None = self._prompts
        options, block = dict(self._options), None
        shared = dict(options.pop("shared", None) or {})
        if self._prompt is None and prompts is None:
            self._scope = TraceScope(self, body, shared)
            prompts = self._scope.run()
            shared = self._scope.shared
        elif not body.source.is_empty:
            block = capture_body(body.source, body.scope, self, {}, shared)
        chosen, sampling = split_options({**options, "shared": shared}, prompts)
        return make_submission(self._session.name, self.model, self._prompt, block, chosen, sampling)

    def invoke(self, prompt: PromptInput | None = None, /, **sampling: Unpack[SamplingOptions]) -> Invoker:
        """A prompt with a block of its own, in the body of a `with model.trace(...)` that has none.

            with model.trace(max_tokens=8) as tracer:
                rows = [].save()
                for text in ("one", "two"):
                    with tracer.invoke(text, temperature=0.0):
                        rows.append(model.logits[-1].argmax().item())

        `sampling` are sampling params, over those of the trace.
        """
        if self._scope is None:
            given = "" if self._prompt is None and self._prompts is None else ": it was given a prompt"
            raise BlockOnly(f"tracer.invoke() belongs into the body of `with model.trace(...)`{given}")
        check_names(sampling, SamplingOptions)
        return Invoker(self, self._scope, prompt, {**sampling})

    # --- submission ---------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Wait until the submission that leaving the `with` has queued is durable. After a refusal, submit again.

        Raises the errors of `Trace.start`.
        """
        if self._queued is not None and self._queued.take_error() is not None:
            await super().start()
        else:
            await self._submitted()

    async def _submitted(self) -> None:
        if self._queued is None:
            raise BlockOnly(f"trace {self.id} has no block yet: write it below `with model.trace(...) as tracer:`")
        await self._queued.wait()

    async def steer(
        self,
        values: Mapping[str, Any] | None = None,
        /,
        *,
        if_version: int | None = None,
        by: str | None = None,
        **more: Any,
    ) -> int:
        """Change the trace's live parameters: see `Client.steer`."""
        await self._submitted()
        return await super().steer(values, if_version=if_version, by=by, **more)

    async def cancel(self, reason: str = "", *, by: str | None = None) -> bool:
        """Cancel the trace: see `Client.cancel`."""
        await self._submitted()
        return await super().cancel(reason, by=by)

    async def pause(
        self,
        *,
        by: str | None = None,
        timeout: Duration | None = None,
        on_timeout: Literal["resume", "cancel"] = "resume",
    ) -> bool:
        """Pause the trace: see `Client.pause`."""
        await self._submitted()
        return await super().pause(by=by, timeout=timeout, on_timeout=on_timeout)

    async def resume(self, *, by: str | None = None, paused_by: str | None = None) -> bool:
        """Resume the trace: see `Client.resume`."""
        await self._submitted()
        return await super().resume(by=by, paused_by=paused_by)

    async def _read_until(self, done: Callable[[], bool]) -> None:
        await self._submitted()
        await super()._read_until(done)

    async def aclose(self) -> None:
        """Stop reading, and cancel the trace if its end was not read and it is not detached.

        Idempotent, and finishes even when cancelled.
        """
        if self._queued is not None and not self._queued.ended.is_set():
            if self._submission.detach:
                # A caller that stops waiting leaves the submission to the client, which still submits it.
                await self._queued.ended.wait()
            else:
                await self._queued.withdraw()
        with anyio.CancelScope(shield=True):
            await super().aclose()

    # --- saves --------------------------------------------------------------------------------------------------------

    @property
    def saves(self) -> dict[str, Any]:
        """The saves and the shared values by name, once an iteration or `result()` has read the trace's end.

        A name that was saved by one invoke (and choice) alone is that value; by several, a list of them in their order.

        A name without a save raises a `SaveMissing`, with the reason if it is known.

        Raises:
            NotEnded: the end was not read.
            StateMismatch: the saves differ from those that the engine collected.
        """
        if not self._fold.finished:
            raise NotEnded(
                f"the saves of trace {self.id} are read at its end: iterate over it or await its result() first"
            )
        return merged(self._ending().verified())


def merged(result: Result) -> dict[str, Any]:
    """The saves of all invokes and choices by name, as nnsight hands them back, and those of the trace."""
    found: dict[str, list[Any]] = {}
    for invoke in result.invokes:
        for choice in invoke.choices:
            for name, value in choice.saves.items():
                found.setdefault(name, []).append(value)
    one = {name: values[0] if len(values) == 1 else values for name, values in found.items()}
    saves = Saves({**one, **result.shared}, result.trace_id, ended=True)
    saves._reasons = {where.split(".", 2)[-1]: reason for where, reason in result.save_errors.items()}
    return saves
