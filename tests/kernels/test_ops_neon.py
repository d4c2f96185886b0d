"""The portable kernels as a program of their own, against torch: on this machine, and on 64-bit ARM (NEON), compiled
across and run by an emulator, where both are installed."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from code_cases import random_codes, random_fp8, summed_in_groups
from kernel_cases import Part, chain, make_plan, random_blocks, random_tree

from swarm_kernels.batch import AttentionMetadata
from swarm_kernels.ops import dispatch
from swarm_kernels.ops.base import int4_linear, int8_linear
from swarm_kernels.ops.base.codebook_linear import CodebookLinear, CodeFormat
from swarm_kernels.ops.base.torch_reference import REFERENCE
from swarm_kernels.ops.cpu import compile as cpu_compile
from swarm_kernels.ops.cpu.cpu_linear import PackedLinear

COMPILERS = {"native": ("g++", ""), "aarch64": ("aarch64-linux-gnu-g++", "qemu-aarch64")}  # and emulators
pytestmark = pytest.mark.slow


@dataclass(frozen=True)
class Program:
    path: Path
    emulator: str  # or ""

    def run(self, given: bytes) -> bytes:
        command = [self.emulator, str(self.path)] if self.emulator else [str(self.path)]
        done = subprocess.run(command, input=given, capture_output=True, timeout=60, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout


@pytest.fixture(scope="module", params=COMPILERS)
def program(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Program:
    compiler, emulator = COMPILERS[request.param]
    for needed in filter(None, (compiler, emulator)):
        if shutil.which(needed) is None:
            pytest.skip(f"{needed} is not installed")
    target = tmp_path_factory.mktemp("portable") / "program"
    sources = [*map(str, sorted(cpu_compile.SOURCES.glob("*.cpp"))), str(Path(__file__).with_name("cross_main.cpp"))]
    flags = [*cpu_compile.FLAGS, "-O1", "-I", str(cpu_compile.SOURCES), "-static"]  # -O1: half the time to compile
    subprocess.run([compiler, *flags, *sources, "-o", str(target)], check=True, timeout=300)
    return Program(target, emulator)


@dataclass
class Calls:
    """Ops for the program, and what they must come to."""

    program: Program
    parts: list[bytes] = field(default_factory=list)
    expected: list[torch.Tensor] = field(default_factory=list)

    def add(self, op: bytes, numbers: list[int], *tensors: torch.Tensor | None, result: torch.Tensor) -> None:
        self.parts += [op, torch.tensor(numbers).numpy().tobytes()]
        self.parts += [t.contiguous().view(torch.uint8).numpy().tobytes() for t in tensors if t is not None]
        self.expected.append(result)

    def linear(self, linear: dispatch.Linear, x: torch.Tensor, result: torch.Tensor) -> None:
        assert isinstance(linear, PackedLinear)
        p = linear
        sizes = [0 if t is None else t.numel() for t in (p.scale, p.bias)]
        numbers = [p.desc.format, p.in_features, p.out_features, x.shape[0], p.packed.nbytes, *sizes]
        self.add(b"L", numbers, p.packed, p.scale, p.bias, x, result=result)

    def results(self) -> list[torch.Tensor]:
        given = b"".join(self.parts)
        flat = torch.frombuffer(bytearray(self.program.run(given)), dtype=torch.float32)
        parts = flat.split([t.numel() for t in self.expected])
        return [part.view_as(t) for part, t in zip(parts, self.expected, strict=True)]


def test_whole_numbers_come_to_the_same_bits(program: Program) -> None:
    calls, generator = Calls(program), torch.Generator().manual_seed(0)
    for outputs, inputs in ((80, 64), (17, 250), (48, 1537)):
        weight, bias = torch.randn(outputs, inputs, generator=generator), torch.randn(outputs, generator=generator)
        x = torch.randn(13, inputs, generator=generator)
        x[5] *= 1e4
        for rows in (1, 2, 5, 6, 7, 13):
            for bits, plain in ((8, int8_linear.quantize_linear), (4, int4_linear.quantize_linear)):
                calls.linear(dispatch.quantize_linear(weight, bias, bits), x[:rows], plain(weight, bias)(x[:rows]))
    for form in CodeFormat:
        weights, x = random_codes(form, 40, 512), torch.randn(13, 512, generator=generator)
        for rows in (1, 6, 13):
            calls.linear(dispatch.pack_stored(weights, None, 512), x[:rows], CodebookLinear(weights, None)(x[:rows]))
    fp8, x = random_fp8(40, 260), torch.randn(13, 260, generator=generator)
    for rows in (1, 6, 13):
        calls.linear(dispatch.pack_stored(fp8, None, 260), x[:rows], summed_in_groups(fp8, x[:rows]))
    for got, want in zip(calls.results(), calls.expected, strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_linears_match_torch_and_rows_do_not_depend_on_each_other(program: Program, dtype: torch.dtype) -> None:
    calls, generator = Calls(program), torch.Generator().manual_seed(1)
    weight = torch.randn(80, 96, generator=generator).to(dtype)
    x = torch.randn(40, 96, generator=generator).to(dtype).float()
    for rows in (1, 2, 5, 6, 7, 40):
        calls.linear(dispatch.pack_linear(weight), x[:rows], x[:rows] @ weight.float().T)
    together = calls.results()[-1]
    for got, want in zip(calls.results(), calls.expected, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-4)
        assert torch.equal(got, together[: got.shape[0]])


@pytest.mark.parametrize(("dtype", "most"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)], ids=str)
def test_attention_matches_the_reference(program: Program, dtype: torch.dtype, most: float) -> None:
    calls, generator = Calls(program), torch.Generator().manual_seed(2)
    parts = [Part(150, tree=random_tree(20, generator)), Part(31, line=5), Part(300, tree=chain(1)), Part(0, line=17)]
    for heads, groups, dim, window, softcap in ((6, 2, 48, 0, 0.0), (4, 4, 32, 40, 0.0), (9, 3, 64, 0, 5.0)):
        plan, blocks = make_plan(parts, generator)
        attend(calls, plan, (blocks, heads, groups, dim), dtype, window, softcap, generator)
    for got, want in zip(calls.results(), calls.expected, strict=True):
        torch.testing.assert_close(got, want, rtol=most, atol=most)


def attend(
    calls: Calls,
    plan: AttentionMetadata,
    shape: tuple[int, int, int, int],
    dtype: torch.dtype,
    window: int,
    softcap: float,
    generator: torch.Generator,
) -> None:
    blocks, heads, groups, dim = shape
    k_blocks, v_blocks = random_blocks(blocks, groups, dim, dtype, generator)
    q, k, v = (torch.randn(plan.rows, n, dim, generator=generator) for n in (heads, groups, groups))
    given = k_blocks.clone(), v_blocks.clone()
    want = REFERENCE.attend(q, k, v, k_blocks, v_blocks, plan, dim**-0.5, window or None, softcap or None)
    counts = [plan.rows, *plan.block_tables.shape, plan.tree_block_tables.shape[1], plan.tree_mask.shape[1]]
    numbers = [*counts, blocks, groups, dim, int(dtype == torch.bfloat16), heads, window]
    slots = (
        plan.positions,
        plan.sequence_index,
        plan.context_lens,
        plan.slot_mapping,
        plan.block_tables,
        plan.tree_block_tables,
        plan.tree_mask,
        plan.tree_positions,
    )
    factors = torch.tensor([dim**-0.5, softcap])
    calls.add(b"A", numbers, factors, *slots, *given, q, k, v, result=want)
