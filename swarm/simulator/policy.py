"""The interface of serving policies: placement, routing, repair, rebalancing. Ours and every baseline implement it.

Owns the interface and defaults that most of them share. A policy may call the planner, and reads the `StaleSnapshot`;
the engine carries out its decisions.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from swarm.errors import Infeasible
from swarm.planner.rebalancing.migration import MigrationPlan
from swarm.planner.routing.repair import Repair
from swarm.planner.trust.evidence import FailureKind
from swarm.simulator.model.network import NetworkModel
from swarm.simulator.model.node import SimNode
from swarm.simulator.model.session import SimSession, SimStep
from swarm.simulator.scenario import PolicySpec, Scenario
from swarm.simulator.stale_snapshot import StaleSnapshot
from swarm.types import Chain, Hop, LayerSpan, PeerId, missing_ranges


@dataclass(frozen=True, slots=True)
class ReplayPlan:
    """A repair, and where its replay comes from: the client or the hop before."""

    repair: Repair
    from_client: bool = False


class ServingPolicy(ABC):
    """`queues_at_nodes`: a session waits in line at a node without room, instead of looking for another chain."""

    queues_at_nodes = False

    def __init__(self, scenario: Scenario, network: NetworkModel) -> None:
        self.scenario = scenario
        self.network = network

    @property
    def spec(self) -> PolicySpec:
        return self.scenario.policy

    @abstractmethod
    def place(self, view: StaleSnapshot) -> Mapping[PeerId, LayerSpan]:
        """The spans at the start; nodes left out idle. Raises Infeasible."""

    def join(self, view: StaleSnapshot) -> Mapping[PeerId, LayerSpan]:
        """The layers of the nodes that are joining now."""
        return {}

    def rebalance(self, view: StaleSnapshot) -> MigrationPlan | None:
        """The moves of a new allocation, if there should be one."""
        return None

    @abstractmethod
    def choose(self, session: SimSession, view: StaleSnapshot) -> Chain:
        """The chain of a new session, or, for policies that extend chains, its first hops. Raises NoRoute."""

    def extend(self, session: SimSession, view: StaleSnapshot) -> Hop:
        """The next hop of a session whose activations have reached the end of its hops. Raises Infeasible."""
        raise Infeasible(f"no hop follows those of session {session.number}")

    def repair(self, session: SimSession, view: StaleSnapshot) -> ReplayPlan:
        """The chain that replaces a broken one; by default a new chain with a full replay. Raises NoRoute."""
        chain = self.choose(session, view)
        return ReplayPlan(Repair(chain, (), chain.hops), from_client=True)

    def chunks(self, session: SimSession, view: StaleSnapshot) -> tuple[int, ...]:
        """How the prompt is cut, tokens; they sum to the prompt."""
        return even_chunks(session.prompt, self.scenario.serving.prefill_chunk)

    def admission_queue(self, session: SimSession) -> str:
        """Sessions that cannot start wait in the queue of this name."""
        return ""

    def answered(self, session: SimSession, step: SimStep, round_ms: float) -> PeerId | None:
        """A step of a single row that went alone has come back -> a hop to give up, if one is too slow."""
        return None

    def stall_ms(self, session: SimSession, peer: PeerId) -> float:
        """How long the session's client waits for progress at a hop."""
        return self.scenario.hostile.stall_ms

    def audited_whole(self, session: SimSession) -> Collection[PeerId]:
        """The hops whose part in the whole answer is audited before its client takes it."""
        return ()

    def failed(self, session: SimSession, peer: PeerId, kind: FailureKind, now: float) -> None:  # noqa: B027
        """The session's client has given up a hop."""

    def caught(self, peer: PeerId, now: float) -> None:  # noqa: B027
        """An audit that everybody can check has shown that the node computes something else."""

    def closed(self, session: SimSession) -> None:  # noqa: B027 - most policies have nothing to do
        """The session has finished or failed."""


def even_chunks(length: int, chunk: int) -> tuple[int, ...]:
    """Chunks of `chunk` tokens and what is left."""
    whole, rest = divmod(length, chunk)
    return (*(chunk for _ in range(whole)), *((rest,) if rest else ()))


def covered(spans: Mapping[PeerId, LayerSpan], num_layers: int) -> None:
    """Raises Infeasible if a layer has no node."""
    counts = [0] * num_layers
    for span in spans.values():
        for layer in span:
            counts[layer] += 1
    missing = missing_ranges(counts)
    if missing:
        ranges = ", ".join(f"{a}:{b}" for a, b in missing)
        raise Infeasible(f"the nodes do not hold the model; layers {ranges} would remain without one")


def alive(view: StaleSnapshot) -> Sequence[SimNode]:
    return [node for node in view.nodes.values() if node.alive]
