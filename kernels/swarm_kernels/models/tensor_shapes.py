"""The tensors a Llama-like decoder must have, and their shapes. Owns Hugging Face's names for them; reads no file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Protocol

from swarm.errors import CorruptModel
from swarm_kernels.models.config import FAST_PATH_ARCHITECTURES, ModelConfig


class _Shaped(Protocol):
    @property
    def shape(self) -> tuple[int, ...]: ...


def check_shapes(config: ModelConfig, tensors: Mapping[str, _Shaped], where: str) -> None:
    """Check the weights against the config. Raises CorruptModel naming the first mismatch.

    Architectures outside the fast path have other tensor names and are checked when they are loaded.
    """
    if config.model_type not in FAST_PATH_ARCHITECTURES:
        return
    for name, shape in _expected_shapes(config):
        if name not in tensors:
            raise CorruptModel(f"{where} has no tensor '{name}'; fetch the model again")
        if tensors[name].shape != shape:
            found = list(tensors[name].shape)
            raise CorruptModel(f"{where}: '{name}' has the shape {found}, but its config needs {list(shape)}")


def _expected_shapes(c: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Lazily, as a damaged config may claim any number of layers."""
    yield "model.embed_tokens.weight", (c.vocab_size, c.hidden_size)
    yield "model.norm.weight", (c.hidden_size,)
    if not c.tie_word_embeddings:
        yield "lm_head.weight", (c.vocab_size, c.hidden_size)
    for layer in range(c.num_layers):
        yield from _layer(c, f"model.layers.{layer}.")


def _layer(c: ModelConfig, prefix: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    queries, keys = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    yield prefix + "input_layernorm.weight", (c.hidden_size,)
    yield prefix + "post_attention_layernorm.weight", (c.hidden_size,)
    projections = {
        "self_attn.q_proj": (queries, c.hidden_size, c.qkv_bias),
        "self_attn.k_proj": (keys, c.hidden_size, c.qkv_bias),
        "self_attn.v_proj": (keys, c.hidden_size, c.qkv_bias),
        "self_attn.o_proj": (c.hidden_size, queries, c.o_bias),
        "mlp.gate_proj": (c.intermediate_size, c.hidden_size, c.mlp_bias),
        "mlp.up_proj": (c.intermediate_size, c.hidden_size, c.mlp_bias),
        "mlp.down_proj": (c.hidden_size, c.intermediate_size, c.mlp_bias),
    }
    for name, (rows, columns, bias) in projections.items():
        yield f"{prefix}{name}.weight", (rows, columns)
        if bias:
            yield f"{prefix}{name}.bias", (rows,)
    if c.qk_norm:
        yield prefix + "self_attn.q_norm.weight", (c.head_dim,)
        yield prefix + "self_attn.k_norm.weight", (c.head_dim,)
