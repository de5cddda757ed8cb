"""Keys: who signs what is written to the bus, and what each key may do.

A client has a *key file* with its private key. An engine has a *keyring*, a JSON file of public keys with their
tenants, rights and quotas, which it reads again when the file has changed. So an operator adds, rotates and revokes
keys while traffic runs.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Final, Self

import msgspec

from tracewire_bus.wire.signing import (
    MOST_AT_ONCE,
    SIGNATURE_BYTES,
    Envelope,
    Kind,
    encode_envelope,
    is_among,
    joint_digests,
    joint_text,
    signed_text,
    with_signature,
    without_signature,
    wrap,
)

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

__all__ = [
    "QUOTAS",
    "RIGHTS",
    "Key",
    "KeyFileError",
    "Keyring",
    "SignatureRefused",
    "Signer",
    "acting_for",
    "new_key",
    "signed",
    "verify_final",
]

#: What a key may do. `code`: its blocks run under `--code signed`. `read` and `steer` are about the traces of its own
#: tenant, `read-any` and `steer-any` about all. Steering includes pausing and cancelling. `operate`: draining.
#: `delegate`: it may act for other tenants than its own, as a gateway does.
RIGHTS: Final = ("submit", "code", "read", "read-any", "steer", "steer-any", "edit", "operate", "delegate")
#: The quotas that a key can have. `traces`: how many of its tenant's traces one engine runs at once.
QUOTAS: Final = ("traces",)

#: How long a signature is valid, in seconds: of a submission or an edit, and of an order.
_CONTENT_S: Final = 3600
_ORDER_S: Final = 300
_LIFETIMES: Final[dict[str, int]] = {"submit": _CONTENT_S, "edit": _CONTENT_S, "cancel": _CONTENT_S}
#: The longest validity that an engine accepts, and by how much clocks may differ, in seconds.
_MOST_S: Final = 24 * 3600
_SKEW_S: Final = 60


#: The tenant for whom this task acts; `""` for the tenant of its key.
acting_for: ContextVar[str] = ContextVar("acting_for", default="")


class KeyFileError(ValueError):
    """A key file or a keyring cannot be read or written. The message names the file."""


class SignatureRefused(Exception):
    """A signature is not accepted, or its key may not do this. The text says why."""


class Key(msgspec.Struct, forbid_unknown_fields=True):
    """A public key of a keyring.

    Attributes:
        id: names the key.
        public: the key, in hexadecimal.
        tenant: whose key it is. Keys of one tenant share its traces.
        rights: of `RIGHTS`.
        quotas: of `QUOTAS`, by name.
        valid_from, valid_until: when it may be used, in seconds since the epoch; None for no limit.
        revoked: when it was revoked, in seconds since the epoch; None if it was not.
    """

    id: str
    public: str
    tenant: str
    rights: list[str] = []
    quotas: dict[str, int] = {}
    valid_from: float | None = None
    valid_until: float | None = None
    revoked: float | None = None

    def may(self, right: str) -> bool:
        """Whether the key has a right."""
        return right in self.rights

    def demand(self, right: str) -> None:
        """Check that the key has a right.

        Raises:
            SignatureRefused: it has not.
        """
        if right not in self.rights:
            raise SignatureRefused(f"key {self.id!r} of tenant {self.tenant!r} has no right {right!r}")


class _KeyFile(msgspec.Struct):
    id: str
    private: str
    tenant: str = ""


class _KeyringFile(msgspec.Struct):
    keys: list[Key] = []


class Signer:
    """Signs what one client, or one engine, writes."""

    def __init__(self, id: str, private: bytes) -> None:
        self.id = id
        self._key = _private(private)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """The signer of a key file.

        Raises:
            KeyFileError: the file cannot be read, or is no key file.
        """
        try:
            found = msgspec.json.decode(Path(path).read_bytes(), type=_KeyFile)
            return cls(found.id, bytes.fromhex(found.private))
        except OSError as error:
            raise KeyFileError(f"{os.fspath(path)}: {error.strerror}") from error
        except ValueError:
            # The text of such an error may repeat a part of the key.
            raise KeyFileError(f"{os.fspath(path)} is no key file, as `tracewire keys new` writes one") from None

    @property
    def public(self) -> str:
        """The public key, in hexadecimal."""
        return self._key.public_key().public_bytes_raw().hex()

    def __repr__(self) -> str:
        return f"<Signer {self.id}>"

    def unsigned(self, kind: Kind, prefix: str, model: str, trace: str, content: bytes) -> tuple[Envelope, bytes]:
        """The envelope of a message without its signature, and the text to sign."""
        expires = int(time.time()) + _LIFETIMES.get(kind, _ORDER_S)
        bare = Envelope(self.id, expires, secrets.token_bytes(16), tenant=acting_for.get())
        return bare, signed_text(kind, prefix, model, trace, bare, content)

    def sign(self, texts: Sequence[bytes]) -> tuple[bytes, bytes]:
        """Sign up to `MOST_AT_ONCE` texts at once. Returns the signature, and the digests that belong to it."""
        if len(texts) == 1:
            return self._key.sign(texts[0]), b""
        digests = joint_digests(texts)
        return self._key.sign(joint_text(digests)), digests

    def _envelope(self, kind: Kind, prefix: str, model: str, trace: str, content: bytes) -> Envelope:
        bare, text = self.unsigned(kind, prefix, model, trace, content)
        return signed(bare, *self.sign([text]))

    def wrapped(self, kind: Kind, prefix: str, model: str, trace: str, content: bytes) -> bytes:
        """Signed content: the content behind its envelope."""
        return wrap(self._envelope(kind, prefix, model, trace, content), content)

    def proof(self, kind: Kind, prefix: str, trace: str, content: bytes) -> bytes:
        """The proof of an order, or of a change of live parameters."""
        return encode_envelope(self._envelope(kind, prefix, "", trace, content))

    def sign_finals(self, prefix: str, finals: Sequence[tuple[str, bytes]]) -> list[bytes]:
        """Sign the encoded finals of these traces. Returns each with its signature in it."""
        made: list[bytes] = []
        for start in range(0, len(finals), MOST_AT_ONCE):
            some = finals[start : start + MOST_AT_ONCE]
            signature = b"".join(self.sign([_final_text(prefix, *one) for one in some]))
            made += [with_signature(data, signature) for _, data in some]
        return made


def signed(bare: Envelope, signature: bytes, digests: bytes) -> Envelope:
    """An envelope with its signature."""
    return Envelope(bare.key, bare.expires, bare.nonce, signature, bare.tenant, digests)


_FINAL: Final = Envelope("", 0, b"")


def verify_final(public: Iterable[str], prefix: str, trace: str, data: bytes, signature: bytes) -> bool:
    """Whether one of these engines has signed an encoded final. `data` has the signature in it."""
    bare = without_signature(data, signature)
    if bare is None:
        return False
    text, own = _final_text(prefix, trace, bare), signature[:SIGNATURE_BYTES]
    return any(_verifies(one, own, text, signature[SIGNATURE_BYTES:]) for one in public)


def _final_text(prefix: str, trace: str, data: bytes) -> bytes:
    return signed_text("final", prefix, "", trace, _FINAL, data)


class Keyring:
    """The public keys of one file, which is read again when it has changed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._name = os.fspath(path)
        self._seen: tuple[int, int, int] | None = None
        self._keys: dict[str, Key] = {}
        #: Whether `get` takes the keys as they were when the file was looked at last.
        self.held = False
        #: Is called with the error if a changed file cannot be read. The keys before stay.
        self.on_error: Callable[[KeyFileError], None] = lambda error: None

    def listed(self) -> list[Key]:
        """All keys.

        Raises:
            KeyFileError: the file cannot be read, or a key in it is malformed.
        """
        self._look()
        return list(self._keys.values())

    def _look(self) -> None:
        """Read the file if it has changed."""
        try:
            found = os.stat(self._name)
        except FileNotFoundError:
            found = None
        except OSError as error:
            raise KeyFileError(f"{self.path}: {error.strerror}") from error
        state = None if found is None else (found.st_mtime_ns, found.st_size, found.st_ino)
        if state != self._seen or state is None:
            self._keys = {one.id: one for one in _read(self.path)} if found is not None else {}
            self._seen = state

    @property
    def state(self) -> tuple[int, int, int] | None:
        """Differs whenever the file has changed; None while it is missing, or cannot be read."""
        self.get("")
        return self._seen

    def get(self, id: str) -> Key | None:
        """The key of this id as the file has it now; None if there is none. A file that cannot be read has no keys."""
        try:
            if not self.held:
                self._look()
        except KeyFileError as error:
            self.on_error(error)
            self._keys, self._seen = {}, None
        return self._keys.get(id)

    def verify(
        self,
        envelope: Envelope,
        kind: Kind,
        prefix: str,
        model: str,
        trace: str,
        content: bytes,
        *,
        at: float | None = None,
        timely: bool = True,
    ) -> Key:
        """Verify a signature. Returns its key.

        Args:
            envelope: the signature.
            kind, prefix, model, trace: what the reader knows that it must be of.
            content: what it must be of; nobody has decoded it yet.
            at: when the content came, in seconds since the epoch; by default now.
            timely: whether a signature that had expired at that time is refused.

        Raises:
            SignatureRefused: the key is unknown, revoked or not valid now, or the signature is wrong or had expired.
        """
        key = self._valid(envelope.key)
        came = time.time() if at is None else at
        return _accepted(
            key, envelope, signed_text(kind, prefix, model, trace, envelope, content), came if timely else None
        )

    def verify_stored(
        self, envelope: Envelope, kind: Kind, prefix: str, model: str, trace: str, content: bytes, *, at: float
    ) -> Key:
        """Verify the signature of what is stored since this time, by whether its key was valid then. Returns the key.

        The rest is as with `verify`.

        Raises:
            SignatureRefused: the key is unknown, revoked or was not valid then, or the signature is wrong or had
                expired then.
        """
        key = self._valid(envelope.key, at)
        return _accepted(key, envelope, signed_text(kind, prefix, model, trace, envelope, content), at)

    def _valid(self, id: str, at: float | None = None) -> Key:
        """The key of this id, which was valid at this time, by default now, and is not revoked."""
        key = self.get(id)
        if key is None:
            raise SignatureRefused(f"no key {id[:64]!r} is known here")
        if key.revoked is not None:
            raise SignatureRefused(f"key {key.id!r} was revoked")
        then = time.time() if at is None else at
        if not (key.valid_from or 0) <= then <= (then if key.valid_until is None else key.valid_until):
            when = "is not valid at this time" if at is None else "was not valid when this came"
            raise SignatureRefused(f"key {key.id!r} {when}")
        return key

    # --- changes ------------------------------------------------------------------------------------------------------

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Hold the keyring from reading it to writing it. Other processes that change it wait meanwhile.

        The lock is of a file beside the keyring, since each `write` puts another file in the keyring's place. It is
        not held twice: `add` takes it.

        Raises:
            KeyFileError: the file cannot be locked.
        """
        lock = _locked(self.path.with_name(f".{self.path.name}.lock"))
        try:
            yield
        finally:
            os.close(lock)

    def add(self, key: Key) -> None:
        """Add a key, and write the file.

        Raises:
            KeyFileError: there is a key of this id, or the file cannot be read or written.
        """
        with self.changing():
            keys = self.listed()
            if any(one.id == key.id for one in keys):
                raise KeyFileError(f"{self.path} has a key {key.id!r} already")
            self.write([*keys, key])

    def write(self, keys: list[Key]) -> None:
        """Write the file with these keys. A caller that has read them from it does both within `changing`.

        Raises:
            KeyFileError: a key is malformed, or the file cannot be written.
        """
        for key in keys:
            _check(key, self.path)
        _write(self.path, msgspec.json.encode(_KeyringFile(keys)), 0o644)


def _accepted(key: Key, envelope: Envelope, text: bytes, came: float | None) -> Key:
    """The key for the tenant for whom it acts, if the signature is its own and had not expired when the text came.

    With `came` None, a signature may have expired.
    """
    if came is not None and envelope.expires < came - _SKEW_S:
        raise SignatureRefused(f"the signature of key {key.id!r} had expired {came - envelope.expires:.0f} s before")
    if envelope.expires > time.time() + _MOST_S + _SKEW_S:
        raise SignatureRefused(f"the signature of key {key.id!r} is valid for more than {_MOST_S} s")
    if not _verifies(key.public, envelope.signature, text, envelope.digests):
        raise SignatureRefused(
            f"the signature is not of key {key.id!r}, or what it signed has been altered, or is of another trace"
        )
    if envelope.tenant in ("", key.tenant):
        return key
    key.demand("delegate")
    return msgspec.structs.replace(key, tenant=envelope.tenant)


def new_key(path: Path, id: str, tenant: str, rights: list[str], quotas: dict[str, int] | None = None) -> Key:
    """Make a key, write its key file, which only this user can read, and return its public part.

    Raises:
        KeyFileError: the file exists, or cannot be written.
    """
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    private = Ed25519PrivateKey.generate()
    key = Key(id, private.public_key().public_bytes_raw().hex(), tenant, rights, quotas or {})
    _check(key, path)
    content = _KeyFile(id, private.private_bytes_raw().hex(), tenant)
    if path.exists():
        raise KeyFileError(f"{path} exists already")
    _write(path, msgspec.json.encode(content), 0o600)
    return key


def _locked(path: Path) -> int:
    """The descriptor of a file that this process alone has locked, until it closes it."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        except OSError:
            os.close(descriptor)
            raise
    except OSError as error:
        raise KeyFileError(f"{path}: {error.strerror}") from error
    return descriptor


