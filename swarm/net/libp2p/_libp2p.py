"""The only place that imports py-libp2p: it takes seconds and 75 MB, and logs what untrusted peers do as errors.

Owns the list of its parts that we use. Import it only where `--libp2p python` is really used.
"""

from __future__ import annotations

import logging
import warnings

import swarm.net.libp2p._hivemind  # noqa: F401  # settles whose `crypto.pb` both are to use

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from libp2p import new_host
    from libp2p.crypto.ed25519 import Ed25519PrivateKey
    from libp2p.crypto.keys import KeyPair
    from libp2p.crypto.x25519 import create_new_key_pair as new_noise_key
    from libp2p.exceptions import BaseLibp2pError
    from libp2p.kad_dht.kad_dht import DHTMode, KadDHT
    from libp2p.network.exceptions import RateLimitError
    from libp2p.network.stream.exceptions import StreamEOF
    from libp2p.peer.id import ID
    from libp2p.peer.peerinfo import PeerInfo
    from libp2p.security.noise.transport import PROTOCOL_ID as NOISE
    from libp2p.security.noise.transport import Transport as Noise
    from libp2p.stream_muxer.yamux.yamux import PROTOCOL_ID as YAMUX
    from libp2p.stream_muxer.yamux.yamux import Yamux
    from libp2p.tools.anyio_service import background_trio_service

logging.getLogger("libp2p").setLevel(logging.CRITICAL)

__all__ = [
    "ID",
    "NOISE",
    "YAMUX",
    "BaseLibp2pError",
    "DHTMode",
    "Ed25519PrivateKey",
    "KadDHT",
    "KeyPair",
    "Noise",
    "PeerInfo",
    "RateLimitError",
    "StreamEOF",
    "Yamux",
    "background_trio_service",
    "new_host",
    "new_noise_key",
]
