"""The secret of a private swarm, and what is derived from it.

Owns the keys: strangers can neither find nor read nor forge the records of a private swarm, nor complete the hello that
comes before every connection's frames (`hello`). Members hold one secret between them, so a member can do all that
another can, except pass for it: peer ids stay proven. Knows neither the DHT nor sockets.
"""

from __future__ import annotations

import hashlib
import hmac
import os

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

from swarm.errors import ProtocolError, UsageError

MIN_SECRET = 12  # characters; what `swarm-node invite` makes up has 22
NONCE = 12
OVERHEAD = NONCE + 16  # bytes that sealing adds
# scrypt makes guessing a secret that people chose dear: 16 MB and some 50 ms a guess. One salt for all, as there is
# nothing that every member knows before it has the keys.
_SCRYPT = {"n": 1 << 14, "r": 8, "p": 1, "dklen": 96}


class SwarmSecret:
    """The keys that a secret stands for. Takes tens of milliseconds to make."""

    def __init__(self, secret: str) -> None:
        """Raises UsageError if it is too short to be one."""
        if len(secret) < MIN_SECRET:
            raise UsageError(f"a network secret has at least {MIN_SECRET} characters; `swarm-node invite` makes one up")
        keys = hashlib.scrypt(secret.encode(), salt=b"swarm network secret 1", **_SCRYPT)
        self._hello, self._names, self._values = keys[:32], keys[32:64], ChaCha20Poly1305(keys[64:])

    def __repr__(self) -> str:
        return "NetworkSecret(...)"

    def authenticate(self, *parts: bytes) -> bytes:
        """-> 32 bytes that only members can compute from `parts`."""
        return _mac(self._hello, *parts)

    def name(self, key: str) -> str:
        """What a DHT key is called in this swarm; it tells strangers nothing."""
        return f"swarm/private/{_mac(self._names, key.encode()).hex()}"

    def seal(self, data: bytes, about: bytes) -> bytes:
        """Encrypt and authenticate `data`, bound to `about`: whose it is and what for."""
        nonce = os.urandom(NONCE)
        return nonce + self._values.encrypt(nonce, data, about)

    def unseal(self, sealed: bytes, about: bytes) -> bytes:
        """Raises ProtocolError if no member sealed it, or for something else."""
        try:
            return self._values.decrypt(sealed[:NONCE], sealed[NONCE:], about)
        except (InvalidTag, ValueError):
            raise ProtocolError("not sealed by a member of this swarm") from None


def public_authenticator(*parts: bytes) -> bytes:
    """What `SwarmSecret.prove` is in an open swarm: anybody can compute it."""
    return _mac(bytes(32), *parts)


def _mac(key: bytes, *parts: bytes) -> bytes:
    """HMAC-SHA256 over the parts, each with its length, so that no two lists of parts are alike."""
    mac = hmac.new(key, digestmod=hashlib.sha256)
    for part in parts:
        mac.update(len(part).to_bytes(4, "big") + part)
    return mac.digest()
