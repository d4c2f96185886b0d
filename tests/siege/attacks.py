"""All attacks, by name. A prepared attack returns what it then does until its time is over."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import attack_compute as compute
import attack_gossip as gossip
import attack_map as maps
import attack_nodes as nodes
import attack_sessions as sessions
import attack_transport as transport
from hostile import Siege

Prepare = Callable[[Siege], Awaitable[Callable[[], Awaitable[None]]]]


@dataclass(frozen=True)
class Attack:
    """`on_map`: what readers see of the map, and whether a fresh client is served, is part of what is measured.
    `confined`: to a core, by a low weight; a node that lies does the work of others instead, and gets what they get."""

    prepare: Prepare
    on_map: bool = False
    confined: bool = True

    @property
    def summary(self) -> str:
        return (self.prepare.__doc__ or "").split("\n")[0]


ATTACKS: dict[str, Attack] = {
    "none": Attack(nodes.none, on_map=True),
    "tree-steps": Attack(compute.tree_steps),
    "small-prefills": Attack(compute.small_prefills),
    "grammars": Attack(compute.grammars),
    "oversize-sampling": Attack(compute.oversize_sampling),
    "wrong-opens": Attack(sessions.wrong_opens),
    "strange-dials": Attack(sessions.strange_dials),
    "kv-reservations": Attack(sessions.kv_reservations),
    "control-frames": Attack(sessions.control_frames),
    "kv-fetch": Attack(sessions.kv_fetch),
    "unsolicited": Attack(sessions.unsolicited),
    "big-headers": Attack(transport.big_headers),
    "big-bodies": Attack(transport.big_bodies),
    "half-open-tls": Attack(transport.half_open_tls),
    "slow-readers": Attack(transport.slow_readers),
    "many-connections": Attack(transport.many_connections),
    "malformed": Attack(transport.malformed),
    "black-hole-node": Attack(nodes.black_hole, on_map=True, confined=False),
    "slow-node": Attack(nodes.slow, on_map=True, confined=False),
    "inventing-tail": Attack(nodes.inventing_tail, on_map=True, confined=False),
    "wrong-hop": Attack(nodes.wrong_hop, on_map=True, confined=False),
    "small-records": Attack(maps.small_records, on_map=True),
    "black-hole-records": Attack(maps.black_hole_records, on_map=True),
    "store-flood": Attack(maps.store_flood, on_map=True),
    "gossip-records": Attack(gossip.gossip_records, on_map=True),
    "gossip-questions": Attack(gossip.gossip_questions, on_map=True),
    "gossip-answers": Attack(gossip.gossip_answers, on_map=True),
    "key-takeover-hosts": Attack(maps.key_takeover_hosts, on_map=True),
    "key-takeover": Attack(maps.key_takeover, on_map=True),
}
