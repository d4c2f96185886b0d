"""What other machines get of a client that holds the ends of the model: no token id, and nothing made from one by a
function that anybody can compute."""

from __future__ import annotations

import logging
import random
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from memory_swarm import cut, memory_swarm
from recovery_swarm import LINK
from scripted_drafters import Oracle
from tiny_models import ModelTensors, hf_greedy, tiny_model
from virtual_clock import virtual_time

from swarm import codec
from swarm.audit_messages import token_digests
from swarm.block_hash import HASH_BLOCK_TOKENS, block_hashes
from swarm.codec import Buffer
from swarm.messages import AnyMessage, CloseSession, OpenSession, Step, StepResult
from swarm.testing.memory_network import MemoryConnection
from swarm.types import LayerSpan
from swarm_client.speculation.drafters.inline import InlineDrafter

VOCAB = 70_000  # ids above 2^16 take five bytes on the wire, which nothing else of a short text does by chance
TOKENS = 40


def ids(seed: int, length: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(1 << 16, VOCAB) for _ in range(length)]


def forbidden(text: Sequence[int]) -> dict[bytes, str]:
    """Bytes that would tell a token of `text`, and what they are."""
    found: dict[bytes, str] = {}
    for token in text:
        if token >= 1 << 16:
            found[msgspec.msgpack.encode(token)] = f"token {token}"
        found[str(token).encode()] = f"token {token} as text"
    found |= dict.fromkeys(token_digests(text), "the digest of a token")
    for start in range(len(text)):
        found |= dict.fromkeys(block_hashes(text[start : start + HASH_BLOCK_TOKENS]), "a block hash")
    return found | dict.fromkeys(block_hashes(text), "a block hash")


@pytest.fixture
def frames(monkeypatch: pytest.MonkeyPatch) -> list[tuple[AnyMessage, bytes]]:
    """Every frame that crosses the network, as it is encoded: the message, and header and body."""
    seen: list[tuple[AnyMessage, bytes]] = []
    encode = codec.encode

    def noted(message: AnyMessage, body: Buffer = b"") -> tuple[bytes, Buffer]:
        header, rest = encode(message, body)
        # a body of hidden states holds any bytes: what it gives away is measured, see docs/privacy.md
        seen.append((message, header if isinstance(message, Step) else header + bytes(rest)))
        return header, rest

    monkeypatch.setattr(codec, "encode", noted)
    return seen


OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "penalties, bias": {"repetition_penalty": 1.2, "logit_bias": {69_000: 1.0}, "logprobs": 4, "prompt_logprobs": 2},
}


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("local", ["0:0", "1:1"])
@virtual_time
async def test_no_token_id_leaves_home(
    local: str, options: str, frames: list[tuple[AnyMessage, bytes]], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    made = tiny_model("llama", vocab_size=VOCAB, num_hidden_layers=5, hidden_size=48)
    prompt, given = ids(3, 2 * HASH_BLOCK_TOKENS + 7), OPTIONS[options]
    truth = hf_greedy(made, prompt, TOKENS)

    def draft() -> InlineDrafter:
        return InlineDrafter(Oracle(truth, 0.7, vocab=VOCAB))

    async with memory_swarm(ModelTensors(made), cut(5, 2) * 3, LINK) as swarm:
        settings = {"make_drafter": draft, "local_layers": local, "audits": "wait", "prefill_chunk": 16}
        async with swarm.client(**settings) as client:
            for decoding in ("sequential", "tree"):
                one = await client.generate(prompt, max_new_tokens=TOKENS, decoding=decoding, **given)
            assert given or list(one.token_ids) == truth
            second, killed = [*prompt, *one.token_ids, *ids(4, 5)], False
            async with client.stream(second, max_new_tokens=TOKENS, **given) as stream:
                async for piece in stream:
                    if piece.token_ids and not killed:
                        assert stream.chain is not None
                        swarm.kill(stream.chain.peers[1])
                        killed = True
                two = stream.result
            assert two.repairs
            assert one.cached_prompt_tokens or two.cached_prompt_tokens or given, "prefix hashes were used"
        records = [record for model in swarm.network._records.values() for record, _ in model.values()]
    assert any(isinstance(message, OpenSession) and message.block_hashes for message, _ in frames) or given
    assert any(isinstance(message, CloseSession) and message.retain_prefix for message, _ in frames)
    _check(frames, [*records, caplog.text.encode()], [*second, *two.token_ids])


def _check(frames: Sequence[tuple[AnyMessage, bytes]], others: Sequence[bytes], text: Sequence[int]) -> None:
    """Neither `frames` nor the `others` tell a token of `text`."""
    for message, _ in frames:
        _check_fields(message)
    tells = forbidden(text)
    for raw in (*(raw for _, raw in frames), *others):
        for needle, what in tells.items():
            assert needle not in raw, what


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("victim", [0, 1, 2, 3])
@virtual_time
async def test_only_trusted_nodes_get_token_ids(
    victim: int, options: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """All that a stranger receives or sends, while a hop dies, an end among them."""
    caplog.set_level(logging.DEBUG)
    seen: list[tuple[set[str], AnyMessage, bytes]] = []
    send = MemoryConnection.send

    async def noted(self: MemoryConnection, message: AnyMessage, body: Buffer = b"") -> None:
        header, rest = codec.encode(message, body)
        seen.append((set(self._out._ends), message, header if isinstance(message, Step) else header + bytes(rest)))
        await send(self, message, body)

    monkeypatch.setattr(MemoryConnection, "send", noted)
    made = tiny_model("llama", vocab_size=VOCAB, num_hidden_layers=6, hidden_size=48)
    prompt, given = ids(3, 2 * HASH_BLOCK_TOKENS + 7), OPTIONS[options]
    truth = hf_greedy(made, prompt, TOKENS)
    between = [LayerSpan(1, 3), LayerSpan(3, 5)] * 3
    spans = [LayerSpan(0, 1), LayerSpan(5, 6)] * 2 + between + [LayerSpan(0, 6)] * 2  # the last could do without others
    async with memory_swarm(ModelTensors(made), spans, LINK) as swarm:
        ends = {peer for peer, node in swarm.nodes.items() if len(node.span) == 1}
        settings: dict[str, Any] = {"trust": tuple(ends), "audits": "wait", "prefill_chunk": 16}
        settings["make_drafter"] = lambda: InlineDrafter(Oracle(truth, 0.7, vocab=VOCAB))
        async with swarm.client(**settings) as client:
            one = await client.generate(prompt, max_new_tokens=TOKENS, **given)
            assert given or list(one.token_ids) == truth
            second, killed = [*prompt, *one.token_ids, *ids(4, 5)], False
            async with client.stream(second, max_new_tokens=TOKENS, **given) as stream:
                async for piece in stream:
                    if piece.token_ids and not killed:
                        assert stream.chain is not None
                        swarm.kill(stream.chain.peers[min(victim, len(stream.chain) - 1)])
                        killed = True
                two = stream.result
            assert two.repairs
            assert {two.chain.peers[0], two.chain.peers[-1]} <= ends
        records = [record for model in swarm.network._records.values() for record, _ in model.values()]
        strangers = set(swarm.peers) - ends
    frames = [(message, raw) for peers, message, raw in seen if peers & strangers]
    assert any(isinstance(message, Step) for message, _ in frames)
    assert any(isinstance(message, StepResult) for peers, message, _ in seen if not peers & strangers)
    _check(frames, [*records, caplog.text.encode()], [*second, *two.token_ids])


def _check_fields(message: AnyMessage) -> None:
    """No field for ids has any."""
    assert not isinstance(message, StepResult), "tokens are sampled at home"
    if isinstance(message, Step):
        assert message.tokens == []
        assert not message.forward_tokens
    if isinstance(message, OpenSession):
        assert (message.history, message.claimed, message.prompt_tokens, message.sampling) == ([], [], 0, None)
        assert message.upstream
        assert message.downstream
