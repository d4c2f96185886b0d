"""Outlined answers over whole swarms: a point's tokens are those of an independent session, whatever happens."""

from __future__ import annotations

import asyncio
import re
import zlib
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from memory_swarm import LIMITS, MemorySwarm, cut, memory_swarm
from scripted_drafters import Noise
from tiny_models import ModelTensors, tiny_model
from virtual_clock import virtual_time

from swarm.block_hash import HASH_BLOCK_TOKENS
from swarm.planner.generation.state_machine import FinishReason
from swarm.testing.memory_network import LinkModel
from swarm_client import GenerationResult, SwarmClient
from swarm_client.speculation.drafters.inline import InlineDrafter

QUESTION = [{"role": "user", "content": "explain the sea"}]
LINK = LinkModel(delay_s=0.005)
TEMPLATE = """
[[template]]
name = "lines"
fits = "it may"
when = ["explain"]
outline = "{question} outline"
point = "{question} {outline} point {title}"
begin = "-"
points = 5
outline_tokens = 20
point_tokens = 18
"""


class LineTokenizer:
    """Every token is a line of a list, so that a model without a language writes outlines."""

    eos_token_ids = (0,)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        words = re.findall(r"\w+", text)
        return [int(w[1:]) if re.fullmatch(r"w\d+", w) else 2 + zlib.crc32(w.encode()) % 120 for w in words]

    def apply_chat_template(self, messages: Sequence[Any]) -> list[int]:
        return [token for m in messages for token in self.encode(f"{m['role']} {m['content']}")]

    def stream(self, *, skip_special_tokens: bool = True) -> LineTokenizer:
        return self

    def push(self, token: int) -> str:
        return f" w{token}\n-"

    def finish(self) -> str:
        return ""


@cache
def source() -> ModelTensors:
    return ModelTensors(tiny_model("llama"))


@pytest.fixture
def templates(tmp_path: Path) -> Path:
    file = tmp_path / "lines.toml"
    file.write_text(TEMPLATE)
    return file


def client_of(swarm: MemorySwarm, templates: Path, name: int = 0, **config: Any) -> Any:
    return swarm.client(name, tokenizer=LineTokenizer(), outline_templates=templates, **config)


async def alone(client: SwarmClient, answer: GenerationResult, **options: Any) -> list[tuple[int, ...]]:
    """The points' prompts answered by independent sessions."""
    assert answer.outline is not None
    return [
        (await client.generate(point.prompt_token_ids, max_new_tokens=18, decoding="sequential", **options)).token_ids
        for point in answer.outline.points
    ]


def points_of(answer: GenerationResult) -> list[tuple[int, ...]]:
    assert answer.outline is not None
    assert answer.outline.used
    assert len(answer.outline.points) >= 2
    return [point.token_ids for point in answer.outline.points]


async def assert_clean(swarm: MemorySwarm, *dead: str) -> None:
    await asyncio.sleep(1.0)
    assert [leak for peer, node in swarm.nodes.items() if peer not in dead and (leak := node.leaks())] == []


@pytest.mark.slow
@pytest.mark.parametrize("borders", [(), (1, 2, 3, 5)], ids=["one hop", "five"])
@pytest.mark.parametrize("options", [{}, {"temperature": 0.9, "top_p": 0.95, "seed": 11}], ids=["greedy", "seeded"])
@virtual_time
async def test_points_equal_independent_sessions(
    options: dict[str, Any], borders: tuple[int, ...], templates: Path
) -> None:
    async with memory_swarm(source(), cut(6, *borders), LINK) as swarm:
        async with client_of(swarm, templates, prefill_chunk=8) as client:
            answer = await client.chat(QUESTION, decoding="outline", point_decoding="sequential", **options)
            assert answer.text == "\n\n".join(f"**{p.title}.**{p.text}".rstrip() for p in answer.outline.points)
            assert answer.token_ids == sum(points_of(answer), ())
            assert answer.time_to_first_token_s < answer.outline.points[-1].ended_s
        async with client_of(swarm, templates, 1) as client:
            assert await alone(client, answer, **options) == points_of(answer)
        async with client_of(swarm, templates, 2, make_drafter=lambda: InlineDrafter(Noise([]))) as client:
            for strategy in ("auto", "pipedec"):
                speculated = await client.chat(QUESTION, decoding="outline", point_decoding=strategy, **options)
                assert points_of(speculated) == points_of(answer)
        await assert_clean(swarm)


