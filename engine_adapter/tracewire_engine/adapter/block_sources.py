"""Sources of blocks, looked at before they run: whether they compile, and whether the paths in them exist.

Python compiles without letting anything else in its process run, and some sources take long: a hundred thousand
characters of lambdas take seconds. So a long source is looked at in a process of its own, which is killed when it takes
too long, and the adapter's event loop serves the others meanwhile.
"""

from __future__ import annotations

import time
import warnings
from collections import OrderedDict
from functools import lru_cache
from typing import Final, NamedTuple

import anyio
from anyio import to_process

from tracewire_bus.domain.tree import ModuleTree, PathProblem, check_block
from tracewire_bus.wire.codec import decode_engine, digest_bytes, encode
from tracewire_bus.wire.messages import EngineInfo

__all__ = ["Examined", "Sources"]

#: Up to how many characters a source is looked at on the event loop: a few milliseconds' work, whatever is in it.
SHORT: Final = 4000
#: How long a source may take to compile, in seconds of a processor: the workers compile it between two steps.
MOST_COMPILING_S: Final = 0.25
#: How long one source may be looked at, in seconds.
MOST_S: Final = 10.0
#: Of how many sources is remembered what was found.
_REMEMBERED: Final = 256


class Examined(NamedTuple):
    """What was found in a source: why it does not compile (an exception's class, line and message), if it does not; and
    the first path that leads nowhere, if there is one.
    """

    error: tuple[str, int | None, str] | None = None
    problem: PathProblem | None = None


class Sources:
    """Looks at the sources of the blocks that run on one model. Any task may use it."""

    def __init__(self, info: EngineInfo, tree: ModuleTree) -> None:
        self._info = info
        self._tree = tree
        self._known: OrderedDict[tuple[bytes, tuple[str, ...]], Examined] = OrderedDict()
        self._encoded = b""
        self._turn = anyio.Lock()

    async def examine(self, source: str, names: tuple[str, ...]) -> Examined:
        """Look at a source in which these names stand for the model. `names` is empty for one that has no paths."""
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
        return Examined(("SyntaxError", None, f"it takes longer than {MOST_S:g} s to be looked at"))


def _examine_for(info: bytes, source: str, names: tuple[str, ...]) -> Examined:
    """In a process of its own."""
    return _examine(_tree_of(info), source, names)


@lru_cache(maxsize=1)
def _tree_of(info: bytes) -> ModuleTree:
    return ModuleTree(decode_engine(info))


def _examine(tree: ModuleTree, source: str, names: tuple[str, ...]) -> Examined:
    began = time.process_time()
    try:
        with warnings.catch_warnings():
            # Of each number that runs into a word, and the like: the author has been warned where the block was made.
            warnings.simplefilter("ignore")
            compile(source, "<block>", "exec", dont_inherit=True)
    except (SyntaxError, ValueError, MemoryError, RecursionError, OverflowError) as error:
        return Examined((type(error).__name__, getattr(error, "lineno", None), str(getattr(error, "msg", error))))
    took = time.process_time() - began
    if len(source) > SHORT and took > MOST_COMPILING_S:
        return Examined(("SyntaxError", None, f"it takes {took:.2f} s to compile, and may take {MOST_COMPILING_S:g}"))
    problems = [problem for name in names for problem in check_block(tree, source, name)]
    return Examined(None, problems[0] if problems else None)
