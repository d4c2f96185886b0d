"""Loads a span of a model: a `LlamaSpan` where it covers the model exactly, else an `HfSpan` on transformers' layers.
Mixtures of experts run on a `LlamaSpan` on CPUs alone: no GPU kernel groups rows by expert yet, and transformers' does.

Owns that choice, and that the span's weights are on this machine before they are read.
"""

from __future__ import annotations

import torch

from swarm.errors import UsageError
from swarm.types import LayerSpan
from swarm_kernels.device.allocator import release_free_memory
from swarm_kernels.models.layers import tensors_of_experts, tensors_of_span
from swarm_kernels.models.source import FetchProgress, ModelSource
from swarm_kernels.ops.base.split_experts import HeldExperts
from swarm_kernels.runtime.llama_span import LlamaSpan
from swarm_kernels.runtime.mixture_reader import ExpertSpan
from swarm_kernels.runtime.span import Progress, Span


def load_span(
    source: ModelSource,
    layers: LayerSpan,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    progress: Progress | None = None,
    like: Span | None = None,
    fetching: FetchProgress | None = None,
    held: HeldExperts | None = None,
) -> Span:
    """Read the tensors of `layers` (and the embedding, norm and head where the span has an end of the model).

    `dtype`: of the weights, one of `device.DTYPES`. Each layer is read,
    converted and packed before the next, so memory never holds the weights twice. `like`: a span of the same model,
    dtype and device, whose weights are reused for what both hold (`LlamaSpan` only). `fetching`: told of the
    bytes of weights that come from a hub first, if any have to. transformers' layers are checked against transformers
    once loaded, see `hf_check`. `held`: of mixtures, read these experts alone (`LlamaSpan` only). Raises ModelNotFound,
    CorruptModel, UnsupportedModel, OutOfMemory, DiskFull, UsageError.
    """
    if layers.end > source.config.num_layers:
        raise UsageError(f"layers {layers} were requested, but the model has {source.config.num_layers}")
    device = torch.device(device)
    compiled = source.config.has_fast_path and (device.type == "cpu" or not source.config.is_mixture)
    if held is not None:
        check_splittable(source, device)
    source.fetch(tensors_of_span(source, layers, held.experts if held else None), fetching)

    def report(fraction: float) -> None:
        release_free_memory()  # what reading and packing a layer leaves behind adds up to half of a span otherwise
        if progress is not None:
            progress(fraction)

    if compiled:
        shared = like if isinstance(like, LlamaSpan) else None
        span: Span = LlamaSpan.load(source, layers, dtype, device, report, shared, held)
    else:
        from swarm_kernels.runtime.hf_check import check_layers  # imports transformers, which takes seconds
        from swarm_kernels.runtime.hf_span import HfSpan

        general = HfSpan.load(source, layers, dtype, device, report)
        check_layers(general)
        span = general
    release_free_memory()
    return span


def load_experts(
    source: ModelSource,
    layers: LayerSpan,
    experts: range,
    dtype: torch.dtype,
    progress: Progress | None = None,
    fetching: FetchProgress | None = None,
) -> ExpertSpan:
    """Read these experts of each mixture in `layers` and nothing else. Arguments and errors as for `load_span`."""
    check_splittable(source, torch.device("cpu"))
    source.fetch(tensors_of_experts(source, layers, experts), fetching)

    def report(fraction: float) -> None:
        release_free_memory()
        if progress is not None:
            progress(fraction)

    return ExpertSpan.load(source, layers, experts, dtype, report)


def check_splittable(source: ModelSource, device: torch.device) -> None:
    """Raises UsageError unless the experts of this model's layers can be held by several nodes."""
    if not source.config.is_mixture or device.type != "cpu":
        raise UsageError(
            "experts are shared by nodes only where our compiled kernels run the model's mixtures, on CPUs; "
            f"{source.name} is not such a model here: serve whole layers of it"
        )