def _write(path: Path, data: bytes, mode: int) -> None:
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, mode)
        with open(descriptor, "wb") as file:
            file.write(msgspec.json.format(data, indent=1) + b"\n")
        os.replace(beside, path)
    except OSError as error:
        raise KeyFileError(f"{path}: {error.strerror}") from error


def _read(path: Path) -> list[Key]:
    try:
        keys = msgspec.json.decode(path.read_bytes(), type=_KeyringFile).keys
    except (OSError, ValueError) as error:
        raise KeyFileError(f"{path}: {error}") from error
    for key in keys:
        _check(key, path)
    if len({one.id for one in keys}) != len(keys):
        raise KeyFileError(f"{path}: two keys have one id")
    return keys


def _check(key: Key, path: Path) -> None:
    if not 0 < len(key.id) <= 64 or not key.id.isprintable():
        raise KeyFileError(f"{path}: expected a key's id of 1 to 64 printable characters, got {key.id!r}")
    if not 0 < len(key.tenant) <= 64 or not key.tenant.isprintable():
        raise KeyFileError(f"{path}: key {key.id}: expected a tenant of 1 to 64 printable characters")
    if unknown := sorted(set(key.rights) - set(RIGHTS)):
        raise KeyFileError(f"{path}: key {key.id}: unknown rights {unknown} (there are: {', '.join(RIGHTS)})")
    if unknown := sorted(set(key.quotas) - set(QUOTAS)):
        raise KeyFileError(f"{path}: key {key.id}: unknown quotas {unknown} (there are: {', '.join(QUOTAS)})")
    try:
        _public(key.public)
    except ValueError:
        raise KeyFileError(f"{path}: key {key.id}: expected a public key of 64 hexadecimal digits") from None


