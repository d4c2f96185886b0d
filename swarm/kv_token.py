"""Who may fetch the keys and values of a session from a node that has left it: the heir that its client named.

The client gives each hop a key when it opens the session there. When a hop leaves, the client gives the replacement a
token made with the leaver's key, for this session and this replacement. The replacement shows it, and as a connection's
peer id is authenticated, nobody else can use it: knowing the session id, as all hops do, is not enough.

Owns how keys and tokens are made. Pure.
"""

from __future__ import annotations

import hashlib
import hmac

from swarm.types import PeerId

KEY_BYTES = 16
TOKEN_BYTES = 16


def hop_key(secret: bytes, hop: PeerId) -> bytes:
    """The key of one hop, from a session's `secret` of 32 random bytes, which stays with its client."""
    return hashlib.blake2b(hop.encode(), digest_size=KEY_BYTES, key=secret, person=b"swarm kv key").digest()


def fetch_token(key: bytes, session: bytes, heir: PeerId) -> bytes:
    """What lets `heir` fetch the session's keys and values from the hop that was given `key`."""
    data = session + heir.encode()
    return hashlib.blake2b(data, digest_size=TOKEN_BYTES, key=key, person=b"swarm kv token").digest()


def allows(key: bytes, session: bytes, heir: PeerId, token: bytes) -> bool:
    """Whether `token` is `heir`'s; never without a key."""
    return len(key) == KEY_BYTES and hmac.compare_digest(fetch_token(key, session, heir), token)
