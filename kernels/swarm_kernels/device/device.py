"""The device and number formats this machine computes with, and how much memory it may use.

Owns the names of dtypes on the wire and on command lines. Models are not known here.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import torch

from swarm.errors import DeviceUnavailable, UsageError

INT4: torch.dtype = torch.int4  # type: ignore[attr-defined]  # torch has it, its stubs do not
"""Names the format of `ops.base.int4_linear`; no tensor has this dtype."""

CODES4: torch.dtype = torch.uint4  # type: ignore[attr-defined]
"""Names the formats of `ops.base.codebook_linear`, in which a 4-bit span keeps matrices that are stored so; no tensor
has this dtype, and no span."""

FLOAT8: torch.dtype = torch.float8_e4m3fn
"""Names the format of `ops.base.fp8_linear`, in which spans of 8 and 4 bits keep matrices that are stored so; no
span has it."""

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "int8": torch.int8, "int4": INT4}
"""The number formats of weights; `state_dtype` is that of everything else."""

_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_CGROUP = Path("/sys/fs/cgroup")


@contextmanager
def single_threaded() -> Iterator[None]:
    """torch's operations in this thread run without helpers. Many small ones on a busy machine spend most of their time
    waiting until all helpers have had a core; the results are the same bits wherever they are element by element."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def parse_dtype(name: str) -> torch.dtype:
    """`"bf16"` -> torch.bfloat16. Raises UsageError."""
    try:
        return DTYPES[name]
    except KeyError:
        raise UsageError(f"'{name}' is not a number format; choose one of {', '.join(DTYPES)}") from None


def dtype_name(dtype: torch.dtype) -> str:
    """The inverse of `parse_dtype`. Raises UsageError."""
    try:
        return _NAMES[dtype]
    except KeyError:
        raise UsageError(f"{dtype} is not a number format of this program") from None


def state_dtype(weights: torch.dtype) -> torch.dtype:
    """Format of keys, values and hidden states on the wire: the weights' own, bf16 where these are integers."""
    return weights if weights.is_floating_point else torch.bfloat16


def bytes_per_weight(weights: torch.dtype) -> tuple[float, float]:
    """-> (in the layers, in the embedding and the head); the latter stay at 8 bits where the layers have 4."""
    if weights == INT4:
        return 5 / 8, 1.0  # 32 weights, a scale and a minimum are 20 bytes
    if weights == CODES4:
        return 9 / 16, 1.0  # of IQ4_NL and NF4; the others take 4.25 and 4.31 bits
    if weights == FLOAT8:
        return 33 / 32, 1.0  # a scale in fp32 for each 128
    return float(weights.itemsize), float(weights.itemsize)


def choose_device(gpu: int | None) -> torch.device:
    """The CPU for None, else that GPU. Raises DeviceUnavailable, naming the GPUs that exist."""
    if gpu is None:
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise DeviceUnavailable(f"GPU {gpu} was requested, but PyTorch finds none here; leave --gpu out to use the CPU")
    count = torch.cuda.device_count()
    if not 0 <= gpu < count:
        raise DeviceUnavailable(f"GPU {gpu} is not there; this machine has GPUs 0 to {count - 1}")
    device = torch.device("cuda", gpu)
    try:
        torch.empty(1, device=device)
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        raise DeviceUnavailable(f"GPU {gpu} cannot be used: {reason}; leave --gpu out to use the CPU") from None
    return device


def activation_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """Format of the residual stream inside a span: fp32 on a CPU, where it is free, else the model's own."""
    return torch.float32 if device.type == "cpu" else dtype


def available_memory(device: torch.device) -> int:
    """Bytes that could be used now without swapping: the GPU's free memory, or the machine's within its cgroup."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free)
    available = int(psutil.virtual_memory().available)
    limit = _cgroup_available()
    return available if limit is None else min(available, limit)


def _cgroup_available() -> int | None:
    """Bytes left under a container's memory limit; None without one. The page cache counts as available."""
    for limit_name, usage_name, stat_key in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "total_inactive_file"),
    ):
        try:
            limit = (_CGROUP / limit_name).read_text().strip()
            usage = int((_CGROUP / usage_name).read_text())
            stat = (_CGROUP / usage_name).with_name("memory.stat").read_text()
        except (OSError, ValueError):
            continue
        if not limit.isdigit():
            return None
        cache = next((int(line.split()[1]) for line in stat.splitlines() if line.startswith(f"{stat_key} ")), 0)
        return max(0, int(limit) - usage + cache)
    return None


def physical_cores() -> int:
    """Cores this process may use, without hyper-threads; at least 1."""
    usable = len(psutil.Process().cpu_affinity()) if hasattr(psutil.Process, "cpu_affinity") else psutil.cpu_count()
    physical = psutil.cpu_count(logical=False) or usable or 1
    return max(1, min(usable or 1, physical))
