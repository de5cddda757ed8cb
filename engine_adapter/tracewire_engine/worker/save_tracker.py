"""Finds the new saves of a block in each step, so that the worker sends no unchanged value again.

A `SaveTracker` keeps a shadow of the current contents of a consumer's fold: the very objects last sent, a digest of
each as it was when sent, and the bytes of the smaller arrays. Two passes use the shadow.
`step` finds changes by length and identity, which costs little and sees new items, new keys, rebound names and
replaced items. `ending` compares contents, which sees values changed in place as well, and brings the fold to exactly
the values that the block holds in the end.

Identity is only meaningful while the object lives, so the shadow holds what it has sent.

A request can end at an earlier token than the last that its block was in a step for: a stop string is found when the
next step runs, and with async scheduling an end of sequence too. A tracker therefore logs how to undo each step, and
`rewind` brings the block's own lists and dicts back to a token. Undoing an append takes a number. Undoing a
replacement takes the old value, which is kept for the last `REPLACED` steps only.

Arrays above a threshold are frozen instead of encoded (`large_arrays.py`). A tracker that has any is `large`: its
deltas are for the thread that sends blobs to encode, and its end is in two parts, of which that thread does the
comparing.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from functools import partial
from operator import is_not
from typing import Any, TypeGuard

import torch

from tracewire_bus.wire.arrays import encoded_array
from tracewire_bus.wire.digests import dict_digest, digest, list_digest
from tracewire_bus.wire.kinds import MAX_DEPTH, Unsavable, kind, length, path_key
from tracewire_bus.wire.messages import Append, Delete, Delta, Manifest, Set
from tracewire_bus.wire.packing import encode_key, wire
from tracewire_engine.worker.blocks.save_marks import NoName
from tracewire_engine.worker.blocks.time_limit import BlockTimeout, Budget, turn

from .host_copy import HostArray, HostCopy, elements
from .large_arrays import Frozen, LargeArray, LargeArrayBudget, LargeTuple, SaveSnapshot

__all__ = ["Ending", "SaveTracker"]

#: How many known items of one list are checked again in one step. Longer lists are checked in turns.
WINDOW = 256

#: About how many bytes of what was sent are compared at once with what is there, at the end.
_COMPARED = 1 << 20


#: How many items one list or dict may gain in one step. A block's loop that asks the model for nothing makes millions
#: before the time limit ends it, and all other requests would wait for them.
MOST_ITEMS = 2**18

#: How many items all lists, dicts and sets of one choice may gain together in one step.
MOST_ITEMS_TOGETHER = 2**20

#: The limit for all texts and bytes that one choice saves in one step, in bytes: they are part of its output's event.
MOST_TEXT = 64 * 1024 * 1024

#: How many levels of new containers `collect_new` searches for tensors.
_GLANCE = 4

#: For how many steps the tracker keeps values that a later step has replaced or deleted.
REPLACED = 16

_Path = tuple[Any, ...]
_DICTS = (dict, OrderedDict, defaultdict)
_CONTAINERS = frozenset((list, set, *_DICTS))
_FIXED = (int, float, bool, str, bytes, type(None), complex)


class _Leaf:
    """A value without items of its own, as the consumer has it."""

    __slots__ = ("digest", "value")

    def __init__(self, value: Any, digest: bytes | Frozen | HostArray) -> None:
        self.value = value
        #: The digest of the sent value; or the sent value, if it is large or on its way to the host.
        self.digest = digest


class _SetLeaf(_Leaf):
    """A set, the number of items that the consumer has, and a copy after the last step of a set that is not large."""

    __slots__ = ("held", "size")

    def __init__(self, value: set[Any], digest: bytes) -> None:
        super().__init__(value, digest)
        self.size = len(value)
        self.held: set[Any] | None = set(value) if len(value) <= WINDOW else None


class _Box:
    """A list or dict as the consumer has it: the object, its items, and a shadow of each by key."""

    __slots__ = ("boxes", "cursor", "items", "shadows", "value")

    def __init__(self, value: Any) -> None:
        self.value = value
        self.items: Any = [] if type(value) is list else {}
        self.shadows: Any = [] if type(value) is list else {}
        #: The items that may change and stay the same object, by key: boxes themselves, and sets.
        self.boxes: dict[Any, _Box | _SetLeaf] = {}
        self.cursor = 0

    def put(self, key: Any, item: Any, shadow: _Shadow) -> None:
        self.items[key] = item
        self.shadows[key] = shadow
        self._box(key, shadow)

    def append(self, item: Any, shadow: _Shadow) -> None:
        self.items.append(item)
        self.shadows.append(shadow)
        self._box(len(self.items) - 1, shadow)

    def drop(self, key: Any) -> None:
        """Forget a key of a dict."""
        del self.items[key], self.shadows[key]
        self.boxes.pop(key, None)

    def cut(self, length: int) -> None:
        """Cut a list back to an earlier length: the shadow and the block's own list."""
        for key in range(length, len(self.items)):
            self.boxes.pop(key, None)
        del self.items[length:], self.shadows[length:], self.value[length:]

    def _box(self, key: Any, shadow: _Shadow) -> None:
        if isinstance(shadow, (_Box, _SetLeaf)):
            self.boxes[key] = shadow
        else:
            self.boxes.pop(key, None)

    def window(self) -> tuple[int, int]:
        """The known items of a list to check in this step (start, stop): all of a short list, a long one in turns."""
        known = len(self.items)
        if known <= WINDOW:
            return 0, known
        start = self.cursor if self.cursor < known else 0
        self.cursor = min(start + WINDOW, known)
        return start, self.cursor

    def unchanged(self) -> bool:
        """Whether the known items to check in this step are the same objects. If not, they are checked again."""
        before = self.cursor
        if _replaced(self.items, self.value, *self.window()):
            self.cursor = before
            return False
        return True


