"""Digests of what went through a hop: commits, branches, rollbacks, forks; and reports to the session's client only."""

from __future__ import annotations

from collections.abc import Sequence

from node_fakes import LAYERS, SERVED, ToyEngine, line_step, serving, toy_client
from virtual_clock import virtual_time

from swarm.audit_messages import (
    DIGEST_BYTES,
    MAX_AUDITED_ROWS,
    UNKNOWN,
    AuditQuery,
    AuditReport,
    digest,
    row_digests,
    signed_part,
    token_digests,
)
from swarm.messages import SessionFailed, Step, StepResult
from swarm.net.security.identity import Identity, verify
from swarm.testing.memory_network import LinkModel, MemoryNetwork
from swarm.types import LayerSpan
from swarm_hop.auditing.audit_log import AuditLog
from swarm_hop.auditing.audit_replies import MAX_QUERIES

A = b"a" * 16
HOPS = [("node", 0, LAYERS)]


def rows(*names: int) -> list[bytes]:
    return [digest(bytes([name])) for name in names]


def step(causal: int, slots: Sequence[int] = (), commit: Sequence[int] = ()) -> Step:
    return Step(A, 0, 0, 0, causal, parents=[-1] * len(slots), slots=list(slots), commit_slots=list(commit))


def held(log: AuditLog, key: int = 1) -> tuple[int, bytes, bytes]:
    found = log.get(key)
    return found.first, bytes(found.inputs), bytes(found.outputs)


def test_rows_of_drafts_count_when_they_are_committed() -> None:
    log = AuditLog()
    log.open(1)
    log.append(1, step(2, slots=[0, 1]), rows(1, 2, 3, 4), rows(11, 12, 13, 14))
    assert held(log) == (0, b"".join(rows(1, 2)), b"".join(rows(11, 12)))
    log.append(1, step(1, commit=[1]), rows(5), rows(15))
    assert held(log) == (0, b"".join(rows(1, 2, 4, 5)), b"".join(rows(11, 12, 14, 15)))
    log.append(1, step(0, slots=[2], commit=[0]), rows(6), rows(16))  # slot 0 was dropped by the causal row
    assert held(log)[1][-DIGEST_BYTES:] == UNKNOWN


def test_a_rollback_and_a_fork() -> None:
    log = AuditLog()
    log.open(1)
    log.append(1, step(4), rows(1, 2, 3, 4), rows(5, 6, 7, 8))
    log.fork(1, 2, 3)
    log.rollback(1, 1)
    assert held(log) == (0, *rows(1), *rows(5))
    assert held(log, 2) == (0, b"".join(rows(1, 2, 3)), b"".join(rows(5, 6, 7)))
    log.fork(9, 3, 16)  # its parent is not known
    assert held(log, 3) == (16, b"", b"")
    log.append(3, step(1), rows(9), rows(10))
    log.fork(3, 4, 8)
    log.rollback(3, 4)
    assert held(log, 3) == (4, b"", b"")
    assert held(log, 4) == (8, b"", b"")
    for key in (1, 2, 3, 4, 4):
        log.close(key)
    assert len(log) == 0
    log.append(1, step(1), rows(1), rows(2))  # a session that is over
    assert held(log) == (0, b"", b"")


@virtual_time
async def test_a_report_has_what_went_in_and_out_and_is_signed() -> None:
    network, identity = MemoryNetwork(link=LinkModel(0.001)), Identity.from_seed(bytes(32))
    last = [("node", 0, 4), ("tail", 4, LAYERS)]
    async with (
        serving(network, "node", ToyEngine(LayerSpan(0, 4))) as service,
        serving(network, "tail", ToyEngine(LayerSpan(4, LAYERS))),
        toy_client(network) as client,
    ):
        service.audits.sign, service.audits.arithmetic = identity.sign, "toy"
        await client.open(A, last)
        await client.send("node", line_step(A, 1, 0, [1, 2, 3]))
        assert isinstance(await client.message(), StepResult)
        await client.send("node", AuditQuery(A, [1, 2, 700]))
        peer, message, body = await client.next()
        assert peer == "node"
        assert isinstance(message, AuditReport)
        assert (message.start, message.end, message.first, message.tokens) == (0, 4, 0, 3)
        assert (message.positions, message.arithmetic) == ([1, 2], "toy")
        outputs = bytes(token + 4 for token in (1, 2, 3))
        assert body == b"".join([*token_digests([1, 2, 3]), *row_digests(outputs, 3), outputs[1:]])
        assert verify(identity.peer, signed_part(message, body, SERVED), message.signature)
        await client.send("tail", AuditQuery(A, [0]))
        _, message, body = await client.next()
        assert isinstance(message, AuditReport)
        assert message.positions == []
        sampled = token_digests([outputs[2] + LAYERS - 4])
        assert body == b"".join([*row_digests(outputs, 3), UNKNOWN, UNKNOWN, *sampled])


@virtual_time
async def test_only_the_sessions_client_may_ask_and_not_too_often() -> None:
    network = MemoryNetwork(link=LinkModel(0.001))
    async with (
        serving(network, "node", ToyEngine(LayerSpan(0, LAYERS))) as service,
        toy_client(network) as client,
        toy_client(network, "stranger") as stranger,
    ):
        await client.open(A, HOPS)
        await stranger.send("node", AuditQuery(A))
        assert isinstance(await stranger.message(), SessionFailed)
        await stranger.send("node", AuditQuery(b"x" * 16))
        assert await stranger.quiet()  # no such session
        for _ in range(MAX_QUERIES):
            await client.send("node", AuditQuery(A, list(range(MAX_AUDITED_ROWS))))
            assert isinstance(await client.message(), AuditReport)
        await client.send("node", AuditQuery(A))
        assert isinstance(await client.message(), SessionFailed)
        assert service.counters.protocol_errors == 2
