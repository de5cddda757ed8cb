"""The model's configuration and tokenizer, described so that another process can make its own."""

from __future__ import annotations

import json
from typing import Any

from .shared_rows import SharedValueError

__all__ = ["described", "made"]

_CONFIG, _TOKENIZER = "config", "tokenizer"

#: What a tokenizer is made of besides its tokens.
_SETTINGS = (
    *("model_max_length", "padding_side", "truncation_side", "clean_up_tokenization_spaces", "chat_template"),
    *("model_input_names", "extra_special_tokens"),
)


def described(value: Any) -> list[str]:
    """A description of a configuration or a tokenizer.

    Raises:
        TypeError: the value is neither, or a tokenizer without the `tokenizers` library.
    """
    from transformers import PreTrainedConfig, PreTrainedTokenizerFast

    if isinstance(value, PreTrainedConfig):
        return [_CONFIG, json.dumps(_fields_of(value))]
    if isinstance(value, PreTrainedTokenizerFast):
        settings = {name: getattr(value, name, None) for name in _SETTINGS}
        settings |= {name: str(token) for name, token in value.special_tokens_map.items() if isinstance(token, str)}
        known = {name: setting for name, setting in settings.items() if setting is not None}
        return [_TOKENIZER, json.dumps(known, default=str), value.backend_tokenizer.to_str()]
    raise TypeError(f"{type(value).__name__} cannot be given to a block in a process of its own (--blocks host)")


def made(given: list[Any]) -> Any:
    """The object of a description.

    Raises:
        SharedValueError: it is no description.
    """
    match given:
        case [kind, str(text)] if kind == _CONFIG:
            return _configuration(json.loads(text))
        case [kind, str(settings), str(tokens)] if kind == _TOKENIZER:
            from tokenizers import Tokenizer
            from transformers import PreTrainedTokenizerFast

            return PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(tokens), **json.loads(settings))
    raise SharedValueError("an object of the model's of an unknown kind")


def _fields_of(config: Any) -> dict[str, Any]:
    parts = {name: _fields_of(part) for name in config.sub_configs if (part := getattr(config, name, None)) is not None}
    fields = json.loads(config.to_json_string(use_diff=False))
    own = {name: field for name, field in fields.items() if name not in parts}
    return {"name": type(config).__name__, "aliases": config.attribute_map, "fields": own, "parts": parts}


def _configuration(given: dict[str, Any]) -> Any:
    """A configuration with these fields. Its class is made here: importing that of a model takes seconds."""
    from transformers import PreTrainedConfig

    fields = given["fields"]
    scope = {"attribute_map": given["aliases"], "model_type": fields.pop("model_type", "")}
    config = type(given["name"], (PreTrainedConfig,), scope)(**fields)
    parts = {name: _configuration(part) for name, part in given["parts"].items()}
    # A configuration without the class of its model drops some fields.
    for name, value in (parts | {name: one for name, one in fields.items() if not hasattr(config, name)}).items():
        setattr(config, name, value)
    return config
