"""ctypes declarations of the compiled kernels' C interface (abi.h, api.cpp). Knows no torch."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, c_char_p, c_float, c_int32, c_int64, c_void_p
from pathlib import Path

OK, NO_MEMORY, UNKNOWN_ISA, BAD_EXPERT, BAD_STATE_ROWS = 0, 1, 2, 17, 18
FP32, BF16, INT8, INT4, MXFP4, IQ4_NL, IQ4_XS, NF4, FP8 = range(9)  # SwarmFormat


class LinearDesc(ctypes.Structure):
    _fields_ = [
        ("weight", c_void_p),
        ("scale", c_void_p),
        ("bias", c_void_p),
        ("inputs", c_int64),
        ("outputs", c_int64),
        ("format", c_int32),
        ("unused", c_int32),
    ]


class ScoringDesc(ctypes.Structure):
    _fields_ = [
        ("sinks", c_void_p),
        ("chosen", c_void_p),
        ("chosen_words", c_int64),
        ("window", c_int64),
        ("chunk", c_int64),
        ("scale", c_float),
        ("softcap", c_float),
    ]


class GatingDesc(ctypes.Structure):
    _fields_ = [("kind", c_int32), ("alpha", c_float), ("limit", c_float), ("shift", c_float)]


class ExpertsDesc(ctypes.Structure):
    _fields_ = [
        ("first", POINTER(LinearDesc)),
        ("second", POINTER(LinearDesc)),
        ("experts", c_int64),
        ("hidden", c_int64),
        ("intermediate", c_int64),
        ("gating", GatingDesc),
    ]


class RoutingDesc(ctypes.Structure):
    _fields_ = [
        ("scores", c_int32),
        ("normalized", c_int32),
        ("epsilon", c_float),
        ("scale", c_float),
        ("chosen", c_int64),
        ("groups", c_int64),
        ("used_groups", c_int64),
    ]


class MixtureDesc(ctypes.Structure):
    _fields_ = [
        ("router", LinearDesc),
        ("shared_gate_up", LinearDesc),
        ("shared_down", LinearDesc),
        ("shared_gate", LinearDesc),
        ("correction", c_void_p),
        ("routing", RoutingDesc),
        ("experts", ExpertsDesc),
        ("shared_activation", c_int32),
        ("unused", c_int32),
    ]


class LayerDesc(ctypes.Structure):
    _fields_ = [
        ("qkv", LinearDesc),
        ("o", LinearDesc),
        ("gate_up", LinearDesc),
        ("down", LinearDesc),
        ("mixture", POINTER(MixtureDesc)),
        ("attn_norm", c_void_p),
        ("attn_post_norm", c_void_p),
        ("mlp_norm", c_void_p),
        ("mlp_post_norm", c_void_p),
        ("q_norm", c_void_p),
        ("k_norm", c_void_p),
        ("scoring", ScoringDesc),
        ("heads", c_int64),
        ("kv_heads", c_int64),
        ("head_dim", c_int64),
        ("norm_is_whole", c_int32),
        ("rope", c_int32),
        ("activation", c_int32),
        ("eps", c_float),
        ("residual_scale", c_float),
        ("rounds_to_bf16", c_int32),
    ]


class CacheDesc(ctypes.Structure):
    _fields_ = [
        ("k", c_void_p),
        ("v", c_void_p),
        ("blocks", c_int64),
        ("kv_heads", c_int64),
        ("dim", c_int64),
        ("value_dim", c_int64),
        ("bf16", c_int32),
        ("latent", c_int32),
    ]


class PlanDesc(ctypes.Structure):
    _fields_ = [
        ("rows", c_int64),
        ("sequences", c_int64),
        ("max_blocks", c_int64),
        ("max_tree_blocks", c_int64),
        ("mask_words", c_int64),
        ("copies", c_int64),
        ("positions", c_void_p),
        ("sequence_index", c_void_p),
        ("context_lens", c_void_p),
        ("slot_mapping", c_void_p),
        ("block_tables", c_void_p),
        ("tree_block_tables", c_void_p),
        ("tree_mask", c_void_p),
        ("copy_from", c_void_p),
        ("copy_to", c_void_p),
        ("tree_positions", c_void_p),
    ]


class StateRowsDesc(ctypes.Structure):
    _fields_ = [
        ("rows", c_int64),
        ("starts", c_int64),
        ("saves", c_int64),
        ("order", c_void_p),
        ("parent", c_void_p),
        ("saved_row", c_void_p),
    ]


class ConvolutionDesc(ctypes.Structure):
    _fields_ = [
        ("weight", c_void_p),
        ("bias", c_void_p),
        ("channels", c_int64),
        ("taps", c_int64),
        ("silu", c_int32),
        ("rounds_to_bf16", c_int32),
    ]


class RecurrenceDesc(ctypes.Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("query", "key", "value", "decay", "beta", "skip", "out")),
        *((name, c_int64) for name in ("query_row", "key_row", "value_row")),
        *((name, c_int64) for name in ("key_heads", "heads", "key_dim", "value_dim")),
        *((name, c_float) for name in ("scale", "eps")),
        *((name, c_int32) for name in ("corrects", "normalizes", "decay_by_key", "values_first")),
    ]


class GatedNormDesc(ctypes.Structure):
    _fields_ = [
        ("weight", c_void_p),
        ("groups", c_int64),
        ("size", c_int64),
        ("eps", c_float),
        *((name, c_int32) for name in ("weight_by_group", "gate_first", "sigmoid", "rounds")),
    ]


_SIGNATURES = {
    "swarm_isa": (c_char_p, []),
    "swarm_use_isa": (c_int32, [c_char_p]),
    "swarm_set_threads": (None, [c_int32]),
    "swarm_split_columns": (None, [c_int32, c_int32, c_int32, c_void_p, c_int32, c_void_p, c_int32]),
    "swarm_advise_huge": (None, [c_void_p, c_int64]),
    "swarm_check_plan": (c_int32, [POINTER(PlanDesc), c_int64]),
    "swarm_linear": (c_int32, [POINTER(LinearDesc), c_void_p, c_int64, c_void_p]),
    "swarm_head_linears": (
        c_int32,
        [POINTER(LinearDesc), c_int64, c_void_p, c_int64, c_int64, c_int64, c_void_p, c_int64, c_int64],
    ),
    "swarm_experts": (
        c_int32,
        [POINTER(ExpertsDesc), c_void_p, c_void_p, c_void_p, c_int64, c_int64, c_void_p],
    ),
    "swarm_sum_experts": (c_int32, [c_void_p, c_void_p, c_int64, c_int64, c_int64, c_void_p]),
    "swarm_convolve": (
        c_int32,
        [
            POINTER(StateRowsDesc),
            c_void_p,
            c_void_p,
            POINTER(ConvolutionDesc),
            c_void_p,
            c_int64,
            c_void_p,
        ],
    ),
    "swarm_recur": (c_int32, [POINTER(StateRowsDesc), c_void_p, c_void_p, POINTER(RecurrenceDesc)]),
    "swarm_norm_gated": (c_int32, [POINTER(GatedNormDesc), c_void_p, c_void_p, c_int64, c_int64, c_void_p]),
    "swarm_softplus": (None, [c_void_p, c_int64, c_void_p]),
    "swarm_rms_norm": (c_int32, [c_void_p, c_int64, c_int64, c_void_p, c_float, c_void_p]),
    "swarm_commit_tree_slots": (c_int32, [POINTER(CacheDesc), c_void_p, c_void_p, c_int64]),
    "swarm_attend": (
        c_int32,
        [
            c_void_p,
            c_void_p,
            c_void_p,
            c_int64,
            POINTER(CacheDesc),
            POINTER(PlanDesc),
            POINTER(ScoringDesc),
            c_void_p,
        ],
    ),
    "swarm_layers": (
        c_int32,
        [
            POINTER(POINTER(LayerDesc)),
            POINTER(CacheDesc),
            c_int64,
            POINTER(PlanDesc),
            c_void_p,
            c_void_p,
            c_int64,
            c_void_p,
        ],
    ),
    "swarm_layer_to_experts": (
        c_int32,
        [POINTER(LayerDesc), POINTER(CacheDesc), POINTER(PlanDesc), c_void_p, c_void_p, c_int64, *(c_void_p,) * 4],
    ),
    "swarm_layer_from_experts": (c_int32, [POINTER(LayerDesc), c_void_p, c_int64, c_void_p, c_void_p]),
}


def load(path: Path) -> ctypes.CDLL:
    """Load the library and declare its signatures; calls release the GIL. Raises OSError or AttributeError."""
    library = ctypes.CDLL(str(path))
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(library, name)
        function.restype = result
        function.argtypes = arguments
    return library
