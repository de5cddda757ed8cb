"""Implements the adapter's `Engine` with vLLM: validates invokes, runs them in `AsyncLLM`, and reads the link."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol
from weakref import WeakValueDictionary

import anyio
import anyio.to_thread
import msgspec
from vllm import SamplingParams
from vllm.exceptions import VLLMValidationError
from vllm.inputs.engine import tokens_input
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.exceptions import EngineDeadError

from tracewire_bus.domain.patch_checks import check_prompt
from tracewire_bus.domain.span_attributes import w3c_context
from tracewire_bus.domain.value_checks import DeclarationError
from tracewire_bus.wire.messages import NO_MEDIA, Declared, Drafts, Invoke, StopWhen, Submission
from tracewire_engine.link.addresses import is_remote
from tracewire_engine.link.blob_receiver import BlobChunk, BlobReceiver
from tracewire_engine.link.step_link import LinkReceiver, encode_changes
from tracewire_engine.protocol.drafting import draft_slots, undrafted
from tracewire_engine.protocol.keys import (
    BLOCK_ARG,
    DECLARED_ARG,
    DRAFTS_ARG,
    EDITS_ARG,
    END_ARG,
    FORCED_ARG,
    LIVE_ARG,
    PERMIT_ARG,
    RESULT_ARG,
    RUN_ARG,
    SCHEDULE_ARG,
    SHARED_ARG,
    TRACE_ARG,
)
from tracewire_engine.protocol.messages import Changes, Report
from tracewire_engine.protocol.schedule import encode_schedule

from .chats import ChatOptions, Chats, RenderedChat
from .engine_api import Carrier, Choice, EngineLost, Outputs, Prepared, Rejection
from .images import rendered, taken
from .pending import REPORT_S
from .prompts import Prompts
from .result_reads import asks_result
from .runner_bounds import RunnerBounds
from .sampling import FIELDS, Constrained, ConstraintChecks, pinned_seed, resolved, sampling_params

__all__ = ["VllmEngine"]

logger = logging.getLogger("tracewire")


class _EngineErrors:
    """A context in which vLLM's error that its engine has died is raised as `EngineLost`."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, EngineDeadError):
            raise EngineLost(str(error)) from error


_engine_errors = _EngineErrors()


class ServedModel(Protocol):
    """The result of `build_engine` in `launch/engine_builder.py`: nnsight's model around an `AsyncLLM`."""

    vllm_entrypoint: Any
    tokenizer: Any
    #: The LoRA adapters that prompts can ask for.
    loras: Sequence[Any]
    #: The locations that are served in CUDA graphs, if there are any.
    taps: Sequence[str]


def _choices(invoke: Invoke) -> int:
    """How many choices vLLM generates for an invoke."""
    n = invoke.sampling.get("n")
    return n if isinstance(n, int) else 1


def _check_positions(interventions: Sequence[Declared], prompt: int) -> None:
    """Refuse interventions at positions that a prompt of `prompt` tokens does not have.

    Raises:
        Rejection: names the field.
    """
    try:
        check_prompt(interventions, prompt)
    except DeclarationError as error:
        raise Rejection(error.field, error.message) from error


class _VllmOutputs:
    def __init__(self, collector: Any) -> None:
        self._collector = collector
        self.cached_tokens = 0
        self.prompt_logprobs: list[dict[int, tuple[float, int | None, str | None]]] = []

    async def get(self) -> tuple[list[Choice], bool]:
        try:
            output = self._collector.get_nowait() or await self._collector.get()
        except EngineDeadError as error:
            raise EngineLost(str(error)) from error
        except (VLLMValidationError, ValueError) as error:
            # From vLLM 0.33 on, EngineCore can refuse a request for reasons that only it can find out.
            named = getattr(error, "parameter", None)
            raise Rejection(f"sampling.{named}" if named else "sampling", str(error)) from error
        self.cached_tokens = max(self.cached_tokens, output.num_cached_tokens or 0)
        if output.prompt_logprobs:
            self.prompt_logprobs = _logprobs(output.prompt_logprobs) or []
        choices = [
            Choice(
                index=completion.index,
                token_ids=list(completion.token_ids),
                text=completion.text,
                logprobs=_logprobs(completion.logprobs),
                finish_reason=completion.finish_reason,
                stop_reason=completion.stop_reason,
            )
            for completion in output.outputs
        ]
        return choices, output.finished

    def size(self) -> int:
        waiting = getattr(self._collector, "output", None)
        if waiting is None or isinstance(waiting, Exception):
            return 0
        nbytes = 0
        for one in waiting.outputs:
            nbytes += _TOKEN_BYTES * len(one.token_ids) + len(one.text)
            if one.logprobs:
                nbytes += _LOGPROB_BYTES * sum(map(len, one.logprobs))
        return nbytes


