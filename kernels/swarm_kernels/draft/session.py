"""A small model that says what may follow a text and hypothetical continuations of it, a whole tree level at a time.

Owns one text's keys and values in such a model: certain tokens in the committed pages, hypothetical ones in tree slots,
each run once. Knows neither what the guesses are for nor which model makes them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from swarm_kernels.batch import AttentionMetadata
from swarm_kernels.kvcache.cache import KVCacheManager, StepRequest

Path = tuple[int, ...]
DraftCandidates = list[tuple[int, float]]
"""(token, ln of its probability), likeliest first."""

MAX_NODES = 1024  # tree slots in use before all are given back
CHUNK = 256  # rows of a prompt run at once
_SESSION = b"draft"
_ROOT = -1


class DraftHead(Protocol):
    """From hidden states to guesses, for one text."""

    def allow(self, tokens: Sequence[int]) -> None:
        """These tokens occur in the text, so they should be among what can be guessed."""
        ...

    def propose(self, hidden: torch.Tensor, width: int) -> list[DraftCandidates]:
        """For each row of `[n, hidden]` the `width` likeliest next tokens."""
        ...


class DraftModel(Protocol):
    """What guesses: a whole local model, or a trained draft. Many texts may share one, each from its own thread."""

    @property
    def context_length(self) -> int: ...

    def new_head(self) -> DraftHead: ...

    def new_cache(self, max_tokens: int) -> KVCacheManager: ...

    def run(self, tokens: Sequence[int], metadata: AttentionMetadata, cache: KVCacheManager) -> torch.Tensor:
        """-> `[n, hidden]`, what `guess` takes."""
        ...


@dataclass(slots=True)
class _Node:
    """A hypothetical token whose keys and values are in `slot`."""

    slot: int
    hidden: torch.Tensor  # [hidden]
    guesses: DraftCandidates


class DraftSession:
    """`reset`, `extend`, then `guess` as often as wanted. One caller at a time."""

    def __init__(self, model: DraftModel, max_tokens: int | None = None) -> None:
        """`max_tokens`: of the longest text; by default, and at most, the model's context. Raises OutOfMemory."""
        self._model, self._head = model, model.new_head()
        self._limit = min(max_tokens or model.context_length, model.context_length)
        self._cache = model.new_cache(self._limit + 2 * MAX_NODES)
        self._cache.open(_SESSION, self._limit)
        self._tokens: list[int] = []
        self._nodes: dict[Path, _Node] = {}
        self._free = list(range(MAX_NODES - 1, -1, -1))

    def reset(self, tokens: Sequence[int]) -> None:
        """Another text; what it begins with in common with the one before is not computed again."""
        common = 0
        done = self._cache.length(_SESSION)
        while common < min(done, len(tokens) - 1) and self._tokens[common] == tokens[common]:
            common += 1
        self._forget_nodes()
        self._cache.rollback(_SESSION, common)
        self._tokens = list(tokens)
        self._head = self._model.new_head()
        self._head.allow(tokens)

    def extend(self, tokens: Sequence[int]) -> None:
        """These follow the text. Nothing is computed before it is asked for."""
        self._tokens += tokens
        self._head.allow(tokens)

    def propose(self, paths: Sequence[Path], width: int) -> list[DraftCandidates]:
        """What may follow the text and each of `paths`; nothing once the context is full."""
        longest = max((len(path) for path in paths), default=0)
        if not self._tokens or not paths or len(self._tokens) + longest > self._limit:
            return [[] for _ in paths]
        commit = self._sync_with_text()
        missing = self._missing(paths)
        if len(missing) > len(self._free):
            self._drop_tree()
            commit, missing = [], self._missing(paths)
        self._compute(commit, missing[:MAX_NODES])
        wanted = [p for p in dict.fromkeys(paths) if p in self._nodes and len(self._nodes[p].guesses) < width]
        if wanted:
            rows = torch.stack([self._nodes[path].hidden for path in wanted])
            for path, guesses in zip(wanted, self._head.propose(rows, width), strict=True):
                self._nodes[path].guesses = guesses
        return [self._nodes[path].guesses[:width] if path in self._nodes else [] for path in paths]

    def _sync_with_text(self) -> list[int]:
        """Turn tokens that are certain now and were guessed before into slots to commit; the tree goes on below them.

        Where a token was not guessed, nothing of the tree is left.
        """
        done = self._cache.length(_SESSION)
        certain = tuple(self._tokens[done:])
        if () in self._nodes and not certain:
            return []
        known = 0
        while known < len(certain) and certain[: known + 1] in self._nodes:
            known += 1
        commit = [self._nodes[certain[: i + 1]].slot for i in range(known)]
        if known < len(certain) or not certain:
            self._forget_nodes()
            return commit
        kept = {path[known:]: node for path, node in self._nodes.items() if path[:known] == certain}
        self._nodes = kept
        used = {node.slot for path, node in kept.items() if path}
        self._free = [slot for slot in range(MAX_NODES - 1, -1, -1) if slot not in used]
        return commit

    def _missing(self, paths: Sequence[Path]) -> list[Path]:
        """Hypothetical texts that were not run yet, shorter ones first."""
        new = {path[:end] for path in paths for end in range(1, len(path) + 1)} - self._nodes.keys()
        return sorted(new, key=lambda path: (len(path), path))

    def _compute(self, commit: Sequence[int], missing: Sequence[Path]) -> None:
        """One pass for everything new: committed slots, certain tokens not run yet, tree rows."""
        base = self._cache.length(_SESSION)
        line = self._tokens[base + len(commit) :]
        while len(line) > CHUNK:
            self._run(StepRequest(_SESSION, base, CHUNK, commit_slots=commit), line[:CHUNK])
            base, line, commit = base + len(commit) + CHUNK, line[CHUNK:], []
        slots = [self._free.pop() for _ in missing]
        place = dict(zip(missing, slots, strict=True))
        parents = [place[p[:-1]] if p[:-1] in place else self._slot(p[:-1]) for p in missing]
        if not (line or commit or slots):
            return
        request = StepRequest(_SESSION, base, len(line), parents, slots, commit)
        hidden = self._run(request, [*line, *(path[-1] for path in missing)])
        if line:
            self._nodes[()] = _Node(_ROOT, hidden[len(line) - 1], [])
        for row, (path, slot) in enumerate(place.items(), len(line)):
            self._nodes[path] = _Node(slot, hidden[row], [])

    def _run(self, request: StepRequest, tokens: Sequence[int]) -> torch.Tensor:
        return self._model.run(tokens, self._cache.schedule([request]), self._cache)

    def _slot(self, path: Path) -> int:
        return self._nodes[path].slot if path else _ROOT

    def _drop_tree(self) -> None:
        """Give back every slot. The last certain token is run again, for its hidden state is gone with its node."""
        self._cache.drop_tree(_SESSION)
        self._forget_nodes()
        self._cache.rollback(_SESSION, max(0, min(self._cache.length(_SESSION), len(self._tokens) - 1)))

    def _forget_nodes(self) -> None:
        self._nodes = {}
        self._free = list(range(MAX_NODES - 1, -1, -1))
