"""Fetching the files of a model: cut, stopped, full, wrong, hostile, and several at once."""

from __future__ import annotations

import errno
import itertools
import json
import shutil
import subprocess
import sys
import threading
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_hub import FakeHub
from hub_parts import QUICK, blobs, middle_shard, opened

from swarm.errors import CorruptModel, DiskFull, ModelNotFound
from swarm_kernels.models.hub import policy, repo
from swarm_kernels.models.open import open_cached, open_model


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
