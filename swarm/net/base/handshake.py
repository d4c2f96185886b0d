"""What both ends of a connection say before the first frame: that they are of one swarm, and of this protocol.

    acceptor -> dialler   nonce
    dialler  -> acceptor  nonce, proof           each proof is over both nonces and both peer ids, so it is good for
    acceptor -> dialler   proof                  this connection only; whoever dials proves first

Owns that exchange. The peer ids themselves are proven already, by whatever carries the bytes. In an open swarm the
proofs are made with a key that everybody knows: they then only say that both ends speak this protocol, now.
"""

from __future__ import annotations

import asyncio
import hmac
import os
from collections.abc import Callable

from swarm.errors import ConnectionLost, PeerUnreachable, ProtocolError, WrongSwarm
from swarm.net.base.frame_stream import FramedStream
from swarm.types import PeerId

NONCE = 32
PROOF = 32
TIMEOUT_S = 5.0

Authenticator = Callable[..., bytes]
"""(*parts) -> PROOF bytes; `network_secret.SwarmSecret.prove`."""


async def accept_handshake(stream: FramedStream, own: PeerId, authenticator: Authenticator) -> None:
    """The acceptor's part; frames may follow. Raises ProtocolError, ConnectionLost; the stream is then of no use."""
    ours = os.urandom(NONCE)
    try:
        async with asyncio.timeout(TIMEOUT_S):
            await stream.write_delimited(ours)
            answer = await stream.preamble(limit=NONCE + PROOF)
            theirs, proof = answer[:NONCE], answer[NONCE:]
            parts = (ours, theirs, own.encode(), stream.peer.encode())
            if not hmac.compare_digest(proof, authenticator(b"dial", *parts)):
                raise ProtocolError(f"{stream.peer} is not of this swarm")
            await stream.write_delimited(authenticator(b"accept", *parts))
    except TimeoutError:
        raise ProtocolError(f"{stream.peer} said no hello within {TIMEOUT_S:g} s") from None
    stream.begin()


async def dial_handshake(stream: FramedStream, own: PeerId, authenticator: Authenticator) -> None:
    """The dialler's part; frames may follow. Raises PeerUnreachable, WrongSwarm if the peer is of another swarm."""
    ours = os.urandom(NONCE)
    try:
        async with asyncio.timeout(TIMEOUT_S):
            theirs = await stream.preamble(limit=NONCE)
            parts = (theirs, ours, stream.peer.encode(), own.encode())
            await stream.write_delimited(ours + authenticator(b"dial", *parts))
            proof = await stream.preamble(limit=PROOF)
    except (ConnectionLost, ProtocolError):
        raise WrongSwarm(
            f"{stream.peer} did not let us in: the network secret is wrong, or the invitation old"
        ) from None
    except TimeoutError:
        raise PeerUnreachable(f"{stream.peer} said no hello within {TIMEOUT_S:g} s") from None
    if not hmac.compare_digest(proof, authenticator(b"accept", *parts)):
        raise WrongSwarm(f"{stream.peer} could not prove that it is of this swarm")
    stream.begin()
