"""Fixtures of the tests of a model on a hub, and what they share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from fake_hub import FakeHub, folder_files, use
from model_files import tiny_model

from swarm_kernels.models.hub import policy, repo, transfer
from swarm_kernels.models.hub_source import HubSource
from swarm_kernels.models.open import open_model

QUICK = replace(
    policy.POLICY, retry_wait_s=0.001, max_retry_wait_s=0.002, timeout_s=5.0, chunk_bytes=1 << 14, retries=3
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("hub") / "model"
    tiny_model(num_hidden_layers=6, hidden_size=128, intermediate_size=256).save_pretrained(
        path, max_shard_size="600KB"
    )
    (path / "tokenizer.json").write_text("{}")
    assert len(list(path.glob("*.safetensors"))) > 5
    return path


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def hub(folder: Path, root: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    for module in (repo, transfer):
        monkeypatch.setattr(module, "POLICY", QUICK)
    with FakeHub(folder_files(folder)).running() as hub:
        use(hub, root, monkeypatch)
        yield hub


def opened(name: str = "org/name") -> HubSource:
    source = open_model(name)
    assert isinstance(source, HubSource)
    return source


def middle_shard(hub: FakeHub) -> str:
    """A file that the middle layers need."""
    with closing(opened()) as source:
        name = source.shards(["model.layers.2.mlp.up_proj.weight"]).pop()
    hub.sent.clear()
    return name


def blobs(root: Path) -> list[Path]:
    return sorted((root / "models--org--name" / "blobs").glob("*"))
