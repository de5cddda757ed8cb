"""Numbers that two processes share."""

from __future__ import annotations

import os

from tracewire_engine.link.turn_counts import TurnCounts


def test_what_one_process_writes_the_other_reads() -> None:
    written = TurnCounts.create()
    read = TurnCounts(os.dup(written.descriptor))
    assert read[3] == 0
    written[3], written[TurnCounts.places + 4] = 1 << 40, 7
    assert (read[3], read[4]) == (1 << 40, 7)
    written.close()
    written.close()
    assert read[3] == 1 << 40
    read.close()
