"""Draft tokens from a small model, for a text and hypothetical continuations of it, a whole tree level at a time.

Owns the KV cache of one text in such a model: committed tokens in committed blocks, hypothetical ones in tree slots,
each computed once. Which model it is, and what the draft tokens are for, is not known here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from swarm_kernels.batch import AttentionMetadata
from swarm_kernels.kvcache.cache import KVCacheManager, StepRequest
from swarm_kernels.kvcache.sequence import ROOT

Path = tuple[int, ...]
DraftCandidates = list[tuple[int, float]]
"""(token, ln of its probability), likeliest first."""

_SESSION = b"draft"


@dataclass(frozen=True, slots=True)
class DraftCachePolicy:
    """Sizes of a draft session."""

    max_tree_slots: int = 1024  # in use before all are dropped: more take memory, fewer recompute hypotheses
    max_own_levels: int = 8  # that a drafter goes on from its own states: each is a pass, and worth less than the last
    prefill_chunk: int = 256  # tokens of a prompt per forward: larger ones are faster and take more memory


class DraftHead(Protocol):
    """From hidden states to draft candidates, for one text."""

    def allow(self, tokens: Sequence[int]) -> None:
        """These tokens occur in the text, so they should be among the possible candidates."""
        ...

    def propose(self, hidden: torch.Tensor, width: int) -> list[DraftCandidates]:
        """For each row of `[n, hidden]` the `width` likeliest next tokens."""
        ...


class DraftModel(Protocol):
    """A whole local model, or a trained draft. Many texts may share one, each from its own thread."""

    @property
    def context_length(self) -> int: ...

    def new_head(self) -> DraftHead: ...

    def new_cache(self, max_tokens: int) -> KVCacheManager: ...

    def run(self, tokens: Sequence[int], metadata: AttentionMetadata, cache: KVCacheManager) -> torch.Tensor:
        """-> `[n, hidden]`, the input of `DraftHead.propose`."""
        ...


@dataclass(slots=True)
class _Node:
    """A computed token; hypothetical ones have their keys and values in `slot`."""

    slot: int
    hidden: torch.Tensor  # [hidden]
    candidates: DraftCandidates


class DraftSession:
    """`reset`, `extend`, then any number of `propose`. Not thread-safe."""

    def __init__(
        self, model: DraftModel, max_tokens: int | None = None, policy: DraftCachePolicy = DraftCachePolicy()
    ) -> None:
        """`max_tokens`: of the longest text; by default, and at most, the model's context. Raises OutOfMemory."""
        self._policy = policy
        self._model, self._head = model, model.new_head()
        self._limit = min(max_tokens or model.context_length, model.context_length)
        self._cache = model.new_cache(self._limit + 2 * policy.max_tree_slots)
        self._cache.open(_SESSION, self._limit)
        self._tokens: list[int] = []
        self._nodes: dict[Path, _Node] = {}
        self._free: list[int] = []
        self._drop_nodes()

    def reset(self, tokens: Sequence[int]) -> None:
        """Start another text; the prefix it shares with the one before is not computed again."""
        common = 0
        done = self._cache.length(_SESSION)
        while common < min(done, len(tokens) - 1) and self._tokens[common] == tokens[common]:
            common += 1
        self._drop_nodes()
        self._cache.rollback(_SESSION, common)
        self._tokens = list(tokens)
        self._head = self._model.new_head()
        self._head.allow(tokens)

    def extend(self, tokens: Sequence[int]) -> None:
        """Append to the text. Nothing is computed before `propose`."""
        self._tokens += tokens
        self._head.allow(tokens)

    def propose(self, paths: Sequence[Path], width: int) -> list[DraftCandidates]:
        """Candidates for the token after each of `paths`, continuations of the text; none once the context is full."""
        longest = max((len(path) for path in paths), default=0)
        if not self._tokens or not paths or len(self._tokens) + longest > self._limit:
            return [[] for _ in paths]
        commit = self._sync_with_text()
        missing = self._missing(paths)
        if len(missing) > len(self._free):
            self._drop_tree()
            commit, missing = [], self._missing(paths)
        self._compute(commit, missing[: self._policy.max_tree_slots])
        incomplete = [p for p in dict.fromkeys(paths) if p in self._nodes and len(self._nodes[p].candidates) < width]
        if incomplete:
            rows = torch.stack([self._nodes[path].hidden for path in incomplete])
            for path, candidates in zip(incomplete, self._head.propose(rows, width), strict=True):
                self._nodes[path].candidates = candidates
        return [self._nodes[path].candidates[:width] if path in self._nodes else [] for path in paths]

    def _sync_with_text(self) -> list[int]:
        """-> slots to commit: of new tokens of the text that were drafted before. The tree below them is kept.

        After the first token that was not drafted, the rest of the tree is dropped.
        """
        done = self._cache.length(_SESSION)
        new = tuple(self._tokens[done:])
        if () in self._nodes and not new:
            return []
        known = 0
        while known < len(new) and new[: known + 1] in self._nodes:
            known += 1
        commit = [self._nodes[new[: i + 1]].slot for i in range(known)]
        if known < len(new) or not new:
            self._drop_nodes()
            return commit
        kept = {path[known:]: node for path, node in self._nodes.items() if path[:known] == new}
        self._nodes = kept
        used = {node.slot for path, node in kept.items() if path}
        self._free = [slot for slot in range(self._policy.max_tree_slots - 1, -1, -1) if slot not in used]
        return commit

    def _missing(self, paths: Sequence[Path]) -> list[Path]:
        """Paths and their prefixes that were not computed yet, shorter ones first."""
        new = {path[:end] for path in paths for end in range(1, len(path) + 1)} - self._nodes.keys()
        return sorted(new, key=lambda path: (len(path), path))

    def _compute(self, commit: Sequence[int], missing: Sequence[Path]) -> None:
        """One forward for everything new: committed slots, tokens of the text not computed yet, tree rows."""
        base = self._cache.length(_SESSION)
        causal = self._tokens[base + len(commit) :]
        chunk = self._policy.prefill_chunk
        while len(causal) > chunk:
            self._run(StepRequest(_SESSION, base, chunk, commit_slots=commit), causal[:chunk])
            base, causal, commit = base + len(commit) + chunk, causal[chunk:], []
        slots = [self._free.pop() for _ in missing]
        slot_of = dict(zip(missing, slots, strict=True))
        parents = [slot_of[p[:-1]] if p[:-1] in slot_of else self._slot(p[:-1]) for p in missing]
        if not (causal or commit or slots):
            return
        request = StepRequest(_SESSION, base, len(causal), parents, slots, commit)
        hidden = self._run(request, [*causal, *(path[-1] for path in missing)])
        if causal:
            self._nodes[()] = _Node(ROOT, hidden[len(causal) - 1], [])
        for row, (path, slot) in enumerate(slot_of.items(), len(causal)):
            self._nodes[path] = _Node(slot, hidden[row], [])

    def _run(self, request: StepRequest, tokens: Sequence[int]) -> torch.Tensor:
        return self._model.run(tokens, self._cache.schedule([request]), self._cache)

    def _slot(self, path: Path) -> int:
        return self._nodes[path].slot if path else ROOT

    def _drop_tree(self) -> None:
        """Drop every slot. The last token of the text is computed again, as its hidden state is dropped with its
        node."""
        self._cache.drop_tree(_SESSION)
        self._drop_nodes()
        self._cache.rollback(_SESSION, max(0, min(self._cache.length(_SESSION), len(self._tokens) - 1)))

    def _drop_nodes(self) -> None:
        self._nodes = {}
        self._free = list(range(self._policy.max_tree_slots - 1, -1, -1))
