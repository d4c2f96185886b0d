"""The commands of `swarm-plan`: from a request to a result, and to its explanation in plain words.

Owns the JSON of results and the explanations. Decisions are made by the planners; those that need numpy are imported
when they are used, so that the program starts quickly. Does not know files or flags.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Generic

from swarm.errors import Infeasible, UsageError
from swarm.planner import schemas
from swarm.planner.costs.chain_costs import ChainCosts
from swarm.planner.pipeline import dispatch as dispatching
from swarm.planner.pipeline import partition as partitioning
from swarm.planner.pipeline.prefill_chunking import plan_prefill
from swarm.planner.placement import water_filling
from swarm.planner.placement.join import join_span, place_joiners
from swarm.planner.rebalancing.imbalance import load_imbalance
from swarm.planner.schemas import AnyRequest, IdMap, parse, parse_table
from swarm.planner.speculation import forecast
from swarm.types import CostCurve, Hop, LayerSpan, NodeProfile, NodeState, Snapshot

if TYPE_CHECKING:
    from swarm.planner.rebalancing.migration import SpanMove

MIN_DIVISOR = 1e-30
WORK_PER_MS = 1000  # of `WorkBudget`: counted work instead of time, so that results do not depend on the machine


@dataclass(frozen=True, slots=True)
class CommandResult:
    """One JSON object, and sentences that explain it."""

    fields: dict[str, Any]
    explanation: list[str]


@dataclass(frozen=True, slots=True)
class Command(Generic[AnyRequest]):
    """A planner's decision as a pure function of one request."""

    name: str
    summary: str
    request: type[AnyRequest]
    decide: Callable[[AnyRequest], CommandResult]

    def run(self, data: bytes) -> CommandResult:
        """A request's JSON -> the result. Raises UsageError, Infeasible, NoRoute."""
        return self.decide(parse(data, self.request))


def _spans(hops: Iterable[Hop], ids: IdMap) -> list[dict[str, Any]]:
    return [{"node": ids.original(h.peer), "start": h.start, "end": h.end} for h in hops]


def _runs(hops: Iterable[Hop], ids: IdMap) -> str:
    return ", ".join(f"{ids.original(h.peer)} runs {h.start}:{h.end}" for h in hops)


def _count(number: int, thing: str) -> str:
    return f"{number} {thing}" if number == 1 else f"{number} {thing}s"


def allocate(request: schemas.AllocateRequest) -> CommandResult:
    from swarm.planner.placement import allocation
    from swarm.planner.placement.work_budget import WorkBudget

    ids = IdMap(n.id for n in request.nodes)
    pool = ids.renamed(request.nodes)
    objective = allocation.Objective(request.compute_ms, request.hop_ms, request.alpha)
    budget = None if request.budget_ms is None else WorkBudget(int(request.budget_ms * WORK_PER_MS))
    found = allocation.allocate(request.num_layers, pool, objective, budget)
    fields = {
        "replicas": [_spans(replica, ids) for replica in found.replicas],
        "unused": [ids.original(node) for node in found.unused],
        "score": found.score,
        "best_k": found.best_k,
        "stages_by_k": {str(k): stages for k, stages in found.stages_by_k.items()},
        "exact": found.exact,
        "gap": found.gap,
    }
    stages = found.stages_by_k[found.best_k]
    sentences = [
        f"{_count(found.best_k, 'replica')} of {_count(request.num_layers, 'layer')} from {stages} of"
        f" {_count(len(pool), 'node')} score {found.score:.6g} = {found.best_k}^{request.alpha:g} /"
        f" ({request.compute_ms:g} ms computing + {stages}/{found.best_k} stages x {request.hop_ms:g} ms).",
        *(f"Replica {i}: {_runs(replica, ids)}." for i, replica in enumerate(found.replicas, 1)),
        *(
            f"{_count(k, 'replica')} would need {_count(n, 'node')} and score {objective.score(k, n):.6g}."
            for k, n in found.stages_by_k.items()
            if k != found.best_k
        ),
        "This is proven to be the best score."
        if found.exact
        else f"The time budget ran out: the plan is greedy, and the best could score at most {found.gap:.1%} more.",
    ]
    if found.unused:
        sentences.append(f"Not needed: {', '.join(str(ids.original(node)) for node in found.unused)}.")
    return CommandResult(fields, sentences)


