"""The line at which a block was when its host was ended, as the host has noted it or a block has forged it."""

from __future__ import annotations

import msgspec
import pytest

from tracewire_bus.wire.messages import Block, Helper
from tracewire_engine.worker.block_host.places import place_of

HELPER = Helper(name="helps", source="def helps():\n    return sum(range(10**12))\n", filename="mine.py", first_line=3)
BLOCK = Block(name="mine", source="x = 1\n  helps()\n", filename="mine.py", first_line=11, helpers=[HELPER])
BEGIN = "Stack (most recent call first):\n"
OF_TORCH, OF_HELPER, OF_BLOCK = (
    f'  File "{file}", line {line}\n'
    for file, line in (("/torch.py", "11 in ones"), ("<helps 7.helps>", "4 in helps"), ("<mine 7>", "12 in <module>"))
)
FRAMES = OF_TORCH + OF_HELPER + OF_BLOCK


def test_the_innermost_frame_of_the_block_s_source_counts() -> None:
    encoded = msgspec.msgpack.encode(BLOCK)
    traced = '  File "mine.py", line 4, in helps\n    return sum(range(10**12))\n'
    assert place_of(BEGIN + FRAMES, encoded) == ("mine.py", 4, "return sum(range(10**12))", traced)
    # The last list is that of the step in which it was ended.
    later = BEGIN + FRAMES + BEGIN + '  File "<mine 7>", line 11 in <module>\n'
    traced = '  File "mine.py", line 11, in mine\n    x = 1\n'
    assert place_of(later, encoded) == ("mine.py", 11, "x = 1", traced)


@pytest.mark.parametrize(
    "noted",
    [
        "",
        BEGIN,
        BEGIN + '  File "/lib/torch.py", line 11 in ones\n',
        BEGIN + '  File "<other 7>", line 11 in <module>\n',
        BEGIN + '  File "<mine 7>", line 10 in <module>\n',
        BEGIN + '  File "<mine 7>", line 13 in <module>\n',
        BEGIN + '  File "<mine 7>", line 99999999999999 in <module>\n',
        "\ufffd\x00" * 1000,
    ],
)
def test_what_names_no_line_of_the_block_is_no_place(noted: str) -> None:
    assert place_of(noted, msgspec.msgpack.encode(BLOCK)) is None


@pytest.mark.parametrize("encoded", [None, b"", b"\xc1"])
def test_without_a_block_there_is_no_place(encoded: bytes | None) -> None:
    assert place_of(BEGIN + FRAMES, encoded) is None
