"""Hops that compute something else are found by other nodes' replays, left, and their answers are redone."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
import torch
from memory_swarm import MemorySwarm
from recovery_swarm import TOKENS, assert_clean, model, prompt, swarm_of, truth
from tiny_models import ModelTensors, hf_greedy
from virtual_clock import virtual_time

from swarm.planner.auditing.policy import POLICY
from swarm.types import ModelId, PeerId
from swarm_client import SwarmClient
from swarm_client.auditing.result import AuditResult

Tamper = Callable[[torch.Tensor], torch.Tensor]


def noisy(hidden: torch.Tensor) -> torch.Tensor:
    return hidden * (1 + 0.5 * torch.randn(hidden.shape, generator=torch.Generator().manual_seed(1)))


def barely_noisy(hidden: torch.Tensor) -> torch.Tensor:
    return hidden * (1 + 1e-3)


class LyingSpan:
    """A span whose output is tampered with."""

    def __init__(self, span: Any, tamper: Tamper) -> None:
        self._span = span
        self._tamper = tamper

    def __getattr__(self, name: str) -> Any:
        return getattr(self._span, name)

    def forward(self, *args: Any) -> torch.Tensor:
        return self._tamper(self._span.forward(*args))

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._span.logits(hidden)


def make_liar(swarm: MemorySwarm, peer: PeerId, tamper: Tamper, kind: type[LyingSpan] | None = None) -> None:
    engine = swarm.engines[peer]
    engine._span = (kind or LyingSpan)(engine._span, tamper)  # type: ignore[assignment]
    engine._tail_sampler._span = engine._span


class Framer(LyingSpan):
    """Spoils the rows that no audit compares, so that its successor's differ: those of the attention sinks."""

    def forward(self, *args: Any) -> torch.Tensor:
        hidden: torch.Tensor = self._span.forward(*args)
        if len(args) > 4 and args[4] not in (None, self._span.layers.end):
            return hidden  # of a batch that is computed some layers at a time, what leaves the hop is the last part's
        sinks = (args[1].positions < POLICY.sink_tokens)[:, None]
        return torch.where(sinks, self._tamper(hidden), hidden)


class LyingTail(LyingSpan):
    """Its rows are right, and what it samples from them is not."""

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._tamper(self._span.logits(hidden))

    def forward(self, *args: Any) -> torch.Tensor:
        return self._span.forward(*args)  # type: ignore[no-any-return]


def at_another_temperature(logits: torch.Tensor) -> torch.Tensor:
    return logits * 8


def invented(logits: torch.Tensor) -> torch.Tensor:
    return torch.randn(logits.shape, generator=torch.Generator().manual_seed(2)) * 8


def sign_all(swarm: MemorySwarm, arithmetic: str = "same") -> None:
    for node in swarm.nodes.values():
        node.service.audits.sign = node.identity.sign
        node.service.audits.arithmetic = arithmetic


async def audited(client: SwarmClient, **options: Any) -> tuple[tuple[int, ...], AuditResult]:
    stream = client.stream(prompt(), max_new_tokens=TOKENS, **options)
    answer = await stream.read()
    audit = await stream.audited()
    assert audit is not None
    return answer.token_ids, audit


@pytest.mark.parametrize(
    ("options", "decoding"),
    [({}, "sequential"), ({"temperature": 0.8, "seed": 3}, "auto"), ({"frequency_penalty": 0.5}, "sequential")],
    ids=str,
)
@virtual_time
async def test_honest_hops_confirm_each_other_bit_for_bit(options: dict[str, Any], decoding: str) -> None:
    async with swarm_of(2) as swarm, swarm.client(audits="wait", decoding=decoding) as client:
        sign_all(swarm)
        _, audit = await audited(client, **options)
        assert (audit.liars, audit.disputed, audit.reason) == ((), (), "")
        assert len(audit.checked) == 3


