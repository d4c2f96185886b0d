"""Which layers this node takes, and the sentence that gives the reason.

Owns the reasons, and the check that a choice is still valid once the weights are read. The rule itself is in
`swarm.planner.placement.join`. Pure: snapshots in, spans out.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from swarm.config import NodeConfig
from swarm.errors import OutOfMemory, UsageError
from swarm.planner.placement.experts import PlacedShare, place_shares
from swarm.planner.placement.join import place_joiners
from swarm.types import ExpertShare, LayerSpan, NodeProfile, NodeState, Snapshot, coverage, missing_ranges
from swarm_kernels.models.config import ModelConfig
from swarm_kernels.runtime.mixture_reader import mixture_layers


@dataclass(frozen=True, slots=True)
class Placement:
    """`span`: None for a node that holds experts for others. `share`: of experts; None: a node holds its layers whole.
    `seen`: the swarm that the choice follows from; None for a manual placement, and for one of experts."""

    span: LayerSpan | None
    reason: str
    seen: Snapshot | None = None
    share: ExpertShare | None = None


def compatible(snapshot: Snapshot, me: NodeProfile) -> Snapshot:
    """The nodes that could be in one chain with this one, itself as it describes itself now."""
    others = (n for n in snapshot.nodes if n.peer != me.peer)
    same = (n for n in others if alike(n, me) and not n.holds_for_others)
    return replace(snapshot, nodes=tuple(sorted((*same, me), key=lambda n: n.peer)))


def alike(node: NodeProfile, me: NodeProfile) -> bool:
    """Whether it computes with the same weights in the same format."""
    return node.weight_hash == me.weight_hash and node.dtype == me.dtype


def manual_span(layers: str, num_layers: int) -> LayerSpan:
    """The span of `--layers`. Raises UsageError."""
    span = LayerSpan.parse(layers)
    if span.end > num_layers:
        raise UsageError(f"--layers {span} exceeds the model's {num_layers} layers")
    return span


def manual(config: NodeConfig, num_layers: int, experts: int) -> Placement | None:
    """What `--layers`, `--experts` and `--lead` set; None: the node decides. `experts`: of each mixture. Raises
    UsageError."""
    if config.layers is None:
        if config.experts or config.lead:
            raise UsageError("--experts and --lead are of certain layers: give --layers START:END too")
        return None
    span = manual_span(config.layers, num_layers)
    if not (config.experts or config.lead):
        return Placement(span, f"layers {span}, as set by --layers")
    if not experts:
        raise UsageError("--experts and --lead are for models with mixtures of experts that our compiled kernels run")
    first, end = 0, 0
    if config.experts:
        asked = LayerSpan.parse(config.experts)
        first, end = asked.start, asked.end
    if end > experts:
        raise UsageError(f"--experts {config.experts} exceeds the {experts} experts of a layer")
    return placed(PlacedShare(ExpertShare(span, first, end, experts), config.lead), "as set by --layers and --experts")


def placed(choice: PlacedShare, why: str) -> Placement:
    share = choice.share
    if not choice.leads:
        return Placement(None, f"{share}, for nodes that lead them, {why}", share=share)
    return Placement(share.layers, f"layers {share.layers} as their leader, with {_own(share)}, {why}", share=share)


def _own(share: ExpertShare) -> str:
    return f"experts {share.first}:{share.end} of {share.count}" if share.experts else "none of their experts"


def choose(snapshot: Snapshot, me: NodeProfile) -> Placement:
    """The span the join rule gives to this node, which is joining."""
    view = compatible(snapshot, me)
    span = place_joiners(view)[me.peer]
    gaps = missing_ranges(coverage((n.span for n in _holding(view.nodes) if n.span), view.num_layers))
    gap = next(((a, b) for a, b in gaps if a < span.end and span.start < b), None)
    if gap is not None:
        sharing = sum(1 for n in view.nodes if n.state is NodeState.JOINING)
        shared = f", shared with {sharing - 1} more that join now" if sharing > 1 else ""
        return Placement(span, f"layers {span}, because nobody serves {gap[0]}:{gap[1]}{shared}", view)
    if len(span) == view.num_layers:
        return Placement(span, f"layers {span}, the whole model, because it fits into this node's memory", view)
    return Placement(span, f"layers {span}, because the swarm has the least room for sessions there", view)


@dataclass(frozen=True, slots=True)
class Mixtures:
    """Of a model: how many experts a layer has, and which layers; none where nodes cannot share them."""

    count: int = 0
    layers: tuple[int, ...] = ()

    @classmethod
    def of(cls, config: ModelConfig) -> Mixtures:
        if config.decoder is None or config.decoder.mixture is None:
            return cls()
        layers = mixture_layers(config, LayerSpan(0, config.num_layers))
        return cls(config.decoder.mixture.experts, tuple(layers))


def with_holders(snapshot: Snapshot, me: NodeProfile) -> Snapshot:
    """`compatible`, and the nodes that hold experts for others."""
    others = (n for n in snapshot.nodes if n.peer != me.peer and alike(n, me))
    return replace(snapshot, nodes=tuple(sorted((*others, me), key=lambda n: n.peer)))


def choose_share(snapshot: Snapshot, me: NodeProfile, mixtures: Mixtures) -> Placement:
    """What a joining node takes whose memory holds no whole layer. Raises OutOfMemory if it can do nothing."""
    view = with_holders(snapshot, me)
    found = place_shares(view, mixtures.count, mixtures.layers).get(me.peer)
    if found is None:
        raise OutOfMemory(
            f"this node's memory holds no whole layer, but {me.expert_room} experts of one, and nobody leads a layer "
            "that needs them; free some memory, raise --max-memory or choose a smaller --dtype"
        )
    return placed(found, "because a whole layer does not fit into this node's memory")


def still_valid(snapshot: Snapshot, me: NodeProfile) -> bool:
    """Whether to keep the span of `me` although others have chosen meanwhile.

    Nodes that did not see each other may have taken the same layers and left a gap elsewhere. Then those whose layers
    others hold too choose again, all but the lowest peer id, so that not all of them leave.
    """
    nodes = _holding(compatible(snapshot, me).nodes)
    if me.span is None or not missing_ranges(coverage((n.span for n in nodes if n.span), snapshot.num_layers)):
        return True
    preferred = (n for n in nodes if n.peer != me.peer and (n.state is NodeState.SERVING or n.peer < me.peer))
    covered = coverage((n.span for n in preferred if n.span), snapshot.num_layers)
    return any(covered[layer] == 0 for layer in me.span)


def _holding(nodes: Iterable[NodeProfile]) -> list[NodeProfile]:
    return [n for n in nodes if n.state in (NodeState.SERVING, NodeState.LOADING)]
