"""A model on a hub: what is read before its weights, what is fetched for which layers, and every way it can fail."""

from __future__ import annotations

import shutil
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_hub import COMMIT, FakeHub, folder_files, use
from hub_parts import QUICK, opened
from model_files import tiny_model

from swarm.errors import CorruptModel, ModelNotFound, UnsupportedModel, UsageError
from swarm.types import LayerSpan
from swarm_kernels.models.hub import repo, transfer
from swarm_kernels.models.hub.cache import RepoCache
from swarm_kernels.models.layers import tensors_of_span
from swarm_kernels.models.open import open_model
from swarm_kernels.runtime.load import load_span

MIDDLE = LayerSpan(2, 4)


def test_opening_reads_tables_and_no_weights(hub: FakeHub, folder: Path) -> None:
    with closing(opened()) as source, closing(open_model(str(folder))) as local:
        assert (source.name, source.names()) == ("org/name", local.names())
        assert source.weight_hash == local.weight_hash
        assert source.config == local.config
        assert all(source.shape(name) == local.shape(name) for name in local.names())
        weights = sum(sent.body for sent in hub.sent if sent.path.endswith(".safetensors"))
        assert weights < 2 * len(list(folder.glob("*.safetensors"))) * (1 << 16)
        assert not list(source.path.glob("*.safetensors"))
        assert (source.path / "tokenizer.json").is_file()
    hub.sent.clear()
    opened().close()
    assert len(hub.sent) == 1  # what `main` is now; all else was kept


def test_a_span_fetches_its_shards_and_no_others(hub: FakeHub, folder: Path) -> None:
    with closing(opened()) as source, closing(open_model(str(folder))) as local:
        names = list(tensors_of_span(source, MIDDLE))
        needed = source.shards(names)
        assert len(needed) < len(list(folder.glob("*.safetensors"))) - 2
        size = sum((folder / name).stat().st_size for name in needed)
        assert source.missing_bytes(names) == size
        seen: list[tuple[int, int]] = []
        span = load_span(source, MIDDLE, torch.float32, fetching=lambda done, total: seen.append((done, total)))
        assert seen[-1] == (size, size)
        assert source.missing_bytes(names) == 0
        assert {path.name for path in source.path.glob("*.safetensors")} == needed
        assert all(torch.equal(source.tensor(name), local.tensor(name)) for name in names)
        hub.sent.clear()
        again = load_span(source, LayerSpan(2, 5), torch.float32, like=span)
        new = source.shards(tensors_of_span(source, LayerSpan(2, 5))) - needed
        assert {sent.path.rsplit("/", 1)[-1] for sent in hub.sent} == new
        assert again.layers == LayerSpan(2, 5)


def test_a_tensor_that_nobody_fetched_is_fetched_when_it_is_read(hub: FakeHub, folder: Path) -> None:
    with closing(opened()) as source, closing(open_model(str(folder))) as local:
        name = "model.layers.5.mlp.down_proj.weight"
        assert torch.equal(source.tensor(name), local.tensor(name))


