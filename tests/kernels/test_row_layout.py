"""The width of rows at each cut: against what transformers' modules hand on, and configs that lie."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tiny_models import ModelTensors, hf_logits
from zoo.compare import Pieces, text
from zoo.families import FAMILIES
from zoo.shrink import LAYERS, VOCABULARY, tiny_config
from zoo.weights import random_model

from swarm.errors import CorruptModel, DrafterFailed, InvalidRequest, UnsupportedModel
from swarm.types import LayerSpan
from swarm_kernels.audit.row_distance import wire_distance
from swarm_kernels.draft.folder import check_target
from swarm_kernels.kvcache.cache import StepRequest
from swarm_kernels.kvcache.layer_transfer import LayerTransfer
from swarm_kernels.models.hf_config import model_config
from swarm_kernels.models.layers import tensors_of_span
from swarm_kernels.models.row_layout import RowLayout
from swarm_kernels.models.safetensors import SafetensorsSource
from swarm_kernels.runtime.hf_span import HfSpan
from swarm_kernels.runtime.load import load_span

GEMMA_3N, GEMMA_4 = "gemma3n, shared keys", "gemma4, shared keys"
TABLE = "model.embed_tokens_per_layer.weight"


def layout_of(name: str, **changes: Any) -> RowLayout:
    kind, own = FAMILIES[name]
    return model_config(tiny_config(kind, **{**own, **changes}).to_dict()).rows


def test_most_rows_are_hidden_states() -> None:
    for name in ("llama", "gemma3", "gemma4", "gpt_oss"):
        layout = layout_of(name)
        assert layout.is_plain
        assert {layout.width(cut) for cut in range(LAYERS + 1)} == {64} == {layout.widest}
        assert layout.parts(2) == (64,)


def test_rows_hold_what_layers_behind_the_cut_need() -> None:
    """Of 4 layers with inputs of 16 numbers each, the last two take over the keys of the first two: of 2 heads of 16
    numbers in layers with a window, of one of 24 in Gemma 4's others."""
    three_n, four = layout_of(GEMMA_3N), layout_of(GEMMA_4)
    assert [three_n.width(cut) for cut in range(5)] == [4 * 64 + 64, 256 + 48 + 64, 256 + 32 + 128, 256 + 16 + 64, 256]
    assert [four.width(cut) for cut in range(5)] == [64 + 64, 64 + 48 + 64, 64 + 32 + 64 + 96, 64 + 16 + 96, 64]
    for layout in (three_n, four):
        assert layout.widest == layout.width(2)
        assert all(sum(layout.parts(cut)) == layout.width(cut) for cut in range(5))
    assert four.kv_elements == 2 * 2 * 24  # there is room for the keys of any layer
    heads = layout_of(GEMMA_4, attention_k_eq_v=True, num_global_key_value_heads=1)
    assert heads.kv_shapes == ((2, 16), (1, 24)) * 2


def test_a_config_without_sizes_of_layers_has_those_of_transformers() -> None:
    config = tiny_config("gemma4_text", **FAMILIES[GEMMA_4][1])
    plain = {key: value for key, value in config.to_dict().items() if key != "per_layer_config"}
    assert model_config({**plain, "global_head_dim": 24}).rows == model_config(config.to_dict()).rows


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("gemma3n_text", {"layer_types": ["sliding_attention"]}),
        ("gemma3n_text", {"layer_types": [["full_attention"]] * 4}),
        ("gemma3n_text", {"layer_types": ["full_attention", "full_attention", "sliding_attention", "full_attention"],
                          "num_kv_shared_layers": 2}),
        ("gemma3n_text", {"num_kv_shared_layers": 4}),
        ("gemma3n_text", {"num_kv_shared_layers": -1}),
        ("gemma3n_text", {"num_kv_shared_layers": "2"}),
        ("gemma3n_text", {"altup_num_inputs": 1 << 20}),
        ("gemma3n_text", {"altup_num_inputs": True}),
        ("gemma4_text", {"hidden_size_per_layer_input": 1 << 40}),
        ("gemma4_text", {"hidden_size_per_layer_input": False}),
        ("gemma4_text", {"per_layer_config": [1, 2]}),
        ("gemma4_text", {"per_layer_config": {"1": 7}}),
        ("gemma4_text", {"per_layer_config": {"1": {"head_dim": -1}}}),
    ],
)  # fmt: skip
def test_a_config_that_cannot_be_is_refused(kind: str, changes: dict[str, Any]) -> None:
    config = {**tiny_config(kind).to_dict(), **changes}
    with pytest.raises(CorruptModel):
        model_config(config)


def test_keys_are_not_shared_without_inputs_of_layers() -> None:
    config = {**tiny_config("gemma4_text").to_dict(), "num_kv_shared_layers": 2}
    with pytest.raises(UnsupportedModel, match="no inputs of their own"):
        model_config(config)


def test_a_difference_is_found_whatever_is_handed_on_beside_it() -> None:
    layout = layout_of(GEMMA_4)
    row = torch.randn(layout.width(2), generator=torch.Generator().manual_seed(1))
    row[layout.states : layout.states + 32] *= 1e4
    other = row.clone()
    other[: layout.states] *= 1.5
    ours, theirs = (part.numpy().tobytes() for part in (row, other))
    assert wire_distance(ours, theirs, "fp32", (layout.width(2),)) < 0.1
    assert wire_distance(ours, theirs, "fp32", layout.parts(2)) == pytest.approx(0.5, rel=1e-3)
    assert wire_distance(ours, theirs[4:], "fp32", layout.parts(2)) == float("inf")
    assert wire_distance(ours, theirs, "fp32", layout.parts(1)) == float("inf")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("gemma")
    kind, changes = FAMILIES[GEMMA_3N]
    model = random_model(tiny_config(kind, **changes))
    save_file(
        {k: v.clone() for k, v in model.state_dict().items() if k != "lm_head.weight"}, path / "model.safetensors"
    )
    (path / "config.json").write_text(json.dumps(model.config.to_dict()), encoding="utf-8")
    return path


