"""Node records in the DHT: packing, signing, validation and reading.

    record = MessagePack [payload, signature]        payload = MessagePack map of one `NodeRecord`

Owns the schema, its bounds and every reason to reject a record; a record is an announcement, never state. Does not know
the DHT (`net.dht.directory`), keys (`sign` and `verify` are passed in) or the time.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from swarm.errors import UNDECODABLE, ProtocolError
from swarm.tap_messages import DrafterRecord
from swarm.types import (
    MAX_EXPERTS,
    UNMEASURED,
    CostCurve,
    ExpertShare,
    LayerSpan,
    NodeProfile,
    NodeState,
    PeerId,
    Snapshot,
)
from swarm.wire_types import MAX_RECORD as MAX_RECORD

Sign = Callable[[bytes], bytes]
Verify = Callable[[PeerId, bytes, bytes], bool]
"""(peer id, data, signature) -> whether the signature is by the peer's own key."""

MAX_LIFETIME_S = 60.0  # between publication and expiry
MAX_CLOCK_SKEW_S = 3.0  # how far ahead of ours a peer's clock may be
MAX_PROOF = 96  # bytes
MAX_LAYERS = 4096
MAX_OWNERS = 4  # clients of its owner that a record marks
MAX_LINKS = 24
MAX_ADDRESS = 192  # characters; a relayed address has two peer ids
WRONG_DEPTH = "wrong_depth"  # `InvalidRecord.reason` of a record of another number of layers than the model has
_TAG_BYTES = 16
_CONTEXT = b"swarm node record 1\0"  # domain separation: the signature is valid for nothing else

PeerText = Annotated[str, Meta(min_length=1, max_length=128)]
Name = Annotated[str, Meta(max_length=64)]
Milliseconds = Annotated[float, Meta(ge=0.0, le=1e7)]
Layer = Annotated[int, Meta(ge=0, le=MAX_LAYERS)]
Expert = Annotated[int, Meta(ge=0, le=MAX_EXPERTS)]
Tokens = Annotated[int, Meta(ge=0, le=1 << 40)]
OwnerTag = Annotated[bytes, Meta(min_length=_TAG_BYTES, max_length=_TAG_BYTES)]


class NodeRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=False, omit_defaults=True):
    """The payload. Names are short because 80 records are read every second; unknown fields are for later versions.

    `layer_us`: τ of each layer of the span, queue included, in microseconds; one number if all are alike.
    """

    peer: PeerText
    model: Annotated[str, Meta(min_length=1, max_length=128)]
    hash: Name  # of the weights
    layers: Annotated[int, Meta(ge=1, le=MAX_LAYERS)]  # of the whole model
    state: NodeState
    dtype: Annotated[str, Meta(max_length=16)]
    capacity: Layer
    at: float  # published, seconds since the epoch, by the node's clock
    until: float  # expires
    name: Name = ""
    addrs: Annotated[tuple[Annotated[str, Meta(max_length=MAX_ADDRESS)], ...], Meta(max_length=8)] = ()
    span: tuple[Layer, Layer] | None = None
    layer_us: Annotated[tuple[Annotated[int, Meta(ge=0, le=1 << 33)], ...], Meta(max_length=MAX_LAYERS)] = ()
    cost_w: Annotated[tuple[Annotated[int, Meta(ge=1, le=1 << 16)], ...], Meta(max_length=16)] = ()
    cost_us: Annotated[tuple[Annotated[int, Meta(ge=0, le=1 << 33)], ...], Meta(max_length=16)] = ()
    kv: Tokens = 0
    kv_free: Tokens = 0
    sessions: Annotated[int, Meta(ge=0, le=1 << 20)] = 0
    region: Name = ""
    coord: Annotated[tuple[Annotated[float, Meta(ge=-1e6, le=1e6)], ...], Meta(max_length=8)] = ()
    links: Annotated[dict[PeerText, Milliseconds], Meta(max_length=MAX_LINKS)] = {}
    version: Annotated[str, Meta(max_length=32)] = ""
    pinned: bool = False
    left: bool = False  # it has left the swarm: a goodbye, which older records must not undo
    proof: Annotated[bytes, Meta(max_length=MAX_PROOF)] = b""  # of work (`net.security.proof_of_work`)
    owners: Annotated[tuple[OwnerTag, ...], Meta(max_length=MAX_OWNERS)] = ()  # marks of its owner's clients
    experts: tuple[Layer, Layer, Expert, Expert, Expert] | None = None  # `ExpertShare`: layers, experts, of how many
    room: tuple[Expert, Annotated[int, Meta(ge=-1, le=MAX_EXPERTS)]] = (0, -1)  # for experts; besides, as a leader
    drafter: DrafterRecord | None = None


