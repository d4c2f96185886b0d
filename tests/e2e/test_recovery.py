"""Nodes crash, stop responding, slow down and come back in the middle of answers: the tokens never change."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable

import pytest
from memory_swarm import LIMITS, MemorySwarm
from recovery_swarm import SPANS, TOKENS, answer_with, assert_clean, killer, model, prompt, swarm_of, truth
from tiny_models import hf_greedy
from virtual_clock import virtual_time

from swarm.config import Limits
from swarm.errors import NoRoute
from swarm.types import Chain, PeerId

pytestmark = pytest.mark.slow


def slower(swarm: MemorySwarm, victim: int) -> Callable[[Chain], None]:
    def strike(chain: Chain) -> None:
        swarm.nodes[chain.peers[victim]].device.delay_s *= 10

    return strike


@pytest.mark.parametrize("at", [1, 9, 23])
@pytest.mark.parametrize("victims", [(0,), (1,), (2,), (0, 1), (1, 2), (0, 2)], ids=str)
@virtual_time
async def test_lost_hops_are_replaced_and_the_others_keep_their_kv_cache(victims: tuple[int, ...], at: int) -> None:
    async with swarm_of(2) as swarm, swarm.client(decoding="sequential") as client:
        before: list[Chain] = []  # no speculation, so that cached tokens can be counted
        kill = killer(swarm, *victims)
        answer, times, _ = await answer_with(client, lambda chain: (before.append(chain), kill(chain))[1], at)
        assert list(answer.token_ids) == truth()
        old, new = before[0].peers, answer.chain.peers
        assert [i for i in range(3) if old[i] != new[i]] == list(victims)
        assert 1 <= len(answer.repairs) <= len(victims)
        cached = len(prompt()) + at - 1  # the last sampled token is in no KV cache
        replayed = sum(node.service.counters.replayed for node in swarm.nodes.values())
        behind_a_survivor = [v for v in victims if v and v - 1 not in victims]
        assert replayed == cached * len(behind_a_survivor)
        assert max(b - a for a, b in itertools.pairwise(times)) < 0.5
        await assert_clean(swarm, *(old[v] for v in victims))


@pytest.mark.parametrize("victim", range(3))
@virtual_time
async def test_all_hops_at_once_and_one_after_the_other(victim: int) -> None:
    async with swarm_of(3) as swarm, swarm.client() as client:
        answer, _, _ = await answer_with(client, killer(swarm, 0, 1, 2), 5)
        assert list(answer.token_ids) == truth()
        again, _, _ = await answer_with(client, killer(swarm, victim), 7)
        assert list(again.token_ids) == truth()


@virtual_time
async def test_a_lost_node_is_routable_again_as_soon_as_it_publishes() -> None:
    async with swarm_of(2) as swarm, swarm.client() as client:
        drops: list[asyncio.Task[None]] = []

        def strike(chain: Chain) -> None:
            before, after = chain.peers[0], chain.peers[1]
            drops.append(asyncio.create_task(swarm.nodes[before].pool.drop(after)))  # which notifies the client

        first, _, _ = await answer_with(client, strike, 7)
        assert len(first.repairs) == 1
        await asyncio.sleep(6.0)
        again, times, _ = await answer_with(client, killer(swarm, 1), 7)
        assert list(again.token_ids) == truth()
        assert max(b - a for a, b in itertools.pairwise(times)) < 0.5


@pytest.mark.parametrize("victim", range(3))
@virtual_time
async def test_a_crash_in_the_middle_of_a_prompt(victim: int) -> None:
    prompt_ids = prompt(90)
    async with swarm_of(2) as swarm, swarm.client(prefill_chunk=8) as client:
        stream = client.stream(prompt_ids, max_new_tokens=TOKENS)
        reading = asyncio.create_task(stream.read())
        await asyncio.sleep(0.12)  # pings, opening, a chunk or two
        chain = stream.chain
        assert chain is not None
        swarm.kill(chain.peers[victim])
        answer = await reading
        assert list(answer.token_ids) == truth(90)
        assert len(answer.repairs) == 1
        await assert_clean(swarm, chain.peers[victim])


@pytest.mark.parametrize("victim", range(3))
@virtual_time
async def test_a_replacement_that_crashes_during_replay(victim: int) -> None:
    async with swarm_of(3) as swarm, swarm.client() as client:
        dead: list[PeerId] = []

        async def ambush(chain: Chain) -> None:
            """Kill the replacement of the victim."""
            spare = [p for p, n in swarm.nodes.items() if n.span == SPANS[victim] and p != chain.peers[victim]]
            for _ in range(1000):
                await asyncio.sleep(0.001)
                if replacements := [p for p in spare if swarm.nodes[p].service.sessions]:
                    dead.append(replacements[0])
                    swarm.kill(replacements[0])
                    break

        def strike(chain: Chain) -> None:
            dead.append(chain.peers[victim])
            swarm.kill(chain.peers[victim])
            ambushes.append(asyncio.create_task(ambush(chain)))

        ambushes: list[asyncio.Task[None]] = []
        answer, _, _ = await answer_with(client, strike, 6)
        assert list(answer.token_ids) == truth()
        assert len(dead) == len(answer.repairs) == 2
        await assert_clean(swarm, *dead)


@pytest.mark.parametrize("victim", range(3))
@virtual_time
async def test_a_host_that_vanishes_silently_is_detected_by_ping_timeout(victim: int) -> None:
    async with swarm_of(2) as swarm, swarm.client() as client:
        answer, times, _ = await answer_with(client, killer(swarm, victim, silent=True), 9)
        assert list(answer.token_ids) == truth()
        assert len(answer.repairs) == 1
        assert max(b - a for a, b in itertools.pairwise(times)) < 3 * LIMITS.ping_timeout_s


@pytest.mark.parametrize(("loud", "silent"), list(itertools.permutations(range(3), 2)))
@virtual_time
async def test_a_hop_that_becomes_unresponsive_while_another_is_replaced(loud: int, silent: int) -> None:
    async with swarm_of(2) as swarm, swarm.client() as client:

        def strike(chain: Chain) -> None:
            swarm.kill(chain.peers[loud])
            swarm.kill(chain.peers[silent], silent=True)

        answer, times, _ = await answer_with(client, strike, 9)
        assert list(answer.token_ids) == truth()
        assert max(b - a for a, b in itertools.pairwise(times)) < 3 * LIMITS.ping_timeout_s


@pytest.mark.parametrize("victim", range(3))
@virtual_time
async def test_a_straggler_ten_times_slower_is_evicted_within_five_tokens(victim: int) -> None:
    async with swarm_of(2) as swarm, swarm.client() as client:
        answer, times, _ = await answer_with(client, slower(swarm, victim), 9)
        assert list(answer.token_ids) == truth()
        assert [repair.partition(": ")[2] for repair in answer.repairs] == [
            "it has become slow, and others are much quicker"
        ]
        took = [b - a for a, b in itertools.pairwise(times)]
        healthy = sorted(took[:8])[4]
        assert max(took[8 + 5 :]) < 2 * healthy
        await assert_clean(swarm)


@pytest.mark.parametrize(
    ("at", "reason", "within_s"),
    [
        (
            1,
            "steps come to it and no further",
            LIMITS.stall_timeout_s + 6 * LIMITS.ping_timeout_s,
        ),  # no step time measured yet
        (9, "it has become slow, and others are much quicker", 1.0),
    ],
)
@pytest.mark.parametrize("victim", range(3))
@virtual_time
async def test_a_stalled_hop_that_answers_pings_is_evicted(victim: int, at: int, reason: str, within_s: float) -> None:
    async with swarm_of(2) as swarm, swarm.client() as client:

        def strike(chain: Chain) -> None:
            swarm.nodes[chain.peers[victim]].device.delay_s = 300.0

        answer, times, _ = await answer_with(client, strike, at)
        assert list(answer.token_ids) == truth()
        assert [repair.partition(": ")[2] for repair in answer.repairs] == [reason]
        assert max(b - a for a, b in itertools.pairwise(times)) < within_s


@virtual_time
async def test_progress_queries_do_not_delay_a_result() -> None:
    async with swarm_of(1) as swarm, swarm.client(decoding="sequential") as client:

        def strike(chain: Chain) -> None:
            swarm.nodes[chain.peers[1]].device.delay_s = 0.6

        answer, times, _ = await answer_with(client, strike, 9)
        assert list(answer.token_ids) == truth()
        assert max(b - a for a, b in itertools.pairwise(times)) < 0.6 + LIMITS.ping_timeout_s / 2


@pytest.mark.parametrize("edge", range(2))
@virtual_time
async def test_live_hops_that_can_no_longer_reach_each_other(edge: int) -> None:
    async with swarm_of(2) as swarm, swarm.client() as client:

        def strike(chain: Chain) -> None:
            swarm.network.partition(chain.peers[edge], chain.peers[edge + 1])

        answer, times, _ = await answer_with(client, strike, 9)
        assert list(answer.token_ids) == truth()
        assert len(answer.repairs) == 1
        assert max(b - a for a, b in itertools.pairwise(times)) < LIMITS.stall_timeout_s + 6 * LIMITS.ping_timeout_s


@virtual_time
async def test_a_straggler_without_a_replica_is_kept() -> None:
    async with swarm_of(1) as swarm, swarm.client() as client:
        answer, _, _ = await answer_with(client, slower(swarm, 1), 9)
        assert list(answer.token_ids) == truth()
        assert answer.repairs == ()


@virtual_time
async def test_timeouts_scale_with_the_expected_step_time_of_a_slow_chain() -> None:
    async with swarm_of(1) as swarm, swarm.client(decoding="sequential") as client:
        for node in swarm.nodes.values():
            node.device.delay_s = LIMITS.step_timeout_s
        await asyncio.sleep(5.0)  # until they have published it
        answer = await client.generate(prompt(), max_new_tokens=2)
        assert list(answer.token_ids) == truth()[:2]
        assert answer.time_to_first_token_s > 2 * LIMITS.step_timeout_s


@virtual_time
async def test_without_a_chain_it_waits_with_a_reason_and_resumes_when_the_layers_are_back() -> None:
    async with swarm_of(1) as swarm, swarm.client() as client:
        revived: list[asyncio.Task[PeerId]] = []

        async def revive() -> PeerId:
            await asyncio.sleep(14.0)
            return await swarm.add_node(SPANS[1], seed=1)

        def strike(chain: Chain) -> None:
            swarm.kill(chain.peers[1])
            revived.append(asyncio.create_task(revive()))

        answer, times, waits = await answer_with(client, strike, 9)
        assert list(answer.token_ids) == truth()
        assert any("2:4" in reason for reason in waits)
        assert 14 < times[9] - times[8] < 16
        assert sum(node.service.counters.replayed for node in swarm.nodes.values()) == len(prompt()) + 8
        await assert_clean(swarm)


@pytest.mark.parametrize("silent", [False, True])
@virtual_time
async def test_missing_layers_are_named_at_the_deadline(silent: bool) -> None:
    async with swarm_of(1) as swarm, swarm.client() as client:
        began = asyncio.get_running_loop().time()
        with pytest.raises(NoRoute, match="2:4"):
            await answer_with(client, killer(swarm, 1, silent=silent), 9)
        assert asyncio.get_running_loop().time() - began < LIMITS.repair_timeout_s + 5.0


@virtual_time
async def test_evicted_activation_logs_cost_a_fresh_prefill_and_no_token() -> None:
    async with (
        swarm_of(2, limits=Limits(route_timeout_s=3.0, activation_log_bytes=1000)) as swarm,
        swarm.client() as client,
    ):
        answer, _, _ = await answer_with(client, killer(swarm, 1), 9)
        assert list(answer.token_ids) == truth()
        assert sum(node.service.counters.replayed for node in swarm.nodes.values()) == 0


@pytest.mark.parametrize("victim", range(3))
@virtual_time
async def test_seeded_answers_with_a_penalty_survive_a_crash(victim: int) -> None:
    options = {"temperature": 0.9, "top_p": 0.95, "repetition_penalty": 1.2, "seed": 17}
    async with swarm_of(2) as swarm, swarm.client() as client:
        undisturbed = await client.generate(prompt(), max_new_tokens=TOKENS, **options)
        answer, _, _ = await answer_with(client, killer(swarm, victim), 11, **options)
        assert answer.token_ids == undisturbed.token_ids
        assert len(answer.repairs) == 1


@virtual_time
async def test_replay_is_relayed_by_the_client_to_a_replacement_that_its_neighbour_cannot_dial() -> None:
    async with swarm_of(2) as swarm, swarm.client() as client:

        def strike(chain: Chain) -> None:
            for peer, node in swarm.nodes.items():
                if node.span == SPANS[1] and peer not in chain.peers:
                    swarm.network.partition(chain.peers[0], peer)
            swarm.kill(chain.peers[1])

        answer, _, _ = await answer_with(client, strike, 9)
        assert list(answer.token_ids) == truth()
        assert len(answer.repairs) == 1


@pytest.mark.slow
@virtual_time
async def test_many_answers_survive_one_crash() -> None:
    async with swarm_of(2) as swarm, swarm.client() as client:
        asks = [prompt(10 + i, i) for i in range(3)]
        streams = [client.stream(ask, max_new_tokens=TOKENS) for ask in asks]
        answers = asyncio.gather(*(stream.read() for stream in streams))
        await asyncio.sleep(0.4)
        victim = streams[0].chain
        assert victim is not None
        swarm.kill(victim.peers[1])
        for ask, answer in zip(asks, await answers, strict=True):
            assert list(answer.token_ids) == hf_greedy(model(), ask, TOKENS)
        await assert_clean(swarm, victim.peers[1])
