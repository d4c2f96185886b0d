"""Loading a span of a model that lies on a hub: memory, seconds and bytes, on a hub of our own on 127.0.0.1.

Writes a random Llama of some hundred megabytes in 12 shards to a temporary folder, serves it from a process of its own,
and loads the same layers in fresh processes: with an empty cache, with what that left, and after a cut in the middle.
Then whole models from the disk, in each number format: that Llama, the same as GGUF files, and a gpt-oss in MXFP4.
Run by `make bench-load`, which puts the tests' fake hub on the path.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import psutil
import torch
from fake_hub import FakeHub
from gguf import GGMLQuantizationType
from load_files import write_gguf, write_gpt_oss, write_llama

MB = 1e6


def load_once(model: str, layers: str, dtype: str, calibrated: bool) -> dict[str, Any]:
    """In a process of its own: from the model's name to a span that was checked. Sizes in bytes."""
    from swarm.types import LayerSpan
    from swarm_kernels.calibration.cost_curve import verify_layer
    from swarm_kernels.device.device import DTYPES
    from swarm_kernels.models.hub_source import HubSource
    from swarm_kernels.models.layers import tensors_of_span
    from swarm_kernels.models.open import open_model
    from swarm_kernels.runtime.load import load_span
    from swarm_node.membership.profiler import calibrate

    span_layers, times = LayerSpan.parse(layers), {}
    process = psutil.Process()
    begun = time.perf_counter()
    with closing(open_model(model)) as source:
        times["open"] = time.perf_counter() - begun
        names = list(tensors_of_span(source, span_layers))
        if calibrated:
            since = time.perf_counter()
            calibrate(source, DTYPES[dtype], torch.device("cpu"), 2, Path(os.environ["HF_HUB_CACHE"]))
            times["calibrate"] = time.perf_counter() - since
        since = time.perf_counter()
        source.fetch(names)
        times["fetch"] = time.perf_counter() - since
        if not source.config.has_fast_path:
            import swarm_kernels.runtime.hf_check  # noqa: F401  # transformers is no weight
        before = process.memory_info().rss
        Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
        since = time.perf_counter()
        span = load_span(source, span_layers, DTYPES[dtype])
        times["load"] = time.perf_counter() - since
        peak, after = _peak_rss(), process.memory_info().rss
        since = time.perf_counter()
        verify_layer(span, source)
        times["check"] = time.perf_counter() - since
        checked = _peak_rss()
        weights = span.edge_bytes + len(span_layers) * span.layer_bytes
        hub = source if isinstance(source, HubSource) else None
        return {
            "times": times,
            "weights": weights,
            "peak": (peak - before) / weights,
            "peak_with_check": (checked - before) / weights,
            "after": (after - before) / weights,
            "fetched": hub.repo.fetched_bytes if hub else 0,
            "needed": sum(map(source.nbytes, names)),
            "shards": len(hub.shards(names)) if hub else 0,
        }


def _peak_rss() -> int:
    status = Path("/proc/self/status").read_text()
    return int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM"))) * 1024


@contextmanager
def hub_process(folder: Path, cuts: dict[str, list[int]] | None = None) -> Iterator[str]:
    """The hub's address."""
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(target=_serve, args=(folder, theirs, cuts or {}), daemon=True)
    process.start()
    try:
        yield ours.recv()
    finally:
        process.kill()
        process.join()


def _serve(folder: Path, pipe: Any, cuts: dict[str, list[int]]) -> None:
    hub = FakeHub({path.name: path for path in sorted(folder.iterdir())}, cuts=cuts)
    hub.listing()  # hashes the files
    with hub.running():
        pipe.send(hub.url)
        time.sleep(3600)


def measure(url: str, root: Path, layers: str, dtype: str, calibrated: bool = False) -> dict[str, Any]:
    return measure_of("org/name", layers, dtype, {"HF_ENDPOINT": url, "HF_HUB_CACHE": str(root)}, calibrated)


