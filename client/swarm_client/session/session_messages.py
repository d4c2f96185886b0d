"""The messages to the hops when a session is opened, repaired along another chain, or its KV is transferred.

Owns these messages and which KV may be transferred. Pure: `inference_session` sends them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from swarm.errors import NetworkError, NodeBusy, RemoteError, WrongModel
from swarm.messages import OpenSession, SessionFailed, Step, WireSampling
from swarm.planner.generation.state_machine import SendStep
from swarm.types import Chain, Hop, KvSource, PeerId, Sampling, Taps
from swarm_client.session.session_drafts import TailAsk

REPLAY_ROWS = 256  # tokens of one step that is replayed to a new first hop


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
    claimed: tuple[int, ...] = ()  # of a replay: the tokens after the prompt, as others sampled them
    taps: Taps | None = None  # that a drafter reads
    tail: TailAsk | None = None  # the tail's own drafter

    @property
    def forward_tokens(self) -> bool:
        """Whether the tail must know the token ids of all rows."""
        return self.sampling.needs_history or self.tail is not None


def kv_sources(
    fresh: Collection[Hop],
    chain: Chain,
    held: Mapping[PeerId, int],
    committed: int,
    permit: Callable[[PeerId, PeerId], bytes],
) -> dict[PeerId, KvSource]:
    """Replacement -> the departed node that it may fetch its KV from.

    `fresh`: the replacements. `held`: departed nodes of `chain` -> of how many tokens they still hold the KV.
    `permit(source, heir)`: the token by which the heir may fetch.
    """
    return {
        hop.peer: KvSource(old.peer, committed, permit(old.peer, hop.peer))
        for hop in fresh
        for old in chain.hops
        if (old.start, old.end) == (hop.start, hop.end) and 0 < committed <= held.get(old.peer, 0)
    }


def leading_replacements(hops: Sequence[Hop], kept: Collection[Hop]) -> list[PeerId]:
    """The replacements that `hops` begin with."""
    return [hop.peer for hop in itertools.takewhile(lambda hop: hop not in kept, hops)]


def leading_unchanged(old: Sequence[Hop], hops: Sequence[Hop], kept: Collection[Hop]) -> set[PeerId]:
    """The peers that both chains begin with: what they hold was computed without any hop that was replaced."""
    both = itertools.takewhile(lambda pair: pair[0] == pair[1] and pair[1] in kept, zip(old, hops, strict=False))
    return {hop.peer for _, hop in both}


def open_message(
    session: bytes,
    spec: SessionSpec,
    hop: Hop,
    before: PeerId,
    after: PeerId,
    history: Sequence[int],
    source: KvSource | None,
    kv_key: bytes,
) -> OpenSession:
    """`before`, `after`: the peers beside `hop`, "" for the client. `history`: all tokens so far. `kv_key`: the hop's,
    see `swarm.kv_token`."""
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
        sampling=WireSampling.of(spec.sampling) if tail else None,
        num_medusa_candidates=spec.num_medusa_candidates if tail else 0,
        history=list(history) if tail_needs_history else [],
        prompt_tokens=spec.prompt_tokens if tail_needs_history or (tail and spec.claimed) else 0,
        claimed=list(spec.claimed) if tail else [],
        kv_source=source.peer if source else "",
        kv_source_tokens=source.tokens if source else 0,
        kv_source_token=source.token if source else b"",
        kv_key=kv_key,
    )


def remote_error(peer: PeerId, failed: SessionFailed) -> NetworkError:
    """The failure that `peer` reported, as the typed error."""
    if failed.error == NodeBusy.code:
        return NodeBusy(failed.detail, peer, failed.retry_after_s)
    if failed.error == WrongModel.code:
        return WrongModel(failed.detail)
    return RemoteError(failed.detail, failed.error, peer)


def step_message(session: bytes, action: SendStep, *, forward_tokens: bool) -> Step:
    """`forward_tokens`: as of a `Step`."""
    return Step(
        session=session,
        epoch=action.epoch,
        step=action.step,
        committed_before=action.committed_before,
        causal_rows=len(action.tokens),
        sample=action.sample,
        tokens=[*action.tokens, *action.rows],
        parents=list(action.parents),
        slots=list(action.slots),
        commit_slots=list(action.commit_slots),
        forward_tokens=forward_tokens,
        sample_all=action.sample_all,
    )


def replay_steps(session: bytes, epoch: int, tokens: Sequence[int], *, forward_tokens: bool) -> Iterator[Step]:
    """To a new first hop: `tokens`, which the others hold already."""
    for start in range(0, len(tokens), REPLAY_ROWS):
        part = list(tokens[start : start + REPLAY_ROWS])
        yield Step(session, epoch, 0, start, len(part), sample=False, tokens=part, forward_tokens=forward_tokens)
