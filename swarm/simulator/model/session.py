"""One request on its way through the swarm, and one step of work for it. Plain state, updated by `des_engine`."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from swarm.planner.scheduling.fair_shares import Share
from swarm.simulator.model.workload import SimRequest
from swarm.types import Hop, LayerSpan


class SimPhase(enum.Enum):
    CONNECTING = "connecting"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"


_LIVE = (SimPhase.CONNECTING, SimPhase.RUNNING)


@dataclass(slots=True)
class SimSession:
    """`held`: tokens whose keys and values the whole chain has. `ready`: peers of `hops` that have them."""

    number: int
    request: SimRequest
    prompt: int
    output: int
    parent: SimSession | None = None  # of a point of an outline
    phase: SimPhase = SimPhase.CONNECTING
    epoch: int = 0
    hops: list[Hop] = field(default_factory=list)
    ready: set[str] = field(default_factory=set)
    banned: set[str] = field(default_factory=set)
    admission_queue: str = ""
    held: int = 0
    produced: int = 0
    steps: int = 0
    chunks: tuple[int, ...] = ()
    replays: int = 0  # runs of new hops whose replay is not finished
    parked: list[SimStep] = field(default_factory=list)  # activations that wait for the next hop to admit the session
    points_left: int = 0
    repairs: int = 0
    dials: int = 0  # nodes it tried that were gone or full
    waiting_since: float = 0.0
    broken_since: float | None = None  # the first loss after the last result; repairs that fail share one deadline
    first_ms: float | None = None
    done_ms: float | None = None
    failure: str = ""
    wrong_from: int | None = None  # the first token that a cheat had a part in

    @property
    def most_tokens(self) -> int:
        """KV tokens a hop must hold; the last token sampled is never sent back in."""
        return self.prompt + self.output

    @property
    def live(self) -> bool:
        return self.phase in _LIVE


@dataclass(slots=True)
class SimStep:
    """`rows` rows after `base` tokens, at hop `index` of its session; `last`: the hop a replay ends at, -1 if none.

    `hop` stays what it was when the step was sent to it, whatever becomes of the session meanwhile. A step of
    `planner.scheduling`.
    """

    session: SimSession
    epoch: int
    rows: int
    base: int
    sample: bool
    index: int = 0
    last: int = -1
    sent_at: float = 0.0
    reached_at: float = 0.0  # its present hop
    done: bool = False  # its last hop has computed it
    trace: list[float] = field(default_factory=list)  # ms at each hop, as the hops report it
    hop: Hop = field(init=False)
    span: LayerSpan = field(init=False)
    session_key: int = field(init=False)
    prefill: bool = field(init=False)
    share: Share = field(init=False)

    def __post_init__(self) -> None:
        self.session_key = self.session.number
        self.share = Share(self.session.number)  # each request is a client of its own
        self.prefill = self.last >= 0 or self.base < self.session.prompt
        self._set_hop()

    def _set_hop(self) -> None:
        self.hop = self.session.hops[self.index]
        self.span = self.hop.span

    def advance(self) -> Hop:
        """To the next hop."""
        self.index += 1
        self._set_hop()
        return self.hop

    @property
    def context(self) -> int:
        return self.base

    @property
    def sampled_rows(self) -> int:
        """Rows that the LM head sees: all of a draft, one of a prompt."""
        if not self.sample:
            return 0
        return 1 if self.prefill else self.rows

    @property
    def stale(self) -> bool:
        return self.epoch != self.session.epoch or self.session.phase not in _LIVE

    dropped = stale
