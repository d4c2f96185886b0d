"""Fair queueing: the service of each share against an ideal processor (GPS), and batching as before for company."""

from __future__ import annotations

import itertools
import math
import random
from collections import defaultdict
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm.planner.scheduling.batch_scheduler import BatchScheduler
from swarm.planner.scheduling.fair_shares import FairShares, Share
from swarm.planner.scheduling.policy import SchedulingPolicy
from swarm.planner.scheduling.work_model import MAX_ROWS, WorkModel
from swarm.planner.trust.contribution import ContributionPolicy
from swarm.types import CostCurve, LayerSpan

POLICY = SchedulingPolicy()
SPAN = LayerSpan(0, 10)
CURVE = CostCurve((1, 8, 64), (0.2, 0.3, 1.4))  # ms a layer: reading the weights, then computing
WORK = WorkModel(CURVE, 1000.0)
KEYS = itertools.count()


@dataclass(eq=False)
class Row:
    share: Share
    rows: int = 1
    context: int = 0
    prefill: bool = False
    dropped: bool = False
    span: LayerSpan = SPAN
    session_key: int | str = field(default_factory=lambda: next(KEYS))


def scheduler(budget: int = 512) -> BatchScheduler[Row]:
    return BatchScheduler(budget, POLICY, work=WORK)


def backlogged(shares: dict[Share, list[int]], seconds: float, seed: int = 0) -> dict[Share, float]:
    """ms of work that each share gets while every one always has steps of these sizes waiting, two at a time."""
    random_ = random.Random(seed)
    queue, got, now = scheduler(), defaultdict[Share, float](float), 0.0
    for share, sizes in shares.items():
        for _ in range(2):
            queue.push(Row(share, random_.choice(sizes)))
    while now < seconds * 1e3:
        batch = queue.take()
        ms = queue.batch_ms(batch)
        now += ms
        queue.settle(batch, ms)
        queue.completed(batch, ms / 1e3, now / 1e3)
        expected = sum(queue.step_ms(step) for step in batch)
        for step in batch:
            got[step.share] += ms * queue.step_ms(step) / expected
            queue.push(Row(step.share, random_.choice(shares[step.share])))
    return got


LARGEST_MS = WORK.layer_ms(64) * len(SPAN)
BOUND_MS = POLICY.share_window_ms + POLICY.share_credit_ms + 2 * LARGEST_MS


@settings(max_examples=25, deadline=None)
@given(
    sizes=st.lists(st.lists(st.integers(1, 64), min_size=1, max_size=3), min_size=2, max_size=6), seed=st.integers(0, 9)
)
def test_backlogged_shares_get_equal_work_whatever_their_steps(sizes: list[list[int]], seed: int) -> None:
    """GPS gives all the same; the deviation is bounded by what one batch may hold, and does not grow with time."""
    got = backlogged({Share(i, "a"): rows for i, rows in enumerate(sizes)}, 4.0, seed)
    assert max(got.values()) - min(got.values()) <= BOUND_MS


@given(seed=st.integers(0, 9))
@settings(max_examples=5, deadline=None)
def test_a_thousand_identities_of_one_block_get_one_share(seed: int) -> None:
    crowd = {Share("block", i): [1, 16] for i in range(50)}
    honest = Share("home", "me")
    got = backlogged({**crowd, honest: [1]}, 3.0, seed)
    theirs = sum(ms for share, ms in got.items() if share != honest)
    assert got[honest] >= theirs - BOUND_MS
    parts = [got[share] for share in crowd]
    assert max(parts) - min(parts) <= BOUND_MS


def test_a_weight_of_two_gets_twice_the_work() -> None:
    light, heavy = Share("a", "a"), Share("b", "b", weight=2.0)
    got = backlogged({light: [4], heavy: [4]}, 4.0)
    assert got[heavy] / got[light] == pytest.approx(2.0, rel=0.1)


@settings(max_examples=10, deadline=None)
@given(
    weights=st.lists(st.floats(1.0, ContributionPolicy().max_weight), min_size=1, max_size=5),
    rows=st.integers(1, 64),
    seed=st.integers(0, 9),
)
def test_helpers_starve_nobody(weights: list[float], rows: int, seed: int) -> None:
    """Beside any number of the best-thanked, a client without thanks has a quarter of an equal part."""
    helpers = {Share(i, i, weight): [rows] for i, weight in enumerate(weights)}
    got = backlogged({**helpers, Share("me", "me"): [1, 8]}, 4.0, seed)
    equal = sum(got.values()) / len(got)
    assert got[Share("me", "me")] >= equal / ContributionPolicy().max_weight - BOUND_MS


def test_the_owner_goes_first_and_costs_the_others_no_place() -> None:
    queue = scheduler()
    owner, a, b = Share("o", "o", first=True), Share("a", "a"), Share("b", "b")
    mine = [Row(owner, 64) for _ in range(3)]
    others = [Row(a, 48), Row(b, 48)]
    for step in (*others, *mine):
        queue.push(step)
    assert queue.take() == mine
    assert queue.take() == others  # equal, within the window


