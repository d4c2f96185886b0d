"""config.json: a config with a rotary embedding and a fingerprint, or that of a drafter, or a ModelError."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch

from swarm.errors import DrafterFailed, ModelError
from swarm_kernels.draft import dflash_file, eagle_file
from swarm_kernels.draft.card import DraftMetadata
from swarm_kernels.models.config import ModelConfig
from swarm_kernels.models.hf_config import model_config
from swarm_kernels.models.quantized.checkpoint import unpacked_table
from swarm_kernels.models.quantized.schemes import scheme_of
from swarm_kernels.models.source import fingerprint
from swarm_kernels.models.tensor_shapes import check_shapes
from swarm_kernels.runtime.rope import RopeTables

INSTRUMENT = (
    "swarm_kernels.draft.dflash_file", "swarm_kernels.draft.eagle_file", "swarm_kernels.draft.folder",
    "swarm_kernels.models.hf_config", "swarm_kernels.models.quantized.checkpoint",
    "swarm_kernels.models.quantized.schemes", "swarm_kernels.models.tensor_shapes", "swarm_kernels.runtime.rope",
)  # fmt: skip


_TARGET = ModelConfig("llama", 8, 8, 2, 1, 4, 8, 6, 64)  # of drafters


class _Entry(NamedTuple):
    shape: tuple[int, ...]
    dtype: str


_STATE = torch.tensor(list(b'{"quant_type":"nf4","blocksize":64,"dtype":"float16","shape":[8,64]}'), dtype=torch.uint8)
_TABLE = {
    "a.qweight": _Entry((8, 16), "I32"), "a.qzeros": _Entry((2, 2), "I32"), "a.scales": _Entry((2, 16), "F16"),
    "b.weight_packed": _Entry((16, 8), "I32"), "b.weight_scale": _Entry((16, 2), "BF16"),
    "c.weight": _Entry((16, 64), "F8_E4M3"), "c.weight_scale_inv": _Entry((1, 1), "F32"),
    "c.weight_scale": _Entry((), "F32"),
    "d_blocks": _Entry((2, 4, 2, 16), "U8"), "d_scales": _Entry((2, 4, 2), "U8"), "e.weight": _Entry((256, 1), "U8"),
    "e.weight.absmax": _Entry((8,), "F32"), "e.weight.quant_map": _Entry((16,), "F32"),
    "e.weight.quant_state.bitsandbytes__nf4": _Entry((68,), "U8"),
}  # fmt: skip
"""Tensors of every format."""


def run(data: bytes) -> None:
    try:
        parsed = json.loads(data)
    except (ValueError, RecursionError):
        return
    if not isinstance(parsed, dict):
        return
    try:
        config = model_config(parsed, parsed)
        fingerprint(config, [], lambda _name, _length: np.zeros(0, np.uint8))
        if config.head_dim <= 1 << 10 and config.decoder is not None:
            ropes = (config.rope, *config.decoder.other_ropes)
            RopeTables(ropes, config.head_dim, min(config.context_length, 64), torch.device("cpu")).at(
                torch.arange(2), 80
            )
        check_shapes(config, {}, "a folder")
    except ModelError:
        pass
    for read_config in (eagle_file.read_config, dflash_file.read_config):
        try:
            drafter = read_config(parsed, _TARGET, Path())
        except (ModelError, DrafterFailed):
            continue
        assert 0 <= drafter.taps[0] <= drafter.taps[-1] <= _TARGET.num_layers
    try:
        quantization = parsed.get("quantization_config")
        if isinstance(quantization, dict):
            unpacked_table(scheme_of(quantization, "config.json"), _TABLE, lambda _name: _STATE, "a folder")
    except ModelError:
        return


def seeds() -> Iterator[bytes]:
    base: dict[str, Any] = {
        "model_type": "llama", "hidden_size": 8, "num_attention_heads": 2, "num_hidden_layers": 1, "vocab_size": 6,
        "intermediate_size": 8, "rms_norm_eps": 1e-5, "eos_token_id": [1, 2], "tie_word_embeddings": True,
        "max_position_embeddings": 64, "num_key_value_heads": 1, "hidden_act": "silu", "head_dim": 4,
    }  # fmt: skip
    llama3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    for changes in (
        {"model_type": "gemma3_text", "hidden_activation": "gelu_pytorch_tanh", "sliding_window": 8},
        {"model_type": "smollm3", "use_sliding_window": True, "sliding_window": 8, "no_rope_layers": [0]},
        {"model_type": "phi3", "rope_scaling": {"type": "su", "short_factor": [1, 2], "long_factor": [1, 2]}},
        {"model_type": "olmo3", "rope_scaling": {**llama3, "rope_type": "linear"}, "layer_types": ["full_attention"]},
        {"rope_theta": 1e5, "rope_scaling": {**llama3, "original_max_position_embeddings": 32}},
        {"model_type": "qwen2", "rope_parameters": {"rope_type": "yarn", "factor": 4.0, "beta_fast": 3}},
        {"model_type": "qwen3", "use_sliding_window": True, "sliding_window": 16, "max_window_layers": 0},
        {"model_type": "mistral", "rope_scaling": {"type": "dynamic", "factor": 2.0}, "partial_rotary_factor": 0.5},
        {"model_type": "gpt2", "n_embd": 8, "rope_scaling": {"type": "linear", "factor": 2}},
    ):  # fmt: skip
        yield msgspec.json.encode({**base, **changes})
    weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}
    for quantization in (
        {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False},
        {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"},
        {"quant_method": "fp8", "weight_block_size": [128, 128], "fmt": "e4m3"},
        {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "config_groups": {"0": {"weights": weights}},
        },
        {"quant_method": "mxfp4"},
        {"quant_method": "bitsandbytes", "load_in_4bit": True},
    ):
        yield msgspec.json.encode({**base, "quantization_config": quantization})
    eagle = {"draft_vocab_size": 4, "norm_before_residual": False, "target_hidden_size": 8}
    yield msgspec.json.encode({**base, **eagle, "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 4]}})
    yield msgspec.json.encode(
        {
            **eagle,
            "speculators_model_type": "eagle3",
            "transformer_layer_config": base,
            "norm_before_fc": True,
            "eagle_aux_hidden_state_layer_ids": [2, 4, 8],
        }
    )
    nested = {"mask_token_id": 5, "target_layer_ids": [1, 4], "causal": False}
    windowed = {"layer_types": ["sliding_attention"], "sliding_window": 4, "num_target_layers": 8}
    yield msgspec.json.encode({**base, **windowed, "block_size": 4, "dflash_config": nested})
    block = {"aux_hidden_state_layer_ids": [1, 8], "mask_token_id": 0, "block_size": 8, "projector_type": "dflash"}
    yield msgspec.json.encode({**block, "speculators_model_type": "dflash", "transformer_layer_config": base})
    yield msgspec.json.encode(DraftMetadata("m", "h", 1, 2))
