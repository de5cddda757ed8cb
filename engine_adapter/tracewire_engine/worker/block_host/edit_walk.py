"""Where a block is while its source is gone through, and what it writes there."""

from __future__ import annotations

from typing import Any

from tracewire_engine.protocol.known_edits import Edit

from .edit_symbols import (
    OTHER,
    PARTS,
    SURE,
    Constant,
    Dtype,
    Growing,
    Leaf,
    Number,
    Other,
    Register,
    Unclear,
    encoded,
    is_known,
)
from .reading import ModelPaths

__all__ = ["EditWalk"]


class EditWalk:
    """The edits of a block, as far as its source was gone through.

    Args:
        paths: of the model's modules.
        arrays: the variables that are arrays of floating-point numbers.
    """

    def __init__(self, paths: ModelPaths, arrays: frozenset[str]) -> None:
        self._paths, self._arrays = paths, arrays
        self._edits: dict[str, Growing] = {}
        #: Where the block is, and how many visits of locations there were.
        self._at: str | None = None
        self.visit = 0
        #: How far the block is in the model's pass: the layer, and whether the layer is over. And whether it may have
        #: failed or ended before it comes to the statement under way.
        self.reached = (-1, False)
        self.unsure = False
        #: In which steps the statement under way is run (`None`: nobody knows); and whether it may also not be.
        self.steps: tuple[int, int | None] | None = (0, 1)
        self.maybe = 0
        #: Whether the block may change an array of its own.
        self.changes = False
        #: Whether the block adds to a container that may be one of its variables; and whether it goes through one.
        self.fills = self.goes_by_list = False

    def ask(self, location: str) -> Register:
        """The value of a location that the block asks for."""
        if self._at != location:
            self._at = location
            self.visit += 1
            self._pass(location)
        growing = self._edits.get(location)
        if self.steps is None:
            return Register(Growing(location, 0, 0), 0, -1)
        if growing is None:
            growing = self._edits[location] = Growing(location, *self.steps)
        elif (growing.first, growing.end) != self.steps:
            # It may be in several loops.
            if growing.effects:
                raise Unclear
            growing = self._edits[location] = Growing(location, *self.steps)
        return Register(growing, 0, self.visit)

    def _pass(self, location: str) -> None:
        """Note how far a block is that has come to a location. One that the model has passed raises an error."""
        head, _, end = location.removeprefix(f"{self._paths.layers}.").partition(".")
        if location == "model.logits":
            reached = (len(self._paths.children[self._paths.layers]), True)
        elif location.startswith(f"{self._paths.layers}.") and head.isdecimal():
            reached = (int(head), end == "output")
        else:
            reached = self.reached
        self.unsure |= reached <= self.reached or not self._paths.serves(location)
        self.reached = max(reached, self.reached)

    def doubt(self, value: Any = OTHER) -> Any:
        """Take it that the block may have failed. Returns a value."""
        self.unsure = True
        return value

    def leave(self) -> None:
        """Take it that the block may have gone on to another location."""
        self._at = None
        self.visit += 1

    def change(self, target: Any, name: str, arguments: list[Any], options: dict[str, Any] | None = None) -> Any:
        """Take an operation that changes its first argument in place."""
        if isinstance(target, Other) and target.own:
            self.changes = True
            return self.doubt(target)
        if not isinstance(target, Register) or self.maybe or target.visit != self.visit or self.unsure:
            raise Unclear
        edit = target.edit
        root = edit.root(target.number)
        if edit.is_constant(root):
            # The next step would find it changed.
            raise Unclear
        changed = self.operation(name, [target, *arguments], options or {})
        if not isinstance(changed, Register):
            raise Unclear
        edit.effects.append(changed.number)
        if root and edit.operations[root - 1].name == "stream":
            self.put_stream(edit, root)
        return changed

    @staticmethod
    def put_stream(edit: Growing, stream: int) -> None:
        """Have a residual stream put into the layer's output."""
        edit.effects.append(edit.emit("put_stream", [["r", 0], ["r", stream]]))

    def operation(self, name: str, arguments: list[Any], options: dict[str, Any]) -> Any:
        """An operation, in the edit of the location to which its arguments belong."""
        registers = [one for one in [*arguments, *options.values()] if isinstance(one, Register)]
        if not all(map(is_known, [*arguments, *options.values()])):
            return OTHER
        if not registers:
            made = Constant(name, arguments, options)
            return made if self._is_sure_of(made) else self.doubt(made)
        edit = registers[0].edit
        if any(one.edit is not edit or one.visit != self.visit for one in registers) or self.steps is None:
            return OTHER
        given = [encoded(edit, one) for one in arguments]
        number = edit.emit(name, given, {key: encoded(edit, one) for key, one in options.items()})
        return Register(edit, number, self.visit)

    def _is_sure_of(self, made: Constant) -> bool:
        """Whether an operation on variables raises no error."""
        tensors = [one for one in made.arguments if not isinstance(one, Number | Dtype)]
        if made.options or not all(isinstance(one, Constant) or one.name in self._arrays for one in tensors):
            return False
        if any(isinstance(one, Leaf) and one.keys for one in tensors):
            return False
        if made.name in SURE or made.name == "to":
            return len(made.arguments) == 1 or isinstance(made.arguments[1], Dtype)
        single = [one for one in tensors if isinstance(one, Constant) and one.name in ("norm", "sum")]
        return made.name in ("add", "sub", "mul", "truediv") and len(tensors) - len(single) <= 1

    def found(self) -> list[Edit]:
        """What was found.

        Raises:
            Unclear: it may be otherwise, for what the block does elsewhere.
        """
        found = [one.done() for one in self._edits.values() if one.effects]
        if self.fills and (self.goes_by_list or any(len(leaf) > 1 for one in found for leaf in one.leaves)):
            raise Unclear
        if not all(map(_is_one_way, found)):
            raise Unclear
        return found


def _is_one_way(edit: Edit) -> bool:
    """Whether a block that changes a residual stream changes the layer's output in no other way."""
    effects = [one for one in edit.operations if one.name in PARTS - {"getitem"} or one.name == "put_stream"]
    streams = [one.name == "put_stream" for one in effects]
    if not any(streams):
        return True
    growing = Growing(edit.location, 0, None, list(edit.operations))
    return all(one.name == "put_stream" or growing.root(one.arguments[0][1]) for one in effects)
