"""Chat messages as vLLM renders them to prompts, and the messages that vLLM's parsers find in outputs.

All of it is vLLM's own code, that of its HTTP server: a chat of a trace and one of vLLM's server get the same prompt,
the same constraint on the output, and the same tool calls.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
import uuid
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import anyio
import anyio.to_thread
import msgspec
from vllm import SamplingParams
from vllm.exceptions import VLLMValidationError

from tracewire_bus.wire.messages import Chat, ChatMessage, Invoke, MessageDelta, ToolCall, ToolCallDelta

from .engine_api import Rejection
from .sampling import sampling_params

__all__ = ["ChatOptions", "Chats", "MessageParser", "RenderedChat", "template_text"]


@dataclasses.dataclass(frozen=True)
class ChatOptions:
    """How chats are rendered and parsed. The names and meanings are those of the options of vLLM's server.

    `chat_template` is a template's text.
    """

    chat_template: str | None = None
    chat_template_content_format: str = "auto"
    default_chat_template_kwargs: Mapping[str, Any] | None = None
    enable_auto_tool_choice: bool = False
    exclude_tools_when_tool_choice_none: bool = False
    tool_call_parser: str | None = None
    reasoning_parser: str = ""

    @property
    def parses(self) -> bool:
        """Whether a parser is named."""
        return bool(self.tool_call_parser or self.reasoning_parser)


def template_text(given: str | None) -> str | None:
    """The text of a chat template that is given as a file or as its text.

    Raises:
        ValueError: it is neither.
    """
    try:
        from vllm.renderers.chat_utils import load_chat_template
    except ImportError:
        # vLLM 0.25 has it here.
        from vllm.entrypoints.chat_utils import load_chat_template
    try:
        text: str | None = load_chat_template(given)
    except (VLLMValidationError, OSError) as error:
        raise ValueError(str(error.args[0] if error.args else error)) from error
    return text


#: The params that vLLM's parsers change on a request, beside its constraint.
_ADJUSTED = ("skip_special_tokens", "spaces_between_special_tokens")


class RenderedChat:
    """A rendered chat: its prompt, and what vLLM does with its output.

    Attributes:
        prompt: the prompt as vLLM takes it, with its `prompt_token_ids`.
        params: the sampling params, as vLLM's parsers have changed them.
        reasoning: arguments of `AsyncLLM.add_request` about reasoning; none without a parser.
    """

    def __init__(self, prompt: Any, params: SamplingParams) -> None:
        self.prompt = prompt
        self.params = params
        self.reasoning: dict[str, Any] = {}
        self._parse: Callable[[], MessageParser] | None = None

    @property
    def token_ids(self) -> list[int]:
        """The prompt's token ids."""
        return list(self.prompt["prompt_token_ids"])

    def parsers(self, choices: int) -> list[MessageParser]:
        """A parser of each choice's output; none for messages that no `Chat` came with."""
        return [] if self._parse is None else [self._parse() for _ in range(choices)]

    def parse_with(self, request: Any, made: Callable[[], Any], template_kwargs: dict[str, Any], auto: bool) -> None:
        """Have outputs parsed.

        Args:
            request: vLLM's request, as its parsers have changed it.
            made: makes a parser of vLLM; returns `None` if the engine has none.
            template_kwargs: the variables of the chat template.
            auto: whether tool calls that were not forced are parsed.
        """
        token_ids = self.token_ids
        self._parse = lambda: MessageParser(request, made, auto, token_ids)
        if (parser := made()) is None:
            return
        self.reasoning["reasoning_ended"] = _reasoning_ended(request, parser, token_ids)
        if parser.reasoning_parser is not None:
            self.reasoning["reasoning_parser_kwargs"] = {"chat_template_kwargs": template_kwargs}


def _adjusted(request: Any, params: SamplingParams) -> dict[str, Any]:
    """The sampling params that vLLM's parsers have changed on the request that was made with `params`."""
    found = {name: getattr(request, name) for name in _ADJUSTED}
    found = {name: value for name, value in found.items() if value != getattr(params, name)}
    constraint = request.structured_outputs
    if constraint is not None and constraint != params.structured_outputs:
        fields = [one for one in dataclasses.fields(constraint) if one.init]
        found["structured_outputs"] = {
            one.name: value for one in fields if (value := getattr(constraint, one.name)) != one.default
        }
    return found


