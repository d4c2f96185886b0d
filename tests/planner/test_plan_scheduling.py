"""Continuous batching: order, budget and wait; the estimate of a layer's time."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.planner.scheduling.batch_scheduler import BatchScheduler
from swarm.planner.scheduling.fair_shares import Share
from swarm.planner.scheduling.layer_time import BatchStats, LayerTimeEstimator
from swarm.planner.scheduling.policy import SchedulingPolicy
from swarm.planner.scheduling.session_order import SessionOrder
from swarm.types import CostCurve, LayerSpan

WHOLE = LayerSpan(0, 30)
POLICY = SchedulingPolicy()
CURVE = CostCurve((1, 4, 16), (1.0, 1.5, 4.0))
KEYS = itertools.count()


@dataclass(eq=False)
class Item:
    rows: int = 1
    span: LayerSpan = WHOLE
    prefill: bool = False
    dropped: bool = False
    number: int = 0
    session_key: int = field(default_factory=lambda: next(KEYS))
    stale: bool = False
    context: int = 0
    share: Share = field(default_factory=Share)


def queue_of(budget: int, *items: Item, max_steps: int | None = None) -> BatchScheduler[Item]:
    queue: BatchScheduler[Item] = BatchScheduler(budget, max_steps=max_steps)
    for item in items:
        queue.push(item)
    return queue


def test_decoding_goes_before_prefill_within_one_batch() -> None:
    prefill, decode = Item(256, prefill=True), Item()
    assert queue_of(512, prefill, decode).take() == [decode, prefill]


def test_the_budget_bounds_a_batch_but_never_splits_a_step() -> None:
    a, b, c = Item(300, prefill=True), Item(300, prefill=True), Item(900, prefill=True)
    queue = queue_of(512, a, b, c)
    assert [queue.take(), queue.take(), queue.take(), queue.take()] == [[a], [b], [c], []]


def test_a_batch_holds_one_span() -> None:
    a, b, c = Item(), Item(span=LayerSpan(0, 10)), Item()
    queue = queue_of(512, a, b, c)
    assert queue.take() == [a, c]
    assert queue.take() == [b]


def test_dropped_steps_are_removed() -> None:
    a, b = Item(dropped=True), Item(dropped=True, prefill=True)
    queue = queue_of(512, a, b)
    assert queue.take() == []
    assert len(queue) == 0


def test_a_busy_node_does_not_starve_prefill() -> None:
    prefill = Item(256, prefill=True)
    queue = queue_of(4, prefill)
    batches = []
    for _ in range(POLICY.max_prefill_skips + 1):
        for _ in range(4):
            queue.push(Item())
        batches.append(queue.take())
    assert prefill in batches[-1]
    assert all(prefill not in batch for batch in batches[:-1])


@given(
    budget=st.integers(1, 64),
    shape=st.lists(
        st.tuples(st.integers(1, 80), st.booleans(), st.sampled_from([LayerSpan(0, 4), LayerSpan(2, 8)])), max_size=40
    ),
)
def test_every_step_leaves_once_in_order_of_its_class(budget: int, shape: list[tuple[int, bool, LayerSpan]]) -> None:
    items = [Item(rows, span, prefill, number=i) for i, (rows, prefill, span) in enumerate(shape)]
    queue = queue_of(budget, *items)
    left: list[Item] = []
    while batch := queue.take():
        assert len({item.span for item in batch}) == 1
        assert len(batch) == 1 or sum(item.rows for item in batch) <= budget
        left.extend(batch)
    assert sorted(item.number for item in left) == list(range(len(items)))
    for prefill in (False, True):
        for span in {item.span for item in items}:
            numbers = [i.number for i in left if i.prefill == prefill and i.span == span]
            assert numbers == sorted(numbers)


def test_an_engine_that_cannot_batch_takes_one_step() -> None:
    a, b = Item(), Item()
    queue = queue_of(512, a, b, max_steps=1)
    assert [queue.take(), queue.take(), queue.take()] == [[a], [b], []]


def decode(queue: BatchScheduler[Item], *keys: int, at_s: float, took_s: float = 0.01) -> int:
    """A batch with a step of each of these sessions, done at `at_s` -> sessions active."""
    for key in keys:
        queue.push(Item(session_key=key))
    return queue.completed(queue.take(), took_s, at_s)


def test_a_batch_waits_for_the_sessions_that_were_in_the_last_one() -> None:
    queue = queue_of(512)
    assert decode(queue, 0, 1, at_s=0.0) == 2
    queue.push(Item(session_key=0))
    assert queue.wait_s() == pytest.approx(POLICY.batch_wait_ratio * 0.01)
    queue.push(Item(session_key=1))
    assert queue.wait_s() == 0.0
    assert decode(queue, at_s=0.02, took_s=1.0) == 2
    queue.push(Item(session_key=0))
    assert queue.wait_s() == POLICY.max_batch_wait_s
    queue.forget(1)
    assert queue.wait_s() == 0.0


def test_no_wait_for_sessions_of_other_batches_nor_for_inactive_ones() -> None:
    queue = queue_of(512)
    decode(queue, 0, 1, at_s=0.0)
    decode(queue, 2, at_s=0.1)
    queue.push(Item(session_key=2))
    assert queue.wait_s() == 0.0
    queue.take()
    assert decode(queue, 0, at_s=0.99 * POLICY.active_session_s) == 3
    assert decode(queue, 2, at_s=POLICY.active_session_s) == 2  # 1 has not decoded since
    queue.push(Item(session_key=0))
    assert queue.wait_s() == 0.0


def test_no_wait_for_sessions_that_only_prefilled() -> None:
    queue = queue_of(512)
    for key in (0, 1):
        queue.push(Item(5, prefill=True, session_key=key))
    assert queue.completed(queue.take(), 0.01, 0.0) == 0
    queue.push(Item(session_key=0))
    assert queue.wait_s() == 0.0


@given(
    events=st.lists(
        st.tuples(st.sampled_from(["batch", "forget"]), st.sets(st.integers(0, 5), min_size=1), st.floats(0, 0.6)),
        max_size=30,
    ),
    here=st.sets(st.integers(0, 5)),
)
def test_the_wait_is_for_the_sessions_of_the_last_batch(
    events: list[tuple[str, set[int], float]], here: set[int]
) -> None:
    """Against the rule written out: who decoded within a second, and in which batch last."""
    queue, now, batches = queue_of(512), 0.0, 0
    last: dict[int, tuple[float, int]] = {}
    for kind, keys, pause in events:
        now += pause
        if kind == "forget":
            for key in keys:
                queue.forget(key)
                last.pop(key, None)
            continue
        batches += 1
        last.update(dict.fromkeys(keys, (now, batches)))
        last = {key: (at, batch) for key, (at, batch) in last.items() if now - at < POLICY.active_session_s}
        assert decode(queue, *keys, at_s=now) == len(last)
    for key in here:
        queue.push(Item(session_key=key))
    theirs = {last[key][1] for key in here if key in last}
    mates = {key for key, (_, batch) in last.items() if batch in theirs}
    assert (queue.wait_s() == 0.0) == (mates <= here)


def test_a_session_s_steps_wait_for_each_other() -> None:
    order: SessionOrder[Item] = SessionOrder()
    a, b, c, d = (Item(session_key=7) for _ in range(4))
    other = Item(session_key=8)
    assert [order.arrive(step) for step in (a, b, other, c, d)] == [a, None, other, None, None]
    b.stale = True
    assert order.ran(a) is c
    assert order.ran(other) is None
    c.dropped = d.stale = True  # it was queued, and its result is not needed
    e = Item(session_key=7)
    assert order.arrive(e) is e
    assert order.ran(c) is None
    assert order.ran(e) is None
    assert order.arrive(a) is a
    order.forget(7)
    assert order.arrive(b) is b


SPAN = LayerSpan(0, 10)


def batch(compute_ms: float, decode: int = 1, steps: int = 1, rows: int = 1) -> BatchStats:
    return BatchStats(SPAN, steps, decode, rows, compute_ms)


def test_a_batch_is_counted() -> None:
    steps = [Item(3, SPAN), Item(5, SPAN, prefill=True)]
    assert BatchStats.of(steps, 2.5) == BatchStats(SPAN, 2, 1, 8, 2.5)


def test_tau_is_for_one_session_more() -> None:
    tau = LayerTimeEstimator(CURVE)
    assert [tau.ms(sessions, 0.0) for sessions in (0, 3, 15)] == [1.0, 1.5, 4.0]


def test_tau_follows_measured_batches_and_decays_without_work() -> None:
    now = 0.0
    tau = LayerTimeEstimator(CURVE)
    for _ in range(60):
        tau.observe(batch(compute_ms=30.0, decode=4, steps=4, rows=4), now)  # the curve says 15
    assert tau.ms(3, now) == pytest.approx(3.0, rel=0.01)
    assert tau.ms(0, now) == pytest.approx(2.0, rel=0.01)
    now += 20 * POLICY.idle_fade_s
    assert 1.0 <= tau.ms(0, now) < 1.4
    for _ in range(2000):
        tau.observe(batch(compute_ms=30.0, decode=4, steps=4, rows=4), now)
    now += 20 * POLICY.idle_fade_s
    assert tau.ms(0, now) == pytest.approx(2.0, rel=0.01), "a calibration that was off is corrected for good"


def test_prefill_does_not_change_tau() -> None:
    tau = LayerTimeEstimator(CURVE)
    tau.observe(batch(5000.0, decode=0, rows=256), 0.0)
    tau.observe(batch(5000.0, decode=1, steps=2, rows=257), 0.0)
    assert tau.ms(0, 0.0) == 1.0


def test_an_outlier_is_clamped() -> None:
    tau = LayerTimeEstimator(CURVE)
    tau.observe(batch(compute_ms=1e9), 0.0)
    assert tau.ms(0, 0.0) < 15.0
