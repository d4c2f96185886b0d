"""A draft session against a plain pass: running the model over the whole hypothetical text."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import ModelTensors, tiny_model

from swarm.types import LayerSpan
from swarm_kernels.draft import models
from swarm_kernels.draft.models import LocalModel, top_tokens
from swarm_kernels.draft.session import DraftCachePolicy, DraftCandidates, DraftSession, Path
from swarm_kernels.kvcache.cache import StepRequest

VOCAB = 131
WIDTH = 5


@pytest.fixture(scope="module")
def model() -> Iterator[LocalModel]:
    """In fp32, where a session and a plain pass must agree closely; drafts themselves run in 8 bits."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(models, "served_dtype", lambda config, device: torch.float32)
        yield LocalModel(ModelTensors(tiny_model("llama")))


def plain(model: LocalModel, text: Sequence[int]) -> DraftCandidates:
    """One forward over everything."""
    cache = model.new_cache(len(text) + 16)
    cache.open(b"plain", len(text))
    hidden = model.run(text, cache.schedule([StepRequest(b"plain", 0, len(text))]), cache)
    return model.new_head().propose(hidden[-1:], WIDTH)[0]


def same(found: DraftCandidates, expected: DraftCandidates) -> bool:
    """Equal probabilities by rank."""
    return all(math.isclose(f[1], e[1], abs_tol=1e-3) for f, e in zip(found, expected, strict=True))


TOKENS = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=6)
PATHS = st.lists(st.lists(st.integers(0, 2), max_size=4), min_size=1, max_size=6)
STEPS = st.lists(st.tuples(st.sampled_from(["extend", "follow", "reset"]), TOKENS, PATHS), min_size=1, max_size=6)


@pytest.mark.slow
@given(TOKENS, STEPS)
@settings(max_examples=15, deadline=None)
def test_candidates_are_those_of_a_plain_pass(model: LocalModel, prompt: list[int], steps: list[tuple]) -> None:
    session, text = DraftSession(model), list(prompt)
    session.reset(text)
    for what, tokens, raw in steps:
        paths: list[Path] = [tuple(path) for path in raw]
        for path, candidates in zip(paths, session.propose(paths, WIDTH), strict=True):
            assert same(candidates, plain(model, [*text, *path]))
        if what == "reset":
            text = [*text[: len(text) // 2 + 1], *tokens]
            session.reset(text)
        else:  # "follow": the new tokens were drafted before, so their keys are only moved
            fresh = list(paths[0]) or tokens if what == "follow" else tokens
            text += fresh
            session.extend(fresh)
    session._cache.check_integrity()


def test_drafted_tokens_are_not_computed_again(model: LocalModel, monkeypatch: pytest.MonkeyPatch) -> None:
    rows: list[int] = []
    run = model.run
    monkeypatch.setattr(
        model, "run", lambda tokens, metadata, cache: (rows.append(len(tokens)), run(tokens, metadata, cache))[1]
    )
    session = DraftSession(model)
    session.reset([1, 2, 3])
    session.propose([(), (4,), (5,), (4, 6)], 2)
    session.extend([4])
    session.propose([(6,)], 2)  # its keys, values and candidates are cached
    session.propose([(6, 7)], 2)
    session.reset([1, 2, 3, 4, 9])  # the common prefix is kept
    session.propose([()], 2)
    assert rows == [6, 0, 1, 1]


def test_a_long_prompt_is_prefilled_in_chunks(model: LocalModel) -> None:
    session, text = DraftSession(model, policy=DraftCachePolicy(prefill_chunk=16)), [i % VOCAB for i in range(50)]
    session.reset(text)
    assert same(session.propose([(1, 2)], WIDTH)[0], plain(model, [*text, 1, 2]))


def test_beyond_the_context_there_are_no_candidates(model: LocalModel) -> None:
    session = DraftSession(model, 8)
    session.reset([1, 2, 3, 4, 5, 6])
    assert session.propose([(1, 1, 1)], WIDTH) == [[]]
    assert session.propose([(1, 1)], WIDTH) != [[]]
    session.extend([1, 2, 3])
    assert session.propose([()], WIDTH) == [[]]


def test_an_empty_text_has_no_candidates(model: LocalModel) -> None:
    session = DraftSession(model)
    session.reset([])
    assert session.propose([()], WIDTH) == [[]]


def test_a_tree_that_outgrows_its_slots_is_dropped_and_computed_again(model: LocalModel) -> None:
    session, text = DraftSession(model, policy=DraftCachePolicy(max_tree_slots=8)), [1, 2, 3]
    session.reset(text)
    for first in range(20, 32):
        paths = [(first,), (first, 1), (first, 1, 2)]
        for path, candidates in zip(paths, session.propose(paths, WIDTH), strict=True):
            assert same(candidates, plain(model, [*text, *path]))
    session._cache.check_integrity()


@pytest.mark.parametrize(("vocab", "count"), [(131, 7), (640, 4), (640, 10), (640, 640), (64, 100)])
def test_top_tokens_are_those_of_a_plain_selection(vocab: int, count: int) -> None:
    logits = torch.randn(9, vocab, generator=torch.Generator().manual_seed(vocab + count))
    ids, logprobs = top_tokens(logits, count)
    expected = logits.log_softmax(-1).topk(min(count, vocab), -1)
    torch.testing.assert_close(logprobs, expected.values)
    torch.testing.assert_close(logits.gather(1, ids), expected.values + logits.logsumexp(-1, keepdim=True))


def test_the_whole_model_is_used(model: LocalModel) -> None:
    source = ModelTensors(tiny_model("llama"))
    span = models.load_span(source, LayerSpan(0, 6), torch.bfloat16)
    cache = span.new_cache(32)
    cache.open(b"s", 3)
    hidden = span.forward(span.embed([5, 6, 7]), cache.schedule([StepRequest(b"s", 0, 3)]), cache)
    best = int(span.logits(hidden[-1:]).argmax())
    assert plain(model, [5, 6, 7])[0][0] == best
