"""Old attention modules of transformers, which compute their scores themselves, on our attention.

Owns, for each of these classes, how its own queries, keys and values reach `hf_attention`, and ALiBi. Only the scores
are ours: projections, fused layouts and rotary embeddings stay the modules' code. While a span is checked, the modules
run as transformers wrote them.

ALiBi adds to a score a number for each head and position of the key, so that it can travel with the key: in a few more
dimensions, which the queries multiply by one number. Trees, paged caches and transfers then need to know nothing of it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from transformers.models.bloom import modeling_bloom as bloom
from transformers.models.codegen import modeling_codegen as codegen
from transformers.models.falcon import modeling_falcon as falcon
from transformers.models.gpt_neo import modeling_gpt_neo as gpt_neo
from transformers.models.gptj import modeling_gptj as gptj
from transformers.models.mpt import modeling_mpt as mpt

from swarm_kernels.runtime.hf_attention import ATTENTION, Visibility, attend_as_interface, row_positions

Bias = Callable[[torch.Tensor], torch.Tensor]
"""Positions of keys, `[n]` -> what is added to their scores, `[heads, n]`."""

LEGACY = frozenset({"falcon", "bloom", "gptj", "codegen", "gpt_neo", "mpt"})
"""`model_type`s whose modules are adapted."""

COUNT_FROM_ZERO = frozenset({"falcon", "bloom", "mpt"})
"""Those of them that know no positions: without a cache, transformers counts from 0."""

REFERENCE = {"falcon": "sdpa"}
"""transformers' attention that says what is right, where it is not eager: Falcon's eager path adds ALiBi twice
(transformers 5.23), its default does not."""

_ALIBI_PARTS = 3  # numbers of the cache's dtype whose sum is the bias, to its last bits


def adapt(model: torch.nn.Module, config: Any) -> None:
    """Replace the attention of old modules in `model` by ours, wherever `config` says that ours is to run."""
    for module in model.modules():
        if isinstance(module, gpt_neo.GPTNeoSelfAttention):
            module.layer_idx = module.layer_id
        if isinstance(module, (gptj.GPTJAttention, codegen.CodeGenAttention, gpt_neo.GPTNeoSelfAttention)):
            _intercept(module, "_attn", _scores, config)
        elif isinstance(module, falcon.FalconAttention):
            _intercept(module, "forward", _falcon, config)
        elif isinstance(module, bloom.BloomAttention):
            _intercept(module, "forward", _bloom, config)
        elif isinstance(module, mpt.MptAttention):
            _intercept(module, "forward", _mpt, config)


def _intercept(module: torch.nn.Module, method: str, ours: Callable[..., Any], config: Any) -> None:
    theirs = getattr(module, method)

    def run(*args: Any, **kwargs: Any) -> Any:
        if config._attn_implementation_internal != ATTENTION:
            return theirs(*args, **kwargs)
        return ours(module, *args, **kwargs)

    setattr(module, method, run)


def _scores(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: Any = None
) -> tuple[torch.Tensor, None]:
    """`_attn` of GPT-J, CodeGen and GPT-Neo: `[1, H, n, D]` each -> `[1, H, n, D]`. GPT-Neo does not scale, and its
    local layers keep their window in a buffer."""
    scale = 1.0 if isinstance(module, gpt_neo.GPTNeoSelfAttention) else 1.0 / float(module.scale_attn)
    window = None
    if getattr(module, "attention_type", None) == "local":
        window = int(module.bias[0, 0, -1].sum())
    q, k = query.to(value.dtype), key.to(value.dtype)
    return attend_as_interface(module, q, k, value, scale, Visibility(window=window)).transpose(1, 2), None


def _falcon(
    module: Any, hidden_states: torch.Tensor, alibi: torch.Tensor | None, *_: Any, **others: Any
) -> tuple[torch.Tensor, None]:
    split = module._split_heads(module.query_key_value(hidden_states))
    q, k, v = (part.transpose(1, 2) for part in split)
    if module.new_decoder_architecture:  # one key head for each group, which `_split_heads` repeats
        repeats = module.num_heads // module.num_kv_heads
        k, v = k[:, ::repeats], v[:, ::repeats]
    if alibi is None:
        q, k = falcon.apply_rotary_pos_emb(q, k, *others["position_embeddings"])
        mixed = attend_as_interface(module, q, k, v, module.inv_norm_factor)
    else:
        of_one = falcon.build_alibi_tensor(torch.ones(1, 2, device=q.device), module.num_heads, torch.bfloat16)
        bias = partial(_times, of_one[:, 0, 1], q.dtype)
        mixed = _with_alibi(module, q, k, v, module.inv_norm_factor, 1.0, bias)
    return module.dense(mixed.flatten(2)), None


def _bloom(module: Any, hidden_states: torch.Tensor, residual: torch.Tensor, *_: Any, **__: Any) -> tuple[Any, None]:
    q, k, v = module._reshape(module.query_key_value(hidden_states))
    of_one = bloom.build_alibi_tensor(torch.ones(1, 2, device=q.device), module.num_heads, torch.float32)
    bias = partial(_times, of_one[:, 0, 1], q.dtype)
    mixed = _with_alibi(module, q, k, v, module.inv_norm_factor, 1 / module.inv_norm_factor, bias)
    return residual + module.dense(mixed.flatten(2)), None


def _mpt(module: Any, hidden_states: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, None]:
    fused = module.Wqkv(hidden_states)
    if module.clip_qkv:
        fused = fused.clamp(min=-module.clip_qkv, max=module.clip_qkv)
    q, k, v = (part.unflatten(2, (module.n_heads, -1)).transpose(1, 2) for part in fused.chunk(3, dim=2))
    before_last = mpt.build_mpt_alibi_tensor(module.n_heads, 2, device=q.device)  # of the last key: 0
    bias = partial(_times, -before_last[:, 0, 0], torch.float32)
    mixed = _with_alibi(module, q, k, v, module.softmax_scale, 1 / module.softmax_scale, bias)
    return module.out_proj(mixed.flatten(2)), None


def _times(slopes: torch.Tensor, dtype: torch.dtype, positions: torch.Tensor) -> torch.Tensor:
    """Rounded where transformers rounds: in the product, by its operands, and to `dtype`."""
    return (slopes[:, None] * positions[None]).to(dtype)


def _with_alibi(
    module: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, factor: float, bias: Bias
) -> torch.Tensor:
    """Attention over scores `scale * (q k + factor * bias)`. `q [1, H, n, D]`, `k`, `v` `[1, G, n, D]` -> `[1, n, H,
    D]`."""
    heads = q.shape[1]
    if k.shape[1] != heads:  # each head has a bias of its own, so keys cannot be shared
        k, v = (part.repeat_interleave(heads // part.shape[1], 1) for part in (k, v))
    rest = bias(row_positions(q.shape[2], q.device)).float()
    parts = []
    for _ in range(_ALIBI_PARTS):
        parts.append(rest.to(k.dtype))
        rest = rest - parts[-1].float()
    k = torch.cat((k, torch.stack(parts, -1)[None]), -1)
    q = torch.cat((q, q.new_full((*q.shape[:-1], _ALIBI_PARTS), factor)), -1)
    return attend_as_interface(module, q, k, v, scale)