_Shadow = _Leaf | _Box


class _Undo:
    """The undo log of a tracker's steps, by the index of the token that each step sampled.

    The log has no reference cycle, so that the saves are freed together with their request.
    """

    def __init__(self) -> None:
        self.index = -1
        #: Lists that were appended to, with their lengths before.
        self._appended: list[tuple[int, _Box, int]] = []
        #: Undo functions of all other changes in the last steps, with the number of appends before each.
        self._replaced: deque[tuple[int, int, Callable[[], object]]] = deque()
        #: The last step that cannot be undone completely.
        self._gone = -1

    def begin(self, index: int) -> None:
        """Begin the step that samples token `index`."""
        self.index = index

    def appended(self, box: _Box, length: int) -> None:
        """Note that the step appends to a list that had `length` items."""
        self._appended.append((self.index, box, length))

    def replaced(self, undo: Callable[[], object]) -> None:
        """Note a change other than an append, and the function that undoes the change."""
        replaced = self._replaced
        while replaced and replaced[0][0] < self.index - REPLACED:
            self._gone = replaced.popleft()[0]
        replaced.append((self.index, len(self._appended), undo))

    def back_to(self, tokens: int) -> bool:
        """Undo the steps that sampled tokens of index `tokens` and later, the last change first.

        Returns whether the log had all changes of these steps.
        """
        appended, replaced = self._appended, self._replaced
        while True:
            if replaced and replaced[-1][0] >= tokens and replaced[-1][1] >= len(appended):
                replaced.pop()[2]()
            elif appended and appended[-1][0] >= tokens:
                _, box, length = appended.pop()
                box.cut(length)
            else:
                return self._gone < tokens


