"""`tracewire run`: run a prompt with interventions, and show the text with the saves beside it."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import anyio

from tracewire.client import connect
from tracewire.errors import TraceRejected
from tracewire.traces.failures import TraceFailed
from tracewire.traces.output import Final
from tracewire.traces.trace import Trace

from .commands import add_command
from .outage import outages_told
from .presenters import Presenter, presenter
from .printing import print_json_line, remark
from .requests import add_request, prompt_of, request_of

__all__ = ["add_run", "shown_trace", "succeeded"]

#: After how many seconds in the queue the user is told of it.
_QUEUED_S = 3.0
_ENDS = {0: "the trace finished", 1: "an error, or the trace failed, was refused or was cancelled"}


def add_run(commands: Any, parents: Sequence[argparse.ArgumentParser]) -> None:
    """Add the subcommand."""
    run = add_command(
        commands,
        "run",
        _run,
        parents=parents,
        help="run a prompt with interventions, and show the text with the saved values beside it",
        exits=_ENDS,
        examples=(
            "tracewire run demo 'def parse(text):' --max-tokens 64",
            "tracewire run demo 'This' --steer 'residual(4)@direction.npy*8' --probe 'norm=residual(4),reduce=norm'",
            "tracewire run demo 'import os' --block probes.py::watch --set layer=3 --json",
            "tracewire run MODEL 'What is 2 + 3?' --chat --tools tools.json --template enable_thinking=false",
        ),
        json="each event as a JSON object on a line; the first has the trace's id",
    )
    add_request(run)
    run.add_argument("prompt", metavar="PROMPT", help="the prompt; - reads it from standard input")
    what = "send the prompt as a user's message, which the model's chat template renders"
    run.add_argument("--chat", action="store_true", help=what)
    what = "submit the trace, print its id, and leave it running (tracewire watch ID follows it)"
    run.add_argument("--detach", action="store_true", help=what)


async def _run(options: argparse.Namespace) -> int:
    request = request_of(options, chats=options.chat)
    text = prompt_of(options.prompt)
    given: dict[str, Any] = {"prompt": text}
    if options.chat:
        given = {"messages": [*request.conversation.messages, {"role": "user", "content": text}]}
    async with connect(options.url, prefix=options.prefix) as client:
        model = await client.models.get(options.model)
        with request.refusals():
            arguments = request.arguments(model.info.max_model_len)
            trace = client.trace(model, **given, detach=options.detach, **arguments)
            await trace.start()
        if options.detach:
            if options.json:
                print_json_line({"type": "submitted", "trace_id": trace.id, "model": options.model})
            else:
                print(trace.id)
            return 0
        if options.json:
            print_json_line({"type": "submitted", "trace_id": trace.id, "model": options.model})
        elif request.live:
            first = next(iter(request.live))
            remark(f"tracewire: steer it with: tracewire steer {trace.id} {first}=VALUE")
        async with outages_told(client):
            with presenter(trace.id, as_json=options.json, saves=request.saves) as shown:
                final = await shown_trace(trace, shown)
        if request.saves and not options.json:
            remark(f"tracewire: keep its saves with: tracewire export {trace.id} --to FILE")
        if succeeded(final):
            # Raises an error if a save differs from what the engine collected.
            await trace.result()
    return 0 if succeeded(final) else 1


async def shown_trace(trace: Trace, shown: Presenter) -> Final:
    """Show a trace that this client has submitted, up to its end, which is returned. Leaving early cancels it."""
    async with trace:
        try:
            with anyio.move_on_after(_QUEUED_S) as waited:
                await trace.accepted()
            if waited.cancelled_caught:
                remark(f"tracewire: trace {trace.id} waits in the queue; tracewire top shows the engines")
            shown.feed(await trace.accepted())
            async for item in trace:
                shown.feed(item)
        except (TraceFailed, TraceRejected):
            pass
        final = await trace.final()
        shown.feed(final)
        return final


def succeeded(final: Final) -> bool:
    """Whether a trace ended well."""
    return final.status in ("finished", "stopped")
