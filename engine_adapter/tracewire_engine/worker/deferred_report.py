"""Defers a step's report until the worker has answered EngineCore.

EngineCore waits for a step's tokens, and plans the next step when it has them. The worker has nothing to do meanwhile,
so it encodes and sends the step's report in that time, after its answer instead of before it.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

__all__ = ["DeferredReport"]

logger = logging.getLogger("vllm.tracewire")


class DeferredReport:
    """Holds a piece of work until the worker has sent its answer. Does it at once if `attach` was never called."""

    def __init__(self) -> None:
        self._answering = False
        self._work: Callable[[], None] | None = None
        self._failure: Exception | None = None

    def defer(self, work: Callable[[], None]) -> None:
        """Do `work` once the answer to the current call has been sent.

        Raises:
            Exception: the exception of earlier work.
        """
        self.run()
        if self._answering:
            self._work = work
        else:
            work()

    def run(self) -> None:
        """Do the deferred work now, if there is any.

        Raises:
            Exception: the exception of this work, or of earlier work.
        """
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure
        work, self._work = self._work, None
        if work is not None:
            work()

    def attach(self, process: Any) -> None:
        """Patch vLLM's class of worker processes, so that the deferred work is done after each answer.

        Args:
            process: vLLM's class `WorkerProc`.
        """
        answer = process.handle_output

        @functools.wraps(answer)
        def handle_output(one: Any, output: Any) -> None:
            answer(one, output)
            self._answering = True
            try:
                self.run()
            except Exception as error:
                # vLLM would send an exception raised here as a second answer to the same call.
                logger.exception("a step could not be reported")
                self._failure = error

        process.handle_output = handle_output
