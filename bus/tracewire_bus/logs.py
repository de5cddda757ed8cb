"""How Tracewire's processes log: text, or a JSON object in each line."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final, Literal

__all__ = ["LOG_FORMATS", "LogFormat", "configure_logging", "kept_logging"]

LogFormat = Literal["text", "json"]
LOG_FORMATS: Final = ("text", "json")
_TEXT: Final = "%(asctime)s %(name)s %(levelname)s %(message)s"
#: What a message shows of characters that would move a terminal's cursor or reorder its text. A message may repeat what
#: clients have written.
_SHOWN: Final = {
    code: f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}"
    for code in (*range(9), *range(11, 32), *range(127, 160), *range(0x2028, 0x202F), *range(0x2066, 0x206A))
}


class _Formatter(logging.Formatter):
    """Formats lines that no message can forge: a further line of a message begins with spaces."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        record.message = record.message.translate(_SHOWN).replace("\n", "\n    ")
        return super().formatMessage(record)


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
        handler.setFormatter(_Formatter(_TEXT))
    logging.basicConfig(level=logging.INFO, handlers=[handler])


@contextmanager
def kept_logging() -> Iterator[None]:
    """Undo what the body does to the root logger: its level, its handlers and their levels.

    It is for imports of packages that reconfigure the root logger.
    """
    root = logging.getLogger()
    level, handlers = root.level, [(one, one.level) for one in root.handlers]
    try:
        yield
    finally:
        root.setLevel(level)
        root.handlers[:] = [one for one, _ in handlers]
        for handler, before in handlers:
            handler.setLevel(before)