def _logprobs(entries: Any) -> list[dict[int, tuple[float, int | None, str | None]]] | None:
    if not entries:
        return None
    return [
        {token: (value.logprob, value.rank, value.decoded_token) for token, value in (entry or {}).items()}
        for entry in entries
    ]


#: The memory of a token and of a logprob in this process, in bytes, about.
_TOKEN_BYTES, _LOGPROB_BYTES = 48, 250

#: How many tokens an engine's first request has, and how many it generates.
_TRIAL = 4

#: How long vLLM may take to answer whether it still runs, in seconds.
_ANSWER_S = 5.0

#: How often the adapter checks whether vLLM has handled a request's last outputs, in seconds.
_LOOK_S = 0.001

#: No live parameters, packed.
_NONE_LIVE = msgspec.msgpack.encode({})


#: The size of the pieces in which large variables are sent to remote workers, in bytes. Each goes between two steps.
_PIECE_BYTES = 2 * 1024 * 1024


class _Carrier:
    """Sends large variables by vLLM's own queues to workers that cannot see the adapter's files."""

    def __init__(self, call: Callable[..., Awaitable[Any]]) -> None:
        self._call = call

    async def carry(self, path: Path) -> None:
        async with await anyio.open_file(path, "rb") as file:
            offset = 0
            while (piece := await file.read(_PIECE_BYTES)) or offset == 0:
                await self._call("tracewire_input", path.name, offset, piece)
                offset += len(piece)
                if not piece:
                    break

    async def drop(self, path: Path) -> None:
        try:
            await self._call("tracewire_drop_input", path.name)
        except EngineLost:
            pass


def _live_arguments(submission: Submission, index: int, run: str) -> dict[str, Any]:
    """The arguments of one prompt's requests about live parameters."""
    if submission.live == _NONE_LIVE:
        return {}
    schedule = encode_schedule(submission.schedule, index)
    return {LIVE_ARG: submission.live, RUN_ARG: run} | ({} if schedule is None else {SCHEDULE_ARG: schedule})


def _drafts(config: Any, arguments: dict[str, Any]) -> Drafts | None:
    """Whether the scheduler shall let vLLM draft the tokens of a request; `None` if vLLM drafts none.

    Args:
        config: vLLM's, of the engine.
        arguments: Tracewire's, of the request. The one that allows drafts is added.
    """
    if config.speculative_config is None:
        return None
    why = undrafted(arguments)
    if DECLARED_ARG in arguments and not why:
        arguments[DRAFTS_ARG] = True
    return Drafts(0 if why else config.speculative_config.num_speculative_tokens, why)


