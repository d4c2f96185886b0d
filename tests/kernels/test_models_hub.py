"""A model on a hub: what is read before its weights, what is fetched for which layers, and every way it can fail."""

from __future__ import annotations

import errno
import itertools
import json
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_hub import COMMIT, FakeHub, folder_files, use
from model_files import tiny_model

from swarm.errors import CorruptModel, DiskFull, ModelNotFound, UnsupportedModel, UsageError
from swarm.types import LayerSpan
from swarm_kernels.models.hub import policy, repo, transfer
from swarm_kernels.models.hub.cache import RepoCache
from swarm_kernels.models.hub_source import HubSource
from swarm_kernels.models.layers import tensors_of_span
from swarm_kernels.models.open import open_cached, open_model
from swarm_kernels.runtime.load import load_span

MIDDLE = LayerSpan(2, 4)
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


def test_cut_connections_are_resumed_where_they_broke(hub: FakeHub) -> None:
    name = middle_shard(hub)
    hub.cuts[name] = [100_000, 50_000, 10]
    with closing(opened()) as source:
        source.fetch(["model.layers.2.mlp.up_proj.weight"])
    assert hub.sent_of(name) < len(hub.read(name)) + 4 * QUICK.chunk_bytes
    ranges = [sent.range for sent in hub.sent if sent.path == f"/cdn/{name}"]
    assert ranges[0] == ""
    assert all(asked.startswith("bytes=") for asked in ranges[1:])


