"""One Ed25519 key, which is one peer id, kept on disk.

Owns the key's file and the arithmetic of libp2p peer ids: for Ed25519 the id is the identity multihash of the public
key's protobuf, so it embeds the key and the id is enough to check a signature. Implemented here because
importing py-libp2p for it costs a second and 75 MB; tests compare the results with py-libp2p's. Knows no network.

The file holds libp2p's `PrivateKey` protobuf with the 64-byte `seed || public` form, as the p2p daemon wants it.
"""

from __future__ import annotations

import functools
import os
import stat
import tempfile
from pathlib import Path

import base58
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from swarm.errors import IdentityError, ProtocolError
from swarm.types import PeerId

# Protobuf: field 1 (key type) = 1 (Ed25519); field 2 (data), its length.
_PRIVATE_PREFIX = bytes([0x08, 0x01, 0x12, 0x40])
_PUBLIC_PREFIX = bytes([0x08, 0x01, 0x12, 0x20])
_MULTIHASH_PREFIX = bytes([0x00, len(_PUBLIC_PREFIX) + 32])  # the identity "hash", its length


class Identity:
    """A private key and the peer id it stands for."""

    def __init__(self, key: Ed25519PrivateKey) -> None:
        self._key = key
        self._public = key.public_key().public_bytes_raw()
        self.peer: PeerId = base58.b58encode(_MULTIHASH_PREFIX + _PUBLIC_PREFIX + self._public).decode()

    def __repr__(self) -> str:
        return f"Identity({self.peer})"

    @classmethod
    def generate(cls) -> Identity:
        return cls(Ed25519PrivateKey.generate())

    @classmethod
    def from_seed(cls, seed: bytes) -> Identity:
        """The same identity for the same 32 bytes, for tests and simulations."""
        return cls(Ed25519PrivateKey.from_private_bytes(seed))

    @classmethod
    def load(cls, path: Path) -> Identity:
        """Raises IdentityError, naming the file, if it cannot be read or is not a key; it is left as it is."""
        try:
            data = path.read_bytes()
            mode = stat.S_IMODE(path.stat().st_mode)
            if mode & 0o077:
                path.chmod(0o600)
        except OSError as error:
            raise IdentityError(f"cannot read the identity {path}: {error.strerror}") from None
        seed, public = data[len(_PRIVATE_PREFIX) :][:32], data[len(_PRIVATE_PREFIX) + 32 :]
        if not data.startswith(_PRIVATE_PREFIX) or len(public) != 32:
            raise _corrupt(path)
        self = cls.from_seed(seed)
        if self._public != public:
            raise _corrupt(path)
        return self

    @classmethod
    def load_or_create(cls, path: Path) -> Identity:
        """The identity kept at `path`, made on first use. An existing file is never replaced. Raises IdentityError."""
        if path.exists():
            return cls.load(path)
        self = cls.generate()
        try:
            self.save(path)
        except FileExistsError:  # another process was quicker
            return cls.load(path)
        return self

    def save(self, path: Path) -> None:
        """Write a new file of mode 0600, whole or not at all. Raises FileExistsError, IdentityError."""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")  # mkstemp: mode 0600
        except OSError as error:
            raise IdentityError(f"cannot write the identity {path}: {error.strerror}") from None
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(self.to_bytes())
                file.flush()
                os.fsync(file.fileno())
            os.link(temporary, path)  # unlike a rename, refuses to replace
        except FileExistsError:
            raise
        except OSError as error:
            raise IdentityError(f"cannot write the identity {path}: {error.strerror}") from None
        finally:
            os.unlink(temporary)

    def to_bytes(self) -> bytes:
        """The file's content."""
        return _PRIVATE_PREFIX + self._key.private_bytes_raw() + self._public

    def sign(self, data: bytes) -> bytes:
        """-> 64 bytes."""
        return self._key.sign(data)


@functools.lru_cache(maxsize=1024)
def public_key(peer: PeerId) -> Ed25519PublicKey:
    """The key that a peer id embeds. Raises ProtocolError if it is not the id of an Ed25519 key."""
    prefix = _MULTIHASH_PREFIX + _PUBLIC_PREFIX
    if len(peer) > 64:
        raise ProtocolError("not a peer id: too long")
    try:
        raw = base58.b58decode(peer)
    except ValueError:
        raise ProtocolError(f"not a peer id: {peer!r}") from None
    if not raw.startswith(prefix) or len(raw) != len(prefix) + 32:
        raise ProtocolError(f"not the peer id of an Ed25519 key: {peer!r}")
    return Ed25519PublicKey.from_public_bytes(raw[len(prefix) :])


def signed_by(peer: PeerId, data: bytes, signature: bytes) -> bool:
    """Whether `peer`'s key signed `data`."""
    try:
        public_key(peer).verify(signature, data)
    except (InvalidSignature, ProtocolError):
        return False
    return True


@functools.lru_cache(maxsize=2048)
def verify(peer: PeerId, data: bytes, signature: bytes) -> bool:
    """As `signed_by`, cached: what is read again and again is mostly the same."""
    return signed_by(peer, data, signature)


def _corrupt(path: Path) -> IdentityError:
    return IdentityError(
        f"the identity file {path} is damaged or not an Ed25519 key; restore it from a backup, "
        "or move it away to get a new one"
    )
