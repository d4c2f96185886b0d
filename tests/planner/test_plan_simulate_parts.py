"""Parts of the simulator on their own: random streams, lines, workloads, devices, and the baselines' rules."""

from __future__ import annotations

import math
from collections import Counter

import msgspec
import pytest

from swarm.simulator.baselines.hexgen import _groupings
from swarm.simulator.baselines.petals import _best_span
from swarm.simulator.clock import Clock
from swarm.simulator.metrics import Percentiles
from swarm.simulator.model.devices import DeviceCostModel, DeviceSpec
from swarm.simulator.model.model import ModelSpec
from swarm.simulator.model.network import NetworkModel, NetworkSpec
from swarm.simulator.model.rng import NamedStream
from swarm.simulator.model.workload import Lengths, WorkloadSpec, requests
from swarm.simulator.policies.pipelines import equal_shares
from swarm.simulator.policy import even_chunks
from swarm.simulator.session_admission import _runs
from swarm.types import Hop, LayerSpan

MODEL = ModelSpec(
    name="tiny", layers=8, hidden=512, heads=8, kv_heads=2, head_dim=64, intermediate=2048, vocabulary=1000
)


def test_streams_are_independent_and_repeat() -> None:
    one, same, other = NamedStream(1, "a"), NamedStream(1, "a"), NamedStream(1, "b")
    drawn = [one.bits() for _ in range(100)]
    assert drawn == [same.bits() for _ in range(100)]
    assert not set(drawn) & {other.bits() for _ in range(100)}


