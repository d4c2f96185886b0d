"""Loading a span of a model that lies on a hub: memory, seconds and bytes, on a hub of our own on 127.0.0.1.

Writes a random Llama of some hundred megabytes in 12 shards to a temporary folder, serves it from a process of its own,
and loads the same layers in fresh processes: with an empty cache, with what that left, and after a cut in the middle.
Run by `make bench-load`, which puts the tests' fake hub on the path.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
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
from safetensors.torch import save_file

MB = 1e6
CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 1536,
    "intermediate_size": 4096,
    "num_hidden_layers": 12,
    "num_attention_heads": 24,
    "num_key_value_heads": 6,
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def write_model(folder: Path, shards: int) -> None:
    """Random bf16 weights in `shards` files of about the same size."""
    hidden, inner, vocab = 1536, 4096, 32000
    kv = hidden // 24 * 6
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, hidden)}
    parts: dict[str, tuple[int, ...]] = {
        "input_layernorm": (hidden,), "self_attn.q_proj": (hidden, hidden), "self_attn.k_proj": (kv, hidden),
        "self_attn.v_proj": (kv, hidden), "self_attn.o_proj": (hidden, hidden), "post_attention_layernorm": (hidden,),
        "mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden), "mlp.down_proj": (hidden, inner),
    }  # fmt: skip
    for layer in range(12):
        shapes |= {f"model.layers.{layer}.{name}.weight": shape for name, shape in parts.items()}
    shapes |= {"model.norm.weight": (hidden,), "lm_head.weight": (vocab, hidden)}
    sizes = {name: 2 * torch.Size(shape).numel() for name, shape in shapes.items()}
    limit = sum(sizes.values()) / shards
    weight_map: dict[str, str] = {}
    generator = torch.Generator().manual_seed(0)
    pending: dict[str, torch.Tensor] = {}
    number = 1
    for name, shape in shapes.items():
        scale = 1.0 if len(shape) == 1 else shape[-1] ** -0.5
        pending[name] = (torch.randn(shape, generator=generator) * scale).to(torch.bfloat16)
        weight_map[name] = f"model-{number:05d}-of-{shards:05d}.safetensors"
        if sum(sizes[n] for n in weight_map) >= limit * number or name == "lm_head.weight":
            save_file(pending, folder / weight_map[name], {"format": "pt"})
            pending, number = {}, number + 1
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (folder / "config.json").write_text(json.dumps(CONFIG))


def load_once(layers: str, dtype: str, calibrated: bool) -> dict[str, Any]:
    """In a process of its own: from the hub's name to a span that was checked. Sizes in bytes."""
    from swarm.types import LayerSpan
    from swarm_kernels.calibration.cost_curve import verify_layer
    from swarm_kernels.device.device import DTYPES
    from swarm_kernels.models.hub_source import HubSource
    from swarm_kernels.models.layers import tensors_of_span
    from swarm_kernels.models.open import open_model
    from swarm_kernels.runtime.llama_span import LlamaSpan
    from swarm_kernels.runtime.load import load_span
    from swarm_node.membership.profiler import calibrate

    span_layers, times = LayerSpan.parse(layers), {}
    process = psutil.Process()
    begun = time.perf_counter()
    with closing(open_model("org/name")) as source:
        assert isinstance(source, HubSource)
        times["open"] = time.perf_counter() - begun
        names = list(tensors_of_span(source, span_layers))
        if calibrated:
            since = time.perf_counter()
            calibrate(source, DTYPES[dtype], torch.device("cpu"), 2, Path(os.environ["HF_HUB_CACHE"]))
            times["calibrate"] = time.perf_counter() - since
        since = time.perf_counter()
        source.fetch(names)
        times["fetch"] = time.perf_counter() - since
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
        assert isinstance(span, LlamaSpan)
        weights = span.edge_bytes + sum(layer.nbytes for layer in span.weights)
        return {
            "times": times,
            "weights": weights,
            "peak": (peak - before) / weights,
            "peak_with_check": (checked - before) / weights,
            "after": (after - before) / weights,
            "fetched": source.repo.fetched_bytes,
            "needed": sum(map(source.nbytes, names)),
            "shards": len(source.shards(names)),
            "shard_bytes": sum(source.repo.listing.find(name).size for name in source.shards(names)),
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
    environment = {**os.environ, "HF_ENDPOINT": url, "HF_HUB_CACHE": str(root)}
    command = [sys.executable, __file__, "--child", layers, dtype, *(["--calibrate"] if calibrated else [])]
    begun = time.perf_counter()
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=300)
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
    parser.add_argument("--child", nargs=2, metavar=("LAYERS", "DTYPE"))
    parser.add_argument("--calibrate", action="store_true")
    args = parser.parse_args()
    if args.child:
        print(json.dumps(load_once(args.child[0], args.child[1], args.calibrate)))
        return
    with tempfile.TemporaryDirectory(prefix="bench-load-") as temporary:
        folder = Path(temporary) / "model"
        folder.mkdir()
        write_model(folder, args.shards)
        size = sum(path.stat().st_size for path in folder.iterdir())
        print(f"{size / MB:.0f} MB in {args.shards} shards, layers {args.layers} of 12")
        with hub_process(folder) as url:
            for number in range(args.rounds):
                root = Path(temporary) / f"cache{number}"
                report("bf16, empty cache", measure(url, root, args.layers, "bf16", calibrated=True))
                for dtype in ("bf16", "int8", "int4"):
                    report(f"{dtype}, from the cache", measure(url, root, args.layers, dtype))
            report("bf16, first layers", measure(url, Path(temporary) / "ends", "0:4", "bf16"))
            report("bf16, last layers", measure(url, Path(temporary) / "ends", "8:12", "bf16"))
        names = sorted(path.name for path in folder.glob("*.safetensors"))
        with hub_process(folder, {name: [0, 10 << 20, 20 << 20] for name in names}) as url:
            report("bf16, cut connections", measure(url, Path(temporary) / "cut", args.layers, "bf16"))


if __name__ == "__main__":
    main()