def _reasoning_ended(request: Any, parser: Any, token_ids: list[int]) -> bool | None:
    """Whether the output begins behind the reasoning, so that a constraint holds from its first token on."""
    if hasattr(request, "resolve_reasoning_ended"):
        ended: bool | None = request.resolve_reasoning_ended(parser, token_ids)
        return ended
    # vLLM 0.25 has this in its server.
    if not request.include_reasoning or request._grammar_from_tool_parser:
        return True
    return bool(parser.is_reasoning_end(token_ids)) if parser.reasoning_parser is not None else None


class Chats:
    """Renders chats for an `AsyncLLM`.

    Raises:
        TypeError: vLLM has no parser of a name in `options`, or the parser does not work with the model's tokenizer.
    """

    def __init__(self, llm: Any, options: ChatOptions) -> None:
        self._llm = llm
        self.options = options
        # One thread at a time: tools and messages are checked, which takes long for long ones.
        self._checking = anyio.CapacityLimiter(1)
        self._renderer: Any = None
        if options.parses:
            self._renderer = self._made()

    def _made(self) -> Any:
        from vllm.renderers.online_renderer import OnlineRenderer

        options = self.options
        known = inspect.signature(OnlineRenderer).parameters
        given = {
            "model_config": self._llm.model_config,
            "renderer": self._llm.renderer,
            "request_logger": None,
            "chat_template": options.chat_template,
            "chat_template_content_format": options.chat_template_content_format,
            "enable_auto_tools": options.enable_auto_tool_choice,
            "exclude_tools_when_tool_choice_none": options.exclude_tools_when_tool_choice_none,
            "tool_parser": options.tool_call_parser,
            "reasoning_parser": options.reasoning_parser or None,
            "default_chat_template_kwargs": dict(options.default_chat_template_kwargs or {}),
        }
        return OnlineRenderer(**{name: value for name, value in given.items() if name in known})

    def _parser(self, request: Any, template_kwargs: dict[str, Any]) -> Any:
        """vLLM's parser of one output of a request; `None` if this engine has none."""
        kind = self._renderer.parser
        if kind is None:
            return None
        return kind(
            self._llm.renderer.tokenizer,
            request.tools,
            chat_template_kwargs=template_kwargs,
            model_config=self._llm.model_config,
        )

    async def render(self, invoke: Invoke, chat: Chat, where: str) -> RenderedChat:
        """Render a chat to a prompt.

        Args:
            invoke: the invoke, with its sampling params.
            chat: its messages. Outputs are parsed if they are the invoke's `chat`.
            where: is put before the names of fields in errors.

        Raises:
            Rejection: the chat cannot be rendered, or asks for what this engine lacks; names the field at fault.
        """
        params = sampling_params(invoke, where)
        request = await anyio.to_thread.run_sync(self._checked, chat, params, where, limiter=self._checking)
        renderer, options = self._renderer, self.options
        try:
            answer = await renderer.render_chat(request)
        except VLLMValidationError as error:
            raise _of_vllm(error, where) from error
        except Exception as error:  # whatever a template raises, it is about the messages
            raise self._refused(error, where) from error
        if not isinstance(answer, tuple):
            raise Rejection(f"{where}{_field(answer.error.param)}", answer.error.message)
        if changes := _adjusted(request, params):
            params = sampling_params(msgspec.structs.replace(invoke, sampling=invoke.sampling | changes), where)
        rendered = RenderedChat(answer[1][0], params)
        if invoke.chat is not None:
            filled = request.build_chat_params(options.chat_template, options.chat_template_content_format)
            kwargs = filled.with_defaults(renderer.default_chat_template_kwargs).chat_template_kwargs
            made = partial(self._parser, request, kwargs)
            rendered.parse_with(request, made, kwargs, options.enable_auto_tool_choice)
        return rendered

    def _checked(self, chat: Chat, params: SamplingParams, where: str) -> Any:
        """vLLM's own request for a chat."""
        from pydantic import ValidationError
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

        if self._renderer is None:
            self._renderer = self._made()
        _check_tools(chat.tools, where)
        self._check_choice(chat, where)
        fields = {
            # Rendering may change messages in place.
            "messages": copy.deepcopy(chat.messages),
            "tools": chat.tools or None,
            "tool_choice": chat.tool_choice,
            "parallel_tool_calls": chat.parallel_tool_calls,
            "chat_template_kwargs": dict(chat.template_kwargs) or None,
            "reasoning_effort": chat.reasoning_effort,
            "include_reasoning": chat.include_reasoning,
            "add_generation_prompt": chat.add_generation_prompt,
            "continue_final_message": chat.continue_final_message,
            "documents": chat.documents or None,
            "structured_outputs": params.structured_outputs,
            **{name: getattr(params, name) for name in _ADJUSTED},
        }
        # A field that is not given is another one than a field of None.
        given = {name: value for name, value in fields.items() if value is not None}
        try:
            return ChatCompletionRequest(**given)
        except VLLMValidationError as error:
            raise _of_vllm(error, where) from error
        except ValidationError as error:
            first = error.errors()[0]
            cause = (first.get("ctx") or {}).get("error")
            if isinstance(cause, VLLMValidationError):
                raise _of_vllm(cause, where) from error
            raise Rejection(f"{where}{_path(first['loc'])}", first["msg"]) from error

    def _check_choice(self, chat: Chat, where: str) -> None:
        choice, field = chat.tool_choice, f"{where}tool_choice"
        if choice is None and not chat.tools:
            return
        if isinstance(choice, str) and choice not in ("none", "auto", "required"):
            raise Rejection(field, f"expected none, auto, required or a function, got {choice!r}")
        if choice == "none":
            return
        if not chat.tools:
            raise Rejection(field, "expected tools with it, got none")
        names = [tool["function"]["name"] for tool in chat.tools]
        if isinstance(choice, dict):
            function = choice.get("function")
            name = function.get("name") if isinstance(function, dict) else None
            if name not in names:
                raise Rejection(field, f"expected a function of tools, which are {', '.join(names)}, got {name!r}")
        if self._renderer.parser is None or self._renderer.parser.tool_parser_cls is None:
            raise Rejection(
                "tools" if choice is None else field,
                "this engine parses no tool calls: start it with --enable-auto-tool-choice and --tool-call-parser NAME",
            )

    def _refused(self, error: Exception, where: str) -> Rejection:
        tokenizer = self._llm.renderer.tokenizer
        if self.options.chat_template is None and getattr(tokenizer, "chat_template", "") is None:
            why = f"this model has no chat template: start the engine with --chat-template FILE ({error})"
            return Rejection(f"{where}messages", why)
        return Rejection(f"{where}messages", f"the model's chat template refused the messages: {error}")


