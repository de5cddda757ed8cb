"""Checks the sources of blocks before they run: whether they compile, and whether the module paths in them exist.

While Python compiles, nothing else in its process runs, and some sources take long: a hundred thousand characters of
lambdas take seconds. So a separate process checks a long source, and is killed if it takes too long. The adapter's
event loop serves other traces meanwhile.
"""

from __future__ import annotations

import time
import warnings
from collections import OrderedDict
from functools import lru_cache
from typing import Final, NamedTuple

import anyio
from anyio import to_process

from tracewire_bus.domain.code_identity import imported
from tracewire_bus.domain.tree import ModuleTree, PathProblem, check_block
from tracewire_bus.wire.codec import decode_engine, digest_bytes, encode
from tracewire_bus.wire.messages import EngineInfo

__all__ = ["Examined", "Sources"]

#: The longest source, in characters, that is checked on the event loop. That takes a few milliseconds at most.
SHORT: Final = 4000
#: How long a source may take to compile, in seconds of a processor: the workers compile it between two steps.
MOST_COMPILING_S: Final = 0.25
#: How long checking one source may take, in seconds.
MOST_S: Final = 10.0
#: The number of sources whose results are cached.
_REMEMBERED: Final = 256


class Examined(NamedTuple):
    """The result of checking a source.

    `error` is the class, line and message of the exception if the source does not compile. `problem` is the first
    module path that does not exist. `imports` are the modules that the source imports.
    """

    error: tuple[str, int | None, str] | None = None
    problem: PathProblem | None = None
    imports: tuple[str, ...] = ()


class Sources:
    """Checks the sources of the blocks that run on one model. Any task may use it."""

    def __init__(self, info: EngineInfo, tree: ModuleTree) -> None:
        self._info = info
        self._tree = tree
        self._known: OrderedDict[tuple[bytes, tuple[str, ...]], Examined] = OrderedDict()
        self._encoded = b""
        self._turn = anyio.Lock()

    async def examine(self, source: str, names: tuple[str, ...]) -> Examined:
        """Check a source. `names` are the variables in it that hold the model: only paths behind these are checked."""
        key = digest_bytes(source.encode("utf-8", "surrogatepass")), names
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = (
                _examine(self._tree, source, names) if len(source) <= SHORT else await self._apart(source, names)
            )
            if len(self._known) > _REMEMBERED:
                self._known.popitem(last=False)
        return known

    async def _apart(self, source: str, names: tuple[str, ...]) -> Examined:
        self._encoded = self._encoded or encode(
            EngineInfo(
                engine=self._info.engine,
                model=self._info.model,
                layers=self._info.layers,
                layer_count=self._info.layer_count,
                modules=self._info.modules,
                attributes=self._info.attributes,
                taps=self._info.taps,
            )
        )
        async with self._turn:
            with anyio.move_on_after(MOST_S):
                return await to_process.run_sync(_examine_for, self._encoded, source, names, cancellable=True)
        return Examined(("SyntaxError", None, f"checking it takes longer than {MOST_S:g} s"))


def _examine_for(info: bytes, source: str, names: tuple[str, ...]) -> Examined:
    """Runs in the separate process."""
    return _examine(_tree_of(info), source, names)


@lru_cache(maxsize=1)
def _tree_of(info: bytes) -> ModuleTree:
    return ModuleTree(decode_engine(info))


def _examine(tree: ModuleTree, source: str, names: tuple[str, ...]) -> Examined:
    began = time.process_time()
    try:
        with warnings.catch_warnings():
            # Such as that of a number directly before a word. The client has already shown the author these warnings.
            warnings.simplefilter("ignore")
            compile(source, "<block>", "exec", dont_inherit=True)
    except (SyntaxError, ValueError, MemoryError, RecursionError, OverflowError) as error:
        return Examined((type(error).__name__, getattr(error, "lineno", None), str(getattr(error, "msg", error))))
    took = time.process_time() - began
    if len(source) > SHORT and took > MOST_COMPILING_S:
        return Examined(("SyntaxError", None, f"it takes {took:.2f} s to compile; {MOST_COMPILING_S:g} s are allowed"))
    problems = [problem for name in names for problem in check_block(tree, source, name)]
    return Examined(None, problems[0] if problems else None, imported(source))
