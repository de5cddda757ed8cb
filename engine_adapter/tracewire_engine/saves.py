"""What a block newly saved in a step, found without sending what did not change.

A [`SaveTracker`][tracewire_engine.saves.SaveTracker] keeps a shadow of what a consumer's fold holds by now: the very
objects last sent, and a digest of each as it was when sent. Two passes use it. `step` finds changes by length and
identity, which costs little and sees new items, new keys, rebound names and replaced items. `finish` compares
digests, which sees values changed in place as well, and brings the fold to exactly what the block holds in the end.

Identity is only meaningful while the object lives, so the shadow holds what it has sent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from operator import is_not
from typing import Any

from tracewire_bus.messages import Append, Delete, Delta, Manifest, PathKey, Set
from tracewire_bus.values import Unsavable, digest, kind, length, path_key, wire

__all__ = ["SaveTracker"]

#: Items of one list looked at again in one step, besides its new ones; longer lists are gone through in turns.
WINDOW = 256

Localise = Callable[[Any], Any]


class _Shadow:
    """A list or dict as the consumer has it: the object, its items by key, their digests, and its nested containers."""

    __slots__ = ("cursor", "digests", "items", "nested", "value")

    def __init__(self, value: list[Any] | dict[Any, Any]) -> None:
        self.value = value
        self.items: Any = [] if isinstance(value, list) else {}
        self.digests: Any = [] if isinstance(value, list) else {}
        self.nested: dict[Any, _Shadow] = {}
        self.cursor = 0


def _is_container(value: Any) -> bool:
    return isinstance(value, (list, dict))


class SaveTracker:
    """The shadow of one choice's saves.

    `localise` maps a value to one whose arrays are in host memory; the runner copies a whole step's arrays at once and
    passes a lookup into that copy.
    """

    def __init__(self) -> None:
        self._root: dict[str, Any] = {}
        self._shadows: dict[str, _Shadow] = {}
        self._digests: dict[str, bytes] = {}
        #: Saves that cannot travel, by name, with the reason.
        self.errors: dict[str, str] = {}

    # --- one step ---------------------------------------------------------------------------------------------------

    def step(self, saves: Mapping[str, Any], localise: Localise = lambda value: value) -> list[Delta]:
        """The deltas from the last call to now. A save that cannot travel goes to `errors` and leaves the fold."""
        deltas: list[Delta] = []
        for name in [name for name in self._root if name not in saves]:
            self._forget(name, deltas)
        for name, value in saves.items():
            if name in self.errors:
                continue
            mark = len(deltas)
            try:
                self._step_name(name, value, localise, deltas)
            except Unsavable as error:
                del deltas[mark:]
                self.errors[name] = str(error)
                self._forget(name, deltas)
        return deltas

    def _forget(self, name: str, deltas: list[Delta]) -> None:
        if self._root.pop(name, _MISSING) is not _MISSING:
            deltas.append(Delete(path=(name,)))
        self._shadows.pop(name, None)
        self._digests.pop(name, None)

    def _step_name(self, name: str, value: Any, localise: Localise, deltas: list[Delta]) -> None:
        known = self._root.get(name, _MISSING)
        if known is value:
            if name in self._shadows:
                self._walk(self._shadows[name], (name,), localise, deltas)
            return
        local = localise(value)
        deltas.append(Set(path=(name,), value=wire(local, (name,))))
        self._shadows.pop(name, None)
        if _is_container(value):
            self._shadows[name] = self._shadow(value, local)
        else:
            self._digests[name] = digest(local)
        self._root[name] = value

    def _walk(self, shadow: _Shadow, path: tuple[PathKey, ...], localise: Localise, deltas: list[Delta]) -> None:
        value = shadow.value
        start = stop = 0
        if isinstance(value, list):
            known = len(shadow.items)
            if len(value) < known:
                self._replace(shadow, path, localise, deltas)
                return
            start, stop = self._window(shadow, known)
            for index in _replaced(shadow.items, value, start, stop):
                self._put(shadow, index, value[index], (*path, index), localise, deltas)
            fresh = value[known:]
            if fresh:
                local = [localise(item) for item in fresh]
                deltas.append(Append(path=path, items=[wire(item, (*path, known + n)) for n, item in enumerate(local)]))
                for item, host in zip(fresh, local, strict=True):
                    shadow.items.append(item)
                    shadow.digests.append(self._remember(shadow, len(shadow.items) - 1, item, host))
        else:
            for key in [key for key in shadow.items if key not in value]:
                deltas.append(Delete(path=(*path, path_key(key, path))))
                del shadow.items[key]
                shadow.digests.pop(key, None)
                shadow.nested.pop(key, None)
            for key, item in value.items():
                if shadow.items.get(key, _MISSING) is not item:
                    self._put(shadow, key, item, (*path, path_key(key, path)), localise, deltas)
        for key, child in list(shadow.nested.items()):
            # What was put just now has nothing new; walking it again costs little and finds nothing.
            if len(shadow.nested) <= WINDOW or isinstance(value, dict) or start <= key < stop:
                self._walk(child, (*path, path_key(key, path)), localise, deltas)

    @staticmethod
    def _window(shadow: _Shadow, known: int) -> tuple[int, int]:
        """Which of a list's `known` items to look at again in this step: all of a short list, a long one in turns."""
        if known <= WINDOW:
            return 0, known
        start = shadow.cursor if shadow.cursor < known else 0
        shadow.cursor = min(start + WINDOW, known)
        return start, shadow.cursor

    def _put(
        self, shadow: _Shadow, key: Any, item: Any, path: tuple[PathKey, ...], localise: Localise, deltas: list[Delta]
    ) -> None:
        local = localise(item)
        deltas.append(Set(path=path, value=wire(local, path)))
        shadow.items[key] = item
        shadow.digests[key] = self._remember(shadow, key, item, local)

    def _replace(self, shadow: _Shadow, path: tuple[PathKey, ...], localise: Localise, deltas: list[Delta]) -> None:
        local = localise(shadow.value)
        deltas.append(Set(path=path, value=wire(local, path)))
        fresh = self._shadow(shadow.value, local)
        shadow.items, shadow.digests, shadow.nested, shadow.cursor = fresh.items, fresh.digests, fresh.nested, 0

    def _remember(self, shadow: _Shadow, key: Any, item: Any, local: Any) -> bytes | None:
        shadow.nested.pop(key, None)
        if _is_container(item):
            shadow.nested[key] = self._shadow(item, local)
            return None
        return digest(local)

    def _shadow(self, value: list[Any] | dict[Any, Any], local: Any) -> _Shadow:
        """A shadow of a container that was just sent whole. `local` is its copy in host memory."""
        shadow = _Shadow(value)
        if isinstance(value, list):
            for index, item in enumerate(value):
                shadow.items.append(item)
                shadow.digests.append(self._remember(shadow, index, item, local[index]))
        else:
            for key, item in value.items():
                shadow.items[key] = item
                shadow.digests[key] = self._remember(shadow, key, item, local[key])
        return shadow

    # --- the end ----------------------------------------------------------------------------------------------------

    def finish(
        self, saves: Mapping[str, Any], invoke: int, choice: int, localise: Localise = lambda value: value
    ) -> tuple[list[Delta], list[Manifest]]:
        """The deltas that bring the fold to exactly `saves` as they are now, and a manifest of them."""
        deltas = self.step(saves, localise)
        manifest: list[Manifest] = []
        for name, value in saves.items():
            if name in self.errors:
                continue
            mark = len(deltas)
            try:
                local = localise(value)
                if name in self._shadows:
                    self._correct(self._shadows[name], local, (name,), deltas)
                elif digest(local) != self._digests[name]:
                    deltas.append(Set(path=(name,), value=wire(local, (name,))))
                manifest.append(
                    Manifest(
                        invoke=invoke,
                        choice=choice,
                        name=name,
                        kind=kind(local),
                        length=length(local),
                        digest=digest(local),
                    )
                )
            except Unsavable as error:
                del deltas[mark:]
                self.errors[name] = str(error)
                self._forget(name, deltas)
        return deltas, manifest

    def _correct(self, shadow: _Shadow, local: Any, path: tuple[PathKey, ...], deltas: list[Delta]) -> None:
        """Send what differs by digest: values changed in place, or replaced in a part of a long list not looked at."""
        keys: Iterable[Any] = range(len(local)) if isinstance(local, list) else list(local)
        for key in keys:
            child = shadow.nested.get(key)
            if child is not None and shadow.items[key] is shadow.value[key]:
                self._correct(child, local[key], (*path, path_key(key, path)), deltas)
            elif child is not None or digest(local[key]) != shadow.digests[key]:
                place = (*path, path_key(key, path))
                deltas.append(Set(path=place, value=wire(local[key], place)))


def _replaced(known: list[Any], value: list[Any], start: int, stop: int) -> list[int]:
    """Indices from `start` to `stop` at which `value` holds another object than `known`."""
    old, new = known[start:stop], value[start:stop]
    if not any(map(is_not, old, new)):
        return []
    return [start + offset for offset, (a, b) in enumerate(zip(old, new, strict=True)) if a is not b]


_MISSING: Any = object()