class SaveTracker:
    """The shadow of one choice's saves. `budget` decides which arrays are large; without it, none is."""

    def __init__(self, budget: LargeArrayBudget | None = None) -> None:
        self._budget = budget or LargeArrayBudget(0)
        #: Large arrays that the last `step` froze. The worker sends them before the step's deltas.
        self.taken: list[LargeArray] = []
        #: Whether any step has frozen a large array.
        self.large = False
        #: Whether arrays were sent before they were on the host: their digests are not taken yet.
        self.late = False
        self._names: dict[str, _Shadow] = {}
        #: Whether the arrays that were saved are known to be as they were when they were saved.
        self.keeps = False
        #: Saves that cannot travel, by name, with the reason.
        self.errors: dict[str, str] = {}
        #: Names under which a declared intervention of the same request saves.
        self.reserved: frozenset[str] = frozenset()
        #: Saves bound to something that is no name, and reported in `errors`.
        self._nameless: set[str] = set()
        #: The first save that could not be read, with the exception. The block fails with it.
        self.broken: tuple[str, Exception] | None = None
        self._undo = _Undo()
        #: A context for reading values whose classes the block may have defined: the read counts in the block's time.
        self.guard: Callable[[], AbstractContextManager[None]] = partial(turn, Budget(), building=True)

    # --- one step ---------------------------------------------------------------------------------------------------

    def collect_new(self, saves: Mapping[str, Any], found: list[Any]) -> None:
        """Add tensors that the next `step` will send to `found`, for one host copy of all. The search is shallow."""
        for name, value in saves.items():
            if name in self.errors:
                continue
            shadow = self._names.get(name)
            if shadow is None or shadow.value is not value:
                _flat(value, 0, found)
            elif isinstance(shadow, _Box):
                known = shadow.items
                if type(value) is list:
                    for item in value[len(known) :]:
                        if type(item) is torch.Tensor:
                            found.append(item)
                        else:
                            _flat(item, 0, found)
                else:
                    with self.guard():
                        for key, item in value.items():
                            if known.get(key, _MISSING) is not item:
                                _flat(item, 0, found)

    def step(
        self,
        saves: Mapping[str, Any],
        host: HostCopy | None = None,
        *,
        whole: bool = False,
        still: bool = False,
        index: int = 0,
    ) -> list[Delta]:
        """The deltas from the last call to now. A save that cannot travel goes to `errors` and leaves the fold.

        `host` has the host copies of the step's tensors, if there are any. With `whole`, the tracker checks every item
        of a long list, and not a window. `still` says that the block has ended. `index` is that of the step's token.
        """
        self._undo.begin(index)
        if host is not None and not whole:
            appended = self._appended(saves, host)
            if appended is not None:
                self.taken = []
                self.late = self.late or host.under_way is not None
                return appended
        copies = SaveSnapshot(host or HostCopy(self._budget.threshold), self._budget, still=still)
        with self.guard():
            deltas = self._changes(saves, copies, whole)
        self.taken = copies.taken
        self.large = self.large or bool(copies.taken)
        self.late = self.late or (host is not None and host.under_way is not None)
        return deltas

    def _changes(self, saves: Mapping[str, Any], copies: SaveSnapshot, whole: bool) -> list[Delta]:
        """The deltas of any step, found by a walk through all saves."""
        deltas: list[Delta] = []
        if self._names.keys() - saves.keys():
            for name in [name for name in self._names if name not in saves]:
                self._forget(name, deltas)
        for name, value in saves.items():
            if name in self.errors or name in self._nameless:
                continue
            if name in self.reserved:
                self.errors[name] = f"a declared intervention of this trace saves {name!r}"
                continue
            mark = len(deltas)
            try:
                shadow = self._names.get(name)
                if shadow is None and not _is_name(name, value):
                    self._nameless.add(name)
                    self.errors[_printable(name)] = "a save is bound to a name: text that can be encoded as UTF-8"
                    continue
                if shadow is None or shadow.value is not value:
                    wired, fresh = _adopt(value, (name,), copies)
                    self._undo.replaced(partial(_restore, self._names, name, shadow))
                    self._names[name] = fresh
                    deltas.append(Set(path=(name,), value=wired))
                elif isinstance(shadow, (_Box, _SetLeaf)):
                    _walk(shadow, (name,), copies, deltas, whole, self._undo)
            except Unsavable as error:
                self._refuse(name, error, deltas, mark)
            except Exception as error:  # such as from a class that the block defines
                self._break(name, error, deltas, mark)
                if isinstance(error, BlockTimeout):
                    # The block has used up its time. Saves that were not checked stay as last sent.
                    break
        return deltas

    def _appended(self, saves: Mapping[str, Any], host: HostCopy) -> list[Delta] | None:
        """The deltas of a common step, in which known lists gain small tensors and nothing else changes.

        Returns `None` for any other step.
        """
        names = self._names
        if self.errors or names.keys() != saves.keys():
            return None
        grown: list[tuple[str, _Box, list[Any], list[HostArray]]] = []
        for name, value in saves.items():
            box = names[name]
            if type(box) is not _Box or box.value is not value or type(value) is not list or box.boxes:
                return None
            known = len(box.items)
            if len(value) < known or not box.unchanged():
                return None
            if len(value) > known:
                items = value[known:]
                arrays = [held for item in items if (held := host.array(item)) is not None]
                if len(arrays) < len(items):
                    return None
                grown.append((name, box, items, arrays))
        deltas: list[Delta] = []
        for name, box, items, arrays in grown:
            self._undo.appended(box, len(box.items))
            box.items.extend(items)
            box.shadows.extend(map(_Leaf, items, arrays))
            deltas.append(Append(path=(name,), items=arrays))
        return deltas

    def _forget(self, name: str, deltas: list[Delta]) -> None:
        shadow = self._names.pop(name, None)
        if shadow is not None:
            self._undo.replaced(partial(_restore, self._names, name, shadow))
            deltas.append(Delete(path=(name,)))

    def _break(self, name: str, error: Exception, deltas: list[Delta], mark: int) -> None:
        self._refuse(name, f"it could not be read: {type(error).__name__}", deltas, mark)
        self.broken = self.broken or (name, error)

    def _refuse(self, name: str, error: Unsavable | str, deltas: list[Delta], mark: int) -> None:
        del deltas[mark:]
        self.errors[name] = str(error)
        self._undo.replaced(partial(self.errors.pop, name, None))
        self._forget(name, deltas)

    # --- back to a token --------------------------------------------------------------------------------------------

    def rewind(self, saves: Mapping[str, Any], tokens: int) -> Callable[[Mapping[str, Any]], dict[str, Any]]:
        """Bring the saves back to their state after the first `tokens` tokens.

        Changes the block's own lists and dicts. `saves` are the block's current saves, by name. Returns a function from
        the block's saves at its end to those that count. There a name that a later step has bound gets its earlier
        value; other names keep theirs.
        """
        later = {name: value for name, value in saves.items() if name in self._names}
        whole = self._undo.back_to(tokens)
        known = {name: shadow.value for name, shadow in self._names.items()}
        if not whole:
            # The saves may differ from the consumer's fold, so the worker sends all of them anew.
            self._names = {name: _Leaf(_MISSING, b"") for name in self._names}

        def counted(saves: Mapping[str, Any]) -> dict[str, Any]:
            found = dict(saves)
            for name, value in later.items():
                if name not in found or found[name] is value:
                    found.pop(name, None)
                    if name in known:
                        found[name] = known[name]
            for name in known.keys() - later.keys():
                found.setdefault(name, known[name])
            return found

        return counted

    # --- the end ----------------------------------------------------------------------------------------------------

    def ending(self, saves: Mapping[str, Any], invoke: int, choice: int, host: HostCopy | None = None) -> Ending:
        """The end of the saves of a block that has ended, with the contents that they have now.

        `Ending.compare`, which may run later and on another thread, gives the deltas that bring the fold to exactly
        `saves`, and a manifest of them.
        """
        deltas = self.step(saves, host, whole=True, still=True)
        names = self._names
        # The digests of large arrays are taken from their present contents.
        as_sent = frozenset(
            [
                name
                for name, shadow in names.items()
                if not self.large and _holds_what_was_sent(shadow, keeps=self.keeps)
            ]
        )
        # A new copy: the one for a step has the contents of that step.
        local = HostCopy(self._budget.threshold)
        local.prime([value for name, shadow in names.items() if name not in as_sent for value in _values(shadow)])
        now = SaveSnapshot(local, self._budget, still=True, sent=False)
        if self.large:
            for name, shadow in list(self._names.items()):
                try:
                    for leaf in _large(shadow):
                        now.freeze(leaf.value, (name,))
                except Unsavable as error:
                    self._refuse(name, error, deltas, len(deltas))
        return Ending(self, saves, invoke, choice, deltas, now, as_sent)

    def clear(self) -> None:
        """Free the values that it holds, after the end. Their finalizers may be the block's code."""
        self._names, self._undo, self.taken, self.broken = {}, _Undo(), [], None


