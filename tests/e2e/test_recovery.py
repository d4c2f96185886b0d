"""Nodes die, fall silent, slow down and come back in the middle of answers: the tokens never change."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import pytest
from memory_swarm import LIMITS, MemorySwarm, cut, memory_swarm
from tiny_models import ModelTensors, hf_greedy, tiny_model
from virtual_clock import virtual_time

from swarm.config import Limits
from swarm.errors import NodeLeaving, NoRoute
from swarm.testing.memory_network import LinkModel
from swarm.types import Chain, PeerId
from swarm_client import GenerationResult, SwarmClient, TextStream

TOKENS = 24
SPANS = cut(6, 2, 4)
LINK = LinkModel(delay_s=0.005)


@cache
def model() -> Any:
    return tiny_model("llama")


def prompt(length: int = 18, seed: int = 8) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(2, 131) for _ in range(length)]


@cache
def truth(length: int = 18) -> list[int]:
    return hf_greedy(model(), prompt(length), TOKENS)


def swarm_of(replicas: int, **options: Any) -> Any:
    return memory_swarm(ModelTensors(model()), SPANS * replicas, LINK, **options)


async def answer_with(
    client: SwarmClient, strike: Callable[[Chain], None], at: int, ask: Sequence[int] | None = None, **options: Any
) -> tuple[GenerationResult, list[float], list[str]]:
    """One answer, with a `strike` at the chain after token `at`. -> it, when its tokens came, what it waited for"""
    clock = asyncio.get_running_loop().time
    times: list[float] = []
    waits: list[str] = []
    stream: TextStream
    async with client.stream(ask or prompt(), max_new_tokens=TOKENS, **options) as stream:
        async for piece in stream:
            times += [clock()] * len(piece.token_ids)
            waits += [piece.waiting] if piece.waiting else []
            if len(times) == at and piece.token_ids:
                assert stream.chain is not None
                strike(stream.chain)
        return stream.result, times, waits


def killer(swarm: MemorySwarm, *victims: int, silent: bool = False) -> Callable[[Chain], None]:
    def strike(chain: Chain) -> None:
        for victim in victims:
            swarm.kill(chain.peers[victim], silent)

    return strike


def slower(swarm: MemorySwarm, victim: int) -> Callable[[Chain], None]:
    def strike(chain: Chain) -> None:
        swarm.nodes[chain.peers[victim]].device.delay_s *= 10

    return strike


async def assert_clean(swarm: MemorySwarm, *dead: PeerId) -> None:
    await asyncio.sleep(1.0)
    assert [leak for peer, node in swarm.nodes.items() if peer not in dead and (leak := node.leaks())] == []


@pytest.mark.parametrize("at", [1, 9, 23])
@pytest.mark.parametrize("victims", [(0,), (1,), (2,), (0, 1), (1, 2), (0, 2)], ids=str)
@virtual_time
async def test_lost_hops_are_replaced_and_the_others_keep_what_they_hold(victims: tuple[int, ...], at: int) -> None:
    async with swarm_of(2) as swarm, swarm.client(decoding="sequential") as client:
        before: list[Chain] = []  # without guesses, so that one can count what is held
        kill = killer(swarm, *victims)
        answer, times, _ = await answer_with(client, lambda chain: (before.append(chain), kill(chain))[1], at)
        assert list(answer.token_ids) == truth()
        old, new = before[0].peers, answer.chain.peers
        assert [i for i in range(3) if old[i] != new[i]] == list(victims)
        assert 1 <= len(answer.repairs) <= len(victims)
        held = len(prompt()) + at - 1  # the last token drawn is not held by anybody
        fed = sum(node.service.counters.replayed for node in swarm.nodes.values())
        behind_a_survivor = [v for v in victims if v and v - 1 not in victims]
        assert fed == held * len(behind_a_survivor)
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
async def test_who_was_lost_is_welcome_again_as_soon_as_it_publishes() -> None:
    async with swarm_of(2) as swarm, swarm.client() as client:
        drops: list[asyncio.Task[None]] = []

        def strike(chain: Chain) -> None:
            before, after = chain.peers[0], chain.peers[1]
            drops.append(asyncio.create_task(swarm.nodes[before].pool.drop(after)))  # which tells the client

        first, _, _ = await answer_with(client, strike, 7)
        assert len(first.repairs) == 1
        await asyncio.sleep(6.0)
        again, times, _ = await answer_with(client, killer(swarm, 1), 7)
        assert list(again.token_ids) == truth()
        assert max(b - a for a, b in itertools.pairwise(times)) < 0.5


@pytest.mark.parametrize("victim", range(3))
@virtual_time
async def test_a_death_in_the_middle_of_a_prompt(victim: int) -> None:
    ask = prompt(90)
    async with swarm_of(2) as swarm, swarm.client(prefill_chunk=8) as client:
        stream = client.stream(ask, max_new_tokens=TOKENS)
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
async def test_a_replacement_that_dies_while_it_is_fed(victim: int) -> None:
    async with swarm_of(3) as swarm, swarm.client() as client:
        dead: list[PeerId] = []

        async def ambush(chain: Chain) -> None:
            """Kill whoever comes in for the victim."""
            spare = [p for p, n in swarm.nodes.items() if n.span == SPANS[victim] and p != chain.peers[victim]]
            for _ in range(1000):
                await asyncio.sleep(0.001)
                if came := [p for p in spare if swarm.nodes[p].service.sessions]:
                    dead.append(came[0])
                    swarm.kill(came[0])
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
async def test_a_host_that_vanishes_without_a_word_is_noticed_by_its_silence(victim: int) -> None:
    async with swarm_of(2) as swarm, swarm.client() as client:
        answer, times, _ = await answer_with(client, killer(swarm, victim, silent=True), 9)
        assert list(answer.token_ids) == truth()
        assert len(answer.repairs) == 1
        assert max(b - a for a, b in itertools.pairwise(times)) < 3 * LIMITS.ping_timeout_s


@pytest.mark.parametrize(("loud", "silent"), list(itertools.permutations(range(3), 2)))
@virtual_time
async def test_a_hop_that_falls_silent_while_another_is_replaced(loud: int, silent: int) -> None:
    async with swarm_of(2) as swarm, swarm.client() as client:

        def strike(chain: Chain) -> None:
            swarm.kill(chain.peers[loud])
            swarm.kill(chain.peers[silent], silent=True)

        answer, times, _ = await answer_with(client, strike, 9)
        assert list(answer.token_ids) == truth()
        assert max(b - a for a, b in itertools.pairwise(times)) < 3 * LIMITS.ping_timeout_s


@pytest.mark.parametrize("victim", range(3))
@virtual_time
async def test_a_hop_that_becomes_ten_times_slower_is_left_within_five_tokens(victim: int) -> None:
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
        ),  # nobody knows what is usual
        (9, "it has become slow, and others are much quicker", 1.0),
    ],
)
@pytest.mark.parametrize("victim", range(3))
@virtual_time
async def test_a_hop_that_answers_pings_and_computes_no_more_is_left(
    victim: int, at: int, reason: str, within_s: float
) -> None:
    async with swarm_of(2) as swarm, swarm.client() as client:

        def strike(chain: Chain) -> None:
            swarm.nodes[chain.peers[victim]].device.delay_s = 300.0

        answer, times, _ = await answer_with(client, strike, at)
        assert list(answer.token_ids) == truth()
        assert [repair.partition(": ")[2] for repair in answer.repairs] == [reason]
        assert max(b - a for a, b in itertools.pairwise(times)) < within_s


@virtual_time
async def test_a_result_is_not_held_up_by_questions_about_it() -> None:
    async with swarm_of(1) as swarm, swarm.client(decoding="sequential") as client:

        def strike(chain: Chain) -> None:
            swarm.nodes[chain.peers[1]].device.delay_s = 0.6

        answer, times, _ = await answer_with(client, strike, 9)
        assert list(answer.token_ids) == truth()
        assert max(b - a for a, b in itertools.pairwise(times)) < 0.6 + LIMITS.ping_timeout_s / 2


@pytest.mark.parametrize("edge", range(2))
@virtual_time
async def test_hops_that_both_live_and_cannot_reach_each_other_any_more(edge: int) -> None:
    async with swarm_of(2) as swarm, swarm.client() as client:

        def strike(chain: Chain) -> None:
            swarm.network.partition(chain.peers[edge], chain.peers[edge + 1])

        answer, times, _ = await answer_with(client, strike, 9)
        assert list(answer.token_ids) == truth()
        assert len(answer.repairs) == 1
        assert max(b - a for a, b in itertools.pairwise(times)) < LIMITS.stall_timeout_s + 6 * LIMITS.ping_timeout_s


def leaver(swarm: MemorySwarm, *victims: int) -> Callable[[Chain], None]:
    def strike(chain: Chain) -> None:
        for victim in victims:
            assert swarm.nodes[chain.peers[victim]].service.evict(NodeLeaving("this node leaves"), lambda span: True)

    return strike


@pytest.mark.parametrize("at", [1, 9, 20])
@pytest.mark.parametrize("victims", [(0,), (1,), (2,), (0, 1), (1, 2), (0, 2), (0, 1, 2)], ids=str)
@virtual_time
async def test_a_node_that_leaves_hands_over_what_it_computed(victims: tuple[int, ...], at: int) -> None:
    async with swarm_of(2) as swarm, swarm.client() as client:
        answer, _, _ = await answer_with(client, leaver(swarm, *victims), at, prompt(37))
        assert list(answer.token_ids) == truth(37)
        counters = [node.service.counters for node in swarm.nodes.values()]
        assert sum(c.replayed for c in counters) == 0
        assert sum(c.kv_transferred for c in counters) >= len(victims) * (37 + at - 1)
        await asyncio.sleep(6.0)
        await assert_clean(swarm)


@pytest.mark.parametrize("victim", range(3))
@virtual_time
async def test_an_heir_that_is_refused_is_fed_instead(victim: int) -> None:
    async with swarm_of(2) as swarm, swarm.client() as client:

        def strike(chain: Chain) -> None:
            leaver(swarm, victim)(chain)
            for node in swarm.nodes.values():
                if node.span == SPANS[victim]:
                    swarm.network.partition(chain.peers[victim], node.peer)

        answer, _, _ = await answer_with(client, strike, 9)
        assert list(answer.token_ids) == truth()
        assert sum(node.service.counters.kv_transferred for node in swarm.nodes.values()) == 0


@virtual_time
async def test_a_slow_hop_that_nobody_can_replace_is_kept() -> None:
    async with swarm_of(1) as swarm, swarm.client() as client:
        answer, _, _ = await answer_with(client, slower(swarm, 1), 9)
        assert list(answer.token_ids) == truth()
        assert answer.repairs == ()


@virtual_time
async def test_a_chain_that_is_known_to_be_slow_is_given_its_time() -> None:
    async with swarm_of(1) as swarm, swarm.client(decoding="sequential") as client:
        for node in swarm.nodes.values():
            node.device.delay_s = LIMITS.step_timeout_s
        await asyncio.sleep(5.0)  # and they say so
        answer = await client.generate(prompt(), max_new_tokens=2)
        assert list(answer.token_ids) == truth()[:2]
        assert answer.time_to_first_token_s > 2 * LIMITS.step_timeout_s


@virtual_time
async def test_without_a_chain_it_waits_with_a_reason_and_goes_on_when_the_layers_are_back() -> None:
    async with swarm_of(1) as swarm, swarm.client() as client:
        reborn: list[asyncio.Task[PeerId]] = []

        async def rebirth() -> PeerId:
            await asyncio.sleep(14.0)
            return await swarm.add_node(SPANS[1], seed=1)

        def strike(chain: Chain) -> None:
            swarm.kill(chain.peers[1])
            reborn.append(asyncio.create_task(rebirth()))

        answer, times, waits = await answer_with(client, strike, 9)
        assert list(answer.token_ids) == truth()
        assert any("2:4" in reason for reason in waits)
        assert 14 < times[9] - times[8] < 16
        assert sum(node.service.counters.replayed for node in swarm.nodes.values()) == len(prompt()) + 8
        await assert_clean(swarm)


@pytest.mark.parametrize("silent", [False, True])
@virtual_time
async def test_layers_that_stay_away_are_named_at_the_deadline(silent: bool) -> None:
    async with swarm_of(1) as swarm, swarm.client() as client:
        began = asyncio.get_running_loop().time()
        with pytest.raises(NoRoute, match="2:4"):
            await answer_with(client, killer(swarm, 1, silent=silent), 9)
        assert asyncio.get_running_loop().time() - began < LIMITS.repair_timeout_s + 5.0


@virtual_time
async def test_logs_that_were_dropped_cost_a_fresh_start_and_no_token() -> None:
    async with (
        swarm_of(2, limits=Limits(route_timeout_s=3.0, activation_log_bytes=1000)) as swarm,
        swarm.client() as client,
    ):
        answer, _, _ = await answer_with(client, killer(swarm, 1), 9)
        assert list(answer.token_ids) == truth()
        assert sum(node.service.counters.replayed for node in swarm.nodes.values()) == 0


@pytest.mark.parametrize("victim", range(3))
@virtual_time
async def test_seeded_answers_with_a_penalty_survive_too(victim: int) -> None:
    options = {"temperature": 0.9, "top_p": 0.95, "repetition_penalty": 1.2, "seed": 17}
    async with swarm_of(2) as swarm, swarm.client() as client:
        undisturbed = await client.generate(prompt(), max_new_tokens=TOKENS, **options)
        answer, _, _ = await answer_with(client, killer(swarm, victim), 11, **options)
        assert answer.token_ids == undisturbed.token_ids
        assert len(answer.repairs) == 1


@virtual_time
async def test_a_replacement_that_its_neighbour_cannot_dial_is_fed_through_the_client() -> None:
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
async def test_many_answers_survive_one_death() -> None:
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
