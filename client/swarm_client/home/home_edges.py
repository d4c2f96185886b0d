"""The edges between the hops at home and those of others: hidden states cross them, and never a token id.

Owns the client's own copies of the steps of one session. A step that goes out loses its ids, and of one that comes back
nothing counts but its hidden states: the last hop at home gets the client's copy with them. Knows no chain.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec
import numpy as np

from swarm.codec import Buffer
from swarm.errors import ProtocolError
from swarm.messages import Step
from swarm_kernels.audit.wire_rows import rows_from_wire


@dataclass(slots=True)
class HomeEdges:
    """`hidden_size`: of a row of hidden states on the wire. `dtype`: that the nodes compute in."""

    hidden_size: int
    dtype: str
    replayed: int = 0  # tokens whose rows a new last hop is sent again
    _sent: dict[tuple[int, int], Step] = field(default_factory=dict)  # by epoch and number, without a result yet

    def sent(self, step: Step) -> None:
        """A step has gone to the first hop at home."""
        if step.epoch > max(self._sent, default=(0, 0))[0]:
            self._sent.clear()  # an old epoch's results are ignored
        self._sent[step.epoch, step.step] = step

    def leaving(self, step: Step) -> Step:
        """What others get of a step from the first hop at home."""
        return msgspec.structs.replace(step, tokens=[], forward_tokens=False)

    def returning(self, step: Step, body: Buffer) -> Step | None:
        """What the last hop at home gets for a step from the hop before it; None for one that nobody waits for.

        Raises ProtocolError for hidden states that cannot be right.
        """
        own = self._sent.pop((step.epoch, step.step), None)
        if own is None:
            if not self._is_replay(step):
                return None
            own = msgspec.structs.replace(step, tokens=[], forward_tokens=False)
        if not np.isfinite(rows_from_wire(body, own.rows, self.hidden_size, self.dtype)).all():
            raise ProtocolError("hidden states that are no numbers")
        tokens = own.tokens if own.forward_tokens else []
        return msgspec.structs.replace(own, tokens=tokens, trace=step.trace, active_sessions=step.active_sessions)

    def _is_replay(self, step: Step) -> bool:
        """Whether it is one that was asked for: it commits rows, none of them beyond what was, and samples nothing."""
        plain = not (step.step or step.sample or step.sample_all or step.slots or step.parents or step.commit_slots)
        return plain and 0 < step.causal_rows <= self.replayed - step.committed_before
