"""How Tracewire's processes log: text, or a JSON object in each line."""

from __future__ import annotations

import logging
from typing import Final, Literal

__all__ = ["LOG_FORMATS", "LogFormat", "configure_logging"]

LogFormat = Literal["text", "json"]
LOG_FORMATS: Final = ("text", "json")
_TEXT: Final = "%(asctime)s %(name)s %(levelname)s %(message)s"


def configure_logging(form: LogFormat = "text") -> None:
    """Log to standard error, from level INFO on. With `"json"`, each line is an object.

    Raises:
        ModuleNotFoundError: `"json"` needs python-json-logger, which is not installed.
    """
    handler = logging.StreamHandler()
    if form == "json":
        # Imported here, because only this form needs the library.
        from .json_logs import JsonFormatter

        handler.setFormatter(JsonFormatter())
    else:
        handler.setFormatter(logging.Formatter(_TEXT))
    logging.basicConfig(level=logging.INFO, handlers=[handler])