@pytest.mark.parametrize(
    ("victim", "tamper", "arithmetic"),
    [(0, noisy, ""), (1, noisy, ""), (2, noisy, "same"), (0, barely_noisy, "same"), (1, barely_noisy, "same")],
)
@virtual_time
async def test_a_hop_that_computes_something_else_is_named_and_left(
    victim: int, tamper: Tamper, arithmetic: str
) -> None:
    async with swarm_of(3) as swarm, swarm.client(audits="wait", decoding="sequential") as client:
        sign_all(swarm, arithmetic)
        stream = client.stream(prompt(), max_new_tokens=TOKENS)
        await stream.read()
        assert stream.chain is not None
        liar = stream.chain.peers[victim]
        make_liar(swarm, liar, tamper)
        _, audit = await audited(client)
        assert audit.liars == (liar,)
        assert audit.evidence is not None
        assert audit.evidence.signed()
        assert client._router is not None
        assert client._router.memory.of(liar).audits_failed == 1
        _, again = await audited(client)
        assert liar not in again.checked
        assert again.liars == again.disputed == ()


@pytest.mark.parametrize("arithmetic", ["", "same"])
@pytest.mark.parametrize("victim", [0, 1])
@virtual_time
async def test_a_hop_that_spoils_what_is_not_compared_does_not_frame_the_next_one(victim: int, arithmetic: str) -> None:
    async with swarm_of(3) as swarm, swarm.client(audits="wait", decoding="sequential") as client:
        sign_all(swarm, arithmetic)
        first = await client.generate(prompt(), max_new_tokens=TOKENS)
        framer = first.chain.peers[victim]
        make_liar(swarm, framer, lambda hidden: hidden + 9.0, Framer)
        _, audit = await audited(client)
        assert audit.liars == ((framer,) if arithmetic else ())
        assert framer in (*audit.liars, *audit.disputed) or not arithmetic


@virtual_time
async def test_a_liar_in_an_answer_with_drafts_is_found_by_its_own_replay() -> None:
    """Rows of drafts have other bits than a replay's, so the chain itself replays its answer."""
    async with swarm_of(3) as swarm, swarm.client(audits="wait", decoding="pipelined-tree") as client:
        sign_all(swarm)
        liar = (await client.generate(prompt(), max_new_tokens=TOKENS)).chain.peers[1]
        make_liar(swarm, liar, noisy)
        stream = client.stream(prompt(), max_new_tokens=TOKENS)
        await stream.read()
        assert stream.speculation is not None
        audit = await stream.audited()
        assert audit is not None
        assert audit.liars == (liar,)


@pytest.mark.parametrize("tamper", [at_another_temperature, invented])
@virtual_time
async def test_a_tail_that_samples_otherwise_is_found_by_machines_of_unlike_arithmetic(tamper: Tamper) -> None:
    async with swarm_of(3) as swarm, swarm.client(audits="wait", decoding="sequential") as client:
        sign_all(swarm, "")
        stream = client.stream(prompt(), max_new_tokens=TOKENS, temperature=1.5, seed=3)
        await stream.read()
        assert stream.chain is not None
        liar = stream.chain.peers[-1]
        make_liar(swarm, liar, tamper, LyingTail)
        _, audit = await audited(client, temperature=1.5, seed=3)
        assert audit.liars == (liar,)


