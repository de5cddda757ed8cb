"""What declared interventions of all kinds have in common: their base, live parameters and positions."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

import msgspec

__all__ = ["DeclaredIntervention", "Live", "Message", "Positions"]


class Message(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Base of all structs on the wire."""


class Live(Message):
    """The current value of one of the trace's live parameters: `Live("alpha")` in place of a number or an array."""

    live: str


Positions: TypeAlias = Literal["last", "all", "prompt", "generated"]
"""Which positions of a sequence: `prompt` those of the prompt, `generated` those of sampled tokens, `all` both.

For an intervention that reads, `last` is the one position of each step from which the model samples the next token. For
an intervention that edits, `last` is the prompt's last position and every generated position.
"""


class DeclaredIntervention(Message, tag_field="do"):
    """Base of the declared interventions.

    A declared intervention states a common operation without code. An engine applies it to all requests of a step at
    once, and can accept it from clients whose code the engine would not run. An engine applies a trace's declared
    interventions in the order given, and at each location before the block.

    `at` is the location:

    - `residual(3)`: the residual stream after decoder layer 3. `residual(-1)`, `residual(*)` and `residual(2:6)` index
      as in Python; `*` is every layer.
    - `model.layers.3.mlp`: a module's output, or the first tensor of it if the module returns several. The suffix
      `.output` is optional; `.input` selects the module's first input. A `*` matches any one part of the path.

    In a submission, the fields that hold an array may hold a reference to a vector instead (`store/vectors.py`).
    """

    def __repr__(self) -> str:
        shown = ((field, getattr(self, field.name)) for field in msgspec.structs.fields(self))
        parts = [f"{field.name}={_brief(value)}" for field, value in shown if value is not field.default]
        return f"{type(self).__name__}({', '.join(parts)})"


def _brief(value: Any) -> str:
    """The repr of a field's value; for an array or a long list its type and size, without the elements."""
    shape = getattr(value, "shape", None)
    if shape:
        return f"<{str(value.dtype).removeprefix('torch.')} {list(shape)}>"
    if isinstance(value, msgspec.msgpack.Ext):
        return f"<array of {memoryview(value.data).nbytes} bytes>"
    if isinstance(value, list | tuple) and len(value) > 8:
        return f"<{type(value).__name__} of {len(value)}>"
    return repr(value)
