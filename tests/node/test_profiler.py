"""τ follows the load and falls back; a machine is measured once."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from tiny_models import ModelTensors, tiny_model

from swarm.types import LayerSpan
from swarm_node import profiler
from swarm_node.executor import BatchStats
from swarm_node.profiler import LayerTime, calibrate

SPAN = LayerSpan(0, 10)
CPU = torch.device("cpu")


def batch(queue_ms: float, compute_ms: float, decode: int = 1, rows: int = 1) -> BatchStats:
    return BatchStats(SPAN, 1, decode, rows, queue_ms, compute_ms)


def test_tau_rises_with_the_queue_and_fades_when_work_stops() -> None:
    now = 0.0
    tau = LayerTime(1.0, clock=lambda: now)
    assert tau.ms == 1.0
    for _ in range(100):
        tau.observe(batch(queue_ms=40.0, compute_ms=20.0, rows=8))
    assert tau.ms == pytest.approx(6.0, rel=0.01)
    now += profiler.CALM_S
    assert 1.0 < tau.ms < 3.0
    now += 20 * profiler.CALM_S
    assert tau.ms == pytest.approx(1.0)


def test_prefill_alone_says_nothing_of_a_token() -> None:
    tau = LayerTime(1.0, clock=lambda: 0.0)
    tau.observe(batch(0.0, 5000.0, decode=0, rows=256))
    assert tau.ms == 1.0


def test_a_calibration_that_was_off_is_corrected_by_real_steps() -> None:
    now = 0.0
    tau = LayerTime(9.0, clock=lambda: now)
    for _ in range(400):
        tau.observe(batch(0.0, 10.0))
    now += 100 * profiler.CALM_S
    assert tau.ms == pytest.approx(1.0, rel=0.05)


def test_a_machine_is_measured_once_and_again_when_the_memory_is_of_no_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(profiler, "COST_BUDGET_S", 0.01)
    source = ModelTensors(tiny_model("llama"))
    measured: list[int] = []
    measure = profiler._measure

    def counted(*args: object) -> profiler.Calibration:
        measured.append(1)
        return measure(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(profiler, "_measure", counted)

    def again() -> profiler.Calibration:
        return calibrate(source, torch.float32, CPU, 1, tmp_path)

    first = again()
    assert first.threads == 1
    assert all(ms > 0 for ms in first.cost.ms)
    assert again() == first
    assert len(measured) == 1
    (file,) = tmp_path.glob("*.json")
    file.write_text("{")
    again()
    file.write_text('{"threads": 0, "widths": [1], "ms": [1.0]}')
    again()
    os.utime(file, (0, 0))
    again()
    assert len(measured) == 4
