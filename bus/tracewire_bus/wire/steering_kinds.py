"""`Hold`, which steers by a controller."""

from __future__ import annotations

from typing import Any

from .declared_base import DeclaredIntervention, Live

__all__ = ["Hold"]


class Hold(DeclaredIntervention, tag="hold"):
    """Keeps the value of a probe at `target`, by adding a multiple of `vector` (`[hidden]`) to the values at `at`.

    The multiple, the *strength*, is between `min` and `max`. It is saved as a number a step in the list `name`. `probe`
    is the name of a probe of the trace that saves numbers of one location's last position; `output` is the index of one
    of several. The last position of the prompt and every generated position are steered.

    Without a `gain`, the strength of each step is the one with which the probe's value is `target`, if the bounds allow
    it (the closed form). The probe must then read the same location as `at`, by a `weight`, with no activation or a
    sigmoid, of whose outputs `target` is one. Nothing can become unstable.

    With a `gain`, the strength changes from step to step: by `gain` times the error, which is `target` less the probe's
    value, and by `proportional` times the change of the error (a proportional-integral controller in velocity form,
    whose bounds also stop its integral). The value is that of the same step where the forward pass reads the probe
    before it comes to `at`, and that of the step before elsewhere. Without a value yet, the strength is the one nearest
    to 0. If one unit of strength moves the probe by `a`, the controller without a proportional part is stable for
    `0 < gain * a < 2`, and monotone for `gain * a <= 1`.

    Where the condition `when` does not hold, nothing is added, the strength saved is 0, and the controller waits.
    """

    name: str
    at: str
    vector: Any
    probe: str
    target: float | Live
    min: float | Live
    max: float | Live
    gain: float | Live | None = None
    proportional: float | Live = 0.0
    output: int = 0
