"""What `swarm-plan` reads: one Struct a verb, with the bounds a number must keep. Unknown fields are mistakes.

Owns the JSON of requests and the sentence that says what is wrong with one. Knows neither the planners nor the answers.
"""

from __future__ import annotations

import re
import tomllib
from collections import Counter
from collections.abc import Iterable
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin

import msgspec
from msgspec import Meta

from swarm.errors import UsageError
from swarm.types import Snapshot

MAX_BYTES = 64 << 20
OLD_WORDS = ("pipelined", "hybrid")  # strategies one release ago: taken, and shown nowhere
MAX_LAYERS = 1000
MAX_NODES = 4096
MAX_DEVICES = 256

Id = Annotated[str, Meta(min_length=1, max_length=256)] | Annotated[int, Meta(ge=0, le=1 << 53)]
Layers = Annotated[int, Meta(ge=1, le=MAX_LAYERS)]
Edge = Annotated[int, Meta(ge=0, le=MAX_LAYERS)]
Amount = Annotated[float, Meta(ge=0, le=1e30)]
Speed = Annotated[float, Meta(ge=1e-9, le=1e30)]
Amounts = Annotated[list[Amount], Meta(max_length=MAX_LAYERS)]
Probability = Annotated[float, Meta(ge=0, le=1)]


