"""EAGLE-3 in plain torch, as the paper and its release define it: nothing cached, every path computed from the start.
Also writes random drafters in the layouts of both kinds of release."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file

LAYER = {
    "hidden_size": 96, "intermediate_size": 80, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 16,
    "vocab_size": 131, "max_position_embeddings": 256, "rms_norm_eps": 1e-6, "rope_theta": 5000.0,
    "hidden_act": "silu", "num_hidden_layers": 1, "model_type": "llama",
}  # fmt: skip
DRAFT_VOCAB = 60


class Reference:
    """`tensors`: by the names of `speculators`; `embedding [vocab, hidden]`."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], embedding: torch.Tensor, **flags: bool) -> None:
        self.w = {name: tensor.float() for name, tensor in tensors.items() if name not in ("d2t", "t2d")}
        self.d2t = tensors.get("d2t")
        self.embedding = tensors.get("embed_tokens.weight", embedding).float()
        self.norm_before_residual = flags.get("norm_before_residual", False)
        self.norm_before_fc = flags.get("norm_before_fc", False)

    def norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + LAYER["rms_norm_eps"]) * self.w[f"{name}.weight"]

    def linear(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.w[f"{name}.weight"], self.w.get(f"{name}.bias"))

    def rotate(self, x: torch.Tensor) -> torch.Tensor:
        """`[heads, n, head_dim]`, rotated by position."""
        dim = x.shape[-1]
        frequencies = LAYER["rope_theta"] ** (-torch.arange(0, dim, 2).float() / dim)
        angles = torch.arange(x.shape[1]).float()[:, None] * frequencies
        cos, sin = torch.cat((angles, angles), -1).cos(), torch.cat((angles, angles), -1).sin()
        half = torch.cat((-x[..., dim // 2 :], x[..., : dim // 2]), -1)
        return x * cos + half * sin

    def layer(self, states: torch.Tensor, tokens: Sequence[int]) -> torch.Tensor:
        """`states [n, hidden]` at t, `tokens [n]` at t + 1 -> `[n, hidden]`."""
        normed = self.norm("layers.0.hidden_norm", states)
        residual = normed if self.norm_before_residual else states
        x = torch.cat((self.norm("layers.0.input_layernorm", self.embedding[list(tokens)]), normed), -1)
        heads, kv_heads, dim = 6, 2, 16
        q, k, v = (
            self.linear(f"layers.0.self_attn.{part}_proj", x).view(len(tokens), -1, dim).transpose(0, 1)
            for part in "qkv"
        )
        q, k = self.rotate(q), self.rotate(k)
        k, v = (part.repeat_interleave(heads // kv_heads, 0) for part in (k, v))
        scores = (q @ k.transpose(1, 2)) * dim**-0.5
        future = torch.ones(len(tokens), len(tokens)).triu(1).bool()
        mixed = scores.masked_fill(future, -torch.inf).softmax(-1) @ v
        hidden = residual + self.linear("layers.0.self_attn.o_proj", mixed.transpose(0, 1).flatten(1))
        x = self.norm("layers.0.post_attention_layernorm", hidden)
        gated = F.silu(self.linear("layers.0.mlp.gate_proj", x)) * self.linear("layers.0.mlp.up_proj", x)
        return hidden + self.linear("layers.0.mlp.down_proj", gated)

    def after(self, tapped: torch.Tensor, text: Sequence[int], path: Sequence[int] = ()) -> torch.Tensor:
        """ln p `[draft vocabulary]` of what follows `text` and `path`; `tapped [len(text) - 1, taps * hidden]`."""
        fused = self.norm("input_norm", tapped) if self.norm_before_fc else tapped
        states, tokens = self.linear("fc", fused), list(text[1:])
        out = self.layer(states, tokens)
        for token in path:
            states, tokens = torch.cat((states, out[-1:])), [*tokens, token]
            out = self.layer(states, tokens)
        return self.linear("lm_head", self.norm("norm", out[-1])).log_softmax(-1)

    def candidates(
        self, tapped: torch.Tensor, text: Sequence[int], path: Sequence[int], width: int
    ) -> list[tuple[int, float]]:
        logprobs, ids = self.after(tapped, text, path).topk(width)
        if self.d2t is not None:
            ids = ids + self.d2t[ids]
        return list(zip(ids.tolist(), logprobs.tolist(), strict=True))


def random_tensors(
    seed: int = 0, taps: int = 3, draft_vocab: int = DRAFT_VOCAB, *, bias: bool = False, input_norm: bool = False
) -> dict[str, torch.Tensor]:
    """By the names of `speculators`."""
    made = torch.Generator().manual_seed(seed)
    hidden, inter = LAYER["hidden_size"], LAYER["intermediate_size"]

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, generator=made) * 1.2 / columns**0.5

    def vector(size: int) -> torch.Tensor:
        return 1 + 0.1 * torch.randn(size, generator=made)

    tensors = {
        "fc.weight": matrix(hidden, taps * hidden),
        "norm.weight": vector(hidden),
        "lm_head.weight": 3 * matrix(draft_vocab, hidden),
        "layers.0.self_attn.q_proj.weight": matrix(96, 2 * hidden),
        "layers.0.self_attn.k_proj.weight": matrix(32, 2 * hidden),
        "layers.0.self_attn.v_proj.weight": matrix(32, 2 * hidden),
        "layers.0.self_attn.o_proj.weight": matrix(hidden, 96),
        "layers.0.mlp.gate_proj.weight": matrix(inter, hidden),
        "layers.0.mlp.up_proj.weight": matrix(inter, hidden),
        "layers.0.mlp.down_proj.weight": matrix(hidden, inter),
        **{
            f"layers.0.{name}.weight": vector(hidden)
            for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm")
        },
    }
    if bias:
        for name in [name for name in tensors if "self_attn" in name]:
            tensors[name.removesuffix("weight") + "bias"] = 0.3 * torch.randn(len(tensors[name]), generator=made)
    if input_norm:
        tensors["input_norm.weight"] = vector(taps * hidden)
    if draft_vocab < LAYER["vocab_size"]:
        chosen = torch.randperm(LAYER["vocab_size"], generator=made)[:draft_vocab].sort().values
        tensors["d2t"] = chosen - torch.arange(draft_vocab)
        tensors["t2d"] = torch.zeros(LAYER["vocab_size"], dtype=torch.bool).index_fill_(0, chosen, True)
    return tensors


def save_speculators(
    folder: Path, tensors: Mapping[str, torch.Tensor], taps: Sequence[int] | None = None, **changes: Any
) -> Path:
    """A folder of `speculators`; `changes`: of its config."""
    folder.mkdir(parents=True, exist_ok=True)
    layer = {**LAYER, "attention_bias": "layers.0.self_attn.q_proj.bias" in tensors}
    config = {
        "speculators_model_type": "eagle3",
        "speculators_version": "0.1.0",
        "architectures": ["Eagle3Speculator"],
        "draft_vocab_size": len(tensors["lm_head.weight"]),
        "target_hidden_size": None,
        "norm_before_residual": True,
        "eagle_aux_hidden_state_layer_ids": None if taps is None else list(taps),
        "speculators_config": {"algorithm": "eagle3", "verifier": {"name_or_path": "tiny"}},
        "transformer_layer_config": layer,
        **changes,
    }
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


def save_release(folder: Path, tensors: Mapping[str, torch.Tensor], **changes: Any) -> Path:
    """A folder as EAGLE's releases (converted to safetensors) and SpecForge's are."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        **LAYER,
        "architectures": ["LlamaForCausalLMEagle3"],
        "draft_vocab_size": len(tensors["lm_head.weight"]),
        **changes,
    }
    (folder / "config.json").write_text(json.dumps(config))
    renamed = {name.replace("layers.0.", "midlayer."): tensor.contiguous() for name, tensor in tensors.items()}
    save_file(renamed, folder / "model.safetensors")
    return folder
