"""Drafters that read hidden states, evaluated on recorded answers, as if hops sent these.

The states of all tokens are computed beforehand; the drafter gets them as tokens are committed, each when the model has
read its token: those of the last one come with the next step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from swarm.types import LayerSpan, TappedRow, Taps
from swarm_client.speculation.drafters.base import TokenPath
from swarm_client.speculation.drafters.tapped import TappedDrafter
from swarm_kernels.draft.tapped import TappedDraft
from swarm_kernels.kvcache.cache import StepRequest
from swarm_kernels.models.source import ModelSource
from swarm_kernels.runtime.load import load_span
from swarm_kernels.runtime.span import Span
from swarm_kernels.runtime.taps import encode

RecordedTaps = Mapping[TokenPath, Sequence[TappedRow]]
"""By prompt: the states of each token of prompt and answer."""


class RecordedTapsDrafter(TappedDrafter):
    """Reads the recorded states of an answer, as that answer is committed."""

    def __init__(self, model: TappedDraft, recorded: RecordedTaps) -> None:
        super().__init__(model)
        self._recorded = recorded
        self._rows: Sequence[TappedRow] = ()
        self._known = self._given = 0  # tokens of the text; of which the states were given

    def _begin(self, prompt_ids: Sequence[int]) -> None:
        super()._begin(prompt_ids)
        self._rows = self._recorded.get(tuple(prompt_ids), ())
        self._known, self._given = len(prompt_ids), max(0, len(prompt_ids) - self.taps.window)
        self._give()

    def _advance(self, tokens: Sequence[int]) -> None:
        super()._advance(tokens)
        self._known += len(tokens)
        self._give()

    def _give(self) -> None:
        end = min(self._known - 1, len(self._rows))
        self.set_taps({at: self._rows[at] for at in range(self._given, end)})
        self._given = max(self._given, end)


def record_taps(
    source: ModelSource, answers: Sequence[tuple[Sequence[int], Sequence[int]]], taps: Taps
) -> RecordedTaps:
    """What hops send of each (prompt, answer). Raises as `load_span`."""
    span = load_span(source, LayerSpan(0, source.config.num_layers), torch.bfloat16)
    return {tuple(prompt): _rows(span, [*prompt, *answer], taps) for prompt, answer in answers}


def _rows(span: Span, text: Sequence[int], taps: Taps) -> list[TappedRow]:
    cache = span.new_cache(len(text) + 16)
    cache.open(b"recorded", len(text))
    metadata = cache.schedule([StepRequest(b"recorded", 0, len(text))])
    hidden, at, columns = span.embed(text), 0, []
    for tap in taps.layers:
        if tap > at:
            hidden, at = span.forward(hidden, metadata, cache, at, tap), tap
        body, size = encode(hidden, taps.bits), taps.row_bytes
        columns.append([body[row * size : (row + 1) * size] for row in range(len(text))])
    return list(zip(*columns, strict=True))