def balance(request: schemas.BalanceRequest) -> CommandResult:
    ids = IdMap(n.id for n in request.nodes)
    pool = ids.renamed(request.nodes)
    found = water_filling.balance(request.num_layers, pool)
    sentences = [
        f"Each node gets {found.scale:.6g} layers a unit of compute, and no more than its memory holds:"
        f" {_runs(found.spans, ids)}."
    ]
    return CommandResult({"spans": _spans(found.spans, ids), "lambda": found.scale}, sentences)


def route(request: schemas.RouteRequest) -> CommandResult:
    from swarm.planner.routing import route as routing

    ids = IdMap(n.id for n in request.nodes)
    nodes = ids.renamed(request.nodes)
    rho = {
        here: {there: ms for b, ms in row.items() if (there := ids.parse(b)) is not None}
        for a, row in request.rtt_ms.items()
        if (here := ids.parse(a)) is not None
    }
    chain = routing.route(nodes, request.num_layers, rho, request.objective)
    names = {ids.key(n.id): str(n.id) for n in request.nodes}
    sentences = routing.explain(chain, nodes, rho, names=names).split("\n")
    if request.objective == "bottleneck":
        sentences.append(f"no chain's slowest hop is faster than {chain.cost_ms:.1f} ms")
    return CommandResult({"chain": _spans(chain.hops, ids), "cost_ms": chain.cost_ms}, sentences)


def join(request: schemas.JoinRequest) -> CommandResult:
    tokens = request.layer_capacity_tokens
    if len(tokens) != request.num_layers:
        raise UsageError(f"layer_capacity_tokens has {len(tokens)} numbers for {request.num_layers} layers")
    span = join_span(tokens, request.capacity)
    sentences = [
        f"Layer {span.start} has the least KV capacity, {tokens[span.start]:g} tokens.",
        f"From there the node takes {len(span)} layers, {span}, of the {request.capacity} it could hold.",
    ]
    return CommandResult({"start": span.start, "end": span.end}, sentences)


def place(request: schemas.PlaceRequest) -> CommandResult:
    from swarm.planner.rebalancing import target as planner

    ids, snapshot = _snapshot(request)
    joiners = [Hop(peer, span.start, span.end) for peer, span in sorted(place_joiners(snapshot).items())]
    sentences = [f"Joining: {_runs(joiners, ids)}."] if joiners else ["Nobody is joining."]
    fields: dict[str, Any] = {"joiners": _spans(joiners, ids)}
    try:
        found = planner.target_allocation(snapshot, request.alpha, request.threshold)
    except Infeasible as error:
        return CommandResult({**fields, "waves": [], "reason": str(error)}, [*sentences, f"Nobody can move: {error}."])
    waves = [[_move(move, ids) for move in wave] for wave in found.plan.waves]
    fields |= {"waves": waves, "cv": found.before.cv, "cv_after": found.after.cv, "reason": found.before.reason}
    sentences.append(
        f"Now: {found.before.reason}. After the moves the loads' coefficient of variation is {found.after.cv:.2f}."
    )
    sentences += [
        f"Wave {i}: " + ", ".join(f"{ids.original(m.peer)} from {m.old or 'nothing'} to {m.new}" for m in wave) + "."
        for i, wave in enumerate(found.plan.waves, 1)
    ]
    return CommandResult(fields, sentences)


def _move(move: SpanMove, ids: IdMap) -> dict[str, Any]:
    old = None if move.old is None else [move.old.start, move.old.end]
    return {"node": ids.original(move.peer), "from": old, "to": [move.new.start, move.new.end]}