class Request(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Base of all requests and their parts."""


class PoolNode(Request, frozen=True):
    id: Id
    layer_capacity: Annotated[int, Meta(ge=0, le=1 << 31)]
    compute: Speed
    region: Annotated[str, Meta(max_length=256)] = ""


Pool = Annotated[list[PoolNode], Meta(max_length=MAX_NODES)]


class Allocate(Request, frozen=True):
    num_layers: Layers
    nodes: Pool
    alpha: Annotated[float, Meta(gt=0, le=100)]
    compute_ms: Amount
    hop_ms: Amount
    budget_ms: Annotated[float, Meta(ge=0, le=3_600_000)] | None = None


class Balance(Request, frozen=True):
    num_layers: Layers
    nodes: Pool


class RouteNode(Request, frozen=True):
    id: Id
    start: Edge
    end: Edge
    layer_ms: Amount | Amounts


class Route(Request, frozen=True):
    num_layers: Layers
    nodes: Annotated[list[RouteNode], Meta(max_length=MAX_NODES)]
    rtt_ms: dict[str, dict[str, Amount]]
    objective: Literal["latency", "bottleneck"] = "latency"


class Join(Request, frozen=True):
    num_layers: Layers
    layer_capacity_tokens: Amounts
    capacity: Annotated[int, Meta(ge=0, le=1 << 31)]


class Curve(Request, frozen=True):
    widths: Annotated[list[Annotated[int, Meta(ge=1, le=4096)]], Meta(min_length=1, max_length=64)]
    ms: Annotated[list[Amount], Meta(min_length=1, max_length=64)]


class SwarmNode(Request, frozen=True):
    id: Id
    state: Literal["joining", "loading", "serving", "leaving", "draining"]
    layer_capacity: Annotated[int, Meta(ge=0, le=1 << 31)]
    cost: Curve
    span: tuple[Edge, Edge] | None = None
    kv_capacity_tokens: Annotated[int, Meta(ge=0, le=1 << 53)] = 0
    pinned: bool = False
    region: Annotated[str, Meta(max_length=256)] = ""
    link_ms: dict[str, Amount] = {}


class Place(Request, frozen=True):
    num_layers: Layers
    nodes: Annotated[list[SwarmNode], Meta(max_length=MAX_NODES)]
    alpha: Probability = 0.5
    threshold: Amount = 0.5


class LayerLoad(Request, frozen=True):
    kv: Amount
    compute: Amount


class Rebalance(Request, frozen=True):
    layers: Annotated[list[LayerLoad], Meta(max_length=MAX_LAYERS)]
    total_kv: Amount
    total_compute: Amount
    alpha: Probability
    threshold: Amount


class LayerCost(Request, frozen=True):
    memory: Amount
    flops: Amount | None = None


class Device(Request, frozen=True):
    memory: Amount
    flops_per_s: Speed | None = None
    layer_ms: Amount | Amounts | None = None
    id: Id | None = None


class Partition(Request, frozen=True):
    layers: Annotated[list[LayerCost], Meta(max_length=MAX_LAYERS)]
    devices: Annotated[list[Device], Meta(max_length=MAX_DEVICES)]
    method: Literal["jupiter", "hypsplit"] = "jupiter"
    allow_idle: bool = False


class ChunkCost(Request, frozen=True):
    base_ms: Amount
    per_token_ms: Amount
    per_token_context_ms: Amount
    within_chunk: Annotated[float, Meta(ge=0, le=0.5)] = 0.0


class Prefill(Request, frozen=True):
    length: Annotated[int, Meta(ge=1, le=1 << 20)]
    stages: Annotated[int, Meta(ge=1, le=MAX_NODES)]
    min_chunk: Annotated[int, Meta(ge=1, le=1 << 20)]
    cost: ChunkCost


class NodeLoad(Request, frozen=True):
    id: Id
    capacity: Speed
    available_memory: Amount
    running_remaining: Amount = 0.0
    queued: Annotated[list[Amount], Meta(max_length=1 << 16)] = []
    available: bool = True


class Dispatch(Request, frozen=True):
    work: Amount
    memory: Amount
    nodes: Annotated[list[NodeLoad], Meta(max_length=MAX_NODES)]


class Stage(Request, frozen=True):
    layers: Layers
    layer_ms: Amount
    cost: Curve


class Drafter(Request, frozen=True):
    acceptance: Annotated[list[Annotated[list[Probability], Meta(max_length=64)]], Meta(max_length=64)]
    level_ms: Amount = 0.0
    round_ms: Amount = 0.0
    doubtful: Probability = 1.0


class Speculate(Request, frozen=True):
    stages: Annotated[list[Stage], Meta(max_length=256)]
    link_ms: Annotated[list[Amount], Meta(max_length=257)]
    drafter: Drafter
    row_ms: Amount = 0.0
    max_in_flight: Annotated[int, Meta(ge=1, le=1024)] = 32
    current: Literal["sequential", "tree", "pipedec", "pipelined-tree", "pipelined", "hybrid"] | None = None
    margin: Probability = 0.05


AnyRequest = TypeVar("AnyRequest", bound=Request)
Parsed = TypeVar("Parsed")


def parse(data: bytes, kind: type[Parsed]) -> Parsed:
    """A request's JSON. Raises UsageError with one sentence that names the field."""
    _check_size(data)
    try:
        return msgspec.json.decode(data, type=kind)
    except msgspec.ValidationError as error:
        raise UsageError(sentence(str(error), kind)) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UsageError(f"the input is not JSON ({error}); NaN and Infinity are not numbers in JSON") from None


def parse_table(data: bytes) -> dict[str, Any]:
    """A scenario's JSON, if it begins like an object, or TOML. Raises UsageError."""
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
        raise UsageError("the input is empty; it should hold one object")


_WORDS = {
    "int": "a whole number",
    "float": "a number",
    "str": "a string",
    "bool": "true or false",
    "array": "a list",
    "object": "an object",
}


def fields(kind: Any) -> str:
    """The fields of a request, for people: parts in brackets, "?" after those that may be left out."""
    said = []
    for field in msgspec.structs.fields(kind):
        parts = sorted(_parts(field.type), key=lambda part: part.__name__)
        inside = f" [{'; '.join(fields(part) for part in parts)}]" if parts else ""
        said.append(f"{field.name}{'' if field.required else '?'}{inside}")
    return ", ".join(said)


def _parts(kind: Any) -> set[type[Request]]:
    """The requests that a field's type is made of."""
    if isinstance(kind, type) and issubclass(kind, Request):
        return {kind}
    return {part for inner in get_args(kind) for part in _parts(inner)}


def sentence(complaint: str, kind: Any = None) -> str:
    """ "Expected `int`, got `str` - at `$.nodes[0].id`" -> "nodes[0].id: expected a whole number, got a string".

    `kind`: what was asked for; a word that is none of a field's is answered with those that are.
    """
    what, _, where = complaint.partition(" - at ")
    where = where.strip("`").removeprefix("$").removeprefix(".")
    field = re.fullmatch(r"Object (missing required|contains unknown) field `(.*)`", what)
    if field is not None:
        inside = f" in {where}" if where else ""
        return (
            f"{field[2]} is missing{inside}"
            if field[1].startswith("missing")
            else f"{field[2]}{inside} is no known field"
        )
    plain = re.sub(r"`([^`]*)`", lambda m: " or ".join(_WORDS.get(t, t) for t in m[1].split(" | ")), what)
    plain = plain[:1].lower() + plain[1:]
    if what.startswith("Invalid enum value") and (words := _choices(kind, where)):
        plain = f"{what.removeprefix('Invalid enum value ')} is none of {', '.join(words)}"
    return f"{where}: {plain}" if where else plain


def _choices(kind: Any, name: str) -> list[str]:
    """The words that field `name` of a request may hold; none if it may hold anything."""
    if not (isinstance(kind, type) and issubclass(kind, Request)):
        return []
    types = [field.type for field in msgspec.structs.fields(kind) if field.name == name]
    words = [word for a in types for b in (a, *get_args(a)) if get_origin(b) is Literal for word in get_args(b)]
    return [word for word in words if word not in OLD_WORDS]


def place_request(snapshot: Snapshot) -> dict[str, Any]:
    """What `swarm-plan place-all` is to be given for it to decide as a node does that has read `snapshot`."""
    nodes = [
        SwarmNode(
            id=n.peer,
            state=n.state.value,
            layer_capacity=n.layer_capacity,
            cost=Curve(widths=list(n.cost.widths), ms=list(n.cost.ms)),
            span=(n.span.start, n.span.end) if n.span is not None else None,
            kv_capacity_tokens=n.kv_capacity_tokens,
            pinned=n.pinned,
            region=n.region,
            link_ms=dict(n.link_ms),
        )
        for n in snapshot.nodes
    ]
    request: dict[str, Any] = msgspec.to_builtins(Place(num_layers=snapshot.num_layers, nodes=nodes))
    return request


class Names:
    """Ids as the planners need them: strings that sort like the ids, and back.

    Ids are all strings or all whole numbers; numbers are padded, so that the lower one is the lower string. Raises
    UsageError for a mixture and for an id that occurs twice.
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

    def back(self, key: str) -> str | int:
        return self._back[key]

    def written(self, text: str) -> str | None:
        """The key of an id that had to be written as a string (a JSON object's key); None if there is no such id."""
        if text in self._of:
            return self._of[text]
        return self._of.get(int(text)) if text.isdecimal() and len(text) < 20 else None