def _check_tools(tools: Sequence[Mapping[str, Any]], where: str) -> None:
    """Check the form of tools and the schemas of their parameters.

    Raises:
        Rejection: naming the field.
    """
    from jsonschema import SchemaError
    from jsonschema.validators import Draft202012Validator, validator_for

    for index, tool in enumerate(tools):
        field = f"{where}tools[{index}]"
        function = tool.get("function")
        if tool.get("type", "function") != "function" or not isinstance(function, dict):
            raise Rejection(field, 'expected {"type": "function", "function": {"name": ..., "parameters": ...}}')
        if not isinstance(function.get("name"), str) or not function["name"]:
            raise Rejection(f"{field}.function.name", "expected the name of a function")
        schema = function.get("parameters")
        if schema is None:
            continue
        if not isinstance(schema, dict):
            raise Rejection(f"{field}.function.parameters", "expected a JSON schema")
        try:
            validator_for(schema, Draft202012Validator).check_schema(schema)
        except SchemaError as error:
            at = "".join(f".{one}" if isinstance(one, str) else f"[{one}]" for one in error.path)
            raise Rejection(f"{field}.function.parameters{at}", f"expected a JSON schema: {error.message}") from error


def _of_vllm(error: VLLMValidationError, where: str) -> Rejection:
    return Rejection(f"{where}{_field(error.parameter)}", str(error.args[0] if error.args else error))


