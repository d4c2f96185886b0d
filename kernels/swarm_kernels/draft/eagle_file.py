"""The files of EAGLE-3 drafters (Li et al. 2025): folders of `speculators`, and releases of EAGLE and SpecForge.

Owns their configs and tensor names, and the reasons to refuse one that others do not share; `eagle` computes. Their
layouts are those of

- `speculators` (`speculators_model_type: eagle3`): the layer's config in `transformer_layer_config`, the residual after
  the norm unless `norm_before_residual` is false, taps in `eagle_aux_hidden_state_layer_ids`, as vLLM counts them;
- EAGLE and SpecForge: the layer's config itself with `draft_vocab_size`; the layer is called `midlayer`. Taps in
  `eagle_config`: those that begin with 1 name the layers whose output is read, the others are as vLLM counts them.
  (Both are in use, and SGLang tells them apart in the same way.)

Without taps in the config they are 2, the middle, and the third last. `d2t [draft vocabulary]` says how far the
target's token id is above the draft's; `t2d` says the same the other way round and is only checked for its size.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from swarm.errors import CorruptModel, UnsupportedModel
from swarm_kernels.draft.folder import (
    EAGLE,
    Shapes,
    check_target,
    layer_fields,
    read_tensors,
    table,
    tap_list,
    target_ids,
)
from swarm_kernels.models.config import ModelConfig
from swarm_kernels.models.config_reader import ConfigReader, brief
from swarm_kernels.models.hf_config import model_config
from swarm_kernels.models.safetensors import read_json

LAYER = "layers.0."
_ATTENTION = LAYER + "self_attn."
_IDS = "eagle_aux_hidden_state_layer_ids"


@dataclass(frozen=True, slots=True)
class EagleConfig:
    """`layer`: of its one layer, whose queries, keys and values read `2 * hidden_size` numbers. `taps`: ascending."""

    layer: ModelConfig
    taps: tuple[int, ...]
    target_hidden_size: int
    draft_vocab_size: int
    norm_before_residual: bool  # the residual is what the norm gives, not what it reads
    norm_before_fc: bool


@dataclass(frozen=True, slots=True, eq=False)
class EagleWeights:
    """`tensors`: by the names of `speculators`. `token_ids [draft_vocab_size]`: the target's, of the draft's tokens."""

    config: EagleConfig
    tensors: Mapping[str, torch.Tensor]
    token_ids: torch.Tensor


def load_eagle(folder: Path, target: ModelConfig) -> EagleWeights:
    """Raises ModelNotFound, CorruptModel, UnsupportedModel, and DrafterFailed for one of another model."""
    config = read_config(read_json(folder / "config.json"), target, folder)
    tensors = read_tensors(folder, *_shapes(config), {"t2d"}, {"midlayer.": LAYER}, "an EAGLE-3")
    offsets = tensors.pop("d2t", None)
    if offsets is None and config.draft_vocab_size != config.layer.vocab_size:
        raise CorruptModel(f"{folder} has no d2t, so that nobody knows what its tokens mean")
    return EagleWeights(config, tensors, target_ids(offsets, config.draft_vocab_size, target, folder))


def read_config(hf: Mapping[str, Any], target: ModelConfig, folder: Path) -> EagleConfig:
    """Raises as `load_eagle`."""
    where = str(folder / "config.json")
    kind = hf.get("speculators_model_type", EAGLE)
    if kind != EAGLE:
        raise UnsupportedModel(
            f"{where}: a drafter of type {brief(kind)} is not run here; use one of type eagle3 or dflash"
        )
    fields, inner = layer_fields(hf, where)
    if inner.get("num_hidden_layers", 1) != 1:
        raise UnsupportedModel(f"{where}: a drafter of {brief(inner['num_hidden_layers'])} layers is not run here")
    layer = model_config({**fields, "model_type": "llama", "num_hidden_layers": 1}, where=where)
    if not layer.is_llama_like:
        raise UnsupportedModel(f"{where}: with this {layer.beyond_fast_path or 'layer'} the drafter is not run here")
    read = ConfigReader({**hf, "model_type": EAGLE}, where)
    config = EagleConfig(
        layer,
        _taps(hf, target.num_layers, where),
        read.size("target_hidden_size", layer.hidden_size),
        read.size("draft_vocab_size", layer.vocab_size),
        read.flag("norm_before_residual", "speculators_model_type" in hf),
        read.flag("norm_before_fc", False),
    )
    check_target(config.target_hidden_size, layer.vocab_size, config.draft_vocab_size, target, folder)
    return config


def _taps(hf: Mapping[str, Any], num_layers: int, where: str) -> tuple[int, ...]:
    nested, given = table(hf, "eagle_config", where).get(_IDS), hf.get(_IDS)
    if given is None and nested is None:
        given = [2, num_layers // 2, num_layers - 3]
    outputs = given is None and isinstance(nested, list) and nested[:1] == [1]
    return tap_list(nested if given is None else given, int(outputs), num_layers, where)


def _shapes(config: EagleConfig) -> tuple[Shapes, Shapes]:
    """-> the tensors that must be there, and those that may."""
    layer, hidden = config.layer, config.layer.hidden_size
    fused = len(config.taps) * config.target_hidden_size
    queries, keys = layer.num_heads * layer.head_dim, layer.num_kv_heads * layer.head_dim
    shapes: Shapes = {
        "fc.weight": (hidden, fused),
        "norm.weight": (hidden,),
        "lm_head.weight": (config.draft_vocab_size, hidden),
        **{
            LAYER + f"{norm}.weight": (hidden,)
            for norm in ("input_layernorm", "hidden_norm", "post_attention_layernorm")
        },
        _ATTENTION + "q_proj.weight": (queries, 2 * hidden),
        _ATTENTION + "k_proj.weight": (keys, 2 * hidden),
        _ATTENTION + "v_proj.weight": (keys, 2 * hidden),
        _ATTENTION + "o_proj.weight": (hidden, queries),
        LAYER + "mlp.gate_proj.weight": (layer.intermediate_size, hidden),
        LAYER + "mlp.up_proj.weight": (layer.intermediate_size, hidden),
        LAYER + "mlp.down_proj.weight": (hidden, layer.intermediate_size),
    }
    biased = {"self_attn.": layer.qkv_bias, "mlp.": layer.mlp_bias}
    for name in [name for name in shapes if any(part in name and on for part, on in biased.items())]:
        shapes[name.removesuffix("weight") + "bias"] = shapes[name][:1]
    if config.norm_before_fc:
        shapes["input_norm.weight"] = (fused,)
    vocab = layer.vocab_size
    return shapes, {"d2t": (config.draft_vocab_size,), "t2d": (vocab,), "embed_tokens.weight": (vocab, hidden)}
