"""A model of the paged cache made of plain lists, and a player that compares the two on random operations."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from swarm.errors import InvalidRequest, OutOfMemory
from swarm_kernels.batch import BLOCK_SIZE, AttentionMetadata
from swarm_kernels.kvcache.cache import KVCacheManager, KvShape, StepRequest
from swarm_kernels.kvcache.sequence import blocks_for

SHAPE = KvShape(layers=1, kv_heads=1, head_dim=2, dtype=torch.float32)


def small_cache(blocks: int, max_slots: int = 70) -> KVCacheManager:
    return KVCacheManager(SHAPE, blocks * BLOCK_SIZE, max_slots=max_slots)


@dataclass
class Expected:
    """What one session should find in the cache."""

    max_tokens: int
    committed: list[int] = field(default_factory=list)  # a mark for each token
    tree: dict[int, tuple[int, int]] = field(default_factory=dict)  # slot -> (parent, mark)

    def ancestors(self, slot: int) -> list[int]:
        """Marks from the root to the slot."""
        parent, mark = self.tree[slot]
        return ([] if parent == -1 else self.ancestors(parent)) + [mark]

    def drop_below(self, slots: set[int]) -> None:
        doomed = {s for s in self.tree if set(self.path(s)) & slots}
        self.tree = {s: node for s, node in self.tree.items() if s not in doomed}

    def path(self, slot: int) -> list[int]:
        parent = self.tree[slot][0]
        return ([] if parent == -1 else self.path(parent)) + [slot]

    def take(self, request: StepRequest, marks: list[int]) -> None:
        if request.commit_slots:
            tip = request.commit_slots[-1]
            path = set(request.commit_slots)
            alive = {s for s in self.tree if tip in self.path(s) and s != tip}
            self.committed += [self.tree[s][1] for s in request.commit_slots]
            self.tree = {s: (-1 if p in path else p, m) for s, (p, m) in self.tree.items() if s in alive}
        if request.causal_rows:
            self.tree = {}
            self.committed += marks[: request.causal_rows]
        for parent, slot, mark in zip(request.parents, request.slots, marks[request.causal_rows :], strict=True):
            self.tree[slot] = (parent, mark)


class Memory:
    """Runs batches on a flat array with a mark for each slot, as the kernels do on keys and values."""

    def __init__(self, blocks: int) -> None:
        self.marks = torch.full((blocks * BLOCK_SIZE,), -1, dtype=torch.int64)

    def run(self, metadata: AttentionMetadata, marks: list[int]) -> None:
        self.marks[metadata.copy_to] = self.marks[metadata.copy_from].clone()
        self.marks[metadata.slot_mapping] = torch.tensor(marks, dtype=torch.int64)

    def sees(self, metadata: AttentionMetadata, row: int) -> tuple[list[int], list[int]]:
        """-> (marks of the committed tokens a row sees, marks of the tree slots it sees, by slot)."""
        session = int(metadata.sequence_index[row])
        past = int(metadata.context_lens[row])
        blocks = metadata.block_tables[session].tolist()
        committed = [int(self.marks[blocks[t // BLOCK_SIZE] * BLOCK_SIZE + t % BLOCK_SIZE]) for t in range(past)]
        tree_blocks = metadata.tree_block_tables[session].tolist()
        tree = []
        for slot in range(metadata.tree_mask.shape[1] * 64):
            if int(metadata.tree_mask[row, slot // 64]) >> (slot % 64) & 1:
                tree.append(int(self.marks[tree_blocks[slot // BLOCK_SIZE] * BLOCK_SIZE + slot % BLOCK_SIZE]))
        return committed, tree


def state_of(cache: KVCacheManager) -> Any:
    """Everything a failed call must leave as it was."""
    sessions = {
        key: (
            sequence.length, sequence.count, sequence.table[: sequence.count].tolist(), dict(sequence.tree),
            set(sequence.tree_blocks),
            [int(sequence.tree_table[i]) for i in sorted(sequence.tree_blocks)],
        )
        for key, sequence in cache._sessions.items()
    }  # fmt: skip
    return copy.deepcopy((sessions, cache.pool.refs, cache.pool._free))


class Player:
    """Applies random operations to a cache and to its model, and compares."""

    def __init__(self, rng: random.Random, blocks: int) -> None:
        self.rng = rng
        self.cache = small_cache(blocks)
        self.memory = Memory(blocks)
        self.expected: dict[bytes, Expected] = {}
        self.refusal: Exception | None = None
        self.next_mark = 0
        self.next_key = 0

    def key(self) -> bytes:
        self.next_key += 1
        return b"%d" % self.next_key

    def attempt(self, call: Callable[[], Any]) -> Any:
        """Call; None if it was refused, and then nothing may have changed."""
        before = state_of(self.cache)
        self.refusal = None
        try:
            result = call()
        except (InvalidRequest, OutOfMemory) as error:
            self.refusal = error
            assert state_of(self.cache) == before
            return None
        return True if result is None else result

    def step(self) -> None:
        choice = self.rng.random()
        if not self.expected or choice < 0.08:
            self.open()
        elif choice < 0.14:
            self.fork()
        elif choice < 0.19:
            self.close(self.rng.choice(list(self.expected)))
        elif choice < 0.26:
            self.prune(self.rng.choice(list(self.expected)))
        elif choice < 0.32:
            self.rollback(self.rng.choice(list(self.expected)))
        else:
            self.plan()
        self.cache.check_integrity()

    def open(self) -> None:
        key, tokens = self.key(), self.rng.randint(1, 60)
        if self.attempt(lambda: self.cache.open(key, tokens)):
            self.expected[key] = Expected(tokens)

    def fork(self) -> None:
        parent, child = self.rng.choice(list(self.expected)), self.key()
        tokens = len(self.expected[parent].committed) + self.rng.randint(-1, 30)
        if self.attempt(lambda: self.cache.fork(parent, child, tokens)):
            self.expected[child] = Expected(tokens, list(self.expected[parent].committed))

    def close(self, key: bytes) -> None:
        self.cache.close(key)
        del self.expected[key]

    def prune(self, key: bytes) -> None:
        slots = {self.rng.randrange(70) for _ in range(self.rng.randint(1, 6))}
        self.cache.prune(key, slots)
        self.expected[key].drop_below(slots)

    def rollback(self, key: bytes) -> None:
        expected = self.expected[key]
        length = max(0, len(expected.committed) - self.rng.choice((0, 0, 1, 5, 40)))
        if self.attempt(lambda: self.cache.rollback(key, length)):
            expected.committed, expected.tree = expected.committed[:length], {}

    def request(self, key: bytes) -> StepRequest:
        rng, expected = self.rng, self.expected[key]
        base = len(expected.committed) + (rng.random() < 0.03)
        commit: list[int] = []
        if expected.tree and rng.random() < 0.4:
            path = expected.path(rng.choice(list(expected.tree)))
            commit = path[: rng.randint(1, len(path))]
            if rng.random() < 0.04:
                commit = commit[1:] or [69]
        after = copy.deepcopy(expected)
        after.take(StepRequest(key, base, 0, commit_slots=commit if set(commit) <= set(expected.tree) else ()), [])
        room = expected.max_tokens - len(after.committed) + (rng.random() < 0.03)
        line = min(room, rng.choice((1, 1, 2, 17))) if rng.random() < 0.4 else 0
        alive = [] if line else list(after.tree)
        parents, slots = [], []
        for _ in range(rng.choice((1, 3, 9)) if rng.random() < 0.6 or not (line or commit) else 0):
            parents.append(rng.choice([-1, *alive, *slots]) if rng.random() < 0.99 else 68)
            unused = [slot for slot in range(70) if slot not in alive + slots]
            slots.append(rng.choice(unused if unused and rng.random() < 0.99 else [0, 70]))
        return StepRequest(key, base, line, parents, slots, commit)

    def blocks_after(self, request: StepRequest) -> int:
        expected = copy.deepcopy(self.expected[request.session])
        expected.take(request, [0] * request.rows)
        return blocks_for(len(expected.committed)) + len({slot // BLOCK_SIZE for slot in expected.tree})

    def plan(self) -> None:
        keys = self.rng.sample(list(self.expected), min(len(self.expected), self.rng.randint(1, 3)))
        requests = [self.request(key) for key in keys]
        metadata = self.attempt(lambda: self.cache.schedule(requests))
        if metadata is None:
            if isinstance(self.refusal, OutOfMemory):  # never while all stay within their reservations
                assert any(self.blocks_after(r) > blocks_for(self.expected[r.session].max_tokens) for r in requests)
            return
        marks = list(range(self.next_mark, self.next_mark + metadata.rows))
        self.next_mark += metadata.rows
        self.memory.run(metadata, marks)
        row = 0
        for request in requests:
            mine = marks[row : row + request.rows]
            self.expected[request.session].take(request, mine)
            self.compare(request, metadata, row)
            row += request.rows

    def compare(self, request: StepRequest, metadata: AttentionMetadata, row: int) -> None:
        expected = self.expected[request.session]
        start = len(expected.committed) - request.causal_rows
        for i in range(request.causal_rows):
            committed, tree = self.memory.sees(metadata, row + i)
            assert (committed, tree) == (expected.committed[: start + i + 1], [])
            assert int(metadata.positions[row + i]) == start + i
        for i, slot in enumerate(request.slots):
            committed, tree = self.memory.sees(metadata, row + request.causal_rows + i)
            path = expected.ancestors(slot)
            assert (committed, sorted(tree)) == (expected.committed, sorted(path))
            assert int(metadata.positions[row + request.causal_rows + i]) == len(expected.committed) + len(path) - 1

    def finish(self) -> None:
        for key in list(self.expected):
            self.close(key)
        self.cache.check_integrity()
        assert self.cache.free_tokens == self.cache.capacity_tokens
