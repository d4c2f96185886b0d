"""The verbs of `swarm-plan`: from a request to an answer, and to the answer in plain words.

Owns the JSON of answers and the explanations. The decisions are the planners', which each verb imports when it is used,
so that the command starts quickly. Knows neither files nor flags.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Generic

from swarm.errors import UsageError
from swarm.plan import requests as ask
from swarm.plan.requests import AnyRequest, Names, parse, parse_table
from swarm.types import Hop

SMALLEST = 1e-30  # of what others are divided by
STEPS_PER_MS = 1000  # of `budget.Budget`: the same file gives the same answer, however busy the machine


@dataclass(frozen=True, slots=True)
class Answer:
    """One JSON object, and sentences that say how it came about."""

    fields: dict[str, Any]
    words: list[str]


@dataclass(frozen=True, slots=True)
class Verb(Generic[AnyRequest]):
    """A decision that depends on one request and nothing else."""

    name: str
    summary: str
    request: type[AnyRequest]
    decide: Callable[[AnyRequest], Answer]

    def run(self, data: bytes) -> Answer:
        """A request's JSON -> the answer. Raises UsageError, Infeasible, NoRoute."""
        return self.decide(parse(data, self.request))


def _spans(hops: Iterable[Hop], names: Names) -> list[dict[str, Any]]:
    return [{"node": names.back(h.peer), "start": h.start, "end": h.end} for h in hops]


def _runs(hops: Iterable[Hop], names: Names) -> str:
    return ", ".join(f"{names.back(h.peer)} runs {h.start}:{h.end}" for h in hops)


def _count(number: int, thing: str) -> str:
    return f"{number} {thing}" if number == 1 else f"{number} {thing}s"


def _pool(nodes: Sequence[ask.PoolNode]) -> tuple[Names, list[Any]]:
    from swarm.plan.balance import PoolNode

    names = Names(n.id for n in nodes)
    return names, [PoolNode(names.key(n.id), n.layer_capacity, n.compute, n.region) for n in nodes]


def allocate(request: ask.Allocate) -> Answer:
    from swarm.plan import allocation
    from swarm.plan.budget import Budget

    names, pool = _pool(request.nodes)
    price = allocation.Price(request.compute_ms, request.hop_ms, request.alpha)
    budget = None if request.budget_ms is None else Budget(int(request.budget_ms * STEPS_PER_MS))
    found = allocation.allocate(request.num_layers, pool, price, budget)
    fields = {
        "replicas": [_spans(replica, names) for replica in found.replicas],
        "unused": [names.back(node) for node in found.unused],
        "score": found.score,
        "best_k": found.best_k,
        "stages_by_k": {str(k): stages for k, stages in found.stages_by_k.items()},
        "exact": found.exact,
        "gap": found.gap,
    }
    stages = found.stages_by_k[found.best_k]
    words = [
        f"{_count(found.best_k, 'replica')} of {_count(request.num_layers, 'layer')} from {stages} of"
        f" {_count(len(pool), 'node')} score {found.score:.6g} = {found.best_k}^{request.alpha:g} /"
        f" ({request.compute_ms:g} ms computing + {stages}/{found.best_k} stages x {request.hop_ms:g} ms).",
        *(f"Replica {i}: {_runs(replica, names)}." for i, replica in enumerate(found.replicas, 1)),
        *(
            f"{_count(k, 'replica')} would need {_count(n, 'node')} and score {price.score(k, n):.6g}."
            for k, n in found.stages_by_k.items()
            if k != found.best_k
        ),
        "This is proven to be the best score."
        if found.exact
        else f"The time budget ran out: the plan is greedy, and the best could score at most {found.gap:.1%} more.",
    ]
    if found.unused:
        words.append(f"Not needed: {', '.join(str(names.back(node)) for node in found.unused)}.")
    return Answer(fields, words)


def balance(request: ask.Balance) -> Answer:
    from swarm.plan import balance as planner

    names, pool = _pool(request.nodes)
    found = planner.balance(request.num_layers, pool)
    words = [
        f"Each node gets {found.scale:.6g} layers a unit of compute, and no more than its memory holds:"
        f" {_runs(found.spans, names)}."
    ]
    return Answer({"spans": _spans(found.spans, names), "lambda": found.scale}, words)


