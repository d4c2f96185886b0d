"""The files of DFlash drafters (Chen et al. 2026): z-lab's releases, and folders of `speculators`.

Owns their configs and tensor names, and the reasons to refuse one that others do not share; `dflash` computes. Layouts:

- z-lab: Qwen3's config of its layers itself, with `dflash_config`: `target_layer_ids`, the layers whose output is read,
  and `mask_token_id`; `block_size` is beside it or in it. Neither embedding nor head: those are the target's;
- `speculators` (`speculators_model_type: dflash`): the layers' config in `transformer_layer_config`, taps in
  `aux_hidden_state_layer_ids`, as vLLM counts them; where its vocabulary is trimmed, a head of its own and `d2t`.

A layer of kind `sliding_attention` is causal, and the others see the whole block, unless `is_causal` or
`dflash_config.causal` (z-lab) or `sliding_window_non_causal` (`speculators`) say otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from swarm.errors import CorruptModel, DrafterFailed, UnsupportedModel
from swarm_kernels.draft.folder import Shapes, check_target, layer_fields, read_tensors, table, tap_list, target_ids
from swarm_kernels.models.config import ModelConfig
from swarm_kernels.models.config_reader import ConfigReader, brief
from swarm_kernels.models.hf_config import model_config
from swarm_kernels.models.layer_kinds import FULL, SLIDING
from swarm_kernels.models.safetensors import read_json

MAX_BLOCK = 64  # tokens; those of releases have 8 to 16
MAX_DRAFT_LAYERS = 32  # those of releases have 5 to 8
_BEYOND = ("selector_rank", "conv_kernel_size", "fc_layernorm", "use_swa", "attention_sink_bias", "markov_rank")
"""Fields of DFlash 2 and other descendants, with which the layers below do not compute."""


@dataclass(frozen=True, slots=True)
class BlockLayer:
    """What a row sees: of the text what lies less than `window` before it, of the block all rows, or those up to it."""

    window: int | None
    causal: bool


@dataclass(frozen=True, slots=True)
class DFlashConfig:
    """`layer`: the sizes of each of its `layers`. `taps`: ascending. `block_size`: the last token of the text and the
    masks behind it."""

    layer: ModelConfig
    layers: tuple[BlockLayer, ...]
    taps: tuple[int, ...]
    block_size: int
    mask_token: int
    draft_vocab_size: int
    embedding_scale: float
    logit_scale: float
    logit_softcap: float | None


@dataclass(frozen=True, slots=True, eq=False)
class DFlashWeights:
    """`token_ids [draft_vocab_size]`: the target's, of the draft's tokens."""

    config: DFlashConfig
    tensors: Mapping[str, torch.Tensor]
    token_ids: torch.Tensor


def load_dflash(folder: Path, target: ModelConfig) -> DFlashWeights:
    """Raises ModelNotFound, CorruptModel, UnsupportedModel, and DrafterFailed for one of another model."""
    config = read_config(read_json(folder / "config.json"), target, folder)
    unread = {"t2d", "verifier_norm.weight", "verifier_lm_head.weight"}
    tensors = read_tensors(folder, *_shapes(config), unread, {}, "a DFlash")
    offsets = tensors.pop("d2t", None)
    trimmed = config.draft_vocab_size != config.layer.vocab_size
    if trimmed and (offsets is None or "lm_head.weight" not in tensors):
        raise CorruptModel(f"{folder} has a trimmed vocabulary, but no head or no d2t that says what its tokens mean")
    return DFlashWeights(config, tensors, target_ids(offsets, config.draft_vocab_size, target, folder))


def read_config(hf: Mapping[str, Any], target: ModelConfig, folder: Path) -> DFlashConfig:
    """Raises as `load_dflash`."""
    where = str(folder / "config.json")
    fields, inner = layer_fields(hf, where)
    released, folders = table(hf, "dflash_config", where), "speculators_model_type" in hf
    if beyond := next((key for key in _BEYOND if released.get(key, hf.get(key)) not in (None, False)), None):
        raise UnsupportedModel(f"{where}: with {beyond} this is a descendant of DFlash that is not run here")
    merged = {**hf, **{key: value for key, value in released.items() if value is not None}}
    read = ConfigReader({**merged, "model_type": "dflash", "num_hidden_layers": inner.get("num_hidden_layers")}, where)
    if folders and (read.word("projector_type", "dflash") != "dflash" or read.flag("sample_from_anchor", False)):
        raise UnsupportedModel(f"{where}: only DFlash's own projector and blocks that begin with the text are run here")
    layers = read.size("num_hidden_layers", most=MAX_DRAFT_LAYERS)
    layer = model_config({**fields, "model_type": "qwen3", "num_hidden_layers": layers}, where=where)
    if not layer.is_llama_like or layer.hidden_act != "silu":
        raise UnsupportedModel(f"{where}: with this {layer.beyond_fast_path or 'layer'} the drafter is not run here")
    softcap = read.get("final_logit_softcapping") or None  # 0: none
    config = DFlashConfig(
        layer,
        _layers(read, inner, layers, where, folders=folders),
        _taps(merged, target.num_layers, layers, where, folders=folders),
        read.size("block_size", 8 if folders else 16, most=MAX_BLOCK),
        _mask_token(merged, layer.vocab_size, where),
        read.size("draft_vocab_size", layer.vocab_size),
        read.number("input_embedding_scale", 1.0),
        read.number("output_multiplier", 1.0),
        None if softcap is None else read.number("final_logit_softcapping", 1.0),
    )
    if config.block_size < 2 or config.block_size >= layer.context_length:
        raise CorruptModel(f"{where}: a block of {config.block_size} tokens leaves nothing to draft")
    if read.size("target_hidden_size", layer.hidden_size) != layer.hidden_size:
        raise DrafterFailed(f"{where}: the drafter's layers are of another width than its model's, which is not run")
    check_target(layer.hidden_size, layer.vocab_size, config.draft_vocab_size, target, folder)
    made_for = read.size("num_target_layers", target.num_layers)
    if made_for != target.num_layers:
        raise DrafterFailed(f"{where}: the drafter is for a model of {made_for} layers, not of {target.num_layers}")
    return config


def _layers(
    read: ConfigReader, inner: Mapping[str, Any], count: int, where: str, *, folders: bool
) -> tuple[BlockLayer, ...]:
    kinds = inner.get("layer_types")
    kinds = [FULL] * count if kinds is None else kinds
    if not isinstance(kinds, list) or len(kinds) != count or any(kind not in (FULL, SLIDING) for kind in kinds):
        raise CorruptModel(f"{where}: layer_types is {brief(kinds)}, not the kind of each of {count} layers")
    window = None
    if SLIDING in kinds:
        sizes = ConfigReader({"model_type": "dflash", "sliding_window": inner.get("sliding_window")}, where)
        window = sizes.size("sliding_window")
    given = next((key for key in ("is_causal", "causal") if read.get(key) is not None), None)
    if folders:
        sliding, full = not read.flag("sliding_window_non_causal", False), False
    elif given is not None:
        sliding = full = read.flag(given, False)
    else:
        sliding, full = True, False
    return tuple(BlockLayer(window, sliding) if kind == SLIDING else BlockLayer(None, full) for kind in kinds)


def _taps(
    merged: Mapping[str, Any], num_layers: int, draft_layers: int, where: str, *, folders: bool
) -> tuple[int, ...]:
    if folders:
        return tap_list(merged.get("aux_hidden_state_layer_ids"), 0, num_layers, where)
    given = merged.get("target_layer_ids")
    if given is None:  # as its first releases chose them
        first, last = 1, num_layers - 3
        spread = max(1, draft_layers - 1)
        given = [round(first + i * (last - first) / spread) for i in range(draft_layers)]
        given = [num_layers // 2] if draft_layers == 1 else given
    return tap_list(given, 1, num_layers - 1, where)  # the last layer's output is normed there, which no tap is


def _mask_token(merged: Mapping[str, Any], vocab_size: int, where: str) -> int:
    token = merged.get("mask_token_id")
    if isinstance(token, int) and not isinstance(token, bool) and 0 <= token < vocab_size:
        return token
    raise CorruptModel(f"{where}: mask_token_id is {brief(token)}, which is no token of a vocabulary of {vocab_size}")


def _shapes(config: DFlashConfig) -> tuple[Shapes, Shapes]:
    """-> the tensors that must be there, and those that may."""
    layer, hidden, vocab = config.layer, config.layer.hidden_size, config.layer.vocab_size
    inner = layer.intermediate_size
    queries, keys = layer.num_heads * layer.head_dim, layer.num_kv_heads * layer.head_dim
    rows = {
        "q_proj": (queries, hidden),
        "k_proj": (keys, hidden),
        "v_proj": (keys, hidden),
        "o_proj": (hidden, queries),
    }
    shapes: Shapes = {
        "fc.weight": (hidden, len(config.taps) * hidden),
        "hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
    }
    for index in range(len(config.layers)):
        attention, mlp = f"layers.{index}.self_attn.", f"layers.{index}.mlp."
        shapes |= {f"{attention}{name}.weight": shape for name, shape in rows.items()}
        if layer.qkv_bias:
            shapes |= {f"{attention}{name}.bias": shape[:1] for name, shape in rows.items()}
        shapes |= {f"{attention}{name}.weight": (layer.head_dim,) for name in ("q_norm", "k_norm")}
        shapes |= {f"{mlp}{name}.weight": (inner, hidden) for name in ("gate_proj", "up_proj")}
        shapes[f"{mlp}down_proj.weight"] = (hidden, inner)
        norms = ("input_layernorm", "post_attention_layernorm")
        shapes |= {f"layers.{index}.{norm}.weight": (hidden,) for norm in norms}
    optional: Shapes = {
        "lm_head.weight": (config.draft_vocab_size, hidden),
        "embed_tokens.weight": (vocab, hidden),
        "d2t": (config.draft_vocab_size,),
        "t2d": (vocab,),
        "verifier_norm.weight": (hidden,),
        "verifier_lm_head.weight": (config.draft_vocab_size, hidden),
    }
    return shapes, optional
