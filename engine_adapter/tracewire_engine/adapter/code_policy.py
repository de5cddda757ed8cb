"""Whose blocks this engine runs: `tracewire engine --code none|listed|signed|any`."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable
from typing import Literal, TypeAlias

from tracewire_bus.domain.approvals import Approvals, ApprovalsError
from tracewire_bus.domain.code_identity import allows, code_hash
from tracewire_bus.wire.messages import Block
from tracewire_engine.protocol.permits import Permits

from .engine_api import Rejection

__all__ = ["CODES", "Code", "CodePolicy"]

logger = logging.getLogger("tracewire")

Code: TypeAlias = Literal["none", "listed", "signed", "any"]

#: The values of `--code`.
CODES: tuple[Code, ...] = ("none", "listed", "signed", "any")


class CodePolicy:
    """The blocks that an engine runs, and what they may import.

    Args:
        code: `none`, no block; `listed`, approved blocks; `signed`, blocks of keys with the right to ship code; `any`.
        reason: why that is so, for messages.
        approvals: for `listed`.
        imports: the packages that a block may import; None for any.
        permits: stamps the blocks that may run, for the workers.
    """

    def __init__(
        self,
        code: Code = "any",
        reason: str = "",
        *,
        approvals: Approvals | None = None,
        imports: Collection[str] | None = None,
        permits: Permits | None = None,
    ) -> None:
        self.code = code
        self.reason = reason
        self._approvals = approvals
        self._imports = imports
        self._permits = Permits(b"") if permits is None else permits

    def check(self, block: Block, may_ship: bool = False) -> str:
        """Check whether a block may run. Returns the hash of its code.

        Args:
            block: the block.
            may_ship: whether a verified key with the right to ship code has signed the block.

        Raises:
            Rejection: the block may not run; the message names the option and the reason.
        """
        if self.code == "none":
            raise _refused(
                "this engine runs no code that is sent to it, only declared interventions "
                f"(--code none: {self.reason}); its operator can start it with --code listed, signed or any"
            )
        try:
            code = code_hash(block)
        except ValueError as error:
            raise Rejection("block", f"the variables of {block.name} could not be decoded: {error}") from error
        if self.code == "listed" and code not in self._approved():
            raise _refused(
                f"this engine runs approved code only (--code listed), and the code of {block.name} is not approved: "
                f"its hash is {code}; the engine's operator approves it by `tracewire approve`"
            )
        if self.code == "signed" and not may_ship:
            raise _refused(
                f"this engine runs only code that is signed by a key with the right 'code' (--code signed), and "
                f"{block.name} is not"
            )
        return code

    def _approved(self) -> Collection[str]:
        if self._approvals is None:
            return ()
        try:
            return self._approvals.hashes()
        except ApprovalsError as error:
            logger.error("the approved blocks cannot be read, so no block runs: %s", error)
            return ()

    def check_imports(self, name: str, modules: Iterable[str]) -> None:
        """Check that the block `name` may import these modules.

        Raises:
            Rejection: it may not import one of them.
        """
        if self._imports is None:
            return
        refused = next((module for module in modules if not allows(module, self._imports)), None)
        if refused is not None:
            raise _refused(
                f"{name} imports {refused!r}, and a block may import here only {', '.join(sorted(self._imports))} "
                "(--code-imports)"
            )

    def permit(self, block: bytes) -> bytes:
        """The stamp with which the workers run an encoded block that `check` has let pass."""
        return self._permits.of(block, limited=self._imports is not None)


def _refused(message: str) -> Rejection:
    return Rejection("block", message, type="CodeRefused")