@given(seed=st.integers(0, 20))
@settings(max_examples=10, deadline=None)
def test_random_arrivals_follow_an_ideal_processor(seed: int) -> None:
    """Each share's work done lags behind GPS by a bounded time at every moment (no batching, as GPS has none)."""
    random_ = random.Random(seed)
    shares = [Share(i, "x") for i in range(3)]
    arrivals, at = [], 0.0
    for _ in range(200):
        at += random_.expovariate(1 / 3.0)
        arrivals.append((at, Row(random_.choice(shares), random_.choice([1, 8, 32]))))
    queue: BatchScheduler[Row] = BatchScheduler(512, POLICY, max_steps=1, work=WORK)
    ideal, due = dict.fromkeys(shares, 0.0), dict.fromkeys(shares, 0.0)
    real, now, gps = dict.fromkeys(shares, 0.0), 0.0, 0.0
    todo = list(arrivals)
    while todo or queue:
        while todo and todo[0][0] <= now:
            when, step = todo.pop(0)
            gps = _ideal(due, ideal, gps, when)
            due[step.share] += queue.step_ms(step)
            queue.push(step)
        batch = queue.take()
        if not batch:
            now = todo[0][0]
            continue
        ms = queue.step_ms(batch[0])
        now += ms
        while todo and todo[0][0] <= now:  # those that come meanwhile
            when, step = todo.pop(0)
            gps = _ideal(due, ideal, gps, when)
            due[step.share] += queue.step_ms(step)
            queue.push(step)
        gps = _ideal(due, ideal, gps, now)
        queue.settle(batch, ms)
        real[batch[0].share] += ms
        for share in shares:
            assert ideal[share] - real[share] <= BOUND_MS
    assert real == pytest.approx({share: ideal[share] + due[share] for share in shares})


def _ideal(due: dict[Share, float], done: dict[Share, float], now: float, until: float) -> float:
    """Serve all that have work at equal rates up to `until`."""
    while now < until - 1e-9 and any(ms > 1e-9 for ms in due.values()):
        busy = [share for share, ms in due.items() if ms > 1e-9]
        span = min(until - now, min(due[share] for share in busy) * len(busy))
        for share in busy:
            due[share] -= span / len(busy)
            done[share] += span / len(busy)
        now += span
    return until


def test_equal_clients_are_batched_as_one_client_s_sessions_are() -> None:
    """16 clients that decode one after the other: the same batches with a share each as with one share."""

    def rounds(shares: list[Share]) -> list[int]:
        queue, sizes, now = scheduler(), [], 0.0
        for share in shares:
            queue.push(Row(share))
        for _ in range(200):
            batch = queue.take()
            ms = queue.batch_ms(batch)
            now += ms
            queue.settle(batch, ms)
            queue.completed(batch, ms / 1e3, now / 1e3)
            sizes.append(len(batch))
            for step in batch:
                queue.push(Row(step.share))
        return sizes

    assert rounds([Share(i, i) for i in range(16)]) == rounds([Share()] * 16) == [16] * 200


def test_one_step_more_rides_along_but_a_flood_does_not() -> None:
    queue = scheduler()
    attacker, honest = Share("x", "x"), Share("h", "h")
    for _ in range(5):  # alone, it uses the device ahead of anybody's time
        queue.push(Row(attacker, 64))
        queue.take()
    mine, small, big = Row(honest), Row(attacker, 1), Row(attacker, 64)
    for step in (big, small, mine):
        queue.push(step)
    assert queue.take() == [mine, small]
    assert queue.take() == [big]


def test_batches_are_short_while_somebody_who_got_less_may_come() -> None:
    queue: BatchScheduler[Row] = BatchScheduler(512, POLICY, work=WorkModel(CostCurve((1, 8, 64), (0.5, 1.0, 8.0))))
    attacker, honest = Share("x", "x"), Share("h", "h")

    def flood() -> int:
        for _ in range(8):
            queue.push(Row(attacker, 8))
        return sum(step.rows for step in queue.take(1.0))

    assert flood() == 64, "it is alone"
    queue.push(Row(honest))
    queue.completed(queue.take(0.9), 0.01, 0.9)
    rows = flood()
    assert queue._work.layer_ms(rows) <= POLICY.slice_ms < queue._work.layer_ms(rows + 8)


def test_a_long_batch_is_sliced_for_whoever_comes() -> None:
    queue = scheduler(4096)
    queue.push(Row(Share("x", "x"), 2048))
    batch = queue.take(0.0)
    assert queue.batch_ms(batch) > POLICY.long_batch_ms
    assert queue.layers_at_once(batch, 0.0) < len(SPAN)


