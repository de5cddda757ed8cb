"""Where a block is while its source is gone through, and what it writes there."""

from __future__ import annotations

from itertools import count
from typing import Any

from tracewire_engine.protocol.known_edits import Edit

from .edit_symbols import (
    LOGITS,
    OTHER,
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

#: The locations behind the layers, in their order.
_LAST = (LOGITS, "model.samples")

#: Through how many statements of a block this goes, each turn of a loop over known numbers counted.
_MOST_STATEMENTS = 10_000


class EditWalk:
    """The edits of a block, as far as its source was gone through.

    Args:
        paths: of the model's modules.
        arrays: the variables and live parameters that are arrays of floating-point numbers.
        numbers: those that are numbers.
    """

    def __init__(self, paths: ModelPaths, arrays: frozenset[Leaf], numbers: frozenset[Leaf]) -> None:
        self._paths, self._arrays, self._numbers = paths, arrays, numbers
        self._edits: dict[str, Growing] = {}
        self._clock = count()
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
        #: Whether the block may change an array of its own; and how many statements there may still be.
        self.changes = False
        self._left = _MOST_STATEMENTS
        #: Whether the block adds to a container that may be one of its variables; and whether it goes through one.
        self.fills = self.goes_by_list = False

    def take(self) -> None:
        """Count a statement.

        Raises:
            Unclear: these are too many.
        """
        self._left -= 1
        if self._left < 0:
            raise Unclear

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
            growing = self._edits[location] = Growing(location, *self.steps, self._clock)
        elif (growing.first, growing.end) != self.steps:
            # It may be in several loops.
            if growing.effects or growing.risky:
                raise Unclear
            growing = self._edits[location] = Growing(location, *self.steps, self._clock)
        return Register(growing, 0, self.visit)

    def _pass(self, location: str) -> None:
        """Note how far a block is that has come to a location.

        Raises:
            Unclear: the model may have passed it, so that the block fails there or waits for the next step.
        """
        head, _, end = location.removeprefix(f"{self._paths.layers}.").partition(".")
        if location in _LAST:
            reached = (len(self._paths.children[self._paths.layers]), location == _LAST[1])
        elif location.startswith(f"{self._paths.layers}.") and head.isdecimal():
            reached = (int(head), end == "output")
        else:
            raise Unclear
        if reached <= self.reached or not self._paths.serves(location):
            raise Unclear
        self.reached = reached

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
        if edit.is_constant(root) or root in edit.dead:
            # The next step would find it changed, or the stream was assigned since it was read.
            raise Unclear
        changed = self.operation(name, [target, *arguments], options or {})
        if not isinstance(changed, Register):
            raise Unclear
        edit.effects.append(changed.number)
        if root and edit.operations[root - 1].name == "stream":
            self.put_stream(edit, root)
            # A block that changes another reading, too, fails.
            edit.dead |= edit.streams() - {root}
        return changed

    def assign_stream(self, edit: Growing, stream: int) -> None:
        """Take an assignment to a residual stream. What was read of it before changes nothing any more."""
        edit.dead |= edit.streams()
        self.put_stream(edit, stream)

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

    def _is_number(self, one: Any) -> bool:
        """Whether a symbol is a number, or what operations without errors make of numbers."""
        if isinstance(one, Constant):
            return (
                one.name in ("add", "sub", "mul", "neg")
                and not one.options
                and all(map(self._is_number, one.arguments))
            )
        return (isinstance(one, Number) and type(one.value) is not bool) or one in self._numbers

    def _is_sure_of(self, made: Constant) -> bool:
        """Whether an operation on variables raises no error."""
        if self._is_number(made):
            return True
        tensors = [one for one in made.arguments if not isinstance(one, Number | Dtype) and not self._is_number(one)]
        if made.options or not tensors or not all(isinstance(one, Constant) or one in self._arrays for one in tensors):
            return False
        if made.name in SURE:
            return len(made.arguments) == 1
        if made.name == "to":
            return len(made.arguments) == 2 and isinstance(made.arguments[1], Dtype)
        if any(isinstance(one, Dtype) or type(getattr(one, "value", 0)) is bool for one in made.arguments):
            return False
        single = [one for one in tensors if isinstance(one, Constant) and one.name in ("norm", "sum")]
        return made.name in ("add", "sub", "mul", "truediv") and len(tensors) - len(single) <= 1

    def found(self) -> list[Edit]:
        """What was found.

        Raises:
            Unclear: it may be otherwise, for what the block does elsewhere.
        """
        writing = [one for one in self._edits.values() if one.effects]
        last = max([one.times[number - 1] for one in writing for number in one.effects], default=-1)
        # An operation that raises an error ends the block, wherever it is.
        every = [one.done(last) for one in self._edits.values() if one.effects or one.risky]
        found = [one for one in every if one.operations]
        if self.fills and (self.goes_by_list or any(len(leaf) > 1 for one in found for leaf in one.leaves)):
            raise Unclear
        if not all(one.is_one_way() for one in writing):
            raise Unclear
        return found
