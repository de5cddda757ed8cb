"""The bus of Tracewire: its messages and values, the streams they travel on, and what is folded from them.

Both sides import this package and it imports neither of them. Importing it, or any module of it, loads no Redis client
and no NumPy: both come with their first use.
"""

from typing import Any

from anyio import TypedAttributeSet

# nnsight gives every object a `save`. anyio imports its backends and streams on their first use, and then takes that
# `save` for an attribute without an annotation, of each of its own sets of attributes, and raises. An annotation of the
# base class counts for all of them, whichever of the two is imported first.
TypedAttributeSet.__annotations__ = {**TypedAttributeSet.__annotations__, "save": Any}
