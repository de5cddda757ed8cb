"""The bus of Tracewire: messages and values on the wire, their storage in Redis, and folding.

The SDK and the engine import this package, and it imports neither. Importing this package or any of its modules loads
neither a Redis client nor NumPy; each is loaded at its first use.
"""

from typing import Any

from anyio import TypedAttributeSet

# nnsight gives every object a `save`. anyio imports its backends and streams on their first use, and then takes that
# `save` for an attribute without an annotation, of each of its own sets of attributes, and raises. An annotation of the
# base class counts for all of them, whichever of the two is imported first.
TypedAttributeSet.__annotations__ = {**TypedAttributeSet.__annotations__, "save": Any}
