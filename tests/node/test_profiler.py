"""A machine is measured once, and a node without compiled kernels logs why."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
import torch
from tiny_models import ModelTensors, tiny_model

from swarm.config import NodeConfig
from swarm.types import CostCurve
from swarm_kernels.ops import dispatch
from swarm_node.membership import hardware, profiler
from swarm_node.membership.policy import CalibrationPolicy
from swarm_node.membership.profiler import Calibration, calibrate

CPU = torch.device("cpu")


CURVE = CostCurve((1, 4, 16), (1.0, 1.5, 4.0))


def test_a_disk_that_cannot_be_written_costs_no_more_than_a_measurement(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(profiler, "_measure", lambda *facts: Calibration(1, CURVE))
    source = ModelTensors(tiny_model("llama"))
    (tmp_path / "file").write_text("in the way")
    assert calibrate(source, torch.float32, CPU, 1, tmp_path / "file" / "folder").threads == 1

    def full(*args: object, **kwargs: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    assert calibrate(source, torch.float32, CPU, 1, tmp_path / "calibration").threads == 1
    assert not list((tmp_path / "calibration").glob("*.json"))


def test_a_machine_is_measured_once_and_again_when_the_cache_is_invalid(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(profiler, "POLICY", CalibrationPolicy(cost_budget_s=0.01))
    source = ModelTensors(tiny_model("llama"))
    measured: list[int] = []
    measure = profiler._measure

    def counted(*args: object) -> profiler.Calibration:
        measured.append(1)
        return measure(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(profiler, "_measure", counted)
    monkeypatch.setattr(profiler, "_is_idle", lambda: False)
    monkeypatch.setattr(profiler, "POLICY", CalibrationPolicy(cost_budget_s=0.01, busy_max_age_s=-1.0))
    calibrate(source, torch.float32, CPU, 1, tmp_path)
    monkeypatch.setattr(profiler, "_is_idle", lambda: True)
    measured.clear()

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


def test_a_node_without_compiled_kernels_logs_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tiny_model("llama").save_pretrained(tmp_path)
    monkeypatch.setattr(dispatch, "isa", lambda: "reference")
    monkeypatch.setattr(dispatch, "describe", lambda: "plain torch: no C++ compiler found (g++ or clang++)")
    monkeypatch.setattr(hardware, "calibrate", lambda *facts: Calibration(1, CURVE))
    hardware.measure(NodeConfig(model=str(tmp_path), dtype="fp32")).source.close()
    assert "no C++ compiler found" in caplog.text
