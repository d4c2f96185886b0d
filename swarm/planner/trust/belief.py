"""What is believed of each peer, from first-hand evidence: proven or not, how quick, how likely to fail, and why.

    proven        it has computed enough rows for us, and no failure or failed audit came after
    layer times   proven: as advertised, but no quicker than it was measured; a stranger: no quicker than the median of
                  the proven ones, and once strangers have disappointed us, than most claims
    p(failure)    its own sessions; of a stranger those with all strangers, and with those of its address block
    shunned       after a failure, longer after each further one in a row; used only where nobody else is left

A swarm in which nothing went wrong and nobody is proven is believed word for word. Pure: time and evidence are handed
in. How chains are chosen by it is in `trial`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median

from swarm.address_blocks import claimed_block
from swarm.planner.trust.evidence import UNKNOWN, FailureKind, PeerEvidence
from swarm.planner.trust.policy import POLICY, TrustPolicy
from swarm.types import CostCurve, NodeProfile, PeerId, Snapshot


@dataclass(frozen=True, slots=True)
class PeerBelief:
    """`layer_ms`: mean τ believed; `advertised_ms`: the mean that its record claims; `measured_ms`: the claim as far as
    measurements bear it out. `limit`: what cuts the claim of a stranger, for people."""

    peer: PeerId
    block: str
    evidence: PeerEvidence
    proven: bool
    advertised_ms: float
    measured_ms: float
    layer_ms: float
    p_fail: float
    shunned: bool  # avoided while there is anybody else
    cheated: bool  # never used: no answer is better than a wrong one
    limit: str = ""

    @property
    def reason(self) -> str:
        """A sentence for people."""
        evidence, claim = self.evidence, f"{self.advertised_ms:.3g} ms a layer"
        if self.proven:
            done = f"proven: {evidence.rows:.0f} rows in {evidence.sessions} sessions"
            if self.layer_ms > self.advertised_ms:
                return f"{done}; it claims {claim} and was measured at {self.layer_ms:.3g}"
            return f"{done}; its {claim} are borne out"
        if evidence.audits_failed:
            return f"failed {evidence.audits_failed} audits"
        if evidence.strikes and evidence.failure is not None:
            times = "" if evidence.strikes == 1 else f" {evidence.strikes} times in a row"
            return f"failed{times}, at last because it was {evidence.failure}"
        if self.layer_ms > self.measured_ms:
            return f"not proven; its {claim} count as {self.layer_ms:.3g}, {self.limit}"
        if self.measured_ms > self.advertised_ms:
            return f"not proven; it claims {claim} and was measured at {self.measured_ms:.3g}"
        return f"not proven; its {claim} are taken on its word"


@dataclass(frozen=True, slots=True)
class Strangers:
    """How the strangers of late turned out, in all and by address block: (good, bad)."""

    good: int = 0
    bad: int = 0
    usual_ratio: float = 1.0  # measured over advertised time of most peers: all are slower on a busy machine
    blocks: Mapping[str, tuple[int, int]] = field(default_factory=dict)

    def wary(self, policy: TrustPolicy = POLICY) -> bool:
        return self.bad >= policy.wary_after

    def openness(self, policy: TrustPolicy = POLICY) -> float:
        """1 while none disappointed, towards 0 the more did."""
        return (1.0 + self.good) / (1.0 + self.good + policy.disappointment * self.bad)

    def p_fail(self, block: str, policy: TrustPolicy = POLICY) -> float:
        """The chance that a stranger of `block` fails: what its block did counts more the more was seen of it. A single
        bad one says nothing of the others."""
        if not self.wary(policy):
            return policy.stranger_failure
        prior, seen = policy.prior_sessions, self.good + self.bad
        overall = (prior * policy.stranger_failure + self.bad) / (prior + seen)
        good, bad = self.blocks.get(block, (0, 0)) if block else (0, 0)
        return (prior * overall + bad) / (prior + good + bad)


def is_proven(evidence: PeerEvidence, policy: TrustPolicy = POLICY) -> bool:
    enough = evidence.rows >= policy.proven_rows and evidence.sessions >= policy.proven_sessions
    return enough and not evidence.strikes and not evidence.audits_failed


def disappointed(evidence: PeerEvidence, usual_ratio: float = 1.0, policy: TrustPolicy = POLICY) -> bool:
    """Whether the peer failed before it had ever served well, advertised what it does not deliver, or cheated."""
    never = evidence.failures > 0 and not evidence.sessions
    return never or evidence.ratio >= policy.slow_ratio * usual_ratio or evidence.audits_failed > 0


def strangers_of_late(known: Mapping[PeerId, PeerEvidence], now: float, policy: TrustPolicy = POLICY) -> Strangers:
    late = [evidence for evidence in known.values() if now - evidence.last_at <= policy.memory_s]
    ratios = [evidence.ratio for evidence in late if evidence.ratio]
    usual_ratio = min(max(1.0, median(ratios)), policy.max_usual_ratio) if ratios else 1.0
    good = bad = 0
    blocks: dict[str, tuple[int, int]] = {}
    for evidence in late:
        was_bad = disappointed(evidence, usual_ratio, policy)
        was_good = not was_bad and evidence.sessions > 0
        good, bad = good + was_good, bad + was_bad
        before = blocks.get(evidence.block, (0, 0))
        blocks[evidence.block] = before[0] + was_good, before[1] + was_bad
    return Strangers(good, bad, usual_ratio, blocks)


def audits_whole_answer(evidence: PeerEvidence, policy: TrustPolicy = POLICY) -> bool:
    """Whether a peer's part in an answer is audited to its end, and not only in samples: a stranger's. A sample rarely
    meets a short answer. Proven peers soon do nearly all of the work, so this costs little."""
    return not is_proven(evidence, policy)


def shunned_s(evidence: PeerEvidence, policy: TrustPolicy = POLICY) -> float:
    """For how long after its last failure a peer is avoided."""
    if evidence.audits_failed:
        return policy.shun_cheat_s
    if not evidence.strikes:
        return 0.0
    grave = not evidence.sessions and evidence.failure in (FailureKind.STALLED, FailureKind.WRONG)
    first = policy.shun_stranger_s if grave else policy.shun_s
    return float(min(first * 2 ** min(evidence.strikes - 1, 32), policy.max_shun_s))


def believe(
    snapshot: Snapshot, known: Mapping[PeerId, PeerEvidence], now: float, policy: TrustPolicy = POLICY
) -> dict[PeerId, PeerBelief]:
    """Of every node that serves. `now`: seconds since the epoch."""
    serving = snapshot.serving()
    strangers = strangers_of_late(known, now, policy)
    claims = {node.peer: advertised_layer_ms(node) for node in serving}
    proven = [peer for peer in claims if is_proven(known.get(peer, UNKNOWN), policy)]
    limit = _limit(claims, proven, known, strangers, policy)
    return {
        node.peer: _believe_one(node, known.get(node.peer, UNKNOWN), now, strangers, limit, policy) for node in serving
    }


def _limit(
    claims: Mapping[PeerId, float],
    proven: Sequence[PeerId],
    known: Mapping[PeerId, PeerEvidence],
    strangers: Strangers,
    policy: TrustPolicy,
) -> tuple[float, str]:
    """The least time of a layer that a stranger is believed to take, and why. Once strangers have disappointed, a quick
    claim is no reason to prefer one stranger to another: those that lie would always be preferred."""
    limit, reason = 0.0, ""
    if proven:
        limit = median(measured_layer_ms(claims[peer], known[peer], strangers.usual_ratio, policy) for peer in proven)
        reason = "the median of those that are proven"
    if claims and strangers.wary(policy):
        ordered = sorted(claims.values())
        usual_ms = ordered[min(int(policy.wary_quantile * len(ordered)), len(ordered) - 1)]
        if usual_ms > limit:
            limit, reason = usual_ms, "most claims, for strangers have disappointed"
    return limit, reason


def _believe_one(
    node: NodeProfile,
    evidence: PeerEvidence,
    now: float,
    strangers: Strangers,
    limit: tuple[float, str],
    policy: TrustPolicy,
) -> PeerBelief:
    """`limit`: no stranger is quicker, and why."""
    claim = advertised_layer_ms(node)
    measured_ms = measured_layer_ms(claim, evidence, strangers.usual_ratio, policy)
    block = evidence.block or claimed_block(node.addresses)
    if is_proven(evidence, policy):
        p_fail = evidence.failures / (evidence.failures + evidence.sessions + policy.prior_sessions)
        return PeerBelief(node.peer, block, evidence, True, claim, measured_ms, measured_ms, p_fail, False, False)
    prior = policy.prior_sessions
    p_fail = (prior * strangers.p_fail(block, policy) + evidence.strikes) / (prior + evidence.strikes)
    shunned = evidence.failed_at + shunned_s(evidence, policy) > now
    return PeerBelief(
        peer=node.peer,
        block=block,
        evidence=evidence,
        proven=False,
        advertised_ms=claim,
        measured_ms=measured_ms,
        layer_ms=max(measured_ms, limit[0]),
        p_fail=p_fail,
        shunned=shunned,
        cheated=evidence.audits_failed > 0 and shunned,
        limit=limit[1],
    )


def advertised_layer_ms(node: NodeProfile) -> float:
    """The mean τ that a record claims."""
    times = node.layer_ms if node.span is not None and len(node.layer_ms) == len(node.span) else ()
    return sum(times) / len(times) if times else node.cost.ms_at(1)


def measured_layer_ms(
    claim: float, evidence: PeerEvidence, usual_ratio: float = 1.0, policy: TrustPolicy = POLICY
) -> float:
    """A claim as far as measurements bear it out: as many times slower as it was measured, and never much quicker than
    the quickest that was measured, whatever the record says by now. `usual_ratio`: what all have in common, such as a
    machine that they share, is no reason to prefer one to another."""
    slower = claim * max(1.0, evidence.ratio / usual_ratio)
    return max(slower, policy.quickest_share * evidence.quickest_ms / usual_ratio)


def believed_snapshot(
    snapshot: Snapshot, beliefs: Mapping[PeerId, PeerBelief], policy: TrustPolicy = POLICY
) -> Snapshot:
    """`snapshot` with the times that are believed, and what the pause after a failure costs a token on average, spread
    over a node's layers. Where nothing was seen to fail it costs nothing."""
    nodes = tuple(_believed(node, beliefs.get(node.peer), policy) for node in snapshot.nodes)
    return replace(snapshot, nodes=nodes)


def _believed(node: NodeProfile, belief: PeerBelief | None, policy: TrustPolicy) -> NodeProfile:
    if belief is None or node.span is None:
        return node
    pause_ms = (
        max(0.0, belief.p_fail - policy.stranger_failure) * policy.pause_ms / policy.typical_tokens / len(node.span)
    )
    if belief.layer_ms == belief.advertised_ms and not pause_ms:
        return node
    times = node.layer_ms if len(node.layer_ms) == len(node.span) else (node.cost.ms_at(1),) * len(node.span)
    if belief.advertised_ms > 0.0:
        factor = belief.layer_ms / belief.advertised_ms
        cost = CostCurve(node.cost.widths, tuple(ms * factor for ms in node.cost.ms))
        return replace(node, layer_ms=tuple(ms * factor + pause_ms for ms in times), cost=cost)
    return replace(node, layer_ms=(belief.layer_ms + pause_ms,) * len(times))
