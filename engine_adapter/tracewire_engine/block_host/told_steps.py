"""The events of steps as a host is told of them, and those of a step that is like the one before."""

from __future__ import annotations

from collections.abc import Iterator

from tracewire_engine.protocol.block_host import Began, Ended, Event, Reached, Repeated, Shape, Shared

__all__ = ["ToldSteps"]


class ToldSteps:
    """Remembers the last whole step, of which `Repeated` makes another one."""

    def __init__(self) -> None:
        self._step: list[Began | Reached | Ended] = []
        self._last: list[Began | Reached | Ended] = []

    def events(self, told: list[Event]) -> Iterator[Event]:
        """The events that a host is told, with those of a step in place of each `Repeated`."""
        for event in told:
            if isinstance(event, Repeated):
                self._last = self._again(event.start)
                yield from self._last
                continue
            if isinstance(event, Began):
                self._step = [event]
            elif isinstance(event, Reached):
                self._step.append(event)
            elif isinstance(event, Ended):
                self._step.append(event)
                self._last, self._step = self._step, []
            yield event

    def _again(self, start: int) -> list[Began | Reached | Ended]:
        """The last step with the next tokens, and the rows of its first value from byte `start` on."""
        last = self._last
        shapes = [shape for event in last if isinstance(event, Reached) for shape in event.value.tensors]
        further = start - shapes[0].start if shapes else 0
        return [_next(event, further) for event in last]


def _next(event: Began | Reached | Ended, further: int) -> Began | Reached | Ended:
    if isinstance(event, Reached):
        value = event.value
        tensors = [Shape(dtype, shape, start + further) for dtype, shape, start in value.tensors]
        return Reached(event.location, Shared(value.skeleton, tensors), event.passed, event.by_request)
    if isinstance(event, Began):
        return Began([], [(request, count, index + 1) for request, count, index in event.spans])
    return event
