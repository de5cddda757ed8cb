"""The options of chats: checked, and put beside the messages of each prompt."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tracewire_bus.wire.messages import Chat, Invoke

from .checks import is_sendable_text, shown
from .errors import TraceRejected
from .options import ChatOptions
from .plain_values import plain

__all__ = ["CHAT_NAMES", "set_chats"]

#: The names of the options.
CHAT_NAMES: frozenset[str] = getattr(ChatOptions, "__optional_keys__")  # noqa: B009  (mypy does not know it of a class)

_BOOLEANS = ("parallel_tool_calls", "include_reasoning", "add_generation_prompt", "continue_final_message")


def set_chats(invokes: Iterable[Invoke], options: Mapping[str, Any]) -> None:
    """Give each invoke these options of chats. The invokes are changed in place.

    Raises:
        TraceRejected: an option is malformed, or a prompt has no chat messages; `field` names the option.
    """
    fields = _checked(options)
    for invoke in invokes:
        if invoke.messages is None:
            raise TraceRejected(next(iter(options), "messages"), "expected chat messages with it, got another prompt")
        invoke.chat = Chat(messages=invoke.messages, **fields)
        invoke.messages = None


def _checked(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options as fields of a `Chat`."""
    fields: dict[str, Any] = {}
    for name in _BOOLEANS:
        if name in options:
            if not isinstance(options[name], bool):
                raise TraceRejected(name, f"expected True or False, got {shown(options[name])}")
            fields[name] = options[name]
    continues = fields.get("continue_final_message", False)
    if continues and fields.setdefault("add_generation_prompt", False):
        raise TraceRejected("add_generation_prompt", "expected False where the last message is continued")
    effort = options.get("reasoning_effort")
    if effort is not None:
        if not is_sendable_text(effort):
            raise TraceRejected("reasoning_effort", f"expected text, got {shown(effort)}")
        fields["reasoning_effort"] = effort
    if (kwargs := options.get("chat_template_kwargs")) is not None:
        fields["template_kwargs"] = _mapping("chat_template_kwargs", kwargs)
    for name in ("tools", "documents"):
        if (given := options.get(name)) is not None:
            fields[name] = _mappings(name, given)
    if (choice := options.get("tool_choice")) is not None:
        fields["tool_choice"] = _choice(choice, fields.get("tools", []))
    return fields


def _mapping(field: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise TraceRejected(field, f"expected a dict, got {shown(value)}")
    found = plain(field, value)
    assert isinstance(found, dict)
    return found


def _mappings(field: str, value: Any) -> list[dict[str, Any]]:
    if not isinstance(value, Sequence) or isinstance(value, str | bytes):
        raise TraceRejected(field, f"expected a list of dicts, got {shown(value)}")
    return [_mapping(f"{field}[{index}]", one) for index, one in enumerate(value)]


def _choice(choice: Any, tools: Sequence[Mapping[str, Any]]) -> str | dict[str, Any]:
    if choice == "none":
        return "none"
    if not tools:
        raise TraceRejected("tool_choice", "expected tools with it, got none")
    if choice in ("auto", "required"):
        return str(choice)
    found = _mapping("tool_choice", choice)
    function = found.get("function")
    name = function.get("name") if isinstance(function, dict) else None
    functions = [one["function"] for one in tools if isinstance(one.get("function"), dict)]
    names = [one.get("name") for one in functions]
    if name is None or name not in names:
        known = ", ".join(map(str, names)) or "none"
        raise TraceRejected("tool_choice", f"expected a function of tools, which are {known}, got {shown(name)}")
    return found