def _snapshot(request: schemas.PlaceRequest) -> tuple[IdMap, Snapshot]:
    ids, nodes = IdMap(n.id for n in request.nodes), []
    for i, n in enumerate(request.nodes):
        _check_curve(n.cost, f"nodes[{i}].cost")
        if n.span is not None and n.span[1] > request.num_layers:
            raise UsageError(f"nodes[{i}].span ends at {n.span[1]}, and the model has {request.num_layers} layers")
        links = {there: ms for name, ms in n.link_ms.items() if (there := ids.parse(name)) is not None}
        nodes.append(
            NodeProfile(
                peer=ids.key(n.id),
                name=str(n.id),
                state=NodeState(n.state),
                dtype="",
                weight_hash="",
                layer_capacity=n.layer_capacity,
                span=LayerSpan(*n.span) if n.span is not None else None,
                cost=n.cost,
                kv_capacity_tokens=n.kv_capacity_tokens,
                region=n.region,
                link_ms=links,
                pinned=n.pinned,
            )
        )
    return ids, Snapshot("", request.num_layers, tuple(sorted(nodes, key=lambda n: n.peer)))


def _check_curve(curve: CostCurve, where: str) -> None:
    if len(curve.ms) != len(curve.widths) or any(b <= a for a, b in pairwise(curve.widths)):
        raise UsageError(f"{where} needs rising widths and the ms of a layer for each of them")


def rebalance(request: schemas.RebalanceRequest) -> CommandResult:
    for name, total in (("total_kv", request.total_kv), ("total_compute", request.total_compute)):
        if 0 < total < MIN_DIVISOR:
            raise UsageError(f"{name} is {total:g}; it must be 0, or at least {MIN_DIVISOR:g}")
    found = load_imbalance(request.layers, request.total_kv, request.total_compute, request.alpha, request.threshold)
    sentences = [
        f"A layer's load is {request.alpha:g} of its share of the KV memory and {1 - request.alpha:g} of its share of"
        " the compute.",
        f"Rebalance: {'yes' if found.rebalance else 'no'}, {found.reason}.",
    ]
    return CommandResult({"cv": found.cv, "rebalance": found.rebalance, "reason": found.reason}, sentences)


def partition(request: schemas.PartitionRequest) -> CommandResult:
    names = [device.id if device.id is not None else i for i, device in enumerate(request.devices)]
    found = partitioning.partition(request.layers, request.devices, request.method, request.allow_idle)
    spans, sentences = [], []
    for i, (span, ms) in enumerate(zip(found.spans, found.stage_ms, strict=True)):
        if span is None:
            sentences.append(f"{names[i]} stays idle.")
            continue
        spans.append({"node": names[i], "start": span.start, "end": span.end})
        held = sum(layer.memory for layer in request.layers[span.start : span.end])
        sentences.append(
            f"{names[i]} runs {span} in {ms:.6g} ms and fills {held:g} of {request.devices[i].memory:g} of memory."
        )
    sentences.append(
        f"The slowest stage takes {found.bottleneck_ms:.6g} ms; no other cut has a faster one ({request.method})."
    )
    return CommandResult({"spans": spans, "bottleneck_ms": found.bottleneck_ms}, sentences)


def prefill(request: schemas.PrefillRequest) -> CommandResult:
    found = plan_prefill(request.length, request.stages, request.min_chunk, request.cost)
    whole = request.cost.ms(request.length, 0) * request.stages
    sentences = [
        f"{request.length} tokens in {len(found.chunks)} chunks pass {request.stages} stages in"
        f" {found.latency_ms:.6g} ms; in one piece they would take {whole:.6g} ms.",
        f"The slowest chunk takes {max(found.chunk_ms):.6g} ms on a stage, the fastest {min(found.chunk_ms):.6g} ms.",
    ]
    return CommandResult({"chunks": list(found.chunks), "latency_ms": found.latency_ms}, sentences)


