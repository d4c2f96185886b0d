"""How much of a model "auto" takes home."""

from __future__ import annotations

import random

from swarm.types import CostCurve, LayerSpan, NodeProfile, NodeState, Snapshot
from swarm_client.home.auto_share import POLICY, choose_share, swarm_layer_ms

GIB = 1 << 30


def test_as_many_as_fit_while_a_token_takes_a_tenth_longer_at_most() -> None:
    chosen = choose_share([1.0] * 30, 2.0, 1, GIB)
    assert (chosen.first, chosen.last) == (2, 1), "three layers of 2 ms in place of 1 ms are a tenth of 30 ms"
    assert choose_share([1.0] * 30, 100.0, 1, GIB).inner == LayerSpan(0, 30)
    assert choose_share([1.0] * 30, 100.0, 1, GIB, at_least=1).inner == LayerSpan(1, 29)


def test_memory_bounds_it_where_home_is_the_quicker_machine() -> None:
    chosen = choose_share([5.0] * 30, 1.0, 100, int(100 * 4 / POLICY.max_memory))
    assert (chosen.first, chosen.last) == (2, 2)


def test_a_layer_is_always_left_to_others() -> None:
    assert len(choose_share([5.0] * 6, 1.0, 1, GIB).inner) == 1


def test_the_bounds_hold_for_any_swarm() -> None:
    rng = random.Random(4)
    for _ in range(500):
        swarm_ms = [rng.uniform(0.1, 9.0) for _ in range(rng.randint(1, 40))]
        home_ms, size, room = rng.uniform(0.1, 9.0), rng.randint(1, 100), rng.randint(0, 20_000)
        chosen = choose_share(swarm_ms, home_ms, size, room)
        own = [*swarm_ms[: chosen.first], *swarm_ms[len(swarm_ms) - chosen.last :]]
        assert len(own) * home_ms - sum(own) <= POLICY.max_slowdown * sum(swarm_ms) + 1e-9
        assert len(own) * size <= POLICY.max_memory * room
        assert 0 <= chosen.first - chosen.last <= 1
        assert len(own) < len(swarm_ms) or not own


def test_times_of_layers_are_the_median_of_records() -> None:
    def node(peer: str, span: LayerSpan, *times: float) -> NodeProfile:
        curve = CostCurve((1,), (4.0,))
        return NodeProfile(peer, "", NodeState.SERVING, "fp32", "", 3, span, layer_ms=times, cost=curve)

    nodes = (node("a", LayerSpan(0, 2), 1.0, 2.0), node("b", LayerSpan(0, 1), 3.0), node("c", LayerSpan(1, 2)))
    assert swarm_layer_ms(Snapshot("m", 3, nodes)) == [2.0, 3.0, 0.0]
