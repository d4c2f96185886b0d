"""What the steps along one chain took, hop by hop, against what is believed of its hops.

Owns the measurements of one chain in use, and which hop is slow from the start; a hop that becomes slow later is found
by `health.straggler_detector`. Pure: clocks are handed in.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from swarm.planner.costs.chain_costs import ChainCosts
from swarm.planner.trust.belief import PeerBelief
from swarm.planner.trust.measurement import hop_times, overdue_hop
from swarm.planner.trust.policy import POLICY, TrustPolicy
from swarm.types import Chain, PeerId
from swarm_client.trust.failures import HopStalled, StragglerEvicted

MAX_ROWS = 64  # of a step whose times are compared; more is prefill


@dataclass(frozen=True, slots=True)
class StepTimes:
    """One step that went alone: by hop the ms of a layer as advertised for it, and as measured."""

    advertised_ms: Mapping[PeerId, float]
    measured_ms: Mapping[PeerId, float]


@dataclass(slots=True)
class ChainWatch:
    """`costs`: by the records. `row_bytes`: of a hidden state between hops."""

    chain: Chain
    costs: ChainCosts
    beliefs: Mapping[PeerId, PeerBelief]
    row_bytes: int = 0
    policy: TrustPolicy = POLICY
    rows: int = 0  # of the steps that have come back
    widest: int = 1  # rows of the widest step of the prefill
    slowdown: float = 1.0  # of the last step, times what was predicted
    _sent: dict[int, tuple[float, int, bool]] = field(default_factory=dict)  # step -> when, rows, whether alone
    _late: tuple[PeerId, int] = ("", 0)  # the hop that was overdue last, how often in a row

    def stranger(self, peer: PeerId) -> bool:
        """Whether the peer has not proven itself."""
        belief = self.beliefs.get(peer)
        return belief is None or not belief.proven

    def stalled(
        self,
        peer: PeerId,
        lasted_s: float,
        usual_s: float,
        *,
        slack_s: float = 0.0,
        on_edge: bool = False,
        left: int = 0,
    ) -> StragglerEvicted | None:
        """Why a hop is to be left that has made no progress for `lasted_s`; None: it may go on.

        `usual_s`: a proven hop's time; `slack_s`: more for a prefill. A stranger has less, and for the first step of a
        chain no longer than some times what its own record says that it takes: a black hole says that it is quick.
        `on_edge`: the step did not reach it from the hop before, so that it may be on a slow link. `left`: hops that
        this answer has left already: whoever finds all of them too slow has no time for haste.
        """
        stranger = self.stranger(peer)
        if lasted_s >= slack_s + (min(usual_s, self.policy.stranger_stall_s) if stranger else usual_s):
            return HopStalled("steps come to it and no further")
        if not stranger or self.rows or left >= self.policy.max_hasty:
            return None
        rows = max(self.widest, *(rows for _, rows, _ in self._sent.values()), 1)
        claimed_s = self.costs.stages[self.chain.peers.index(peer)].ms(rows) / 1e3
        link_s = rows * self.row_bytes / self.policy.slow_link_bytes_s if on_edge else 0.0
        if lasted_s < link_s + max(self.policy.first_step_s, self.policy.first_step_ratio * claimed_s):
            return None
        belief = self.beliefs.get(peer)
        again = belief is not None and belief.evidence.failures > 0 and not belief.evidence.sessions
        kind = HopStalled if again else StragglerEvicted  # once may be chance
        return kind(f"its first step has taken {lasted_s:.1f} s, and it says that takes {claimed_s:.2f} s")

    def probe_after_s(self, usual_s: float) -> float:
        """How long a result may take before the hops are asked for their progress."""
        hurried = not self.rows and any(map(self.stranger, self.chain.peers))
        return min(usual_s, self.policy.stranger_probe_s) if hurried else usual_s

    def sent(self, step: int, rows: int, now: float) -> None:
        alone = not self._sent
        if not alone:
            self._sent = {number: (at, of, False) for number, (at, of, _) in self._sent.items()}
        self._sent[step] = now, rows, alone

    def on_discard(self) -> None:
        """No step in flight will have a result."""
        self._sent.clear()

    def on_result(self, step: int, trace: Sequence[tuple[float, float]], now: float) -> StepTimes | None:
        """None for a step that tells nothing."""
        at, rows, alone = self._sent.pop(step, (now, 0, False))
        self.rows += rows
        stages = self.costs.stages
        if not alone or not 0 < rows <= MAX_ROWS or len(trace) != len(stages):
            return None
        round_ms = (now - at) * 1e3
        proven = [not self.stranger(peer) for peer in self.chain.peers]
        reported = [queue + compute for queue, compute in trace]
        times = hop_times(reported, round_ms, self.costs.links_ms(rows), proven, self.policy)
        claims = [stage.ms(rows) for stage in stages]
        predicted = [ms * self._factor(peer) for ms, peer in zip(claims, self.chain.peers, strict=True)]
        late = overdue_hop(times, predicted, self.policy)
        if late is None:
            self._late = "", 0
        else:
            peer = self.chain.peers[late]
            self._late = peer, self._late[1] + 1 if self._late[0] == peer else 1
            self.slowdown = round_ms / max(sum(predicted) + self.costs.links_ms(rows), 1.0)
        peers, layers = self.chain.peers, [stage.layers for stage in stages]
        return StepTimes(
            {peer: ms / count for peer, ms, count in zip(peers, claims, layers, strict=True)},
            {peer: ms / count for peer, ms, count in zip(peers, times, layers, strict=True)},
        )

    @property
    def slow_from_start(self) -> PeerId | None:
        """The hop that was overdue in each of the last steps."""
        return self._late[0] if self._late[1] >= self.policy.overdue_steps else None

    def _factor(self, peer: PeerId) -> float:
        """Believed over advertised time."""
        belief = self.beliefs.get(peer)
        return belief.layer_ms / belief.advertised_ms if belief and belief.advertised_ms > 0.0 else 1.0
