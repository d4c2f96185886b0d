"""When a GPU's kernels are used, what happens when they cannot be, and how tensors get there and back."""

from __future__ import annotations

import logging
import sys

import numpy as np
import pytest
import torch
from kernel_cases import Part, make_plan

from swarm.errors import KernelError
from swarm_kernels.device import transfer
from swarm_kernels.ops.base import validate
from swarm_kernels.ops.triton import selector

CUDA = torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def _fresh_selection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selector, "_selections", {})


def test_only_gpus_ask_for_gpu_kernels() -> None:
    assert selector.backend(torch.device("cpu"), torch.float32) is None
    assert selector.backend(CUDA, torch.float64) is None


def test_without_triton_a_gpu_computes_in_plain_torch(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "triton.errors", None)
    with caplog.at_level(logging.WARNING):
        assert selector.backend(CUDA, torch.bfloat16) is None
    assert "Triton cannot be used" in caplog.text
    assert selector.describe(CUDA, torch.bfloat16).startswith("plain torch: Triton cannot be used")


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (KernelError("the kernels compute keys with an error of 3"), "plain torch: the kernels compute keys"),
        (RuntimeError("no C compiler\nmore"), "plain torch: the kernels do not run: RuntimeError: no C compiler"),
        (OSError(), "plain torch: the kernels do not run: OSError: no message"),
    ],
    ids=str,
)
def test_a_failed_self_test_is_remembered_with_its_reason(
    monkeypatch: pytest.MonkeyPatch, error: Exception, reason: str
) -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    from swarm_kernels.ops.triton import selftest

    runs = []

    def fail(device: torch.device, dtype: torch.dtype, head_dim: int) -> None:
        runs.append((device, dtype, head_dim))
        raise error

    monkeypatch.setattr(selftest, "run", fail)
    for _ in range(2):
        assert selector.backend(CUDA, torch.bfloat16) is None
    assert selector.describe(CUDA, torch.bfloat16).startswith(reason)
    assert selector.backend(CUDA, torch.bfloat16, 128) is None
    assert runs == [(CUDA, torch.bfloat16, 64), (CUDA, torch.bfloat16, 128)]


def test_a_passed_self_test_gives_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    from swarm_kernels.ops.triton import backend, selftest

    tested: list[int] = []
    monkeypatch.setattr(selftest, "run", lambda device, dtype, head_dim: tested.append(head_dim))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert selector.backend(CUDA, torch.float16) is backend.TRITON
    assert selector.describe(CUDA, torch.float16) == "Triton kernels (sm_90)"
    for head_dim in (128, 80, 128):
        assert selector.backend(CUDA, torch.float16, head_dim) is backend.TRITON
    assert tested == [64, 128, 80]


def test_arrays_travel_in_one_buffer() -> None:
    arrays = [
        np.arange(5, dtype=np.int64),
        np.zeros((3, 0), np.int32),
        np.arange(6, dtype=np.int32).reshape(2, 3)[:, ::2],
    ]
    tensors = transfer.split(transfer.flatten(arrays, pinned=False), arrays)
    for array, tensor in zip(arrays, tensors, strict=True):
        assert tensor.numpy().dtype == array.dtype
        assert np.array_equal(tensor.numpy(), array)
        assert tensor.data_ptr() % 16 == tensors[0].data_ptr() % 16 or not tensor.numel()
    (shared,) = transfer.upload(arrays[:1], torch.device("cpu"))
    assert shared.data_ptr() == arrays[0].ctypes.data


def test_staging_leaves_the_cpu_alone() -> None:
    tensor = torch.ones(2, 3)
    assert transfer.to_device(tensor, torch.device("cpu")) is tensor
    assert transfer.to_host(tensor, torch.float32) is tensor
    assert transfer.to_device(tensor, torch.device("cpu"), torch.bfloat16).dtype == torch.bfloat16


def test_a_validated_plan_is_not_looked_at_again() -> None:
    plan, blocks = make_plan([Part(5, line=1)], torch.Generator().manual_seed(0))
    with pytest.raises(KernelError):
        validate.check_plan(plan, 1)
    validate.mark_validated(plan, 1)
    validate.check_plan(plan, 1)
    with pytest.raises(KernelError):
        validate.check_plan(plan, 0)
    validate.check_plan(plan, blocks)