class _Claim(msgspec.Struct, frozen=True):
    """What a payload says of whom and when it is, before anything else of it is decoded."""

    peer: PeerText
    at: float


class _Signed(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    payload: Annotated[bytes, Meta(max_length=MAX_RECORD)]
    signature: Annotated[bytes, Meta(min_length=64, max_length=64)]


class _Proof(msgspec.Struct, frozen=True, forbid_unknown_fields=False):
    """Of a payload, the proof alone."""

    proof: Annotated[bytes, Meta(max_length=MAX_PROOF)] = b""


class InvalidRecord(ProtocolError):
    """A record that must be rejected; `reason` is one of the keys of `Snapshot.rejected_records`."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


_encoder = msgspec.msgpack.Encoder()
_decode_signed = msgspec.msgpack.Decoder(_Signed).decode
_decode_record = msgspec.msgpack.Decoder(NodeRecord).decode
_decode_claim = msgspec.msgpack.Decoder(_Claim).decode
_decode_proof = msgspec.msgpack.Decoder(_Proof).decode


def owner_tag(node: PeerId, client: PeerId) -> bytes:
    """The mark that `client` belongs to the owner of `node`: known to whom the client meets, and to nobody else. It
    differs from node to node, so that marks alone link nothing."""
    return hashlib.blake2b(f"{node} {client}".encode(), digest_size=_TAG_BYTES, person=b"swarm owner 1").digest()


def key(model: str) -> str:
    """The DHT key under which a model's nodes publish, each under its own peer id."""
    return f"swarm/{model}/nodes"


def encode(profile: NodeProfile, model: str, num_layers: int, lifetime_s: float, sign: Sign) -> tuple[bytes, float]:
    """-> (record bytes, when it expires: `published_at + lifetime_s`).

    A record over MAX_RECORD drops what is optional: first the links beyond the nearest, then the τ of single layers
    (their mean is sent), then addresses, its drafter, the owner's marks. Raises ProtocolError if it is still too long.
    """
    lifetime_s = min(lifetime_s, MAX_LIFETIME_S)
    record = _from_profile(profile, model, num_layers, lifetime_s)
    signed = _pack(record, sign)
    while len(signed) > MAX_RECORD:
        record = _drop_optional_fields(record)
        signed = _pack(record, sign)
    return signed, record.until


def encode_goodbye(
    peer: PeerId, model: str, weight_hash: str, num_layers: int, now: float, lifetime_s: float, sign: Sign
) -> tuple[bytes, float]:
    """-> (the record by which a node withdraws, when it expires). It outlives all that it replaces if `lifetime_s` is
    at least theirs; readers that hold it are not told otherwise by older records.
    """
    until = now + min(lifetime_s, MAX_LIFETIME_S)
    state = NodeState.JOINING  # the one that needs no layers
    record = NodeRecord(peer, model, weight_hash, num_layers, state, "", 0, now, until, left=True)
    return _pack(record, sign), until


def claim(data: bytes) -> tuple[PeerId, float]:
    """(whose a record says it is, when it says it was published), unverified. Raises InvalidRecord."""
    if len(data) > MAX_RECORD:
        raise InvalidRecord("malformed", f"a record of {len(data)} bytes is over the limit of {MAX_RECORD}")
    try:
        claimed = _decode_claim(_decode_signed(data).payload)
    except UNDECODABLE as error:
        raise InvalidRecord("malformed", f"not a record: {error}") from None
    return claimed.peer, claimed.at


def decode(data: bytes, peer: PeerId, model: str, now: float, verify: Verify) -> NodeRecord:
    """The record under `peer`'s subkey of `model`, if it is valid at `now`. Raises InvalidRecord."""
    if len(data) > MAX_RECORD:
        raise InvalidRecord("malformed", f"a record of {len(data)} bytes is over the limit of {MAX_RECORD}")
    try:
        signed = _decode_signed(data)
        record = _decode_record(signed.payload)
    except UNDECODABLE as error:
        raise InvalidRecord("malformed", f"not a record: {error}") from None
    if record.peer != peer:
        raise InvalidRecord("wrong_subkey", f"{peer} published a record of {record.peer}")
    if record.model != model:
        raise InvalidRecord("wrong_model", f"a record of model {record.model} under {model}")
    _check_times(record, now)
    _check_fields(record)
    if not verify(peer, _CONTEXT + signed.payload, signed.signature):
        raise InvalidRecord("bad_signature", f"{peer} did not sign this record")
    return record


def proof_of(data: bytes) -> bytes:
    """The proof of work in a record, of which nothing has been checked; empty if there is none, or no record."""
    try:
        return _decode_proof(_decode_signed(data).payload).proof
    except UNDECODABLE:
        return b""


def to_snapshot(
    records: Mapping[PeerId, bytes], model: str, now: float, verify: Verify, num_layers: int | None = None
) -> Snapshot:
    """All valid records of a model as one Snapshot, sorted by peer id, with the others counted by reason.

    A model has one depth: `num_layers` if given, else that of most records (the smallest, if tied). Records of another
    are rejected as `wrong_depth`. Nodes that have left are not in it. Without any record there are `num_layers or 0`
    layers.
    """
    valid: list[NodeRecord] = []
    rejected: Counter[str] = Counter()
    for peer in sorted(records):
        try:
            record = decode(records[peer], peer, model, now, verify)
            if not record.left:
                valid.append(record)
        except InvalidRecord as error:
            rejected[error.reason] += 1
    if num_layers is None:
        votes = Counter(record.layers for record in valid)
        num_layers = min(votes, key=lambda depth: (-votes[depth], depth), default=0)
    agreed = [record for record in valid if record.layers == num_layers]
    if len(agreed) < len(valid):
        rejected[WRONG_DEPTH] = len(valid) - len(agreed)
    return Snapshot(model, num_layers, tuple(to_profile(record) for record in agreed), now, dict(rejected))


def to_profile(record: NodeRecord) -> NodeProfile:
    span = LayerSpan(*record.span) if record.span else None
    layer_ms = tuple(us / 1e3 for us in record.layer_us)
    if span is not None and len(layer_ms) == 1:
        layer_ms *= len(span)
    cost = CostCurve(record.cost_w, tuple(us / 1e3 for us in record.cost_us)) if record.cost_w else UNMEASURED
    return NodeProfile(
        peer=record.peer,
        name=record.name,
        state=record.state,
        dtype=record.dtype,
        weight_hash=record.hash,
        layer_capacity=record.capacity,
        span=span,
        addresses=record.addrs,
        layer_ms=layer_ms,
        cost=cost,
        kv_capacity_tokens=record.kv,
        kv_free_tokens=record.kv_free,
        sessions=record.sessions,
        region=record.region,
        network_coordinate=record.coord,
        link_ms=record.links,
        version=record.version,
        pinned=record.pinned,
        identity_proof=record.proof,
        owners=record.owners,
        experts=ExpertShare(LayerSpan(*record.experts[:2]), *record.experts[2:]) if record.experts else None,
        expert_room=record.room[0],
        lead_room=record.room[1],
        drafter=record.drafter.to_offered() if record.drafter is not None else None,
        published_at=record.at,
    )


def _from_profile(profile: NodeProfile, model: str, num_layers: int, lifetime_s: float) -> NodeRecord:
    layer_us = tuple(_microseconds(ms) for ms in profile.layer_ms)
    if len(set(layer_us)) == 1:
        layer_us = layer_us[:1]
    return NodeRecord(
        peer=profile.peer,
        model=model,
        hash=profile.weight_hash,
        layers=num_layers,
        state=profile.state,
        dtype=profile.dtype,
        capacity=profile.layer_capacity,
        at=profile.published_at,
        until=profile.published_at + lifetime_s,
        name=profile.name[:64],
        addrs=tuple(address for address in profile.addresses if len(address) <= MAX_ADDRESS)[:8],
        span=(profile.span.start, profile.span.end) if profile.span else None,
        layer_us=layer_us,
        cost_w=profile.cost.widths,
        cost_us=tuple(_microseconds(ms) for ms in profile.cost.ms),
        kv=profile.kv_capacity_tokens,
        kv_free=profile.kv_free_tokens,
        sessions=profile.sessions,
        region=profile.region[:64],
        coord=tuple(round(x, 2) for x in profile.network_coordinate),
        links=_nearest_links(profile.link_ms, MAX_LINKS),
        version=profile.version,
        pinned=profile.pinned,
        proof=profile.identity_proof,
        owners=profile.owners[:MAX_OWNERS],
        experts=_wire_share(profile.experts),
        room=(profile.expert_room, profile.lead_room),
        drafter=DrafterRecord.of(profile.drafter) if profile.drafter is not None else None,
    )


def _wire_share(share: ExpertShare | None) -> tuple[int, int, int, int, int] | None:
    return None if share is None else (share.layers.start, share.layers.end, share.first, share.end, share.count)


def _pack(record: NodeRecord, sign: Sign) -> bytes:
    payload = _encoder.encode(record)
    return _encoder.encode(_Signed(payload, sign(_CONTEXT + payload)))


def _drop_optional_fields(record: NodeRecord) -> NodeRecord:
    changes: dict[str, Any]
    if len(record.links) > 4:
        changes = {"links": _nearest_links(record.links, len(record.links) // 2)}
    elif len(record.layer_us) > 1:
        changes = {"layer_us": (round(sum(record.layer_us) / len(record.layer_us)),)}
    elif len(record.addrs) > 1:
        changes = {"addrs": record.addrs[:1]}
    elif record.drafter is not None:
        changes = {"drafter": None}
    elif record.owners:
        changes = {"owners": ()}
    else:
        raise ProtocolError(f"the record of {record.peer} does not fit into {MAX_RECORD} bytes")
    return msgspec.structs.replace(record, **changes)


def _nearest_links(link_ms: Mapping[PeerId, float], count: int) -> dict[PeerId, float]:
    nearest = sorted(link_ms.items(), key=lambda item: (item[1], item[0]))[:count]
    return {peer: round(ms, 2) for peer, ms in nearest}


def _microseconds(ms: float) -> int:
    return max(0, round(ms * 1e3))


def _check_times(record: NodeRecord, now: float) -> None:
    if not (math.isfinite(record.at) and math.isfinite(record.until)):
        raise InvalidRecord("malformed", "a record's times are not numbers")
    if record.until <= now:
        raise InvalidRecord("late", f"a record expired {now - record.until:.1f} s ago")
    if record.at > now + MAX_CLOCK_SKEW_S:
        raise InvalidRecord("from_the_future", f"a record is from {record.at - now:.1f} s ahead; is a clock wrong?")
    if not 0.0 < record.until - record.at <= MAX_LIFETIME_S:
        raise InvalidRecord("over_lived", f"a record claims to live {record.until - record.at:.0f} s")


def _check_fields(record: NodeRecord) -> None:
    """The constraints that types cannot express."""
    span = record.span
    if span is not None and not span[0] < span[1] <= record.layers:
        raise InvalidRecord("malformed", f"layers {span[0]}:{span[1]} of a model of {record.layers}")
    if record.experts is not None:
        _check_experts(record.experts, span, record.layers)
    placed = record.state not in (NodeState.JOINING, NodeState.LOADING)
    if span is None and ((placed and record.experts is None) or record.layer_us):
        raise InvalidRecord("malformed", f"a {record.state} node without layers")
    if span is not None and len(record.layer_us) not in (0, 1, span[1] - span[0]):
        raise InvalidRecord("malformed", f"{len(record.layer_us)} layer times for layers {span[0]}:{span[1]}")
    taps = record.drafter.taps if record.drafter is not None else ()
    if taps and (
        span is None
        or span[1] != record.layers
        or taps[-1] > record.layers
        or any(a >= b for a, b in itertools.pairwise(taps))
    ):
        raise InvalidRecord("malformed", f"a drafter that reads {taps} of a node with layers {span}")
    widths = record.cost_w
    if len(widths) != len(record.cost_us) or any(a >= b for a, b in itertools.pairwise(widths)):
        raise InvalidRecord("malformed", "a cost curve whose widths do not increase")
    numbers = (*record.coord, *record.links.values())
    if not all(math.isfinite(x) for x in numbers):
        raise InvalidRecord("malformed", "a coordinate or link that is not a number")


def _check_experts(share: tuple[int, int, int, int, int], span: tuple[int, int] | None, layers: int) -> None:
    """A leader's are those of its span, and may be none."""
    start, end, first, last, count = share
    within = 0 <= start < end <= layers and first <= last <= count
    if not within or (first == last if span is None else (start, end) != span):
        raise InvalidRecord("malformed", f"experts {first}:{last} of {count} in layers {start}:{end} of {layers}")