def _private(raw: bytes) -> Ed25519PrivateKey:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    return Ed25519PrivateKey.from_private_bytes(raw)


#: How many signatures of several messages a process remembers as verified.
_REMEMBERED: Final = 1024

_known: dict[str, Ed25519PublicKey] = {}


def _public(text: str) -> Ed25519PublicKey:
    found = _known.get(text)
    if found is None:
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

        if len(_known) > 4096:
            _known.clear()
        found = _known[text] = Ed25519PublicKey.from_public_bytes(bytes.fromhex(text))
    return found


#: By signature, the key and the digests of those signatures of several messages that were verified last: such a
#: signature comes with each of its messages.
_verified: dict[bytes, tuple[str, bytes]] = {}


def _verifies(public: str, signature: bytes, text: bytes, digests: bytes) -> bool:
    if not digests:
        return _is_of(public, signature, text)
    if not is_among(text, digests):
        return False
    if _verified.get(signature) == (public, digests):
        return True
    if not _is_of(public, signature, joint_text(digests)):
        return False
    if len(_verified) >= _REMEMBERED:
        _verified.clear()
    _verified[signature] = public, digests
    return True


def _is_of(public: str, signature: bytes, text: bytes) -> bool:
    from cryptography.exceptions import InvalidSignature

    try:
        _public(public).verify(signature, text)
    except (InvalidSignature, ValueError):
        return False
    return True