def route(request: ask.Route) -> Answer:
    from swarm.plan import routing

    names = Names(n.id for n in request.nodes)
    nodes = [routing.RouteNode(names.key(n.id), n.start, n.end, n.layer_ms) for n in request.nodes]
    rho = {
        here: {there: ms for b, ms in row.items() if (there := names.written(b)) is not None}
        for a, row in request.rtt_ms.items()
        if (here := names.written(a)) is not None
    }
    chain = routing.route(nodes, request.num_layers, rho, request.objective)
    shown = {names.key(n.id): str(n.id) for n in request.nodes}
    words = routing.explain(chain, nodes, rho, names=shown).split("\n")
    if request.objective == "bottleneck":
        words.append(f"no chain's slowest hop is faster than {chain.cost_ms:.1f} ms")
    return Answer({"chain": _spans(chain.hops, names), "cost_ms": chain.cost_ms}, words)


def join(request: ask.Join) -> Answer:
    from swarm.plan.membership import join_span

    tokens = request.layer_capacity_tokens
    if len(tokens) != request.num_layers:
        raise UsageError(f"layer_capacity_tokens has {len(tokens)} numbers for {request.num_layers} layers")
    span = join_span(tokens, request.capacity)
    words = [
        f"Layer {span.start} has the least room, {tokens[span.start]:g} tokens.",
        f"From there the node takes {len(span)} layers, {span}, of the {request.capacity} it could hold.",
    ]
    return Answer({"start": span.start, "end": span.end}, words)


def place(request: ask.Place) -> Answer:
    from swarm.errors import Infeasible
    from swarm.plan import rebalance as planner
    from swarm.plan.membership import place_joiners

    names, snapshot = _snapshot(request)
    joiners = [Hop(peer, span.start, span.end) for peer, span in sorted(place_joiners(snapshot).items())]
    words = [f"Joining: {_runs(joiners, names)}."] if joiners else ["Nobody is joining."]
    fields: dict[str, Any] = {"joiners": _spans(joiners, names)}
    try:
        found = planner.target(snapshot, request.alpha, request.threshold)
    except Infeasible as error:
        return Answer({**fields, "waves": [], "reason": str(error)}, [*words, f"Nobody can move: {error}."])
    waves = [[_move(move, names) for move in wave] for wave in found.plan.waves]
    fields |= {"waves": waves, "cv": found.before.cv, "cv_after": found.after.cv, "reason": found.before.reason}
    words.append(f"As it is: {found.before.reason}. Allocated anew the loads would vary by {found.after.cv:.2f}.")
    words += [
        f"Wave {i}: " + ", ".join(f"{names.back(m.peer)} from {m.old or 'nothing'} to {m.new}" for m in wave) + "."
        for i, wave in enumerate(found.plan.waves, 1)
    ]
    return Answer(fields, words)


def _move(move: Any, names: Names) -> dict[str, Any]:
    old = None if move.old is None else [move.old.start, move.old.end]
    return {"node": names.back(move.peer), "from": old, "to": [move.new.start, move.new.end]}


def _snapshot(request: ask.Place) -> tuple[Names, Any]:
    from swarm.types import CostCurve, LayerSpan, NodeProfile, NodeState, Snapshot

    names, nodes = Names(n.id for n in request.nodes), []
    for i, n in enumerate(request.nodes):
        _check_curve(n.cost, f"nodes[{i}].cost")
        if n.span is not None and n.span[1] > request.num_layers:
            raise UsageError(f"nodes[{i}].span ends at {n.span[1]}, and the model has {request.num_layers} layers")
        links = {there: ms for name, ms in n.link_ms.items() if (there := names.written(name)) is not None}
        nodes.append(
            NodeProfile(
                peer=names.key(n.id),
                name=str(n.id),
                state=NodeState(n.state),
                dtype="",
                weight_hash="",
                layer_capacity=n.layer_capacity,
                span=LayerSpan(*n.span) if n.span is not None else None,
                cost=CostCurve(tuple(n.cost.widths), tuple(n.cost.ms)),
                kv_capacity_tokens=n.kv_capacity_tokens,
                region=n.region,
                link_ms=links,
                pinned=n.pinned,
            )
        )
    return names, Snapshot("", request.num_layers, tuple(sorted(nodes, key=lambda n: n.peer)))