@pytest.mark.slow
@pytest.mark.parametrize(("victim", "after"), [(0, 1), (1, 1), (2, 1), (0, 12), (1, 40), (2, 40)])
@virtual_time
async def test_a_node_that_crashes_while_points_run_costs_no_token(after: int, victim: int, templates: Path) -> None:
    async with memory_swarm(source(), cut(6, 2, 4) * 2, LINK) as swarm, client_of(swarm, templates) as client:
        undisturbed = await client.chat(QUESTION, decoding="outline")
        dead = ""
        async with client.chat_stream(QUESTION, decoding="outline") as stream:
            seen = 0
            async for piece in stream:
                seen += len(piece.token_ids)
                if seen >= after and not dead:
                    dead = stream.chain.peers[victim]
                    swarm.kill(dead)
            answer = stream.result
        assert points_of(answer) == points_of(undisturbed)
        assert answer.text == undisturbed.text
        assert bool(answer.repairs) or after == 40
        await assert_clean(swarm, dead)


@virtual_time
async def test_points_share_the_prefix_cache(templates: Path) -> None:
    question = [{"role": "user", "content": "explain" + " the sea" * 48}]
    async with memory_swarm(source(), cut(6, 3), LINK) as swarm, client_of(swarm, templates) as client:
        answer = await client.chat(question, decoding="outline")
        assert answer.outline is not None
        for point in answer.outline.points:
            assert 0 < point.cached_tokens // HASH_BLOCK_TOKENS <= point.shared_prefix_tokens // HASH_BLOCK_TOKENS
        assert await alone(client, answer) == points_of(answer)


@pytest.mark.parametrize("pieces", [0, 1, 5, 30])
@virtual_time
async def test_cancelling_ends_all_sessions(pieces: int, templates: Path) -> None:
    async with memory_swarm(source(), cut(6, 3), LINK) as swarm, client_of(swarm, templates) as client:
        async with client.chat_stream(QUESTION, decoding="outline") as stream:
            if pieces:
                async for _ in stream:
                    pieces -= 1
                    if not pieces:
                        break
        assert stream.result.finish_reason is FinishReason.CANCELLED
        await assert_clean(swarm)
        assert (await client.chat(QUESTION, decoding="outline")).finish_reason is FinishReason.LENGTH


@virtual_time
async def test_points_queue_where_nodes_allow_few_sessions(templates: Path) -> None:
    async with memory_swarm(source(), cut(6, 3), LINK) as swarm, client_of(swarm, templates) as client:
        undisturbed = await client.chat(QUESTION, decoding="outline")
    async with (
        memory_swarm(source(), cut(6, 3), LINK, limits=replace(LIMITS, max_sessions_per_peer=3)) as swarm,
        client_of(swarm, templates) as client,
    ):
        answer = await client.chat(QUESTION, decoding="outline")
        assert points_of(answer) == points_of(undisturbed)
        assert answer.repairs == ()
        await assert_clean(swarm)


@virtual_time
async def test_auto_outlines_only_where_it_may(templates: Path) -> None:
    async with memory_swarm(source(), cut(6, 3), LINK) as swarm:
        async with client_of(swarm, templates) as client:
            assert (await client.chat(QUESTION, max_new_tokens=130)).outline is None
        async with client_of(swarm, templates, 1, outline_in_auto=True) as client:
            answer = await client.chat(QUESTION, max_new_tokens=130)
            assert answer.strategy == "outline"
            plain = await client.chat([{"role": "user", "content": "write a poem"}], max_new_tokens=8)
            assert plain.strategy != "outline"
            assert plain.outline is not None
            assert "thread" in plain.outline.reason
