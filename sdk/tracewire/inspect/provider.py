"""The provider of Inspect: every generation is a trace, with the interventions of the model's arguments."""

from __future__ import annotations

from random import uniform
from time import monotonic
from typing import Any

from inspect_ai.model import ChatMessage, GenerateConfig, ModelAPI, ModelCall, ModelOutput, RetryDecision
from inspect_ai.tool import ToolChoice, ToolInfo
from tenacity import RetryCallState
from tenacity.wait import wait_base

from tracewire.errors import BusUnavailable, Overloaded, RetryableError
from tracewire.traces.trace import Trace

from .answers import TokenLogprobs, output_of
from .connections import Connection
from .metadata import declaration, summary
from .model_args import arguments_of, named_refusals
from .requests import chat_options, extra_options, messages_of, sampling_of

__all__ = ["TracewireAPI"]

#: How many generations run at once by default. Those for which an engine has no room wait in the model's queue.
_GENERATIONS = 64
#: By how much an attempt may wait longer than the first.
_LONGEST = 64


class TracewireAPI(ModelAPI):
    """A model that engines serve. The arguments after `config` are in `docs/howto/inspect.md`.

    All generations of an event loop share one client, which connects with the first.

    Raises:
        TraceRejected: an argument is unknown or wrong; `field` names it.
        ConnectError: no URL is given, or the URL names no Redis.
    """

    def __init__(
        self,
        model_name: str,
        base_url: str | None = None,
        api_key: str | None = None,
        config: GenerateConfig | None = None,
        **model_args: Any,
    ) -> None:
        super().__init__(model_name, base_url=base_url, api_key=api_key, config=config or GenerateConfig())
        self._arguments = arguments_of(model_args, base_url)
        self._connection = Connection(self._arguments.url, self._arguments.client)

    async def generate(
        self, input: list[ChatMessage], tools: list[ToolInfo], tool_choice: ToolChoice, config: GenerateConfig
    ) -> tuple[ModelOutput, ModelCall]:
        """One generation, which is one trace. When it is cancelled, so is the trace.

        Raises:
            TracewireError: there is no answer; `should_retry` says whether another attempt may have one.
        """
        begun = monotonic()
        messages = messages_of(input)
        options = self._options(tools, tool_choice, config)
        client = await self._connection.client()
        logprobs = TokenLogprobs() if "logprobs" in options else None
        with named_refusals(self._arguments):
            async with client.trace(self.model_name, messages=messages, **options) as trace:
                if logprobs is not None:
                    await _gather(trace, logprobs)
                result = await trace.result()
        output = output_of(
            self.model_name,
            result,
            max_tokens=options["max_tokens"],
            logprobs=logprobs,
            top=options.get("logprobs", 0),
            seconds=monotonic() - begun,
            where={"url": self._connection.url, "prefix": self._connection.prefix},
        )
        request = {"model": self.model_name, "messages": messages, **_shown(options)}
        response = {"trace_id": result.trace_id, "status": result.status}
        if result.accepted is not None:
            response["engine"] = result.accepted.engine
        return output, ModelCall.create(request, response)

    def _options(self, tools: list[ToolInfo], tool_choice: ToolChoice, config: GenerateConfig) -> dict[str, Any]:
        """The keyword arguments of the trace: those of one generation stand before those of the model."""
        every, once = self._arguments.trace_options(), extra_options(config.extra_body)
        found = {**every, **sampling_of(config), **chat_options(tools, tool_choice), **once}
        found["interventions"] = [*every["interventions"], *once["interventions"]]
        live = {**every.get("live", {}), **once.get("live", {})}
        return {**found, "live": live} if live else found

    def should_retry(self, ex: Exception) -> bool | RetryDecision:
        """Whether another attempt may succeed: after a full queue, a lost engine, or a Redis that was away or full.

        Not where Redis has never answered: the URL is wrong, more likely than not.
        """
        if isinstance(ex, BusUnavailable) and not self._connection.reached:
            return RetryDecision.no()
        if isinstance(ex, Overloaded):
            return RetryDecision.rate_limit(ex.retry_after)
        return RetryDecision.transient(ex.retry_after) if isinstance(ex, RetryableError) else RetryDecision.no()

    def retry_wait(self) -> wait_base:
        """How long to wait before another attempt: what the error says, and twice as long each time."""
        return _AsErrorsSay()

    def max_connections(self) -> int:
        """How many generations run at once by default."""
        return _GENERATIONS

    def connection_key(self) -> str:
        """Models of one bus and one name share the limit on generations."""
        return f"{self._connection.url} {self._connection.prefix} {self.model_name}"

    def collapse_user_messages(self) -> bool:
        """Chat templates often refuse two messages of the user in a row."""
        return True

    async def aclose(self) -> None:
        """Close the client. The next generation makes another one."""
        await self._connection.aclose()


class _AsErrorsSay(wait_base):
    """Waits for `retry_after`, doubled with each attempt, and up to half as long again."""

    def __call__(self, retry_state: RetryCallState) -> float:
        """The seconds to wait."""
        error = retry_state.outcome.exception() if retry_state.outcome is not None else None
        first: float = error.retry_after if isinstance(error, RetryableError) else 1.0
        attempt: int = retry_state.attempt_number
        return first * min(2.0 ** (attempt - 1), _LONGEST) * uniform(1.0, 1.5)


async def _gather(trace: Trace, logprobs: TokenLogprobs) -> None:
    async for item in trace:
        logprobs.add(item)


def _shown(options: dict[str, Any]) -> dict[str, Any]:
    """The options of a trace for Inspect's log, with arrays by dtype and shape."""
    found = {name: summary(value) for name, value in options.items() if name not in ("block", "interventions")}
    found["interventions"] = [declaration(one) for one in options["interventions"]]
    return found if options["block"] is None else {**found, "block": repr(options["block"])}
