"""Where a block was when its host was ended, from the lines that the host has noted.

The host may be in the hands of the block. So its text chooses a line of the block's own source, and says nothing else.
"""

from __future__ import annotations

import re

import msgspec

from tracewire_bus.wire.messages import Block, Helper

__all__ = ["place_of"]

#: How `faulthandler` begins a list of frames, the innermost first, and writes one of a block's (`CompiledSource`).
_BEGIN = "Stack (most recent call first):"
_FRAME = re.compile(r'  File "<(\w+) \S+>", line (\d{1,9}) in (.*)')

_block = msgspec.msgpack.Decoder(Block)


def place_of(noted: str, encoded: bytes | None) -> tuple[str, int, str, str] | None:
    """The file, line, source and traceback of the innermost frame of a block; `None` if there is none.

    Args:
        noted: what the host has noted (`HostProcess.places`).
        encoded: the block.
    """
    try:
        block = _block.decode(encoded or b"")
    except msgspec.DecodeError:
        return None
    parts: dict[str, Block | Helper] = {helper.name: helper for helper in block.helpers} | {block.name: block}
    for name, number, inside in _FRAME.findall(noted.rpartition(_BEGIN)[2]):
        part, line = parts.get(name), int(number)
        lines = [] if part is None else part.source.splitlines()
        if part is not None and part.first_line <= line < part.first_line + len(lines):
            source = lines[line - part.first_line].strip()
            function = name if inside == "<module>" else inside[:100]
            return part.filename, line, source, f'  File "{part.filename}", line {line}, in {function}\n    {source}\n'
    return None