class Ending:
    """The end of one choice's saves: the last deltas, and the comparison with the values that were sent."""

    def __init__(
        self,
        tracker: SaveTracker,
        saves: Mapping[str, Any],
        invoke: int,
        choice: int,
        deltas: list[Delta],
        now: SaveSnapshot,
        as_sent: frozenset[str] = frozenset(),
    ) -> None:
        self._tracker = tracker
        #: The names of saves that were compared already, and are lists of arrays with the contents that were sent.
        self._as_sent = as_sent
        self._saves = saves
        self._invoke = invoke
        self._choice = choice
        self._deltas = deltas
        self._now = now
        #: New large arrays, which the worker sends; and known ones with their present contents, whose digests it takes.
        self.taken = tracker.taken
        self.again = now.taken
        #: Whether the adapter takes the digests of arrays. The manifest then omits those of unchanged lists.
        self.passed = False

    def compare(self) -> tuple[list[Delta], list[Manifest], list[LargeArray]]:
        """The last deltas, the manifest, and the large arrays of `again` that differ from the sent ones.

        The caller has taken the digests of `taken` and `again`. One thread at a time may call this. With `passed`, an
        entry of the manifest has no digest if its value is a list of arrays that are equal to those sent.
        """
        tracker, deltas, now = self._tracker, self._deltas, self._now
        manifest: list[Manifest] = []
        changed: list[LargeArray] = []
        for name, value in self._saves.items():
            if name in tracker.errors or name not in tracker._names:
                continue
            mark = len(deltas)
            try:
                shadow = tracker._names[name]
                if self.passed and (name in self._as_sent or _is_as_sent(shadow, now)):
                    final = b""
                else:
                    final = _correct(shadow, (name,), now, deltas, changed)
                manifest.append(
                    Manifest(
                        invoke=self._invoke,
                        choice=self._choice,
                        name=name,
                        kind=kind(value),
                        length=length(value),
                        digest=final,
                    )
                )
            except Unsavable as error:
                tracker._refuse(name, error, deltas, mark)
            except Exception as error:
                tracker._break(name, error, deltas, mark)
        return deltas, manifest, changed


