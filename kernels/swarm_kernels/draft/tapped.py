"""Drafters that read hidden states of the target (`runtime.taps`): what they have in common.

Owns the contract between such a drafter, the keys and values that it keeps of one text, and the client that is sent the
states; reading them, and what such a drafter takes from its target.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch

from swarm.types import TappedRows, Taps
from swarm_kernels.draft.session import DraftCachePolicy, DraftCandidates, Path
from swarm_kernels.models.layers import has_tied_head
from swarm_kernels.models.source import ModelSource
from swarm_kernels.ops import dispatch
from swarm_kernels.runtime.llama_span import EMBEDDING, HEAD
from swarm_kernels.runtime.taps import decode

Pack = Callable[[torch.Tensor, torch.Tensor | None], dispatch.Linear]
"""From a linear layer's weight `[out, in]` and bias in fp32."""


class TappedSession(Protocol):
    """One text. `reset`, `extend` and `add` as it goes on, then any number of `propose`. Not thread-safe."""

    def reset(self, tokens: Sequence[int]) -> None:
        """Start another text."""
        ...

    def extend(self, tokens: Sequence[int]) -> None:
        """Append to the text. Nothing is computed before `propose`."""
        ...

    def add(self, rows: TappedRows) -> None:
        """Hidden states of the text's tokens, by position."""
        ...

    def propose(self, paths: Sequence[Path], width: int) -> list[DraftCandidates]:
        """Candidates for the token after each of `paths`, continuations of the text; none while hidden states lack or
        the context is full. Raises DrafterFailed."""
        ...

    def known(self, paths: Sequence[Path], width: int) -> list[DraftCandidates | None]:
        """What `propose` says of each path, as far as that takes no pass; else None."""
        ...


class TappedDraft(Protocol):
    """One drafter, which many texts may share, each from its own thread."""

    @property
    def kind(self) -> str:
        """What it is called where its user has not named it."""
        ...

    @property
    def taps(self) -> Taps: ...

    def new_session(
        self, max_tokens: int | None = None, policy: DraftCachePolicy = DraftCachePolicy()
    ) -> TappedSession:
        """`max_tokens`: of the longest text; by default, and at most, the drafter's context. Raises OutOfMemory."""
        ...


def decode_rows(waiting: Sequence[TappedRows], taps: Taps) -> dict[int, torch.Tensor]:
    """The `[taps * hidden]` that each position's rows hold. Rows that are not finite count as rows that have not
    come."""
    decoded: dict[int, torch.Tensor] = {}
    for rows in waiting:
        if rows:
            parts = [b"".join(row[i] for row in rows.values()) for i in range(len(taps.layers))]
            tapped = torch.cat([decode(part, taps.hidden_size, taps.bits) for part in parts], -1)
            finite = torch.isfinite(tapped).all(-1).tolist()
            kept = zip(rows, tapped, finite, strict=True)
            decoded.update({position: row for position, row, good in kept if good})
    return decoded


def stacked_linear(tensors: Mapping[str, torch.Tensor], names: Sequence[str], pack: Pack) -> dispatch.Linear:
    """The linear layers `names`, stacked by output."""
    biases = [tensors[name + ".bias"].float() for name in names if name + ".bias" in tensors]
    return pack(torch.cat([tensors[name + ".weight"].float() for name in names]), torch.cat(biases) if biases else None)


def target_ends(target: ModelSource, own: Sequence[str] = ()) -> tuple[torch.Tensor, torch.Tensor]:
    """The target's embedding and head, `[vocab, hidden]` in bf16; empty ones where the drafter has its `own`. Raises
    CorruptModel."""
    head = EMBEDDING if has_tied_head(target) else HEAD
    wanted = ["" if "embed_tokens" in own else EMBEDDING, "" if "lm_head" in own else head]
    target.fetch({name for name in wanted if name})
    read = {name: target.tensor(name).to(torch.bfloat16) for name in set(wanted) if name}
    empty = torch.empty(0)
    return read.get(wanted[0], empty), read.get(wanted[1], empty)
