"""Straggler detector: how long a chain's iterations take and which hop has become slow, from results and their traces.

Owns what is expected of the chain in use. Pure: clocks are handed in, and what is done about a suspicion is decided by
the generation loop.

A hop's time for a step is a *straggler sample* when it is more than three times what the hop took before for as much
work. It counts as two when it is more than six times as long and the excess is more than evicting the hop would cost:
then, whether the next step is quick or not, no more than twice the better choice's time is lost (the ski-rental rule).
Two samples in a row make a suspicion. A step without a result yet gives samples as well, once the hop has had it for so
long.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean, median

from swarm.planner.costs.chain_costs import ChainCosts
from swarm.types import Chain, PeerId

Trace = Sequence[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class StragglerPolicy:
    """When a hop counts as a straggler: lower thresholds replace slow hops sooner, and more often without need."""

    min_probe_s: float = 0.25  # hops are not probed earlier while all goes well
    fast_probe_s: float = 0.05  # ... and when the last step was slow
    max_deviations: float = 6.0  # median absolute deviations that an iteration may take longer than the median
    slow_ratio: float = 3.0  # times what a hop took before for as much work: a straggler sample
    very_slow_ratio: float = 6.0  # ... which may suffice for a suspicion
    min_round_slowdown: float = 1.5  # a slow step that makes its iteration no longer than this does no harm
    samples_to_suspect: int = 2  # straggler samples in a row
    min_samples: int = 3  # a hop's steps before its median means something
    cooldown_steps: int = 8  # between two suspicions
    window: int = 16  # iterations whose median is the usual one
    hop_window: int = 32  # steps whose median is a hop's usual time
    max_decode_rows: int = 64  # a step with more rows is prefill, whose iterations are not compared
    repair_ms: float = 200.0  # cost of evicting a hop, beside replaying to another what this one holds
    max_backoff: int = 8  # times that, at most, after repeated suspicions


@dataclass(frozen=True, slots=True)
class StragglerSuspicion:
    """`slowdown`: how many times longer than usual the iterations took, or take so far, that it rests on."""

    peer: PeerId
    slowdown: float


@dataclass(slots=True)
class StragglerDetector:
    """One a chain; all times in seconds by the caller's clock, but for `*_ms`.

    `costs`: what steps of different widths are compared by; without them all count alike. `suspicions`: of the chains
    before this one and of it; each doubles how long a single step may take (exponential backoff).
    """

    chain: Chain
    costs: ChainCosts | None = None
    suspicions: int = 0
    policy: StragglerPolicy = StragglerPolicy()
    _rounds_ms: deque[float] = field(init=False)  # the last iterations that decoded
    _sent: dict[int, tuple[float, int]] = field(default_factory=dict)  # step -> when, rows
    _earlier: dict[PeerId, deque[float]] = field(default_factory=dict)  # hop -> measured over predicted ms
    _slow: dict[PeerId, int] = field(default_factory=dict)  # slow steps in a row
    _cooldown: int = 0  # steps until the next suspicion is possible

    def __post_init__(self) -> None:
        self._rounds_ms = deque(maxlen=self.policy.window)

    @property
    def oldest(self) -> int | None:
        """The first step that is still without a result."""
        return min(self._sent, default=None)

    def sent(self, step: int, rows: int, now: float) -> None:
        """Steps that are not announced here are not assessed."""
        self._sent[step] = now, rows

    def on_discard(self) -> None:
        """No step in flight will have a result."""
        self._sent.clear()

    def probe_after_s(self, most_s: float) -> float:
        """How long the next result may take before all hops are pinged and queried for their progress.

        Hops that only compute answer at once, so probing too early costs a few small frames and nothing else.
        """
        if not self._rounds_ms:
            return most_s
        policy, usual_ms = self.policy, median(self._rounds_ms)
        if self._slow and not self._cooldown:
            return min(most_s, max(policy.fast_probe_s, policy.slow_ratio * usual_ms / 1e3))
        spread_ms = median(abs(ms - usual_ms) for ms in self._rounds_ms)
        return min(most_s, max(policy.min_probe_s, (usual_ms + policy.max_deviations * spread_ms) / 1e3))

    def on_assessed(self) -> None:
        """A suspicion was looked into, whatever came of it."""
        self._cooldown = self.policy.cooldown_steps
        self.suspicions += 1

    def on_result(self, step: int, trace: Trace, now: float, held: int = 0) -> StragglerSuspicion | None:
        """Record a result. `held`: tokens that would have to be replayed to a replacement of any hop."""
        at, rows = self._sent.pop(step, (now, 0))
        if not rows or len(trace) != len(self.chain):
            return None
        round_ms = (now - at) * 1e3
        self._cooldown = max(0, self._cooldown - 1)
        worst: tuple[int, float, int, PeerId] | None = None  # of two with as many samples the one that lost more time
        for index, (queue_ms, compute_ms) in enumerate(trace):
            samples, before = self._samples(index, rows, queue_ms + compute_ms, held), self._before(index)
            self._record(index, rows, queue_ms + compute_ms, slow=samples > 0)
            if samples:
                one = samples + before, queue_ms + compute_ms, samples, self.chain.peers[index]
                worst = max(worst, one) if worst is not None else one
        suspicion = self._assess(worst[0], *worst[2:], round_ms) if worst is not None else None
        if rows <= self.policy.max_decode_rows:
            self._rounds_ms.append(round_ms)
        return suspicion

    def outstanding(self, peer: PeerId, held_ms: float, now: float, held: int = 0) -> StragglerSuspicion | None:
        """The oldest step without a result is at `peer`, which has had it for `held_ms`."""
        if self.oldest is None or peer not in self.chain.peers:
            return None
        at, rows = self._sent[self.oldest]
        if rows > self.policy.max_decode_rows:
            return None
        index = self.chain.peers.index(peer)
        samples = self._samples(index, rows, held_ms, held)
        return self._assess(samples + self._before(index), samples, peer, (now - at) * 1e3) if samples else None

    def _assess(self, samples: int, last: int, peer: PeerId, round_ms: float) -> StragglerSuspicion | None:
        """`samples` in a row, `last` of them from the iteration that took `round_ms`."""
        policy = self.policy
        if samples < policy.samples_to_suspect or self._cooldown or not self._rounds_ms:
            return None
        rounds_ms = [round_ms] if last >= policy.samples_to_suspect else [round_ms, self._rounds_ms[-1]]
        slowdown = fmean(rounds_ms) / median(self._rounds_ms)
        return StragglerSuspicion(peer, slowdown) if slowdown >= policy.min_round_slowdown else None

    def _samples(self, index: int, rows: int, ms: float, held: int) -> int:
        policy, earlier = self.policy, self._earlier.get(self.chain.peers[index], ())
        if len(earlier) < policy.min_samples:
            return 0
        usual = median(earlier)
        usual_ms = usual * self._predicted_ms(index, rows)
        backoff = min(1 << self.suspicions, policy.max_backoff)
        replay_ms = 0.0
        if self.costs is not None:
            chunk = policy.max_decode_rows
            replay_ms = usual * self._predicted_ms(index, chunk) * held / chunk
        if ms > policy.very_slow_ratio * usual_ms and ms - usual_ms > backoff * policy.repair_ms + replay_ms:
            return policy.samples_to_suspect
        return int(ms > policy.slow_ratio * usual_ms)

    def _before(self, index: int) -> int:
        return self._slow.get(self.chain.peers[index], 0)

    def _predicted_ms(self, index: int, rows: int) -> float:
        """A hop's cost curve at so many rows: of one layer, for only its shape matters."""
        predicted = self.costs.stages[index].cost.ms_at(rows) if self.costs is not None else 0.0
        return predicted if predicted > 0.0 else 1.0

    def _record(self, index: int, rows: int, ms: float, *, slow: bool) -> None:
        peer = self.chain.peers[index]
        earlier = self._earlier.setdefault(peer, deque(maxlen=self.policy.hop_window))
        if slow:
            self._slow[peer] = self._slow.get(peer, 0) + 1
            if self._slow[peer] > self.policy.window:  # no other hop was quicker: this is the new normal
                earlier.clear()
        else:
            self._slow.pop(peer, None)
            earlier.append(ms / self._predicted_ms(index, rows))
