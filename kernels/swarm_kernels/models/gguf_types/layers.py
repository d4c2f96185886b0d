"""The names of a layer's tensors in llama.cpp and in Hugging Face's models, in groups that architectures share."""

from __future__ import annotations

from collections.abc import Mapping

from swarm_kernels.models.gguf_types.architecture import GLOBAL, Rule, linear, rule
from swarm_kernels.models.gguf_types.views import (
    Build,
    each_expert,
    interleaved_heads,
    latent_key_values,
    one_row,
    shifted,
    whole,
)

EDGES: Mapping[str, tuple[str, Build]] = {name: (target, whole) for name, target in GLOBAL.items()}
GEMMA_EDGES = {**EDGES, "output_norm.weight": (GLOBAL["output_norm.weight"], shifted)}

_VALUES_AND_OUTPUT = [*linear("attn_v", "self_attn.v_proj"), *linear("attn_output", "self_attn.o_proj")]
ATTENTION = [*linear("attn_q", "self_attn.q_proj"), *linear("attn_k", "self_attn.k_proj"), *_VALUES_AND_OUTPUT]
INTERLEAVED_ATTENTION = [
    *linear("attn_q", "self_attn.q_proj", interleaved_heads("num_attention_heads")),
    *linear("attn_k", "self_attn.k_proj", interleaved_heads("num_key_value_heads")),
    *_VALUES_AND_OUTPUT,
]
HEAD_NORMS = [
    rule("attn_q_norm.weight", "self_attn.q_norm.weight"),
    rule("attn_k_norm.weight", "self_attn.k_norm.weight"),
]
NORMS = [rule("attn_norm.weight", "input_layernorm.weight"), rule("ffn_norm.weight", "post_attention_layernorm.weight")]
SEED_NORMS = [
    rule("attn_norm.weight", "input_layernorm.weight"),
    rule("post_attention_norm.weight", "post_attention_layernorm.weight"),
]
MLP = [
    *linear("ffn_gate", "mlp.gate_proj"),
    *linear("ffn_up", "mlp.up_proj"),
    *linear("ffn_down", "mlp.down_proj"),
]


def latent_attention() -> list[Rule]:
    """Multi-head latent attention, with one matrix of keys and values or llama.cpp's two."""
    return [
        rule("attn_q.weight", "self_attn.q_proj.weight"),
        rule("attn_q_a.weight", "self_attn.q_a_proj.weight"),
        rule("attn_q_a_norm.weight", "self_attn.q_a_layernorm.weight"),
        rule("attn_q_b.weight", "self_attn.q_b_proj.weight"),
        rule("attn_kv_a_mqa.weight", "self_attn.kv_a_proj_with_mqa.weight"),
        rule("attn_kv_a_norm.weight", "self_attn.kv_a_layernorm.weight"),
        rule("attn_kv_b.weight", "self_attn.kv_b_proj.weight"),
        Rule(("attn_k_b.weight", "attn_v_b.weight"), "self_attn.kv_b_proj.weight", latent_key_values),
        rule("attn_output.weight", "self_attn.o_proj.weight"),
    ]


def experts(
    count: str, block: str = "mlp", names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
) -> list[Rule]:
    """A router and its experts, `config[count]` of them, one matrix each."""
    gate, up, down = (f"{block}.experts.{{}}.{name}.weight" for name in names)
    return [
        rule("ffn_gate_inp.weight", f"{block}.gate.weight"),
        rule("ffn_gate_exps.weight", gate, each_expert(count)),
        rule("ffn_up_exps.weight", up, each_expert(count)),
        rule("ffn_down_exps.weight", down, each_expert(count)),
    ]


def shared_expert(target: str) -> list[Rule]:
    return [
        rule("ffn_gate_shexp.weight", f"{target}.gate_proj.weight"),
        rule("ffn_up_shexp.weight", f"{target}.up_proj.weight"),
        rule("ffn_down_shexp.weight", f"{target}.down_proj.weight"),
    ]


def gate_of_shared_expert() -> list[Rule]:
    return [rule("ffn_gate_inp_shexp.weight", "mlp.shared_expert_gate.weight", one_row)]


def correction_bias(target: str) -> list[Rule]:
    """Older files leave the suffix out."""
    return [rule("exp_probs_b.bias", target), rule("exp_probs_b.weight", target), rule("exp_probs_b", target)]


def gemma_norms(names: Mapping[str, str]) -> list[Rule]:
    return [rule(f"{source}.weight", f"{target}.weight", shifted) for source, target in names.items()]
