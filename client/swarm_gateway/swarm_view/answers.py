"""The answers that this gateway is writing now, for readers of `/swarm`. Holds figures and chains, never text.

board.started(id, model)
board.progressed(id, chain=stream.chain, tokens=len(chunk.token_ids), waiting=chunk.waiting)    # for each chunk
board.ended(id)                                                         # in `finally`, however the answer ended
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from swarm.overview import MAX_REASON, AnswerOverview, chain_overview, plain_text
from swarm.types import Chain

MAX_SHOWN = 256  # answers at a time; further ones are written, not shown
MAX_REPAIRS = 16  # of one answer, the latest

OnChange = Callable[[AnswerOverview], None]


@dataclass(slots=True, eq=False)
class _Answer:
    id: str
    model: str
    strategy: str
    chain: Chain | None = None
    tokens: int = 0
    waiting: str = ""
    first: tuple[float, int] = (0.0, 0)  # when the first tokens came, and how many
    last: float = 0.0
    repairs: list[str] = field(default_factory=list)

    def overview(self) -> AnswerOverview:
        (began, tokens), writing = self.first, self.tokens > 0 and not self.waiting
        rate = (self.tokens - tokens) / (self.last - began) if self.last > began else 0.0
        return AnswerOverview(
            self.id,
            self.model,
            chain_overview(self.chain),
            self.tokens,
            round(rate, 2),
            self.strategy,
            "writing" if writing else "waiting",
            tuple(self.repairs),
        )


class AnswerBoard:
    """`clock`: seconds, monotonic. Calls for an answer that is not known are ignored, so callers need not check."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._answers: dict[str, _Answer] = {}
        self._listeners: list[OnChange] = []

    def listen(self, on_change: OnChange) -> None:
        """Call `on_change` at once when an answer gets its chain, another chain, or waits for one."""
        self._listeners.append(on_change)

    def unlisten(self, on_change: OnChange) -> None:
        self._listeners.remove(on_change)

    def started(self, answer_id: str, model: str, strategy: str = "") -> None:
        """`answer_id` is shown to every reader: never one by which the answer itself can be fetched."""
        if len(self._answers) < MAX_SHOWN:
            self._answers[answer_id] = _Answer(answer_id, model, strategy)

    def progressed(self, answer_id: str, *, chain: Chain | None = None, tokens: int = 0, waiting: str = "") -> None:
        """`tokens`: how many came now; `waiting`: why there is no chain now; `chain`: None if it is as before."""
        answer = self._answers.get(answer_id)
        if answer is None:
            return
        if tokens:
            answer.last = self._clock()
            if not answer.tokens:
                answer.first = (answer.last, tokens)
            answer.tokens += tokens
        rerouted = chain is not None and chain is not answer.chain and _note_chain(answer, chain)
        if waiting and not answer.waiting:
            _note_repair(answer, f"waiting: {waiting}")
        if rerouted or bool(waiting) != bool(answer.waiting):
            answer.waiting = waiting
            shown = answer.overview()
            for on_change in tuple(self._listeners):
                on_change(shown)

    def ended(self, answer_id: str) -> None:
        self._answers.pop(answer_id, None)

    def of(self, model: str) -> tuple[AnswerOverview, ...]:
        """Those of `model`, oldest first."""
        return tuple(answer.overview() for answer in self._answers.values() if answer.model == model)


def _note_chain(answer: _Answer, chain: Chain) -> bool:
    """-> whether `chain` differs in its hops; a repair is noted when it replaces another."""
    before, answer.chain = answer.chain, chain
    if before is None:
        return True
    if before.hops == chain.hops:
        return False
    kept = set(before.hops) & set(chain.hops)
    old = ", ".join(f"{hop.peer[-8:]} [{hop.start}:{hop.end}]" for hop in before.hops if hop not in kept)
    new = ", ".join(f"{hop.peer[-8:]} [{hop.start}:{hop.end}]" for hop in chain.hops if hop not in kept)
    _note_repair(answer, f"{old or 'nothing'} replaced by {new or 'nothing'}")
    return True


def _note_repair(answer: _Answer, sentence: str) -> None:
    answer.repairs.append(plain_text(sentence, MAX_REASON))
    del answer.repairs[:-MAX_REPAIRS]
