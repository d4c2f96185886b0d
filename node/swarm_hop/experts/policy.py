"""The numbers that tune how experts are computed elsewhere: what each trades off, and its default."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ExpertPolicy:
    reply_bytes: int = 1 << 20
    """Outputs in one frame: larger has fewer frames, and a holder seems to stall for longer on a slow link."""
    frames_in_flight: int = 4
    """Of one layer at one holder: hides its round trip while long prompts are read."""
    stall_s: float = 3.0
    """A holder from which nothing comes for so long is given up for another: less than `Limits.stall_timeout_s`, after
    which clients leave the leader."""
    give_up_s: float = 30.0
    """The longest that the leader's device waits for the experts of one layer."""
    avoid_s: float = 5.0
    """A holder that failed is not tried again for so long ..."""
    distrust_s: float = 600.0
    """... and one that sent what cannot be outputs, for so long."""
    probes_at_once: int = 16
    """Holders that are new, tried in one round: invented ones cost the leader a dial each, and no step."""
    dial_s: float = 3.0
    """To reach a holder."""
    max_waiting: int = 64
    """Frames that wait for a holder's processor; more are refused."""
    max_waiting_per_leader: int = 16
    """... of one leader: several layers of a batch never wait at once, a long prompt has `frames_in_flight`."""
    busy_retry_s: float = 2.0
    """When clients of a leader whose experts are lost may come back."""
