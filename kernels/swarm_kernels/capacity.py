"""How many layers fit into so much memory. Arithmetic on a model's shapes; owns no measurement and reads no file."""

from __future__ import annotations

import torch

from swarm_kernels.model_config import ModelConfig


def kv_bytes_per_token(config: ModelConfig, dtype: torch.dtype) -> int:
    """Bytes of one token's key and value in one layer."""
    return 2 * config.num_kv_heads * config.head_dim * dtype.itemsize


def layer_weight_bytes(config: ModelConfig, dtype: torch.dtype) -> int:
    """Bytes of one layer's weights. Exact for the lean families; others are counted on transformers' own layer."""
    if not config.lean:
        from swarm_kernels.general_load import layer_parameters  # imports transformers, which takes seconds

        return layer_parameters(config) * dtype.itemsize
    hidden, dim, wide = config.hidden_size, config.head_dim, config.intermediate_size
    q, kv = config.num_heads * dim, config.num_kv_heads * dim
    weights = hidden * (q + 2 * kv) + q * hidden + 3 * hidden * wide
    biases = config.qkv_bias * (q + 2 * kv) + config.o_bias * hidden + config.mlp_bias * (2 * wide + hidden)
    norms = 2 * hidden + config.qk_norm * 2 * dim
    return (weights + biases) * dtype.itemsize + norms * torch.float32.itemsize


def layer_capacity(config: ModelConfig, dtype: torch.dtype, memory_bytes: int, kv_tokens: int) -> int:
    """The most layers that fit into `memory_bytes`, each with keys and values for `kv_tokens` tokens; 0 to num_layers.

    Leaves room for the embedding or the head, whichever end the span may get, and for both where it gets all layers.
    """
    edge = config.vocab_size * config.hidden_size * dtype.itemsize
    layer = layer_weight_bytes(config, dtype) + kv_tokens * kv_bytes_per_token(config, dtype)
    fits = max(0, memory_bytes - edge) // layer
    if fits < config.num_layers:
        return fits
    whole = config.num_layers * layer + 2 * edge <= memory_bytes
    return config.num_layers if whole else max(0, config.num_layers - 1)
