"""What declared interventions of all kinds have in common: their base, live parameters, positions and conditions."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

import msgspec

__all__ = ["DeclaredIntervention", "Live", "Message", "Positions", "When"]


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


class When(Message):
    """A condition of a declared intervention: all parts of it that are given must hold.

    - `probe` with `above` or `below` (or both: outside a band): the value of the trace's probe of this name is above
      `above`, or below `below`. With `release` and one threshold, the condition then holds until the value is at
      `release` or beyond it (hysteresis). The probe saves numbers of one location's last position; `output` is the
      index of one of several. The value is that of the same step where the forward pass reads the probe before it
      comes to the intervention, and that of the step before elsewhere. Where the probe itself is left out, the
      condition stays as it was. Such a condition holds at no position of the prompt but its last.
    - `start` and `stop`: the index of the token that the model samples from the position is `start` or more, and less
      than `stop`. The last position of the prompt has token 0.
    - `every`: that index, less `start`, is a multiple of it.
    - `tokens`: the tokens up to and with the position's own end with one of these sequences of token ids, of up to 8
      tokens each. A list of ids is one sequence.
    - `text`: the string of the position's token contains this text.
    - `part`: the position is in the `"prompt"`, or in the `"answer"`.

    An intervention that edits leaves a position as it is where the condition does not hold. One that reads saves NaN
    there, and -1 for token ids and features.
    """

    probe: str | None = None
    above: float | Live | None = None
    below: float | Live | None = None
    release: float | Live | None = None
    output: int = 0
    start: int | None = None
    stop: int | None = None
    every: int | None = None
    tokens: list[list[int]] | None = None
    text: str | None = None
    part: Literal["prompt", "answer"] | None = None


class DeclaredIntervention(Message, tag_field="do", kw_only=True):
    """Base of the declared interventions.

    A declared intervention states a common operation without code. An engine applies it to all requests of a step at
    once, and can accept it from clients whose code the engine would not run. An engine applies a trace's declared
    interventions in the order given, and at each location before the block.

    `at` is the location:

    - `residual(3)`: the residual stream after decoder layer 3. `residual(-1)`, `residual(*)` and `residual(2:6)` index
      as in Python; `*` is every layer.
    - `model.layers.3.mlp`: a module's output, or the first tensor of it if the module returns several. The suffix
      `.output` is optional; `.input` selects the module's first input. A `*` matches any one part of the path. Of a
      module that the model calls several times in a step, this is the first call: layers may share one, such as a
      rotary embedding, and its path then has the number of the first of them.

    `when` is a condition on the positions, besides those that the intervention has itself.

    In a submission, the fields that hold an array may hold a reference to a vector instead (`store/vectors.py`).
    """

    when: When | None = None

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
