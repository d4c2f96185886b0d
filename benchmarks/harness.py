"""What the benchmarks share: a private swarm of real processes, and transformers with the very same weights."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from types import TracebackType

import psutil
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from swarm_kernels.models.open import ModelSource

START_TIMEOUT_S = 120.0


class LocalSwarm:
    """`swarm-node local` as a context manager. `address`, `node_pids` and `serving_after_s` once entered."""

    def __init__(self, nodes: int, *, dtype: str = "bf16", model: str = "smollm2-135m", layers: str = "") -> None:
        self._command = [
            *(os.path.join(os.path.dirname(sys.executable), "swarm-node"), "local", "--json"),
            *("--nodes", str(nodes), "--dtype", dtype, "--model", model),
            *(("--layers", layers) if layers else ()),
        ]
        self.address = ""
        self.node_pids: tuple[int, ...] = ()
        self.serving_after_s = 0.0

    def __enter__(self) -> LocalSwarm:
        self._process = subprocess.Popen(self._command, stdout=subprocess.PIPE, text=True)
        deadline = time.monotonic() + START_TIMEOUT_S
        assert self._process.stdout is not None
        for line in self._process.stdout:
            event = json.loads(line)
            if event["event"] == "serving":
                self.serving_after_s = max(self.serving_after_s, event["seconds"])
            elif event["event"] == "ready":
                self.address, self.node_pids = event["peers"][0], tuple(event["pids"])
                return self
            if time.monotonic() > deadline:
                break
        self.__exit__(None, None, None)
        raise RuntimeError("the local swarm did not start")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.send_signal(signal.SIGTERM)
        self._process.communicate(timeout=60)


def tree_pss_mb(pid: int) -> float:
    """Proportional memory of a process and its children, in MB (10^6 bytes)."""
    process = psutil.Process(pid)
    return float(sum(p.memory_full_info().pss for p in [process, *process.children(recursive=True)])) / 1e6


def reference_model(source: ModelSource, dtype: torch.dtype) -> PreTrainedModel:
    """transformers' own model with the tensors of `source`."""
    hf = dict(source.config.hf)
    config = AutoConfig.for_model(hf.pop("model_type"), **hf)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    state = {name: source.tensor(name).to(dtype) for name in model.state_dict() if source.has(name)}
    missing = model.load_state_dict(state, strict=False).missing_keys
    if any(not name.startswith("lm_head") for name in missing):
        raise RuntimeError(f"the reference model lacks {missing}")
    model.tie_weights()
    return model.eval()
