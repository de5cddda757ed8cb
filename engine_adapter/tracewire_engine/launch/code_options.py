"""Whom an engine obeys, by its options: whose blocks it runs (`--code`, `--approved`, `--code-imports`) and where
(`--blocks`), and whose signatures it accepts (`--keyring`, `--unsigned`, `--engine-key`).
"""

from __future__ import annotations

import argparse
import secrets
from typing import TYPE_CHECKING

from tracewire_bus.domain.approvals import Approvals, ApprovalsError
from tracewire_bus.domain.code_identity import DEFAULT_IMPORTS
from tracewire_bus.domain.identity import KeyFileError, Keyring, Signer
from tracewire_bus.store.audit import MOST
from tracewire_engine.protocol.permits import Permits

from .private_bus import why_shared

if TYPE_CHECKING:
    from tracewire_engine.adapter.code_policy import CodePolicy
    from tracewire_engine.adapter.gate import Identity

__all__ = ["audit_entries", "check_code", "code_policy", "default_blocks", "identity_of", "limited_imports"]


def check_code(options: argparse.Namespace) -> None:
    """Check the options, before the model is loaded, and make the key of permits.

    Raises:
        ValueError: one of them lacks another, or a file cannot be read.
    """
    if options.code == "listed" and options.approved is None:
        raise ValueError("--code listed needs --approved FILE: the blocks that tracewire approve has approved")
    if options.approved is not None:
        if options.code != "listed":
            raise ValueError("--approved needs --code listed")
        try:
            Approvals(options.approved).hashes()
        except ApprovalsError as error:
            raise ValueError(f"--approved: {error}") from error
    for option in ("--code signed", "--unsigned refuse"):
        name, value = option[2:].split(" ")
        if options.keyring is None and getattr(options, name) == value:
            raise ValueError(f"{option} needs --keyring FILE: the public keys of clients (tracewire keys new)")
    if options.keyring is not None:
        try:
            if not Keyring(options.keyring).listed():
                raise KeyFileError(f"{options.keyring} has no key (tracewire keys new makes one)")
        except KeyFileError as error:
            raise ValueError(f"--keyring: {error}") from error
    if options.engine_key is not None:
        _signer(options)
    options.permit_key = secrets.token_bytes(32)


def _signer(options: argparse.Namespace) -> Signer:
    try:
        return Signer.load(options.engine_key)
    except KeyFileError as error:
        raise ValueError(f"--engine-key: {error}") from error


def identity_of(options: argparse.Namespace) -> Identity:
    """Whose signatures the engine accepts. Unsigned content is accepted by default where nothing can be verified."""
    from tracewire_engine.adapter.gate import Identity

    unsigned, reason = options.unsigned, "as the operator has set it"
    if unsigned is None:
        shared = why_shared(options.url)
        unsigned = "refuse" if shared and options.keyring is not None else "accept"
        reason = f"the default with a keyring, since {shared}" if unsigned == "refuse" else "the default"
    keyring = None if options.keyring is None else Keyring(options.keyring)
    signer = None if options.engine_key is None else _signer(options)
    return Identity(keyring, unsigned == "accept", reason, signer)


def limited_imports(options: argparse.Namespace) -> frozenset[str]:
    """The packages that blocks may import where that is limited."""
    given: frozenset[str] | None = getattr(options, "code_imports", None)
    return DEFAULT_IMPORTS if given is None else given


def code_policy(options: argparse.Namespace) -> CodePolicy:
    """The policy of the options. Without `--code` it is `any` if nobody else can use the Redis now, else `none`."""
    from tracewire_engine.adapter.code_policy import CodePolicy

    code, reason = options.code, "as the operator has set it"
    if code is None:
        shared = why_shared(options.url)
        code = "none" if shared else "any"
        reason = f"the default, since {shared}" if shared else "the default, since the Redis is private to this user"
    imports = getattr(options, "code_imports", None if code == "any" else DEFAULT_IMPORTS)
    approvals = None if options.approved is None else Approvals(options.approved)
    return CodePolicy(code, reason, approvals=approvals, imports=imports, permits=Permits(options.permit_key))


def default_blocks(options: argparse.Namespace) -> tuple[str, str]:
    """Where blocks run without `--blocks`, `"inline"` or `"host"`, and why."""
    shared = why_shared(options.url)
    if not shared:
        return "inline", "the default, since the Redis is private to this user"
    if code_policy(options).code == "none":
        return "inline", "the default, since no block runs"
    if options.check_collect:
        return "inline", f"since --check-collect allows no other, although {shared}"
    return "host", f"the default, since {shared}"


def audit_entries(options: argparse.Namespace) -> int:
    """How many entries the audit trail keeps; 0 without one."""
    if options.audit is not None:
        return int(options.audit)
    return MOST if options.keyring is not None or code_policy(options).code != "any" else 0
