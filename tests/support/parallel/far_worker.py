"""A worker's ends of the link, in a process of its own: `python -m tests.support.parallel.far_worker ADDRESS PATIENCE`.

Sends a report and a chunk at once, and another report for each line on its standard input.
"""

from __future__ import annotations

import sys
import time

import msgspec
import torch

from tracewire_engine.link.liveness import HeartbeatSender
from tracewire_engine.link.step_link import LinkSender
from tracewire_engine.protocol.messages import Report, StepRecord
from tracewire_engine.worker.blob_sender import BlobSender
from tracewire_engine.worker.large_arrays import LargeArray, LargeArrayBudget


def main(address: str, patience_s: float) -> None:
    link, blobs = LinkSender(address), BlobSender(address)
    HeartbeatSender(address, "the far worker", patience_s)
    record = StepRecord("large", 0, 0, msgspec.Raw(msgspec.msgpack.encode([])))
    blobs.step(record, [], [LargeArray(torch.arange(1000.0), "x", LargeArrayBudget(16))])
    link.send(Report(time=0.0))
    print("sent", flush=True)
    for number, _ in enumerate(sys.stdin):
        link.send(Report(time=1.0 + number))
    time.sleep(600)


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]))
