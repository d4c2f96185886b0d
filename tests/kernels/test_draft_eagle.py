"""EAGLE-3: both kinds of release, against a reference that caches nothing; and files that are none."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from eagle_reference import LAYER, Reference, random_tensors, save_release, save_speculators
from safetensors.torch import save_file
from tiny_models import ModelTensors, tiny_model

from swarm.errors import CorruptModel, DrafterFailed, ModelError, ModelNotFound, UnsupportedModel
from swarm_kernels.draft.eagle import EagleDraft, open_eagle
from swarm_kernels.draft.eagle_file import load_eagle
from swarm_kernels.draft.eagle_session import EagleSession
from swarm_kernels.draft.folder import EAGLE, drafter_kind
from swarm_kernels.draft.session import DraftCachePolicy
from swarm_kernels.ops.base.layer_weights import plain_linear
from swarm_kernels.runtime.taps import encode


def source() -> ModelTensors:
    return ModelTensors(tiny_model("llama", num_hidden_layers=8))


def embedding() -> torch.Tensor:
    return source().tensor("model.embed_tokens.weight")


def draft(folder: Path) -> EagleDraft:
    """In fp32, with taps in 16 bits."""
    return EagleDraft(load_eagle(folder, source().config), embedding(), plain_linear)


def rows(tapped: torch.Tensor, positions: Sequence[int], bits: int = 8) -> dict[int, tuple[bytes, ...]]:
    """`tapped [n, taps * hidden]` as hops send it."""
    return {at: tuple(encode(part, bits) for part in tapped[at : at + 1].chunk(3, -1)) for at in positions}


def as_sent(tapped: torch.Tensor) -> torch.Tensor:
    """What is left of numbers after 8 bits."""
    from swarm_kernels.runtime.taps import decode

    parts = [decode(encode(part, 8), LAYER["hidden_size"], 8) for part in tapped.chunk(3, -1)]
    return torch.cat(parts, -1)


LAYOUTS: dict[str, dict[str, Any]] = {
    "speculators": {},
    "residual after the norm": {"changes": {"norm_before_residual": False}},
    "whole vocabulary": {"tensors": {"draft_vocab": 131}},
    "biases": {"tensors": {"bias": True}},
    "norm before fc": {"tensors": {"input_norm": True}, "changes": {"norm_before_fc": True}},
    "release": {"release": True},
    "own embedding": {"embedding": True},
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_drafts_what_the_reference_drafts_token_by_token(layout: str, tmp_path: Path) -> None:
    options = LAYOUTS[layout]
    tensors = random_tensors(3, **options.get("tensors", {}))
    if options.get("embedding"):
        tensors["embed_tokens.weight"] = torch.randn(131, 96, generator=torch.Generator().manual_seed(1))
    changes = options.get("changes", {})
    if options.get("release"):
        folder, flags = save_release(tmp_path / "head", tensors), {}
    else:
        folder, flags = (
            save_speculators(tmp_path / "head", tensors, **changes),
            {"norm_before_residual": True, **changes},
        )
    reference, session = Reference(tensors, embedding(), **flags), EagleSession(draft(folder))
    rng = random.Random(layout)
    text = [rng.randrange(131) for _ in range(60)]
    tapped = as_sent(torch.randn(60, 3 * 96, generator=torch.Generator().manual_seed(2)))
    session.reset(text[:20])
    session.add(rows(tapped, range(19)))
    known = 20
    while known < 60:
        path: tuple[int, ...] = ()
        for _ in range(4):  # the drafter's own chain, and another branch
            others = [(*path[:-1], rng.randrange(131))] if path else []
            for asked, found in zip([path, *others], session.propose([path, *others], 5), strict=True):
                expected = reference.candidates(tapped[: known - 1], text[:known], asked, 5)
                assert [token for token, _ in found] == [token for token, _ in expected]
                assert [p for _, p in found] == pytest.approx([p for _, p in expected], abs=2e-3)
            path = (*path, session.propose([path], 1)[0][0][0])
        step = rng.randint(1, 5)
        session.extend(text[known : known + step])
        session.add(rows(tapped, range(known - 1, min(59, known + step - 1))))
        known += step


def test_a_tree_beyond_all_slots_is_computed_anew(tmp_path: Path) -> None:
    tensors = random_tensors(5)
    folder = save_speculators(tmp_path, tensors)
    reference = Reference(tensors, embedding(), norm_before_residual=True)
    session = EagleSession(draft(folder), policy=DraftCachePolicy(max_tree_slots=6))
    text, tapped = list(range(10, 20)), as_sent(torch.randn(10, 288))
    session.reset(text)
    session.add(rows(tapped, range(9)))
    for paths in ([(1,), (2,), (3,)], [(4, 5), (4, 6), (7,)], [(1, 2, 3, 4)]):
        for path, found in zip(paths, session.propose(paths, 2), strict=True):
            assert [t for t, _ in found] == [t for t, _ in reference.candidates(tapped[:9], text, path, 2)]
    assert session.propose([(1, 2, 3, 4, 5, 6, 7)], 2) == [[]]  # deeper than there are slots


def test_it_starts_with_the_rows_that_there_are(tmp_path: Path) -> None:
    """A reused prefix has none, and a lost one cuts off what lay before it."""
    tensors = random_tensors(6)
    reference = Reference(tensors, embedding(), norm_before_residual=True)
    session = EagleSession(draft(save_speculators(tmp_path, tensors)))
    text, tapped = list(range(20, 60)), as_sent(torch.randn(40, 288))

    def matches(first: int, known: int) -> None:
        (found,) = session.propose([()], 3)
        expected = reference.candidates(tapped[first : known - 1], text[first:known], (), 3)
        assert [t for t, _ in found] == [t for t, _ in expected]

    session.reset(text[:20])
    assert session.propose([(), (1,)], 3) == [[], []]  # nothing has come
    session.add(rows(tapped, range(12, 18)))
    assert session.propose([()], 3) == [[]]  # nor has the last one
    session.add(rows(tapped, [18]))
    matches(12, 20)
    session.extend(text[20:25])
    session.add(rows(tapped, [19, 20, 22, 23]))  # 21 was lost
    matches(22, 25)
    session.extend(text[25:27])
    session.add({24: rows(torch.full((40, 288), torch.nan), [24])[24], 25: rows(tapped, [25])[25]})
    matches(25, 27)  # what is no number counts as lost
    session.add(rows(tapped, range(24)))  # once more, by a new session
    matches(25, 27)


def test_what_was_computed_is_known(tmp_path: Path) -> None:
    session = EagleSession(draft(save_speculators(tmp_path, random_tensors())))
    session.reset(list(range(10)))
    session.add(rows(torch.randn(12, 288), range(9)))
    assert session.known([()], 2) == [None]
    first, second = session.propose([(), (1,)], 3)
    assert session.known([(), (1,), (2,), (1, 2)], 3) == [first, second, None, None]
    assert session.known([()], 4) == [None]
    session.extend([1])
    assert session.known([(), (1,)], 2) == [None, None]


def test_deep_below_the_text_it_says_nothing_and_asks_for_no_call(tmp_path: Path) -> None:
    """A long match of the n-gram drafter would cost a pass for each of its tokens."""
    policy = DraftCachePolicy(max_own_levels=2)
    session = EagleSession(draft(save_speculators(tmp_path, random_tensors())), policy=policy)
    session.reset(list(range(10)))
    session.add(rows(torch.randn(12, 288), range(9)))
    deep, shallow = session.propose([(1, 2, 3), (1, 2)], 2)
    assert deep == []
    assert len(shallow) == 2
    assert session.known([(1, 2, 3), (1, 2)], 2) == [[], shallow]
    assert session.propose([(1, 2, 3)], 2) == [[]]


def test_beyond_its_context_there_are_no_drafts(tmp_path: Path) -> None:
    session = EagleSession(draft(save_speculators(tmp_path, random_tensors())), max_tokens=12)
    session.reset(list(range(10)))
    session.add(rows(torch.randn(12, 288), range(9)))
    assert session.propose([(1, 2)], 2)[0]
    assert session.propose([(1, 2, 3)], 2) == [[]]


@pytest.mark.parametrize(
    ("changes", "taps"),
    [
        ({}, (2, 4, 5)),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 6]}}, (2, 4, 7)),  # outputs of layers
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 4, 8]}}, (2, 4, 8)),  # what layers read
        ({"eagle_aux_hidden_state_layer_ids": [1, 3, 6]}, (1, 3, 6)),
    ],
)
def test_where_a_release_reads(changes: dict[str, Any], taps: tuple[int, ...], tmp_path: Path) -> None:
    folder = save_release(tmp_path, random_tensors(), **changes)
    assert drafter_kind(folder) == EAGLE
    assert load_eagle(folder, source().config).config.taps == taps


def test_the_default_format_is_8_bits_and_clients_share_a_drafter(tmp_path: Path) -> None:
    folder, target = save_release(tmp_path, random_tensors()), source()
    model = open_eagle(folder, target)
    assert model is open_eagle(folder, target)
    assert (model.taps.layers, model.taps.bits, model.taps.hidden_size) == ((2, 4, 5), 8, 96)
    session = EagleSession(model)
    session.reset([1, 2, 3])
    session.add(rows(torch.randn(3, 288), range(2)))
    assert len(session.propose([()], 4)[0]) == 4


def test_a_file_that_was_overwritten_is_read_again(tmp_path: Path) -> None:
    folder, target = save_release(tmp_path, random_tensors()), source()
    before = folder.stat().st_mtime_ns
    model = open_eagle(folder, target)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes())
    os.utime(weights, ns=(1, 1))
    assert folder.stat().st_mtime_ns == before  # it knows nothing of that
    assert open_eagle(folder, target) is not model


def test_a_head_of_no_numbers_is_a_sentence(tmp_path: Path) -> None:
    tensors = random_tensors()
    tensors["lm_head.weight"][7] = torch.nan
    session = EagleSession(draft(save_speculators(tmp_path, tensors)))
    session.reset([1, 2, 3])
    session.add(rows(torch.randn(3, 288), range(2)))
    with pytest.raises(DrafterFailed, match="not finite"):
        session.propose([()], 2)


WRONG: dict[str, tuple[dict[str, Any], type[ModelError] | type[DrafterFailed], str]] = {
    "another kind": ({"speculators_model_type": "mlp"}, UnsupportedModel, "'mlp' is not run"),
    "no kind": ({"speculators_model_type": {"a": []}}, UnsupportedModel, "is not run"),
    "no table": ({"transformer_layer_config": [1]}, CorruptModel, "not a table"),
    "two layers": ({"transformer_layer_config": {**LAYER, "num_hidden_layers": 2}}, UnsupportedModel, "2 layers"),
    "another vocabulary": ({"transformer_layer_config": {**LAYER, "vocab_size": 97}}, DrafterFailed, "97"),
    "another width": ({"target_hidden_size": 128}, DrafterFailed, "128"),
    "a huge width": ({"target_hidden_size": 1 << 40}, CorruptModel, "target_hidden_size"),
    "a huge vocabulary": ({"draft_vocab_size": 132}, DrafterFailed, "vocabulary"),
    "a wrong vocabulary": ({"draft_vocab_size": 61}, CorruptModel, "lm_head.weight has shape"),
    "no flag": ({"norm_before_residual": "yes"}, CorruptModel, "not true or false"),
    "too many taps": ({"eagle_aux_hidden_state_layer_ids": list(range(9))}, CorruptModel, "1 to 8"),
    "taps of nothing": ({"eagle_aux_hidden_state_layer_ids": []}, CorruptModel, "1 to 8"),
    "taps that are no numbers": ({"eagle_aux_hidden_state_layer_ids": [1, True, "a"]}, CorruptModel, "1 to 8"),
    "taps beyond the model": ({"eagle_aux_hidden_state_layer_ids": [2, 4, 9]}, DrafterFailed, "has 8"),
    "taps before it": ({"eagle_aux_hidden_state_layer_ids": [-1, 4, 8]}, DrafterFailed, "has 8"),
    "taps twice": ({"eagle_aux_hidden_state_layer_ids": [4, 4, 8]}, DrafterFailed, "has 8"),
    "two taps": ({"eagle_aux_hidden_state_layer_ids": [4, 8]}, CorruptModel, "fc.weight has shape"),
    "an unknown rotation": (
        {"transformer_layer_config": {**LAYER, "rope_scaling": {"rope_type": "spiral"}}}, UnsupportedModel, "rope",
    ),
    "another activation": ({"transformer_layer_config": {**LAYER, "hidden_act": "relu"}}, UnsupportedModel, "not run"),
    "a norm that is not there": ({"norm_before_fc": True}, CorruptModel, "input_norm.weight"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_a_config_that_does_not_fit_is_a_sentence(case: str, tmp_path: Path) -> None:
    changes, error, says = WRONG[case]
    folder = save_speculators(tmp_path, random_tensors(), **changes)
    with pytest.raises(error, match=says) as raised:
        load_eagle(folder, source().config)
    assert "\n" not in str(raised.value)


def test_tensors_that_do_not_fit_are_a_sentence(tmp_path: Path) -> None:
    good = random_tensors()
    wrong: dict[str, tuple[dict[str, torch.Tensor | None], str]] = {
        "missing": ({"norm.weight": None}, "norm.weight has shape none"),
        "queries of one width": ({"layers.0.self_attn.q_proj.weight": torch.zeros(96, 96)}, "q_proj.weight has shape"),
        "unknown": ({"layers.0.self_attn.q_norm.weight": torch.zeros(16)}, "no part of an EAGLE-3"),
        "no map": ({"d2t": None}, "no d2t"),
        "a map of floats": ({"d2t": torch.zeros(60)}, "not whole numbers"),
        "a map out of the vocabulary": ({"d2t": torch.full((60,), 100)}, "does not have"),
        "a map below it": ({"d2t": torch.full((60,), -100)}, "does not have"),
        "weights of whole numbers": ({"norm.weight": torch.zeros(96, dtype=torch.int32)}, "norm.weight is"),
    }
    for name, (changes, says) in wrong.items():
        tensors = {key: value for key, value in {**good, **changes}.items() if value is not None}
        with pytest.raises(ModelError, match=says):
            load_eagle(save_speculators(tmp_path / name, {**tensors}), source().config)


def test_folders_without_one(tmp_path: Path) -> None:
    assert drafter_kind(tmp_path) is None
    assert drafter_kind(tmp_path / "none") is None
    (tmp_path / "config.json").write_text("[]")
    assert drafter_kind(tmp_path) is None
    (tmp_path / "config.json").write_text(json.dumps({**LAYER, "draft_vocab_size": 60}))
    assert drafter_kind(tmp_path) == EAGLE
    with pytest.raises(ModelNotFound, match="0 safetensors files"):
        load_eagle(tmp_path, source().config)
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80")
    with pytest.raises(UnsupportedModel, match="pickle"):
        load_eagle(tmp_path, source().config)
    for name in ("a", "b"):
        save_file({"x": torch.zeros(1)}, tmp_path / f"{name}.safetensors")
    with pytest.raises(ModelNotFound, match="2 safetensors files"):
        load_eagle(tmp_path, source().config)
    with pytest.raises(ModelNotFound, match="no drafter"):
        open_eagle(tmp_path / "none", source())
