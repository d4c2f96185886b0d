"""DFlash and MTP over a chain: whatever the head says and whatever hidden states come, the tokens are the same."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from dflash_reference import Reference, random_tensors, save_speculators
from memory_swarm import cut, memory_swarm
from mtp_reference import Checkpoint
from scripted_drafters import Recorded
from tiny_models import ModelTensors, hf_greedy, tiny_model
from virtual_clock import virtual_time

from swarm.testing.memory_network import LinkModel
from swarm_client.speculation.drafters.inline import InlineDrafter
from swarm_client.speculation.drafters.mixture import MixtureDrafter
from swarm_client.speculation.drafters.ngram import NgramDrafter
from swarm_client.speculation.drafters.tapped import TappedDrafter
from swarm_hop.serving.session_runner import SessionRunner
from swarm_kernels.draft.dflash import DFlashDraft
from swarm_kernels.draft.dflash_file import load_dflash
from swarm_kernels.draft.mtp import MtpDraft
from swarm_kernels.draft.mtp_source import find_mtp
from swarm_kernels.draft.tapped import TappedDraft, target_ends
from swarm_kernels.runtime.taps import decode

TOKENS = 24
PROMPT = [3 + 7 * i % 120 for i in range(21)]
LINK = LinkModel(delay_s=0.01)
SEEDED: dict[str, Any] = {"temperature": 0.9, "top_p": 0.95, "top_k": 40, "seed": 17}


class Case(ABC):
    """A target, what it writes greedily, and heads for it: accurate, random, adversarial (sure of itself, and wrong),
    of no numbers."""

    layers: int
    made: Any
    source: ModelTensors
    taps: tuple[int, ...]

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.truth = hf_greedy(self.made, PROMPT, TOKENS)

    @abstractmethod
    def head(self, kind: str) -> TappedDraft: ...

    @abstractmethod
    def tapped(self, text: Sequence[int]) -> list[torch.Tensor]:
        """What transformers has at each of `taps`, `[n, hidden]`."""


class DFlash(Case):
    layers, taps = 8, (2, 4, 6)

    def __init__(self, folder: Path) -> None:
        self.made = tiny_model("llama", num_hidden_layers=self.layers)
        self.source = ModelTensors(self.made)
        super().__init__(folder)

    def head(self, kind: str) -> TappedDraft:
        tensors = random_tensors(5, draft_vocab=131)
        if kind == "accurate":
            tensors["lm_head.weight"] = self._overfitted(tensors)
        elif kind == "adversarial":
            tensors["lm_head.weight"] *= 100
        elif kind == "nan":
            tensors["fc.weight"][3, 5] = torch.nan
        folder = save_speculators(self.folder, tensors)
        return DFlashDraft(load_dflash(folder, self.source.config), *target_ends(self.source, ["lm_head"]))

    def tapped(self, text: Sequence[int]) -> list[torch.Tensor]:
        with torch.inference_mode():
            states = self.made(torch.tensor([list(text)]), output_hidden_states=True).hidden_states
        return [states[tap][0] for tap in self.taps]

    def _overfitted(self, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
        """Right on the first two places of each block of the answer."""
        text, (embedding, head) = [*PROMPT, *self.truth], target_ends(self.source)
        tapped = torch.cat(self.tapped(text), -1)
        reference = Reference(tensors, embedding, head)
        rows, wanted = [], []
        with torch.no_grad():
            for at in range(len(PROMPT), len(text) - 2):
                rows.append(reference.block(tapped[:at], range(at), text[at], at)[:2])
                wanted += text[at + 1 : at + 3]
        return (30 * torch.linalg.pinv(torch.cat(rows)) @ F.one_hot(torch.tensor(wanted), 131).float()).T.contiguous()


class Mtp(Case):
    layers, taps = 4, (4,)

    def __init__(self, folder: Path) -> None:
        self.checkpoint = Checkpoint("mimo")
        self.made, self.source = self.checkpoint.made, self.checkpoint.source
        super().__init__(folder)

    def head(self, kind: str) -> TappedDraft:
        prefix, tensors = "model.mtp_layers.0.", self.checkpoint.tensors
        changes: dict[str, torch.Tensor] = {}
        if kind == "accurate":
            silent = ("mlp.down_proj.weight", "self_attn.o_proj.weight")
            changes = {name: torch.zeros_like(tensors[prefix + name]) for name in silent}
            changes["final_layernorm.weight"] = torch.ones(64)
            changes["input_proj.weight"] = self._overfitted()
        elif kind in ("random", "adversarial"):
            times = 4 if kind == "random" else 100  # so that it says anything at all
            changes["final_layernorm.weight"] = times * tensors[prefix + "final_layernorm.weight"]
        elif kind == "nan":
            changes["input_proj.weight"] = torch.full((64, 128), torch.nan)
        for name, tensor in changes.items():
            self.source.replace(prefix + name, tensor)
        layout = find_mtp(self.source)
        assert layout is not None
        return MtpDraft(self.source, layout)

    def tapped(self, text: Sequence[int]) -> list[torch.Tensor]:
        return [self.checkpoint.taps(text)]

    def _overfitted(self) -> torch.Tensor:
        """Right on the first level of each tree of the answer."""
        text = [*PROMPT, *self.truth]
        one, made = self.checkpoint, self.made.model
        with torch.no_grad():
            states = one._norm(made.norm.weight, one.taps(text))[len(PROMPT) - 1 : -2]
            embedded = made.embed_tokens.weight[text[len(PROMPT) : -1]].bfloat16().float()
            read = (one.norm("hidden_layernorm.weight", states), one.norm("token_layernorm.weight", embedded))
            said = 5 * self.made.lm_head.weight[text[len(PROMPT) + 1 :]]
            return (torch.linalg.pinv(torch.cat(read, -1)) @ said).T.contiguous()


CASES = [DFlash, Mtp]


def drafter_of(head: TappedDraft) -> Callable[[], InlineDrafter]:
    return lambda: InlineDrafter(TappedDrafter(head))


@pytest.mark.parametrize("strategy", ["tree", "pipedec", "pipelined-tree", "auto"])
@pytest.mark.parametrize("borders", [(), (2,), (1, 3)], ids=["one hop", "two", "three"])
@pytest.mark.parametrize("case", CASES)
def test_greedy_tokens_are_the_same_and_an_accurate_head_is_believed(
    case: type[Case], borders: tuple[int, ...], strategy: str, tmp_path: Path
) -> None:
    target = case(tmp_path)
    head = target.head("accurate")

    @virtual_time
    async def scenario() -> None:
        async with (
            memory_swarm(target.source, cut(target.layers, *borders), LINK) as swarm,
            swarm.client(prefill_chunk=8, make_drafter=drafter_of(head)) as client,
        ):
            answer = await client.generate(PROMPT, max_new_tokens=TOKENS, decoding=strategy)
            assert list(answer.token_ids) == target.truth
            assert answer.repairs == ()
            assert answer.speculation is not None
            assert answer.speculation["drafter"] == head.kind
            if strategy == "tree":
                assert answer.speculation["hits"] > TOKENS // 3
            other = await client.generate(PROMPT[:9], max_new_tokens=TOKENS, decoding=strategy)
            assert list(other.token_ids) == hf_greedy(target.made, PROMPT[:9], TOKENS)

    scenario()


@pytest.mark.parametrize("kind", ["accurate", "random", "adversarial"])
@pytest.mark.parametrize("strategy", ["tree", "pipelined-tree"])
@pytest.mark.parametrize("case", CASES)
def test_seeded_tokens_are_the_same_whatever_the_head_says(
    case: type[Case], strategy: str, kind: str, tmp_path: Path
) -> None:
    target = case(tmp_path)
    head = target.head(kind)

    @virtual_time
    async def scenario() -> None:
        async with memory_swarm(target.source, cut(target.layers, 1, 3), LINK) as swarm:
            async with swarm.client() as client:
                plain = await client.generate(PROMPT, max_new_tokens=TOKENS, decoding="sequential", **SEEDED)
            async with swarm.client(1, make_drafter=drafter_of(head)) as client:
                drafted = await client.generate(PROMPT, max_new_tokens=TOKENS, decoding=strategy, **SEEDED)
        assert drafted.token_ids == plain.token_ids
        assert drafted.speculation is not None
        assert drafted.speculation["rows"] > 0

    scenario()


@pytest.mark.parametrize("victim", [0, 1, 2])
@pytest.mark.parametrize("decoding", ["tree", "pipelined-tree"])
@pytest.mark.parametrize("case", CASES)
def test_a_killed_hop_costs_no_token_and_no_row(case: type[Case], decoding: str, victim: int, tmp_path: Path) -> None:
    target = case(tmp_path)
    head = target.head("accurate")
    recorded: list[Recorded] = []

    def make() -> InlineDrafter:
        recorded.append(Recorded(head))
        return InlineDrafter(recorded[-1])

    @virtual_time
    async def scenario() -> None:
        async with (
            memory_swarm(target.source, cut(target.layers, 1, 3) * 2, LINK) as swarm,
            swarm.client(prefill_chunk=8, make_drafter=make) as client,
        ):
            stream = client.stream(PROMPT, max_new_tokens=TOKENS, decoding=decoding)
            seen: list[int] = []
            killed = False
            async for piece in stream:
                seen += piece.token_ids
                if len(seen) >= 9 and not killed:
                    killed = True
                    assert stream.chain is not None
                    swarm.kill(stream.chain.peers[victim])
            assert seen == target.truth
            assert len(stream.result.repairs) == 1

    scenario()
    (drafter,) = recorded
    text = [*PROMPT, *target.truth]
    assert sorted(drafter.rows) == list(range(len(text) - 1))
    read = target.tapped(text[:-1])
    for position, row in drafter.rows.items():
        for part, states in zip(row, read, strict=True):
            found, expected = decode(part, head.taps.hidden_size, 8)[0], states[position]
            assert (found - expected).abs().max() <= 0.02 * expected.abs().max()


@pytest.mark.parametrize("lost", ["all", "some"])
@pytest.mark.parametrize("case", CASES)
def test_lost_taps_cost_no_token(
    case: type[Case], lost: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    target = case(tmp_path)
    head = target.head("accurate")
    truth = hf_greedy(target.made, PROMPT, 40)
    original = SessionRunner._send_taps

    async def send(self: SessionRunner, session: Any, step: Any, output: Any) -> None:
        if lost == "some" and step.step % 3:
            await original(self, session, step, output)

    monkeypatch.setattr(SessionRunner, "_send_taps", send)
    caplog.set_level(logging.WARNING)

    @virtual_time
    async def scenario() -> None:
        async with (
            memory_swarm(target.source, cut(target.layers, 1, 3), LINK) as swarm,
            swarm.client(make_drafter=drafter_of(head)) as client,
        ):
            answer = await client.generate(PROMPT, max_new_tokens=40, decoding="tree")
            assert list(answer.token_ids) == truth
            assert answer.speculation is not None
            assert (answer.speculation["hits"] > 0) == (lost == "some")

    scenario()
    said = [record.getMessage() for record in caplog.records if "no hidden states" in record.getMessage()]
    layers = ", ".join(map(str, target.taps))
    expected = f"the hops send no hidden states of layers {layers} for {head.kind}; going on without its drafts"
    assert said == ([expected] if lost == "all" else [])


@pytest.mark.parametrize("case", CASES)
def test_a_head_of_no_numbers_is_left_alone_and_n_grams_go_on(case: type[Case], tmp_path: Path) -> None:
    target = case(tmp_path)
    head = target.head("nan")

    @virtual_time
    async def scenario() -> None:
        async with (
            memory_swarm(target.source, cut(target.layers, 2), LINK) as swarm,
            swarm.client(
                make_drafter=lambda: InlineDrafter(MixtureDrafter([NgramDrafter(), TappedDrafter(head)]))
            ) as client,
        ):
            answer = await client.generate(PROMPT, max_new_tokens=TOKENS, decoding="tree")
            assert list(answer.token_ids) == target.truth
            assert answer.speculation is not None
            (said,) = answer.speculation["dropped"]
            assert "not finite" in said
            assert "not finite" not in answer.speculation["reason"]

    scenario()
