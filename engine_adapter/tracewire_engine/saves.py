"""What a block newly saved in a step, found without sending what did not change.

A [`SaveTracker`][tracewire_engine.saves.SaveTracker] keeps a shadow of what a consumer's fold holds by now: the very
objects last sent, a digest of each as it was when sent, and the bytes of the smaller arrays. Two passes use it.
`step` finds changes by length and identity, which costs little and sees new items, new keys, rebound names and
replaced items. `finish` compares contents, which sees values changed in place as well, and brings the fold to exactly
what the block holds in the end.

Identity is only meaningful while the object lives, so the shadow holds what it has sent.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Iterator, Mapping
from operator import is_not
from typing import Any

import torch

from tracewire_bus.messages import Append, Delete, Delta, Manifest, Set
from tracewire_bus.values import (
    MAX_DEPTH,
    Unsavable,
    dict_digest,
    digest,
    encoded_array,
    kind,
    length,
    list_digest,
    path_key,
    payload_digest,
    wire,
)

from .hosting import HostCopy, Late

__all__ = ["SaveTracker"]

#: Items of one list looked at again in one step, besides its new ones; longer lists are gone through in turns.
WINDOW = 256

#: Arrays up to this many bytes are kept as sent, so that the end need not digest them again; beyond, their digest is.
KEPT_BYTES = 64 * 1024

#: How deep a glance for new tensors goes into what is new.
_GLANCE = 4

_Path = tuple[Any, ...]
_DICTS = (dict, OrderedDict, defaultdict)
_FIXED = (int, float, bool, str, bytes, type(None), complex)


class _Leaf:
    """A value without items of its own, as the consumer has it."""

    __slots__ = ("_digest", "_late", "payload", "value")

    def __init__(self, value: Any, digest: bytes, payload: bytes | None, late: Late | None = None) -> None:
        self.value = value
        self._digest = digest
        self.payload = payload
        self._late = late

    @property
    def digest(self) -> bytes:
        """Of the value as it was sent."""
        return self._digest

    def settle(self) -> None:
        """Take over what was still on its way when the value was sent."""
        late, self._late = self._late, None
        if late is not None:
            self._digest = late.digest()
            if late.size <= KEPT_BYTES:
                self.payload = late.payload()


class _Box:
    """A list or dict as the consumer has it: the object, its items, and a shadow of each by key."""

    __slots__ = ("boxes", "cursor", "items", "shadows", "value")

    def __init__(self, value: Any) -> None:
        self.value = value
        self.items: Any = [] if type(value) is list else {}
        self.shadows: Any = [] if type(value) is list else {}
        #: Keys of the items that are boxes themselves.
        self.boxes: dict[Any, _Box] = {}
        self.cursor = 0

    def put(self, key: Any, item: Any, shadow: _Shadow) -> None:
        self.items[key] = item
        self.shadows[key] = shadow
        self._box(key, shadow)

    def append(self, item: Any, shadow: _Shadow) -> None:
        self.items.append(item)
        self.shadows.append(shadow)
        self._box(len(self.items) - 1, shadow)

    def _box(self, key: Any, shadow: _Shadow) -> None:
        if isinstance(shadow, _Box):
            self.boxes[key] = shadow
        else:
            self.boxes.pop(key, None)

    def window(self) -> tuple[int, int]:
        """Which of a list's known items to look at again in this step: all of a short list, a long one in turns."""
        known = len(self.items)
        if known <= WINDOW:
            return 0, known
        start = self.cursor if self.cursor < known else 0
        self.cursor = min(start + WINDOW, known)
        return start, self.cursor


_Shadow = _Leaf | _Box


