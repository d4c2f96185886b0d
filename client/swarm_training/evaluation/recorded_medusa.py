"""The tail's heads, guessing on recorded answers as they would have in a swarm. Owns running them there.

What they thought with each token is worked out beforehand; the drafter is then told of it as tokens become certain.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from swarm.planner.generation.draft_tree import MedusaCandidates
from swarm.types import LayerSpan
from swarm_client.speculation.drafters.base import TokenPath
from swarm_client.speculation.drafters.medusa import MedusaDrafter
from swarm_kernels.draft.medusa import MedusaHeads
from swarm_kernels.kvcache.cache import StepRequest
from swarm_kernels.models.source import ModelSource
from swarm_kernels.runtime.llama_span import LlamaSpan
from swarm_kernels.runtime.load import load_span

Told = Mapping[TokenPath, Sequence[MedusaCandidates]]
"""By prompt: what came along with each token of the answer."""


class RecordedMedusa(MedusaDrafter):
    """Hears what the heads thought of an answer, if it is that answer that becomes certain."""

    def __init__(self, told: Told) -> None:
        super().__init__()
        self._told = told
        self._text: Sequence[MedusaCandidates] = ()
        self._place = 0

    def _begin(self, prompt_ids: Sequence[int]) -> None:
        super()._begin(prompt_ids)
        self._text, self._place = self._told.get(tuple(prompt_ids), ()), 0

    def _advance(self, tokens: Sequence[int]) -> None:
        super()._advance(tokens)
        self._place += len(tokens)
        if 0 < self._place <= len(self._text):
            self.set_medusa_candidates(self._text[self._place - 1])


def run_heads(
    source: ModelSource, heads: Path, answers: Sequence[tuple[Sequence[int], Sequence[int]]], width: int
) -> dict[TokenPath, list[MedusaCandidates]]:
    """What the heads in a file think of each (prompt, answer), `width` guesses each. Raises as `MedusaHeads.of`."""
    span = load_span(source, LayerSpan(0, source.config.num_layers), torch.bfloat16)
    medusa = MedusaHeads.of(heads, span, source)
    assert isinstance(span, LlamaSpan)  # or there were no heads beside it
    return {tuple(prompt): _hints(span, medusa, prompt, answer, width) for prompt, answer in answers}


def _hints(
    span: LlamaSpan, heads: MedusaHeads, prompt: Sequence[int], answer: Sequence[int], width: int
) -> list[MedusaCandidates]:
    text = [*prompt, *answer[:-1]]  # the row before a token draws it
    cache = span.new_cache(len(text) + 16)
    cache.open(b"told", len(text))
    hidden = span.forward(span.embed(text), cache.schedule([StepRequest(b"told", 0, len(text))]), cache)
    ids, logprobs = heads.propose(span.final_hidden(hidden[len(prompt) - 1 :]), width)  # [heads, n, width]
    rows = zip(ids.transpose(0, 1).tolist(), logprobs.transpose(0, 1).tolist(), strict=True)
    return [tuple(tuple(zip(*level, strict=True)) for level in zip(*row, strict=True)) for row in rows]
