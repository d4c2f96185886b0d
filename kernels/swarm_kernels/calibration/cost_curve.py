"""Measurements of this machine: the cost curve, the best thread count, and a check of its numerics.

Owns how a span is timed. A node publishes the results.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from swarm.errors import ResourceError
from swarm.types import CostCurve
from swarm_kernels.device.device import INT4, physical_cores
from swarm_kernels.kvcache.cache import KVCacheManager, KvShape, StepRequest
from swarm_kernels.models.source import ModelSource
from swarm_kernels.ops import dispatch
from swarm_kernels.ops.base.layer_weights import Mixture
from swarm_kernels.ops.base.split_experts import HeldExperts, outputs_of
from swarm_kernels.ops.base.torch_reference import decoder_layer
from swarm_kernels.runtime.llama_span import LlamaSpan, load_layer
from swarm_kernels.runtime.mixture_reader import ExpertSpan, read_experts
from swarm_kernels.runtime.span import Span
from swarm_kernels.runtime.weight_reader import WeightReader, exact_packs_of

DEFAULT_WIDTHS = (1, 2, 4, 8, 12, 16, 24, 32, 64, 256)
_SESSION = b"calibration"
_PREFILL_CHUNK = 128
_OTHER_ROWS = 251  # a prime: batches of any width begin at all of them
_TOLERANCE = {torch.float32: 1e-3, torch.float16: 1e-2, torch.bfloat16: 5e-2, torch.int8: 1e-1, INT4: 1e-1}
"""By dtype of the weights: largest relative L2 error, against fp32, of what a layer adds to the residual stream."""
_EXPERT_ROWS = 16
_REROUTED, _MOST_REROUTED = 2.0, 0.25  # of a row's norm, if its experts are others; of the rows: as in `hf_check`


class StepTimer:
    """Times batches of one session of `context` tokens on a span, rolling each back. Has its own KV cache.

    Rows are random and others in every batch. In a mixture of E experts, of which a row chooses k, n unlike rows read
    some E (1 - (1 - k/E)^n) experts; n equal ones would read k, and the same row again and again would find its k in
    the processor's cache.
    """

    def __init__(self, span: Span, context: int, widest: int) -> None:
        self._span = span
        self._context = context
        self._cache = span.new_cache(context + widest)
        self._cache.open(_SESSION, context + widest)
        generator = torch.Generator().manual_seed(0)
        count = max(widest, _PREFILL_CHUNK) + _OTHER_ROWS
        self._rows = torch.randn(count, span.config.rows.width(span.layers.start), generator=generator)
        self._next = 0  # row
        for start in range(0, context, _PREFILL_CHUNK):
            self._run(start, min(_PREFILL_CHUNK, context - start))

    def ms(self, width: int) -> float:
        """Wall milliseconds of one batch of `width` rows through the whole span."""
        seconds = self._run(self._context, width)
        self._cache.rollback(_SESSION, self._context)
        return 1e3 * seconds

    def _run(self, base: int, rows: int) -> float:
        metadata = self._cache.schedule([StepRequest(_SESSION, base, rows)])
        self._next = (self._next + rows) % _OTHER_ROWS
        hidden = self._rows[self._next : self._next + rows].to(device=self._span.device, dtype=self._span.dtype)
        self._synchronize()
        start = time.perf_counter()
        self._span.forward(hidden, metadata, self._cache)
        self._synchronize()
        return time.perf_counter() - start

    def _synchronize(self) -> None:
        if self._span.device.type == "cuda":
            torch.cuda.synchronize(self._span.device)


def measure_cost(
    span: Span, widths: Sequence[int] = DEFAULT_WIDTHS, context: int = 256, budget_s: float = 2.0
) -> CostCurve:
    """Milliseconds a layer takes at each width (Ghidorah, section III-C), in about `budget_s` seconds in all.

    Best on a span larger than the processor's caches. The widths take turns, each twice, since a batch after a much
    wider one is slow; the second one counts. Other load can only add time: the lower quartile of each width is taken,
    and a width that still measured slower than a wider one takes the wider one's time, so the curve never falls.
    Raises OutOfMemory.
    """
    timer = StepTimer(span, context, max(widths))
    for width in widths:
        for _ in range(2):  # the first run of a shape allocates and compiles, on a GPU the second captures its graph
            timer.ms(width)
    times: dict[int, list[float]] = {width: [] for width in widths}
    deadline = time.perf_counter() + budget_s
    while True:
        for width in widths:
            timer.ms(width)
            times[width].append(timer.ms(width))
        if time.perf_counter() >= deadline:
            break
    quartiles = [sorted(times[width])[len(times[width]) // 4] / len(span.layers) for width in widths]
    return CostCurve(tuple(widths), tuple(itertools.accumulate(reversed(quartiles), min))[::-1])


def choose_threads(span: Span, max_threads: int | None = None, budget_s: float = 2.0) -> int:
    """Set, and return, the thread count (1 to `max_threads`, by default the physical cores) that runs this span
    fastest.

    Decoding (1 row) and verifying (16 rows) weigh the same. A shared machine is often faster with fewer than all cores.
    """
    max_threads = max_threads or physical_cores()
    candidates = sorted({1, *(max_threads * k // 4 for k in (1, 2, 3)), max_threads} - {0})
    if len(candidates) == 1:
        dispatch.set_threads(max_threads)
        return max_threads
    timer = StepTimer(span, 64, 16)
    cost = dict.fromkeys(candidates, 1.0)
    for width in (1, 16):
        best = dict.fromkeys(candidates, float("inf"))
        deadline = time.perf_counter() + budget_s / 2
        rounds = 0
        while rounds < 3 or time.perf_counter() < deadline:  # in turns, so that other load affects all candidates alike
            for threads in candidates:
                dispatch.set_threads(threads)
                best[threads] = min(best[threads], timer.ms(width))
            rounds += 1
        for threads in candidates:
            cost[threads] *= best[threads]
    chosen = min(candidates, key=lambda threads: (cost[threads], threads))
    dispatch.set_threads(chosen)
    return chosen


def verify_layer(span: Span, source: ModelSource) -> None:
    """Compare the span's first layer, and its first mixture of experts, with the plain reference in fp32, on a chunk
    and a tree. `LlamaSpan` only. Of a mixture that is partly elsewhere, what is here: the others must be
    zeros yet.

    Raises ResourceError if this machine's kernels give other results, CorruptModel if the layer cannot be read.
    """
    if not isinstance(span, LlamaSpan):
        return
    mixtures = [place for place, weights in enumerate(span.weights) if isinstance(weights.mlp, Mixture)]
    for place in sorted({0, *mixtures[:1]}):
        layer = span.layers.start + place
        error = _error_of_mixture(span, source, layer) if place in mixtures else _error_of_layer(span, source, layer)
        if not error <= _TOLERANCE[span.weight_dtype]:
            raise _wrong(f"layer {layer}", error)


def verify_experts(span: ExpertSpan, source: ModelSource) -> None:
    """As `verify_layer`, of experts without their layer: the first and the last one here."""
    layer = min(span.by_layer)
    first, last = span.experts.start, span.experts.stop - 1
    reference = {
        expert: read_experts(
            WeightReader(source, torch.float32, torch.device("cpu")),
            source.config, layer, exact_packs_of(span.weight_dtype), range(expert, expert + 1),
        )
        for expert in {first, last}
    }  # fmt: skip
    x = torch.randn(_EXPERT_ROWS, span.hidden, generator=torch.Generator().manual_seed(1))
    rows = torch.arange(_EXPERT_ROWS)
    for expert, exact in reference.items():
        expected = outputs_of(exact, x, torch.zeros_like(rows))
        found = span.outputs(layer, x, rows, torch.full_like(rows, expert))
        error = float((found - expected).norm() / expected.norm())
        if not error <= _TOLERANCE[span.weight_dtype]:
            raise _wrong(f"expert {expert} of layer {layer}", error)


def _wrong(what: str, error: float) -> ResourceError:
    return ResourceError(
        f"this machine computes {what} with an error of {error:.2g}; it must not join ({dispatch.describe()})"
    )


def _error_of_layer(span: LlamaSpan, source: ModelSource, layer: int) -> float:
    """Of what the layer adds to the residual stream, relative; the worst step."""
    return max(
        float(step.beyond_rounding(None) / (step.expected - step.hidden).norm()) for step in _steps(span, source, layer)
    )


def _error_of_mixture(span: LlamaSpan, source: ModelSource, layer: int) -> float:
    """Likewise, of rows: that which three of four rows do not exceed, as rounding sends some to other experts, where
    two are as good as equal; infinite for a row that is far off."""
    errors = []
    for step in _steps(span, source, layer):
        norms = (step.expected - step.hidden).norm(dim=-1)
        errors.append(step.beyond_rounding(-1) / torch.maximum(norms, norms.mean()))
    rows = torch.cat(errors)
    if not float(rows.max()) <= _REROUTED:
        return float("inf")
    return float(rows.quantile(1 - _MOST_REROUTED, interpolation="higher"))


@dataclass(frozen=True)
class _Step:
    """`[n, hidden]` fp32 each: into a layer, out of it, and out of the reference. `state`: what the output is rounded
    to."""

    hidden: torch.Tensor
    output: torch.Tensor
    expected: torch.Tensor
    state: torch.dtype

    def beyond_rounding(self, dim: int | None) -> torch.Tensor:
        """How far the output is off, by rows for -1; that it is rounded is no error."""
        rounding = (self.expected.to(self.state).float() - self.expected).norm(dim=dim)
        beyond: torch.Tensor = (self.output - self.expected).norm(dim=dim).square() - rounding.square()
        return beyond.clamp_min(0).sqrt()


def _steps(span: LlamaSpan, source: ModelSource, layer: int) -> list[_Step]:
    """A chunk and trees through the span's layer and the reference."""
    # int4 is compared with rounded weights: the rounding error depends on the model
    held = None if span.held is None else HeldExperts(span.held.experts)
    reference = load_layer(source, layer, exact_packs_of(span.weight_dtype), held)
    config = span.config
    cache = span.new_cache(64)
    reference_cache = KVCacheManager(KvShape(1, config.num_kv_heads, config.head_dim, torch.float32), 64)
    generator = torch.Generator().manual_seed(1)
    steps = (
        StepRequest(_SESSION, 0, 21),
        StepRequest(_SESSION, 21, 0, (-1, 0, 0, 2), (0, 1, 2, 5)),
        StepRequest(_SESSION, 21, 0, (5, -1), (1, 3), commit_slots=(0, 2)),
    )
    for each in (cache, reference_cache):
        each.open(_SESSION, 48)
    done = []
    for step in steps:
        hidden = torch.randn(step.rows, config.hidden_size, generator=generator).to(span.dtype)
        output = span.forward(hidden, cache.schedule([step]), cache, layer, layer + 1)
        metadata = reference_cache.schedule([step])
        cos, sin = span.rope.at(metadata.positions.to(span.device), reference_cache.top_position)
        expected = decoder_layer(
            hidden.float(), reference, cos.cpu(), sin.cpu(), reference_cache.k[0], reference_cache.v[0], metadata
        )
        done.append(_Step(hidden.float(), output.cpu().float(), expected, span.dtype))
    return done