def _field(parameter: str | None) -> str:
    if parameter in ("structured_outputs", "response_format"):
        return "sampling.structured_outputs"
    return parameter or "messages"


def _path(places: Sequence[int | str]) -> str:
    """A field's path, without pydantic's names for the members of unions."""
    first, *rest = places or ("messages",)
    shown = [f"[{one}]" if isinstance(one, int) else f".{one}" for one in rest]
    return "".join([_field(str(first)), *shown[:1]])


class MessageParser:
    """Parses the output of one choice, delta by delta and as a whole.

    Args:
        request: vLLM's request, as vLLM's parsers have changed it.
        made: makes a parser of vLLM; returns `None` if the engine has none.
        enable_auto_tools: whether the engine parses tool calls that were not forced.
        prompt_token_ids: the prompt's token ids.
    """

    def __init__(self, request: Any, made: Any, enable_auto_tools: bool, prompt_token_ids: list[int]) -> None:
        self._request = request
        self._made = made
        self._auto = enable_auto_tools
        self._prompt = prompt_token_ids
        self._parser = made()
        #: The numbers of tool calls here, by vLLM's, which may leave some out.
        self._numbers: dict[int, int] = {}
        self._calls: list[ToolCall] = []

    def delta(self, text: str, token_ids: list[int], finished: bool) -> MessageDelta | None:
        """What an output adds to the message; `None` if it adds nothing yet.

        Raises:
            Rejection: vLLM's parser failed.
        """
        if self._parser is None:
            return MessageDelta(content=text) if text else None
        try:
            found = self._parser.parse_delta(text, token_ids, self._request, self._prompt, finished=finished)
        except Exception as error:
            raise _failed(error) from error
        if found is None:
            return None
        calls = [call for one in found.tool_calls or () if (call := self._call(one)) is not None]
        reasoning = (found.reasoning or "") if self._request.include_reasoning else ""
        delta = MessageDelta(content=found.content or "", reasoning=reasoning, tool_calls=calls)
        return delta if delta != MessageDelta() else None

    def _call(self, call: Any) -> ToolCallDelta | None:
        if self._request.parallel_tool_calls is False and call.index > 0:
            return None
        number = self._numbers.setdefault(call.index, len(self._numbers))
        function = call.function
        name, arguments = (None, "") if function is None else (function.name, function.arguments or "")
        id_ = call.id
        if number == len(self._calls):
            id_ = call.id or _new_id()
            self._calls.append(ToolCall(id=id_, name=name or ""))
        return ToolCallDelta(index=number, id=id_, name=name, arguments=arguments)

    def whole(self, text: str, token_ids: list[int]) -> ChatMessage:
        """The whole message of an output, parsed at once.

        Raises:
            Rejection: vLLM's parser failed.
        """
        parser = self._made()
        if parser is None:
            return ChatMessage(content=text)
        try:
            if hasattr(parser, "set_prompt_token_ids"):
                parser.set_prompt_token_ids(self._prompt)
            reasoning, content, calls = parser.parse(
                text, self._request, enable_auto_tools=self._auto, model_output_token_ids=token_ids
            )
        except Exception as error:
            raise _failed(error) from error
        return ChatMessage(
            content=content or None if calls else content or "",
            reasoning=reasoning if self._request.include_reasoning else None,
            tool_calls=self._identified(calls or []),
        )

    def _identified(self, calls: Sequence[Any]) -> list[ToolCall]:
        """Tool calls with the ids that their deltas had."""
        if self._request.parallel_tool_calls is False:
            calls = calls[:1]
        found = []
        for number, call in enumerate(calls):
            sent = self._calls[number] if number < len(self._calls) else None
            known = sent.id if sent is not None and sent.name == call.name else ""
            found.append(ToolCall(id=known or call.id or _new_id(), name=call.name, arguments=call.arguments))
        return found


def _new_id() -> str:
    return f"chatcmpl-tool-{uuid.uuid4().hex}"


def _failed(error: Exception) -> Rejection:
    return Rejection("messages", f"vLLM's parser failed on the output: {error!r}", type="OutputParserError")
