"""The shared vocabulary as frozen dataclasses: layer span, hop, chain, node profile, snapshot, sampling.

Does not know the wire (`messages`), the DHT (`records`) or how decisions are made (`planner`).
"""

from __future__ import annotations

import enum
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from swarm.errors import UsageError

MAX_GRAMMAR_LENGTH = 64 << 10  # characters
MAX_LOGPROBS = 20  # alternatives of one token
MAX_LOGIT_BIAS = 1024  # tokens
MAX_EXPERTS = 4096  # of one layer
MAX_SLOTS = 4096  # tree slots of one session
MAX_TAPS = 8  # of one drafter
TAP_GROUP = 64  # numbers of a tapped row in 8 bits that share a bf16 scale
FINGERPRINT_BYTES = 16  # of a drafter's files

PeerId = str
"""A libp2p peer id in base58; it embeds the peer's Ed25519 public key."""


@dataclass(frozen=True, slots=True, order=True)
class LayerSpan:
    """The contiguous layers `[start, end)`; `end > start >= 0`."""

    start: int
    end: int

    def __post_init__(self) -> None:
        if not 0 <= self.start < self.end:
            raise UsageError(f"layers {self.start}:{self.end} are not a span; write START:END with START < END")

    @classmethod
    def parse(cls, text: str) -> LayerSpan:
        """`"10:20"` -> layers 10..19. Raises UsageError."""
        match = re.fullmatch(r"\s*(\d{1,6}):(\d{1,6})\s*", text)
        if match is None:
            raise UsageError(f"'{text}' is not a span of layers; write START:END, as in 0:10")
        return cls(int(match[1]), int(match[2]))

    def __len__(self) -> int:
        return self.end - self.start

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.start, self.end))

    def __str__(self) -> str:
        return f"{self.start}:{self.end}"

    def __contains__(self, layer: object) -> bool:
        return isinstance(layer, int) and self.start <= layer < self.end


class NoLayers(LayerSpan):
    """`[start, start)`: of a hop at a client that holds the embedding, or the last norm and the head, and no layer."""

    __slots__ = ()

    def __post_init__(self) -> None:
        if not 0 <= self.start == self.end:
            raise UsageError(f"layers {self.start}:{self.end} are not none")


def layers_of_hop(start: int, end: int) -> LayerSpan:
    """`[start, end)`, which may be no layers. Raises UsageError."""
    return LayerSpan(start, end) if end != start else NoLayers(start, end)


@dataclass(frozen=True, slots=True, order=True)
class ExpertShare:
    """Experts `[first, end)` of the `count` of each mixture in `layers`. The node that leads these layers may hold none
    of them; one that holds them for a leader holds some."""

    layers: LayerSpan
    first: int
    end: int
    count: int

    def __post_init__(self) -> None:
        if not 0 <= self.first <= self.end <= self.count <= MAX_EXPERTS:
            raise UsageError(f"experts {self.first}:{self.end} are none of the {self.count} of a layer")

    @property
    def experts(self) -> range:
        return range(self.first, self.end)

    def __str__(self) -> str:
        return f"experts {self.first}:{self.end} of layers {self.layers}"


class NodeState(enum.StrEnum):
    """Where a node is in its life. Only SERVING and LEAVING nodes are routed to."""

    JOINING = "joining"  # calibrated, has not chosen its layers
    LOADING = "loading"  # has chosen its layers, is reading weights
    WAITING = "waiting"  # leads its layers, of which nobody holds some experts now
    SERVING = "serving"
    LEAVING = "leaving"  # still serves; others should take over its layers
    DRAINING = "draining"  # finishes its sessions, accepts no new ones


