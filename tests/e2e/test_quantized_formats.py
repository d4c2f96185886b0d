"""Chains in 8 and 4 bits: speculation and batch sharing change no token, and formats never mix."""

from __future__ import annotations

import asyncio
import random

import pytest
from memory_swarm import cut, memory_swarm
from scripted_drafters import Oracle
from tiny_models import ModelTensors, tiny_model
from virtual_clock import virtual_time

from swarm.errors import NoRoute
from swarm.types import LayerSpan
from swarm_client.speculation.drafters.inline import InlineDrafter


@pytest.mark.parametrize("dtype", ["int8", "int4"])
@virtual_time
async def test_speculation_and_batch_sharing_change_no_token(dtype: str) -> None:
    rng = random.Random(4)
    prompts = [[rng.randrange(2, 131) for _ in range(length)] for length in (19, 5, 33)]
    async with memory_swarm(ModelTensors(tiny_model("llama")), cut(6, 2), dtype=dtype) as swarm:
        async with swarm.client(prefill_chunk=8) as client:
            alone = [await client.generate(ids, max_new_tokens=12, decoding="sequential") for ids in prompts]
        async with swarm.client(1, prefill_chunk=5) as client:
            together = await asyncio.gather(*(client.generate(ids, max_new_tokens=12) for ids in prompts))
        assert [a.token_ids for a in together] == [a.token_ids for a in alone]
        truth = alone[0].token_ids
        async with swarm.client(2, make_drafter=lambda: InlineDrafter(Oracle(truth, 0.8))) as client:
            speculated = await client.generate(prompts[0], max_new_tokens=12, decoding="tree")
    assert speculated.token_ids == truth


@virtual_time
async def test_formats_do_not_mix_in_a_chain() -> None:
    async with memory_swarm(ModelTensors(tiny_model("llama")), [LayerSpan(0, 3)], dtype="int4") as swarm:
        await swarm.add_node(LayerSpan(3, 6), "int8")
        async with swarm.client() as client:
            with pytest.raises(NoRoute, match="another dtype"):
                await client.generate([1, 2, 3], max_new_tokens=2)
        await swarm.add_node(LayerSpan(3, 6), "int4")
        async with swarm.client(1) as client:
            assert len((await client.generate([1, 2, 3], max_new_tokens=2)).token_ids) == 2