class SaveTracker:
    """The shadow of one choice's saves."""

    def __init__(self) -> None:
        self._names: dict[str, _Shadow] = {}
        #: Saves that cannot travel, by name, with the reason.
        self.errors: dict[str, str] = {}
        #: Names under which a declared intervention of the same request saves.
        self.taken: frozenset[str] = frozenset()

    # --- one step ---------------------------------------------------------------------------------------------------

    def fresh(self, saves: Mapping[str, Any]) -> Iterator[Any]:
        """Tensors that the next `step` will send, as far as a glance tells: for one host copy of them all."""
        for name, value in saves.items():
            shadow = self._names.get(name)
            if shadow is None or shadow.value is not value:
                yield from _flat(value, 0)
            elif isinstance(shadow, _Box):
                known = shadow.items
                if type(value) is list:
                    items = value[len(known) :]
                else:
                    items = [item for key, item in value.items() if known.get(key, _MISSING) is not item]
                for item in items:
                    yield from _flat(item, 0)

    def step(self, saves: Mapping[str, Any], host: HostCopy | None = None) -> list[Delta]:
        """The deltas from the last call to now. A save that cannot travel goes to `errors` and leaves the fold."""
        host = host or HostCopy()
        deltas: list[Delta] = []
        for name in [name for name in self._names if name not in saves]:
            self._forget(name, deltas)
        for name, value in saves.items():
            if name in self.errors:
                continue
            if name in self.taken:
                self.errors[name] = f"a declared intervention of this trace saves {name!r}"
                continue
            mark = len(deltas)
            try:
                shadow = self._names.get(name)
                if shadow is None or shadow.value is not value:
                    wired, self._names[name] = _adopt(value, (name,), host)
                    deltas.append(Set(path=(name,), value=wired))
                elif isinstance(shadow, _Box):
                    _walk(shadow, (name,), host, deltas)
            except Unsavable as error:
                self._refuse(name, error, deltas, mark)
        return deltas

    def _forget(self, name: str, deltas: list[Delta]) -> None:
        if self._names.pop(name, None) is not None:
            deltas.append(Delete(path=(name,)))

    def _refuse(self, name: str, error: Unsavable, deltas: list[Delta], mark: int) -> None:
        del deltas[mark:]
        self.errors[name] = str(error)
        self._forget(name, deltas)

    # --- the end ----------------------------------------------------------------------------------------------------

    def finish(
        self, saves: Mapping[str, Any], invoke: int, choice: int, host: HostCopy | None = None
    ) -> tuple[list[Delta], list[Manifest]]:
        """The deltas that bring the fold to exactly `saves` as they are now, and a manifest of them."""
        deltas = self.step(saves, host)
        # Contents of now: what was copied for a step is of then.
        now = HostCopy()
        now.prime(tensor for shadow in self._names.values() for tensor in _tensors(shadow))
        manifest: list[Manifest] = []
        for name, value in saves.items():
            if name in self.errors:
                continue
            mark = len(deltas)
            try:
                final = _correct(self._names[name], (name,), now, deltas)
                manifest.append(
                    Manifest(
                        invoke=invoke, choice=choice, name=name, kind=kind(value), length=length(value), digest=final
                    )
                )
            except Unsavable as error:
                self._refuse(name, error, deltas, mark)
        return deltas, manifest


def _flat(value: Any, depth: int) -> Iterator[Any]:
    """The tensors in a value, down to where a glance ends."""
    cls = type(value)
    if cls is torch.Tensor:
        yield value
    elif depth < _GLANCE and (cls is list or cls in _DICTS):
        for item in value if cls is list else value.values():
            yield from _flat(item, depth + 1)


def _adopt(value: Any, path: _Path, host: HostCopy) -> tuple[Any, _Shadow]:
    """A value that is sent whole: as it goes on the wire, and its shadow."""
    cls = type(value)
    if cls is torch.Tensor:
        payload = host.payload(value)
        if isinstance(payload, Late):
            return payload, _Leaf(value, b"", None, payload)
        if payload is not None:
            kept = payload if len(payload) <= KEPT_BYTES else None
            return encoded_array(payload), _Leaf(value, payload_digest(payload), kept)
    elif cls is list or cls in _DICTS:
        if len(path) > MAX_DEPTH:
            raise Unsavable(path[:3], f"containers nest deeper than {MAX_DEPTH} or refer to themselves")
        box = _Box(value)
        if cls is list:
            sent: Any = []
            for index, item in enumerate(value):
                wired, shadow = _adopt(item, (*path, index), host)
                sent.append(wired)
                box.append(item, shadow)
        else:
            sent = {}
            for key, item in value.items():
                plain = path_key(key, path)
                sent[plain], shadow = _adopt(item, (*path, plain), host)
                box.put(key, item, shadow)
        return sent, box
    local = host(value)
    return wire(local, path), _Leaf(value, digest(local), None)


