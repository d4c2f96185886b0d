"""The paged cache against a model of it made of plain lists, on random operations; and its rules one by one."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import psutil
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm.errors import InvalidRequest, OutOfMemory
from swarm_kernels.batch import PAGE, BatchPlan
from swarm_kernels.kv_cache import KVCache, KvShape, RowsRequest
from swarm_kernels.kv_session import pages_of

SHAPE = KvShape(layers=1, kv_heads=1, head_dim=2, dtype=torch.float32)


def small_cache(pages: int, max_slots: int = 70) -> KVCache:
    return KVCache(SHAPE, pages * PAGE, max_slots=max_slots)


# --- a model of the cache: what each session has said, as plain lists -----------------------------------------------


@dataclass
class Told:
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

    def take(self, request: RowsRequest, marks: list[int]) -> None:
        if request.commit:
            tip = request.commit[-1]
            path = set(request.commit)
            alive = {s for s in self.tree if tip in self.path(s) and s != tip}
            self.committed += [self.tree[s][1] for s in request.commit]
            self.tree = {s: (-1 if p in path else p, m) for s, (p, m) in self.tree.items() if s in alive}
        if request.line:
            self.tree = {}
            self.committed += marks[: request.line]
        for parent, slot, mark in zip(request.parents, request.slots, marks[request.line :], strict=True):
            self.tree[slot] = (parent, mark)


class Memory:
    """Carries out plans on a flat array with a mark for each slot, as the kernels do on keys and values."""

    def __init__(self, pages: int) -> None:
        self.marks = torch.full((pages * PAGE,), -1, dtype=torch.int64)

    def run(self, plan: BatchPlan, marks: list[int]) -> None:
        self.marks[plan.copy_to] = self.marks[plan.copy_from].clone()
        self.marks[plan.write] = torch.tensor(marks, dtype=torch.int64)

    def sees(self, plan: BatchPlan, row: int) -> tuple[list[int], list[int]]:
        """-> (marks of the committed tokens a row sees, marks of the tree slots it sees, by slot)."""
        session = int(plan.session[row])
        past = int(plan.past[row])
        pages = plan.pages[session].tolist()
        committed = [int(self.marks[pages[t // PAGE] * PAGE + t % PAGE]) for t in range(past)]
        tree_pages = plan.tree_pages[session].tolist()
        tree = []
        for slot in range(plan.tree_mask.shape[1] * 64):
            if int(plan.tree_mask[row, slot // 64]) >> (slot % 64) & 1:
                tree.append(int(self.marks[tree_pages[slot // PAGE] * PAGE + slot % PAGE]))
        return committed, tree


def state_of(cache: KVCache) -> Any:
    """Everything a failed call must leave as it was."""
    sessions = {
        key: (
            pages.length, pages.count, pages.table[: pages.count].tolist(), dict(pages.tree), set(pages.tree_pages),
            [int(pages.tree_table[i]) for i in sorted(pages.tree_pages)],
        )
        for key, pages in cache._sessions.items()
    }  # fmt: skip
    return copy.deepcopy((sessions, cache.pool.refs, cache.pool._free))


class Player:
    """Applies random operations to a cache and to its model, and compares."""

    def __init__(self, rng: random.Random, pages: int) -> None:
        self.rng = rng
        self.cache = small_cache(pages)
        self.memory = Memory(pages)
        self.told: dict[bytes, Told] = {}
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
        if not self.told or choice < 0.08:
            self.open()
        elif choice < 0.14:
            self.fork()
        elif choice < 0.19:
            self.close(self.rng.choice(list(self.told)))
        elif choice < 0.26:
            self.prune(self.rng.choice(list(self.told)))
        elif choice < 0.32:
            self.rollback(self.rng.choice(list(self.told)))
        else:
            self.plan()
        self.cache.check_integrity()

    def open(self) -> None:
        key, tokens = self.key(), self.rng.randint(1, 60)
        if self.attempt(lambda: self.cache.open(key, tokens)):
            self.told[key] = Told(tokens)

    def fork(self) -> None:
        parent, child = self.rng.choice(list(self.told)), self.key()
        tokens = len(self.told[parent].committed) + self.rng.randint(-1, 30)
        if self.attempt(lambda: self.cache.fork(parent, child, tokens)):
            self.told[child] = Told(tokens, list(self.told[parent].committed))

    def close(self, key: bytes) -> None:
        self.cache.close(key)
        del self.told[key]

    def prune(self, key: bytes) -> None:
        slots = {self.rng.randrange(70) for _ in range(self.rng.randint(1, 6))}
        self.cache.prune(key, slots)
        self.told[key].drop_below(slots)

    def rollback(self, key: bytes) -> None:
        told = self.told[key]
        length = max(0, len(told.committed) - self.rng.choice((0, 0, 1, 5, 40)))
        if self.attempt(lambda: self.cache.rollback(key, length)):
            told.committed, told.tree = told.committed[:length], {}

    def request(self, key: bytes) -> RowsRequest:
        rng, told = self.rng, self.told[key]
        base = len(told.committed) + (rng.random() < 0.03)
        commit: list[int] = []
        if told.tree and rng.random() < 0.4:
            path = told.path(rng.choice(list(told.tree)))
            commit = path[: rng.randint(1, len(path))]
            if rng.random() < 0.04:
                commit = commit[1:] or [69]
        after = copy.deepcopy(told)
        after.take(RowsRequest(key, base, 0, commit=commit if set(commit) <= set(told.tree) else ()), [])
        room = told.max_tokens - len(after.committed) + (rng.random() < 0.03)
        line = min(room, rng.choice((1, 1, 2, 17))) if rng.random() < 0.4 else 0
        alive = [] if line else list(after.tree)
        parents, slots = [], []
        for _ in range(rng.choice((1, 3, 9)) if rng.random() < 0.6 or not (line or commit) else 0):
            parents.append(rng.choice([-1, *alive, *slots]) if rng.random() < 0.99 else 68)
            unused = [slot for slot in range(70) if slot not in alive + slots]
            slots.append(rng.choice(unused if unused and rng.random() < 0.99 else [0, 70]))
        return RowsRequest(key, base, line, parents, slots, commit)

    def pages_after(self, request: RowsRequest) -> int:
        told = copy.deepcopy(self.told[request.session])
        told.take(request, [0] * request.rows)
        return pages_of(len(told.committed)) + len({slot // PAGE for slot in told.tree})

    def plan(self) -> None:
        keys = self.rng.sample(list(self.told), min(len(self.told), self.rng.randint(1, 3)))
        requests = [self.request(key) for key in keys]
        plan = self.attempt(lambda: self.cache.plan(requests))
        if plan is None:
            if isinstance(self.refusal, OutOfMemory):  # never while all stay within what they were promised
                assert any(self.pages_after(r) > pages_of(self.told[r.session].max_tokens) for r in requests)
            return
        marks = list(range(self.next_mark, self.next_mark + plan.rows))
        self.next_mark += plan.rows
        self.memory.run(plan, marks)
        row = 0
        for request in requests:
            mine = marks[row : row + request.rows]
            self.told[request.session].take(request, mine)
            self.compare(request, plan, row)
            row += request.rows

    def compare(self, request: RowsRequest, plan: BatchPlan, row: int) -> None:
        told = self.told[request.session]
        start = len(told.committed) - request.line
        for i in range(request.line):
            committed, tree = self.memory.sees(plan, row + i)
            assert (committed, tree) == (told.committed[: start + i + 1], [])
            assert int(plan.positions[row + i]) == start + i
        for i, slot in enumerate(request.slots):
            committed, tree = self.memory.sees(plan, row + request.line + i)
            path = told.ancestors(slot)
            assert (committed, sorted(tree)) == (told.committed, sorted(path))
            assert int(plan.positions[row + request.line + i]) == len(told.committed) + len(path) - 1

    def finish(self) -> None:
        for key in list(self.told):
            self.close(key)
        self.cache.check_integrity()
        assert self.cache.free_tokens == self.cache.capacity_tokens


@settings(max_examples=20, deadline=None)
@given(st.randoms(use_true_random=True), st.integers(3, 24))
def test_random_operations_agree_with_the_model(rng: random.Random, pages: int) -> None:
    player = Player(rng, pages)
    for _ in range(60):
        player.step()
    player.finish()


# --- reservations ---------------------------------------------------------------------------------------------------


def line(cache: KVCache, session: bytes, rows: int) -> BatchPlan:
    return cache.plan([RowsRequest(session, cache.length(session), rows)])


def test_what_was_promised_is_there_when_it_is_needed() -> None:
    cache = small_cache(6)
    cache.open(b"a", 3 * PAGE)
    cache.open(b"b", 3 * PAGE)
    assert cache.free_tokens == 0
    with pytest.raises(OutOfMemory, match="16 more tokens"):
        cache.open(b"c", 1)
    line(cache, b"a", 3 * PAGE)
    line(cache, b"b", 3 * PAGE)
    with pytest.raises(InvalidRequest, match="reserved 48"):
        line(cache, b"a", 1)
    cache.close(b"a")
    assert cache.free_tokens == 3 * PAGE


def test_a_tree_beyond_the_reservation_takes_only_what_nobody_was_promised() -> None:
    cache = small_cache(4)
    cache.open(b"a", PAGE)
    cache.open(b"b", 2 * PAGE)
    line(cache, b"a", PAGE)
    grow = RowsRequest(b"a", PAGE, 0, (-1,), (0,))
    cache.plan([grow])  # the fourth page is nobody's
    with pytest.raises(OutOfMemory):
        cache.plan([RowsRequest(b"a", PAGE, 0, (0,), (PAGE,))])
    cache.check_integrity()
    line(cache, b"b", 2 * PAGE)


def test_a_fork_shares_whole_pages_and_copies_the_last_one_when_it_writes() -> None:
    cache = small_cache(8)
    cache.open(b"a", 3 * PAGE)
    line(cache, b"a", PAGE + 5)
    held = cache.pool.free
    cache.fork(b"a", b"b", 3 * PAGE)
    assert cache.pool.free == held
    plan = line(cache, b"b", 1)
    assert plan.copy_from.tolist() == [PAGE + i for i in range(5)]
    assert cache.pool.free == held - 1
    assert line(cache, b"a", 1).copy_from.numel() == 0  # now the old page is its own
    cache.check_integrity()


def test_a_fork_is_refused_when_its_share_cannot_be_promised() -> None:
    cache = small_cache(4)
    cache.open(b"a", 2 * PAGE)
    line(cache, b"a", PAGE + 1)
    with pytest.raises(OutOfMemory):
        cache.fork(b"a", b"b", 4 * PAGE)
    with pytest.raises(InvalidRequest, match="cannot reserve only"):
        cache.fork(b"a", b"b", PAGE)
    cache.fork(b"a", b"b", 2 * PAGE)
    cache.check_integrity()


# --- steps that must be refused -------------------------------------------------------------------------------------

BAD_STEPS = {
    "base": (RowsRequest(b"a", 2, 1), "starts at 2"),
    "nothing": (RowsRequest(b"a", 3, 0), "no rows"),
    "negative line": (RowsRequest(b"a", 3, -1, (-1, -1), (8, 9)), "no rows"),
    "unequal lists": (RowsRequest(b"a", 3, 0, (-1,), (8, 9)), "names 1 parents"),
    "too long": (RowsRequest(b"a", 3, 98), "needs 101"),
    "slot too large": (RowsRequest(b"a", 3, 0, (-1,), (70,)), "not within"),
    "slot negative": (RowsRequest(b"a", 3, 0, (-1,), (-1,)), "not within"),
    "slot in use": (RowsRequest(b"a", 3, 0, (-1,), (1,)), "in use"),
    "slot twice": (RowsRequest(b"a", 3, 0, (-1, -1), (8, 8)), "in use"),
    "own parent": (RowsRequest(b"a", 3, 0, (8,), (8,)), "hangs on"),
    "later parent": (RowsRequest(b"a", 3, 0, (9, -1), (8, 9)), "hangs on"),
    "dead parent": (RowsRequest(b"a", 3, 0, (5,), (8,)), "hangs on"),
    "parent lost to the line": (RowsRequest(b"a", 3, 1, (1,), (8,)), "hangs on"),
    "parent just committed": (RowsRequest(b"a", 3, 0, (0,), (8,), (0,)), "hangs on"),
    "commit of a dead slot": (RowsRequest(b"a", 3, 1, commit=(5,)), "cannot be committed"),
    "commit that skips": (RowsRequest(b"a", 3, 1, commit=(1,)), "cannot be committed"),
    "commit of siblings": (RowsRequest(b"a", 3, 1, commit=(0, 2)), "cannot be committed"),
    "commit twice": (RowsRequest(b"a", 3, 1, commit=(0, 0)), "cannot be committed"),
    "unknown session": (RowsRequest(b"z", 0, 1), "not open"),
}


@pytest.mark.parametrize("name", BAD_STEPS)
def test_a_refused_step_changes_nothing_for_anyone(name: str) -> None:
    cache = small_cache(20)
    for key in (b"a", b"b"):
        cache.open(key, 100)
        line(cache, key, 3)
    cache.plan([RowsRequest(b"a", 3, 0, (-1, 0, -1), (0, 1, 2))])
    before = state_of(cache)
    request, sentence = BAD_STEPS[name]
    with pytest.raises(InvalidRequest, match=sentence):
        cache.plan([RowsRequest(b"b", 3, 1), request])
    assert state_of(cache) == before


def test_one_step_of_a_session_in_a_batch() -> None:
    cache = small_cache(4)
    cache.open(b"a", 20)
    with pytest.raises(InvalidRequest, match="one step of a session"):
        cache.plan([RowsRequest(b"a", 0, 1), RowsRequest(b"a", 0, 1)])


def test_sessions_open_once_and_close_any_number_of_times() -> None:
    cache = small_cache(4)
    cache.open(b"a", 20)
    with pytest.raises(InvalidRequest, match="open already"):
        cache.open(b"a", 20)
    with pytest.raises(InvalidRequest, match="cannot reserve 0"):
        cache.open(b"b", 0)
    cache.close(b"a")
    cache.close(b"a")
    assert len(cache) == 0
    assert b"a" not in cache


# --- plans ----------------------------------------------------------------------------------------------------------


def test_a_commit_without_rows_only_moves() -> None:
    cache = small_cache(4)
    cache.open(b"a", 40)
    line(cache, b"a", 15)
    tree = cache.plan([RowsRequest(b"a", 15, 0, (-1, 3, 4), (3, 4, 5))])
    plan = cache.plan([RowsRequest(b"a", 15, 0, commit=(3, 4))])
    assert plan.rows == 0
    assert plan.copy_from.tolist() == tree.write[:2].tolist()
    assert plan.copy_to[0].item() % PAGE == 15
    assert cache.length(b"a") == 17
    assert list(cache.slots(b"a")) == [5]


def test_earlier_plans_keep_their_page_tables() -> None:
    cache = small_cache(60)
    cache.open(b"a", 400)
    plan = line(cache, b"a", 2 * PAGE + 1)
    pages = plan.pages.clone()
    cache.fork(b"a", b"b", 400)
    line(cache, b"a", 1)
    cache.rollback(b"a", 3)
    line(cache, b"a", 300)
    assert torch.equal(plan.pages, pages)


def test_dtypes_and_shapes_of_a_plan() -> None:
    cache = KVCache(KvShape(3, 2, 4, torch.bfloat16), 100)
    assert [tuple(k.shape) for k in cache.k] == [(7, 2, 4, PAGE)] * 3
    assert [tuple(v.shape) for v in cache.v] == [(7, 2, PAGE, 4)] * 3
    assert cache.nbytes == 7 * PAGE * 3 * 2 * 2 * 4 * 2
    assert not any(bool(x.any()) for x in (*cache.k, *cache.v))
    cache.open(b"a", 40)
    cache.open(b"b", 40)
    plan = cache.plan([RowsRequest(b"a", 0, 17), RowsRequest(b"b", 0, 2, (-1,), (69,))])
    assert plan.positions.dtype == plan.write.dtype == plan.tree_mask.dtype == torch.int64
    assert plan.past.dtype == plan.session.dtype == plan.pages.dtype == plan.tree_pages.dtype == torch.int32
    assert plan.tree_mask.shape == (20, 2)
    assert plan.pages.shape == (2, 2)
    assert plan.tree_pages.shape[0] == 2
    assert cache.top_position == 16


def test_pages_cost_memory_once_they_are_written() -> None:
    process = psutil.Process()
    before = process.memory_info().rss
    cache = KVCache(KvShape(2, 8, 128, torch.float32), 1 << 16)
    assert cache.nbytes == 1 << 30
    cache.open(b"a", 1 << 15)
    line(cache, b"a", 40)
    assert process.memory_info().rss - before < 64 << 20
    assert not cache.k[1][4000].any()


def test_more_memory_than_there_is() -> None:
    with pytest.raises(OutOfMemory, match="do not fit"):
        KVCache(KvShape(80, 64, 128, torch.float32), 1 << 40)