def _check_curve(curve: ask.Curve, where: str) -> None:
    if len(curve.ms) != len(curve.widths) or any(b <= a for a, b in pairwise(curve.widths)):
        raise UsageError(f"{where} needs rising widths and the ms of a layer for each of them")


def rebalance(request: ask.Rebalance) -> Answer:
    from swarm.plan.rebalance import LayerLoad, judge

    for name, total in (("total_kv", request.total_kv), ("total_compute", request.total_compute)):
        if 0 < total < SMALLEST:
            raise UsageError(f"{name} is {total:g}; it is 0, or {SMALLEST:g} at least")
    layers = [LayerLoad(layer.kv, layer.compute) for layer in request.layers]
    found = judge(layers, request.total_kv, request.total_compute, request.alpha, request.threshold)
    words = [
        f"A layer's load is {request.alpha:g} of its share of the KV memory and {1 - request.alpha:g} of its share of"
        " the compute.",
        f"Allocate anew: {'yes' if found.rebalance else 'no'}, {found.reason}.",
    ]
    return Answer({"cv": found.cv, "rebalance": found.rebalance, "reason": found.reason}, words)


def partition(request: ask.Partition) -> Answer:
    from swarm.plan import partition as planner

    names: list[str | int] = [d.id if d.id is not None else i for i, d in enumerate(request.devices)]
    if any(d.flops_per_s is not None for d in request.devices):
        for i, layer in enumerate(request.layers):
            if layer.flops is None:
                raise UsageError(f"layers[{i}] needs its flops, for a device is given by flops_per_s")
    layers = [planner.LayerCost(layer.memory, layer.flops or 0.0) for layer in request.layers]
    devices = [_device(i, d, len(layers)) for i, d in enumerate(request.devices)]
    found = planner.partition(layers, devices, request.method, request.allow_idle)
    spans, words = [], []
    for i, (span, ms) in enumerate(zip(found.spans, found.stage_ms, strict=True)):
        if span is None:
            words.append(f"{names[i]} stays idle.")
            continue
        spans.append({"node": names[i], "start": span.start, "end": span.end})
        held = sum(layer.memory for layer in layers[span.start : span.end])
        words.append(f"{names[i]} runs {span} in {ms:.6g} ms and fills {held:g} of {devices[i].memory:g} of memory.")
    words.append(
        f"The slowest stage takes {found.bottleneck_ms:.6g} ms; no other cut has a faster one ({request.method})."
    )
    return Answer({"spans": spans, "bottleneck_ms": found.bottleneck_ms}, words)


def _device(i: int, device: ask.Device, num_layers: int) -> Any:
    from swarm.plan.partition import Device

    if (device.flops_per_s is None) == (device.layer_ms is None):
        raise UsageError(f"devices[{i}] needs either flops_per_s or layer_ms")
    times = device.layer_ms
    if isinstance(times, float):
        times = [times] * num_layers
    return Device(device.memory, device.flops_per_s, tuple(times) if times is not None else None)


def prefill(request: ask.Prefill) -> Answer:
    from swarm.plan.prefill import ChunkCost, plan_prefill

    cost = ChunkCost(
        request.cost.base_ms,
        request.cost.per_token_ms,
        request.cost.per_token_context_ms,
        request.cost.within_chunk,
    )
    found = plan_prefill(request.length, request.stages, request.min_chunk, cost)
    whole = cost.ms(request.length, 0) * request.stages
    words = [
        f"{request.length} tokens in {len(found.chunks)} chunks pass {request.stages} stages in"
        f" {found.latency_ms:.6g} ms; in one piece they would take {whole:.6g} ms.",
        f"The slowest chunk takes {max(found.chunk_ms):.6g} ms on a stage, the fastest {min(found.chunk_ms):.6g} ms.",
    ]
    return Answer({"chunks": list(found.chunks), "latency_ms": found.latency_ms}, words)