def measure_of(
    model: str, layers: str, dtype: str, settings: dict[str, str], calibrated: bool = False
) -> dict[str, Any]:
    environment = {**os.environ, **settings}
    command = [sys.executable, __file__, "--child", model, layers, dtype, *(["--calibrate"] if calibrated else [])]
    begun = time.perf_counter()
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=1800)
    if done.returncode:
        sys.exit(done.stderr[-3000:])
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    result["wall"] = time.perf_counter() - begun
    return result


def report(label: str, found: dict[str, Any]) -> None:
    times = "  ".join(f"{name} {seconds:5.2f}" for name, seconds in found["times"].items())
    print(
        f"{label:22} span {found['weights'] / MB:6.0f} MB  peak {found['peak']:.2f} (with its check "
        f"{found['peak_with_check']:.2f}, after {found['after']:.2f})  fetched {found['fetched'] / MB:6.1f} of "
        f"{found['needed'] / MB:6.1f} MB needed ({found['fetched'] / found['needed']:.2f}), {found['shards']} shards  "
        f"s: {times}  process {found['wall']:.1f}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--layers", default="4:8")
    parser.add_argument("--shards", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--child", nargs=3, metavar=("MODEL", "LAYERS", "DTYPE"))
    parser.add_argument("--calibrate", action="store_true")
    parser.add_argument("--local", action="store_true", help="only from the disk")
    args = parser.parse_args()
    if args.child:
        print(json.dumps(load_once(args.child[0], args.child[1], args.child[2], args.calibrate)))
        return
    with tempfile.TemporaryDirectory(prefix="bench-load-") as temporary:
        if not args.local:
            from_hub(Path(temporary), args)
        from_disk(Path(temporary), args.rounds)


def from_hub(temporary: Path, args: argparse.Namespace) -> None:
    folder = temporary / "model"
    folder.mkdir()
    write_llama(folder, args.shards)
    size = sum(path.stat().st_size for path in folder.iterdir())
    print(f"{size / MB:.0f} MB in {args.shards} shards, layers {args.layers} of 12")
    with hub_process(folder) as url:
        for number in range(args.rounds):
            root = temporary / f"cache{number}"
            report("bf16, empty cache", measure(url, root, args.layers, "bf16", calibrated=True))
            for dtype in ("bf16", "int8", "int4"):
                report(f"{dtype}, from the cache", measure(url, root, args.layers, dtype))
        report("bf16, first layers", measure(url, temporary / "ends", "0:4", "bf16"))
        report("bf16, last layers", measure(url, temporary / "ends", "8:12", "bf16"))
    names = sorted(path.name for path in folder.glob("*.safetensors"))
    with hub_process(folder, {name: [0, 10 << 20, 20 << 20] for name in names}) as url:
        report("bf16, cut connections", measure(url, temporary / "cut", args.layers, "bf16"))


def from_disk(temporary: Path, rounds: int) -> None:
    """Whole models, written one at a time."""
    folder = temporary / "llama"
    folder.mkdir()
    write_llama(folder, 4)
    for dtype in ("bf16", "int8", "int4"):
        load_all("Llama", folder, "0:12", dtype, rounds)
    shutil.rmtree(folder)
    for quant, dtypes in ((GGMLQuantizationType.Q8_0, ("bf16", "int8")), (GGMLQuantizationType.Q4_0, ("int4",)),
                          (GGMLQuantizationType.IQ4_XS, ("int4",))):  # fmt: skip
        path = temporary / f"{quant.name}.gguf"
        write_gguf(path, quant)
        for dtype in dtypes:
            load_all(f"{quant.name}.gguf", path, "0:12", dtype, rounds)
        path.unlink()
    folder = temporary / "gpt-oss"
    folder.mkdir()
    write_gpt_oss(folder)
    for dtype in ("int4", "int8", "bf16"):
        load_all("gpt-oss, MXFP4", folder, "0:4", dtype, rounds)


def load_all(label: str, model: Path, layers: str, dtype: str, rounds: int) -> None:
    for _ in range(rounds):
        report(f"{label} to {dtype}", measure_of(str(model), layers, dtype, {}))


if __name__ == "__main__":
    main()
