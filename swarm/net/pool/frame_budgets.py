"""What the frames of others may cost this process: per peer, per address block, and for all strangers together.

Owns the price of each kind of frame and the buckets. A connection whose peer, or whose block, is in debt is read no
further until the debt is paid; TCP's back-pressure then slows the sender. Those who share a bucket get one frame in
turn, so a quiet connection waits for one frame of each busy one. Pure but for the clock that is handed in.

The unit is 50 us of an event loop: a ping, its pong and their system calls.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from swarm.audit_messages import AuditQuery
from swarm.expert_messages import ExpertOutputs, ExpertRows, ExpertsRefused
from swarm.messages import (
    AnyMessage,
    CloseSession,
    DropInFlight,
    KvBlocks,
    KvFetch,
    OpenSession,
    Reroute,
    SessionFailed,
    SessionOpened,
    Step,
    StepResult,
)
from swarm.tap_messages import CarriedTaps, TailDraft, TapRows
from swarm.token_bucket import KeyedBuckets, TokenBucket
from swarm.types import PeerId


@dataclass(frozen=True, slots=True)
class FrameBudgetPolicy:
    """Units a second, and at once: work for many sessions on one connection against the cost of a flood."""

    peer_rate: float = 1000.0  # 5% of a core: 64 sessions of 50 steps a second over one link take 800
    peer_burst: float = 3000.0
    block_rate: float = 1600.0  # control frames of peers that use this node, in one address block
    block_burst: float = 4800.0
    strangers_block_rate: float = 400.0  # ... of peers without a session here: 2% of a core
    strangers_block_burst: float = 1200.0
    strangers_rate: float = 2000.0  # ... in all blocks
    strangers_burst: float = 6000.0
    unasked: float = 5.0  # price of a frame that nobody asked for, on top of its own
    unasked_rate: float = 10.0  # such frames a second that may come of a race; more break the protocol
    unasked_burst: float = 128.0  # a session that ends here with its steps, queries and cancellations on the way
    max_peers: int = 4096  # whose bucket is remembered

    def for_part(self, part: float) -> FrameBudgetPolicy:
        """For a machine whose event loop gets that part of a core. What a race may explain stays the same."""
        names = ("peer", "block", "strangers_block", "strangers")
        fields = [f"{name}_{kind}" for name in names for kind in ("rate", "burst")]
        return replace(self, **{field: part * getattr(self, field) for field in fields})


# What is not listed costs 1.
_PRICES: dict[type[AnyMessage], float] = {
    OpenSession: 10.0,
    Reroute: 4.0,
    CloseSession: 2.0,
    KvFetch: 10.0,
    AuditQuery: 10.0,  # a signature, and up to MAX_AUDITED_ROWS rows
    Step: 0.25,
    StepResult: 0.25,
    SessionOpened: 0.25,
    SessionFailed: 0.25,
    KvBlocks: 0.25,
    TapRows: 0.25,
    ExpertRows: 0.25,
    ExpertOutputs: 0.25,
    ExpertsRefused: 0.25,
    CarriedTaps: 0.25,
    TailDraft: 0.25,
}
_WORK = (
    *(Step, StepResult, SessionOpened, SessionFailed, KvBlocks, TapRows, CarriedTaps, TailDraft),
    *(ExpertRows, ExpertOutputs, ExpertsRefused),
)
_ITEMS_A_UNIT = 600  # integers decoded in 50 us
_BYTES_A_UNIT = 3000  # of a header of such integers


def price(message: AnyMessage) -> float:
    """What it takes to decode and handle a frame, without the computation that it may start."""
    match message:
        case OpenSession():
            items = len(message.history) + len(message.block_hashes)
            items += len(message.sampling.logit_bias) if message.sampling is not None else 0
        case Step():
            items = len(message.tokens) + 2 * len(message.slots) + len(message.commit_slots) + len(message.trace)
        case DropInFlight():
            items = len(message.slots)
        case TailDraft():
            items = 3 * len(message.tokens)
        case CloseSession():
            items = len(message.retain_prefix)
        case _:
            items = 0
    return _PRICES.get(type(message), 1.0) + items / _ITEMS_A_UNIT


def undecodable_price(size: int) -> float:
    """Of a header of so many bytes that turned out to be no message, and of the connection that ends with it."""
    return 10.0 + size / _BYTES_A_UNIT


class FrameBudgets:
    """`clock`: seconds. Connections are named by their peer, its address block and whether it is a stranger."""

    def __init__(self, clock: Callable[[], float], policy: FrameBudgetPolicy = FrameBudgetPolicy()) -> None:
        self.policy = policy
        self._clock = clock
        self._peers = KeyedBuckets(policy.peer_rate, policy.peer_burst, policy.max_peers)
        self._blocks = KeyedBuckets(policy.block_rate, policy.block_burst)
        self._stranger_blocks = KeyedBuckets(policy.strangers_block_rate, policy.strangers_block_burst)
        self._unasked = KeyedBuckets(policy.unasked_rate, policy.unasked_burst, policy.max_peers)
        self._strangers = TokenBucket(policy.strangers_rate, policy.strangers_burst)

    def charge(self, peer: PeerId, block: str, stranger: bool, message: AnyMessage) -> None:
        """A frame was received. Steps and answers count against their peer alone: sessions share the node otherwise."""
        cost, now = price(message), self._clock()
        self._peers.spend(peer, cost, now)
        if not isinstance(message, _WORK):
            self._charge_block(block, stranger, cost, now)

    def charge_more(self, peer: PeerId, block: str, stranger: bool, cost: float) -> None:
        """For a frame that has cost more than its kind usually does, or that nobody asked for."""
        now = self._clock()
        self._peers.spend(peer, cost, now)
        self._charge_block(block, stranger, cost, now)

    def charge_unasked(self, peer: PeerId, block: str, stranger: bool) -> bool:
        """For a frame that nobody asked for. -> whether a race may still explain it."""
        self.charge_more(peer, block, stranger, self.policy.unasked)
        return self._unasked.take(peer, 1.0, self._clock())

    def wait_s(self, peer: PeerId, block: str, stranger: bool) -> float:
        """How long to read no further from a connection; 0 if there is no debt."""
        now = self._clock()
        wait = self._peers.spend(peer, 0.0, now)
        if stranger:
            wait = max(wait, self._stranger_blocks.spend(block, 0.0, now), self._strangers.spend(0.0, now))
        else:
            wait = max(wait, self._blocks.spend(block, 0.0, now))
        return wait if math.isfinite(wait) else 0.0

    def _charge_block(self, block: str, stranger: bool, cost: float, now: float) -> None:
        if stranger:
            self._stranger_blocks.spend(block, cost, now)
            self._strangers.spend(cost, now)
        else:
            self._blocks.spend(block, cost, now)
