"""The attacks on hidden states: each recovers what it can be shown to recover, and the table counts it."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch
from tiny_models import ModelTensors, tiny_model
from typer.testing import CliRunner

from swarm.errors import UsageError
from swarm.types import LayerSpan
from swarm_kernels.runtime.load import load_span
from swarm_kernels.runtime.span import Span
from swarm_privacy.cli import app
from swarm_privacy.forward_search import ForwardSearchPolicy, forward_search
from swarm_privacy.inversion import linear_inversion, nearest_embedding
from swarm_privacy.measure import WINDOW, measure
from swarm_privacy.states import embeddings, states_of
from swarm_privacy.transformer_inversion import TransformerAttackPolicy, transformer_inversion

LAYERS = 4


@pytest.fixture(scope="module")
def span() -> Span:
    return load_span(ModelTensors(tiny_model("llama", num_hidden_layers=LAYERS)), LayerSpan(0, LAYERS), torch.float32)


def text(seed: int, length: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(131) for _ in range(length)]


def test_states_are_those_that_a_chain_would_send(span: Span) -> None:
    ids = text(1, 20)
    apart = states_of(span, ids, (0, 2, LAYERS))
    for depth in apart:
        assert torch.equal(apart[depth], states_of(span, ids, (depth,))[depth])
    assert torch.equal(apart[0], span.embed(ids).to(span.dtype))


def test_embeddings_themselves_hide_nothing(span: Span) -> None:
    ids = text(2, 50)
    scores = nearest_embedding(embeddings(span))(states_of(span, ids, (0,))[0])
    assert scores.argmax(dim=1).tolist() == ids


def test_a_linear_map_inverts_a_linear_map() -> None:
    generator = torch.Generator().manual_seed(0)
    table, mixing = torch.randn(200, 24, generator=generator), torch.randn(24, 24, generator=generator)
    known, secret = (torch.randint(0, 200, (n,), generator=generator) for n in (2000, 100))
    unit = torch.nn.functional.normalize(table, dim=1)
    invert = linear_inversion(table, unit[known] @ mixing, known)
    found = invert(unit[secret] @ mixing).argmax(dim=1)
    assert float((found == secret).float().mean()) > 0.95


def _shifted(count: int, window: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """States each of which tells the token after it and not its own: nothing that reads one state alone finds it."""
    generator = torch.Generator().manual_seed(seed)
    table = torch.nn.functional.normalize(torch.randn(40, 24, generator=torch.Generator().manual_seed(0)), dim=1)
    tokens = torch.randint(0, 40, (count * window,), generator=generator)
    return table, table[tokens.view(-1, window).roll(1, dims=1).flatten()], tokens


QUICK = TransformerAttackPolicy(width=48, max_steps=300, negatives=0, rate=3e-3, patience=6)


def test_a_transformer_reads_a_token_off_the_states_around_it() -> None:
    table, known, tokens = _shifted(60, 8, 1)
    _, secret, hidden_tokens = _shifted(12, 8, 2)
    attack = transformer_inversion(table, known, tokens, 8, QUICK)
    found = attack(secret).argmax(dim=1)
    by_state = linear_inversion(table, known, tokens)(secret).argmax(dim=1)
    assert float((found == hidden_tokens).float().mean()) > 0.6
    assert float((by_state == hidden_tokens).float().mean()) < 0.2


def test_a_transformer_that_learns_nothing_is_the_linear_map() -> None:
    """Tokens at random say nothing of each other, so that what it learns does not hold where it is judged."""
    generator = torch.Generator().manual_seed(3)
    table, states = torch.randn(60, 24, generator=generator), torch.randn(400, 24, generator=generator)
    tokens = torch.randint(0, 60, (400,), generator=generator)
    drawn = torch.get_rng_state()
    attack = transformer_inversion(table, states, tokens, 8, TransformerAttackPolicy(max_steps=0))
    again = transformer_inversion(table, states, tokens, 8, TransformerAttackPolicy(max_steps=0))
    assert torch.equal(torch.get_rng_state(), drawn)
    held = torch.zeros(50, dtype=torch.bool)
    held[torch.linspace(0, 49, 8).long()] = True
    rows = ~held.repeat_interleave(8)
    linear = linear_inversion(table, states[rows], tokens[rows])
    assert torch.allclose(attack(states), linear(states), atol=1e-5)
    assert torch.equal(attack(states), again(states))


def test_the_same_training_gives_the_same_attack() -> None:
    table, known, tokens = _shifted(20, 8, 4)
    few = TransformerAttackPolicy(width=16, max_steps=6, judged_every=2)
    assert torch.equal(
        transformer_inversion(table, known, tokens, 8, few)(known),
        transformer_inversion(table, known, tokens, 8, few)(known),
    )


@pytest.mark.parametrize("depth", [0, 1, LAYERS])
def test_forward_search_finds_a_text_whatever_the_order_of_candidates(span: Span, depth: int) -> None:
    ids = text(3, 24)
    generator = torch.Generator().manual_seed(depth)
    ranked = torch.stack([torch.randperm(131, generator=generator) for _ in ids])
    assert forward_search(span, states_of(span, ids, (depth,))[depth], depth, ranked) == ids


def test_forward_search_tries_no_more_than_it_may(span: Span) -> None:
    ids = text(4, 8)
    wrong_first = torch.stack([torch.tensor([*(t for t in range(131) if t != token), token]) for token in ids])
    found = forward_search(span, states_of(span, ids, (1,))[1], 1, wrong_first, ForwardSearchPolicy(most=130))
    assert all(a != b for a, b in zip(found, ids, strict=True))


def test_shares_are_of_the_tokens_behind_the_first_of_each_window(span: Span) -> None:
    seen = []
    few = TransformerAttackPolicy(width=32, max_steps=4, judged_every=2)
    leaks = measure(
        span, text(5, 1000), text(6, 2 * WINDOW + 9), (0, 2), WINDOW, training_policy=few, report=seen.append
    )
    assert seen == leaks
    assert [leak.depth for leak in leaks] == [0, 2]
    assert (leaks[0].nearest, leaks[0].search, leaks[1].search) == (1.0, 1.0, 1.0)
    assert leaks[0].transformer > 0.9
    assert leaks[1].nearest < 0.5 < leaks[1].most


@pytest.mark.parametrize(("known", "attacked"), [(10, 200), (1000, WINDOW - 1)])
def test_too_little_text_says_nothing(span: Span, known: int, attacked: int) -> None:
    with pytest.raises(UsageError, match="tokens"):
        measure(span, text(1, known), text(2, attacked), (0,), 64)


def test_a_text_is_not_attacked_that_was_trained_on(tmp_path: Path) -> None:
    file = tmp_path / "text"
    file.write_text("words")
    done = CliRunner().invoke(app, ["measure", "--text", str(file), "--train", str(file)])
    assert done.exit_code == UsageError.exit_code
    assert "both" in done.output


@pytest.mark.real_model
@pytest.mark.slow
def test_the_command_prints_a_line_a_depth() -> None:
    docs = Path(__file__).resolve().parents[2] / "docs"
    arguments = ["--text", str(docs / "recovery.md"), "--train", str(docs / "architecture.md"), "--tokens", "64"]
    done = CliRunner().invoke(
        app, ["measure", *arguments, "--searched", "64", "--depth", "0", "--depth", "1", "--json"]
    )
    assert done.exit_code == 0, done.output
    lines = [json.loads(line) for line in done.output.splitlines()]
    assert [line["depth"] for line in lines] == [0, 1]
    assert all(line["search"] > 0.9 for line in lines)