def _is_name(name: str, value: Any) -> bool:
    return type(value) is not NoName and _printable(name) == name


def _printable(name: str) -> str:
    return name if name.isascii() else name.encode("utf-8", "backslashreplace").decode()


def _flat(value: Any, depth: int, found: list[Any]) -> None:
    """Add the tensors in a value to `found`, down to `_GLANCE` levels."""
    cls = type(value)
    if cls is torch.Tensor:
        found.append(value)
    elif depth < _GLANCE and (cls is list or cls in _DICTS):
        for item in value if cls is list else value.values():
            _flat(item, depth + 1, found)


def _adopt(value: Any, path: _Path, copies: SaveSnapshot) -> tuple[Any, _Shadow]:
    """A value that is sent whole: its form on the wire, and its shadow.

    Raises:
        Unsavable: the value cannot travel, nests too deep, or is too large for one step.
    """
    cls = type(value)
    if cls is torch.Tensor:
        held = copies.array(value)
        if held is not None:
            return held, _Leaf(value, held)
        frozen = copies.freeze(value, path)
        if frozen is not None:
            return frozen, _Leaf(value, frozen)
    elif cls is list or cls in _DICTS:
        if len(path) > MAX_DEPTH:
            raise Unsavable(path[:3], f"containers nest deeper than {MAX_DEPTH} or refer to themselves")
        _check_gain(len(value), path, copies)
        _check_inner(value if cls is list else value.values(), path, copies)
        box = _Box(value)
        if cls is list:
            sent: Any = []
            for index, item in enumerate(value):
                wired, shadow = _adopt(item, (*path, index), copies)
                sent.append(wired)
                box.append(item, shadow)
        else:
            sent = {}
            for key, item in value.items():
                plain = path_key(key, path)
                sent[plain], shadow = _adopt(item, (*path, plain), copies)
                box.put(key, item, shadow)
        return sent, box
    elif cls is set:
        _check_gain(len(value), path, copies)
        return wire(value, path), _SetLeaf(value, digest(value))
    elif cls not in _FIXED:
        frozen = copies.freeze(value, path)
        if frozen is not None:
            return frozen, _Leaf(value, frozen)
    local = copies.local(value)
    if cls is str or cls is bytes or cls not in _FIXED:
        _check_size(local, path, copies)
    return wire(local, path), _Leaf(value, digest(local))


