"""What hostile nodes do to sessions, and how clients find out.

Owns the effects and the two clocks of discovery that no policy decides: a stall is noticed after a while, and audits
find wrong tokens at a rate. Which hop is then believed what is the policy's decision.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol

from swarm.planner.trust.evidence import FailureKind
from swarm.simulator.clock import Clock
from swarm.simulator.model.hostile import Behaviour, address, behaviours
from swarm.simulator.model.node import SimNode
from swarm.simulator.model.rng import NamedStream
from swarm.simulator.model.session import SimPhase, SimSession, SimStep
from swarm.simulator.policy import ServingPolicy
from swarm.simulator.scenario import Scenario
from swarm.simulator.session_admission import SessionAdmission
from swarm.types import PeerId

_SILENT = (Behaviour.BLACK_HOLE, Behaviour.SYBIL)


class AttackedEngine(Protocol):
    """The part of the engine that is used here."""

    scenario: Scenario
    policy: ServingPolicy
    clock: Clock
    nodes: dict[PeerId, SimNode]
    chains: SessionAdmission

    def notify(self, kind: str, **facts: object) -> None: ...
    def finish(self, session: SimSession) -> None: ...


class Attacks:
    """The hostile nodes of `engine`."""

    def __init__(self, engine: AttackedEngine) -> None:
        self._engine = engine
        self._spec = engine.scenario.hostile
        self._audits = NamedStream(engine.scenario.seed, "audits")
        self._caught: set[PeerId] = set()
        self.pauses: dict[FailureKind, int] = {}  # hops that clients lost, by how

    def begin(self) -> None:
        """Once all nodes are made, before they are placed."""
        if not self._spec.share:
            return
        seed = self._engine.scenario.seed
        hostile = behaviours(self._spec, list(self._engine.nodes), seed)
        for name, node in list(self._engine.nodes.items()):
            node.behaviour = hostile.get(name, Behaviour.HONEST)
            node.addresses = (address(name, node.behaviour, seed),)
            if node.behaviour is Behaviour.HONEST:
                continue
            if self._spec.absent:
                del self._engine.nodes[name]
                continue
            node.claim_factor = self._spec.claim_factor
            if node.behaviour is Behaviour.LIAR:
                node.slow_factor = self._spec.slow_factor

    def swallows(self, step: SimStep, node: SimNode) -> bool:
        """Whether the node computes nothing. Clients give up a hop that holds a step for too long."""
        if node.behaviour in (*_SILENT, Behaviour.LIAR):
            limit_ms = self._engine.policy.stall_ms(step.session, node.id)
            self._engine.clock.after(limit_ms, lambda: self._stalled(step, step.index, step.epoch, node))
        return node.behaviour in _SILENT

    def _stalled(self, step: SimStep, index: int, epoch: int, node: SimNode) -> None:
        session = step.session
        here = step.index == index and not step.done
        if here and session.live and session.epoch == epoch and session.phase is SimPhase.RUNNING:
            self.lose(session, node.id, FailureKind.STALLED)

    def lose(self, session: SimSession, peer: PeerId, kind: FailureKind) -> None:
        """The client gives up a hop."""
        self.pauses[kind] = self.pauses.get(kind, 0) + 1
        self._engine.policy.failed(session, peer, kind, self._engine.clock.now)
        self._engine.chains.lost(session, peer)

    def ran(self, step: SimStep, node: SimNode) -> None:
        """The node has computed a step: its trace, and whether what follows is right."""
        step.done = step.index == len(step.session.hops) - 1
        took = self._engine.clock.now - step.reached_at
        says = node.claimed_ms(step) if node.behaviour is Behaviour.LIAR else took
        step.trace.append(min(says, took))
        if node.behaviour is Behaviour.CHEAT:
            session = step.session
            known = session.wrong_from
            session.wrong_from = session.produced if known is None else min(known, session.produced)

    def answered(self, session: SimSession, tokens: int) -> None:
        """So many more tokens have come back; some of them may be audited."""
        if session.wrong_from is None or not self._spec.audit_rate:
            return
        if self._audits.uniform() < 1.0 - (1.0 - self._spec.audit_rate) ** tokens:
            cheats = [h.peer for h in session.hops if self._engine.nodes[h.peer].behaviour is Behaviour.CHEAT]
            if cheats:
                self._engine.clock.after(self._spec.audit_ms, lambda: self._found_wrong(cheats[0]))

    def holds_back(self, session: SimSession) -> bool:
        """Whether the client audits the whole answer before it takes it; then it ends, or is redone, in a while."""
        suspects = self._engine.policy.audited_whole(session)
        if not suspects or not self._spec.audit_rate:
            return False
        self._engine.clock.after(self._spec.audit_ms, lambda: self._last_audit(session, session.epoch, suspects))
        return True

    def _last_audit(self, session: SimSession, epoch: int, suspects: Collection[PeerId]) -> None:
        if session.epoch != epoch or session.phase is not SimPhase.RUNNING:
            return
        cheats = [peer for peer in suspects if self._engine.nodes[peer].behaviour is Behaviour.CHEAT]
        if not cheats:
            self._engine.finish(session)
        for peer in cheats:
            self._found_wrong(peer)

    def _found_wrong(self, peer: PeerId) -> None:
        """An audit failed: everybody learns of it, and the answers that it has a part in are redone from there."""
        if peer not in self._caught:
            self._caught.add(peer)
            self._engine.notify("caught", n=peer)
            self._engine.policy.caught(peer, self._engine.clock.now)
        for held in list(self._engine.nodes[peer].held.values()):
            self._redo(held.session, peer)

    def _redo(self, session: SimSession, peer: PeerId) -> None:
        wrong_from = session.wrong_from
        if not session.live or session.phase is not SimPhase.RUNNING:
            return
        if wrong_from is not None:
            session.wrong_from = None
            session.produced = wrong_from
            session.held = session.prompt + wrong_from - 1 if wrong_from else 0
            session.ready.clear()  # what the hops after it hold is wrong too
        self._engine.chains.lost(session, peer)
