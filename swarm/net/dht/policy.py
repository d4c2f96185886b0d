"""Numbers that tune the DHT: redundancy, timeouts, and what strangers may cost. Times in seconds."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EntryStorePolicy:
    """What one DHT node holds for others. An entry takes up to 2.2 kB, a usual one 0.7 kB."""

    max_entries: int = 1024  # under one key: the largest swarm of a model that one lookup shows
    max_total_entries: int = 8192  # memory: 18 MB at worst
    max_keys: int = 256
    max_keys_of_peer: int = 8  # a node publishes one model, or a few
    slack: float = 1.125  # over a bound by so much before it is enforced, so that one choice is for many entries
    ordered_from: int = 64  # entries under a key from which their order in a reply matters
    reorder_s: float = 2.0  # ... and for how long such a reply is sent as it is
    sweep_s: float = 5.0  # between two searches for what has expired


@dataclass(frozen=True, slots=True)
class HistoryPolicy:
    """What is remembered of peers whose entries were seen."""

    max_peers: int = 8192
    absence_s: float = 600.0  # a peer that was not seen for so long is a newcomer again: age must be paid in presence


@dataclass(frozen=True, slots=True)
class SignatureBudgetPolicy:
    """Signatures checked, at 0.1 ms each: what 10,000 hostile entries may cost a reader; and bytes sent."""

    known_burst: int = 1024  # of peers whose entries we hold: all of a large swarm at once ...
    known_per_s: float = 128.0  # ... and then a swarm of 1,000 every 8 s, of 80 as often as they publish
    new_burst: int = 256  # a fresh reader sees enough of a large swarm at once ...
    new_per_s: float = 16.0  # ... and all of it, and joiners, soon
    fresh_s: float = 10.0  # for so long a reader is fresh; later, new entries in bulk are a flood and no first look ...
    settled_burst: int = 32  # ... of which so many are looked at at once
    urgent_s: float = 5.0  # with less than half of the burst left, only entries that expire so soon are renewed
    store_burst: int = 8  # stores of one peer
    store_per_s: float = 4.0  # a node stores when something changed, every 0.2 s at most, and sheds what is more
    reply_bytes_per_s: float = 1 << 20  # of entries to one peer; a large swarm's are 0.8 MB, to be had at once ...
    reply_bytes_burst: float = 8 << 20  # ... and several times


@dataclass(frozen=True, slots=True)
class RoutingTablePolicy:
    """Who is in the routing table, and whom a lookup asks whatever the others say."""

    bucket_size: int = 20
    depth_modulo: int = 5
    bucket_block_share: float = 0.25  # of a full bucket, for one public address block while there are others
    max_unanswered: int = 2  # calls in a row, after which a peer leaves the table
    max_met: int = 4096  # peers remembered since when they are known
    anchor_pool: int = 16  # the longest-known peers, of which ...
    anchors: int = 6  # ... so many are asked besides those that a lookup finds: traffic against eclipse


@dataclass(frozen=True, slots=True)
class DhtPolicy:
    """Redundancy and timeouts."""

    replicas: int = 5  # of each record: churn that it survives against traffic
    beam_size: int = 8  # peers that a lookup visits: the replicas, and a few for those that have left
    num_workers: int = 8  # of those at once
    read_bytes_per_s: float = 256 << 10  # of entries that lookups of one reader bring: fresh maps against the cost ...
    read_bytes_burst: float = 2 << 20  # ... of the first one, in a large swarm ...
    narrow_peers: int = 2  # ... and while that is used up, so many are asked, for half as much again
    patience_s: float = 1.5  # after which a lookup with some replies does without the others: black holes cost no more
    wait_timeout_s: float = 3.0  # for one call
    call_timeout_s: float = 10.0  # for a lookup or a store
    ping_timeout_s: float = 3.0  # for one peer, or for the bootstrap peers after a restart
    close_timeout_s: float = 1.0  # to leave the DHT; a dying host never answers
    clock_check_peers: int = 5  # whose clocks are compared with ours
    replica_block_share: float = 0.4  # of a record's replicas, for one public address block while there are others
    max_blacklist: int = 4096  # peers remembered as unresponsive
    store: EntryStorePolicy = EntryStorePolicy()
    history: HistoryPolicy = HistoryPolicy()
    verification: SignatureBudgetPolicy = SignatureBudgetPolicy()
    routing: RoutingTablePolicy = RoutingTablePolicy()
