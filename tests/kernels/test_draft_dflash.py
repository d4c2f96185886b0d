"""DFlash: both kinds of folders, against a reference that caches nothing; and files that are none."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from dflash_reference import BLOCK, LAYER, Reference, random_tensors, save_release, save_speculators
from fake_hub import FakeHub, folder_files, use
from tiny_models import ModelTensors, tiny_model

from swarm.errors import CorruptModel, DrafterFailed, ModelError, ModelNotFound, UnsupportedModel
from swarm_kernels.draft.dflash import DFlashDraft, open_dflash
from swarm_kernels.draft.dflash_file import load_dflash
from swarm_kernels.draft.dflash_session import DFlashSession
from swarm_kernels.draft.folder import DFLASH, drafter_kind, fetched_folder
from swarm_kernels.draft.session import DraftCachePolicy
from swarm_kernels.draft.tapped import target_ends
from swarm_kernels.ops.base.layer_weights import plain_linear
from swarm_kernels.runtime.taps import decode, encode


def source(**changes: Any) -> ModelTensors:
    return ModelTensors(tiny_model("llama", num_hidden_layers=8, **changes))


def draft(folder: Path, target: ModelTensors) -> DFlashDraft:
    """In fp32."""
    return DFlashDraft(load_dflash(folder, target.config), *target_ends(target), plain_linear)


def rows(tapped: torch.Tensor, positions: Sequence[int]) -> dict[int, tuple[bytes, ...]]:
    """`tapped [n, taps * hidden]` as hops send it."""
    return {at: tuple(encode(part, 8) for part in tapped[at : at + 1].chunk(3, -1)) for at in positions}


def some_rows(count: int, seed: int = 2) -> torch.Tensor:
    """What is left of random numbers after 8 bits."""
    tapped = torch.randn(count, 3 * 96, generator=torch.Generator().manual_seed(seed))
    return torch.cat([decode(encode(part, 8), LAYER["hidden_size"], 8) for part in tapped.chunk(3, -1)], -1)


SLIDING = ["sliding_attention", "full_attention"]
LAYOUTS: dict[str, dict[str, Any]] = {
    "release": {},
    "biases": {"tensors": {"bias": True}},
    "a causal window": {
        "changes": {"layer_types": SLIDING, "sliding_window": 7}, "reference": {"kinds": ((7, True), (None, False))},
    },
    "all causal": {"changes": {"is_causal": True}, "reference": {"kinds": ((None, True), (None, True))}},
    "none causal": {
        "changes": {
            "layer_types": SLIDING,
            "sliding_window": 4,
            "dflash_config": {"mask_token_id": 130, "target_layer_ids": [1, 3, 5], "causal": False},
        },
        "reference": {"kinds": ((4, False), (None, False))},
    },
    "scales": {
        "changes": {"input_embedding_scale": 2.5, "output_multiplier": 0.5, "final_logit_softcapping": 3.0},
        "reference": {"scales": (2.5, 0.5, 3.0)},
    },
    "speculators": {"folders": True},
    "speculators with a window": {
        "folders": True,
        "changes": {"layer": {"layer_types": SLIDING, "sliding_window": 5}, "sliding_window_non_causal": True},
        "reference": {"kinds": ((5, False), (None, False))},
    },
    "a trimmed vocabulary": {"folders": True, "tensors": {"draft_vocab": 60}},
    "tied target": {"target": {"tie_word_embeddings": True}},
}  # fmt: skip


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_drafts_what_the_reference_drafts_token_by_token(layout: str, tmp_path: Path) -> None:
    options, target = LAYOUTS[layout], source(**LAYOUTS[layout].get("target", {}))
    tensors = random_tensors(3, **options.get("tensors", {}))
    save = save_speculators if options.get("folders") else save_release
    folder = save(tmp_path / "head", tensors, **options.get("changes", {}))
    ends = (end.float() for end in target_ends(target))
    reference, session = Reference(tensors, *ends, **options.get("reference", {})), DFlashSession(draft(folder, target))
    rng = random.Random(layout)
    text, tapped = [rng.randrange(131) for _ in range(60)], some_rows(60)
    session.reset(text[:20])
    session.add(rows(tapped, range(19)))
    width = 60 if options.get("tensors", {}).get("draft_vocab") else 131  # all of its logits
    known = 20
    while known < 55:
        expected = reference.candidates(tapped[: known - 1], range(known - 1), text[known - 1], known - 1, width)
        paths = [tuple(rng.randrange(131) for _ in range(depth)) for depth in (*range(BLOCK + 1), 2, 0)]
        for path, found in zip(paths, session.propose(paths, width), strict=True):
            wanted = expected[len(path)] if len(path) < BLOCK - 1 else []
            probs, by_token = dict(wanted), dict(found)
            assert by_token.keys() == probs.keys()
            assert [by_token[token] for token in probs] == pytest.approx(list(probs.values()), abs=2e-3)
            assert [token for token, _ in found[:3]] == [token for token, _ in wanted[:3]]
        step = rng.randint(1, 5)
        session.extend(text[known : known + step])
        session.add(rows(tapped, range(known - 1, known + step - 1)))
        known += step


def test_rows_in_any_order_and_gaps_between_them(tmp_path: Path) -> None:
    """A reused prefix has none, lost ones leave a gap, and that of the last token but one must have come."""
    tensors, target = random_tensors(6), source()
    reference = Reference(tensors, *(end.float() for end in target_ends(target)))
    session = DFlashSession(draft(save_release(tmp_path, tensors), target), policy=DraftCachePolicy(prefill_chunk=4))
    text, tapped = list(range(20, 60)), some_rows(40)

    def matches(positions: Sequence[int], known: int) -> None:
        expected = reference.candidates(tapped[list(positions)], positions, text[known - 1], known - 1, 3)
        found = session.propose([(), (1,), (1, 2)], 3)
        assert [[t for t, _ in place] for place in found] == [[t for t, _ in place] for place in expected[:3]]

    session.reset(text[:20])
    assert session.propose([(), (1,)], 3) == [[], []]  # nothing has come
    session.add(rows(tapped, range(9, 18)))
    assert session.propose([()], 3) == [[]]  # nor has the last one
    session.add(rows(tapped, [18]))
    matches(range(9, 19), 20)
    session.add(rows(tapped, range(5, 8)))  # late
    matches([*range(5, 8), *range(9, 19)], 20)
    session.extend(text[20:25])
    session.add({**rows(tapped, [19, 20, 22, 23]), 21: rows(torch.full((40, 288), torch.nan), [21])[21]})
    matches([*range(5, 8), *range(9, 21), 22, 23], 25)  # what is no number counts as lost
    session.add(rows(some_rows(40, seed=9), range(9, 21)))  # once more, and others: the first ones stay
    matches([*range(5, 8), *range(9, 21), 22, 23], 25)
    session.reset(text[:3])
    session.add(rows(tapped, [0, 1, 30, 31]))  # some beyond the text
    matches([0, 1], 3)


def test_a_block_that_was_filled_is_known(tmp_path: Path) -> None:
    session = DFlashSession(draft(save_release(tmp_path, random_tensors()), source()))
    session.reset(list(range(11)))
    assert session.known([()], 2) == [None]
    session.add(rows(some_rows(12), range(10)))
    assert session.known([()], 2) == [None]
    paths: list[tuple[int, ...]] = [(), (1, 2), (1,) * (BLOCK - 2), (1,) * BLOCK]
    proposed = session.propose(paths, 4)
    assert session.known(paths, 4) == proposed
    assert session.known(paths, 2) == [found[:2] for found in proposed]
    assert proposed[-1] == []  # beyond the block nothing is left to ask for
    assert session.known([()], 5) == [None]
    session.extend([3])
    assert session.known([()], 2) == [None]
    session.add(rows(some_rows(12), [10]))
    assert session.known([()], 2) == [None]


def test_beyond_its_context_there_are_no_drafts(tmp_path: Path) -> None:
    session = DFlashSession(draft(save_release(tmp_path, random_tensors()), source()), max_tokens=10 + BLOCK)
    session.reset(list(range(11)))
    session.add(rows(some_rows(12), range(11)))
    assert session.propose([(1, 2)], 2)[0]
    session.extend([5])
    assert session.propose([()], 2) == [[]]


@pytest.mark.parametrize(
    ("save", "changes", "taps"),
    [
        (save_release, {}, (2, 4, 6)),
        (save_release, {"dflash_config": {"mask_token_id": 3, "target_layer_ids": [0, 4, 6]}}, (1, 5, 7)),
        (save_release, {"dflash_config": {"mask_token_id": 3}, "target_layer_ids": [0, 1, 2]}, (1, 2, 3)),
        (save_speculators, {}, (2, 4, 6)),
        (save_speculators, {"aux_hidden_state_layer_ids": [0, 4, 8]}, (0, 4, 8)),
    ],
)
def test_where_a_drafter_reads(save: Any, changes: dict[str, Any], taps: tuple[int, ...], tmp_path: Path) -> None:
    folder = save(tmp_path, random_tensors(), **changes)
    assert drafter_kind(folder) == DFLASH
    assert load_dflash(folder, source().config).config.taps == taps


def test_without_taps_they_are_spread_as_in_the_first_releases(tmp_path: Path) -> None:
    folder = save_release(tmp_path, random_tensors(taps=2), dflash_config={"mask_token_id": 3})
    assert load_dflash(folder, source().config).config.taps == (2, 6)  # the outputs of 1 and 8 - 3


def test_the_default_format_is_8_bits_and_clients_share_a_drafter(tmp_path: Path) -> None:
    folder, target = save_release(tmp_path, random_tensors()), source()
    model = open_dflash(folder, target)
    assert model is open_dflash(folder, target)
    assert (model.kind, model.taps.layers, model.taps.bits) == ("dflash", (2, 4, 6), 8)
    session = model.new_session()
    session.reset([1, 2, 3])
    session.add(rows(some_rows(3), range(2)))
    assert [len(found) for found in session.propose([(), (1,)], 4)] == [4, 4]


@pytest.mark.parametrize("name", ["fc.weight", "layers.1.mlp.up_proj.weight", "norm.weight"])
def test_a_head_of_no_numbers_is_a_sentence(name: str, tmp_path: Path) -> None:
    tensors = random_tensors()
    tensors[name].flatten()[7] = torch.nan
    session = DFlashSession(draft(save_release(tmp_path, tensors), source()))
    session.reset([1, 2, 3])
    session.add(rows(some_rows(3), range(2)))
    with pytest.raises(DrafterFailed, match="not finite"):
        session.propose([()], 2)


def nested(**changes: Any) -> dict[str, Any]:
    return {"dflash_config": {"mask_token_id": 130, "target_layer_ids": [1, 3, 5], **changes}}


WRONG: dict[str, tuple[dict[str, Any], type[ModelError] | type[DrafterFailed], str]] = {
    "no table": ({"dflash_config": [1]}, CorruptModel, "not a table"),
    "another vocabulary": ({"vocab_size": 200}, DrafterFailed, "200"),
    "another width": ({"hidden_size": 128}, DrafterFailed, "128"),
    "a model of other depth": ({"num_target_layers": 36}, DrafterFailed, "36 layers, not of 8"),
    "a head width of nothing": ({"head_dim": 0}, CorruptModel, "head_dim"),
    "many layers": ({"num_hidden_layers": 1 << 30}, CorruptModel, "num_hidden_layers"),
    "more layers than tensors": ({"num_hidden_layers": 3, "layer_types": None}, CorruptModel, "has shape none"),
    "fewer layers": ({"num_hidden_layers": 1, "layer_types": None}, UnsupportedModel, "no part of a DFlash"),
    "unknown layers": ({"layer_types": ["linear_attention"] * 2}, CorruptModel, "layer_types"),
    "kinds of other layers": ({"layer_types": ["full_attention"]}, CorruptModel, "layer_types"),
    "no window": ({"layer_types": SLIDING}, CorruptModel, "sliding_window"),
    "no mask": ({"dflash_config": {"target_layer_ids": [1, 3, 5]}}, CorruptModel, "mask_token_id"),
    "a mask that is no token": (nested(mask_token_id=131), CorruptModel, "no token"),
    "a huge block": ({"block_size": 1 << 20}, CorruptModel, "block_size"),
    "a block of one": ({"block_size": 1}, CorruptModel, "nothing to draft"),
    "too many taps": (nested(target_layer_ids=list(range(9))), CorruptModel, "1 to 8"),
    "taps that are no numbers": (nested(target_layer_ids=[1, True, "a"]), CorruptModel, "1 to 8"),
    "taps that are a word": (nested(target_layer_ids="135"), CorruptModel, "1 to 8"),
    "the last layer's output": (nested(target_layer_ids=[1, 3, 7]), DrafterFailed, "has 7"),
    "taps before it": (nested(target_layer_ids=[-2, 3, 5]), DrafterFailed, "at layers"),
    "taps backwards": (nested(target_layer_ids=[5, 3, 1]), DrafterFailed, "at layers"),
    "two taps": (nested(target_layer_ids=[1, 3]), CorruptModel, "fc.weight has shape"),
    "DFlash 2": (nested(selector_rank=8), UnsupportedModel, "selector_rank"),
    "sinks": (nested(attention_sink_bias=True), UnsupportedModel, "attention_sink_bias"),
    "an unknown rotation": ({"rope_scaling": {"rope_type": "spiral"}}, UnsupportedModel, "rope"),
    "another activation": ({"hidden_act": "relu"}, UnsupportedModel, "not run"),
    "no flag": ({"is_causal": "yes"}, CorruptModel, "not true or false"),
    "a scale of nothing": ({"input_embedding_scale": -1}, CorruptModel, "not a positive number"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_a_config_that_does_not_fit_is_a_sentence(case: str, tmp_path: Path) -> None:
    changes, error, says = WRONG[case]
    folder = save_release(tmp_path, random_tensors(), **changes)
    with pytest.raises(error, match=says) as raised:
        load_dflash(folder, source().config)
    assert "\n" not in str(raised.value)


WRONG_FOLDERS: dict[str, tuple[dict[str, Any], type[ModelError] | type[DrafterFailed], str]] = {
    "no taps": ({"aux_hidden_state_layer_ids": None}, CorruptModel, "1 to 8"),
    "another projector": ({"projector_type": "domino"}, UnsupportedModel, "own projector"),
    "blocks that begin behind the text": ({"sample_from_anchor": True}, UnsupportedModel, "begin with the text"),
    "another width": ({"target_hidden_size": 64}, DrafterFailed, "another width"),
    "no table": ({"transformer_layer_config": 5}, CorruptModel, "not a table"),
    "a trimmed vocabulary without a head": ({"draft_vocab_size": 60}, CorruptModel, "no head or no d2t"),
    "a larger one": ({"draft_vocab_size": 160}, DrafterFailed, "vocabulary"),
}


@pytest.mark.parametrize("case", WRONG_FOLDERS)
def test_a_folder_of_speculators_that_does_not_fit_is_a_sentence(case: str, tmp_path: Path) -> None:
    changes, error, says = WRONG_FOLDERS[case]
    folder = save_speculators(tmp_path, random_tensors(), **changes)
    with pytest.raises(error, match=says) as raised:
        load_dflash(folder, source().config)
    assert "\n" not in str(raised.value)


def test_tensors_that_do_not_fit_are_a_sentence(tmp_path: Path) -> None:
    good = random_tensors(draft_vocab=60)
    wrong: dict[str, tuple[dict[str, torch.Tensor | None], str]] = {
        "missing": ({"norm.weight": None}, "norm.weight has shape none"),
        "queries of another width": ({"layers.1.self_attn.q_proj.weight": torch.zeros(96, 90)}, "q_proj.weight has"),
        "unknown": ({"candidate_selector.hidden_projection.weight": torch.zeros(4)}, "no part of a DFlash"),
        "no map": ({"d2t": None}, "no d2t"),
        "no head": ({"lm_head.weight": None, "d2t": good["d2t"]}, "no head"),
        "a map of floats": ({"d2t": torch.zeros(60)}, "not whole numbers"),
        "a map out of the vocabulary": ({"d2t": torch.full((60,), 100)}, "does not have"),
        "weights of whole numbers": ({"norm.weight": torch.zeros(96, dtype=torch.int32)}, "norm.weight is"),
        "a head of whole numbers": ({"lm_head.weight": torch.zeros(60, 96, dtype=torch.int8)}, "lm_head.weight is"),
    }
    for name, (changes, says) in wrong.items():
        tensors = {key: value for key, value in {**good, **changes}.items() if value is not None}
        folder = save_speculators(tmp_path / name, tensors, draft_vocab_size=60)
        with pytest.raises(ModelError, match=says):
            load_dflash(folder, source().config)


def test_folders_without_one(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**LAYER, "dflash_config": {}}))
    assert drafter_kind(tmp_path) == DFLASH
    with pytest.raises(CorruptModel, match="mask_token_id"):
        open_dflash(tmp_path, source())
    with pytest.raises(ModelNotFound, match="no drafter"):
        open_dflash(tmp_path / "none", source())


def test_a_drafter_on_a_hub_is_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save_release(tmp_path / "head", random_tensors())
    with FakeHub(folder_files(folder)).running() as hub:
        use(hub, tmp_path / "cache", monkeypatch)
        fetched = fetched_folder("org/name")
        assert fetched is not None
        assert load_dflash(fetched, source().config).config.taps == (2, 4, 6)
        hub.sent.clear()
        assert fetched_folder("org/name") == fetched
        assert not any(sent.path.endswith(".safetensors") for sent in hub.sent)
        hub.files["more.safetensors"] = b"x"
        hub.commit = "beef" + "0" * 36
        with pytest.raises(ModelNotFound, match="org/name has 2 safetensors files; a drafter is one"):
            fetched_folder("org/name")


def test_a_repository_that_is_no_drafter_is_not_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert fetched_folder("name") is None
    assert fetched_folder("../org/name") is None
    assert fetched_folder(str(tmp_path)) is None
    with FakeHub({"config.json": b'{"model_type": "llama"}', "model.safetensors": b"x" * 99}).running() as hub:
        use(hub, tmp_path / "cache", monkeypatch)
        assert fetched_folder("org/name") is None
        assert not any(sent.path.endswith(".safetensors") for sent in hub.sent)
        hub.files = {"model.safetensors": b"x"}
        hub.commit = "beef" + "0" * 36
        assert fetched_folder("org/name") is None
