"""Which stranger is the first of a chain: one known for long rather than one that has just come, and another one for
each conversation.

The first stranger gets states that have passed the fewest layers, or the token ids themselves. Owns the order of
preferences and what they may cost; they are wishes, so that a small swarm answers all the same. Pure: evidence, time
and search are handed in.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeVar

from swarm.errors import NoRoute
from swarm.planner.routing.repair import Repair
from swarm.planner.routing.rules import BLOCK, ChainRules, mark
from swarm.planner.trust.belief import is_proven
from swarm.planner.trust.evidence import UNKNOWN, PeerEvidence
from swarm.planner.trust.trial import TrustedChain
from swarm.types import Chain, NodeProfile, PeerId

DAY_S = 86400.0
_Found = TypeVar("_Found", TrustedChain, Repair)


@dataclass(frozen=True, slots=True)
class FirstHopPolicy:
    """More days leave fewer to choose from; a longer detour keeps the wishes more often, and costs time."""

    long_known_s: tuple[float, ...] = (7 * DAY_S, DAY_S, 0.0)  # classes of proven peers, the first with a chain counts
    max_detour: float = 1.5  # times as slow as without the wishes


POLICY = FirstHopPolicy()


@dataclass(frozen=True, slots=True)
class FirstHopWishes:
    """`known`: prefer peers known for long. `stay`: the first stranger of this conversation so far, "" for none.
    `change`: that of the conversation before."""

    known: bool = False
    stay: PeerId = ""
    change: PeerId = ""

    def excluded(
        self, peers: Collection[PeerId], evidence: Mapping[PeerId, PeerEvidence], now: float
    ) -> Iterator[frozenset[PeerId]]:
        """Who of `peers` is not to be the first, the dearest wish first. `now`: seconds since the epoch."""
        everybody = frozenset(peers)
        if self.stay in everybody:
            yield everybody - {self.stay}
        of_age: list[frozenset[PeerId]] = []
        if self.known:
            for age_s in POLICY.long_known_s:
                long = frozenset(peer for peer in everybody if known_s(evidence.get(peer, UNKNOWN), now) >= age_s)
                if long and long not in of_age:
                    of_age.append(long)
        for some in (*of_age, everybody):
            if self.change in some and len(some) > 1:
                yield (everybody - some) | {self.change}
            if some != everybody:
                yield everybody - some


def known_s(evidence: PeerEvidence, now: float) -> float:
    """For how long a peer has been known that has served well, seconds; negative for one that never has."""
    return max(0.0, now - evidence.first_at) if is_proven(evidence) else -1.0


def choose_first_hop(
    wishes: FirstHopWishes,
    rules: ChainRules,
    nodes: Iterable[NodeProfile],
    evidence: Mapping[PeerId, PeerEvidence],
    now: float,
    solve: Callable[[frozenset[PeerId]], _Found],
    policy: FirstHopPolicy = POLICY,
) -> _Found:
    """The chain that fulfils the dearest wish at a bearable price. `solve(not_first)`: the best chain that no stranger
    of `not_first` begins. Raises NoRoute where even `solve(())` finds none."""
    free = solve(frozenset())
    strangers = [node.peer for node in nodes if node.peer not in rules.ends]
    for not_first in wishes.excluded(strangers, evidence, now):
        try:
            found = solve(not_first)
        except NoRoute:
            continue
        if found.chain.cost_ms <= policy.max_detour * free.chain.cost_ms:
            return found
    return free


def explain_rules(
    rules: ChainRules,
    chain: Chain,
    nodes: Iterable[NodeProfile],
    evidence: Mapping[PeerId, PeerEvidence] | None,
    now: float,
) -> list[str]:
    """Which rules `chain` keeps, a sentence each, for people. `evidence`: None where nobody known is preferred."""
    said = []
    if rules.ends:
        ends = sorted({chain.peers[0], chain.peers[-1]})
        said.append(f"token ids go to trusted nodes alone (--trust): {', '.join(peer[-6:] for peer in ends)}")
    for kind in sorted(rules.apart):
        told = {node.peer: mark(kind, node) for node in nodes}
        silent = [p[-6:] for p in chain.peers if p not in rules.ends and not told.get(p)]
        doubt = f"; unknown of {', '.join(silent)}" if silent else ""
        what = "address block" if kind == BLOCK else "region"
        said.append(f"no two neighbouring hops claim the same {what} (--apart){doubt}")
    first = rules.first_stranger(chain)
    if evidence is not None and first is not None:
        age_s = known_s(evidence.get(first, UNKNOWN), now)
        known = f"has served this client for {age_s / DAY_S:.1f} days" if age_s >= 0 else "has not proven itself yet"
        said.append(f"{first[-6:]}, the first stranger, {known} (--known-first)")
    return said
