"""Which implementation runs the CPU's ops: the compiled library, loaded at first use, or plain torch, and why."""

from __future__ import annotations

import ctypes
import threading

import torch

from swarm.errors import KernelError, OutOfMemory
from swarm_kernels.device.core_groups import CoreGroups
from swarm_kernels.ops.base.validate import PLAN_FAULTS
from swarm_kernels.ops.cpu import binding, build

REFERENCE = "reference"


class _Choice:
    """The library if it could be loaded, else the reason; settled once a process."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.settled = False
        self.loaded: ctypes.CDLL | None = None
        self.in_use: ctypes.CDLL | None = None
        self.reason = ""


_choice = _Choice()


def library() -> ctypes.CDLL | None:
    """The compiled kernels, or None when plain torch does their work. Compiles them if this machine never has."""
    if not _choice.settled:
        with _choice.lock:
            if not _choice.settled:
                _settle(_choice)
    return _choice.in_use


def _settle(choice: _Choice) -> None:
    try:
        choice.loaded = choice.in_use = binding.load(build.library())
    except build.BuildError as error:
        choice.reason = str(error)
    except (OSError, AttributeError) as error:  # a library that does not load, or is not the one we built
        choice.reason = f"the compiled library does not load: {error}"
    else:
        choice.loaded.swarm_set_threads(torch.get_num_threads())
    choice.settled = True


def loaded() -> ctypes.CDLL:
    """The library that packed some linear, even if other ops were told not to use it."""
    if _choice.loaded is None:
        raise KernelError(f"no compiled kernels: {_choice.reason}")
    return _choice.loaded


def isa() -> str:
    """The implementation in use: "avx512bf16", "avx512vnni", "avx512", "avx2" or "generic" (compiled), or "reference"
    (plain torch)."""
    native = library()
    return REFERENCE if native is None else native.swarm_isa().decode()


def describe() -> str:
    """`available()` in words, with the reason, for a program to show."""
    name = isa()
    if name != REFERENCE:
        return f"compiled ({name})"
    return f"plain torch: {_choice.reason}"


def select_isa(name: str) -> None:
    """Choose the implementation by `available`'s names; "best" undoes it. Linears already packed keep working under any
    compiled one. Raises KernelError if this machine does not have it."""
    library()
    if name == REFERENCE:
        _choice.in_use, _choice.reason = None, "it was asked for"
        return
    loaded = _choice.loaded
    if loaded is None or loaded.swarm_use_isa(b"" if name == "best" else name.encode()) != binding.OK:
        raise KernelError(f"no compiled kernels named '{name}' on this machine")
    _choice.in_use = loaded


def set_threads(count: int) -> None:
    """How many threads an op may use, the caller included; torch's own operators too."""
    if count < 1:
        raise KernelError(f"cannot compute with {count} threads")
    torch.set_num_threads(count)
    native = library()
    if native is not None:
        native.swarm_set_threads(count)


def split_columns(units: CoreGroups) -> None:
    """From now on two units of threads share the work of an op: each has its columns of a linear layer, the wide one
    the committed keys and the narrow one the tree's (Ghidorah, section III-B). `set_threads` undoes it.

    Changes no bit of any result. Raises KernelError where nothing is compiled.
    """
    native = library()
    if native is None:
        raise KernelError(f"there are no units of threads without compiled kernels: {_choice.reason}")
    torch.set_num_threads(units.threads)
    cores = [(ctypes.c_int32 * len(part))(*part) for part in (units.fast, units.slow)]
    native.swarm_split_columns(
        units.threads, len(units.slow), units.slow_permille, cores[0], len(cores[0]), cores[1], len(cores[1])
    )


def check(status: int) -> None:
    """Raise the error a status of the library stands for."""
    if status == binding.OK:
        return
    if status == binding.NO_MEMORY:
        raise OutOfMemory("too little memory for the kernels' scratch space; use smaller batches")
    raise KernelError(PLAN_FAULTS.get(status, f"the kernels failed with status {status}"))