def test_a_model_in_one_file(folder: Path, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny_model().save_pretrained(tmp_path / "one")
    with FakeHub(folder_files(tmp_path / "one")).running() as hub:
        use(hub, root, monkeypatch)
        with closing(opened()) as source, closing(open_model(str(tmp_path / "one"))) as local:
            assert source.weight_hash == local.weight_hash
        stated = next(s["lfs"]["sha256"] for s in hub.listing()["siblings"] if "lfs" in s)
        open_model("org/name", expected_sha256=stated.upper()).close()
        with pytest.raises(CorruptModel, match="not the expected"):
            open_model("org/name", expected_sha256="0" * 64)


def test_a_revision_can_be_pinned_and_then_needs_no_hub(hub: FakeHub, root: Path) -> None:
    opened("org/name@v1").close()
    assert (root / "models--org--name/refs/v1").read_text() == COMMIT
    opened(f"org/name@{COMMIT}").close()
    hub.sent.clear()
    opened(f"org/name@{COMMIT}").close()
    assert not hub.sent
    with pytest.raises(ModelNotFound, match="no such revision"):
        opened("org/name@nothing")


@pytest.mark.parametrize("revision", ["../../x", "a/../b", "-x", "a b", "x" * 300])
def test_a_revision_that_is_none(hub: FakeHub, revision: str) -> None:
    with pytest.raises(ModelNotFound, match="no revision") as caught:
        opened(f"org/name@{revision}")
    assert len(str(caught.value)) < 250
    assert not hub.sent


def test_what_was_fetched_serves_without_a_network(hub: FakeHub, root: Path) -> None:
    with closing(opened()) as source:
        load_span(source, MIDDLE, torch.float32)
    hub.down = True
    with closing(opened()) as source:
        load_span(source, MIDDLE, torch.float32)
        with pytest.raises(ModelNotFound, match=r"HTTP 503.*what has come is kept"):
            load_span(source, LayerSpan(0, 1), torch.float32)


def test_a_snapshot_of_another_program_is_verified_once(
    hub: FakeHub, folder: Path, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As huggingface_hub leaves it: links to blobs that are named by their hashes."""
    cache = RepoCache.of("org/name", root)
    with closing(opened()) as source:
        source.fetch(source.names())
    shutil.rmtree(cache.folder / "swarm")
    hub.sent.clear()
    hub.down = True
    hashed: list[Path] = []
    genuine = repo.content_hash
    monkeypatch.setattr(repo, "content_hash", lambda path, file: hashed.append(path) or genuine(path, file))
    for _ in range(2):
        with closing(opened()) as source:
            assert source.missing_bytes(source.names()) == 0
            load_span(source, MIDDLE, torch.float32)
    assert len(hashed) == len(set(hashed))
    damaged = cache.snapshot(COMMIT) / next(path.name for path in hashed if path.suffix == ".safetensors")
    data = bytearray(damaged.read_bytes())
    data[-1] ^= 1
    damaged.write_bytes(data)
    with (
        closing(opened()) as source,
        pytest.raises(CorruptModel, match=r"does not have the hash .* deleted, run again"),
    ):
        load_span(source, MIDDLE, torch.float32)
    assert not damaged.exists()
    hub.down = False
    with closing(opened()) as source:
        load_span(source, MIDDLE, torch.float32)


@pytest.mark.parametrize(
    ("misbehaves", "words"),
    [
        ({"token": "secret"}, "who asks for org/name"),
        ({"gated": True}, "gated; accept its licence"),
        ({"down": True}, "neither in the local cache nor can it be fetched .*HTTP 503"),
        ({"repo": "org/other"}, "no model org/name"),
        ({"commit": "../../../etc"}, "names no commit"),
        ({"listed": {"siblings": [{"rfilename": f"{i}.json"} for i in range(20_000)]}}, "20000 files"),
        ({"listed": {"siblings": []}}, r"no \*\.safetensors"),
        ({"statuses": {"config.json": 401}}, "who asks"),
        ({"statuses": {"config.json": 403}}, "does not let you read"),
        ({"statuses": {"config.json": 404}}, "no longer on the hub"),
        ({"statuses": {"config.json": 500}}, "HTTP 500"),
        ({"served": {"config.json": b"x" * 10_000}}, "longer than the hub states"),
        ({"served": {"config.json": b"x"}}, "neither in the local cache nor can it be fetched"),
    ],
)
def test_every_failure_is_one_sentence(hub: FakeHub, misbehaves: dict[str, Any], words: str) -> None:
    for name, value in misbehaves.items():
        setattr(hub, name, value)
    with pytest.raises((ModelNotFound, CorruptModel), match=words) as caught:
        opened()
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 300


def test_a_hub_that_is_not_there(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "POLICY", QUICK)
    use(FakeHub({}, url="http://127.0.0.1:9"), root, monkeypatch)
    with pytest.raises(ModelNotFound, match="neither in the local cache nor can it be fetched") as caught:
        open_model("org/name")
    assert "\n" not in str(caught.value)


def test_a_token_is_sent(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.token = "hf_secret"
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    opened().close()


def test_formats_that_are_not_read_are_named(hub: FakeHub) -> None:
    hub.files = {"config.json": b"{}", "model.Q4_0.gguf": b"GGUF"}
    with pytest.raises(ModelNotFound, match="GGUF files only"):
        open_model("org/name")
    hub.files = {"config.json": b"{}", "pytorch_model.bin": b"x"}
    with pytest.raises(UnsupportedModel, match="only pickle files"):
        open_model("org/name")
    hub.files = {"a.safetensors": b"", "b.safetensors": b""}
    with pytest.raises(UsageError, match="one file only"):
        open_model("org/name", expected_sha256="0" * 64)
