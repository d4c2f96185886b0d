"""The messages to the hops when a session is opened, repaired along another chain, or its KV is transferred.

Owns these messages and which KV may be transferred. Pure: `inference_session` sends them.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from swarm.errors import NetworkError, NodeBusy, RemoteError, WrongModel
from swarm.messages import OpenSession, Reroute, SessionFailed, WireSampling
from swarm.types import Chain, Hop, KvSource, NodeProfile, PeerId, Sampling


@dataclass(frozen=True, slots=True)
class SessionSpec:
    """What every hop gets when the session is opened.

    `prompt_tokens`: how many of the text's first tokens are the prompt. If sampling needs the token ids before a row,
    they travel with every step to the tail.
    """

    model: str
    weight_hash: str
    dtype: str
    max_tokens: int
    sampling: Sampling
    num_medusa_candidates: int = 0  # of each of the tail's heads
    prompt_tokens: int = 0


def kv_sources(
    fresh: Collection[Hop],
    chain: Chain,
    held: Mapping[PeerId, int],
    nodes: Mapping[PeerId, NodeProfile],
    committed: int,
) -> dict[PeerId, KvSource]:
    """Replacement -> the departed node that it may fetch its KV from.

    `fresh`: the replacements. `held`: departed nodes of `chain` -> of how many tokens they still hold the KV.
    """
    return {
        hop.peer: KvSource(old.peer, nodes[old.peer].addresses, committed)
        for hop in fresh
        for old in chain.hops
        if (old.start, old.end) == (hop.start, hop.end) and old.peer in nodes and 0 < committed <= held.get(old.peer, 0)
    }


def leading_replacements(hops: Sequence[Hop], kept: Collection[Hop]) -> list[PeerId]:
    """The replacements that `hops` begin with."""
    return [hop.peer for hop in itertools.takewhile(lambda hop: hop not in kept, hops)]


def open_message(
    session: bytes,
    spec: SessionSpec,
    hop: Hop,
    before: PeerId,
    after: PeerId,
    nodes: Mapping[PeerId, NodeProfile],
    history: Sequence[int],
    source: KvSource | None,
) -> OpenSession:
    """`before`, `after`: the peers beside `hop`, "" for the client. `history`: all tokens so far."""
    tail = not after
    tail_needs_history = tail and spec.sampling.needs_history
    return OpenSession(
        session=session,
        model=spec.model,
        weight_hash=spec.weight_hash,
        dtype=spec.dtype,
        start=hop.start,
        end=hop.end,
        max_tokens=spec.max_tokens,
        upstream=before,
        downstream=after,
        downstream_addresses=_addresses(after, nodes),
        sampling=WireSampling.of(spec.sampling) if tail else None,
        num_medusa_candidates=spec.num_medusa_candidates if tail else 0,
        history=list(history) if tail_needs_history else [],
        prompt_tokens=spec.prompt_tokens if tail_needs_history else 0,
        kv_source=source.peer if source else "",
        kv_source_addresses=list(source.addresses) if source else [],
        kv_source_tokens=source.tokens if source else 0,
    )


def reroute_message(
    session: bytes, epoch: int, before: PeerId, after: PeerId, nodes: Mapping[PeerId, NodeProfile], replay: int
) -> Reroute:
    """See `open_message`; `replay`: how many tokens to replay to the hop `after`."""
    return Reroute(session, epoch, before, after, _addresses(after, nodes), replay)


def _addresses(peer: PeerId, nodes: Mapping[PeerId, NodeProfile]) -> list[str]:
    return list(nodes[peer].addresses) if peer in nodes else []


def remote_error(peer: PeerId, failed: SessionFailed) -> NetworkError:
    """The failure that `peer` reported, as the typed error."""
    if failed.error == NodeBusy.code:
        return NodeBusy(failed.detail, peer, failed.retry_after_s)
    if failed.error == WrongModel.code:
        return WrongModel(failed.detail)
    return RemoteError(failed.detail, failed.error, peer)
