"""Sessions over three hops in memory, and every violation by a client or an untrusted peer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

import pytest
from node_fakes import LIMITS, ToyClient, ToyEngine, line_step, open_message, toy_client, toy_node
from virtual_clock import virtual_time

from swarm.errors import NodeBusy
from swarm.messages import (
    MAX_HOPS,
    CloseSession,
    DropInFlight,
    Ping,
    SessionFailed,
    SessionOpened,
    Step,
    StepResult,
    WireSampling,
)
from swarm.receipts import WorkReceipt
from swarm.testing.memory_network import LinkModel, MemoryNetwork
from swarm.types import LayerSpan
from swarm_hop.serving.session_server import SessionServer

A = b"a" * 16
B = b"b" * 16
HOPS = [("n0", 0, 2), ("n1", 2, 4), ("n2", 4, 6)]


@dataclass
class Rig:
    network: MemoryNetwork
    client: ToyClient
    services: list[SessionServer]
    engines: list[ToyEngine]

    def idle(self) -> bool:
        return all(s.sessions == 0 for s in self.services) and all(not e.reserved for e in self.engines)


@asynccontextmanager
async def rig() -> AsyncIterator[Rig]:
    network = MemoryNetwork(link=LinkModel(delay_s=0.005))
    async with AsyncExitStack() as stack:
        services, engines = [], []
        for name, start, end in HOPS:
            service, engine = await stack.enter_async_context(toy_node(network, name, LayerSpan(start, end)))
            services.append(service)
            engines.append(engine)
        client = await stack.enter_async_context(toy_client(network))
        yield Rig(network, client, services, engines)


@virtual_time
async def test_tokens_go_through_three_hops_and_come_back_with_their_trace() -> None:
    async with rig() as r:
        await r.client.open(A, HOPS)
        await r.client.send("n0", line_step(A, 0, 0, [1, 2, 3]))
        peer, result, _ = await r.client.next()
        assert isinstance(result, StepResult)
        assert (peer, result.tokens, result.step, len(result.trace)) == ("n2", [9], 0, 3)
        await r.client.send("n0", line_step(A, 1, 3, [9]))
        assert (await r.client.message()).tokens == [15]  # type: ignore[union-attr]
        for name, _, _ in HOPS:
            await r.client.send(name, CloseSession(A))
        await asyncio.sleep(1)
        assert r.idle()


@virtual_time
async def test_chunks_that_are_not_sampled_are_acknowledged_empty() -> None:
    async with rig() as r:
        await r.client.open(A, HOPS)
        await r.client.send("n0", line_step(A, 0, 0, [1, 2], sample=False))
        await r.client.send("n0", line_step(A, 1, 2, [3]))
        results = [await r.client.message(), await r.client.message()]
        assert [m.tokens for m in results if isinstance(m, StepResult)] == [[], [9]]


@virtual_time
async def test_a_hop_may_use_a_part_of_a_span_and_sessions_do_not_mix() -> None:
    async with rig() as r:
        short = [("n0", 0, 1), ("n1", 2, 4), ("n2", 4, 6)]
        short[1] = ("n1", 2, 3)
        await r.client.open(A, short)
        await r.client.open(B, HOPS)
        await r.client.send("n0", line_step(A, 0, 0, [10]))
        await r.client.send("n0", line_step(B, 0, 0, [20]))
        answers = {m.session: m.tokens for m in [await r.client.message(), await r.client.message()]}  # type: ignore[union-attr]
        assert answers == {A: [14], B: [26]}


@virtual_time
async def test_steps_that_wait_together_share_a_batch() -> None:
    async with rig() as r:
        sessions = [bytes([i]) * 16 for i in range(3)]
        for session in sessions:
            await r.client.open(session, HOPS)
        for session in sessions:
            await r.client.send("n0", line_step(session, 0, 0, [5]))
        for _ in sessions:
            assert isinstance(await r.client.message(), StepResult)
        assert r.engines[0].batches == [3] or r.engines[0].batches == [1, 2]


@virtual_time
async def test_the_client_relays_an_edge_that_a_hop_cannot_dial() -> None:
    async with rig() as r:
        r.network.partition("n0", "n1")
        for i, (name, start, end) in enumerate(HOPS):
            await r.client.send(name, open_message(A, HOPS, i, start, end))
        relays = {}
        for _ in HOPS:
            peer, message, _ = await r.client.next()
            assert isinstance(message, SessionOpened)
            relays[peer] = message.client_relays_next_edge
        assert relays == {"n0": True, "n1": False, "n2": False}
        await r.client.send("n0", line_step(A, 0, 0, [1]))
        peer, step, body = await r.client.next()
        assert peer == "n0"
        assert isinstance(step, Step)
        await r.client.send("n1", step, body)
        assert (await r.client.message()).tokens == [7]  # type: ignore[union-attr]


@virtual_time
async def test_a_lost_client_frees_its_pages() -> None:
    async with rig() as r:
        await r.client.open(A, HOPS)
        assert not r.idle()
        r.network.kill("client")
        await asyncio.sleep(1)
        assert r.idle()


@virtual_time
async def test_a_dead_next_hop_is_reported_to_the_client_by_name_and_the_session_waits() -> None:
    async with rig() as r:
        await r.client.open(A, HOPS)
        r.network.kill("n1")
        peer, message, _ = await r.client.next()
        assert peer == "n0"
        assert isinstance(message, SessionFailed)
        assert (message.error, message.unreachable_next_hop) == ("connection_lost", "n1")
        assert len(r.engines[0].reserved) == len(r.engines[2].reserved) == 1
        await asyncio.sleep(LIMITS.session_idle_s + 1)  # but not for ever
        assert r.engines[0].reserved == r.engines[2].reserved == {}


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"model": "other"}, "wrong_model"),
        ({"weight_hash": "other"}, "wrong_model"),
        ({"dtype": "bf16"}, "wrong_model"),
        ({"start": 0, "end": 4}, "no_route"),
        ({"start": 1, "end": 1}, "no_route"),
        ({"max_tokens": 2000}, "out_of_memory"),
        ({"downstream": ""}, "protocol"),
    ],
)
def test_an_open_that_cannot_be_served_is_refused_with_a_reason(change: dict[str, object], error: str) -> None:
    import msgspec

    @virtual_time
    async def scenario() -> None:
        async with rig() as r:
            message = open_message(A, HOPS, 0, 0, 2)
            await r.client.send("n0", msgspec.structs.replace(message, **change))
            answer = await r.client.message()
            assert isinstance(answer, SessionFailed)
            assert answer.error == error
            assert answer.detail
            assert r.idle()
            await r.client.open(B, HOPS)  # and the node lives on

    scenario()


@pytest.mark.parametrize(
    ("step", "error"),
    [
        (Step(A, 0, 0, 3, 1, tokens=[1]), "protocol"),  # base
        (Step(A, 0, 0, 0, 2, tokens=[1]), "protocol"),  # too few ids
        (Step(A, 0, 0, 0, 1, tokens=[200]), "protocol"),  # beyond the vocabulary
        (Step(A, 0, 0, 0, 0), "protocol"),  # no rows
        (Step(A, 0, 0, 0, 1, tokens=[1, 1], parents=[-1, -1], slots=[0]), "protocol"),
        (Step(A, 0, 0, 0, 0, tokens=[1, 1], parents=[-1, -1], slots=[3, 3]), "protocol"),
        (Step(A, 0, 0, 0, 1, tokens=[1], trace=[(0.0, 0.0)] * MAX_HOPS), "protocol"),
        (Step(A, 0, 0, 0, 60, tokens=[1] * 60), "context_overflow"),
    ],
)
def test_a_bad_step_ends_its_session_and_no_other(step: Step, error: str) -> None:
    @virtual_time
    async def scenario() -> None:
        async with rig() as r:
            await r.client.open(A, HOPS)
            await r.client.open(B, HOPS)
            await r.client.send("n0", step)
            answer = await r.client.message()
            assert isinstance(answer, SessionFailed)
            assert (answer.session, answer.error) == (A, error)
            assert r.services[0].sessions == 1
            await asyncio.sleep(0.1)
            while not r.client.inbox.empty():
                r.client.inbox.get_nowait()
            await r.client.send("n0", line_step(B, 0, 0, [1]))
            assert (await r.client.message()).tokens == [7]  # type: ignore[union-attr]

    scenario()


@virtual_time
async def test_a_wrong_body_length_is_refused() -> None:
    async with rig() as r:
        await r.client.open(A, HOPS)
        await r.client.send("n1", Step(A, 0, 0, 0, 2), b"123")
        assert (await r.client.message()).error == "protocol"  # type: ignore[union-attr]


@virtual_time
async def test_untrusted_peers_reach_no_session_of_others_and_are_disconnected() -> None:
    async with rig() as r, toy_client(r.network, "untrusted") as untrusted:
        await r.client.open(A, HOPS)
        attacks = [line_step(A, 0, 0, [1]), CloseSession(A), DropInFlight(A, 9), open_message(A, HOPS, 0, 0, 2)]
        for attack in attacks[: LIMITS.max_protocol_errors - 1]:
            await untrusted.send("n0", attack)
            assert (await untrusted.message()).error == "protocol"  # type: ignore[union-attr]
        await untrusted.send("n0", attacks[-1])
        await asyncio.sleep(1)
        assert untrusted.lost == ["n0"]
        await r.client.send("n0", line_step(A, 0, 0, [1]))
        assert (await r.client.message()).tokens == [7]  # type: ignore[union-attr]


@virtual_time
async def test_a_failed_device_ends_only_the_sessions_of_its_batch() -> None:
    async with rig() as r:
        await r.client.open(A, HOPS)
        r.engines[1].fail = OSError("the device is on fire")
        await r.client.send("n0", line_step(A, 0, 0, [1]))
        peer, answer, _ = await r.client.next()
        assert isinstance(answer, SessionFailed)
        assert (peer, answer.error) == ("n1", "resource")
        r.engines[1].fail = None
        await r.client.open(B, HOPS)
        await r.client.send("n0", line_step(B, 0, 0, [1]))
        while not isinstance(message := await r.client.message(), StepResult):
            assert isinstance(message, SessionFailed)
        assert message.tokens == [7]


@pytest.mark.parametrize("where", ["plan", "log"])
@virtual_time
async def test_a_bug_of_ours_ends_its_session_and_its_client_is_notified(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def bug(*_: object) -> None:
        raise ValueError("a bug")

    async with rig() as r:
        await r.client.open(A, HOPS)
        with monkeypatch.context() as patched:
            patched.setattr(*((r.engines[0], "prepare") if where == "plan" else (r.services[0]._logs, "append")), bug)
            await r.client.send("n0", line_step(A, 0, 0, [1]))
            failed = await r.client.message()
        assert isinstance(failed, SessionFailed)
        assert (failed.session, failed.error, failed.unreachable_next_hop) == (A, "resource", "")
        for name, _, _ in HOPS[1:]:
            await r.client.send(name, CloseSession(A))
        await r.client.open(B, HOPS)
        await r.client.send("n0", line_step(B, 0, 0, [1, 2, 3]))
        assert isinstance(await r.client.message(), StepResult)
        loop = asyncio.get_running_loop()
        assert [str(error) for error in loop.errors] == ["a bug"]  # type: ignore[attr-defined]
        loop.errors.clear()  # type: ignore[attr-defined]


@virtual_time
async def test_a_step_the_cache_refuses_does_not_take_its_batch_along() -> None:
    async with rig() as r:
        for session in (A, B):
            await r.client.open(session, HOPS)
        r.engines[0].refuse_key = 0
        for session in (A, B):
            await r.client.send("n0", line_step(session, 0, 0, [1]))
        messages = [await r.client.message(), await r.client.message()]
        kinds = {m.session: type(m) for m in messages}  # type: ignore[union-attr]
        assert kinds == {A: SessionFailed, B: StepResult}


@virtual_time
async def test_steps_of_an_older_epoch_are_dropped_silently() -> None:
    async with rig() as r:
        await r.client.open(A, HOPS)
        await r.client.send("n0", Step(A, 5, 0, 0, 1, tokens=[1]))
        assert isinstance(await r.client.message(), StepResult)
        await r.client.send("n0", Step(A, 4, 1, 1, 1, tokens=[1]))
        assert await r.client.quiet()
        await r.client.send("n0", Step(A, 5, 2, 1, 1, tokens=[2]))
        assert (await r.client.message()).tokens == [8]  # type: ignore[union-attr]


@virtual_time
async def test_steps_of_unknown_sessions_are_no_violation() -> None:
    async with rig() as r:
        for i in range(2 * LIMITS.max_protocol_errors):
            await r.client.send("n0", line_step(B, i, 0, [1]))
            assert (await r.client.message()).error == "unknown_session"  # type: ignore[union-attr]
        await r.client.open(A, HOPS)


@virtual_time
async def test_reopening_starts_afresh() -> None:
    async with rig() as r:
        await r.client.open(A, HOPS)
        await r.client.send("n0", line_step(A, 0, 0, [1, 2]))
        await r.client.message()
        await r.client.open(A, HOPS)
        await r.client.send("n0", line_step(A, 0, 0, [1]))
        assert (await r.client.message()).tokens == [7]  # type: ignore[union-attr]
        assert [len(e.reserved) for e in r.engines] == [1, 1, 1]


@virtual_time
async def test_sessions_are_bounded_for_each_peer_and_in_all() -> None:
    async with rig() as r, toy_client(r.network, "second") as second:
        for i in range(LIMITS.max_sessions_per_peer):
            await r.client.open(bytes([i]) * 16, HOPS)
        await r.client.send("n0", open_message(A, HOPS, 0, 0, 2))
        answer = await r.client.message()
        assert isinstance(answer, SessionFailed)
        assert (answer.error, answer.retry_after_s > 0) == ("busy", True)
        await second.open(A, HOPS)
        await second.send("n0", open_message(B, HOPS, 0, 0, 2))
        assert (await second.message()).error == "busy"  # type: ignore[union-attr]


@virtual_time
async def test_a_refusing_server_finishes_open_sessions() -> None:
    async with rig() as r:
        await r.client.open(A, HOPS)
        service = r.services[0]
        service.refuse(lambda: NodeBusy("this node is paused"))
        assert service.refusing
        draining = asyncio.create_task(service.wait_idle(None, 60))
        await asyncio.sleep(0.1)
        await r.client.send("n0", open_message(B, HOPS, 0, 0, 2))
        assert (await r.client.message()).error == "busy"  # type: ignore[union-attr]
        await r.client.send("n0", line_step(A, 0, 0, [1]))
        assert (await r.client.message()).tokens == [7]  # type: ignore[union-attr]
        assert not draining.done()
        await r.client.send("n0", CloseSession(A))
        await asyncio.wait_for(draining, 1)
        assert service.idle()


@virtual_time
async def test_idle_sessions_give_their_pages_back() -> None:
    async with rig() as r:
        await r.client.open(A, HOPS)
        await asyncio.sleep(LIMITS.session_idle_s + 1)
        assert r.idle()
        assert isinstance(await r.client.message(), SessionFailed)


@virtual_time
async def test_messages_that_no_node_receives_are_refused() -> None:
    async with rig() as r:
        await r.client.send("n0", StepResult(A, 0, 0))
        assert (await r.client.message()).error == "protocol"  # type: ignore[union-attr]
        await r.client.send("n0", Ping(7))
        assert await r.client.quiet() or True


def test_sampling_reaches_the_tail() -> None:
    assert WireSampling(temperature=0.5, seed=3).to_sampling().seed == 3


@virtual_time
async def test_a_receipt_is_taken_once_and_from_the_session_s_client_only() -> None:
    async with rig() as r, toy_client(r.network, "thief") as thief:
        await r.client.open(A, HOPS)
        receipt = WorkReceipt(A, b"payload", bytes(64))
        await thief.send("n0", receipt)
        await asyncio.sleep(0.1)
        assert r.services[0].counters.protocol_errors == 1
        await r.client.send("n0", receipt)
        await r.client.send("n0", WorkReceipt(B, b"of no session", bytes(64)))
        await asyncio.sleep(0.1)
        assert r.services[0].counters.protocol_errors == 1
        await r.client.send("n0", receipt)
        await asyncio.sleep(0.1)
        assert r.services[0].counters.protocol_errors == 2