def _walk(
    box: _Box | _SetLeaf, path: _Path, copies: SaveSnapshot, deltas: list[Delta], whole: bool, undo: _Undo
) -> None:
    """Add the deltas of a container that is the same object as before."""
    if isinstance(box, _SetLeaf):
        _resend(box, path, copies, deltas, undo)
        return
    value = box.value
    start = stop = 0
    if type(value) is list:
        items = box.items
        known = len(items)
        if len(value) < known:
            wired, fresh = _adopt(value, path, copies)
            assert isinstance(fresh, _Box)
            deltas.append(Set(path=path, value=wired))
            undo.replaced(partial(_refill, box, box.items, box.shadows, box.boxes))
            box.items, box.shadows, box.boxes, box.cursor = fresh.items, fresh.shadows, fresh.boxes, 0
            return
        start, stop = (0, known) if whole or known <= WINDOW else box.window()
        for index in _replaced(items, value, start, stop):
            _put(box, index, value[index], (*path, index), copies, deltas, undo)
        if len(value) > known:
            _check_gain(len(value) - known, path, copies)
            undo.appended(box, known)
            sent = []
            for index in range(known, len(value)):
                wired, shadow = _adopt(value[index], (*path, index), copies)
                sent.append(wired)
                box.append(value[index], shadow)
            deltas.append(Append(path=path, items=sent))
    else:
        _check_gain(len(value) - len(box.items), path, copies)
        for key in [key for key in box.items if key not in value]:
            deltas.append(Delete(path=(*path, _key(key, path))))
            undo.replaced(partial(_put_back, box, key, box.items[key], box.shadows[key]))
            box.drop(key)
        for key, item in value.items():
            if box.items.get(key, _MISSING) is not item:
                _put(box, key, item, (*path, _key(key, path)), copies, deltas, undo)
    if not box.boxes:
        return
    for key, child in list(box.boxes.items()):
        # Children that were put just now have no changes. Walking them again costs little and finds nothing.
        if len(box.boxes) <= WINDOW or type(value) is not list or start <= key < stop:
            _walk(child, (*path, _key(key, path)), copies, deltas, whole, undo)


def _resend(leaf: _SetLeaf, path: _Path, copies: SaveSnapshot, deltas: list[Delta], undo: _Undo) -> None:
    """Send a set whose items have changed. A set is sent whole.

    Of a set of more than `WINDOW` items only the size is compared until the end, which compares contents. Such a set
    is sent when its size has changed by a quarter. A set that grows with every step then costs a few times its size.
    """
    value: set[Any] = leaf.value
    change = abs(len(value) - leaf.size)
    if change or (leaf.held is not None and leaf.held != value):
        undo.replaced(partial(_take_back, leaf, leaf.held, leaf.size, leaf.digest))
        leaf.held = set(value) if len(value) <= WINDOW else None
        if len(value) > WINDOW and change * 4 < leaf.size:
            return
        _check_gain(change, path, copies)
        deltas.append(Set(path=path, value=wire(value, path)))
        leaf.size, leaf.digest = len(value), digest(value)


def _take_back(leaf: _SetLeaf, held: set[Any] | None, size: int, digest: Any) -> None:
    if held is not None:
        leaf.value.clear()
        leaf.value.update(held)
    leaf.held, leaf.size, leaf.digest = held, size, digest


def _key(key: Any, path: _Path) -> Any:
    """The form of a dict's key in a delta's path."""
    plain = path_key(key, path)
    return encode_key(plain) if type(plain) is tuple else plain


