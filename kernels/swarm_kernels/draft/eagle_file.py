"""The files of EAGLE-3 drafters (Li et al. 2025): folders of `speculators`, and releases of EAGLE and SpecForge.

Owns their configs and tensor names, and every reason to refuse one; `eagle` computes. All of them are one
safetensors file and a config.json, of

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
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from swarm.errors import CorruptModel, DrafterFailed, ModelError, ModelNotFound, UnsupportedModel
from swarm.types import MAX_TAPS
from swarm_kernels.models.config import ModelConfig
from swarm_kernels.models.config_reader import ConfigReader, brief
from swarm_kernels.models.hf_config import model_config
from swarm_kernels.models.safetensors import PICKLES, StoredTensor, read_header, read_json, read_tensor
from swarm_kernels.models.source import ModelFile

_LAYER_FIELDS = (
    "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size",
    "max_position_embeddings", "rms_norm_eps", "rope_theta", "rope_scaling", "rope_parameters", "hidden_act",
    "attention_bias", "mlp_bias",
)  # fmt: skip
LAYER = "layers.0."
_ATTENTION = LAYER + "self_attn."


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


def is_eagle(folder: Path) -> bool:
    """Whether a folder says that it holds such a drafter, or another one of `speculators`."""
    try:
        hf = read_json(folder / "config.json")
    except ModelError:
        return False
    return any(key in hf for key in ("speculators_model_type", "draft_vocab_size", "eagle_config"))


def load_eagle(folder: Path, target: ModelConfig) -> EagleWeights:
    """Raises ModelNotFound, CorruptModel, UnsupportedModel, and DrafterFailed for one of another model."""
    config = read_config(read_json(folder / "config.json"), target, folder)
    with closing(ModelFile(_weight_file(folder))) as file:
        stored = {_plain_name(name): tensor for name, tensor in read_header(file).items()}
        _check(stored, config, folder)
        tensors = {name: read_tensor(tensor, name) for name, tensor in stored.items() if name != "t2d"}
    offsets = tensors.pop("d2t", None)
    ids = torch.arange(config.draft_vocab_size)
    if offsets is not None:
        ids = ids + offsets.long()
    if int(ids.min()) < 0 or int(ids.max()) >= target.vocab_size:
        raise CorruptModel(f"{folder}: d2t names tokens that the model does not have; fetch it again")
    return EagleWeights(config, tensors, ids)


def read_config(hf: Mapping[str, Any], target: ModelConfig, folder: Path) -> EagleConfig:
    """Raises as `load_eagle`."""
    where = str(folder / "config.json")
    kind = hf.get("speculators_model_type", "eagle3")
    if kind != "eagle3":
        raise UnsupportedModel(f"{where}: a drafter of type {brief(kind)} is not run here; use one of type eagle3")
    inner = hf.get("transformer_layer_config", hf) if "speculators_model_type" in hf else hf
    if not isinstance(inner, Mapping):
        raise CorruptModel(f"{where}: transformer_layer_config is not a table")
    if inner.get("num_hidden_layers", 1) != 1:
        raise UnsupportedModel(f"{where}: a drafter of {brief(inner['num_hidden_layers'])} layers is not run here")
    fields = {key: inner[key] for key in _LAYER_FIELDS if inner.get(key) is not None}
    layer = model_config({**fields, "model_type": "llama", "num_hidden_layers": 1}, where=where)
    if not layer.is_llama_like:
        raise UnsupportedModel(f"{where}: with this {layer.beyond_fast_path or 'layer'} the drafter is not run here")
    read = ConfigReader({**hf, "model_type": "eagle3"}, where)
    config = EagleConfig(
        layer,
        _taps(hf, target.num_layers, where),
        read.size("target_hidden_size", layer.hidden_size),
        read.size("draft_vocab_size", layer.vocab_size),
        read.flag("norm_before_residual", "speculators_model_type" in hf),
        read.flag("norm_before_fc", False),
    )
    made_for = config.target_hidden_size, layer.vocab_size
    if made_for != (target.hidden_size, target.vocab_size) or config.draft_vocab_size > target.vocab_size:
        raise DrafterFailed(
            f"the drafter in {folder} is for a model with hidden states of {made_for[0]} and a vocabulary of "
            f"{made_for[1]}, not of {target.hidden_size} and {target.vocab_size}; use one trained for this model"
        )
    return config


def _taps(hf: Mapping[str, Any], num_layers: int, where: str) -> tuple[int, ...]:
    nested = hf.get("eagle_config")
    if nested is not None and not isinstance(nested, Mapping):
        raise CorruptModel(f"{where}: eagle_config is not a table")
    given = hf.get("eagle_aux_hidden_state_layer_ids")
    outputs = given is None and nested is not None
    if given is None and nested is not None:
        given = nested.get("eagle_aux_hidden_state_layer_ids")
    if given is None:
        given, outputs = [2, num_layers // 2, num_layers - 3], False
    whole = isinstance(given, list) and all(isinstance(i, int) and not isinstance(i, bool) for i in given)
    if not whole or not 1 <= len(given) <= MAX_TAPS:
        raise CorruptModel(f"{where}: the taps are {brief(given)}, not a list of 1 to {MAX_TAPS} layers")
    taps = tuple(i + 1 for i in given) if outputs and given[0] == 1 else tuple(given)
    if list(taps) != sorted(set(taps)) or taps[0] < 0 or taps[-1] > num_layers:
        raise DrafterFailed(f"{where}: the drafter reads at layers {brief(given)} of a model that has {num_layers}")
    return taps


def _weight_file(folder: Path) -> Path:
    found = sorted(folder.glob("*.safetensors"))
    if len(found) == 1:
        return found[0]
    if not found and any(entry.suffix in PICKLES for entry in folder.iterdir()):
        raise UnsupportedModel(f"{folder} has only pickle files, which are never loaded because they can run any code")
    raise ModelNotFound(f"{folder} has {len(found)} safetensors files; an EAGLE-3 drafter is one")


def _plain_name(name: str) -> str:
    return name.removeprefix("model.").replace("midlayer.", LAYER, 1)


def _check(stored: Mapping[str, StoredTensor], config: EagleConfig, folder: Path) -> None:
    """Raises CorruptModel, and UnsupportedModel for tensors that are not known."""
    expected, optional = _shapes(config)
    if unknown := sorted(stored.keys() - expected.keys() - optional.keys()):
        raise UnsupportedModel(f"{folder}: '{unknown[0][:80]}' is no part of an EAGLE-3 drafter that is run here")
    for name, shape in (expected | optional).items():
        found = stored[name].shape if name in stored else None
        if found != shape and (found is not None or name in expected):
            raise CorruptModel(f"{folder}: {name} has shape {found or 'none'}, its config needs {shape}")
    if "d2t" not in stored and config.draft_vocab_size != config.layer.vocab_size:
        raise CorruptModel(f"{folder} has no d2t, so that nobody knows what its tokens mean")
    floats = [name for name in expected if name in stored and not stored[name].dtype.startswith(("F32", "F16", "BF16"))]
    if floats:
        raise CorruptModel(f"{folder}: {floats[0]} is {stored[floats[0]].dtype}, which its layers do not compute with")
    if "d2t" in stored and not stored["d2t"].dtype.startswith("I"):
        raise CorruptModel(f"{folder}: d2t is {stored['d2t'].dtype}, not whole numbers")


def _shapes(config: EagleConfig) -> tuple[dict[str, tuple[int, ...]], dict[str, tuple[int, ...]]]:
    """-> the tensors that must be there, and those that may."""
    layer, hidden = config.layer, config.layer.hidden_size
    fused = len(config.taps) * config.target_hidden_size
    queries, keys = layer.num_heads * layer.head_dim, layer.num_kv_heads * layer.head_dim
    shapes: dict[str, tuple[int, ...]] = {
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
