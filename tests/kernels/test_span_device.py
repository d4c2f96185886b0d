"""Names of devices and number formats, and how much memory there is."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from swarm.errors import DeviceUnavailable, UsageError
from swarm_kernels.device import device
from swarm_kernels.device.device import (
    activation_dtype,
    available_memory,
    choose_device,
    dtype_name,
    parse_dtype,
    physical_cores,
    state_dtype,
)


def test_number_formats() -> None:
    for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)):
        assert parse_dtype(name) is dtype
        assert dtype_name(dtype) == name
    with pytest.raises(UsageError, match="'int9' is not a number format; choose one of fp32, bf16, fp16, int8"):
        parse_dtype("int9")
    with pytest.raises(UsageError):
        dtype_name(torch.int64)
    assert state_dtype(torch.int8) is torch.bfloat16
    assert state_dtype(torch.float16) is torch.float16
    assert activation_dtype(torch.bfloat16, torch.device("cpu")) is torch.float32
    assert activation_dtype(torch.bfloat16, torch.device("cuda", 0)) is torch.bfloat16


def test_the_cpu_is_the_default_and_a_missing_gpu_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose_device(None) == torch.device("cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(DeviceUnavailable, match="GPU 0 was requested, but PyTorch finds none"):
        choose_device(0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    for gpu in (2, -1):
        with pytest.raises(DeviceUnavailable, match="has GPUs 0 to 1"):
            choose_device(gpu)


def test_memory_is_bounded_by_the_containers_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "_CGROUP", tmp_path)
    everything = available_memory(torch.device("cpu"))
    assert everything > 0
    (tmp_path / "memory.max").write_text("1000000\n")
    (tmp_path / "memory.current").write_text("900000\n")
    (tmp_path / "memory.stat").write_text("anon 5\ninactive_file 50000\nactive_file 7\n")
    assert available_memory(torch.device("cpu")) == 150000
    (tmp_path / "memory.max").write_text("max\n")
    assert available_memory(torch.device("cpu")) > 150000


def test_there_is_a_core() -> None:
    assert physical_cores() >= 1
