"""`swarm-node models`: what is on the disk, what a model needs, and what `rm` deletes and does not."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_hub import FakeHub, folder_files, use
from model_files import tiny_model
from typer.testing import CliRunner

from swarm.errors import CorruptModel, ModelNotFound, OutOfMemory, UsageError
from swarm.types import LayerSpan
from swarm_kernels.models.layers import tensors_of_span
from swarm_kernels.models.open import open_model
from swarm_node.commands import cli, runner
from swarm_node.membership import model_inventory as inventory
from swarm_node.membership.memory_plan import ModelMemory


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    tiny_model(num_hidden_layers=4).save_pretrained(tmp_path / "model", max_shard_size="100KB")
    monkeypatch.setenv("SWARM_HOME", str(tmp_path / "home"))
    with FakeHub(folder_files(tmp_path / "model")).running() as hub:
        use(hub, tmp_path / "cache", monkeypatch)
        yield hub


def fetch(layers: LayerSpan) -> None:
    with closing(open_model("org/name")) as source:
        source.fetch(tensors_of_span(source, layers))


def call(monkeypatch: pytest.MonkeyPatch, *words: str) -> tuple[int, str]:
    """Exit code and output of `swarm-node models`; it would end the process."""
    codes: list[int] = []
    monkeypatch.setattr(runner, "hard_exit", codes.append)
    result = CliRunner().invoke(cli.app, ["models", *words])
    return codes[0], result.output


def test_nothing_has_been_fetched(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    assert inventory.cached_models() == []
    assert call(monkeypatch) == (0, "No models have been fetched.\n")


def test_the_list_tells_which_layers_are_whole(hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fetch(LayerSpan(1, 3))
    hub.down = True
    (model,) = inventory.cached_models()
    assert (model.name, model.num_layers) == ("org/name", 4)
    ((start, end),) = model.layers
    assert start <= 1
    assert end >= 3
    assert (start, end) != (0, 4)
    blobs = (tmp_path / "cache/models--org--name/blobs").iterdir()
    assert sum(path.stat().st_size for path in blobs) < model.nbytes
    code, text = call(monkeypatch)
    assert code == 0
    assert f"{start}:{end} of 4" in text
    code, text = call(monkeypatch, "--json")
    assert json.loads(text)["models"][0]["layers"] == [[start, end]]


def test_what_a_model_needs_is_known_before_its_weights_are_fetched(hub: FakeHub, tmp_path: Path) -> None:
    with closing(open_model(str(tmp_path / "model"))) as local:
        memory = ModelMemory.of(local, torch.int8)
        stored = sum(local.nbytes(name) for name in local.names())
        weight_hash = local.weight_hash
    found = inventory.needs("org/name", memory.memory_for(2))
    assert (found.num_layers, found.weight_hash, found.stored_bytes) == (4, weight_hash, stored)
    assert found.layers_here == []
    assert found.missing_bytes == sum(len(hub.read(name)) for name in hub.files if name.endswith(".safetensors"))
    by_dtype = {entry.dtype: entry for entry in found.dtypes}
    int8 = by_dtype["int8"]
    assert (int8.layer, int8.embedding, int8.head, int8.fits) == (memory.layer, memory.embedding, memory.head, 2)
    assert 0 < int8.fetch_bytes < found.missing_bytes
    assert by_dtype["fp32"].fits < 2
    fetch(LayerSpan(0, 4))
    found = inventory.needs("org/name", memory.memory_for(4))
    assert (found.layers_here, found.missing_bytes) == ([(0, 4)], 0)
    assert all(entry.fetch_bytes == 0 for entry in found.dtypes)


def test_memory_for_no_layer(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    found = inventory.needs("org/name", 1000)
    assert {entry.fits for entry in found.dtypes} == {0}
    with closing(open_model("org/name")) as source, pytest.raises(OutOfMemory):
        ModelMemory.of(source, torch.int8).capacity(1000)
    code, text = call(monkeypatch, "org/name", "--max-memory", "1kB")
    assert code == 0
    assert "0 layers" in text


def test_a_local_model_needs_nothing_fetched(hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code, text = call(monkeypatch, str(tmp_path / "model"), "--json")
    assert code == 0
    found = json.loads(text)
    assert (found["missing_bytes"], found["layers_here"]) == (0, [[0, 4]])


def test_rm_deletes_what_was_fetched_and_nothing_else(
    hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetch(LayerSpan(0, 4))
    cache = tmp_path / "cache"
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "precious").write_text("x")
    (cache / "models--org--name" / "blobs" / "link").symlink_to(outside)
    (cache / "models--other--model").mkdir()
    code, text = call(monkeypatch, "rm", "org/name")
    assert code == 0
    assert "org/name is deleted" in text
    assert not (cache / "models--org--name").exists()
    assert (outside / "precious").exists()
    assert (cache / "models--other--model").exists()
    code, text = call(monkeypatch, "rm", "org/name")
    assert code == 2


@pytest.mark.parametrize("name", ["../x", "org/..", "org/../x", "", "a/b/c", "/", "~", ".", "org", "x" * 5000, "a\0/b"])
def test_rm_of_what_is_no_model(hub: FakeHub, tmp_path: Path, name: str) -> None:
    fetch(LayerSpan(0, 1))
    before = sorted((tmp_path / "cache").rglob("*"))
    with pytest.raises((ModelNotFound, UsageError)) as caught:
        inventory.remove(name)
    assert len(str(caught.value)) < 400
    assert sorted((tmp_path / "cache").rglob("*")) == before


def test_rm_follows_no_link(hub: FakeHub, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    cache.mkdir()
    (tmp_path / "elsewhere").mkdir()
    (cache / "models--org--name").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ModelNotFound, match="a link"):
        inventory.remove("org/name")
    assert inventory.cached_models() == []
    with pytest.raises(UsageError, match="delete it yourself"):
        inventory.remove(str(tmp_path / "elsewhere"))


def test_a_cache_with_junk_is_listed(hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = tmp_path / "cache"
    for junk in ("models--a--b/snapshots", "models--..--x", "models--x", "datasets--a--b", "models--c--d/blobs"):
        (cache / junk).mkdir(parents=True)
    (cache / "models--e--f").write_text("x")
    (cache / "models--a--b/refs").mkdir()
    (cache / "models--a--b/refs/main").write_text("../../../../etc")
    snapshot = cache / "models--c--d/snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (cache / "models--c--d/refs").mkdir()
    (cache / "models--c--d/refs/main").write_text("0" * 40)
    (cache / "models--c--d/blobs" / ("a" * 40)).write_text("{")
    (snapshot / "config.json").symlink_to("../../blobs/" + "a" * 40)
    (snapshot / "loop.json").symlink_to("loop.json")
    hub.down = True
    listed: dict[str, Any] = {model.name: model for model in inventory.cached_models()}
    assert set(listed) == {"a/b", "c/d"}
    assert all(model.num_layers == 0 for model in listed.values())
    assert call(monkeypatch)[0] == 0


@pytest.mark.parametrize("words", [("rm",), ("a", "b"), ("rm", "a", "b")])
def test_words_that_say_nothing(words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    assert call(monkeypatch, *words)[0] == 2


def test_an_unreadable_model_is_one_sentence(hub: FakeHub) -> None:
    hub.files = {**hub.files, "config.json": b"{"}
    with pytest.raises(CorruptModel, match="not valid JSON"):
        inventory.needs("org/name")