def test_draws_have_their_moments() -> None:
    stream, count = NamedStream(5, "moments"), 20_000
    assert math.fsum(stream.uniform() for _ in range(count)) / count == pytest.approx(0.5, abs=0.01)
    assert math.fsum(stream.exponential(3.0) for _ in range(count)) / count == pytest.approx(3.0, rel=0.03)
    normal = [stream.normal() for _ in range(count)]
    assert math.fsum(normal) / count == pytest.approx(0.0, abs=0.03)
    assert math.fsum(x * x for x in normal) / count == pytest.approx(1.0, rel=0.03)
    median = sorted(stream.lognormal(100.0, 1.0) for _ in range(count))[count // 2]
    assert median == pytest.approx(100.0, rel=0.05)
    assert set(Counter(stream.below(4) for _ in range(count))) == {0, 1, 2, 3}
    shuffled = list(range(50))
    stream.shuffle(shuffled)
    assert sorted(shuffled) == list(range(50)) != shuffled


def test_events_come_in_order_of_time_then_of_scheduling() -> None:
    clock, seen = Clock(), []
    clock.at(5.0, lambda: seen.append("late"))
    clock.at(1.0, lambda: clock.after(4.0, lambda: seen.append("later")))
    clock.at(1.0, lambda: seen.append("early"))
    assert clock.run(until=5.0) == 4
    assert seen == ["early", "late", "later"]
    assert clock.now == 5.0


def test_an_uplink_carries_one_message_at_a_time() -> None:
    network = NetworkModel(NetworkSpec(latency_ms=10.0, client_ms=3.0, bandwidth_mbps=8.0), seed=1)  # 1000 bytes a ms
    assert network.send("a", "b", 5000, now=0.0) == 15.0
    assert network.send("a", "c", 1000, now=2.0) == 16.0
    assert network.send("b", "a", 1000, now=2.0) == 13.0
    assert network.send("a", "client0", 0, now=100.0) == 103.0
    assert network.send("a", "a", 1e9, now=7.0) == 7.0


def test_latencies_are_symmetric_and_fixed() -> None:
    spread = NetworkModel(NetworkSpec(latency_ms=10.0, spread=0.5), seed=1)
    plane = NetworkModel(NetworkSpec(kind="plane", latency_ms=80.0), seed=1)
    for network, most in ((spread, 15.0), (plane, 80.0 * math.sqrt(2))):
        found = [network.latency(f"n{i}", f"n{j}") for i in range(10) for j in range(10) if i != j]
        assert all(0 < ms <= most for ms in found)
        assert len(set(found)) == 45
        assert network.latency("n3", "n4") == network.latency("n4", "n3")
    assert plane.latency("n1", "n2") == pytest.approx(math.dist(plane.point("n1"), plane.point("n2")))


def test_the_same_requests_come_at_any_rate() -> None:
    def drawn(rate: float) -> list[tuple[int, int]]:
        spec = WorkloadSpec(requests=50, rate_per_s=rate, prompt=Lengths(median=100, sigma=1.0, most=500))
        found = requests(spec, clients=3, seed=2)
        assert [r.at for r in found] == sorted(r.at for r in found)
        assert found[-1].at == pytest.approx(50e3 / rate, rel=0.6)
        assert all(1 <= r.prompt <= 500 for r in found)
        assert {r.client for r in found} == {"client0", "client1", "client2"}
        return [(r.prompt, r.output) for r in found]

    assert drawn(1.0) == drawn(30.0)


def test_a_roofline_has_two_sides() -> None:
    device = DeviceSpec(name="d", memory_gb=1.0, bandwidth_gb_s=100.0, tflops=1.0, layer_overhead_ms=0.5)
    cost = DeviceCostModel(device, MODEL)
    moving = MODEL.layer_bytes / 100e9 * 1e3
    assert cost.layer_ms(1, 0.0, 0.0) == pytest.approx(0.5 + moving)
    assert cost.layer_ms(1000, 0.0, 0.0) == pytest.approx(0.5 + 1000 * MODEL.row_flops / 1e12 * 1e3)
    assert cost.layer_ms(1, 1e6, 0.0) > cost.layer_ms(1, 0.0, 0.0)
    assert cost.curve.ms_at(1) == cost.layer_ms(1, 0.0, 0.0)


def test_capacity_leaves_room_for_keys_and_values() -> None:
    device = DeviceSpec(name="d", memory_gb=0.05, memory_share=1.0, bandwidth_gb_s=1.0, tflops=1.0)
    cost = DeviceCostModel(device, MODEL)
    for tokens in (0, 1000, 10_000):
        layers = cost.capacity(tokens)
        assert 0 < layers < MODEL.layers
        room = cost.kv_room(0, layers) / (layers * MODEL.kv_token_bytes)
        assert room >= tokens
    whole = msgspec.structs.replace(device, memory_gb=1.0)
    assert DeviceCostModel(whole, MODEL).capacity(1000) == MODEL.layers


def test_chunks_and_shares_sum_up() -> None:
    assert even_chunks(600, 256) == (256, 256, 88)
    assert even_chunks(512, 256) == (256, 256)
    assert equal_shares(32, 3) == [11, 11, 10]


def test_petals_takes_the_weakest_run_of_blocks() -> None:
    assert _best_span([5.0, 1.0, 1.0, 4.0, 0.0, 9.0], 2) == LayerSpan(3, 5)
    assert _best_span([1.0, 1.0, 1.0], 2) == LayerSpan(0, 2)


def test_groupings_are_all_and_each_once() -> None:
    """As many as there are multisets that sum to (5, 2): the vector partitions of (5, 2)."""
    found = [tuple(sorted(grouping)) for grouping in _groupings((5, 2))]
    assert len(found) == len(set(found)) == 47
    assert all(tuple(map(sum, zip(*grouping, strict=True))) == (5, 2) for grouping in found)


def test_neighbouring_new_hops_are_replayed_in_one_run() -> None:
    hops = [Hop(peer, i, i + 1) for i, peer in enumerate("abcdef")]
    assert _runs(hops, {"b", "c", "f"}) == [(1, 2), (5, 5)]
    assert _runs(hops, set("abcdef")) == [(0, 5)]
    assert _runs(hops, set()) == []


def test_percentiles_are_values_that_occurred() -> None:
    spread = Percentiles.of([float(i) for i in range(1, 101)])
    assert spread.percentiles == {50: 50.0, 90: 90.0, 95: 95.0, 99: 99.0, 100: 100.0}
    assert spread.mean == 50.5
    assert Percentiles.of([]).mean == 0.0
