"""The metrics of a node at one moment: what `status` shows and Prometheus scrapes.

Owns the fields; `membership.status` fills them in.
"""

from __future__ import annotations

import msgspec

from swarm.planner.scheduling.stage_times import StageTimes


class NodeMetrics(msgspec.Struct, frozen=True, kw_only=True):
    """Counts are since the start; times in the unit that the name ends with."""

    pid: int
    name: str
    peer: str
    address: str
    model: str
    dtype: str
    version: str
    state: str
    paused: tuple[str, ...]  # why it takes no sessions
    start: int | None
    end: int | None
    experts: str = ""  # those that it holds, for people; "" if its layers are whole
    waits_for: str = ""  # experts of its layers that nobody holds, for people; "": none
    layer_ms: float
    layer_capacity: int
    kv_capacity_tokens: int
    kv_free_tokens: int
    open_sessions: int
    max_sessions: int
    up_s: float
    tasks: int  # of the event loop
    sessions: int
    refused: int
    failed: int
    steps: int
    tokens: int
    protocol_errors: int
    sent_bytes: int
    moves: int
    daemon_restarts: int
    # Over all starts with one identity:
    given_layer_tokens: int = 0  # rows computed times layers
    given_compute_s: float = 0.0
    given_bytes: int = 0
    acknowledged_layer_tokens: int = 0  # of which clients have signed receipts
    acknowledging_clients: int = 0
    # Who is served how, now:
    owner_sessions: int = 0  # before all others
    favored_sessions: int = 0  # with a weight above 1, since their nodes have worked for clients of this machine
    contributors: int = 0  # such nodes, by what this machine's clients have measured
    times: StageTimes = StageTimes()  # of the steps, by stage