def _check_gain(count: int, path: _Path, copies: SaveSnapshot) -> None:
    if count > MOST_ITEMS:
        raise Unsavable(path, f"it gained {count} items in one step, more than the {MOST_ITEMS} that can be sent")
    copies.items += max(0, count)
    _check_together(copies.items, path)


def _check_inner(items: Iterable[Any], path: _Path, copies: SaveSnapshot) -> None:
    """Refuse containers in a container that are too large together, before any of them is copied."""
    inner = sum([len(item) for item in items if type(item) in _CONTAINERS])
    _check_together(copies.items + inner, path)


def _check_together(count: int, path: _Path) -> None:
    if count > MOST_ITEMS_TOGETHER:
        raise Unsavable(
            path,
            f"the saves gained {count} items together in one step, more than the {MOST_ITEMS_TOGETHER} that can be "
            "sent",
        )


def _check_size(value: Any, path: _Path, copies: SaveSnapshot) -> None:
    """Count the texts and bytes in a value against the step's limit `MOST_TEXT`.

    Raises:
        Unsavable: the step's texts and bytes exceed the limit.
    """
    size = 0
    waiting = [value]
    while waiting:
        one = waiting.pop()
        if type(one) is tuple or type(one) is list:
            waiting += one
        elif isinstance(one, bytes | bytearray | str):
            size += len(one) if not isinstance(one, str) or str.isascii(one) else 4 * len(one)
    copies.texts += size
    if copies.texts > MOST_TEXT:
        raise Unsavable(
            path, f"texts and bytes saved in one step may take {MOST_TEXT} bytes; make it an array of uint8"
        )


def _put(box: _Box, key: Any, item: Any, path: _Path, copies: SaveSnapshot, deltas: list[Delta], undo: _Undo) -> None:
    wired, shadow = _adopt(item, path, copies)
    deltas.append(Set(path=path, value=wired))
    if type(box.value) is list or key in box.items:
        undo.replaced(partial(_put_back, box, key, box.items[key], box.shadows[key]))
    else:
        undo.replaced(partial(_take_out, box, key))
    box.put(key, item, shadow)


def _restore(names: dict[str, _Shadow], name: str, shadow: _Shadow | None) -> None:
    if shadow is None:
        names.pop(name, None)
    else:
        _refresh(shadow)
        names[name] = shadow


def _refresh(shadow: _Shadow) -> None:
    """Bring a restored container back to the contents that the consumer has: the block may have changed it since."""
    if isinstance(shadow, _SetLeaf):
        if shadow.held is not None and shadow.held != shadow.value:
            shadow.value.clear()
            shadow.value.update(shadow.held)
    elif isinstance(shadow, _Box):
        value, items = shadow.value, shadow.items
        differs = len(value) != len(items) or any(map(is_not, value, items))
        if type(value) is list:
            if differs:
                value[:] = items
        elif differs or any(map(is_not, value.values(), items.values())):
            value.clear()
            value.update(items)
        for child in shadow.boxes.values():
            _refresh(child)


def _put_back(box: _Box, key: Any, item: Any, shadow: _Shadow) -> None:
    _refresh(shadow)
    box.value[key] = item
    box.put(key, item, shadow)


def _take_out(box: _Box, key: Any) -> None:
    box.value.pop(key, None)
    box.drop(key)


def _refill(box: _Box, items: list[Any], shadows: list[_Shadow], boxes: dict[Any, _Box | _SetLeaf]) -> None:
    box.items, box.shadows, box.boxes, box.cursor = items, shadows, boxes, 0
    _refresh(box)


def _replaced(known: list[Any], value: list[Any], start: int, stop: int) -> list[int]:
    """Indices from `start` to `stop` at which `value` holds another object than `known`."""
    if start == 0 and stop == len(known) and not any(map(is_not, known, value)):
        return []
    old, new = known[start:stop], value[start:stop]
    if not any(map(is_not, old, new)):
        return []
    return [start + offset for offset, (a, b) in enumerate(zip(old, new, strict=True)) if a is not b]


def _leaves(shadow: _Shadow) -> Iterator[_Leaf]:
    if isinstance(shadow, _Leaf):
        yield shadow
    else:
        for child in shadow.shadows if type(shadow.value) is list else shadow.shadows.values():
            yield from _leaves(child)


