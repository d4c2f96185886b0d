"""What this machine costs, by measurement: the cost curve, the thread count; and whether it computes right at all.

Owns how a span is timed. Knows neither peers nor plans; a node publishes what this returns.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence

import torch

from swarm.errors import ResourceError
from swarm.types import CostCurve
from swarm_kernels.device.device import INT4, physical_cores
from swarm_kernels.kvcache.cache import KVCacheManager, KvShape, StepRequest
from swarm_kernels.models.source import ModelSource
from swarm_kernels.ops import dispatch
from swarm_kernels.ops.base import int4_linear
from swarm_kernels.ops.base.layer_weights import plain_linear
from swarm_kernels.ops.base.torch_reference import decoder_layer
from swarm_kernels.runtime.llama_span import LlamaSpan, load_layer
from swarm_kernels.runtime.span import Span

DEFAULT_WIDTHS = (1, 2, 4, 8, 12, 16, 24, 32, 64, 256)
_SESSION = b"calibration"
_CHUNK = 128
_TOLERANCE = {torch.float32: 1e-3, torch.float16: 1e-2, torch.bfloat16: 5e-2, torch.int8: 1e-1, INT4: 1e-1}
"""By the weights' dtype: largest honest relative L2 distance of what a layer adds from the same layer in fp32."""


class StepTimer:
    """Times batches of one session of `context` tokens on a span, each undone afterwards. Holds a cache of its own."""

    def __init__(self, span: Span, context: int, widest: int) -> None:
        self._span = span
        self._context = context
        self._cache = span.new_cache(context + widest)
        self._cache.open(_SESSION, context + widest)
        generator = torch.Generator().manual_seed(0)
        self._rows = torch.randn(max(widest, _CHUNK), span.config.hidden_size, generator=generator)
        for done in range(0, context, _CHUNK):
            self._run(done, min(_CHUNK, context - done))

    def ms(self, width: int) -> float:
        """Wall milliseconds of one batch of `width` rows through the whole span."""
        seconds = self._run(self._context, width)
        self._cache.rollback(_SESSION, self._context)
        return 1e3 * seconds

    def _run(self, base: int, rows: int) -> float:
        metadata = self._cache.schedule([StepRequest(_SESSION, base, rows)])
        hidden = self._rows[:rows].to(device=self._span.device, dtype=self._span.dtype)
        self._wait()
        start = time.perf_counter()
        self._span.forward(hidden, metadata, self._cache)
        self._wait()
        return time.perf_counter() - start

    def _wait(self) -> None:
        if self._span.device.type == "cuda":
            torch.cuda.synchronize(self._span.device)


def measure_cost(
    span: Span, widths: Sequence[int] = DEFAULT_WIDTHS, context: int = 256, budget_s: float = 2.0
) -> CostCurve:
    """Milliseconds a layer takes at each width (Ghidorah, section III-C), in about `budget_s` seconds in all.

    Best on a span larger than the processor's caches. The widths take turns, each twice, since a batch after a much
    wider one is slow; the second one counts. Other work can only add to a time: the lower quartile of each width is
    taken, and one that still came out dearer than a wider one takes the wider one's time, so the curve never falls.
    Raises OutOfMemory.
    """
    stopwatch = StepTimer(span, context, max(widths))
    for width in widths:
        for _ in range(2):  # the first run of a shape pays for buffers and code, on a GPU the second for its graph
            stopwatch.ms(width)
    times: dict[int, list[float]] = {width: [] for width in widths}
    deadline = time.perf_counter() + budget_s
    while True:
        for width in widths:
            stopwatch.ms(width)
            times[width].append(stopwatch.ms(width))
        if time.perf_counter() >= deadline:
            break
    usual = [sorted(times[width])[len(times[width]) // 4] / len(span.layers) for width in widths]
    return CostCurve(tuple(widths), tuple(itertools.accumulate(reversed(usual), min))[::-1])


def choose_threads(span: Span, most: int | None = None, budget_s: float = 2.0) -> int:
    """Set, and return, the thread count (1 to `most`, by default the physical cores) that runs this span fastest.

    Decoding (1 row) and verifying (16 rows) count alike. A shared machine often does better with fewer than all cores.
    """
    most = most or physical_cores()
    candidates = sorted({1, *(most * k // 4 for k in (1, 2, 3)), most} - {0})
    if len(candidates) == 1:
        dispatch.set_threads(most)
        return most
    stopwatch = StepTimer(span, 64, 16)
    cost = dict.fromkeys(candidates, 1.0)
    for width in (1, 16):
        best = dict.fromkeys(candidates, float("inf"))
        deadline = time.perf_counter() + budget_s / 2
        rounds = 0
        while rounds < 3 or time.perf_counter() < deadline:  # in turns, so a busy moment hurts all candidates alike
            for threads in candidates:
                dispatch.set_threads(threads)
                best[threads] = min(best[threads], stopwatch.ms(width))
            rounds += 1
        for threads in candidates:
            cost[threads] *= best[threads]
    chosen = min(candidates, key=lambda threads: (cost[threads], threads))
    dispatch.set_threads(chosen)
    return chosen


def verify_layer(span: Span, source: ModelSource) -> None:
    """Compare the span's first layer with the plain reference in fp32, on a chunk and a tree. Lean spans only.

    Raises ResourceError if this machine's kernels compute something else, CorruptModel if the layer cannot be read.
    """
    if not isinstance(span, LlamaSpan):
        return
    layer = span.layers.start
    four_bits = span.weight_dtype == INT4  # whose rounding depends on the model, and is no fault
    pack = int4_linear.rounded_linear if four_bits else plain_linear
    plain = load_layer(source, layer, torch.float32, torch.device("cpu"), pack)
    config = span.config
    ours = span.new_cache(64)
    theirs = KVCacheManager(KvShape(1, config.num_kv_heads, config.head_dim, torch.float32), 64)
    generator = torch.Generator().manual_seed(1)
    steps = (
        StepRequest(_SESSION, 0, 21),
        StepRequest(_SESSION, 21, 0, (-1, 0, 0, 2), (0, 1, 2, 5)),
        StepRequest(_SESSION, 21, 0, (5, -1), (1, 3), commit_slots=(0, 2)),
    )
    for cache in (ours, theirs):
        cache.open(_SESSION, 48)
    for step in steps:
        hidden = torch.randn(step.rows, config.hidden_size, generator=generator).to(span.dtype)
        got = span.forward(hidden, ours.schedule([step]), ours, layer, layer + 1)
        metadata = theirs.schedule([step])
        cos, sin = span.rope.at(metadata.positions.to(span.device), theirs.top_position)
        want = decoder_layer(hidden.float(), plain, cos.cpu(), sin.cpu(), theirs.k[0], theirs.v[0], metadata)
        error = float((got.cpu().float() - want).norm() / (want - hidden.float()).norm())
        if not error <= _TOLERANCE[span.weight_dtype]:
            raise ResourceError(
                f"this machine computes layer {layer} with an error of {error:.2g}; it must not join ({dispatch.describe()})"
            )
