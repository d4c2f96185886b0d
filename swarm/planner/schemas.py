"""The planner's JSON: a Struct for the request of each `swarm-plan` command, made of the planners' own types.

Owns the requests and the error texts of invalid ones; the bounds are in `swarm.quantities`. Unknown fields are errors.
Does not import numpy, so that `swarm-plan --help`, which lists the fields, starts quickly.
"""

from __future__ import annotations

import re
import tomllib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin

import msgspec
from msgspec import Meta

from swarm.errors import UsageError
from swarm.planner.costs.chain_costs import Stage
from swarm.planner.pipeline.dispatch import NodeLoad
from swarm.planner.pipeline.partition import Device, LayerCost, Method
from swarm.planner.pipeline.prefill_chunking import ChunkCost
from swarm.planner.placement.water_filling import PoolNode
from swarm.planner.rebalancing.imbalance import LayerLoad
from swarm.planner.routing.nodes import Objective, RouteNode
from swarm.quantities import (
    MAX_DEVICES,
    MAX_LAYERS,
    MAX_NODES,
    Amount,
    Amounts,
    Edge,
    LayerCapacity,
    Layers,
    NodeId,
    Probability,
    Region,
    Schema,
)
from swarm.types import CostCurve, Snapshot

MAX_BYTES = 64 << 20
OLD_WORDS = ("pipelined", "hybrid")  # deprecated strategies: accepted, but not listed

Pool = Annotated[Sequence[PoolNode], Meta(max_length=MAX_NODES)]


class Request(Schema, frozen=True, kw_only=True):
    """Base of the requests."""


class AllocateRequest(Request, frozen=True):
    num_layers: Layers
    nodes: Pool
    alpha: Annotated[float, Meta(gt=0, le=100)]
    compute_ms: Amount
    hop_ms: Amount
    budget_ms: Annotated[float, Meta(ge=0, le=3_600_000)] | None = None


class BalanceRequest(Request, frozen=True):
    num_layers: Layers
    nodes: Pool


class RouteRequest(Request, frozen=True):
    num_layers: Layers
    nodes: Annotated[Sequence[RouteNode], Meta(max_length=MAX_NODES)]
    rtt_ms: dict[str, dict[str, Amount]]
    objective: Objective = "latency"


class JoinRequest(Request, frozen=True):
    num_layers: Layers
    layer_capacity_tokens: Amounts
    capacity: LayerCapacity


class SwarmNode(Request, frozen=True):
    """The part of a node's profile that placement depends on."""

    id: NodeId
    state: Literal["joining", "loading", "waiting", "serving", "leaving", "draining"]
    layer_capacity: LayerCapacity
    cost: CostCurve
    span: tuple[Edge, Edge] | None = None
    kv_capacity_tokens: Annotated[int, Meta(ge=0, le=1 << 53)] = 0
    pinned: bool = False
    region: Region = ""
    link_ms: Mapping[str, Amount] = {}


class PlaceRequest(Request, frozen=True):
    num_layers: Layers
    nodes: Annotated[Sequence[SwarmNode], Meta(max_length=MAX_NODES)]
    alpha: Probability = 0.5
    threshold: Amount = 0.5


class RebalanceRequest(Request, frozen=True):
    layers: Annotated[Sequence[LayerLoad], Meta(max_length=MAX_LAYERS)]
    total_kv: Amount
    total_compute: Amount
    alpha: Probability
    threshold: Amount


class PartitionRequest(Request, frozen=True):
    layers: Annotated[Sequence[LayerCost], Meta(max_length=MAX_LAYERS)]
    devices: Annotated[Sequence[Device], Meta(max_length=MAX_DEVICES)]
    method: Method = "jupiter"
    allow_idle: bool = False


class PrefillRequest(Request, frozen=True):
    length: Annotated[int, Meta(ge=1, le=1 << 20)]
    stages: Annotated[int, Meta(ge=1, le=MAX_NODES)]
    min_chunk: Annotated[int, Meta(ge=1, le=1 << 20)]
    cost: ChunkCost


class DispatchRequest(Request, frozen=True):
    work: Amount
    memory: Amount
    nodes: Annotated[Sequence[NodeLoad], Meta(max_length=MAX_NODES)]


class DrafterRequest(Request, frozen=True):
    """The part of a `forecast.DrafterProfile` that a forecast needs; `doubtful` is its `uncertain_fraction`."""

    acceptance: Annotated[Sequence[Annotated[Sequence[Probability], Meta(max_length=64)]], Meta(max_length=64)]
    level_ms: Amount = 0.0
    round_ms: Amount = 0.0
    doubtful: Probability = 1.0


class SpeculateRequest(Request, frozen=True):
    stages: Annotated[Sequence[Stage], Meta(max_length=256)]
    link_ms: Annotated[Sequence[Amount], Meta(max_length=257)]
    drafter: DrafterRequest
    row_ms: Amount = 0.0
    max_in_flight: Annotated[int, Meta(ge=1, le=1024)] = 32
    current: Literal["sequential", "tree", "pipedec", "pipelined-tree", "pipelined", "hybrid"] | None = None
    margin: Probability = 0.05


AnyRequest = TypeVar("AnyRequest", bound=Request)
AnyNode = TypeVar("AnyNode", PoolNode, RouteNode, NodeLoad)
Parsed = TypeVar("Parsed")


