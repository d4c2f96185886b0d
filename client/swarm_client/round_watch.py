"""How long a chain's rounds take and which hop has become slow: from results and their traces, clocks handed in.

Owns what is expected of the chain in use. Knows neither sockets nor what is done about a suspicion.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

from swarm.plan.speculation import ChainCosts
from swarm.types import Chain, PeerId

Trace = Sequence[tuple[float, float]]

SOON_S = 0.25  # nobody is asked for a sign of life before
SPREADS = 6.0  # median deviations that a round may take longer than usual
SLOW = 3.0  # times what a hop took before for as much work
FELT = 1.5  # times the usual round: a slow step that makes its round no longer than that is nobody's trouble
SUSPICIOUS = 2  # so many slow steps in a row
EARLIER = 4  # steps before there is a median
REST = 16  # steps after a suspicion before there is another
DECODING = 64  # rows at most; a step with more is a piece of a prompt


@dataclass(slots=True)
class RoundWatch:
    """One a chain; all times in seconds by the caller's clock, but for `*_ms`.

    `costs`: what steps of different widths are compared by; without them all count alike.
    """

    chain: Chain
    costs: ChainCosts | None = None
    _rounds_ms: deque[float] = field(default_factory=lambda: deque(maxlen=REST))  # the last ones that decoded
    _sent: dict[int, tuple[float, int]] = field(default_factory=dict)  # step -> when, rows
    _earlier: dict[PeerId, deque[float]] = field(default_factory=dict)  # hop -> ms over those that its curve promised
    _slow: dict[PeerId, int] = field(default_factory=dict)  # slow steps in a row
    _rest: int = 0

    @property
    def slowdown(self) -> float:
        """How many times longer than usual each of the rounds took that a suspicion rests on."""
        if not self._rounds_ms:
            return 1.0
        return min(list(self._rounds_ms)[-SUSPICIOUS:]) / median(self._rounds_ms)

    def sent(self, step: int, rows: int, now: float) -> None:
        """Steps that nobody tells of are not judged."""
        self._sent[step] = now, rows

    def voided(self) -> None:
        """Nothing that was sent will be answered."""
        self._sent.clear()

    def patience_s(self, most_s: float) -> float:
        """How long the next result may take before all hops are asked for a sign of life.

        Hops that only compute answer at once, so asking too early costs a ping each and nothing else.
        """
        if not self._rounds_ms:
            return most_s
        usual_ms = median(self._rounds_ms)
        spread_ms = median(abs(ms - usual_ms) for ms in self._rounds_ms)
        return min(most_s, max(SOON_S, (usual_ms + SPREADS * spread_ms) / 1e3))

    def settled(self, step: int, trace: Trace, now: float) -> PeerId | None:
        """Take in a result. -> a hop that has been slow, and felt, for `SUSPICIOUS` steps in a row, if any."""
        at, rows = self._sent.pop(step, (now, 0))
        if not rows or len(trace) != len(self.chain):
            return None
        if rows <= DECODING:
            self._rounds_ms.append((now - at) * 1e3)
        self._rest = max(0, self._rest - 1)
        for index, (queue_ms, compute_ms) in enumerate(trace):
            self._note(self.chain.hops[index].peer, (queue_ms + compute_ms) / self._promised_ms(index, rows))
        suspect = max(self._slow, key=lambda peer: self._slow[peer], default=None)
        if suspect is None or self._slow[suspect] < SUSPICIOUS or self._rest:
            return None
        if self.slowdown < FELT:
            return None
        self._rest = REST
        return suspect

    def _promised_ms(self, index: int, rows: int) -> float:
        """What a hop's cost curve says of so many rows: of one layer, for only its shape matters."""
        promised = self.costs.stages[index].cost.at(rows) if self.costs is not None else 0.0
        return promised if promised > 0.0 else 1.0

    def _note(self, peer: PeerId, times: float) -> None:
        earlier = self._earlier.setdefault(peer, deque(maxlen=32))
        if len(earlier) >= EARLIER and times > SLOW * median(earlier):
            self._slow[peer] = self._slow.get(peer, 0) + 1
            if self._slow[peer] > REST:  # nobody was quicker: this is how it is now
                earlier.clear()
        else:
            self._slow.pop(peer, None)
            earlier.append(times)
