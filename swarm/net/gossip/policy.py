"""The numbers that tune record gossip: what each trades off, and its default."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class GossipPolicy:
    """Whom a reader asks for records, and how often. Times in seconds; a record lives 12."""

    interval_s: float = 2.0  # between two rounds of questions: traffic against freshness where the DHT fails
    urgent_interval_s: float = 0.5  # ... while layers are missing from what is known
    fanout: int = 3  # peers asked in a round: one of them alone is not believed to know all
    min_links: int = 4  # with fewer peers dialled, a round also dials one at random
    ask_timeout_s: float = 1.5  # for an answer, dial included
    silent_s: float = 15.0  # a peer that gave none is not asked again for so long, if there are others
    max_follow_ups: int = 4  # questions to one peer in a row while it has more
    first_wait_s: float = 1.0  # the first snapshot waits so long for an answer, beside the directory's ...
    first_grace_s: float = 0.2  # ... and so long for a second one
    first_without_directory: bool = True  # a reader begins with what peers say, if that has a node for every layer
    directory_patience_s: float = 1.0  # with records in memory, a slow directory is waited for no longer
    rebootstrap_interval_s: float = 3.0  # between two attempts to rejoin a directory that knows nobody
    rebootstrap_peers: int = 16  # ... by the addresses of so many
    slice_records: int = 32  # verified before the event loop goes on: 5 ms
    max_late: int = 1024  # questions remembered whose answers came too late


@dataclass(frozen=True, slots=True)
class AnswerPolicy:
    """What answering others may take."""

    per_peer_s: float = 2.0  # questions of one peer
    per_peer_burst: float = 8.0
    max_ignored: int = 32  # questions over that, unanswered; then they break the protocol
    max_peers: int = 4096  # whose questions are counted; the least recent are forgotten
    records_per_s: float = 40_000.0  # looked at for all answers together: 1 to 2% of a core
    records_burst: float = 120_000.0
    cost_of_answer: int = 200  # records that could be looked at in the time that sending an answer takes
    bytes_per_s: float = 1 << 20  # of all answers together; half of it is for peers whose records we hold
    send_timeout_s: float = 10.0


@dataclass(frozen=True, slots=True)
class RecordFilePolicy:
    """What is kept on disk of a swarm."""

    max_records: int = 128  # some of them will still be there
    max_bytes: int = 128 * 2200
    save_interval_s: float = 60.0  # writing rarely against knowing peers of before a crash
    max_files: int = 32  # one a swarm; the oldest are removed
