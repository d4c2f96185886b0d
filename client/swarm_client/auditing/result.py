"""What came of an audit. Decides nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from swarm.types import PeerId
from swarm_client.auditing.reports import Evidence


@dataclass(frozen=True, slots=True)
class AuditResult:
    """`liars`: hops that two other replicas contradict, or that deny what they sent to this client; they are routed
    around from now on, and the answer is right up to `position` at least. `disputed`: two sides that contradict each
    other, with nobody to decide between them. `checked`: hops whose results another node confirmed. `reason`: why not
    all were, a sentence.
    """

    liars: tuple[PeerId, ...] = ()
    disputed: tuple[PeerId, ...] = ()
    checked: tuple[PeerId, ...] = ()
    position: int = 0  # the first token that is not confirmed, where there are `liars` or `disputed`
    reason: str = ""
    evidence: Evidence | None = None

    def to_json(self) -> dict[str, Any]:
        return {
            "liars": list(self.liars),
            "disputed": list(self.disputed),
            "checked": list(self.checked),
            "position": self.position,
            "reason": self.reason,
        }
