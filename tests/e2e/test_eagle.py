"""EAGLE-3 over a chain: hidden states of the right rows come to the client, and whatever comes changes no token."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from eagle_reference import random_tensors, save_speculators
from memory_swarm import cut, memory_swarm
from scripted_drafters import Recorded
from tiny_models import ModelTensors, hf_greedy, tiny_model
from virtual_clock import virtual_time

from swarm.tap_messages import TapRows
from swarm.testing.memory_network import LinkModel
from swarm_client.speculation.drafters.inline import InlineDrafter
from swarm_client.speculation.drafters.mixture import MixtureDrafter
from swarm_client.speculation.drafters.ngram import NgramDrafter
from swarm_client.speculation.drafters.tapped import TappedDrafter
from swarm_hop.serving.session_runner import SessionRunner
from swarm_kernels.draft.eagle import EagleDraft, open_eagle
from swarm_kernels.draft.eagle_file import load_eagle
from swarm_kernels.ops.base.layer_weights import plain_linear
from swarm_kernels.runtime.taps import decode

LAYERS, TOKENS = 8, 24
PROMPT = [3 + 7 * i % 120 for i in range(21)]
LINK = LinkModel(delay_s=0.01)
SEEDED: dict[str, Any] = {"temperature": 0.9, "top_p": 0.95, "top_k": 40, "seed": 17}


def model() -> Any:
    return tiny_model("llama", num_hidden_layers=LAYERS)


def states(made: Any, text: Sequence[int]) -> list[torch.Tensor]:
    """What each layer reads, `[n, hidden]`."""
    with torch.inference_mode():
        return [state[0] for state in made(torch.tensor([list(text)]), output_hidden_states=True).hidden_states]


def accurate_head(made: Any, answer: Sequence[int], folder: Path) -> Path:
    """A head overfitted to one answer: from what the last layers read to the token two places on. Its layer passes the
    states through, so that it is right on the first level and arbitrary below."""
    text = [*PROMPT, *answer]
    read = states(made, text)
    wanted = torch.tensor(text[len(PROMPT) + 1 :])
    rows = torch.cat([read[tap] for tap in (5, 6, 7)], -1)[len(PROMPT) - 1 : -2]
    tensors = random_tensors(1, draft_vocab=131)
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        tensors[f"layers.0.{name}.weight"].zero_()
    inside = rows @ tensors["fc.weight"].T
    normed = inside * torch.rsqrt(inside.square().mean(-1, keepdim=True) + 1e-6) * tensors["norm.weight"]
    tensors["lm_head.weight"] = (30 * torch.linalg.pinv(normed) @ F.one_hot(wanted, 131).float()).T.contiguous()
    return save_speculators(folder, tensors, (5, 6, 7), norm_before_residual=False)


def drafter_of(folder: Path, source: Any) -> InlineDrafter:
    return InlineDrafter(TappedDrafter(open_eagle(folder, source)))


@pytest.mark.parametrize("strategy", ["tree", "pipedec", "pipelined-tree", "auto"])
@pytest.mark.parametrize("borders", [(), (3,), (2, 6)], ids=["one hop", "two", "three"])
def test_greedy_tokens_are_the_same_and_an_accurate_head_is_believed(
    strategy: str, borders: tuple[int, ...], tmp_path: Path
) -> None:
    made = model()
    truth = hf_greedy(made, PROMPT, TOKENS)
    folder = accurate_head(made, truth, tmp_path)

    @virtual_time
    async def scenario() -> None:
        source = ModelTensors(made)
        async with (
            memory_swarm(source, cut(LAYERS, *borders), LINK) as swarm,
            swarm.client(prefill_chunk=8, make_drafter=lambda: drafter_of(folder, source)) as client,
        ):
            answer = await client.generate(PROMPT, max_new_tokens=TOKENS, decoding=strategy)
            assert list(answer.token_ids) == truth
            assert answer.repairs == ()
            assert answer.speculation is not None
            if strategy == "tree":
                assert answer.speculation["hits"] > TOKENS // 3
            other = await client.generate(PROMPT[:9], max_new_tokens=TOKENS, decoding=strategy)
            assert list(other.token_ids) == hf_greedy(made, PROMPT[:9], TOKENS)

    scenario()


@pytest.mark.parametrize("strategy", ["tree", "pipedec", "pipelined-tree"])
@pytest.mark.parametrize("local", ["0:0", "1:1", "2:2", "6:1", "1:4"])
def test_taps_come_from_the_ends_at_home_as_from_other_hops(local: str, strategy: str, tmp_path: Path) -> None:
    """The tapped layers are at home, elsewhere, or some here and some there."""
    made = model()
    truth = hf_greedy(made, PROMPT, TOKENS)
    folder = accurate_head(made, truth, tmp_path)

    @virtual_time
    async def scenario() -> None:
        source = ModelTensors(made)
        async with (
            memory_swarm(source, cut(LAYERS, 2, 6), LINK) as swarm,
            swarm.client(make_drafter=lambda: drafter_of(folder, source), local_layers=local) as client,
        ):
            answer = await client.generate(PROMPT, max_new_tokens=TOKENS, decoding=strategy)
            assert list(answer.token_ids) == truth
            assert answer.repairs == ()
            assert answer.speculation is not None
            assert answer.speculation["hits"] > (TOKENS // 3 if strategy == "tree" else 0)

    scenario()


@pytest.mark.parametrize("head", ["accurate", "random", "adversarial"])
@pytest.mark.parametrize("strategy", ["tree", "pipelined-tree"])
def test_seeded_tokens_are_the_same_whatever_the_head_says(strategy: str, head: str, tmp_path: Path) -> None:
    made = model()
    if head == "accurate":
        folder = accurate_head(made, hf_greedy(made, PROMPT, TOKENS), tmp_path)
    else:
        tensors = random_tensors(8)
        tensors["lm_head.weight"] *= 100.0 if head == "adversarial" else 1.0  # sure of itself, and wrong
        folder = save_speculators(tmp_path, tensors)

    @virtual_time
    async def scenario() -> None:
        source = ModelTensors(made)
        async with memory_swarm(source, cut(LAYERS, 2, 5), LINK) as swarm:
            async with swarm.client() as client:
                plain = await client.generate(PROMPT, max_new_tokens=TOKENS, decoding="sequential", **SEEDED)
            async with swarm.client(1, make_drafter=lambda: drafter_of(folder, source)) as client:
                drafted = await client.generate(PROMPT, max_new_tokens=TOKENS, decoding=strategy, **SEEDED)
        assert drafted.token_ids == plain.token_ids
        assert drafted.speculation is not None
        assert drafted.speculation["rows"] > 0

    scenario()


def rows_come(tmp_path: Path, decoding: str, victim: int | None = None, **settings: Any) -> None:
    """Every position but the last has its rows, and they are what transformers computes; also across a crash."""
    made = model()
    truth = hf_greedy(made, PROMPT, TOKENS)
    folder = accurate_head(made, truth, tmp_path)
    recorded: list[Recorded] = []

    @virtual_time
    async def scenario() -> None:
        source = ModelTensors(made)
        draft = EagleDraft(load_eagle(folder, source.config), source.tensor("model.embed_tokens.weight"), plain_linear)

        def make() -> InlineDrafter:
            recorded.append(Recorded(draft))
            return InlineDrafter(recorded[-1])

        async with (
            memory_swarm(source, cut(LAYERS, 3, 6) * 2, LINK) as swarm,
            swarm.client(prefill_chunk=8, make_drafter=make, **settings) as client,
        ):
            stream = client.stream(PROMPT, max_new_tokens=TOKENS, decoding=decoding)
            seen: list[int] = []
            killed = victim is None
            async for piece in stream:
                seen += piece.token_ids
                if len(seen) >= 9 and not killed:
                    killed = True
                    assert stream.chain is not None
                    swarm.kill(stream.chain.peers[victim or 0])
            assert seen == truth
            assert len(stream.result.repairs) == (victim is not None)

    scenario()
    text = [*PROMPT, *truth]
    (drafter,) = recorded
    assert sorted(drafter.rows) == list(range(len(text) - 1))
    read = states(made, text[:-1])
    for position, row in drafter.rows.items():
        for part, tap in zip(row, (5, 6, 7), strict=True):
            found, expected = decode(part, 96, 8)[0], read[tap][position]
            assert (found - expected).abs().max() <= 0.02 * expected.abs().max()


@pytest.mark.parametrize("victim", [None, 0, 1, 2])
@pytest.mark.parametrize("decoding", ["pipedec", "tree", "pipelined-tree"])
def test_the_rows_that_come_are_those_of_the_text(victim: int | None, decoding: str, tmp_path: Path) -> None:
    rows_come(tmp_path, decoding, victim)


@pytest.mark.parametrize("local", ["0:0", "1:1", "0:2", "6:0", "2:3"])
def test_hops_at_home_have_taps_as_others_do(local: str, tmp_path: Path) -> None:
    rows_come(tmp_path, "tree", local_layers=local)


def test_only_the_end_of_a_long_prompt_is_sent(tmp_path: Path) -> None:
    made = model()
    prompt = [5 + 11 * i % 120 for i in range(200)]
    folder = save_speculators(tmp_path, random_tensors(2))
    recorded: list[Recorded] = []

    @virtual_time
    async def scenario() -> None:
        source = ModelTensors(made)

        def make() -> InlineDrafter:
            recorded.append(Recorded(open_eagle(folder, source)))
            return InlineDrafter(recorded[-1])

        async with (
            memory_swarm(source, cut(LAYERS, 4), LINK) as swarm,
            swarm.client(make_drafter=make) as client,
        ):
            for _ in range(2):  # the second time, all but a few rows come from the hops' prefix caches
                answer = await client.generate(prompt, max_new_tokens=8, decoding="tree")
                assert list(answer.token_ids) == hf_greedy(made, prompt, 8)
            assert answer.cached_prompt_tokens == 192

    scenario()
    first, second = (sorted(drafter.rows) for drafter in recorded)
    assert first == list(range(200 - recorded[0].taps.window, 207))
    assert second == list(range(192, 207))
    assert recorded[0].times_sent == len(first)


def losing(monkeypatch: pytest.MonkeyPatch, keep: Any) -> None:
    """Let hops send only those taps that `keep(step)` keeps."""
    original = SessionRunner._send_taps

    async def send(self: SessionRunner, session: Any, step: Any, output: Any) -> None:
        if keep(step):
            await original(self, session, step, output)

    monkeypatch.setattr(SessionRunner, "_send_taps", send)


@pytest.mark.parametrize("lost", ["all", "some"])
def test_lost_taps_cost_no_token(lost: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    made = model()
    truth = hf_greedy(made, PROMPT, 40)
    folder = accurate_head(made, truth, tmp_path)
    losing(monkeypatch, lambda step: lost == "some" and step.step % 3)
    caplog.set_level(logging.WARNING)

    @virtual_time
    async def scenario() -> None:
        source = ModelTensors(made)
        async with (
            memory_swarm(source, cut(LAYERS, 3, 6), LINK) as swarm,
            swarm.client(make_drafter=lambda: drafter_of(folder, source)) as client,
        ):
            answer = await client.generate(PROMPT, max_new_tokens=40, decoding="tree")
            assert list(answer.token_ids) == truth
            assert answer.speculation is not None
            assert (answer.speculation["hits"] > 0) == (lost == "some")

    scenario()
    said = [record.getMessage() for record in caplog.records if "no hidden states" in record.getMessage()]
    assert said == (
        ["the hops send no hidden states of layers 5, 6, 7 for eagle; going on without its drafts"]
        if lost == "all"
        else []
    )


@pytest.mark.parametrize("beside", ["", "n-grams"])
def test_a_head_of_no_numbers_is_left_with_one_sentence(beside: str, tmp_path: Path) -> None:
    made = model()
    tensors = random_tensors(4)
    tensors["fc.weight"][3, 5] = torch.nan
    folder = save_speculators(tmp_path, tensors)

    def make() -> InlineDrafter:
        eagle = TappedDrafter(open_eagle(folder, source))
        return InlineDrafter(MixtureDrafter([NgramDrafter(), eagle]) if beside else eagle)

    source = ModelTensors(made)

    @virtual_time
    async def scenario() -> None:
        async with (
            memory_swarm(source, cut(LAYERS, 3), LINK) as swarm,
            swarm.client(make_drafter=make) as client,
        ):
            answer = await client.generate(PROMPT, max_new_tokens=TOKENS, decoding="tree")
            assert list(answer.token_ids) == hf_greedy(made, PROMPT, TOKENS)
            assert answer.speculation is not None
            (said,) = answer.speculation["dropped"] if beside else (answer.speculation["reason"],)
            assert "not finite" in said
            assert "\n" not in said
            if beside:  # its n-grams go on
                assert said.startswith("going on without the drafter 'eagle', with ngram alone: ")
                assert answer.speculation["hits"] > 0
                assert "not finite" not in answer.speculation["reason"]

    scenario()


@pytest.mark.parametrize("evil", ["nan", "short", "foreign", "huge"])
def test_a_hop_that_sends_other_rows_is_left_or_ignored(
    evil: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = model()
    truth = hf_greedy(made, PROMPT, TOKENS)
    folder = accurate_head(made, truth, tmp_path)
    victims: list[str] = []

    @virtual_time
    async def scenario() -> None:
        source = ModelTensors(made)
        async with (
            memory_swarm(source, cut(LAYERS, 3, 6) * 2, LINK) as swarm,
            swarm.client(make_drafter=lambda: drafter_of(folder, source)) as client,
        ):
            original = SessionRunner._send_taps

            async def send(self: SessionRunner, session: Any, step: Any, output: Any) -> None:
                if session.span.start != 3 or (victims and self is not runner[0]):
                    await original(self, session, step, output)
                    return
                runner.append(self)
                victims.append("x")
                for layer, rows in output.taps:
                    body = {"nan": b"\xff" * len(rows), "huge": b"\x7f" * len(rows)}.get(evil, rows[1:])
                    number = 0 if evil == "foreign" else layer
                    await session.client.send(TapRows(session.id, step.epoch, step.step, number), body)

            runner: list[SessionRunner] = []
            monkeypatch.setattr(SessionRunner, "_send_taps", send)
            answer = await client.generate(PROMPT, max_new_tokens=TOKENS, decoding="tree")
            assert list(answer.token_ids) == truth
            assert victims
            assert bool(answer.repairs) == (evil in ("short", "foreign"))

    scenario()
