"""How long a chain's rounds take and which hop has become slow: from results and their traces, clocks handed in.

Owns what is expected of the chain in use. Knows neither sockets nor what is done about a suspicion.

A hop's time for a step is a *sign* when it is more than three times what the hop took before for as much work, and two
when it is more than six times and what it took too long is what leaving the hop would cost: then, whether the next step
is quick or not, no more than twice the better choice's time is lost (the rule for renting skis). Two signs in a row
make a suspicion. A step that has no result yet gives signs as well, once the hop has had it for so long.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean, median

from swarm.planner.costs.chain_costs import ChainCosts
from swarm.types import Chain, PeerId

Trace = Sequence[tuple[float, float]]

MIN_PROBE_S = 0.25  # nobody is asked for a sign of life before, while all goes well
FAST_PROBE_S = 0.05  # ... and when the last step was slow
SPREADS = 6.0  # median deviations that a round may take longer than usual
SLOW_RATIO = 3.0  # times what a hop took before for as much work
VERY_SLOW_RATIO = 6.0
MIN_ROUND_SLOWDOWN = (
    1.5  # times the usual round: a slow step that makes its round no longer than that is nobody's trouble
)
SAMPLES_TO_SUSPECT = 2  # so many signs in a row
MIN_SAMPLES = 3  # steps before there is a median
COOLDOWN_STEPS = 8  # steps after a suspicion before there is another
WINDOW = 16  # that say what is usual
MAX_DECODE_ROWS = 64  # rows at most; a step with more is a piece of a prompt
REPAIR_MS = 200.0  # what leaving a hop takes, beside feeding another one what this one holds (docs/recovery.md)
MAX_BACKOFF = 8  # times that, after so many suspicions


@dataclass(frozen=True, slots=True)
class StragglerSuspicion:
    """`slowdown`: how many times longer than usual the rounds took, or take so far, that it rests on."""

    peer: PeerId
    slowdown: float


@dataclass(slots=True)
class StragglerDetector:
    """One a chain; all times in seconds by the caller's clock, but for `*_ms`.

    `costs`: what steps of different widths are compared by; without them all count alike. `suspicions`: of the chains
    before this one and of it; each doubles how long a single step may take.
    """

    chain: Chain
    costs: ChainCosts | None = None
    suspicions: int = 0
    _rounds_ms: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))  # the last ones that decoded
    _sent: dict[int, tuple[float, int]] = field(default_factory=dict)  # step -> when, rows
    _earlier: dict[PeerId, deque[float]] = field(default_factory=dict)  # hop -> ms over those that its curve promised
    _slow: dict[PeerId, int] = field(default_factory=dict)  # slow steps in a row
    _rest: int = 0

    @property
    def oldest(self) -> int | None:
        """The first step that is still without a result."""
        return min(self._sent, default=None)

    def sent(self, step: int, rows: int, now: float) -> None:
        """Steps that nobody tells of are not judged."""
        self._sent[step] = now, rows

    def on_discard(self) -> None:
        """Nothing that was sent will be answered."""
        self._sent.clear()

    def probe_after_s(self, most_s: float) -> float:
        """How long the next result may take before all hops are asked for a sign of life, and where the step is.

        Hops that only compute answer at once, so asking too early costs a few small frames and nothing else.
        """
        if not self._rounds_ms:
            return most_s
        usual_ms = median(self._rounds_ms)
        if self._slow and not self._rest:
            return min(most_s, max(FAST_PROBE_S, SLOW_RATIO * usual_ms / 1e3))
        spread_ms = median(abs(ms - usual_ms) for ms in self._rounds_ms)
        return min(most_s, max(MIN_PROBE_S, (usual_ms + SPREADS * spread_ms) / 1e3))

    def assess_pending(self) -> None:
        """A suspicion was looked into, whatever came of it."""
        self._rest = COOLDOWN_STEPS
        self.suspicions += 1

    def on_result(self, step: int, trace: Trace, now: float, held: int = 0) -> StragglerSuspicion | None:
        """Take in a result. `held`: tokens that a replacement of any hop would have to be fed."""
        at, rows = self._sent.pop(step, (now, 0))
        if not rows or len(trace) != len(self.chain):
            return None
        round_ms = (now - at) * 1e3
        self._rest = max(0, self._rest - 1)
        worst: tuple[int, float, int, PeerId] | None = None  # of two with as many signs the one that lost more time
        for index, (queue_ms, compute_ms) in enumerate(trace):
            signs, before = self._samples(index, rows, queue_ms + compute_ms, held), self._before(index)
            self._note(index, rows, queue_ms + compute_ms, slow=signs > 0)
            if signs:
                one = signs + before, queue_ms + compute_ms, signs, self.chain.peers[index]
                worst = max(worst, one) if worst is not None else one
        suspicion = self._assess(worst[0], *worst[2:], round_ms) if worst is not None else None
        if rows <= MAX_DECODE_ROWS:
            self._rounds_ms.append(round_ms)
        return suspicion

    def outstanding(self, peer: PeerId, had_ms: float, now: float, held: int = 0) -> StragglerSuspicion | None:
        """The oldest step without a result is at `peer`, which has had it for `held_ms`."""
        if self.oldest is None or peer not in self.chain.peers:
            return None
        at, rows = self._sent[self.oldest]
        if rows > MAX_DECODE_ROWS:
            return None
        index = self.chain.peers.index(peer)
        signs = self._samples(index, rows, had_ms, held)
        return self._assess(signs + self._before(index), signs, peer, (now - at) * 1e3) if signs else None

    def _assess(self, signs: int, last: int, peer: PeerId, round_ms: float) -> StragglerSuspicion | None:
        """`signs` in a row, `last` of them by the round that took `iteration_ms`."""
        if signs < SAMPLES_TO_SUSPECT or self._rest or not self._rounds_ms:
            return None
        rounds_ms = [round_ms] if last >= SAMPLES_TO_SUSPECT else [round_ms, self._rounds_ms[-1]]
        slowdown = fmean(rounds_ms) / median(self._rounds_ms)
        return StragglerSuspicion(peer, slowdown) if slowdown >= MIN_ROUND_SLOWDOWN else None

    def _samples(self, index: int, rows: int, ms: float, held: int) -> int:
        earlier = self._earlier.get(self.chain.peers[index], ())
        if len(earlier) < MIN_SAMPLES:
            return 0
        usual = median(earlier)
        usual_ms = usual * self._promised_ms(index, rows)
        doubt = min(1 << self.suspicions, MAX_BACKOFF)
        feeding_ms = (
            usual * self._promised_ms(index, MAX_DECODE_ROWS) * held / MAX_DECODE_ROWS
            if self.costs is not None
            else 0.0
        )
        if ms > VERY_SLOW_RATIO * usual_ms and ms - usual_ms > doubt * REPAIR_MS + feeding_ms:
            return SAMPLES_TO_SUSPECT
        return int(ms > SLOW_RATIO * usual_ms)

    def _before(self, index: int) -> int:
        return self._slow.get(self.chain.peers[index], 0)

    def _promised_ms(self, index: int, rows: int) -> float:
        """What a hop's cost curve says of so many rows: of one layer, for only its shape matters."""
        promised = self.costs.stages[index].cost.ms_at(rows) if self.costs is not None else 0.0
        return promised if promised > 0.0 else 1.0

    def _note(self, index: int, rows: int, ms: float, *, slow: bool) -> None:
        peer = self.chain.peers[index]
        earlier = self._earlier.setdefault(peer, deque(maxlen=32))
        if slow:
            self._slow[peer] = self._slow.get(peer, 0) + 1
            if self._slow[peer] > WINDOW:  # nobody was quicker: this is how it is now
                earlier.clear()
        else:
            self._slow.pop(peer, None)
            earlier.append(ms / self._promised_ms(index, rows))
