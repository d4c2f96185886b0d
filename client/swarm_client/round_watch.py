"""How long a chain's rounds take and which hop has become slow: from results and their traces, clocks handed in.

Owns what is expected of the chain in use. Knows neither sockets nor what is done about a suspicion.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

from swarm.types import Chain, PeerId

Trace = Sequence[tuple[float, float]]

PATIENCE = 6.0  # times the expected round
SLOW = 3.0  # times a hop's own earlier median
SUSPICIOUS = 3  # so many slow steps in a row
FEW_ROWS = 8
EARLIER = 4  # steps of a kind before there is a median
REST = 16  # steps after a suspicion before there is another


@dataclass(slots=True)
class RoundWatch:
    """One a chain; all times in seconds by the caller's clock, but for `*_ms`.

    Steps are compared with steps of their own kind: few rows, which cost about the same, or as many to a factor of two.
    """

    chain: Chain
    round_ms: deque[float] = field(default_factory=lambda: deque(maxlen=SUSPICIOUS))  # the last decoding rounds
    _sent: dict[int, tuple[float, int]] = field(default_factory=dict)  # step -> when, rows
    _row_ms: float = 0.0  # of steps with many rows
    _earlier: dict[tuple[PeerId, int], deque[float]] = field(default_factory=dict)
    _slow: dict[PeerId, int] = field(default_factory=dict)  # slow steps in a row
    _rest: int = 0

    def sent(self, step: int, rows: int, now: float) -> None:
        self._sent[step] = now, rows

    def voided(self) -> None:
        """Nothing that was sent will be answered."""
        self._sent.clear()

    def patience_s(self, least_s: float) -> float:
        """How long the next result may take before one asks what is wrong."""
        rows = sum(rows - 1 for _, rows in self._sent.values())  # beyond those of plain decoding
        usual_ms = median(self.round_ms) if self.round_ms else self.chain.cost_ms
        return max(least_s, PATIENCE * (usual_ms + rows * (self._row_ms or self.chain.cost_ms)) / 1e3)

    def settled(self, step: int, trace: Trace, now: float) -> PeerId | None:
        """Take in a result. -> a hop that has been slow for `SUSPICIOUS` steps in a row, if there is one."""
        at, rows = self._sent.pop(step, (now, 0))
        if not rows or len(trace) != len(self.chain):
            return None
        took_ms = (now - at) * 1e3
        kind = max(rows, FEW_ROWS).bit_length()
        if rows > 64:
            self._row_ms = took_ms / rows
        else:
            self.round_ms.append(took_ms)
        self._rest = max(0, self._rest - 1)
        for hop, (queue_ms, compute_ms) in zip(self.chain.hops, trace, strict=True):
            self._note(hop.peer, kind, queue_ms + compute_ms)
        suspect = max(self._slow, key=lambda peer: self._slow[peer], default=None)
        if suspect is None or self._slow[suspect] < SUSPICIOUS or self._rest:
            return None
        self._rest = REST
        return suspect

    def _note(self, peer: PeerId, kind: int, ms: float) -> None:
        earlier = self._earlier.setdefault((peer, kind), deque(maxlen=32))
        if len(earlier) >= EARLIER and ms > SLOW * median(earlier):
            self._slow[peer] = self._slow.get(peer, 0) + 1
            if self._slow[peer] > REST:  # nobody was quicker: this is how it is now
                earlier.clear()
        else:
            self._slow.pop(peer, None)
            earlier.append(ms)
