"""What a row computes does not depend on its company: other sessions, chunks, trees, forks, parts of a span.

Run on the fast path (llama) and on the general path (gemma2, whose layers alternate windows and cap their scores).
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch
from tiny_models import Chain, ModelTensors, hf_greedy, hf_logits, tiny_model

from swarm.errors import InvalidRequest
from swarm_kernels.kvcache.cache import StepRequest

KINDS = {"llama": {}, "gemma2": {"head_dim": 8, "sliding_window": 16, "query_pre_attn_scalar": 8}}
TOLERANCE = 2e-4


@pytest.fixture(scope="module", params=list(KINDS))
def model(request: pytest.FixtureRequest) -> tuple[object, ModelTensors]:
    hf = tiny_model(request.param, **KINDS[request.param])
    return hf, ModelTensors(hf)


def words(length: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(131) for _ in range(length)]


def close(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.allclose(a, b, atol=TOLERANCE * float(b.abs().max()), rtol=TOLERANCE)


@pytest.mark.slow
def test_sessions_batched_together_in_random_chunks(model: tuple[object, ModelTensors]) -> None:
    hf, source = model
    rng = random.Random(5)
    chain = Chain(source, (1, 4))
    prompts = {b"a": words(30, 1), b"b": words(19, 2), b"c": words(44, 3)}
    expected = {key: hf_greedy(hf, prompt, 8) for key, prompt in prompts.items()}
    texts = {key: list(prompt) for key, prompt in prompts.items()}
    fed = dict.fromkeys(prompts, 0)
    for key in prompts:
        chain.open(key)
    while any(len(texts[key]) < len(prompts[key]) + 8 for key in prompts):
        requests, tokens, last = [], [], {}
        for key in rng.sample(list(prompts), rng.randint(1, 3)):
            part = texts[key][fed[key] : fed[key] + rng.choice((1, 2, 7, 16, 30))]
            requests.append(StepRequest(key, fed[key], len(part)))
            tokens += part
            fed[key] += len(part)
            if fed[key] == len(texts[key]):
                last[key] = len(tokens) - 1
        logits = chain.run(requests, tokens)
        for key, row in last.items():
            texts[key].append(int(logits[row].argmax()))
    for key, prompt in prompts.items():
        assert texts[key][len(prompt) :][:8] == expected[key]


@pytest.mark.slow
def test_tree_rows_equal_the_same_tokens_in_a_line(model: tuple[object, ModelTensors]) -> None:
    hf, source = model
    chain = Chain(source, (2,))
    prompt = words(21, 7)
    parents = (-1, -1, 0, 0, 2, 1, 5, 6, 4)
    slots = (0, 1, 2, 3, 70, 5, 6, 17, 8)
    slot_parents = [slots[p] if p >= 0 else -1 for p in parents]
    tokens = words(len(slots), 8)
    chain.open(b"a")
    chain.open(b"other")
    chain.run([StepRequest(b"a", 0, 21), StepRequest(b"other", 0, 5)], prompt + words(5, 9))
    first = chain.run([StepRequest(b"a", 21, 0, slot_parents[:4], slots[:4])], tokens[:4])
    rest = chain.run(
        [StepRequest(b"other", 5, 1, (-1,), (3,)), StepRequest(b"a", 21, 0, slot_parents[4:], slots[4:])],
        [3, 4, *tokens[4:]],
    )
    logits = torch.cat((first, rest[2:]))
    for row, parent in enumerate(parents):
        path = [tokens[row]]
        while parent >= 0:
            path.insert(0, tokens[parent])
            parent = parents[parent]
        assert close(logits[row], hf_logits(hf, prompt + path)[-1])


def test_a_committed_path_is_a_line(model: tuple[object, ModelTensors]) -> None:
    """Commit part of a tree, grow what is left of it, and go on: as if the tokens had come one by one."""
    hf, source = model
    chain = Chain(source, (1, 3, 5))
    prompt, tokens = words(15, 11), words(6, 12)
    chain.open(b"a")
    chain.run([StepRequest(b"a", 0, 15)], prompt)
    chain.run([StepRequest(b"a", 15, 0, (-1, 0, 1, 0, 1), (0, 1, 2, 3, 4))], tokens[:5])
    grown = chain.run([StepRequest(b"a", 15, 0, (2, -1), (0, 5), commit_slots=(0, 1))], [9, 8])
    text = prompt + tokens[:2]
    assert close(grown[0], hf_logits(hf, [*text, tokens[2], 9])[-1])
    assert close(grown[1], hf_logits(hf, [*text, 8])[-1])
    line = chain.run([StepRequest(b"a", 17, 1, commit_slots=(4,))], [7])
    assert close(line[0], hf_logits(hf, [*text, tokens[4], 7])[-1])


def test_forks_and_rollback(model: tuple[object, ModelTensors]) -> None:
    hf, source = model
    chain = Chain(source, (3,))
    prompt = words(21, 13)
    chain.open(b"a")
    chain.run([StepRequest(b"a", 0, 21)], prompt)
    for cache in chain.caches:
        cache.fork(b"a", b"b", 60)
    both = chain.run([StepRequest(b"a", 21, 2), StepRequest(b"b", 21, 2)], [1, 2, 3, 4])
    assert close(both[1], hf_logits(hf, [*prompt, 1, 2])[-1])
    assert close(both[3], hf_logits(hf, [*prompt, 3, 4])[-1])
    for cache in chain.caches:
        cache.rollback(b"a", 18)
        cache.close(b"b")
    again = chain.run([StepRequest(b"a", 18, 1)], [5])
    assert close(again[0], hf_logits(hf, [*prompt[:18], 5])[-1])


def test_a_hop_may_use_part_of_a_span(model: tuple[object, ModelTensors]) -> None:
    _, source = model
    whole = Chain(source, ())
    wide = Chain(source, (5,))  # its first span holds 0:5, of which the hops use 0:2 and 2:5
    prompt = words(20, 17)
    whole.open(b"a")
    wide.open(b"a")
    expected = whole.run([StepRequest(b"a", 0, 20)], prompt)
    span, cache = wide.spans[0], wide.caches[0]
    metadata = cache.schedule([StepRequest(b"a", 0, 20)])
    hidden = span.forward(span.forward(span.embed(prompt), metadata, cache, 0, 2), metadata, cache, 2)
    tail, tail_cache = wide.spans[1], wide.caches[1]
    logits = tail.logits(tail.forward(hidden, tail_cache.schedule([StepRequest(b"a", 0, 20)]), tail_cache, 5, 6))
    assert torch.equal(logits, expected)
    with pytest.raises(InvalidRequest, match="this span holds 0:5"):
        span.forward(hidden, metadata, cache, 4, 6)
    with pytest.raises(InvalidRequest, match="do not hold the embedding"):
        tail.embed([1])
    with pytest.raises(InvalidRequest, match="do not hold the head"):
        span.logits(hidden)
    with pytest.raises(InvalidRequest, match="outside the vocabulary"):
        span.embed([1, 131])


def test_a_step_that_only_commits(model: tuple[object, ModelTensors]) -> None:
    hf, source = model
    chain = Chain(source, (4,))
    prompt = words(9, 19)
    chain.open(b"a")
    chain.run([StepRequest(b"a", 0, 9, (-1, 0), (0, 1))], [*prompt, 5, 6])
    assert chain.run([StepRequest(b"a", 9, 0, commit_slots=(0, 1))], []).shape == (0, 131)
    assert close(chain.run([StepRequest(b"a", 11, 1)], [7])[0], hf_logits(hf, [*prompt, 5, 6, 7])[-1])


def test_another_sessions_infinities_stay_its_own(model: tuple[object, ModelTensors]) -> None:
    """Hidden states come from untrusted peers: those of one must not reach the rows of another, nor reused blocks."""
    hf, source = model
    chain = Chain(source, ())
    prompt = words(9, 23)
    span, cache = chain.spans[0], chain.caches[0]
    cache.open(b"bad", 40)
    cache.open(b"good", 40)
    hidden = span.embed([*words(18, 24), *prompt]).clone()
    hidden[:18] = float("nan")
    hidden[3] = float("inf")
    metadata = cache.schedule([StepRequest(b"bad", 0, 17, (-1,), (3,)), StepRequest(b"good", 0, 9)])
    logits = span.logits(span.forward(hidden, metadata, cache))[18:]
    assert close(logits, hf_logits(hf, prompt))
    cache.close(b"bad")
    cache.open(b"next", 40)
    reused: Sequence[StepRequest] = [StepRequest(b"next", 0, 9, (-1, 3), (3, 4))]
    assert close(chain.run(reused, [*prompt, 5, 6])[10], hf_logits(hf, [*prompt, 5, 6])[-1])


def test_bf16_is_close(model: tuple[object, ModelTensors]) -> None:
    hf, source = model
    prompt = words(30, 29)
    chain = Chain(source, (2,), torch.bfloat16)
    chain.open(b"a")
    logits = chain.run([StepRequest(b"a", 0, 30)], prompt)
    expected = hf_logits(hf, prompt)
    assert float((logits - expected).norm() / expected.norm()) < 0.05
