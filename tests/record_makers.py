"""Signed records for tests, of made-up nodes."""

from __future__ import annotations

from functools import cache

from swarm import records
from swarm.net.security.identity import Identity
from swarm.types import LayerSpan, NodeProfile, NodeState

MODEL = "tiny"
LAYERS = 6
TTL_S = 12.0


@cache
def identity(number: int) -> Identity:
    return Identity.from_seed(number.to_bytes(32, "big"))


def record_at(
    number: int,
    at: float,
    *,
    model: str = MODEL,
    layers: int = LAYERS,
    ttl_s: float = TTL_S,
    sessions: int = 0,
    proof: bytes = b"",
) -> bytes:
    """The record that node `number` publishes at that time."""
    node = identity(number)
    profile = NodeProfile(
        node.peer,
        f"n{number}",
        NodeState.SERVING,
        "fp32",
        "h",
        layers,
        LayerSpan(0, layers),
        (f"/memory/{node.peer}/p2p/{node.peer}",),
        sessions=sessions,
        published_at=at,
        identity_proof=proof,
    )
    return records.encode(profile, model, layers, ttl_s, node.sign)[0]


def goodbye_at(number: int, at: float) -> bytes:
    node = identity(number)
    return records.encode_goodbye(node.peer, MODEL, "h", LAYERS, at, TTL_S, node.sign)[0]


def forged(data: bytes) -> bytes:
    """The same with another signature."""
    return data[:-1] + bytes([data[-1] ^ 1])