@pytest.mark.filterwarnings("ignore")
def test_only_the_first_span_reads_the_table_and_only_rows_of_it(folder: Path) -> None:
    source = SafetensorsSource(folder)
    file = source.files[0]
    table, row = source.nbytes(TABLE), source.nbytes(TABLE) // VOCABULARY
    for layers in (LayerSpan(0, 2), LayerSpan(2, 4)):
        assert (TABLE in set(tensors_of_span(source, layers))) == (layers.start == 0)
        before = file.bytes_read
        span = load_span(source, layers, torch.float32)
        stored = sum(source.nbytes(name) for name in tensors_of_span(source, layers) if name != TABLE)
        assert file.bytes_read - before <= stored + 8 * row  # the check embeds a few
        if span.is_first:
            before = file.bytes_read
            span.embed([5, 9, 5, 200])
            assert file.bytes_read - before == 3 * row
    assert table > 100 * row
    source.close()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", [GEMMA_3N, GEMMA_4])
def test_the_text_decoder_of_a_multimodal_checkpoint_is_the_same_model(name: str, tmp_path: Path) -> None:
    """As released: the decoder's tensors under `model.language_model`, beside those of other parts."""
    kind, changes = FAMILIES[name]
    model = random_model(tiny_config(kind, **changes))
    other = {"model.vision_tower.embed.weight": torch.zeros(3, 3)}
    for folder, prefix, more in (("text", "model.", {}), ("whole", "model.language_model.", other)):
        own = {key: tensor.clone() for key, tensor in model.state_dict().items() if key != "lm_head.weight"}
        tensors = {key.replace("model.", prefix, 1): tensor for key, tensor in own.items()} | more
        (tmp_path / folder).mkdir()
        save_file(tensors, tmp_path / folder / "model.safetensors")
    config = model.config.to_dict()
    whole = {
        "model_type": kind.removesuffix("_text"),
        "text_config": config,
        "vision_config": {},
        "eos_token_id": [7, 9],
    }
    (tmp_path / "text" / "config.json").write_text(json.dumps(config), encoding="utf-8")
    (tmp_path / "whole" / "config.json").write_text(json.dumps(whole), encoding="utf-8")
    alone, found = SafetensorsSource(tmp_path / "text"), SafetensorsSource(tmp_path / "whole")
    assert found.names() == alone.names()
    assert found.config.rows == alone.config.rows
    words = text(20, 2, VOCABULARY)
    ours, theirs = (_logits(source, words) for source in (found, alone))
    assert torch.equal(ours, theirs)
    assert (ours - hf_logits(model, words)).abs().max() < 1e-3
    alone.close()
    found.close()


def _logits(source: SafetensorsSource, words: list[int]) -> torch.Tensor:
    return Pieces(source).chain((1, 3)).run(StepRequest(b"a", 0, len(words)), words)


@pytest.mark.filterwarnings("ignore")
def test_hops_hold_and_hand_over_shared_keys_once() -> None:
    kind, changes = FAMILIES[GEMMA_3N]
    source = ModelTensors(random_model(tiny_config(kind, **changes)))
    whole = load_span(source, LayerSpan(0, 4), torch.float32)
    assert isinstance(whole, HfSpan)
    cache = whole.new_cache(64)
    assert cache.shape.layers == 2
    assert LayerTransfer(cache, whole.layers).distinct(whole.layers) == [0, 1]
    end = load_span(source, LayerSpan(2, 4), torch.float32)
    later = end.new_cache(64)
    assert LayerTransfer(later, end.layers).distinct(end.layers) == [2, 3]
    words = text(30, 2, VOCABULARY)
    for each in (cache, later):
        each.open(b"a", 40)
    plan = cache.schedule([StepRequest(b"a", 0, 30)])
    rows = whole.forward(whole.embed(words), plan, cache, 0, 2)
    end.forward(rows, later.schedule([StepRequest(b"a", 0, 30)]), later)
    for layer in (2, 3):  # what the sharing layers of one hop hold is what the layers they share from hold at another
        ours = LayerTransfer(cache, whole.layers).reader(b"a", 30)(layer, 0, 2)
        assert ours == LayerTransfer(later, end.layers).reader(b"a", 30)(layer, 0, 2)


@pytest.mark.filterwarnings("ignore")
def test_what_cannot_be_combined_is_refused() -> None:
    kind, changes = FAMILIES[GEMMA_3N]
    source = ModelTensors(random_model(tiny_config(kind, **changes)))
    span = load_span(source, LayerSpan(1, 3), torch.float32)
    cache = span.new_cache(16)
    cache.open(b"a", 16)
    with pytest.raises(InvalidRequest, match="rows before layer 1 have"):
        span.forward(torch.zeros(1, 64), cache.schedule([StepRequest(b"a", 0, 1)]), cache)
    with pytest.raises(DrafterFailed, match="4 hidden states a token"):
        check_target(64, VOCABULARY, VOCABULARY, source.config, Path("drafter"))
