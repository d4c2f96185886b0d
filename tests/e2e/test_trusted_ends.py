"""Named nodes that hold the ends of the model: ids go to them alone, tokens are the same, and without them nothing is
sent."""

from __future__ import annotations

import random
from functools import cache
from typing import Any

import pytest
from memory_swarm import MemorySwarm, cut, memory_swarm
from recovery_swarm import LINK, answer_with, assert_clean
from scripted_drafters import Oracle
from test_audits import audited, make_liar, noisy, sign_all
from tiny_models import ModelTensors, hf_greedy, tiny_model
from virtual_clock import virtual_time

from swarm.errors import NoRoute, UsageError
from swarm.types import LayerSpan, PeerId
from swarm_client.speculation.drafters.inline import InlineDrafter

LAYERS, TOKENS = 8, 24
FIRST, LAST = LayerSpan(0, 2), LayerSpan(6, LAYERS)
BETWEEN = {1: (), 2: (4,), 3: (3, 5)}  # where the strangers' layers are cut


@cache
def model() -> Any:
    return tiny_model("llama", num_hidden_layers=LAYERS)


@cache
def prompt(length: int = 19) -> tuple[int, ...]:
    rng = random.Random(1)
    return tuple(rng.randrange(2, 131) for _ in range(length))


@cache
def truth(length: int = 19) -> list[int]:
    return hf_greedy(model(), list(prompt(length)), TOKENS)


def swarm_of(strangers: int, replicas: int = 1, ends: int = 1, whole: int = 1) -> Any:
    """Nodes: `ends` first ones, as many last ones, strangers between, and some with the whole model, which would be the
    quickest of all chains."""
    between = [span for span in cut(LAYERS, 2, *BETWEEN[strangers], 6) if span not in (FIRST, LAST)]
    spans = [FIRST] * ends + [LAST] * ends + between * replicas + [LayerSpan(0, LAYERS)] * whole
    return memory_swarm(ModelTensors(model()), spans, LINK)


def trusted(swarm: MemorySwarm) -> tuple[PeerId, ...]:
    return tuple(peer for peer, node in swarm.nodes.items() if node.span in (FIRST, LAST))


@pytest.mark.parametrize("decoding", ["sequential", "tree", "pipedec", "auto"])
@pytest.mark.parametrize("strangers", BETWEEN)
@virtual_time
async def test_ids_go_to_them_and_tokens_are_the_same(strangers: int, decoding: str) -> None:
    async with swarm_of(strangers) as swarm:
        ends = trusted(swarm)
        drafter = {"make_drafter": lambda: InlineDrafter(Oracle(truth(), 0.8))}
        async with swarm.client(trust=ends, prefill_chunk=8, **drafter) as client:
            answer = await client.generate(prompt(), max_new_tokens=TOKENS, decoding=decoding)
    assert list(answer.token_ids) == truth()
    assert answer.repairs == ()
    assert {answer.chain.peers[0], answer.chain.peers[-1]} == set(ends)
    assert not set(ends).intersection(answer.chain.peers[1:-1])
    assert "token ids go to trusted nodes alone" in answer.exposure
    assert "trusted nodes alone (--trust)" in answer.explanation
    await assert_clean(swarm)


@pytest.mark.parametrize("options", [{}, {"repetition_penalty": 1.3, "temperature": 0.7, "seed": 5}])
@pytest.mark.parametrize("victims", [(0,), (1,), (2,), (3,), (0, 1), (2, 3), (0, 1, 2, 3)])
@virtual_time
async def test_any_hop_may_die_and_an_end_is_replaced_by_a_trusted_one(
    victims: tuple[int, ...], options: dict[str, Any]
) -> None:
    async with swarm_of(2, replicas=2, ends=2, whole=0) as swarm:
        ends = trusted(swarm)
        async with swarm.client(trust=ends) as client:
            usual = await client.generate(prompt(), max_new_tokens=TOKENS, **options)
            struck: list[PeerId] = []

            def strike(chain: Any) -> None:
                struck.extend(chain.peers[at] for at in victims)
                for peer in struck:
                    swarm.kill(peer)

            answer, _, _ = await answer_with(client, strike, 9, prompt(), **options)
        assert answer.token_ids == usual.token_ids
        assert options or list(answer.token_ids) == truth()
        assert answer.repairs
        assert {answer.chain.peers[0], answer.chain.peers[-1]} <= set(ends) - set(struck)
    await assert_clean(swarm, *struck)


@virtual_time
async def test_without_a_live_one_nothing_is_sent_and_a_sentence_says_so() -> None:
    async with swarm_of(1) as swarm:
        first, last = trusted(swarm)
        async with swarm.client(trust=(first, last)) as client:
            swarm.kill(last)
            with pytest.raises(NoRoute, match=r"--trust.*go to nobody else"):
                await client.generate(prompt(), max_new_tokens=4)
        async with swarm.client(1, trust=(first,)) as client:
            with pytest.raises(NoRoute, match=r"--trust.*go to nobody else"):
                await client.generate(prompt(), max_new_tokens=4)
        for peer, node in swarm.nodes.items():
            assert peer in (first, last) or node.service.counters.steps == 0


@virtual_time
async def test_one_that_holds_all_needs_no_stranger() -> None:
    async with swarm_of(1) as swarm:
        whole = next(peer for peer, node in swarm.nodes.items() if len(node.span) == LAYERS)
        async with swarm.client(trust=(whole,)) as client:
            answer = await client.generate(prompt(), max_new_tokens=TOKENS, repetition_penalty=1.2)
    assert answer.chain.peers == (whole,)
    assert "only trusted nodes see the text" in answer.exposure


@pytest.mark.parametrize("ends_of_each", [1, 3])
@virtual_time
async def test_an_audit_keeps_ids_with_them_too(ends_of_each: int) -> None:
    """A household has one of each, mostly: then the other chains have the same ends."""
    async with swarm_of(2, replicas=3, ends=ends_of_each, whole=0) as swarm:
        ends = trusted(swarm)
        sign_all(swarm)
        async with swarm.client(trust=ends, audits="wait", decoding="sequential") as client:
            _, honest = await audited(client)
            assert honest.checked
            assert not honest.liars
            answer = await client.generate(prompt(), max_new_tokens=4)
            liar = answer.chain.peers[1]
            make_liar(swarm, liar, noisy)
            assert client._auditor is not None
            client._auditor.draw = random.Random(ends_of_each).random
            for _ in range(8):  # a replay through the liar again says nothing of who is wrong
                _, found = await audited(client)
                assert set(found.liars) <= {liar}
                if found.liars:
                    break
            assert found.liars == (liar,)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"trust": ("node-1",)}, "no peer id"),
        ({"trust": ("x" * 5000,)}, "no peer id"),
        ({"trust": ("12D3KooWPjceQrSwdWXPyLLeABRXmuqt69Rg3sBYbU1Nft9HyQ6X",), "local_layers": "1:1"}, "one of them"),
    ],
)
@virtual_time
async def test_what_means_nothing_is_refused(settings: dict[str, Any], said: str) -> None:
    async with swarm_of(1) as swarm:
        with pytest.raises(UsageError, match=said) as refused:
            async with swarm.client(**settings):
                """Never."""
        assert len(str(refused.value)) < 300