def dispatch(request: schemas.DispatchRequest) -> CommandResult:
    ids = IdMap(n.id for n in request.nodes)
    nodes = ids.renamed(request.nodes)
    found = dispatching.dispatch(request.work, request.memory, nodes)
    sentences = []
    for n in nodes:
        ms = f"would be done in {n.completion_ms(request.work):.6g} ms"
        if not n.available:
            ms = "is not available"
        elif n.available_memory < request.memory:
            ms = f"has {n.available_memory:g} of the {request.memory:g} memory the request needs"
        sentences.append(f"{ids.original(n.id)} {ms}.")
    sentences.append(f"{ids.original(found.node)} is first.")
    return CommandResult({"node": ids.original(found.node), "completion_ms": found.completion_ms}, sentences)


def speculate(request: schemas.SpeculateRequest) -> CommandResult:
    for i, stage in enumerate(request.stages):
        _check_curve(stage.cost, f"stages[{i}].cost")
    costs = ChainCosts(tuple(request.stages), tuple(request.link_ms), request.row_ms)
    profile = request.drafter
    drafter = forecast.DrafterProfile(
        profile.acceptance, profile.level_ms, profile.round_ms, uncertain_fraction=profile.doubtful
    )
    current = forecast.Strategy(request.current) if request.current is not None else None
    found = forecast.choose(costs, drafter, max_in_flight=request.max_in_flight, current=current, margin=request.margin)
    fields = _forecast(found.best) | {
        "reason": found.reason,
        "forecasts": {f.strategy.value: _forecast(f) for f in found.forecasts},
        "tree": {"parents": list(found.best.shape.parents), "ranks": list(found.best.shape.ranks)},
    }
    return CommandResult(fields, [f"{part[:1].upper()}{part[1:]}." for part in found.reason.split("; ")])


def _forecast(found: forecast.Forecast) -> dict[str, Any]:
    return {
        "strategy": found.strategy.value,
        "tokens_per_s": found.tokens_per_s,
        "width": found.width,
        "depth": found.depth,
        "in_flight": found.in_flight,
    }


def simulate(data: bytes, trace: Callable[[str], None] | None = None) -> CommandResult:
    """Run a scenario, TOML or JSON, to its end. `trace` gets one line of JSON an event."""
    from swarm.planner.cli.simulate import simulate_table

    found = simulate_table(parse_table(data), trace)
    sentences = [
        f"{found['finished']} of {found['requests']} requests were served in {found['virtual_s']:.6g} virtual seconds,"
        f" at {found['tokens_per_s']:.4g} tokens/s in all, under the policy {found['policy']}.",
        f"{found['events']} events; {found['left']} nodes left, {found['joined']} joined and {found['moved']} moved.",
    ]
    return CommandResult(found, sentences)


COMMANDS: tuple[Command[Any], ...] = (
    Command(
        "allocate",
        "How many replicas of the model a pool of nodes forms, and which layers each node serves.",
        schemas.AllocateRequest,
        allocate,
    ),
    Command(
        "balance",
        "Share the layers of one pipeline by compute, as far as memory allows.",
        schemas.BalanceRequest,
        balance,
    ),
    Command("route", "The quickest chain of nodes over all layers.", schemas.RouteRequest, route),
    Command("join-span", "The layers a new node should take.", schemas.JoinRequest, join),
    Command(
        "place-all",
        "Which nodes of a swarm join, move or change layers, as its nodes decide it.",
        schemas.PlaceRequest,
        place,
    ),
    Command(
        "rebalance",
        "Whether layers are uncovered or so unevenly loaded that nodes should move.",
        schemas.RebalanceRequest,
        rebalance,
    ),
    Command(
        "partition", "Cut a model so that its slowest stage is as fast as can be.", schemas.PartitionRequest, partition
    ),
    Command("prefill", "Cut a prompt into chunks that a pipeline reads soonest.", schemas.PrefillRequest, prefill),
    Command("dispatch", "The replica that finishes a request first.", schemas.DispatchRequest, dispatch),
    Command(
        "speculate", "Which drafting strategy, width and depth pay off on a chain.", schemas.SpeculateRequest, speculate
    ),
)
OLD_NAMES = {"join-span": "join", "place-all": "place"}  # deprecated aliases
