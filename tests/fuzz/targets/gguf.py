"""GGUF files: header, config, names of the tensors, the tokenizer inside. One is read, or it is a ModelError."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from model_bytes import MemoryFile

from swarm.errors import ModelError
from swarm_kernels.models.gguf import rope_factors
from swarm_kernels.models.gguf_config import gguf_model_config
from swarm_kernels.models.gguf_header import GgufHeader
from swarm_kernels.models.gguf_parts import LocatedTensor
from swarm_kernels.models.source import fingerprint
from swarm_kernels.models.tensor_shapes import check_shapes
from swarm_kernels.tokenizer.gguf import read_gguf_tokenizer

INSTRUMENT = ("swarm_kernels.models", "swarm_kernels.tokenizer")


def run(data: bytes) -> None:
    file = MemoryFile(data)
    try:
        header = GgufHeader(file)
    except ModelError:
        return
    with contextlib.suppress(ModelError):
        read_gguf_tokenizer(header, "a file").tokenizer.encode("hello world")
    try:
        located = {name: LocatedTensor(file, tensor) for name, tensor in header.tensors.items()}
        config, architecture = gguf_model_config(header, rope_factors(located, "a file"), "a file")
        check_shapes(config, architecture.views(header.tensors, config.hf, "a file"), "a file")
        fingerprint(config, [], file.read)  # type: ignore[arg-type]  # no tensor is read
    except ModelError:
        return


def seeds() -> Iterator[bytes]:
    for arch, kind in (("llama", "llama"), ("llama", "gpt2"), ("qwen2", "gpt2"), ("qwen3", "llama")):
        yield _small(arch, kind)
    for arch in ("qwen3moe", "gpt-oss", "deepseek2", "phi3", "granitemoe", "gemma3"):
        yield _small(arch, "gpt2", experts=2)


def _small(arch: str, tokenizer: str, experts: int = 0) -> bytes:
    writer: Any = gguf.GGUFWriter("/dev/null", arch)
    for add, value in (
        (writer.add_block_count, 1), (writer.add_context_length, 64), (writer.add_embedding_length, 8),
        (writer.add_feed_forward_length, 8), (writer.add_head_count, 2), (writer.add_rope_freq_base, 10000.0),
        (writer.add_layer_norm_rms_eps, 1e-5), (writer.add_vocab_size, 6), (writer.add_tokenizer_model, tokenizer),
        (writer.add_token_list, ["a", "b", "ab", "<s>", "</s>", "abab"]), (writer.add_bos_token_id, 3),
        (writer.add_token_types, [1, 1, 1, 3, 3, 4]), (writer.add_eos_token_id, 4), (writer.add_add_bos_token, True),
        (writer.add_chat_template, "{{ bos_token }}{{ messages }}"), (writer.add_head_count_kv, [1, 1]),
    ):  # fmt: skip
        add(value)
    if tokenizer == "llama":
        writer.add_token_scores([-1.0, -2.0, -3.0, 0.0, 0.0, -4.0])
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(4.0)
        writer.add_array("rope_freqs", [1.0, 1.0])
    else:
        writer.add_token_merges(["a b", "ab ab"])
        writer.add_tokenizer_pre("llama-bpe")
    if experts:
        writer.add_expert_count(experts)
        writer.add_expert_used_count(1)
        writer.add_sliding_window(32)
        writer.add_rope_dimension_count(2)
        writer.add_kv_lora_rank(4)
        writer.add_key_length(4)
        writer.add_value_length(4)
        for name, shape in (("gate", (2, 8, 8)), ("up", (2, 8, 8)), ("down", (2, 8, 8))):
            writer.add_tensor(f"blk.0.ffn_{name}_exps.weight", np.zeros(shape, np.float32))
        writer.add_tensor("blk.0.attn_k_b.weight", np.zeros((2, 4, 2), np.float32))
        writer.add_tensor("blk.0.attn_v_b.weight", np.zeros((2, 4, 4), np.float32))
    writer.add_tensor("token_embd.weight", np.zeros((6, 8), np.float32))
    writer.add_tensor("blk.0.attn_q.weight", np.zeros((8, 8), np.float32))
    return _written(writer)


def _written(writer: Any) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "m.gguf"
        writer.path = path
        writer.write_header_to_file(path)
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path.read_bytes()
