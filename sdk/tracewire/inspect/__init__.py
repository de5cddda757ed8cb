"""The provider of Inspect (`inspect_ai`): models under the name `tracewire/MODEL`, steered and read in an evaluation.

    inspect eval task.py --model tracewire/demo -M url=redis://localhost -M steer='residual(4)@calm@3*2.0'

Inspect loads `registry` by an entry point. A scorer or a notebook imports this package, which does not need Inspect.
"""

from __future__ import annotations

from .reading import saves

__all__ = ["saves"]