def _walk(box: _Box, path: _Path, host: HostCopy, deltas: list[Delta]) -> None:
    """Find what changed in a container that is the same object as before."""
    value = box.value
    start = stop = 0
    if type(value) is list:
        known = len(box.items)
        if len(value) < known:
            wired, fresh = _adopt(value, path, host)
            assert isinstance(fresh, _Box)
            deltas.append(Set(path=path, value=wired))
            box.items, box.shadows, box.boxes, box.cursor = fresh.items, fresh.shadows, fresh.boxes, 0
            return
        start, stop = box.window()
        for index in _replaced(box.items, value, start, stop):
            _put(box, index, value[index], (*path, index), host, deltas)
        if len(value) > known:
            sent = []
            for index in range(known, len(value)):
                wired, shadow = _adopt(value[index], (*path, index), host)
                sent.append(wired)
                box.append(value[index], shadow)
            deltas.append(Append(path=path, items=sent))
    else:
        for key in [key for key in box.items if key not in value]:
            deltas.append(Delete(path=(*path, path_key(key, path))))
            del box.items[key], box.shadows[key]
            box.boxes.pop(key, None)
        for key, item in value.items():
            if box.items.get(key, _MISSING) is not item:
                _put(box, key, item, (*path, path_key(key, path)), host, deltas)
    if not box.boxes:
        return
    for key, child in list(box.boxes.items()):
        # What was put just now has nothing new; walking it again costs little and finds nothing.
        if len(box.boxes) <= WINDOW or type(value) is not list or start <= key < stop:
            _walk(child, (*path, path_key(key, path)), host, deltas)


def _put(box: _Box, key: Any, item: Any, path: _Path, host: HostCopy, deltas: list[Delta]) -> None:
    wired, shadow = _adopt(item, path, host)
    deltas.append(Set(path=path, value=wired))
    box.put(key, item, shadow)


def _replaced(known: list[Any], value: list[Any], start: int, stop: int) -> list[int]:
    """Indices from `start` to `stop` at which `value` holds another object than `known`."""
    old, new = known[start:stop], value[start:stop]
    if not any(map(is_not, old, new)):
        return []
    return [start + offset for offset, (a, b) in enumerate(zip(old, new, strict=True)) if a is not b]


def _tensors(shadow: _Shadow) -> Iterator[Any]:
    """The tensors among a shadow's values whose contents must be looked at again."""
    if isinstance(shadow, _Leaf):
        if type(shadow.value) is torch.Tensor:
            yield shadow.value
    else:
        for child in shadow.shadows if type(shadow.value) is list else shadow.shadows.values():
            yield from _tensors(child)


def _correct(shadow: _Shadow, path: _Path, now: HostCopy, deltas: list[Delta]) -> bytes:
    """Send what differs in content from what was sent, and return the digest of the value as it is now."""
    if isinstance(shadow, _Leaf):
        if type(shadow.value) in _FIXED:
            return shadow.digest
        shadow.settle()
        payload = now.payload(shadow.value) if type(shadow.value) is torch.Tensor else None
        assert not isinstance(payload, Late)
        if payload is not None and payload == shadow.payload:
            return shadow.digest
        local = None if payload is not None else now(shadow.value)
        found = payload_digest(payload) if payload is not None else digest(local)
        if found != shadow.digest:
            deltas.append(Set(path=path, value=encoded_array(payload) if payload is not None else wire(local, path)))
        return found
    value = shadow.value
    if type(value) is list:
        digests = []
        for index, item in enumerate(value):
            if shadow.items[index] is not item:
                # Replaced in a part of a long list that was not looked at again.
                _put(shadow, index, item, (*path, index), now, deltas)
            digests.append(_correct(shadow.shadows[index], (*path, index), now, deltas))
        return list_digest(digests)
    return dict_digest(
        [(key, _correct(child, (*path, path_key(key, path)), now, deltas)) for key, child in shadow.shadows.items()]
    )


_MISSING: Any = object()
