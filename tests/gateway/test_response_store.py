"""What is kept of responses is bounded for each key, and is each key's own."""

from __future__ import annotations

import pytest

from swarm_gateway.chat.events import Finished, StopCause, TextDelta, TokenUsage
from swarm_gateway.errors import ApiError
from swarm_gateway.responses.answers import ResponseAnswer
from swarm_gateway.responses.items import canonical_items
from swarm_gateway.responses.requests import ResponsesBody
from swarm_gateway.responses.store import ResponseStore, StoredResponse, StorePolicy


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def stored(text: str = "x", done: bool = True) -> StoredResponse:
    answer = ResponseAnswer(ResponsesBody(model="m"), "m", str)
    answer.push(TextDelta(text))
    if done:
        answer.push(Finished(StopCause.END_OF_TURN, TokenUsage()))
    return StoredResponse(answer, tuple(canonical_items("hi")))


def kept(store: ResponseStore, owner: str, responses: list[StoredResponse]) -> list[bool]:
    found = []
    for each in responses:
        try:
            found.append(store.get(owner, each.answer.id) is each)
        except ApiError:
            found.append(False)
    return found


def test_a_flood_pushes_out_its_own_oldest_only() -> None:
    store = ResponseStore(StorePolicy(max_responses=3))
    other = stored()
    store.put("other", other)
    mine = [stored() for _ in range(100)]
    for each in mine:
        store.put("mine", each)
    assert kept(store, "mine", mine) == [False] * 97 + [True] * 3
    assert kept(store, "other", [other]) == [True]


def test_bytes_are_bounded() -> None:
    store = ResponseStore(StorePolicy(max_bytes=100_000))
    mine = [stored("x" * 30_000) for _ in range(10)]
    for each in mine:
        store.put("mine", each)
    assert sum(kept(store, "mine", mine)) == 3
    assert sum(each.size for each, is_kept in zip(mine, kept(store, "mine", mine), strict=True) if is_kept) <= 100_000
    with pytest.raises(ApiError, match="too many"):
        store.put("mine", stored("x" * 200_000))


def test_age_is_bounded_but_not_of_running_ones() -> None:
    clock = Clock()
    store = ResponseStore(StorePolicy(max_age_s=10.0), clock)
    mine = [stored(), stored(done=False)]
    for each in mine:
        store.put("mine", each)
    clock.now += 11.0
    assert kept(store, "mine", mine) == [False, True]


def test_running_ones_are_not_pushed_out() -> None:
    store = ResponseStore(StorePolicy(max_responses=2))
    for _ in range(2):
        store.put("mine", stored(done=False))
    with pytest.raises(ApiError) as caught:
        store.put("mine", stored())
    assert (caught.value.status, caught.value.retry_after_s) == (429, 10.0)


def test_ids_are_of_one_key() -> None:
    store = ResponseStore()
    mine = stored()
    store.put("mine", mine)
    for ask in (store.get, store.remove):
        with pytest.raises(ApiError) as caught:
            ask("other", mine.answer.id)
        assert caught.value.status == 404
    assert store.remove("mine", mine.answer.id) is mine
    assert kept(store, "mine", [mine]) == [False]
