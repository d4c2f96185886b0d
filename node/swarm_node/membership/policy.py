"""The numbers that tune how a node takes part in the swarm: what each trades off, and its default."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class MembershipPolicy:
    """Choosing layers, moving between them, and staying in contact."""

    stability_s: float = 1.0
    """A choice of layers must be stable for so long before a node acts on it: slower start, fewer collisions."""
    max_selection_s: float = 4.0
    """The choice is made by then, stable or not."""
    selection_poll_s: float = 0.2
    """Between two looks at the swarm while choosing."""
    route_staleness_s: float = 1.5
    """Age of the snapshots that clients route by: layers being given up still admit sessions for so long."""
    tick_s: float = 1.0
    """Between two runs of the maintenance loop, each of which reads the directory."""
    rebootstrap_interval_s: float = 3.0
    """Between two attempts to reach peers that vanished from the directory ..."""
    rebootstrap_peers: int = 8
    """... so many of them at a time, the latest seen first."""
    peer_memory_s: float = 600.0
    """Peers that vanished longer ago are forgotten; a partition that lasts longer needs a restart to heal."""
    clock_check_interval_s: float = 10.0
    """Between two comparisons of our clock with a peer's."""
    unknown_leader_s: float = 0.5
    """Between two reads of the directory for peers that ask for experts and lead nothing that we know of."""
    led_widths: tuple[int, ...] = (1, 4, 16, 64)
    """Rows at which a layer is timed whose experts are partly elsewhere: each costs round trips ..."""
    led_context: int = 64
    """... after so many tokens ..."""
    led_cost_budget_s: float = 0.7
    """... within about so long: the announced cost against a later start."""


@dataclass(frozen=True, slots=True)
class PublishPolicy:
    """When this node's record is published."""

    min_interval_s: float = 0.2
    """Between two publications, however often something changes: debounces bursts of sessions."""
    retry_s: float = 1.0
    """Between two attempts at a publication that must succeed ..."""
    retry_for_s: float = 15.0
    """... which is given up after so long."""
    withdraw_timeout_s: float = 2.0
    """Leaving waits so long for the withdrawal; a record that stays expires by itself."""


@dataclass(frozen=True, slots=True)
class RttPolicy:
    """Pings to possible next hops."""

    interval_s: float = 5.0
    """Between two rounds of pings."""
    pings_per_round: int = 8
    """Of many peers, so many in turn: bounds the traffic of a large swarm."""
    strangers_per_round: int = 4
    """Peers besides that have never answered: more finds invented ones sooner."""
    decay: float = 0.7
    """EWMA weight of earlier measurements."""
    max_misses: int = 3
    """Pings in a row without an answer after which a peer's RTT is forgotten."""


@dataclass(frozen=True, slots=True)
class CalibrationPolicy:
    """Measuring this machine: time at the start against precision."""

    probe_layers: int = 2
    """Layers that are loaded and timed."""
    threads_budget_s: float = 0.5
    """To choose the number of threads."""
    cost_budget_s: float = 0.7
    """To measure the cost curve."""
    max_age_s: float = 86400.0
    """A cached measurement is used for so long ..."""
    busy_max_age_s: float = 120.0
    """... or so, if the machine was busy meanwhile: enough for nodes that start together."""
    idle_load: float = 0.75
    """A machine is idle if its load average per core is below this."""


@dataclass(frozen=True, slots=True)
class MemoryPolicy:
    """How the memory budget is divided."""

    free_fraction: float = 0.8
    """Of the free memory, used unless --max-memory is given; the rest is left to other programs."""
    kv_tokens_per_layer: int = 16384
    """KV tokens to have room for before taking another layer (fewer for a short context): sessions against layers."""
    workspace_bytes: int = 64 << 20
    """For activations of a batch, logits and frame buffers."""
