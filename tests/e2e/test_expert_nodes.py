"""A hop of several nodes: its tokens are those of one node with everything, whatever happens to the others."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from functools import cache
from typing import Any

import pytest
import torch
from expert_swarm import ExpertSwarm, SharingNode, expert_swarm
from scripted_drafters import Oracle
from tiny_models import ModelTensors, tiny_model

from swarm.config import Limits
from swarm.expert_messages import ExpertOutputs
from swarm.testing.memory_network import LinkModel
from swarm.types import NodeState
from swarm_client.speculation.drafters.inline import InlineDrafter
from swarm_hop.experts.policy import ExpertPolicy
from swarm_node.membership.memory_plan import ModelMemory

TOKENS, LAYERS = 24, 3
KINDS: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32, "norm_topk_prob": True},
    "gpt_oss": {"num_local_experts": 8, "num_experts_per_tok": 2},
}
OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "seeded": {"temperature": 0.9, "top_k": 60, "seed": 23},
}
ALL, FIRST, SECOND, THIRD = "0:3", "0:3", "3:6", "6:8"


@cache
def source(kind: str) -> ModelTensors:
    return ModelTensors(tiny_model(kind, num_hidden_layers=LAYERS, head_dim=16, **KINDS[kind]))


def prompt() -> list[int]:
    rng = random.Random(8)
    return [rng.randrange(2, 131) for _ in range(18)]


_truths: dict[tuple[str, str, str], list[int]] = {}


async def truth(patch: pytest.MonkeyPatch, kind: str, dtype: str, options: str) -> list[int]:
    """What one node says that holds everything."""
    if (kind, dtype, options) not in _truths:
        async with expert_swarm(patch, source(kind)) as swarm:
            swarm.add(dtype=dtype, layers=ALL)
            await swarm.covered()
            async with swarm.client() as client:
                answer = await client.generate(
                    prompt(), max_new_tokens=TOKENS, decoding="sequential", **OPTIONS[options]
                )
                _truths[kind, dtype, options] = list(answer.token_ids)
    return _truths[kind, dtype, options]


async def split_hop(swarm: ExpertSwarm, dtype: str = "bf16", copies: int = 1) -> list[SharingNode]:
    """A leader with some experts, and the others on two nodes, `copies` times; serving."""
    nodes = [swarm.add(dtype=dtype, layers=ALL, experts=FIRST, lead=True)]
    for _ in range(copies):
        nodes += [swarm.add(dtype=dtype, layers=ALL, experts=part) for part in (SECOND, THIRD)]
    await swarm.covered()
    exchange = nodes[0].inside._experts.exchange
    await swarm.until(lambda _: len(exchange.usable()) == 2 * copies)
    return nodes


async def ask(
    swarm: ExpertSwarm, strike: Callable[[], Awaitable[None]] | None = None, at: int = 5, **options: Any
) -> Any:
    """One answer, with a `strike` once there are `at` tokens."""
    drafter = options.pop("oracle", None)
    make: dict[str, Any] = {} if drafter is None else {"make_drafter": lambda: InlineDrafter(drafter)}
    seen = 0
    async with swarm.client(**make) as client, client.stream(prompt(), max_new_tokens=TOKENS, **options) as stream:
        async for piece in stream:
            seen += len(piece.token_ids)
            if strike is not None and seen >= at:
                await strike()
                strike = None
        return stream.result


@pytest.mark.parametrize(
    ("dtype", "options"),
    [("fp32", "greedy"), ("bf16", "greedy"), ("int8", "greedy"), ("int4", "greedy"), ("bf16", "seeded")],
)
@pytest.mark.parametrize("kind", KINDS)
async def test_tokens_are_those_of_one_node(
    monkeypatch: pytest.MonkeyPatch, kind: str, dtype: str, options: str
) -> None:
    expected = await truth(monkeypatch, kind, dtype, options)
    async with expert_swarm(monkeypatch, source(kind)) as swarm:
        nodes = await split_hop(swarm, dtype)
        answer = await ask(swarm, decoding="sequential", **OPTIONS[options])
        assert list(answer.token_ids) == expected
        trees = await ask(swarm, decoding="tree", oracle=Oracle(expected, 0.8), **OPTIONS[options])
        assert list(trees.token_ids) == expected
        assert nodes[0].inside._experts.exchange.counters.asked > 0
        assert all(node.inside._experts.service.computed > 0 for node in nodes[1:])


async def test_two_clients_at_once_and_a_leader_without_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = await truth(monkeypatch, "qwen3_moe", "bf16", "greedy")
    async with expert_swarm(monkeypatch, source("qwen3_moe"), LinkModel(delay_s=0.002)) as swarm:
        swarm.add(layers=ALL, lead=True)
        swarm.add(layers=ALL, experts="0:4")
        swarm.add(layers="0:2", experts="4:8")
        swarm.add(layers="2:3", experts="4:8")
        await swarm.covered()
        answers = await asyncio.gather(*(ask(swarm, decoding="sequential") for _ in range(3)))
        assert all(list(answer.token_ids) == expected for answer in answers)


async def crash(swarm: ExpertSwarm, node: SharingNode) -> None:
    swarm.network.kill(node.peer)


async def vanish(swarm: ExpertSwarm, node: SharingNode) -> None:
    swarm.network.kill(node.peer, silent=True)


async def stall(swarm: ExpertSwarm, node: SharingNode) -> None:
    node.inside._experts.service.on_rows = lambda link, message, body: None


async def lie_in_size(swarm: ExpertSwarm, node: SharingNode) -> None:
    _answer_with(node, lambda outputs: outputs[:, :-1])


async def lie_with_nan(swarm: ExpertSwarm, node: SharingNode) -> None:
    _answer_with(node, lambda outputs: torch.full_like(outputs, float("nan")))


async def leave(swarm: ExpertSwarm, node: SharingNode) -> None:
    node.stop.set()


FAULTS = [crash, vanish, stall, lie_in_size, lie_with_nan, leave]


def _answer_with(node: SharingNode, wrong: Callable[[torch.Tensor], torch.Tensor]) -> None:
    service = node.inside._experts.service
    compute = service._compute

    async def answer(*arguments: Any) -> torch.Tensor:
        return wrong(await compute(*arguments)).contiguous()

    service._compute = answer


@pytest.mark.parametrize("fault", FAULTS)
async def test_a_replica_takes_over_in_the_middle_of_a_step(
    monkeypatch: pytest.MonkeyPatch, fault: Callable[..., Awaitable[None]]
) -> None:
    expected = await truth(monkeypatch, "qwen3_moe", "bf16", "greedy")
    async with expert_swarm(monkeypatch, source("qwen3_moe")) as swarm:
        nodes = await split_hop(swarm, copies=2)
        exchange = nodes[0].inside._experts.exchange
        first = exchange.usable()[0].peer  # the one that is asked
        victim = next(node for node in nodes if node.peer == first)
        answer = await ask(swarm, lambda: fault(swarm, victim), decoding="sequential")
        assert list(answer.token_ids) == expected
        assert not answer.repairs
        assert exchange.counters.lost == 0
        assert first not in [holder.peer for holder in exchange.usable()]
        profile = await swarm.profile(nodes[0])
        assert profile is not None
        assert profile.state is NodeState.SERVING


@pytest.mark.parametrize("fault", [crash, stall, lie_with_nan])
async def test_without_a_replica_the_leader_withdraws_and_the_answer_goes_on_elsewhere(
    monkeypatch: pytest.MonkeyPatch, fault: Callable[..., Awaitable[None]]
) -> None:
    expected = await truth(monkeypatch, "qwen3_moe", "bf16", "greedy")
    async with expert_swarm(monkeypatch, source("qwen3_moe")) as swarm:
        nodes = await split_hop(swarm)

        async def strike() -> None:
            other = swarm.add(layers=ALL)
            await other.until("serving")
            await fault(swarm, nodes[1])

        answer = await ask(swarm, strike, decoding="sequential")
        assert list(answer.token_ids) == expected
        assert answer.repairs
        assert "experts 3:6" in [sentence for name, sentence in nodes[0].events if name == "waiting"][-1]
        await swarm.until(lambda s: (n := s.node(nodes[0].peer)) is not None and n.state is NodeState.WAITING)


async def test_the_leader_serves_again_once_somebody_holds_what_was_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = await truth(monkeypatch, "qwen3_moe", "bf16", "greedy")
    async with expert_swarm(monkeypatch, source("qwen3_moe")) as swarm:
        nodes = await split_hop(swarm)

        async def strike() -> None:
            await crash(swarm, nodes[1])
            swarm.add(layers=ALL, experts="2:7")  # not the same share, but all that is missing

        answer = await ask(swarm, strike, decoding="sequential")
        assert list(answer.token_ids) == expected
        assert answer.repairs
        await nodes[0].until("resumed")
        assert list((await ask(swarm, decoding="sequential")).token_ids) == expected


async def test_nodes_that_hold_no_layer_share_the_model_by_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has room for half of a layer; they find who leads and who holds what."""
    expected = await truth(monkeypatch, "qwen3_moe", "bf16", "greedy")
    memory = ModelMemory.of(source("qwen3_moe"), torch.bfloat16)
    budget = memory.memory_for(1) - 4 * memory.expert
    async with expert_swarm(monkeypatch, source("qwen3_moe")) as swarm:
        for _ in range(2 * LAYERS):
            swarm.add(max_memory=budget)
        await swarm.covered()
        snapshot = await swarm.snapshot()
        assert len(snapshot.serving()) == LAYERS
        assert all(node.experts is not None for node in snapshot.nodes)
        assert list((await ask(swarm, decoding="sequential")).token_ids) == expected


async def test_nothing_hangs_when_the_leader_stops_while_it_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    async with expert_swarm(monkeypatch, source("qwen3_moe")) as swarm:
        nodes = await split_hop(swarm)

        async def strike() -> None:
            await stall(swarm, nodes[1])
            nodes[0].stop.set()

        asking = asyncio.create_task(ask(swarm, strike, decoding="sequential"))
        async with asyncio.timeout(10):
            await nodes[0].task
        asking.cancel()
        await asyncio.wait([asking])


async def test_outputs_that_nobody_asked_for_are_charged(monkeypatch: pytest.MonkeyPatch) -> None:
    async with expert_swarm(monkeypatch, source("qwen3_moe")) as swarm:
        nodes = await split_hop(swarm)
        link = await nodes[1].inside._pool.get(nodes[0].peer, nodes[0].transport.addresses)
        for _ in range(400):
            await link.send(ExpertOutputs(1 << 40), b"x" * 64)
        await asyncio.sleep(0.5)
        pool = nodes[0].inside._pool
        assert pool.violations.counts[nodes[1].peer] > 0


def test_a_replica_is_asked_before_clients_give_the_leader_up() -> None:
    assert ExpertPolicy().stall_s < Limits().stall_timeout_s
