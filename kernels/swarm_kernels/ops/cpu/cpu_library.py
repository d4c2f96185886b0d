"""Selects the CPU backend: the compiled library, built and loaded at first use, or plain torch, with the reason."""

from __future__ import annotations

import ctypes
import threading

import torch

from swarm.errors import KernelError, OutOfMemory
from swarm_kernels.device.core_groups import CoreGroups
from swarm_kernels.ops.base.validate import PLAN_ERRORS
from swarm_kernels.ops.cpu import binding, build
from swarm_kernels.ops.cpu.compile import BuildError

REFERENCE = "reference"


class _Selection:
    """The library if it could be loaded, else the reason; decided once per process."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.resolved = False
        self.loaded: ctypes.CDLL | None = None
        self.in_use: ctypes.CDLL | None = None
        self.reason = ""


_selection = _Selection()


def library() -> ctypes.CDLL | None:
    """The compiled kernels, or None if plain torch is used. The first call on a machine compiles them."""
    if not _selection.resolved:
        with _selection.lock:
            if not _selection.resolved:
                _resolve(_selection)
    return _selection.in_use


def _resolve(selection: _Selection) -> None:
    try:
        selection.loaded = selection.in_use = binding.load(build.library())
    except BuildError as error:
        selection.reason = str(error)
    except (OSError, AttributeError) as error:  # a library that does not load, or is not the one we built
        selection.reason = f"the compiled library does not load: {error}"
    else:
        selection.loaded.swarm_set_threads(torch.get_num_threads())
    selection.resolved = True


def loaded() -> ctypes.CDLL:
    """The loaded library, which packed linears need even while another backend is selected. Raises KernelError."""
    if _selection.loaded is None:
        raise KernelError(f"no compiled kernels: {_selection.reason}")
    return _selection.loaded


def isa() -> str:
    """The instruction set in use: "avx512bf16", "avx512vnni", "avx512", "avx2" or "generic" (compiled), or "reference"
    (plain torch)."""
    native = library()
    return REFERENCE if native is None else native.swarm_isa().decode()


def describe() -> str:
    """The CPU backend as text for users, with the reason if it is plain torch."""
    name = isa()
    if name != REFERENCE:
        return f"compiled ({name})"
    return f"plain torch: {_selection.reason}"


def select_isa(name: str) -> None:
    """Select a backend by a name that `isa` returns; "best" restores the default. Linears already packed work with
    every compiled one. Raises KernelError if this machine does not support it."""
    library()
    if name == REFERENCE:
        _selection.in_use, _selection.reason = None, "it was selected"
        return
    loaded = _selection.loaded
    if loaded is None or loaded.swarm_use_isa(b"" if name == "best" else name.encode()) != binding.OK:
        raise KernelError(f"no compiled kernels named '{name}' on this machine")
    _selection.in_use = loaded


def set_threads(count: int) -> None:
    """Set the number of threads of an op, the caller included; also torch's."""
    if count < 1:
        raise KernelError(f"cannot compute with {count} threads")
    torch.set_num_threads(count)
    native = library()
    if native is not None:
        native.swarm_set_threads(count)


def split_columns(groups: CoreGroups) -> None:
    """Split the work of each op between a fast and a slow group of cores: each computes its columns of a linear layer;
    the fast group attends to committed keys, the slow one to tree slots (Ghidorah, section III-B). `set_threads`
    undoes it.

    Results stay bit for bit the same. Raises KernelError without compiled kernels.
    """
    native = library()
    if native is None:
        raise KernelError(f"core groups need the compiled kernels: {_selection.reason}")
    torch.set_num_threads(groups.threads)
    cores = [(ctypes.c_int32 * len(part))(*part) for part in (groups.fast, groups.slow)]
    native.swarm_split_columns(
        groups.threads, len(groups.slow), groups.slow_permille, cores[0], len(cores[0]), cores[1], len(cores[1])
    )


def check(status: int) -> None:
    """Raise the exception for a status code of the library."""
    if status == binding.OK:
        return
    if status == binding.NO_MEMORY:
        raise OutOfMemory("too little memory for the kernels' scratch space; use smaller batches")
    raise KernelError(PLAN_ERRORS.get(status, f"the kernels failed with status {status}"))
