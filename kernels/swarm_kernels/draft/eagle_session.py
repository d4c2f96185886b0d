"""Draft tokens of a drafter that writes what stands for the target's states (EAGLE-3, MTP layers), for one text and
hypothetical continuations of it.

Owns the drafter's keys and values of the text, made of the target's hidden states as far as they have come, and those
of a tree below it, made of the drafter's own. The tree is computed anew for every text: what was a hypothesis has the
target's states by then. Rows of the text follow each other without a gap: where one has not come, what lay before it is
forgotten, and without that of the last token but one there are no draft tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from swarm.types import TappedRows, Taps
from swarm_kernels.batch import AttentionMetadata
from swarm_kernels.draft.session import DraftCachePolicy, DraftCandidates, DraftHead, Path
from swarm_kernels.draft.tapped import decode_rows
from swarm_kernels.kvcache.cache import KVCacheManager, StepRequest
from swarm_kernels.kvcache.sequence import ROOT

_SESSION = b"draft"


class ChainedDraft(Protocol):
    """Reads the target's states, or its own output in their place. A row belongs to a position t of the text: it reads
    the states at t and the token at t + 1, and says what comes at t + 2."""

    @property
    def context_length(self) -> int: ...

    @property
    def taps(self) -> Taps: ...

    def new_cache(self, max_tokens: int) -> KVCacheManager: ...

    def fuse(self, tapped: torch.Tensor) -> torch.Tensor:
        """The target's `[n, taps * hidden]` -> `[n, hidden]`, the states that `run` reads."""
        ...

    def run(
        self, tokens: Sequence[int], states: torch.Tensor, plan: AttentionMetadata, cache: KVCacheManager
    ) -> torch.Tensor:
        """Rows of the tokens at t + 1 and the states `[n, hidden]` at t -> `[n, hidden]`, what stands for the target's
        states at t + 1."""
        ...

    def new_head(self) -> DraftHead:
        """For one text: from rows of `run` to the likeliest tokens at t + 2. It raises DrafterFailed if these are no
        numbers."""
        ...


@dataclass(slots=True)
class _Node:
    """A computed row. `hidden [hidden]`: what stands for the target's states at its token."""

    slot: int
    hidden: torch.Tensor
    candidates: DraftCandidates