def test_what_came_before_a_failure_is_there_the_next_time(hub: FakeHub, root: Path) -> None:
    name = middle_shard(hub)
    size = len(hub.read(name))
    hub.cuts[name] = [size // 2, *[0] * 20]
    tensor = "model.layers.2.mlp.up_proj.weight"
    with closing(opened()) as source:
        with pytest.raises(ModelNotFound, match="what has come is kept"):
            source.fetch([tensor])
        left = source.missing_bytes([tensor])
        assert 0 < left <= size // 2 + QUICK.chunk_bytes
    hub.cuts.clear()
    hub.sent.clear()
    with closing(opened()) as source:
        source.fetch([tensor])
    assert hub.sent_of(name) == left
    assert not [path for path in blobs(root) if "incomplete" in path.name]


def test_a_stop_request_ends_fetching_and_keeps_what_came(hub: FakeHub) -> None:
    hub.slow_s = 0.02

    def stop(done: int, total: int) -> None:
        if done > total // 10:
            raise KeyboardInterrupt

    with closing(opened()) as source:
        before = source.missing_bytes(source.names())
        with pytest.raises(KeyboardInterrupt):
            source.fetch(source.names(), stop)
        assert 0 < source.missing_bytes(source.names()) < before
        hub.slow_s = 0.0
        source.fetch(source.names())


def test_a_hub_without_ranges_is_asked_for_the_whole_again(hub: FakeHub) -> None:
    name = middle_shard(hub)
    hub.ranges = False
    hub.cuts[name] = [100_000]
    with closing(opened()) as source:
        seen: list[int] = []
        source.fetch(["model.layers.2.mlp.up_proj.weight"], lambda done, total: seen.append(done))
        assert seen[-1] == len(hub.read(name))


def test_a_hub_without_ranges_cannot_show_tables(hub: FakeHub) -> None:
    hub.ranges = False
    with pytest.raises(CorruptModel, match="cannot send parts of a file"):
        opened()


def test_a_wrong_hash_deletes_the_file(hub: FakeHub, root: Path) -> None:
    name = middle_shard(hub)
    data = bytearray(hub.read(name))
    data[-1] ^= 1
    hub.served[name] = bytes(data)
    with closing(opened()) as source:
        with pytest.raises(CorruptModel, match=rf"{name} of org/name does not have the hash .* deleted, run again"):
            source.fetch(["model.layers.2.mlp.up_proj.weight"])
        assert not (source.path / name).exists()
        assert not [path for path in blobs(root) if path.stat().st_size >= len(data)]
        hub.served.clear()
        source.fetch(["model.layers.2.mlp.up_proj.weight"])


def test_a_table_that_is_not_that_of_the_file(hub: FakeHub, folder: Path, root: Path) -> None:
    """A hub that shows one header and sends another file: nothing of it is computed with."""
    name = middle_shard(hub)
    shutil.rmtree(root)
    header = int.from_bytes(hub.read(name)[:8], "little")
    table = json.loads(hub.read(name)[8 : 8 + header])
    first, second = next(pair for pair in itertools.combinations(table, 2) if _alike(*(table[name] for name in pair)))
    table[first], table[second] = table[second], table[first]
    shown = json.dumps(table, separators=(",", ":")).encode().ljust(header)
    assert len(shown) == header
    hub.served[name] = hub.read(name)[:8] + shown + hub.read(name)[8 + header :]
    with closing(opened()) as source:
        hub.served.clear()
        with pytest.raises(CorruptModel, match="not the one that the hub showed"):
            source.tensor(first)
    with closing(opened()) as source, closing(open_model(str(folder))) as local:
        assert torch.equal(source.tensor(first), local.tensor(first))


def _alike(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return "shape" in one and one["shape"] == other.get("shape")


@pytest.mark.parametrize("length", [0, 7, 8, 1 << 20, (1 << 63) - 1])
def test_hostile_headers(hub: FakeHub, length: int) -> None:
    name = middle_shard(hub)
    shutil.rmtree(Path(repo.RepoCache.of("org/name").folder))
    hub.served[name] = length.to_bytes(8, "little") + b"\xff" * (len(hub.read(name)) - 8)
    with pytest.raises(CorruptModel):
        opened()


def test_an_index_names_only_files_of_the_listing(hub: FakeHub) -> None:
    index = json.loads(hub.read("model.safetensors.index.json"))
    for shard, error in (("absent.safetensors", ModelNotFound), ("../x.safetensors", CorruptModel)):
        index["weight_map"]["model.norm.weight"] = shard
        hub.files["model.safetensors.index.json"] = json.dumps(index).encode()
        with pytest.raises(error):
            opened()


@pytest.mark.parametrize(
    "sibling",
    [
        {"rfilename": "../../evil.json", "size": 2, "blobId": "a" * 40},
        {"rfilename": "/etc/evil.json", "size": 2, "blobId": "a" * 40},
        {"rfilename": "a/evil.json", "size": 2, "blobId": "a" * 40},
        {"rfilename": "..", "size": 2, "blobId": "a" * 40},
        {"rfilename": "evil.json", "size": 2, "blobId": "../../../" + "a" * 31},
        {"rfilename": "evil.json", "size": -1, "blobId": "a" * 40},
        {"rfilename": "evil.json", "size": 1 << 50, "blobId": "a" * 40},
        {"rfilename": "evil.json", "size": None, "blobId": None},
        {"rfilename": "evil.json", "size": policy.POLICY.max_json_bytes + 1, "blobId": "a" * 40},
    ],
)
def test_hostile_listings(hub: FakeHub, root: Path, sibling: dict[str, Any]) -> None:
    """Such files are left out, and nothing is written outside the model's folder."""
    hub.listed["siblings"] = [*hub.listing()["siblings"], sibling]
    opened().close()
    assert not any("evil" in sent.path for sent in hub.sent)
    assert {path.name for path in root.iterdir()} <= {"models--org--name", ".locks"}


def test_a_full_disk_is_told_before_and_while_fetching(
    hub: FakeHub, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with closing(opened()) as source:
        need = source.missing_bytes(source.names())
        usage = shutil.disk_usage(root)
        monkeypatch.setattr(repo.shutil, "disk_usage", lambda path: usage._replace(free=need + 1))
        with pytest.raises(DiskFull, match=r"needs \d\.\d MB more, \d\.\d MB are free in .*swarm-node models"):
            source.fetch(source.names())
        monkeypatch.undo()


@pytest.mark.skipif(sys.platform != "linux" or not hasattr(shutil, "chown"), reason="mounts a tmpfs")
def test_a_disk_that_fills_up(hub: FakeHub, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1500k", "tmpfs", str(root)], capture_output=True).returncode:
        pytest.skip("only root can mount a small disk")
    try:
        monkeypatch.setattr(repo.HubRepo, "_check_room", lambda self, files: None)
        with closing(opened()) as source:
            with pytest.raises(DiskFull, match="is full; free some room and run again, what has come is kept"):
                source.fetch(source.names())
            left = source.missing_bytes(source.names())
            assert left < sum(len(hub.read(name)) for name in hub.files if name.endswith(".safetensors"))
            subprocess.run(["mount", "-o", "remount,size=50m", str(root)], check=True)
            hub.sent.clear()
            source.fetch(source.names())
            assert sum(sent.body for sent in hub.sent) == left
    finally:
        subprocess.run(["umount", "-l", str(root)], check=True)


def test_a_quota_is_a_full_disk(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object) -> None:
        raise OSError(errno.EDQUOT, "Disk quota exceeded")

    with closing(opened()) as source:
        monkeypatch.setattr(repo.HubRepo, "_transfer", full)
        with pytest.raises(DiskFull, match="is full"):
            source.fetch(source.names())


def test_several_at_once_fetch_each_file_once(hub: FakeHub) -> None:
    name = middle_shard(hub)
    hub.slow_s = 0.01
    failures: list[Exception] = []

    def work() -> None:
        try:
            with closing(opened()) as source:
                source.fetch(["model.layers.2.mlp.up_proj.weight"])
        except (ModelNotFound, CorruptModel, DiskFull) as error:
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert hub.sent_of(name) == len(hub.read(name))


@pytest.mark.slow
def test_a_killed_process_leaves_a_part_that_the_next_one_continues(hub: FakeHub, root: Path) -> None:
    name = middle_shard(hub)
    hub.slow_s = 0.05
    code = (
        "import sys; from dataclasses import replace; from pathlib import Path\n"
        "from swarm_kernels.models.open import open_model; from swarm_kernels.models.hub import transfer\n"
        "transfer.POLICY = replace(transfer.POLICY, chunk_bytes=1 << 14)\n"
        "open_model('org/name', Path(sys.argv[1])).tensor('model.layers.2.mlp.up_proj.weight')"
    )
    environment = {"HF_ENDPOINT": hub.url, "PYTHONPATH": ":".join(sys.path), "HF_HUB_DISABLE_TELEMETRY": "1"}
    process = subprocess.Popen([sys.executable, "-c", code, str(root)], env=environment)
    try:
        deadline = time.monotonic() + 60
        while not any("incomplete" in path.name and path.stat().st_size for path in blobs(root)):
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.01)
    finally:
        process.kill()
        process.wait()
    hub.slow_s = 0.0
    hub.sent.clear()
    with closing(opened()) as source:
        source.tensor("model.layers.2.mlp.up_proj.weight")
    assert 0 < hub.sent_of(name) < len(hub.read(name))


def test_junk_in_the_cache_is_asked_for_again(hub: FakeHub, root: Path) -> None:
    with closing(opened()) as source:
        expected = source.weight_hash
    swarm = root / "models--org--name" / "swarm"
    for junk in (b"", b"\xff" * 1000, b"\x81\xa5heads\x80", b"\x82\xa5heads\x81\xa1x\xc4\x01y\xa6starts\x80"):
        for path in swarm.iterdir():
            path.write_bytes(junk)
        with closing(opened()) as source:
            assert source.weight_hash == expected
    (root / "models--org--name/refs/main").write_bytes(b"\xff\n../../..")
    assert open_cached("org/name") is None
    opened().close()
    assert open_cached("org/name") is not None
