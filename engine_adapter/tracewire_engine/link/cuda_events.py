"""CUDA events on the current stream, without the microseconds that `Event.record()` takes to find that stream."""

from __future__ import annotations

import torch

__all__ = ["current_stream", "recorded"]

#: The streams that were current before, by device and handle.
_streams: dict[tuple[int, int], torch.cuda.Stream] = {}


def current_stream(device: torch.device | None = None) -> torch.cuda.Stream:
    """The calling thread's current stream of a device, or of the current one."""
    index = torch.cuda.current_device() if device is None or device.index is None else device.index
    handle = torch._C._cuda_getCurrentRawStream(index)
    found = _streams.get((index, handle))
    if found is None:
        found = _streams[index, handle] = torch.cuda.current_stream(index)
    return found


def recorded(free: list[torch.cuda.Event], device: torch.device | None = None) -> torch.cuda.Event:
    """An event behind all that `current_stream` has to do: the last one of `free`, which loses it, or a new one."""
    event = free.pop() if free else torch.cuda.Event()
    event.record(current_stream(device))
    return event
