"""Hostile nodes: which nodes are hostile, what each does, and what its record claims.

Owns the draw. What their behaviour does to sessions is in `swarm.simulator.attacks`.
"""

from __future__ import annotations

import enum

import msgspec

from swarm.simulator.model.rng import NamedStream


class Behaviour(enum.StrEnum):
    HONEST = "honest"
    BLACK_HOLE = "black hole"  # accepts sessions and answers pings, and never a step
    LIAR = "liar"  # delivers slowly what it advertises as quick, and says in its traces that it was quick
    CHEAT = "cheat"  # answers in time, with wrong tokens
    SYBIL = "sybil"  # a black hole, one of many identities behind one block of addresses


class HostileSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`share` of the nodes is hostile, in equal parts of each of `kinds`; the records of all of them claim their layers
    to be `1 / claim_factor` times as quick as they are, and no load. `absent`: the same nodes are left out instead.

    `audit_rate`: the chance that a token that a cheat had a part in is found wrong; `audit_ms` later its client knows,
    and as the evidence speaks for itself, so does everybody else.
    """

    share: float = 0.0
    kinds: tuple[Behaviour, ...] = (Behaviour.BLACK_HOLE, Behaviour.LIAR, Behaviour.CHEAT, Behaviour.SYBIL)
    claim_factor: float = 0.1
    slow_factor: float = 20.0  # times that a liar takes as long as an honest node of its kind
    stall_ms: float = 7000.0  # how long a client takes to find out that a hop answers pings and computes nothing
    audit_rate: float = 0.034  # 200 tokens suffice with p = .999
    audit_ms: float = 2000.0
    absent: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.share < 1 or not 0 <= self.audit_rate <= 1 or not self.kinds:
            raise ValueError("share lies between 0 and 1, audit_rate too, and kinds has at least one")


def behaviours(spec: HostileSpec, names: list[str], seed: int) -> dict[str, Behaviour]:
    """The hostile ones of `names`, and what they do."""
    drawn = list(names)
    NamedStream(seed, "hostile").shuffle(drawn)
    hostile = drawn[: round(spec.share * len(drawn))]
    return {name: spec.kinds[i % len(spec.kinds)] for i, name in enumerate(hostile)}


def address(name: str, behaviour: Behaviour, seed: int) -> str:
    """A public address; those of Sybils are of one block."""
    stream = NamedStream(seed, "address", name)
    low = f"{stream.below(256)}.{stream.below(256)}"
    block = "45.66" if behaviour is Behaviour.SYBIL else f"{50 + stream.below(40)}.{stream.below(256)}"
    return f"/ip4/{block}.{low}/tcp/4001"