class VllmEngine:
    """The `Engine` of an `AsyncLLM`. A call of vLLM may take `patience_s` seconds; then the engine counts as lost.

    Raises:
        TypeError: vLLM has no parser of a name in `chats`, or the parser does not work with the model's tokenizer.
    """

    def __init__(
        self,
        model: ServedModel,
        link: LinkReceiver,
        blobs: BlobReceiver,
        patience_s: float = REPORT_S,
        chats: ChatOptions | None = None,
        prompt_tokens: int = 0,
        adapter: int = 0,
    ) -> None:
        self._patience_s = patience_s
        #: The adapter's number among those of the engine.
        self._adapter = adapter
        self.model = model
        self.llm: Any = model.vllm_entrypoint
        self._link = link
        self._blobs = blobs
        self._tokenizer: Any = model.tokenizer
        self._prompts = Prompts(model.tokenizer, self.llm.model_config, prompt_tokens)
        self._chats = Chats(self.llm, chats or ChatOptions())
        self._constraints = ConstraintChecks(self.llm)
        self._bounds = RunnerBounds(self.llm)
        self._loras = {one.lora_name: one for one in model.loras}
        #: Whether vLLM makes OpenTelemetry spans (`--otlp-traces-endpoint`). Otherwise it warns of contexts.
        self._has_spans = self.llm.vllm_config.observability_config.otlp_traces_endpoint is not None
        #: Makes the permit of an encoded block for the workers.
        self.permit: Callable[[bytes], bytes] = lambda block: b""
        #: The outputs of requests with a block, by request id, while another object refers to them.
        self._traced: WeakValueDictionary[str, _VllmOutputs] = WeakValueDictionary()

    async def prepare(
        self,
        submission: Submission,
        index: int,
        block: bytes | None,
        declared: bytes | None,
        run: str,
        edits: bytes | None = None,
        shared: bytes | None = None,
        tenant: str | None = "",
    ) -> Prepared:
        invoke = submission.invokes[index]
        where = f"invokes[{index}]." if len(submission.invokes) > 1 else ""
        lora = self._lora(invoke, where)
        prompt, token_ids, chat = await self._prompt(invoke, where)
        _check_positions(submission.interventions, len(token_ids))
        params = self._params(invoke, chat, where)
        if params.seed is None and params.temperature > 0 and submission.max_attempts > 1:
            params.seed = pinned_seed(submission.trace, index)
        sampling = resolved(params)
        result = block is not None and asks_result(invoke.block or submission.block)
        blocks = (block, edits) != (None, None)
        tells_end = blocks and (bool(params.stop) or any(isinstance(one, StopWhen) for one in submission.interventions))
        extra = {
            BLOCK_ARG: block,
            RESULT_ARG: result or None,
            PERMIT_ARG: self.permit(block) if block is not None else None,
            DECLARED_ARG: declared,
            EDITS_ARG: edits,
            SHARED_ARG: shared if block is not None else None,
            TRACE_ARG: (run, sum(map(_choices, submission.invokes)), tenant) if blocks else None,
            END_ARG: tells_end or None,
        }
        extra_args: dict[str, Any] = {name: value for name, value in extra.items() if value is not None}
        if extra_args:
            extra_args |= _live_arguments(submission, index, run)
            self._bound_traced(len(token_ids), where)
            # A token served from the prefix cache runs no forward pass, and a block would not see it. Edited
            # activations end up in the KV cache, and must serve no other request.
            params.skip_reading_prefix_cache, prompt["cache_salt"] = True, submission.trace
        # By themselves, given tokens change nothing that another request could see.
        params.extra_args = extra_args | ({FORCED_ARG: invoke.forced_tokens} if invoke.forced_tokens else {}) or None
        # No other object uses these params, so vLLM need not copy them.
        params.output_kind, params.skip_clone = RequestOutputKind.DELTA, True
        return Prepared(
            prompt=prompt,
            prompt_tokens=len(token_ids),
            params=params,
            choices=params.n or 1,
            sampling=sampling,
            asks_result=result,
            tells_end=tells_end,
            token_ids=token_ids,
            token_strings=await self._prompts.strings_of(token_ids) if submission.token_strings else None,
            lora=lora,
            parsers=[*chat.parsers(params.n or 1)] if chat is not None else [],
            reasoning=chat.reasoning if chat is not None else {},
            context=w3c_context(submission.context) if self._has_spans else None,
            drafts=_drafts(self.llm.vllm_config, params.extra_args or {}),
        )

    def _params(self, invoke: Invoke, chat: RenderedChat | None, where: str) -> SamplingParams:
        params = sampling_params(invoke, where) if chat is None else chat.params
        self._bounds.check(params, f"{where}sampling.")
        return params

    def _lora(self, invoke: Invoke, where: str) -> Any:
        """vLLM's request for the LoRA adapter that an invoke names, if it names one.

        Raises:
            Rejection: this engine has no such adapter.
        """
        if invoke.lora is None:
            return None
        lora = self._loras.get(invoke.lora)
        if lora is None:
            have = ", ".join(self._loras) or "none"
            raise Rejection(f"{where}lora", f"this engine has no adapter {invoke.lora!r} (it has {have})")
        return lora

    async def _prompt(self, invoke: Invoke, where: str) -> tuple[Any, list[int], RenderedChat | None]:
        """An invoke's prompt as vLLM takes it, its token ids, and its chat if it has one.

        Raises:
            Rejection: the model does not take it.
        """
        rendered_chat = None
        if (chat := self._prompts.chat_of(invoke, where)) is not None:
            rendered_chat = await self._chats.render(invoke, chat, where)
            token_ids = rendered_chat.token_ids
        else:
            token_ids = await self._prompts.token_ids(invoke, where)
        images = await anyio.to_thread.run_sync(taken, invoke, self.inputs, where) if invoke.media != NO_MEDIA else []
        # The form that vLLM makes of a prompt of tokens, on a thread, if it gets another form.
        prompt: Any = tokens_input(token_ids)
        if images:
            prompt = await rendered(self.llm, token_ids, images, where)
            token_ids = list(prompt["prompt_token_ids"])
        self._prompts.check_length(len(token_ids), f"{where}prompt")
        limit = self.llm.model_config.max_model_len
        if len(token_ids) >= limit:
            raise Rejection(
                f"{where}prompt",
                f"the prompt has {len(token_ids)} tokens; this model takes {limit} of prompt and output together",
            )
        return prompt, token_ids, rendered_chat

    def _bound_traced(self, tokens: int, where: str) -> None:
        config = self.llm.vllm_config
        budget = config.scheduler_config.max_num_batched_tokens - draft_slots(config)
        if tokens > budget:
            raise Rejection(
                f"{where}prompt",
                f"the prompt has {tokens} tokens; with a block or interventions it is computed in one step, "
                f"which takes {budget} on this engine (max_num_batched_tokens)",
            )

    async def start(self, request: str, prepared: Prepared, priority: int) -> Outputs:
        try:
            if isinstance(prepared.params, Constrained):
                await self._constraints.check(prepared.params)
            with _engine_errors:
                collector = await self.llm.add_request(
                    *(request, prepared.prompt, prepared.params),
                    lora_request=prepared.lora,
                    trace_headers=prepared.context,
                    priority=priority,
                    **prepared.reasoning,
                )
        except (VLLMValidationError, ValueError, TypeError) as error:
            named = getattr(error, "parameter", None)
            if named not in FIELDS and prepared.params.structured_outputs is not None:
                # The prompt was checked before, so the error is about the grammar or schema.
                named = "structured_outputs"
            field = f"sampling.{named}" if named in FIELDS else "prompt"
            raise Rejection(field, str(error)) from error
        outputs = _VllmOutputs(collector)
        if not {BLOCK_ARG, EDITS_ARG}.isdisjoint(prepared.params.extra_args or ()):
            self._traced[request] = outputs
        return outputs

    async def try_out(self) -> None:
        """Generate a few tokens, to find out before serving whether vLLM can run the model at all.

        Raises:
            EngineLost: vLLM died.
        """
        limit = self.llm.model_config.max_model_len
        length = max(1, min(_TRIAL, limit - _TRIAL))
        params = SamplingParams(
            max_tokens=min(_TRIAL, limit - length), temperature=0.0, ignore_eos=True, detokenize=False
        )
        with _engine_errors:
            async for _ in self.llm.generate(tokens_input([0] * length), params, "tracewire-trial"):
                pass

    async def untapped_graphs(self) -> list[str]:
        """Descriptions of CUDA graphs without taps, if the engine has taps. No intervention would run in them.

        Raises:
            EngineLost: vLLM has died, or does not answer.
        """
        if not self.model.taps:
            return []
        return [graph for worker in await self._call_workers("tracewire_untapped") for graph in worker]

    async def abort(self, request: str) -> None:
        processor = self.llm.output_processor
        names = list(processor.external_req_ids.get(request, ()))
        if names and request in self._traced:
            with anyio.move_on_after(_ANSWER_S):
                await self._cut(names)
        await self.llm.abort(request)
        # vLLM does not drop the parent request that several choices share.
        for parent in {name.partition("_")[2] for name in names}:
            processor.parent_requests.pop(parent, None)

    async def _cut(self, names: list[str]) -> None:
        """End requests in EngineCore, and wait until vLLM has handled their last outputs.

        vLLM's own abort would drop these outputs, although the scheduler tells the workers that their tokens count.
        """
        states = self.llm.output_processor.request_states
        try:
            tokens = await self.llm.engine_core.call_utility_async("tracewire_end", names)
        except Exception as error:  # vLLM died, or was told to stop
            logger.debug("vLLM did not say at which token requests end: %s", error)
            return
        for name in names:
            # vLLM has dropped the state of a request that ended by itself when its last output has come.
            while (state := states.get(name)) is not None:
                if name in tokens and state.detokenizer.num_output_tokens() >= tokens[name]:
                    break
                await anyio.sleep(_LOOK_S)

    async def steer(self, changes: Changes, over: list[str], since: float) -> None:
        # EngineCore sends this to all workers after the steps that it has sent already, so between two steps.
        await self._call_workers("tracewire_steer", encode_changes(changes, over, since))

    async def give_result(self, result: bytes) -> None:
        await self._call_workers("tracewire_result", result)

    async def pause(self, request: str) -> bool:
        return await self._call_scheduler("tracewire_pause", request)

    async def resume(self, request: str) -> bool:
        return await self._call_scheduler("tracewire_resume", request)

    async def _call_scheduler(self, method: str, request: str) -> bool:
        # vLLM's internal ids of the request's choices that have not ended.
        names = list(self.llm.output_processor.external_req_ids.get(request, ()))
        return bool(names) and bool(await self._call_core(method, names))

    async def pause_all(self) -> None:
        await self._pause_all(True)

    async def takes_requests(self) -> bool:
        # An EngineCore that was told to stop either answers no calls, or raises an error.
        with anyio.move_on_after(_ANSWER_S):
            try:
                await self.llm.engine_core.call_utility_async("tracewire_counts")
            except Exception as error:  # vLLM has no common type for these errors
                logger.warning("vLLM does not answer: %s", error)
            else:
                return True
        return False

    async def resume_all(self) -> None:
        await self._pause_all(False)

    async def _pause_all(self, on: bool) -> None:
        await self._call_core("tracewire_hold", on, self._adapter)

    async def answers(self) -> None:
        try:
            with _engine_errors:
                await self.llm.engine_core.call_utility_async("tracewire_counts")
        except EngineLost:
            raise
        except Exception as error:  # an engine that was told to stop answers with an error
            logger.debug("vLLM answers with an error: %s", error)

    async def _call_core(self, method: str, *arguments: Any) -> Any:
        return await self._answer(method, self.llm.engine_core.call_utility_async(method, *arguments))

    async def _call_workers(self, method: str, *arguments: Any) -> Any:
        return await self._answer(method, self.llm.collective_rpc(method, args=arguments))

    async def _answer(self, method: str, call: Awaitable[Any]) -> Any:
        """Wait for vLLM's answer to a call, for a limited time, since a call does not fail if vLLM dies or hangs.

        Raises:
            EngineLost: vLLM died, or did not answer in time.
        """
        try:
            with _engine_errors, anyio.fail_after(self._patience_s):
                return await call
        except TimeoutError as error:
            raise EngineLost(f"vLLM did not answer {method} within {self._patience_s:g} s") from error

    def decode(self, token_ids: list[int], prepared: Prepared) -> str:
        if not prepared.params.detokenize:
            return ""
        skip = prepared.params.skip_special_tokens
        text: str = self._tokenizer.decode(token_ids, skip_special_tokens=skip)
        return text

    def token_strings(self, token_ids: list[int]) -> list[str]:
        return self._prompts.strings(token_ids)

    def ready(self) -> Iterable[Report]:
        return self._link.ready()

    async def arrived(self) -> None:
        await self._link.arrived()

    def large(self) -> AsyncIterator[BlobChunk | Report]:
        return self._blobs.items()

    @property
    def inputs(self) -> Path:
        return self._link.folder

    @property
    def carrier(self) -> Carrier | None:
        return _Carrier(self._call_workers) if is_remote(self._link.address) else None

    @property
    def lost(self) -> bool:
        return bool(self.llm.errored)

    async def tracked(self) -> int:
        """How many requests the workers hold state for; 0 when idle. A check for leaks."""
        counts: list[int] = await self.llm.collective_rpc("tracewire_request_count")
        return max(counts)

    async def leftovers(self) -> dict[str, int]:
        """Counts of state of requests in the workers, the scheduler and the KV cache; all 0 when idle."""
        counts = await self.llm.engine_core.call_utility_async("tracewire_counts")
        return {
            "tracked": await self.tracked(),
            "requests": counts["requests"],
            "blocks": counts["blocks"] - counts["free_blocks"],
        }