class CostCurve(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Milliseconds one layer takes for a batch of `widths[i]` tokens; widths strictly increasing (Ghidorah §III-C).

    The bounds are checked when JSON is decoded, not when Python makes a curve.
    """

    widths: Annotated[tuple[Annotated[int, Meta(ge=1, le=4096)], ...], Meta(min_length=1, max_length=64)]
    ms: Annotated[tuple[Annotated[float, Meta(ge=0, le=1e30)], ...], Meta(min_length=1, max_length=64)]

    def ms_at(self, rows: float) -> float:
        """Milliseconds a layer takes for `rows`: linear between points, extrapolated from the last two."""
        ws, ms = self.widths, self.ms
        if rows <= ws[0] or len(ws) == 1:
            return ms[0] if rows <= ws[0] else ms[0] * rows / ws[0]
        i = next((k for k in range(1, len(ws)) if rows <= ws[k]), len(ws) - 1)
        slope = (ms[i] - ms[i - 1]) / (ws[i] - ws[i - 1])
        return ms[i - 1] + slope * (rows - ws[i - 1])


UNMEASURED = CostCurve((1,), (1.0,))
"""For a node that has published no curve."""


@dataclass(frozen=True, slots=True)
class ModelId:
    """The exact model that a node serves; a session must open with the same."""

    model: str
    weight_hash: str
    dtype: str


@dataclass(frozen=True, slots=True)
class OfferedDrafter:
    """A drafter that a tail runs for clients which ask for it: for the model and the weights of its own record.

    `kind`: "eagle", "dflash" or "mtp". `fingerprint`: of its files. `taps`: what it reads (`Taps.layers`). `tree_ms`:
    what a tree takes there, measured when it was loaded.
    """

    kind: str
    name: str
    fingerprint: bytes
    taps: tuple[int, ...]
    tree_ms: float = 0.0


@dataclass(frozen=True, slots=True)
class NodeProfile:
    """What one node publishes about itself in its record. `layer_ms` has one τ per layer of `span`."""

    peer: PeerId
    name: str
    state: NodeState
    dtype: str
    weight_hash: str
    layer_capacity: int  # how many layers its memory holds
    span: LayerSpan | None = None  # None until it has chosen
    addresses: tuple[str, ...] = ()
    layer_ms: tuple[float, ...] = ()  # τ, queue included
    cost: CostCurve = UNMEASURED
    kv_capacity_tokens: int = 0  # KV tokens each of its layers can hold
    kv_free_tokens: int = 0
    sessions: int = 0
    region: str = ""
    network_coordinate: tuple[float, ...] = ()  # network coordinate, ms
    link_ms: Mapping[PeerId, float] = field(default_factory=dict)  # measured ρ, one way, from this node
    version: str = ""
    pinned: bool = False  # manual placement (`--layers`): rebalancing leaves it alone
    identity_proof: bytes = b""  # of work for its peer id, if it has one (`net.security.proof_of_work`)
    owners: tuple[bytes, ...] = ()  # marks of its owner's clients (`records.owner_tag`)
    experts: ExpertShare | None = None  # of its span, which it leads, or held for leaders, without a span; None: all
    expert_room: int = 0  # experts of one layer that it could hold for a leader, if it holds no whole layer
    lead_room: int = -1  # ... that it could hold if it led the layer; -1: it could not
    drafter: OfferedDrafter | None = None  # of a tail
    published_at: float = 0.0  # its clock, seconds since the epoch

    @property
    def serving(self) -> bool:
        """Whether it accepts sessions."""
        return self.state in (NodeState.SERVING, NodeState.LEAVING) and self.span is not None

    @property
    def holds_for_others(self) -> bool:
        """Whether it holds experts for nodes that lead their layers, or is about to. Such a node is no hop."""
        return self.experts is not None and self.span is None

    @property
    def departing(self) -> bool:
        """Whether it is about to leave or to give up its layers."""
        return self.state in (NodeState.LEAVING, NodeState.DRAINING)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The nodes that serve one model, as one reader read them at one moment. Immutable; sorted by peer id."""

    model: str
    num_layers: int
    nodes: tuple[NodeProfile, ...]
    observed_at: float = 0.0
    rejected_records: Mapping[str, int] = field(default_factory=dict)  # reason -> number of records

    def serving(self) -> tuple[NodeProfile, ...]:
        return tuple(n for n in self.nodes if n.serving)

    def node(self, peer: PeerId) -> NodeProfile | None:
        return next((n for n in self.nodes if n.peer == peer), None)

    def coverage(self) -> list[int]:
        """Replicas of each layer, `[num_layers]`."""
        return coverage((n.span for n in self.serving() if n.span), self.num_layers)

    def missing(self) -> tuple[tuple[int, int], ...]:
        """Half-open ranges of layers that no node serves."""
        return missing_ranges(self.coverage())


@dataclass(frozen=True, slots=True)
class Hop:
    """Layers `[start, end)` computed by one node: all of its span or a part."""

    peer: PeerId
    start: int
    end: int

    @property
    def span(self) -> LayerSpan:
        return layers_of_hop(self.start, self.end)


@dataclass(frozen=True, slots=True)
class Chain:
    """Hops that cover `[0, num_layers)` exactly once, in order, and the expected ms a token."""

    hops: tuple[Hop, ...]
    cost_ms: float = 0.0

    @property
    def peers(self) -> tuple[PeerId, ...]:
        return tuple(h.peer for h in self.hops)

    def __len__(self) -> int:
        return len(self.hops)

    def __str__(self) -> str:
        return " -> ".join(f"{h.peer[-6:]}[{h.start}:{h.end}]" for h in self.hops)


@dataclass(frozen=True, slots=True)
class KvSource:
    """A node to fetch a session's first `tokens` keys and values from; it keeps them for a short time only.

    `token`: the client's permission, see `swarm.kv_token`.
    """

    peer: PeerId
    tokens: int
    token: bytes


class GrammarKind(enum.StrEnum):
    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    LARK = "lark"  # llguidance's dialect of Lark, in which `%json {...}` embeds a schema


class Grammar(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What the generated text must match, from its first character to its end-of-turn token.

    JSON_SCHEMA: `source` is the schema as JSON. The text is one line in the form of `json.dumps`, ", " and ": " between
    its parts and no other white space, in which a small model could lose itself; properties come in the schema's order.
    Bounds and errors: `swarm_kernels.sampling.grammar`.
    """

    kind: GrammarKind
    source: Annotated[str, Meta(min_length=1, max_length=MAX_GRAMMAR_LENGTH)]


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the tail samples the next token. Temperature 0 is greedy; `top_k` 0, `top_p` 1 and `min_p` 0 are off.

    Logits are processed in transformers' order: `logit_bias` (token id, added value), repetition penalty (of prompt
    and answer), frequency and presence penalty (of the answer alone, as in vLLM), `grammar`, then temperature, top-k,
    top-p, min-p. `logprobs`: with each token ln p of it and of so many likeliest ones under the model's own
    distribution, before all of these; None: no log-probabilities. `prompt_logprobs`: the same for the prompt's tokens.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    repetition_penalty: float = 1.0
    seed: int = 0
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    grammar: Grammar | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def needs_history(self) -> bool:
        """Whether a sample depends on the tokens before it, so that the tail must have their ids."""
        penalties = self.repetition_penalty != 1.0 or self.frequency_penalty != 0.0 or self.presence_penalty != 0.0
        return penalties or self.grammar is not None or self.prompt_logprobs is not None


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """ln p of one token of the text, and (token, ln p) of the likeliest ones at its place, likeliest first."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


TappedRow = tuple[bytes, ...]
"""The hidden states of one token, one for each tap, encoded (`swarm_kernels.runtime.taps`)."""

TappedRows = Mapping[int, TappedRow]
"""By position in the text; only positions that have all taps."""


@dataclass(frozen=True, slots=True)
class Taps:
    """The hidden states that a drafter reads (`tap_messages`). `layers`: ascending. `window`: how many of the prompt's
    last rows it wants: more cost bytes once, fewer leave the drafter less context."""

    layers: tuple[int, ...]
    hidden_size: int
    bits: Literal[8, 16] = 8
    window: int = 128

    @property
    def row_bytes(self) -> int:
        return tapped_row_bytes(self.hidden_size, self.bits)

    def of_hop(self, start: int, end: int, *, tail: bool) -> tuple[int, ...]:
        """Those that the hop of layers `[start, end)` has."""
        return tuple(layer for layer in self.layers if start <= layer < end + tail)


def tapped_row_bytes(hidden_size: int, bits: int) -> int:
    return 2 * hidden_size if bits == 16 else hidden_size + 2 * -(-hidden_size // TAP_GROUP)


def coverage(spans: Iterable[LayerSpan], num_layers: int) -> list[int]:
    """How many of `spans` hold each layer, `[num_layers]`."""
    edges = [0] * (num_layers + 1)
    for span in spans:
        edges[min(span.start, num_layers)] += 1
        edges[min(span.end, num_layers)] -= 1
    counts, running = [], 0
    for layer in range(num_layers):
        running += edges[layer]
        counts.append(running)
    return counts


def missing_ranges(counts: Iterable[int]) -> tuple[tuple[int, int], ...]:
    """Half-open runs of zero in `counts`."""
    ranges: list[tuple[int, int]] = []
    for layer, count in enumerate(counts):
        if count:
            continue
        if ranges and ranges[-1][1] == layer:
            ranges[-1] = (ranges[-1][0], layer + 1)
        else:
            ranges.append((layer, layer + 1))
    return tuple(ranges)
