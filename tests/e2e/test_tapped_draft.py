"""A trained draft that reads hidden states, with what the model wrote before, over a chain: no token depends on it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from memory_swarm import cut, memory_swarm
from tiny_models import ModelTensors, hf_greedy, tiny_model
from virtual_clock import virtual_time

from swarm.testing.memory_network import LinkModel
from swarm_client.speculation.drafters.inline import InlineDrafter
from swarm_client.speculation.drafters.mixture import MixtureDrafter
from swarm_client.speculation.drafters.ngram import NgramDrafter
from swarm_client.speculation.drafters.stored import StoredDrafter
from swarm_client.speculation.drafters.tapped import TappedDrafter
from swarm_kernels.draft.continuation_store import END
from swarm_kernels.draft.file import DraftWeights
from swarm_kernels.draft.tapped_draft import TappedTrainedDraft
from swarm_training.distill.tapped_student import TappedStudent

LAYERS, TOKENS = 6, 24
PROMPT = [3 + 7 * i % 120 for i in range(21)]
LINK = LinkModel(delay_s=0.01)
SEEDED: dict[str, Any] = {"temperature": 0.9, "top_p": 0.95, "top_k": 40, "seed": 17}


def draft_of(source: ModelTensors, texts: list[int], scale: float) -> TappedTrainedDraft:
    """Of random weights, as sure of itself as `scale` is large."""
    torch.manual_seed(4)
    student = TappedStudent(source, (2, 4, LAYERS), (LAYERS - 1,), 1)
    with torch.no_grad():
        student.fuse.normal_(std=0.1)
        student.projection.normal_(std=0.1)
        student.scale_logits(scale)
    card = student.metadata("tiny", source.weight_hash)
    return TappedTrainedDraft(DraftWeights(card, student.weights(), torch.arange(131), torch.tensor(texts)), source)


@pytest.mark.parametrize("borders", [(), (3,), (1, 4)], ids=["one hop", "two", "three"])
@pytest.mark.parametrize("decoding", ["tree", "pipedec", "pipelined-tree", "auto"])
@pytest.mark.parametrize("store", ["right", "wrong"])
def test_greedy_and_seeded_tokens_are_the_same(store: str, decoding: str, borders: tuple[int, ...]) -> None:
    made = tiny_model("llama", tie_word_embeddings=True, num_hidden_layers=LAYERS)
    truth = hf_greedy(made, PROMPT, TOKENS)
    source = ModelTensors(made)
    texts = [*PROMPT, *(truth if store == "right" else truth[::-1]), END]
    draft = draft_of(source, texts, 1.0 if store == "right" else 50.0)
    assert draft.store is not None
    known = draft.store

    def drafter() -> InlineDrafter:
        return InlineDrafter(MixtureDrafter([NgramDrafter(), StoredDrafter(TappedDrafter(draft), known)]))

    @virtual_time
    async def scenario() -> None:
        async with memory_swarm(source, cut(LAYERS, *borders), LINK) as swarm:
            async with swarm.client() as client:
                plain = await client.generate(PROMPT, max_new_tokens=TOKENS, decoding="sequential", **SEEDED)
            async with swarm.client(1, make_drafter=drafter) as client:
                greedy = await client.generate(PROMPT, max_new_tokens=TOKENS, decoding=decoding)
                seeded = await client.generate(PROMPT, max_new_tokens=TOKENS, decoding=decoding, **SEEDED)
        assert list(greedy.token_ids) == truth
        assert seeded.token_ids == plain.token_ids
        assert greedy.speculation is not None
        assert greedy.speculation["dropped"] == []
        if decoding == "tree" and store == "right":
            assert greedy.speculation["hits"] > TOKENS // 3

    scenario()