def dispatch(request: ask.Dispatch) -> Answer:
    from swarm.plan import dispatch as planner

    names = Names(n.id for n in request.nodes)
    nodes = [
        planner.NodeLoad(
            names.key(n.id), n.capacity, n.available_memory, n.running_remaining, tuple(n.queued), n.available
        )
        for n in request.nodes
    ]
    found = planner.dispatch(request.work, request.memory, nodes)
    words = []
    for n in nodes:
        ms = f"would be done in {n.completion_ms(request.work):.6g} ms"
        if not n.available:
            ms = "is not available"
        elif n.available_memory < request.memory:
            ms = f"has {n.available_memory:g} of the {request.memory:g} memory the request needs"
        words.append(f"{names.back(n.id)} {ms}.")
    words.append(f"{names.back(found.node)} is first.")
    return Answer({"node": names.back(found.node), "completion_ms": found.completion_ms}, words)


def speculate(request: ask.Speculate) -> Answer:
    from swarm.plan import speculation as planner
    from swarm.types import CostCurve

    stages = []
    for i, stage in enumerate(request.stages):
        _check_curve(stage.cost, f"stages[{i}].cost")
        curve = CostCurve(tuple(stage.cost.widths), tuple(stage.cost.ms))
        stages.append(planner.Stage(stage.layers, stage.layer_ms, curve))
    costs = planner.ChainCosts(tuple(stages), tuple(request.link_ms), request.row_ms)
    asked = request.drafter
    drafter = planner.Drafter(asked.acceptance, asked.level_ms, asked.round_ms, doubtful=asked.doubtful)
    current = planner.Strategy(request.current) if request.current is not None else None
    found = planner.choose(costs, drafter, max_in_flight=request.max_in_flight, current=current, margin=request.margin)
    fields = _forecast(found.best) | {
        "reason": found.reason,
        "forecasts": {f.strategy.value: _forecast(f) for f in found.forecasts},
        "tree": {"parents": list(found.best.shape.parents), "ranks": list(found.best.shape.ranks)},
    }
    return Answer(fields, [f"{part[:1].upper()}{part[1:]}." for part in found.reason.split("; ")])


def _forecast(forecast: Any) -> dict[str, Any]:
    return {
        "strategy": forecast.strategy.value,
        "tokens_per_s": forecast.tokens_per_s,
        "width": forecast.width,
        "depth": forecast.depth,
        "in_flight": forecast.in_flight,
    }


def simulate(data: bytes, trace: Callable[[str], None] | None = None) -> Answer:
    """A scenario, TOML or JSON, run to its end. `trace` gets one line of JSON an event."""
    from swarm.plan.simulate import simulate_table

    found = simulate_table(parse_table(data), trace)
    words = [
        f"{found['finished']} of {found['requests']} requests were served in {found['virtual_s']:.6g} virtual seconds,"
        f" at {found['tokens_per_s']:.4g} tokens/s in all, under the policy {found['policy']}.",
        f"{found['events']} events; {found['left']} nodes left, {found['joined']} joined and {found['moved']} moved.",
    ]
    return Answer(found, words)


VERBS: tuple[Verb[Any], ...] = (
    Verb(
        "allocate", "How many replicas of the model a pool of nodes forms, and who serves what.", ask.Allocate, allocate
    ),
    Verb("balance", "Share the layers of one pipeline by compute, as far as memory allows.", ask.Balance, balance),
    Verb("route", "The quickest chain of nodes over all layers.", ask.Route, route),
    Verb("join-span", "The layers a new node should take.", ask.Join, join),
    Verb("place-all", "Who of a swarm takes or changes layers, as its nodes would decide it.", ask.Place, place),
    Verb("rebalance", "Whether the swarm should be allocated anew.", ask.Rebalance, rebalance),
    Verb("partition", "Cut a model so that its slowest stage is as fast as can be.", ask.Partition, partition),
    Verb("prefill", "Cut a prompt into chunks that a pipeline reads soonest.", ask.Prefill, prefill),
    Verb("dispatch", "The replica that finishes a request first.", ask.Dispatch, dispatch),
    Verb("speculate", "Which drafting strategy, width and depth pay off on a chain.", ask.Speculate, speculate),
)
OLD_NAMES = {"join-span": "join", "place-all": "place"}  # one release ago
