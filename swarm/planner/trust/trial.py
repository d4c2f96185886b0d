"""Which chain an answer takes: the best of proven peers, and now and then one that tries a stranger.

Owns the trickle of work that strangers get. A trial has one stranger, whose layers proven peers hold as well, so that
what it breaks is repaired at once. Strangers are drawn by address block first: a thousand identities of one block get
the share of one. While no chain of proven peers exists, everybody who is not shunned takes part, as if there were no
trust at all. Pure: the random draws are arguments.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from swarm.errors import NoRoute
from swarm.planner.routing.repair import Repair, repair
from swarm.planner.routing.route import RouteTable
from swarm.planner.trust.belief import PeerBelief, Strangers
from swarm.planner.trust.policy import POLICY, TrustPolicy
from swarm.types import Chain, Hop, LayerSpan, PeerId


@dataclass(frozen=True, slots=True)
class TrustedChain:
    """`tried`: the stranger that this chain tries, where proven peers could do without it. `reason`: for people."""

    chain: Chain
    tried: PeerId | None
    reason: str


@dataclass(frozen=True, slots=True)
class Trial:
    """What a trial depends on. `running`: answers of this client that try a stranger now. `chance`, `pick`: random
    numbers from [0, 1), whether to try one and which."""

    strangers: Strangers
    running: int
    chance: float
    pick: float


def choose_chain(
    table: RouteTable,
    beliefs: Mapping[PeerId, PeerBelief],
    trial: Trial,
    *,
    client_ms: Mapping[PeerId, float],
    banned: Collection[PeerId] = frozenset(),
    policy: TrustPolicy = POLICY,
) -> TrustedChain:
    """`table`: of the snapshot as it is believed. `banned`: peers that are out of the question for other reasons.

    Raises NoRoute if no chain is left without the `banned` and those that cheated.
    """
    unproven = {peer for peer, belief in beliefs.items() if not belief.proven}
    out = {*banned, *(peer for peer, belief in beliefs.items() if belief.cheated)}
    try:
        best = table.route(client_ms=client_ms, banned=out | unproven)
    except NoRoute:
        return _without_proof(table, beliefs, client_ms, out)
    stranger = _stranger(table, beliefs, unproven - out, trial)
    if stranger is None or trial.running >= policy.max_trials:
        return TrustedChain(best, None, "all of its nodes are proven")
    belief, span = stranger
    try:
        other = repair(
            table,
            Chain((Hop(belief.peer, span.start, span.end),)),
            (),
            client_ms=client_ms,
            banned=out | unproven,
        ).chain
    except NoRoute:
        return TrustedChain(best, None, "all of its nodes are proven")
    claimed_ms = other.cost_ms - len(span) * (belief.layer_ms - belief.advertised_ms)
    openness = trial.strangers.openness(policy)
    promising = policy.promising * claimed_ms <= best.cost_ms
    share = openness if promising else policy.exploration
    if trial.chance >= max(share, policy.exploration) or claimed_ms > policy.max_detour * best.cost_ms:
        return TrustedChain(best, None, "all of its nodes are proven")
    return TrustedChain(other, belief.peer, f"it tries {belief.peer}, which is {belief.reason}")


def repair_chain(
    table: RouteTable,
    chain: Chain,
    beliefs: Mapping[PeerId, PeerBelief],
    *,
    client_ms: Mapping[PeerId, float],
    banned: Collection[PeerId] = frozenset(),
) -> Repair:
    """`chain` with what it lacks filled in: by proven nodes if they can, else by strangers that have not failed, else
    by any but cheats. Raises NoRoute."""
    cheats = {peer for peer, belief in beliefs.items() if belief.cheated}
    shunned = {peer for peer, belief in beliefs.items() if belief.shunned}
    unproven = {peer for peer, belief in beliefs.items() if not belief.proven}
    tries = [unproven, shunned, cheats] if len(unproven) < len(beliefs) else [shunned, cheats]
    for out in tries[:-1]:
        try:
            return repair(table, chain, (), client_ms=client_ms, banned={*banned, *cheats, *out})
        except NoRoute:
            continue
    return repair(table, chain, (), client_ms=client_ms, banned={*banned, *cheats})


def _without_proof(
    table: RouteTable, beliefs: Mapping[PeerId, PeerBelief], client_ms: Mapping[PeerId, float], out: set[PeerId]
) -> TrustedChain:
    """Raises NoRoute."""
    shunned = {peer for peer, belief in beliefs.items() if belief.shunned}
    try:
        chain = table.route(client_ms=client_ms, banned=out | shunned)
    except NoRoute:
        chain = table.route(client_ms=client_ms, banned=out)
        return TrustedChain(chain, None, "no chain is left without nodes that failed before")
    return TrustedChain(chain, None, "no chain has proven nodes only")


def _stranger(
    table: RouteTable, beliefs: Mapping[PeerId, PeerBelief], unproven: Collection[PeerId], trial: Trial
) -> tuple[PeerBelief, LayerSpan] | None:
    """One that never failed us: the block is drawn, and of a block the quickest by its claim comes first."""
    spans = {n.peer: n.span for group in table.groups.values() for n in group if n.span is not None}
    blocks: dict[str, list[PeerBelief]] = {}
    for peer in sorted(unproven):
        belief = beliefs[peer]
        if peer in spans and not belief.shunned:
            blocks.setdefault(belief.block or peer, []).append(belief)
    if not blocks:
        return None
    likely = {block: of for block, of in blocks.items() if min(one.p_fail for one in of) < 0.5}
    blocks = likely or blocks
    drawn = sorted(blocks)[int(trial.pick * len(blocks))]
    belief = min(blocks[drawn], key=lambda one: (one.advertised_ms, one.peer))
    return belief, spans[belief.peer]
