"""The handshake before the first frame: both ends prove that they are members of one swarm, and use this protocol.

    acceptor -> dialler   nonce
    dialler  -> acceptor  nonce, proof           each proof is a MAC over both nonces and both peer ids, so it is valid
    acceptor -> dialler   proof                  for this connection only; the dialler proves first

Owns that exchange. The peer ids are already authenticated by the layer below (TLS or libp2p). In an open swarm the key
is public: the proofs then only show that both ends use this protocol, now.
"""

from __future__ import annotations

import asyncio
import hmac
import os
from collections.abc import Callable

from swarm.errors import ConnectionLost, PeerUnreachable, ProtocolError, WrongSwarm
from swarm.net.base.frame_stream import FramedStream
from swarm.types import PeerId

NONCE = 32  # bytes
PROOF = 32  # bytes

Authenticator = Callable[..., bytes]
"""(*parts) -> PROOF bytes; `SwarmSecret.authenticate` or `swarm_secret.public_authenticator`."""


async def accept_handshake(stream: FramedStream, own: PeerId, authenticator: Authenticator, timeout_s: float) -> None:
    """The acceptor's part; frames may follow. Raises ProtocolError, ConnectionLost; the stream is then unusable."""
    ours = os.urandom(NONCE)
    try:
        async with asyncio.timeout(timeout_s):
            await stream.write_delimited(ours)
            answer = await stream.preamble(limit=NONCE + PROOF)
            theirs, proof = answer[:NONCE], answer[NONCE:]
            parts = (ours, theirs, own.encode(), stream.peer.encode())
            if not hmac.compare_digest(proof, authenticator(b"dial", *parts)):
                raise ProtocolError(f"{stream.peer} is not of this swarm")
            await stream.write_delimited(authenticator(b"accept", *parts))
    except TimeoutError:
        raise ProtocolError(f"{stream.peer} did not complete the handshake within {timeout_s:g} s") from None
    stream.begin()


async def dial_handshake(stream: FramedStream, own: PeerId, authenticator: Authenticator, timeout_s: float) -> None:
    """The dialler's part; frames may follow. Raises PeerUnreachable, WrongSwarm if the peer is of another swarm."""
    ours = os.urandom(NONCE)
    try:
        async with asyncio.timeout(timeout_s):
            theirs = await stream.preamble(limit=NONCE)
            parts = (theirs, ours, stream.peer.encode(), own.encode())
            await stream.write_delimited(ours + authenticator(b"dial", *parts))
            proof = await stream.preamble(limit=PROOF)
    except (ConnectionLost, ProtocolError):
        raise WrongSwarm(
            f"{stream.peer} did not let us in: the network secret is wrong, or the invitation old"
        ) from None
    except TimeoutError:
        raise PeerUnreachable(f"{stream.peer} did not complete the handshake within {timeout_s:g} s") from None
    if not hmac.compare_digest(proof, authenticator(b"accept", *parts)):
        raise WrongSwarm(f"{stream.peer} could not prove that it is of this swarm")
    stream.begin()
