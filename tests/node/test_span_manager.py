"""Loading layers beside others, running out of memory, and sessions that are handed on before a node goes."""

from __future__ import annotations

import asyncio

import pytest
import torch
from node_fakes import LAYERS, line_step, toy_client, toy_node
from tiny_models import ModelTensors, tiny_model
from virtual_clock import virtual_time

from swarm.errors import NetworkError, NodeLeaving, OutOfMemory
from swarm.messages import CloseSession, SessionFailed
from swarm.testing.memory_network import MemoryNetwork
from swarm.types import LayerSpan
from swarm_hop.serving.drain import POLICY, drain_sessions, wait_for_takeover
from swarm_kernels.runtime.load import load_span
from swarm_node.membership.hardware import memory_for

WHY = NodeLeaving("this node leaves")
A = b"a" * 16


def test_layers_that_are_loaded_already_are_not_read_again() -> None:
    source = ModelTensors(tiny_model("llama"))
    old = load_span(source, LayerSpan(1, 4), torch.float32)
    source.read.clear()
    new = load_span(source, LayerSpan(2, 6), torch.float32, like=old)
    assert not any(f"layers.{layer}." in name for name in source.read for layer in (2, 3))
    assert any("layers.4." in name for name in source.read)
    plain = load_span(source, LayerSpan(2, 6), torch.float32)
    hidden = torch.randn(1, source.config.hidden_size)
    assert torch.equal(new.logits(hidden), plain.logits(hidden))
    source.read.clear()
    load_span(source, LayerSpan(3, 6), torch.float32, like=new)
    assert not source.read, "the same end of the model is shared too"


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory: 9 bytes")])
def test_every_way_of_running_out_of_memory_is_one_sentence(error: Exception) -> None:
    with pytest.raises(OutOfMemory, match="too little memory for layers 0:3"), memory_for("layers 0:3"):
        raise error
    with pytest.raises(RuntimeError, match="else"), memory_for("layers 0:3"):
        raise RuntimeError("something else")


async def nobody_else() -> object:
    return lambda span: False


async def everybody_else() -> object:
    return lambda span: True


async def nobody_knows() -> object:
    raise NetworkError("the directory is away")


@virtual_time
async def test_draining_evicts_sessions_after_the_grace_time_if_others_serve_their_layers() -> None:
    network, hops = MemoryNetwork(), [("n0", 0, LAYERS)]
    async with toy_node(network, "n0", LayerSpan(0, LAYERS)) as (service, engine), toy_client(network) as client:
        await client.open(A, hops)
        begun = asyncio.get_running_loop().time()
        clearing = asyncio.create_task(drain_sessions(service, WHY, everybody_else, within_s=30.0))  # type: ignore[arg-type]
        await client.send("n0", line_step(A, 0, 0, [1]))
        assert (await client.message()).tokens == [7]  # type: ignore[union-attr]
        failed = await client.message()
        assert isinstance(failed, SessionFailed)
        assert (failed.error, failed.kv_retained_tokens) == ("leaving", 1)
        assert not clearing.done()  # its KV cache is kept for a transfer
        await client.send("n0", CloseSession(A))
        assert await clearing == 0
        assert POLICY.grace_s <= asyncio.get_running_loop().time() - begun < POLICY.grace_s + 1
        assert engine.reserved == {}


@pytest.mark.parametrize("elsewhere", [nobody_else, nobody_knows])
def test_draining_lets_sessions_finish_that_no_other_node_can_take(elsewhere: object) -> None:
    @virtual_time
    async def scenario() -> None:
        network, hops = MemoryNetwork(), [("n0", 0, LAYERS)]
        async with toy_node(network, "n0", LayerSpan(0, LAYERS)) as (service, _), toy_client(network) as client:
            await client.open(A, hops)
            clearing = asyncio.create_task(drain_sessions(service, WHY, elsewhere, within_s=30.0))  # type: ignore[arg-type]
            await asyncio.sleep(29)
            await client.send("n0", line_step(A, 0, 0, [1]))
            assert (await client.message()).tokens == [7]  # type: ignore[union-attr]
            assert await clearing == 1
            assert (await client.message()).error == "leaving"  # type: ignore[union-attr]

    scenario()


@virtual_time
async def test_wait_for_takeover_returns_at_once_if_no_other_node_can_take_the_layers() -> None:
    loop, span = asyncio.get_running_loop(), LayerSpan(0, 3)

    async def soon() -> object:
        return lambda span: loop.time() > 5

    async def yes() -> bool:
        return True

    async def no() -> bool:
        return False

    assert await wait_for_takeover(span, soon, yes, 30.0)  # type: ignore[arg-type]
    assert 5 < loop.time() < 6.5
    begun = loop.time()
    assert not await wait_for_takeover(span, nobody_else, no, 30.0)  # type: ignore[arg-type]
    assert not await wait_for_takeover(span, nobody_knows, yes, 30.0)  # type: ignore[arg-type]
    assert loop.time() == begun
    assert not await wait_for_takeover(span, nobody_else, yes, 30.0)  # type: ignore[arg-type]
    assert loop.time() == pytest.approx(begun + 30)
