"""Weights from a GGUF file, or from its parts, under Hugging Face names.

Owns the name mapping and the conversion from llama.cpp's row order.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from swarm.errors import CorruptModel
from swarm_kernels.models.config import ModelConfig
from swarm_kernels.models.gguf_config import gguf_model_config
from swarm_kernels.models.gguf_dequant import dequantize, dequantized_itemsize, native_format
from swarm_kernels.models.gguf_four_bits import GGUF_FOUR_BITS, four_bits_from_gguf
from swarm_kernels.models.gguf_parts import GgufParts, LocatedTensor, unsplit_name
from swarm_kernels.models.source import LocalFiles, ModelFile, fingerprint
from swarm_kernels.models.tensor_shapes import check_shapes
from swarm_kernels.ops.base.int4_linear import FourBitWeights

_GLOBAL = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_ROPE_FACTORS = "rope_freqs.weight"
_MAX_FACTORS = 1 << 12  # one for each pair of a head's dimensions


class GgufSource(LocalFiles):
    """A ModelSource. Opening reads only the headers and the first 4 KiB of some tensors."""

    def __init__(self, path: Path, name: str | None = None) -> None:
        """`path`: the file, or any part. Raises ModelNotFound, CorruptModel, UnsupportedModel."""
        self.path = path
        self.name = name or unsplit_name(path)
        self._parts = GgufParts(path)
        self.header = self._parts.header  # of the first part: the metadata
        try:
            self._tensors = _hf_names(self._parts.tensors)
            self.config: ModelConfig = gguf_model_config(self.header, self._rope_factors(), str(path))
            check_shapes(self.config, self._tensors, str(path))
            self.weight_hash = fingerprint(
                self.config,
                [(name, t.shape, t.entry.dtype, t.entry.nbytes) for name, t in self._tensors.items()],
                lambda name, length: self._tensors[name].file.read(self._tensors[name].entry.offset, length),
            )
        except BaseException:
            self.close()
            raise

    @property
    def files(self) -> list[ModelFile]:
        """The file, or its parts in order."""
        return self._parts.files

    def names(self) -> tuple[str, ...]:
        return tuple(sorted(self._tensors))

    def has(self, hf_name: str) -> bool:
        return hf_name in self._tensors

    def shape(self, hf_name: str) -> tuple[int, ...]:
        return self._find(hf_name).shape

    def nbytes(self, hf_name: str) -> int:
        tensor = self._find(hf_name).entry
        return math.prod(tensor.shape) * dequantized_itemsize(tensor.ggml_type)

    def tensor(self, hf_name: str) -> torch.Tensor:
        found = self._find(hf_name)
        return dequantize(self._stored(found), found.entry.ggml_type, found.entry.shape)

    def _stored(self, found: LocatedTensor) -> npt.NDArray[np.uint8]:
        """Its bytes, in Hugging Face's order of rows."""
        tensor = found.entry
        stored = found.file.read(tensor.offset, tensor.nbytes)
        if self.config.model_type == "llama" and ".attn_q." in tensor.name:
            stored = _unpermute(stored, tensor.shape[0], self.config.num_heads)
        elif self.config.model_type == "llama" and ".attn_k." in tensor.name:
            stored = _unpermute(stored, tensor.shape[0], self.config.num_kv_heads)
        return stored

    def native(self, hf_name: str) -> torch.dtype:
        return native_format(self._find(hf_name).entry.ggml_type)

    def four_bits(self, hf_name: str) -> FourBitWeights | None:
        found = self._find(hf_name)
        if found.entry.dtype not in GGUF_FOUR_BITS:
            return None
        return four_bits_from_gguf(self._stored(found), found.entry.ggml_type, found.entry.shape)

    def close(self) -> None:
        self._parts.close()

    def _find(self, hf_name: str) -> LocatedTensor:
        try:
            return self._tensors[hf_name]
        except KeyError:
            raise CorruptModel(f"{self.path} has no tensor '{hf_name}'") from None

    def _rope_factors(self) -> tuple[float, ...]:
        found = self._parts.tensors.get(_ROPE_FACTORS)
        if found is None:
            return ()
        tensor = found.entry
        if tensor.dtype != "F32" or len(tensor.shape) != 1 or tensor.shape[0] > _MAX_FACTORS:
            raise CorruptModel(f"{self.path}: '{_ROPE_FACTORS}' is not a short row of fp32 numbers")
        values: list[float] = found.file.read(tensor.offset, tensor.nbytes).view(np.float32).tolist()
        return tuple(values)


def _hf_names(tensors: Mapping[str, LocatedTensor]) -> dict[str, LocatedTensor]:
    """Hugging Face name -> tensor; tensors without such a name (the rope factors) are left out."""
    named = {}
    for name, tensor in tensors.items():
        match = re.fullmatch(r"blk\.(\d{1,5})\.(\w+)\.(weight|bias)", name)
        if name in _GLOBAL:
            named[_GLOBAL[name]] = tensor
        elif match and match[2] in _LAYER:
            named[f"model.layers.{int(match[1])}.{_LAYER[match[2]]}.{match[3]}"] = tensor
    return named


def _unpermute(stored: npt.NDArray[np.uint8], rows: int, heads: int) -> npt.NDArray[np.uint8]:
    """Put the rows of a query or key projection back in Hugging Face's order.

    llama.cpp interleaves the two halves of each head, since its rotary embedding rotates neighboring values;
    `rotate_half` rotates the halves. Whole rows move, so stored bytes do: `[heads, dim / 2, 2, bytes]` -> `[heads, 2,
    dim / 2, bytes]`."""
    pairs = stored.reshape(heads, rows // heads // 2, 2, -1)
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(-1)
