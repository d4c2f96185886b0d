"""What of the package is compiled: the planner's sweep, and the CPU kernels, which a wheel brings along.

Everything else is in `pyproject.toml`. `release/build_wheels.py` sets these variables:

- `SWARM_WHEEL=pure`: nothing is compiled, for machines that no wheel was built for (plain torch and numpy compute).
- `SWARM_WHEEL_MACHINE` with `CC` and `CXX`: the machine that these compile for, as `platform.machine()` names it.

Without a compiler both parts are left out, and the package works without them.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

KERNELS = Path("kernels/swarm_kernels/ops/cpu")
ABI = "cp311"  # the first Python that has all that the sweep calls in its stable ABI; a wheel serves later ones too


def kernel_compiler() -> ModuleType:
    spec = importlib.util.spec_from_file_location("compile_kernels", KERNELS / "compile.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class BuildWithKernels(build_ext):
    """Also compiles the kernels into the wheel. An editable checkout compiles its own at their first use."""

    def run(self) -> None:
        super().run()
        if self.inplace or self.editable_mode:
            return
        kernels = kernel_compiler()
        machine = os.environ.get("SWARM_WHEEL_MACHINE", "")
        target = Path(self.build_lib, "swarm_kernels", "ops", "cpu", kernels.prebuilt_name(machine))
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            compiler = shutil.which(os.environ.get("CXX", "")) or kernels.find_compiler()
            kernels.compile_library(compiler, target, machine, portable=True)
        except kernels.BuildError as error:
            self.warn(f"this wheel has no compiled CPU kernels: {error}")


sweep = Extension(
    "swarm.planner.routing._relax",
    ["swarm/planner/routing/_relax.c"],
    extra_compile_args=["-O3"],
    extra_link_args=["-Wl,--no-as-needed", "-lc"] if sys.platform == "linux" else [],  # so that tools see which libc
    define_macros=[("Py_LIMITED_API", "0x030B0000")],
    py_limited_api=True,
    optional=True,  # without a compiler numpy does the same, several times slower
)
compiled: dict[str, Any] = {
    "ext_modules": [sweep],
    "cmdclass": {"build_ext": BuildWithKernels},
    "options": {"bdist_wheel": {"py_limited_api": ABI}},
}
setup(**({} if os.environ.get("SWARM_WHEEL") == "pure" else compiled))
