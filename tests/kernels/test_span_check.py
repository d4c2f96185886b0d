"""No model is served whose span differs from transformers: the zoo, odd configs, and the check at load itself."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from tiny_models import Chain, ModelTensors, hf_logits, on_transformers_layers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from zoo.compare import compare
from zoo.families import FAMILIES
from zoo.shrink import tiny_config
from zoo.weights import random_model

from swarm.errors import UnsupportedModel
from swarm.types import LayerSpan
from swarm_kernels.kvcache.cache import StepRequest
from swarm_kernels.models.config import FAST_PATH_ARCHITECTURES
from swarm_kernels.models.field_check import known_fields
from swarm_kernels.models.hf_config import model_config
from swarm_kernels.runtime import hf_attention
from swarm_kernels.runtime.hf_attention import Visibility, visibility_of
from swarm_kernels.runtime.hf_span import HfSpan
from swarm_kernels.runtime.load import load_span

SERVED = [
    "llama, partial rotary",
    "cohere2",
    "qwen2_moe",
    "phimoe",
    "gpt_oss",
    "llama4",
    "mimo_v2",
    "glm_moe_dsa",
    "gemma4",
]


@pytest.mark.parametrize("name", SERVED)
def test_layers_trees_and_logits_are_transformers(name: str) -> None:
    kind, changes = FAMILIES[name]
    verdict = compare(tiny_config(kind, **changes), thorough=False, general=True)
    assert verdict.word == "equal", (verdict.refused, verdict.wrong)
    assert not verdict.fast


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen2_moe", "gpt_oss", "deepseek_v32", "llama4"])
def test_generations_survive_cuts_kills_and_transfers(name: str) -> None:
    kind, changes = FAMILIES[name]
    verdict = compare(tiny_config(kind, **changes), thorough=True, general=True)
    assert verdict.word == "equal", (verdict.refused, verdict.wrong)


STATEFUL = [
    "qwen3_next", "qwen3_5", "qwen3_5_moe", "minimax", "kimi_linear", "granitemoehybrid", "nemotron_h", "lfm2",
    "lfm2_moe", "jamba", "bamba",
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", STATEFUL)
def test_layers_with_a_recurrent_state(name: str) -> None:
    kind, changes = FAMILIES[name]
    verdict = compare(tiny_config(kind, **changes), thorough=False)
    assert verdict.word == "equal", (verdict.refused, verdict.wrong)


def test_a_state_of_another_kind_is_refused_in_one_sentence() -> None:
    refused = compare(tiny_config("recurrent_gemma"), thorough=False).refused
    assert "attends once through" in refused
    assert "\n" not in refused


def test_encoders_are_refused_although_transformers_lists_them() -> None:
    assert "its attention mask is neither causal" in compare(tiny_config("bert"), thorough=False).refused


# --- fields ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", sorted(FAST_PATH_ARCHITECTURES))
def test_every_field_of_a_fast_family_is_known(kind: str) -> None:
    """A new version of transformers may add one: then decide whether it changes an answer."""
    assert {field.name for field in dataclasses.fields(CONFIG_MAPPING[kind])} - _inherited() <= known_fields(kind)


def _inherited() -> set[str]:
    from transformers import PretrainedConfig

    return {field.name for field in dataclasses.fields(PretrainedConfig)}


LLAMA = tiny_config("llama").to_dict()


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "rope_parameters"),
        ({"rope_parameters": {"rope_type": "proportional", "rope_theta": 1e4}}, "rope_parameters.rope_type"),
        ({"hidden_act": "relu"}, "hidden_act"),
        ({"sliding_window": 16}, "sliding_window"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 2.0, "odd": 1}}, "rope_parameters.odd"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_scaling"),
        ({"model_type": "qwen3", "layer_types": ["sliding_attention"] * 4}, "layer_types"),
        ({"model_type": "qwen2", "layer_types": "all"}, "layer_types"),
    ],
)  # fmt: skip
def test_what_the_fast_path_does_not_compute_goes_to_transformers(changes: dict[str, Any], field: str) -> None:
    config = model_config({**LLAMA, **changes})
    assert config.beyond_fast_path.startswith(field)
    assert not config.has_fast_path


@pytest.mark.parametrize(
    "changes",
    [
        {"logits_scaling": 8.0},
        {"attn_logit_softcapping": 30.0},
        {"residual_multiplier": 0.2},
        {"num_local_experts": 8},
        {"no_rope_layers": [1, 1, 1, 0]},
        {"alibi": True},
        {"logits_scaling": "x" * 100_000},
    ],
)
def test_fields_that_a_family_passes_over_are_refused_by_name(changes: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedModel, match=next(iter(changes))) as caught:
        model_config({**LLAMA, **changes})
    assert len(str(caught.value)) < 200
    model_config({**LLAMA, **dict.fromkeys(changes)})
    olmo = tiny_config("olmo")
    source = ModelTensors(random_model(olmo), {**olmo.to_dict(), **changes})
    with pytest.raises(UnsupportedModel, match=next(iter(changes))):
        load_span(source, LayerSpan(0, 1), torch.float32)


def test_neutral_values_and_words_without_meaning_pass() -> None:
    assert model_config({**LLAMA, "logits_scaling": 1.0, "alibi": False, "num_experts": 0, "unsloth_fixed": True})
    assert model_config({**LLAMA, "partial_rotary_factor": 1.0}).has_fast_path


def test_rope_scaling_goes_before_rope_parameters_as_in_transformers() -> None:
    rope = {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}
    config = model_config({**LLAMA, "rope_scaling": {**rope, "factor": 3.0}, "rope_parameters": rope})
    assert config.beyond_fast_path == "rope_scaling"


# --- masks ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 7, 24, 64, 99])
def test_masks_are_recognised_by_what_they_answer(size: int) -> None:
    assert visibility_of(lambda b, h, q, k: (k <= q) & (k > q - size), 100) == Visibility(window=size)
    assert visibility_of(lambda b, h, q, k: k <= q, 100) == Visibility()
    if size > 1:
        assert visibility_of(lambda b, h, q, k: (k <= q) & (k // size == q // size), 100) == Visibility(chunk=size)


@pytest.mark.parametrize(
    "mask",
    [
        lambda b, h, q, k: k <= q + 1,
        lambda b, h, q, k: k < q,
        lambda b, h, q, k: (k <= q) & (k % 2 == 0),
        lambda b, h, q, k: (k <= q) & ((k < 4) | (k > q - 8)),
        lambda b, h, q, k: (k <= q) & (k > q - 8 - q // 50),
        lambda b, h, q, k: k.no_such_thing,
    ],
)
def test_other_masks_are_refused(mask: Any) -> None:
    with pytest.raises(UnsupportedModel, match="its attention mask"):
        visibility_of(mask, 100)


@pytest.mark.parametrize("kind", ["gemma2", "llama4_text", "gpt_oss"])
def test_a_tree_longer_than_the_window(kind: str) -> None:
    """The first tokens of a path drop out of sight while it is still a tree."""
    name = "attention_chunk_size" if kind == "llama4_text" else "sliding_window"
    model = random_model(tiny_config(kind, **{name: 6}))
    chain = Chain(ModelTensors(model), (2,))
    chain.open(b"a")
    words = list(range(3, 30))
    chain.run([StepRequest(b"a", 0, 8)], words[:8])
    chain.run([StepRequest(b"a", 8, 0, tuple(range(-1, 8)), tuple(range(9)))], words[8:17])
    rest = chain.run([StepRequest(b"a", 8, 0, tuple(range(8, 18)), tuple(range(9, 19)))], words[17:])
    expected = hf_logits(model, words)[17:]
    assert torch.allclose(rest, expected, atol=1e-4 * float(expected.abs().max()))


# --- the check at load ------------------------------------------------------------------------------------------------


def _source(kind: str, **changes: Any) -> ModelTensors:
    return on_transformers_layers(ModelTensors(random_model(tiny_config(kind, **changes))))


def test_a_window_that_is_not_kept_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hf_attention, "_attend", _attend_everything(hf_attention._attend))
    load_span(_source("olmo"), LayerSpan(0, 4), torch.float32)
    kinds = {"layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"]}
    with pytest.raises(UnsupportedModel, match="layer 0 of this model of type cohere2 would not compute"):
        load_span(_source("cohere2", **kinds), LayerSpan(0, 4), torch.float32)
    with pytest.raises(UnsupportedModel, match="layer 3 of this model"):  # its only layer with a window
        load_span(_source("cohere2", **kinds), LayerSpan(2, 4), torch.float32)


def _attend_everything(attend: Any) -> Any:
    def without_masks(q: Any, k: Any, v: Any, batch: Any, *others: Any) -> Any:
        return attend(q, k, v, dataclasses.replace(batch, visibility=(Visibility(),) * 4), *others)

    return without_masks


def test_sinks_that_are_left_out_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    attend = hf_attention._attend
    monkeypatch.setattr(hf_attention, "_attend", lambda *args: attend(*args[:-1], None))
    with pytest.raises(UnsupportedModel, match="would not compute here"):
        load_span(_source("gpt_oss"), LayerSpan(1, 2), torch.float32)


def test_layers_that_look_at_other_rows_or_at_the_embeddings_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.olmo.modeling_olmo import OlmoMLP, OlmoModel

    source, mlp, forward = _source("olmo"), OlmoMLP.forward, OlmoModel.forward
    with monkeypatch.context() as patched:
        patched.setattr(OlmoMLP, "forward", lambda self, x: mlp(self, x + x.roll(1, 1)))
        with pytest.raises(UnsupportedModel, match="its output by"):
            load_span(source, LayerSpan(1, 3), torch.float32)
    seen: list[torch.Tensor] = []

    def remember(self: Any, *args: Any, **kwargs: Any) -> Any:
        seen[:] = [kwargs["inputs_embeds"]]
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(OlmoModel, "forward", remember)
    monkeypatch.setattr(OlmoMLP, "forward", lambda self, x: mlp(self, x) + seen[0])
    with pytest.raises(UnsupportedModel, match="its output by"):
        load_span(source, LayerSpan(1, 3), torch.float32)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["cohere2", "qwen3_moe", "gpt_oss", "deepseek_v3", "llama4_text"])
def test_the_check_passes_in_half_precision(kind: str, dtype: torch.dtype) -> None:
    assert isinstance(load_span(_source(kind), LayerSpan(0, 4), dtype), HfSpan)
