"""Where the time of a node's steps goes, by stage: for its owner, and for whoever makes nodes faster.

Owns the sums. Knows no clock: times come with the calls.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

STAGES = {
    "queue": "waiting for other batches, and for steps that share one",
    "plan": "KV blocks and tensors of the batch",
    "kernels": "the layers, and on the last node head and sampling",
    "handover": "from the event loop to the compute thread and back",
    "send": "packing, TLS and the socket",
    "other": "what is left: the event loop, the session's bookkeeping, its earlier steps",
}
"""In the order that a step passes them, but for the last."""


class StageTimes(msgspec.Struct, frozen=True):
    """Sums since the start, in milliseconds from the arrival of a step's frame until its result is with the socket. A
    batch of several sessions counts for each of them."""

    steps: int = 0
    rows: int = 0
    total: float = 0.0
    queue: float = 0.0
    plan: float = 0.0
    kernels: float = 0.0
    handover: float = 0.0
    send: float = 0.0

    @property
    def other(self) -> float:
        return max(0.0, self.total - self.queue - self.plan - self.kernels - self.handover - self.send)

    def __add__(self, more: StageTimes) -> StageTimes:
        return StageTimes(*(a + b for a, b in zip(self._values(), more._values(), strict=True)))

    def __sub__(self, before: StageTimes) -> StageTimes:
        return StageTimes(*(a - b for a, b in zip(self._values(), before._values(), strict=True)))

    def per_step(self) -> dict[str, float]:
        """By stage; empty without steps."""
        return {stage: getattr(self, stage) / self.steps for stage in STAGES} if self.steps else {}

    def _values(self) -> Iterator[Any]:
        return (getattr(self, name) for name in self.__struct_fields__)
