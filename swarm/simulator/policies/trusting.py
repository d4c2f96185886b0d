"""Our own swarm with clients that believe what they have measured: the decisions of `swarm.planner.trust`.

Owns what each client knows of each node. Every client starts without any knowledge and learns alone, but for failed
audits, whose evidence speaks for itself.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from swarm.config import Limits
from swarm.planner.routing.load_spreading import spread_load
from swarm.planner.routing.route import RouteTable
from swarm.planner.trust.belief import (
    PeerBelief,
    Strangers,
    audits_whole_answer,
    believe,
    believed_snapshot,
    strangers_of_late,
)
from swarm.planner.trust.evidence import UNKNOWN, FailureKind, PeerEvidence, audited, failed, finished, measured, met
from swarm.planner.trust.measurement import hop_times, overdue_hop
from swarm.planner.trust.policy import POLICY
from swarm.planner.trust.trial import Trial, choose_chain, repair_chain
from swarm.simulator.model.network import NetworkModel
from swarm.simulator.model.rng import NamedStream
from swarm.simulator.model.session import SimPhase, SimSession, SimStep
from swarm.simulator.policies.swarm import SwarmPolicy
from swarm.simulator.policy import ReplayPlan
from swarm.simulator.scenario import Scenario
from swarm.simulator.stale_snapshot import KV_ROUNDING_TOKENS, StaleSnapshot
from swarm.types import Chain, PeerId, Snapshot


@dataclass(slots=True)
class ClientKnowledge:
    """Of one client."""

    draws: NamedStream
    known: dict[PeerId, PeerEvidence] = field(default_factory=dict)
    trials: set[int] = field(default_factory=set)  # sessions that try a stranger now


@dataclass(slots=True)
class _Watch:
    """What is expected of the chain of a session."""

    peers: tuple[PeerId, ...]
    layers: tuple[int, ...]
    claims: tuple[float, ...]  # advertised ms of a layer
    believed: tuple[float, ...]
    proven: tuple[bool, ...]
    links_ms: float
    late: tuple[PeerId, int] = ("", 0)  # the hop that was overdue last, how often in a row


class TrustingPolicy(SwarmPolicy):
    """Routes by beliefs, tries strangers in a trickle, and gives up hops that are slow from the start."""

    def __init__(self, scenario: Scenario, network: NetworkModel) -> None:
        super().__init__(scenario, network)
        self._clients: dict[str, ClientKnowledge] = {}
        self._watches: dict[int, _Watch] = {}
        self._caught: dict[PeerId, PeerEvidence] = {}
        self._blocks: dict[PeerId, str] = {}

    def choose(self, session: SimSession, view: StaleSnapshot) -> Chain:
        client, snapshot = self._of(session), view.snapshot()
        beliefs, table = self._believed(session, view, snapshot)
        strangers: Strangers = strangers_of_late(client.known, view.now / 1e3)
        trial = Trial(strangers, len(client.trials), client.draws.uniform(), client.draws.uniform())
        chosen = choose_chain(
            table, beliefs, trial, client_ms=view.client_ms(session.request.client), banned=session.banned
        )
        if chosen.tried is not None:
            client.trials.add(session.number)
        self._watch(session, chosen.chain, beliefs)
        return chosen.chain

    def repair(self, session: SimSession, view: StaleSnapshot) -> ReplayPlan:
        beliefs, table = self._believed(session, view, view.snapshot())
        intact = Chain(tuple(hop for hop in session.hops if hop.peer in session.ready))
        client_ms = view.client_ms(session.request.client)
        found = repair_chain(table, intact, beliefs, client_ms=client_ms, banned=session.banned)
        self._watch(session, found.chain, beliefs)
        return ReplayPlan(found)

    def answered(self, session: SimSession, step: SimStep, round_ms: float) -> PeerId | None:
        watch = self._watches[session.number]
        if len(step.trace) != len(watch.peers):
            return None
        known = self._of(session).known
        times = hop_times(step.trace, round_ms, watch.links_ms, watch.proven)
        for peer, ms, layers, claim in zip(watch.peers, times, watch.layers, watch.claims, strict=True):
            known[peer] = measured(known.get(peer, UNKNOWN), claim, ms / layers)
        expected = [layers * ms for layers, ms in zip(watch.layers, watch.believed, strict=True)]
        late = overdue_hop(times, expected)
        if late is None:
            watch.late = "", 0
            return None
        peer = watch.peers[late]
        watch.late = peer, watch.late[1] + 1 if watch.late[0] == peer else 1
        return peer if watch.late[1] >= POLICY.overdue_steps else None

    def stall_ms(self, session: SimSession, peer: PeerId) -> float:
        watch, spec = self._watches[session.number], self.scenario.hostile
        stranger = peer in watch.peers and not watch.proven[watch.peers.index(peer)]
        saved_ms = 1e3 * (Limits().stall_timeout_s - POLICY.stranger_stall_s) if stranger else 0.0
        return spec.stall_ms - saved_ms

    def audited_whole(self, session: SimSession) -> Collection[PeerId]:
        watch, known = self._watches[session.number], self._of(session).known
        return [peer for peer in watch.peers if audits_whole_answer(known.get(peer, UNKNOWN))]

    def failed(self, session: SimSession, peer: PeerId, kind: FailureKind, now: float) -> None:
        known = self._of(session).known
        evidence = met(known.get(peer, UNKNOWN), now / 1e3, self._blocks.get(peer, ""))
        known[peer] = failed(evidence, kind, now / 1e3)

    def caught(self, peer: PeerId, now: float) -> None:
        self._caught[peer] = audited(met(UNKNOWN, now / 1e3), False, now / 1e3)
        for client in self._clients.values():
            client.known[peer] = audited(met(client.known.get(peer, UNKNOWN), now / 1e3), False, now / 1e3)

    def closed(self, session: SimSession) -> None:
        client, now = self._of(session), (session.done_ms or 0.0) / 1e3
        client.trials.discard(session.number)
        watch = self._watches.pop(session.number, None)
        if watch is None or session.phase is not SimPhase.DONE:
            return
        for peer in watch.peers:
            evidence = met(client.known.get(peer, UNKNOWN), now, self._blocks.get(peer, ""))
            client.known[peer] = finished(evidence, session.prompt + session.produced)

    # What a client knows ---------------------------------------------------------------------------------------------

    def _of(self, session: SimSession) -> ClientKnowledge:
        name = session.request.client
        if name not in self._clients:
            draws = NamedStream(self.scenario.seed, "trust", name)
            self._clients[name] = ClientKnowledge(draws, dict(self._caught))
        return self._clients[name]

    def _believed(
        self, session: SimSession, view: StaleSnapshot, snapshot: Snapshot
    ) -> tuple[dict[PeerId, PeerBelief], RouteTable]:
        beliefs = believe(snapshot, self._of(session).known, view.now / 1e3)
        self._blocks = {peer: belief.block for peer, belief in beliefs.items()}
        room = -(-session.most_tokens // KV_ROUNDING_TOKENS) * KV_ROUNDING_TOKENS
        believed = spread_load(believed_snapshot(snapshot, beliefs), session.request.client)
        return beliefs, RouteTable(believed, min_free_tokens=room)

    def _watch(self, session: SimSession, chain: Chain, beliefs: Mapping[PeerId, PeerBelief]) -> None:
        hops = chain.hops
        of = [beliefs.get(hop.peer) for hop in hops]
        ends = (session.request.client, *chain.peers, session.request.client)
        links = sum(self.network.latency(a, b) for a, b in itertools.pairwise(ends))
        self._watches[session.number] = _Watch(
            chain.peers,
            tuple(len(hop.span) for hop in hops),
            tuple(belief.advertised_ms if belief else 0.0 for belief in of),
            tuple(belief.layer_ms if belief else 1e9 for belief in of),
            tuple(belief.proven if belief else False for belief in of),
            links,
        )
