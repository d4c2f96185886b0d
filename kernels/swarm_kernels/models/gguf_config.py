"""The metadata of a GGUF file -> ModelConfig and its architecture. The values go through `hf_config` as if they came
from a config.json; `gguf_types` knows the architectures."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from swarm.errors import CorruptModel, UnsupportedModel
from swarm_kernels.models.config import FAST_PATH_ARCHITECTURES, ModelConfig
from swarm_kernels.models.gguf_header import GgufHeader
from swarm_kernels.models.gguf_types.architecture import Architecture
from swarm_kernels.models.gguf_types.metadata import Metadata
from swarm_kernels.models.gguf_types.table import ARCHITECTURES
from swarm_kernels.models.hf_config import model_config


def gguf_model_config(
    header: GgufHeader, factors: Mapping[str, tuple[float, ...]], where: str
) -> tuple[ModelConfig, Architecture]:
    """`factors`: the decoded tensors that scale the rotary embedding, by their names (`gguf_types.rope`).

    Raises CorruptModel, UnsupportedModel.
    """
    arch = header.text("general.architecture")
    if arch not in ARCHITECTURES:
        known = ", ".join(sorted(ARCHITECTURES))
        raise UnsupportedModel(f"{where} holds a model of architecture {arch[:40]!r}; GGUF files of {known} are read")
    meta = Metadata(header, arch, header.tensors, factors, where)
    try:
        hf = ARCHITECTURES[arch].config(meta)
    except ArithmeticError:
        raise CorruptModel(f"{where}: the metadata give sizes that cannot be") from None
    rotated = meta.integer("rope.dimension_count")
    meta.refuse_the_rest()
    if not hf.get("head_dim", 1):
        raise CorruptModel(f"{where}: the metadata says that an attention head has no dimensions")
    config = model_config(hf, where=where)
    if config.model_type not in FAST_PATH_ARCHITECTURES:
        return config, ARCHITECTURES[arch]
    config = replace(config, o_bias="blk.0.attn_output.bias" in header.tensors)
    if rotated not in (None, config.head_dim):
        if not 0 < rotated < config.head_dim:
            raise CorruptModel(f"{where}: {rotated} of the {config.head_dim} dimensions of a head cannot be rotated")
        config = replace(config, rope=replace(config.rope, dim=rotated))
    return config, ARCHITECTURES[arch]
