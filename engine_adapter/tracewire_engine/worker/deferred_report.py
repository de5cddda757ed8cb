"""The work that a worker does after it has answered EngineCore.

EngineCore waits for a step's tokens and decides upon the next step when it has them; the worker has nothing to do then.
So what a step still has to report is encoded and sent in that time, behind the answer instead of before it.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

__all__ = ["DeferredReport"]

logger = logging.getLogger("vllm.tracewire")


class DeferredReport:
    """Work that waits for the answer to be under way. Where answers do not come by, it is done at once."""

    def __init__(self) -> None:
        self._answering = False
        self._work: Callable[[], None] | None = None
        self._failure: Exception | None = None

    def defer(self, work: Callable[[], None]) -> None:
        """Do `work` once the answer to the call being carried out has been handed over.

        Raises:
            Exception: what earlier work raised.
        """
        self.run()
        if self._answering:
            self._work = work
        else:
            work()

    def run(self) -> None:
        """Do now what is left to do.

        Raises:
            Exception: what it raised, or what earlier work did.
        """
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure
        work, self._work = self._work, None
        if work is not None:
            work()

    def attach(self, process: Any) -> None:
        """Have each answer of vLLM's class of worker processes `process` followed by the work that waits for it."""
        answer = process.handle_output

        @functools.wraps(answer)
        def handle_output(one: Any, output: Any) -> None:
            answer(one, output)
            self._answering = True
            try:
                self.run()
            except Exception as error:
                # Raised here, it would be a second answer to the same call.
                logger.exception("a step could not be reported")
                self._failure = error

        process.handle_output = handle_output