def parse(data: bytes, kind: type[Parsed]) -> Parsed:
    """Decode JSON as `kind`. Raises UsageError with one sentence that names the field."""
    _check_size(data)
    try:
        return msgspec.json.decode(data, type=kind)
    except msgspec.ValidationError as error:
        raise UsageError(error_text(str(error), kind)) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UsageError(f"the input is not JSON ({error}); NaN and Infinity are not numbers in JSON") from None


def parse_table(data: bytes) -> dict[str, Any]:
    """Decode a scenario: JSON if it begins like an object, else TOML. Raises UsageError."""
    _check_size(data)
    if data.lstrip().startswith(b"{"):
        return parse(data, dict[str, Any])
    try:
        return tomllib.loads(data.decode())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UsageError(f"the scenario is not TOML ({error})") from None


def _check_size(data: bytes) -> None:
    if len(data) > MAX_BYTES:
        raise UsageError(f"the input is over {MAX_BYTES >> 20} MiB, more than is read")
    if not data.strip():
        raise UsageError("the input is empty; it should be one object")


_WORDS = {
    "int": "a whole number",
    "float": "a number",
    "str": "a string",
    "bool": "true or false",
    "array": "a list",
    "object": "an object",
}


def field_list(kind: Any) -> str:
    """The fields of a request, for help texts: nested fields in brackets, "?" after optional ones."""
    names = []
    for field in msgspec.structs.fields(kind):
        parts = sorted(_parts(field.type), key=lambda part: part.__name__)
        inside = f" [{'; '.join(field_list(part) for part in parts)}]" if parts else ""
        names.append(f"{field.name}{'' if field.required else '?'}{inside}")
    return ", ".join(names)


def _parts(kind: Any) -> set[type[msgspec.Struct]]:
    """The Structs in a field's type."""
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return {kind}
    return {part for inner in get_args(kind) for part in _parts(inner)}


def error_text(complaint: str, kind: Any = None) -> str:
    """ "Expected `int`, got `str` - at `$.nodes[0].id`" -> "nodes[0].id: expected a whole number, got a string".

    `kind`: the request type, to list the allowed words of an enum field.
    """
    what, _, where = complaint.partition(" - at ")
    where = where.strip("`").removeprefix("$").removeprefix(".")
    field = re.fullmatch(r"Object (missing required|contains unknown) field `(.*)`", what)
    if field is not None:
        inside = f" in {where}" if where else ""
        if field[1].startswith("missing"):
            return f"{field[2]} is missing{inside}"
        return f"{field[2]}{inside} is no known field"
    plain = re.sub(r"`([^`]*)`", lambda m: " or ".join(_WORDS.get(t, t) for t in m[1].split(" | ")), what)
    plain = plain[:1].lower() + plain[1:]
    if what.startswith("Invalid enum value") and (words := _choices(kind, where)):
        plain = f"{what.removeprefix('Invalid enum value ')} is none of {', '.join(words)}"
    return f"{where}: {plain}" if where else plain


def _choices(kind: Any, name: str) -> list[str]:
    """The allowed words of field `name`; empty if it is not an enum."""
    if not (isinstance(kind, type) and issubclass(kind, msgspec.Struct)):
        return []
    types = [field.type for field in msgspec.structs.fields(kind) if field.name == name]
    words = [word for a in types for b in (a, *get_args(a)) if get_origin(b) is Literal for word in get_args(b)]
    return [word for word in words if word not in OLD_WORDS]


def placement_request_json(snapshot: Snapshot) -> dict[str, Any]:
    """The request with which `swarm-plan place-all` decides as a node does with `snapshot`."""
    nodes = [
        SwarmNode(
            id=n.peer,
            state=n.state.value,
            layer_capacity=n.layer_capacity,
            cost=n.cost,
            span=(n.span.start, n.span.end) if n.span is not None else None,
            kv_capacity_tokens=n.kv_capacity_tokens,
            pinned=n.pinned,
            region=n.region,
            link_ms=dict(n.link_ms),
        )
        for n in snapshot.nodes
    ]
    request: dict[str, Any] = msgspec.to_builtins(PlaceRequest(num_layers=snapshot.num_layers, nodes=nodes))
    return request


class IdMap:
    """Maps ids to the planners' keys and back: strings that sort like the ids.

    Ids are all strings or all whole numbers; numbers are padded with zeros. Raises UsageError for a mixture and for an
    id that occurs twice.
    """

    def __init__(self, ids: Iterable[str | int]) -> None:
        count = Counter(ids)
        if len({isinstance(name, int) for name in count}) > 1:
            raise UsageError("ids must be all strings or all whole numbers")
        name, times = next(iter(count.most_common(1)), ("", 0))
        if times > 1:
            raise UsageError(f"id {name} occurs {times} times; give each node an id of its own")
        width = max((len(str(name)) for name in count), default=0)
        self._of = {name: f"{name:0{width}d}" if isinstance(name, int) else name for name in count}
        self._back = {key: name for name, key in self._of.items()}

    def key(self, name: str | int) -> str:
        return self._of[name]

    def renamed(self, nodes: Iterable[AnyNode]) -> list[AnyNode]:
        """`nodes` with keys for ids."""
        return [msgspec.structs.replace(node, id=self.key(node.id)) for node in nodes]

    def original(self, key: str) -> str | int:
        return self._back[key]

    def parse(self, text: str) -> str | None:
        """The key of an id written as a string, as in a JSON object's keys; None if there is no such id."""
        if text in self._of:
            return self._of[text]
        return self._of.get(int(text)) if text.isdecimal() and len(text) < 20 else None
