"""Medusa heads evaluated on recorded answers, as if they ran on the tail of a swarm.

Their candidates at every token are computed beforehand; the drafter then gets them as tokens are committed.
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

RecordedCandidates = Mapping[TokenPath, Sequence[MedusaCandidates]]
"""By prompt: the candidates that came with each token of the answer."""


class RecordedMedusa(MedusaDrafter):
    """Proposes the recorded candidates of an answer, as that answer is committed."""

    def __init__(self, recorded: RecordedCandidates) -> None:
        super().__init__()
        self._recorded = recorded
        self._answer: Sequence[MedusaCandidates] = ()
        self._position = 0

    def _begin(self, prompt_ids: Sequence[int]) -> None:
        super()._begin(prompt_ids)
        self._answer, self._position = self._recorded.get(tuple(prompt_ids), ()), 0

    def _advance(self, tokens: Sequence[int]) -> None:
        super()._advance(tokens)
        self._position += len(tokens)
        if 0 < self._position <= len(self._answer):
            self.set_medusa_candidates(self._answer[self._position - 1])


def run_heads(
    source: ModelSource, heads: Path, answers: Sequence[tuple[Sequence[int], Sequence[int]]], width: int
) -> dict[TokenPath, list[MedusaCandidates]]:
    """The candidates of the heads in a file for each (prompt, answer), `width` each. Raises as `MedusaHeads.of`."""
    span = load_span(source, LayerSpan(0, source.config.num_layers), torch.bfloat16)
    medusa = MedusaHeads.of(heads, span, source)
    assert isinstance(span, LlamaSpan)  # `MedusaHeads.of` has checked it
    return {tuple(prompt): _candidates(span, medusa, prompt, answer, width) for prompt, answer in answers}


def _candidates(
    span: LlamaSpan, heads: MedusaHeads, prompt: Sequence[int], answer: Sequence[int], width: int
) -> list[MedusaCandidates]:
    text = [*prompt, *answer[:-1]]  # the row before a token predicts it
    cache = span.new_cache(len(text) + 16)
    cache.open(b"recorded", len(text))
    hidden = span.forward(span.embed(text), cache.schedule([StepRequest(b"recorded", 0, len(text))]), cache)
    ids, logprobs = heads.propose(span.final_hidden(hidden[len(prompt) - 1 :]), width)  # [heads, n, width]
    rows = zip(ids.transpose(0, 1).tolist(), logprobs.transpose(0, 1).tolist(), strict=True)
    return [tuple(tuple(zip(*level, strict=True)) for level in zip(*row, strict=True)) for row in rows]