@pytest.mark.parametrize("audits", ["auto", "wait"])
@virtual_time
async def test_an_answer_that_a_liar_takes_part_in_when_it_is_found_out_starts_anew(audits: Any) -> None:
    """The audit of one answer convicts a hop in the middle of another one: nothing computed from its rows is kept."""
    async with swarm_of(3) as swarm, swarm.client(audits=audits, decoding="sequential") as client:
        client._auditor.draw = lambda: 0.0  # type: ignore[union-attr]
        sign_all(swarm)
        liar = (await client.generate(prompt(), max_new_tokens=TOKENS)).chain.peers[1]
        make_liar(swarm, liar, noisy)
        short = client.stream(prompt(), max_new_tokens=9)
        long = asyncio.create_task(client.generate(prompt(seed=9), max_new_tokens=40))
        await short.read()
        audit = await short.audited()
        assert audit is not None
        assert audit.liars == (liar,)
        assert not long.done()
        answer = await long
        assert list(answer.token_ids) == hf_greedy(model(), prompt(seed=9), 40)
        assert liar not in answer.chain.peers
        assert any("failed an audit of another answer" in repair for repair in answer.repairs)
        await assert_clean(swarm)


@virtual_time
async def test_a_conviction_forgets_what_was_cached_behind_the_liar() -> None:
    async with swarm_of(3) as swarm, swarm.client(audits="wait", decoding="sequential") as client:
        sign_all(swarm)
        first = await client.generate(prompt(), max_new_tokens=TOKENS)
        salts = client._prefix_locations.salts(first.chain)
        make_liar(swarm, first.chain.peers[1], noisy)
        _, audit = await audited(client)
        assert audit.liars == (first.chain.peers[1],)
        after = client._prefix_locations.salts(first.chain)
        changed = [after[peer] != salts[peer] for peer in first.chain.peers]
        assert changed == [False, False, True]  # of the hop behind it


@virtual_time
async def test_chat_and_generate_redo_the_answer_without_the_liar() -> None:
    async with swarm_of(3) as swarm, swarm.client(audits="wait", decoding="sequential") as client:
        sign_all(swarm)
        first = await client.generate(prompt(), max_new_tokens=TOKENS)
        liar = first.chain.peers[1]
        make_liar(swarm, liar, noisy)
        answer = await client.generate(prompt(), max_new_tokens=TOKENS)
        assert list(answer.token_ids) == truth()
        assert liar not in answer.chain.peers
        assert any(repair.startswith(liar) and "failed an audit" in repair for repair in answer.repairs)


@virtual_time
async def test_two_that_disagree_are_a_dispute_and_nobody_is_left() -> None:
    async with swarm_of(2) as swarm, swarm.client(audits="wait", decoding="sequential") as client:
        sign_all(swarm)
        liar = (await client.generate(prompt(), max_new_tokens=TOKENS)).chain.peers[1]
        make_liar(swarm, liar, noisy)
        _, audit = await audited(client)
        assert audit.liars == ()
        assert liar in audit.disputed
        assert len(audit.disputed) == 2


@pytest.mark.parametrize("audits", ["auto", "wait"])
@virtual_time
async def test_without_replicas_nothing_is_audited_and_nothing_stays_open(audits: Any) -> None:
    async with swarm_of(1) as swarm, swarm.client(audits=audits) as client:
        answer = await client.generate(prompt(), max_new_tokens=TOKENS)
        assert list(answer.token_ids) == truth()
        _, audit = await audited(client)
        assert audit.checked == audit.liars == audit.disputed == ()
        assert audit.reason
        await assert_clean(swarm)


@virtual_time
async def test_evidence_of_which_a_byte_was_changed_is_not_signed() -> None:
    async with swarm_of(2) as swarm, swarm.client(audits="wait") as client:
        sign_all(swarm)
        liar = (await client.generate(prompt(), max_new_tokens=TOKENS)).chain.peers[1]
        make_liar(swarm, liar, noisy)
        _, audit = await audited(client)
        evidence = audit.evidence
        assert evidence is not None
        report, source = evidence.chains[0][0], ModelTensors(model())
        assert report.signed_for(ModelId(source.name, source.weight_hash, "fp32"))
        assert not report.signed_for(ModelId(source.name, source.weight_hash, "bf16"))
        changed = type(report)(report.peer, report.message, report.body[:-1] + bytes([report.body[-1] ^ 1]))
        assert not changed.signed_for(evidence.model)
