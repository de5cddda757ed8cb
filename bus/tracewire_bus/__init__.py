"""The bus of Tracewire: messages and values on the wire, their storage in Redis, and folding.

The SDK and the engine import this package, and it imports neither. Importing this package or any of its modules loads
neither a Redis client nor NumPy; each is loaded at its first use.
"""

from typing import Any

from anyio import TypedAttributeSet

# nnsight gives every object an attribute `save`. When anyio defines a subclass of this class, it raises for an
# attribute without an annotation, and so for `save`. An annotation of this base class holds for all subclasses, even if
# the program imports nnsight first.
TypedAttributeSet.__annotations__ = {**TypedAttributeSet.__annotations__, "save": Any}
