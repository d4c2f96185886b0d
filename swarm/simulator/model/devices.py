"""How long a device takes for a batch of a model's layers, and how many of them it holds.

Two models: a roofline (the slower of moving bytes and doing arithmetic, each at a share of the data sheet's
peak), or a measured cost curve.
"""

from __future__ import annotations

import math

import msgspec

from swarm.errors import UsageError
from swarm.simulator.model.model import ModelSpec
from swarm.types import CostCurve

WIDTHS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
GIGA = 1e9


class DeviceSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`count` machines of one kind. Give `bandwidth_gb_s` and `tflops`, or `widths` and `layer_ms`."""

    name: str
    count: int = 1
    memory_gb: float
    memory_share: float = 0.9  # of its memory that may be used at all
    bandwidth_gb_s: float = 0.0  # data sheet
    tflops: float = 0.0  # data sheet, dense, in the model's number format
    memory_efficiency: float = 1.0  # share of the bandwidth that decoding reaches
    compute_efficiency: float = 1.0  # share of the arithmetic that prefill reaches
    widths: tuple[int, ...] = ()  # measured: rows of a batch ...
    layer_ms: tuple[float, ...] = ()  # ... and ms a layer at that many, with little context
    context_ms: float = 0.0  # measured: ms a layer per 1000 tokens of context, all rows together
    layer_overhead_ms: float = 0.0  # a batch pays this for each layer (kernel launches)
    step_overhead_ms: float = 0.0  # and this once (frames, scheduling, host code)
    region: str = ""
    tier: int = 0  # Hyperion: the tier it belongs to

    def __post_init__(self) -> None:
        roofline = self.bandwidth_gb_s > 0 and self.tflops > 0
        measured = len(self.widths) == len(self.layer_ms) > 0
        if roofline == measured:
            raise ValueError(f"device {self.name} needs either bandwidth_gb_s and tflops, or widths and layer_ms")
        if measured and not all(ms > 0 for ms in self.layer_ms):
            raise ValueError(f"device {self.name}: a layer takes more than 0 ms")
        if self.count < 0 or not self.memory_gb > 0:
            raise ValueError(f"device {self.name} needs memory_gb above 0 and a count from 0 up")


class DeviceCostModel:
    """One device running one model; all times in ms."""

    def __init__(self, device: DeviceSpec, model: ModelSpec) -> None:
        self.device, self.model = device, model
        self._measured = CostCurve(device.widths, device.layer_ms) if device.widths else None
        self._bytes_per_ms = max(device.bandwidth_gb_s * device.memory_efficiency, 1e-9) * GIGA / 1e3
        self._flops_per_ms = max(device.tflops * device.compute_efficiency, 1e-9) * GIGA
        self.curve = CostCurve(WIDTHS, tuple(self.layer_ms(w, 0.0, 0.0) for w in WIDTHS))

    def layer_ms(self, rows: float, kv_tokens: float, row_context: float) -> float:
        """One layer. `kv_tokens`: context that is read, all sessions; `row_context`: context summed over the rows."""
        model, overhead = self.model, self.device.layer_overhead_ms
        if self._measured is not None:
            return overhead + self._measured.ms_at(rows) + self.device.context_ms * row_context / 1000.0
        moved = (model.layer_bytes + kv_tokens * model.kv_token_bytes) / self._bytes_per_ms
        worked = (rows * model.row_flops + row_context * model.context_flops) / self._flops_per_ms
        return overhead + max(moved, worked)

    def head_ms(self, rows: float) -> float:
        """The LM head for `rows` rows; a measured device takes as long as a layer of its size would."""
        model = self.model
        if self._measured is not None:
            return self._measured.ms_at(rows) * model.head_bytes / model.layer_bytes
        flops = 2.0 * rows * model.hidden * model.vocabulary
        return max(model.head_bytes / self._bytes_per_ms, flops / self._flops_per_ms)

    def span_ms(self, start: int, end: int, rows: float = 1.0, kv_tokens: float = 0.0, context: float = 0.0) -> float:
        """One batch of `rows` rows through layers `[start, end)`, head and overheads included."""
        head = self.head_ms(min(rows, 1.0)) if end == self.model.layers else 0.0
        return self.device.step_overhead_ms + (end - start) * self.layer_ms(rows, kv_tokens, context) + head

    @property
    def flops_per_s(self) -> float:
        """What it reaches on long prompts."""
        if self._measured is not None:
            return self.model.row_flops * WIDTHS[-1] / self._measured.ms_at(WIDTHS[-1]) * 1e3
        return self._flops_per_ms * 1e3

    @property
    def memory_bytes(self) -> float:
        return self.device.memory_gb * GIGA * self.device.memory_share

    def capacity(self, kv_tokens: int) -> int:
        """Layers it holds with room for `kv_tokens` tokens of KV each, wherever in the model they lie.

        As on a real node: room for the heavier of embedding and head is set aside, or for both if the model fits whole.
        """
        model = self.model
        layer = model.layer_bytes + kv_tokens * model.kv_token_bytes
        if self.memory_bytes >= model.layers * layer + 2 * model.head_bytes:
            return model.layers
        return max(0, min(math.floor((self.memory_bytes - model.head_bytes) / layer), model.layers - 1))

    def kv_room(self, start: int, end: int) -> float:
        """Bytes left for KV beside the weights of `[start, end)`. Raises UsageError if the weights do not fit."""
        room = self.memory_bytes - self.model.memory_bytes(start, end)
        if room < 0:
            raise UsageError(f"layers {start}:{end} of {self.model.name} do not fit into a {self.device.name}")
        return room