class EagleSession:
    """See `TappedSession`."""

    def __init__(
        self, model: ChainedDraft, max_tokens: int | None = None, policy: DraftCachePolicy = DraftCachePolicy()
    ) -> None:
        """`max_tokens`: of the longest text; by default, and at most, the drafter's context. Raises OutOfMemory."""
        self._model, self._policy = model, policy
        self._head = model.new_head()
        self._limit = min(max_tokens or model.context_length, model.context_length)
        self._cache = model.new_cache(self._limit + 2 * policy.max_tree_slots)
        self._cache.open(_SESSION, self._limit)
        self._tokens: list[int] = []
        self._rows: dict[int, torch.Tensor] = {}  # [taps * hidden] by position, not computed yet
        self._waiting: list[TappedRows] = []  # not decoded yet: that is for the thread that proposes
        self._first = 0  # position of the first row in the cache
        self._nodes: dict[Path, _Node] = {}
        self._free: list[int] = []

    def reset(self, tokens: Sequence[int]) -> None:
        self._cache.rollback(_SESSION, 0)
        self._tokens, self._rows, self._waiting = list(tokens), {}, []
        self._head = self._model.new_head()
        self._head.allow(tokens)
        self._forget_tree()

    def extend(self, tokens: Sequence[int]) -> None:
        self._tokens += tokens
        self._head.allow(tokens)

    def add(self, rows: TappedRows) -> None:
        self._waiting.append(rows)

    def propose(self, paths: Sequence[Path], width: int) -> list[DraftCandidates]:
        asked, paths = paths, [path for path in paths if len(path) <= self._policy.max_own_levels]
        longest = max((len(path) for path in paths), default=0)
        if not paths or len(self._tokens) + longest > self._limit or not self._follow_text():
            return [[] for _ in asked]
        missing = sorted({p[:end] for p in paths for end in range(1, len(p) + 1)} - self._nodes.keys(), key=_by_length)
        if len(missing) > len(self._free):
            self._drop_tree()
            missing = sorted({p[:end] for p in paths for end in range(1, len(p) + 1)}, key=_by_length)
        for length in range(1, longest + 1):
            self._compute_level([path for path in missing[: self._policy.max_tree_slots] if len(path) == length])
        incomplete = [p for p in dict.fromkeys(paths) if p in self._nodes and len(self._nodes[p].candidates) < width]
        if incomplete:
            hidden = torch.stack([self._nodes[path].hidden for path in incomplete])
            for path, candidates in zip(incomplete, self._head.propose(hidden, width), strict=True):
                self._nodes[path].candidates = candidates
        return [self._nodes[path].candidates[:width] if path in self._nodes else [] for path in asked]

    def known(self, paths: Sequence[Path], width: int) -> list[DraftCandidates | None]:
        current = self._first + self._cache.length(_SESSION) == len(self._tokens) - 1 and () in self._nodes
        nodes = [self._nodes.get(path) if current else None for path in paths]
        known = [n.candidates[:width] if n is not None and len(n.candidates) >= width else None for n in nodes]
        return [[] if len(path) > self._policy.max_own_levels else k for path, k in zip(paths, known, strict=True)]

    def _follow_text(self) -> bool:
        """Compute the rows of the text that have come. -> whether there is one of the last token but one."""
        self._rows.update(decode_rows(self._waiting, self._model.taps))
        self._waiting = []
        last, done = len(self._tokens) - 2, self._cache.length(_SESSION)
        following = self._first + done
        if following == last + 1 and () in self._nodes:
            return True
        start = last
        while start - 1 in self._rows and start > following:
            start -= 1
        if last not in self._rows or start < following:
            return False
        self._forget_tree()
        if start > following or not done:
            self._cache.rollback(_SESSION, 0)
            self._first, done = start, 0
        self._cache.drop_tree(_SESSION)
        chunk = self._policy.prefill_chunk
        for at in range(start, last + 1, chunk):
            part = range(at, min(at + chunk, last + 1))
            states = self._model.fuse(torch.stack([self._rows[position] for position in part]))
            plan = self._cache.schedule([StepRequest(_SESSION, self._cache.length(_SESSION), len(part))])
            hidden = self._model.run([self._tokens[position + 1] for position in part], states, plan, self._cache)
            self._nodes[()] = _Node(ROOT, hidden[-1], [])
        self._rows = {position: row for position, row in self._rows.items() if position > last}
        return True

    def _compute_level(self, paths: Sequence[Path]) -> None:
        """Tree rows whose parents have been computed."""
        if not paths:
            return
        above = [self._nodes[path[:-1]] for path in paths]
        slots = [self._free.pop() for _ in paths]
        request = StepRequest(_SESSION, self._cache.length(_SESSION), 0, [node.slot for node in above], slots)
        states = torch.stack([node.hidden for node in above])
        hidden = self._model.run([path[-1] for path in paths], states, self._cache.schedule([request]), self._cache)
        for path, slot, row in zip(paths, slots, hidden, strict=True):
            self._nodes[path] = _Node(slot, row, [])

    def _drop_tree(self) -> None:
        """All of it; what is known of the text's last row stays."""
        self._cache.drop_tree(_SESSION)
        root = self._nodes[()]
        self._forget_tree()
        self._nodes[()] = root

    def _forget_tree(self) -> None:
        self._nodes = {}
        self._free = list(range(self._policy.max_tree_slots - 1, -1, -1))


def _by_length(path: Path) -> tuple[int, Path]:
    return len(path), path