def test_nobody_waits_for_sessions_that_only_rode_along() -> None:
    """A flood of single tokens rides along with an honest step; the next one does not wait for the flood."""
    queue = scheduler()
    attacker, honest = Share("x", "x"), Share("h", "h")
    for _ in range(5):
        queue.push(Row(attacker, 64))
        queue.take(0.0)
    mine, theirs = (Row(honest, session_key="mine"), Row(attacker, session_key="theirs"))
    for step in (mine, theirs):
        queue.push(step)
    batch = queue.take(0.0)
    assert batch == [mine, theirs]
    queue.completed(batch, 0.01, 0.0)
    queue.push(mine)
    assert queue.wait_s() == 0.0
    queue.push(Row(attacker, session_key="another"))  # whoever else of them waits
    assert queue.wait_s() == 0.0
    queue.take(0.0)
    for step in (mine, other := Row(Share("h", "equal"), session_key="equal")):
        queue.push(step)
    queue.completed(queue.take(0.0), 0.01, 0.1)
    queue.push(mine)
    assert queue.wait_s() > 0.0  # for an equal, with whom it shares the weights that are read
    assert other.share.block == mine.share.block


def test_a_batch_is_overtaken_by_a_share_that_got_less_and_not_by_its_own() -> None:
    queue = scheduler()
    attacker, honest = Share("x", "x"), Share("h", "h")
    queue.push(Row(honest))
    queue.settle(batch := queue.take(), queue.batch_ms(batch))
    running = []
    for _ in range(3):
        queue.push(Row(attacker, 64))
        running = queue.take()
    queue.push(Row(attacker, 1))
    assert not queue.overtakes(running, 0.5)
    queue.push(Row(honest))
    assert queue.overtakes(running, 0.5)
    queue.push(Row(Share("o", "o", first=True)))
    assert queue.overtakes(running, 0.0)


def test_pieces_are_small_in_company_of_those_further_behind_only() -> None:
    queue = scheduler()
    attacker, honest = Share("x", "x"), Share("h", "h")
    assert queue.rows_at_once(attacker, 0, (2, 10), 0.0) is None
    queue.push(Row(honest))
    queue.completed(queue.take(), 0.01, 0.0)
    for _ in range(3):
        queue.push(Row(attacker, 64))
        running = queue.take(0.5)
    queue.completed(running, 0.01, 0.4)
    rows = queue.rows_at_once(attacker, 0, (2, 10), 0.5)
    assert rows is not None
    assert WORK.layer_ms(rows) * 2 <= POLICY.slice_ms < WORK.layer_ms(rows + 1) * 2
    assert 1 <= queue.layers_at_once(running, 0.5) <= max(1.0, POLICY.slice_ms / WORK.layer_ms(64))
    assert (queue.rows_at_once(honest, 0, (2, 10), 0.5) or 0) > rows, "it is behind"
    queue.push(Row(honest))
    mine = queue.take(0.5)
    assert queue.layers_at_once(mine, 0.5) == len(SPAN), "nobody could overtake it"
    assert queue.rows_at_once(attacker, 0, (2, 10), POLICY.active_session_s) is None
    assert (queue.rows_at_once(attacker, 10_000, (2, 10), 0.5) or 0) < rows, "a long context costs more"
    assert WorkModel(CostCurve((1,), (0.0,))).rows_within(1.0) == MAX_ROWS
    assert WORK.rows_within(0.0) == POLICY.min_piece_rows


def test_what_is_remembered_is_bounded_and_the_waiting_are_not_forgotten() -> None:
    shares = FairShares(SchedulingPolicy(max_idle_shares=20))
    waiting = Share("me", "me")
    shares.join(waiting)
    shares.charge(waiting, 7.0)
    for i in range(1000):
        share = Share(f"block {i}", i)
        shares.join(share)
        shares.serve(share)
        shares.charge(share, 100.0)
        shares.trim([waiting])
    assert len(shares) <= 41
    assert shares.tag(waiting)[0] == 7.0
    shares.charge(Share("unknown", 1), 5.0)  # forgotten meanwhile


def test_after_how_many_layers_a_batch_is_overtaken() -> None:
    queue = scheduler()
    attacker, honest = Share("x", "x"), Share("h", "h")
    for _ in range(6):
        queue.push(Row(attacker, 64))
        running = queue.take()
    assert queue.overtaken_after(running) == math.inf, "nobody waits"
    queue.push(Row(attacker, 1))
    assert queue.overtaken_after(running) == math.inf, "one does not overtake oneself"
    queue.push(Row(honest))
    after = queue.overtaken_after(running)
    assert after == next(done for done in range(len(SPAN) + 1) if queue.overtakes(running, done / len(SPAN)))
    queue.push(Row(Share("o", "o", first=True)))
    assert queue.overtaken_after(running) == 0


def test_on_a_slow_machine_too_a_step_may_overtake_at_once() -> None:
    """A row takes longer there than the policy's credit."""
    slow = WorkModel(CostCurve((1, 64), (20.0, 60.0)))
    queue = BatchScheduler[Row](512, POLICY, work=slow)
    attacker, honest = Share("x", "x"), Share("h", "h")
    queue.push(Row(honest))
    queue.take()
    for _ in range(3):
        queue.push(Row(attacker, 64))
        running = queue.take()
    queue.push(Row(honest))
    assert queue.overtaken_after(running) == 0
    assert slow.layer_ms(1) * len(SPAN) > POLICY.share_credit_ms
