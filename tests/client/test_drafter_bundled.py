"""The draft that comes with swarm belongs to the built-in model and guesses what look-up cannot."""

from __future__ import annotations

import gc
import weakref
from contextlib import closing

import pytest

from swarm_client.speculation.drafters.bundled import find_bundled, taps_of
from swarm_kernels.draft.file import read_card
from swarm_kernels.draft.tapped_draft import open_tapped_draft
from swarm_kernels.models.open import open_model
from swarm_kernels.tokenizer.tokenizer import load_tokenizer
from swarm_training.distill.greedy import greedy_answers
from swarm_training.evaluation.evaluate import Recorded, hits_by_depth
from swarm_training.evaluation.recorded_taps import RecordedTapsDrafter, record_taps


@pytest.mark.real_model
def test_the_shipped_draft_knows_its_model() -> None:
    with closing(open_model("smollm2-135m")) as source:
        path = find_bundled(source)
        assert path is not None
        assert path.stat().st_size < 8_000_000
        assert read_card(path).weight_hash == source.weight_hash
        prompt = load_tokenizer(source).apply_chat_template([{"role": "user", "content": "Why does it rain?"}])
        (answer,) = greedy_answers(source, [prompt], 40)
        draft = open_tapped_draft(path, source)
        assert draft.taps == taps_of(path, source)
        assert draft.store is not None
        recorded = record_taps(source, [(prompt, answer)], draft.taps)
        hits = hits_by_depth(RecordedTapsDrafter(draft, recorded), [Recorded(prompt, answer)], 1)
        assert hits[0][2] > 0.5


@pytest.mark.real_model
def test_clients_of_one_process_share_a_draft_and_let_go_of_it() -> None:
    with closing(open_model("smollm2-135m")) as source:
        path = find_bundled(source)
        assert path is not None
        one, other = open_tapped_draft(path, source), open_tapped_draft(path, source)
        assert one is other
        seen = weakref.ref(one)
        del one, other
        gc.collect()
        assert seen() is None
