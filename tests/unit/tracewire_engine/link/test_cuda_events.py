"""Current streams and events of CUDA, without a GPU: which of PyTorch's calls are made, and how often."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tracewire_engine.link import cuda_events
from tracewire_engine.link.cuda_events import current_stream, recorded


class Device:
    """Stands for CUDA: `stream` is the handle of the current stream of each device."""

    def __init__(self) -> None:
        self.stream = {0: 5, 1: 5}
        self.made: list[tuple[int, int]] = []

    def current_stream(self, index: int) -> tuple[int, int]:
        self.made.append((index, self.stream[index]))
        return index, self.stream[index]


class Event:
    def __init__(self) -> None:
        self.behind: list[Any] = []

    def record(self, stream: Any) -> None:
        self.behind.append(stream)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    found = Device()
    monkeypatch.setattr(cuda_events, "_streams", {})
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", found.stream.__getitem__, raising=False)
    monkeypatch.setattr(torch.cuda, "current_stream", found.current_stream)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    return found


def test_a_stream_is_made_once_and_found_again(device: Device) -> None:
    first = torch.device("cuda", 0)
    for _ in range(2):
        assert current_stream(first) == (0, 5)
        assert current_stream(torch.device("cuda")) == current_stream() == (1, 5)
    device.stream[0] = 6
    assert current_stream(first) == (0, 6)
    device.stream[0] = 5
    assert current_stream(first) == (0, 5)
    assert device.made == [(0, 5), (1, 5), (0, 6)]


def test_an_event_is_recorded_on_the_current_stream(device: Device) -> None:
    free: list[Any] = [Event(), Event()]
    last = free[-1]
    assert recorded(free, torch.device("cuda", 0)) is last
    assert last.behind == [(0, 5)]
    assert len(free) == 1
    device.stream[1] = 7
    new: Any = recorded([])
    assert new.behind == [(1, 7)]