def _values(shadow: _Shadow) -> Iterable[Any]:
    """The values in a shadow, whose tensors the end compares by their contents."""
    if _is_plain_list(shadow):
        return shadow.items  # type: ignore[no-any-return]
    return [leaf.value for leaf in _leaves(shadow)]


def _large(shadow: _Shadow) -> Iterator[_Leaf]:
    """The leaves of a shadow that are large, or hold a large array, and may have changed."""
    return (leaf for leaf in _leaves(shadow) if isinstance(leaf.digest, LargeTuple) or _was_copied(leaf.digest))


def _was_copied(sent: bytes | Frozen | HostArray) -> bool:
    return isinstance(sent, LargeArray) and not sent.borrowed


def _correct(shadow: _Shadow, path: _Path, now: SaveSnapshot, deltas: list[Delta], changed: list[LargeArray]) -> bytes:
    """Add deltas where contents differ from those that were sent, and return the digest of the current value."""
    if isinstance(shadow, _Leaf):
        return _corrected(shadow, path, now, deltas, changed)
    if type(shadow.value) is list:
        return list_digest(
            [_correct(child, (*path, index), now, deltas, changed) for index, child in enumerate(shadow.shadows)]
        )
    return dict_digest(
        [
            (key, _correct(child, (*path, _key(key, path)), now, deltas, changed))
            for key, child in shadow.shadows.items()
        ]
    )


def _holds_what_was_sent(shadow: _Shadow, *, keeps: bool) -> bool:
    """Whether a value is a list of arrays in host memory, each with the contents that were sent. Copies nothing.

    With `keeps`, the arrays are known to have these contents.
    """
    return _is_plain_list(shadow) and all(
        type(leaf.digest) is HostArray and (keeps or leaf.digest.is_in(leaf.value)) for leaf in shadow.shadows
    )


def _is_plain_list(shadow: _Shadow) -> TypeGuard[_Box]:
    return type(shadow) is _Box and type(shadow.value) is list and not shadow.boxes


def _is_as_sent(shadow: _Shadow, now: SaveSnapshot) -> bool:
    """Whether a value is a list of arrays, each with the contents that were sent."""
    if not _is_plain_list(shadow):
        return False
    sent: list[HostArray] = []
    held: list[HostArray] = []
    for leaf in shadow.shadows:
        was, known = leaf.digest, now.array(leaf.value)
        if known is None or type(was) is not HostArray or not known.alike(was):
            return False
        sent.append(was)
        held.append(known)
    # A piece at a time: all at once would take new memory of twice their size.
    return all(elements(sent[start:stop]) == elements(held[start:stop]) for start, stop in _pieces(held))


def _pieces(arrays: list[HostArray]) -> Iterator[tuple[int, int]]:
    """Arrays in pieces of about `_COMPARED` bytes: the first of each, and the one behind its last."""
    start = size = 0
    for place, array in enumerate(arrays, 1):
        size += array.nbytes
        if size >= _COMPARED or place == len(arrays):
            yield start, place
            start, size = place, 0


def _corrected(leaf: _Leaf, path: _Path, now: SaveSnapshot, deltas: list[Delta], changed: list[LargeArray]) -> bytes:
    value, sent = leaf.value, leaf.digest
    held = now.array(value) if type(value) is torch.Tensor else None
    if isinstance(sent, HostArray):
        if held is not None and held.same(sent):
            return sent.digest()
        sent = leaf.digest = sent.digest()
    if not isinstance(sent, bytes):
        frozen = now.frozen(value) or sent
        if frozen.digest != sent.digest:
            now.promise(frozen)
            deltas.append(Set(path=path, value=frozen))
            changed.extend([frozen] if isinstance(frozen, LargeArray) else frozen.arrays)
        return frozen.digest
    if type(value) in _FIXED:
        return sent
    local = None if held is not None else now.local(value)
    found = held.digest() if held is not None else digest(local)
    if found != sent:
        deltas.append(Set(path=path, value=encoded_array(held.payload()) if held is not None else wire(local, path)))
    return found


_MISSING: Any = object()
