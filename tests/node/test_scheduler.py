"""Which steps share a batch, and in what order."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from swarm.types import LayerSpan
from swarm_node.serving.scheduler import PATIENCE, StepQueue

WHOLE = LayerSpan(0, 30)


@dataclass(eq=False)
class Item:
    rows: int = 1
    span: LayerSpan = WHOLE
    prefill: bool = False
    dropped: bool = False
    number: int = 0


def queue_of(budget: int, *items: Item) -> StepQueue[Item]:
    queue: StepQueue[Item] = StepQueue(budget)
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


def test_steps_nobody_waits_for_are_forgotten() -> None:
    a, b = Item(dropped=True), Item(dropped=True, prefill=True)
    queue = queue_of(512, a, b)
    assert queue.take() == []
    assert len(queue) == 0


def test_a_busy_node_does_not_starve_prefill() -> None:
    prefill = Item(256, prefill=True)
    queue = queue_of(4, prefill)
    batches = []
    for _ in range(PATIENCE + 1):
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
