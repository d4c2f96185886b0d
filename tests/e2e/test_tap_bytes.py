"""What taps cost on the wire: for a drafter of the client nothing between hops, and what a hop uploads to it; for one
at the tail what each link carries, and nothing before the first tap.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
from memory_swarm import MemorySwarm, cut, memory_swarm
from scripted_drafters import Oracle
from scripted_tails import scripted
from tiny_models import ModelTensors, tiny_model
from virtual_clock import virtual_time

from swarm.testing.memory_network import LinkModel
from swarm.types import Taps
from swarm_client.speculation.drafters.inline import InlineDrafter

LAYERS, TOKENS = 8, 24
PROMPT = [3 + 7 * i % 120 for i in range(21)]
LINK = LinkModel(delay_s=0.01)


def sent_bytes(swarm: MemorySwarm, chain: Sequence[str]) -> list[int]:
    """Over each link from one hop to the next."""
    return [swarm.network.sent[a, b] for a, b in itertools.pairwise(chain)]


class Tapped(Oracle):
    """Drafts the same whatever comes."""

    asks: Taps | None = None

    @property
    def taps(self) -> Taps | None:
        return self.asks


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_links_between_hops_carry_nothing_and_a_hop_sends_half_as_much_again_at_most(dtype: str) -> None:
    made = tiny_model("llama", num_hidden_layers=LAYERS, hidden_size=768)
    source = ModelTensors(made)
    links: dict[str, list[int]] = {}
    nodes: dict[str, list[int]] = {}
    answers = []

    async def measure(kind: str, answer: Sequence[int], asks: Taps | None) -> None:
        async with memory_swarm(source, cut(LAYERS, 6, 7), LINK, dtype) as swarm:
            drafter = Tapped(answer, 0.8)
            drafter.asks = asks
            async with swarm.client(make_drafter=lambda: InlineDrafter(drafter)) as client:
                stream = client.stream(PROMPT, max_new_tokens=TOKENS, decoding="tree")
                async for _ in stream:
                    """To its end."""
                assert stream.chain is not None
                peers = list(stream.chain.peers)
                answers.append(list(stream.result.token_ids))
            links[kind] = sent_bytes(swarm, peers)
            nodes[kind] = [sum(n for (a, _), n in swarm.network.sent.items() if a == peer) for peer in peers]

    @virtual_time
    async def scenario() -> None:
        await measure("first", [], None)
        await measure("off", answers[0], None)
        await measure("on", answers[0], Taps((5, 6, 7), 768))

    scenario()
    assert answers[0] == answers[1] == answers[2]
    assert links["on"] == links["off"]
    grown = [on / off for on, off in zip(nodes["on"], nodes["off"], strict=True)]
    print(dtype, links, nodes, grown)
    assert max(grown[:2]) <= 1.5 if dtype == "fp32" else max(grown[:2]) <= 1.56  # the scales come on top


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("layers", [(8,), (3,), (7,), (1, 4, 7), (6, 7, 8)], ids=str)
def test_links_carry_the_taps_so_far_and_nothing_before_the_first(layers: tuple[int, ...], dtype: str) -> None:
    """Of a tail's drafter that says nothing, so that both sessions send the same rows."""
    made = tiny_model("llama", num_hidden_layers=LAYERS, hidden_size=768)
    source = ModelTensors(made)
    sent: dict[str, list[int]] = {}
    answers = []

    async def measure(drafter: str, held: Any) -> None:
        async with memory_swarm(source, cut(LAYERS, 3, 6), LINK, dtype, drafter=held) as swarm:
            async with swarm.client(drafter=drafter) as client:
                stream = client.stream(PROMPT, max_new_tokens=TOKENS, decoding="tree")
                async for _ in stream:
                    """To its end."""
                assert stream.chain is not None
                peers = list(stream.chain.peers)
                answers.append(list(stream.result.token_ids))
            own = next(a for a, _ in swarm.network.sent if a not in peers)
            sent[drafter] = sent_bytes(swarm, [own, *peers, own])

    @virtual_time
    async def scenario() -> None:
        await measure("ngram", scripted(layers, 768))
        await measure("tail", scripted(layers, 768))

    scenario()
    assert answers[0] == answers[1]
    grown = [on / off for on, off in zip(sent["tail"], sent["ngram"], strict=True)]
    print(layers, dtype, sent, [round(ratio, 3) for ratio in grown])
    element = 4 if dtype == "fp32" else 2
    for link, border in ((1, 3), (2, 6)):
        taps = sum(layer < border for layer in layers)
        scales = 2 / 64 / element
        expected = 1 + taps * (1 / element + scales)
        # ids of all rows go along, and a header a step
        assert grown[link] <= (expected + 0.02 if taps else 1.01)
        assert grown[link] <= 1.5 or taps > 1 or dtype == "bf16"
    assert grown[3] <= 1.01  # the results
