"""A Hugging Face hub on 127.0.0.1 that serves one model, and fails in the ways that a test asks for."""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

COMMIT = "c0ffee" + "0" * 34
CHUNK = 1 << 16


@dataclass(slots=True)
class Sent:
    """One answer: `body`: its bytes without headers."""

    path: str
    range: str
    status: int
    body: int


@dataclass(slots=True, eq=False)
class FakeHub:
    """`files`: of the repository, by name; the other fields are how it misbehaves, and may be changed at any time."""

    files: dict[str, bytes | Path]
    repo: str = "org/name"
    commit: str = COMMIT
    token: str = ""  # asked for, if not empty
    gated: bool = False  # the listing may be read, the files not
    down: bool = False  # every request is answered by 503
    ranges: bool = True
    statuses: dict[str, int] = field(default_factory=dict)  # of a file, for ever
    cuts: dict[str, list[int]] = field(default_factory=dict)  # of a file: end each answer after so many bytes
    served: dict[str, bytes] = field(default_factory=dict)  # other bytes than those that are listed
    listed: dict[str, Any] = field(default_factory=dict)  # what the listing says in addition
    slow_s: float = 0.0  # before each chunk
    sent: list[Sent] = field(default_factory=list)
    url: str = ""
    hashes: dict[str, tuple[str, str]] = field(default_factory=dict)  # of files on the disk: SHA-256, git's

    def sent_of(self, name: str) -> int:
        """Bytes of a file that went out."""
        return sum(sent.body for sent in list(self.sent) if sent.path.endswith("/" + name))

    def read(self, name: str) -> bytes:
        content = self.files[name]
        return content if isinstance(content, bytes) else content.read_bytes()

    def size(self, name: str) -> int:
        content = self.files[name]
        return len(content) if isinstance(content, bytes) else content.stat().st_size

    def piece(self, name: str, start: int, end: int) -> bytes:
        """What is sent of a file."""
        content = self.served.get(name, self.files[name])
        if isinstance(content, bytes):
            return content[start:end]
        with content.open("rb") as file:
            file.seek(start)
            return file.read(end - start)

    def hashes_of(self, name: str) -> tuple[str, str]:
        if name not in self.hashes or isinstance(self.files[name], bytes):
            data = self.read(name)
            git = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
            self.hashes[name] = (hashlib.sha256(data).hexdigest(), git)
        return self.hashes[name]

    def listing(self) -> dict[str, Any]:
        siblings = []
        for name in self.files:
            sha256, git = self.hashes_of(name)
            entry: dict[str, Any] = {"rfilename": name, "size": self.size(name), "blobId": git}
            if name.endswith(".safetensors"):
                entry["lfs"] = {"size": self.size(name), "sha256": sha256, "pointerSize": 134}
            siblings.append(entry)
        return {"id": self.repo, "sha": self.commit, "siblings": siblings, **self.listed}

    @contextlib.contextmanager
    def running(self) -> Iterator[FakeHub]:
        hub = self

        class Handler(_Handler):
            fake = hub

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        self.url = f"http://127.0.0.1:{server.server_port}"
        try:
            yield self
        finally:
            server.shutdown()
            server.server_close()
            thread.join()


class _Handler(BaseHTTPRequestHandler):
    fake: FakeHub
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer(500, b"", {})

    def do_GET(self) -> None:
        fake, path = self.fake, self.path.split("?")[0]
        error = {"X-Repo-Commit": fake.commit}
        if fake.down:
            return self._answer(503, b"", {})
        if fake.token and self.headers.get("Authorization") != f"Bearer {fake.token}":
            return self._answer(401, b"", {})
        if match := re.fullmatch(rf"/api/models/{fake.repo}(?:/revision/(.+))?", path):
            if match[1] not in (None, "main", fake.commit, "v1"):
                return self._answer(404, b"", {**error, "X-Error-Code": "RevisionNotFound"})
            return self._answer(200, json.dumps(fake.listing()).encode(), {"Content-Type": "application/json"})
        match = re.fullmatch(rf"/{fake.repo}/resolve/{fake.commit}/([^/]+)|/cdn/([^/]+)", path)
        if match is None:
            return self._answer(404, b"", {"X-Error-Code": "RepoNotFound"})
        name = match[1] or match[2]
        if fake.gated:
            return self._answer(403, b"", {"X-Error-Code": "GatedRepo"})
        if name not in fake.files:
            return self._answer(404, b"", {"X-Error-Code": "EntryNotFound"})
        if name in fake.statuses:
            return self._answer(fake.statuses[name], b"", {})
        if match[1] and name.endswith(".safetensors"):  # as the real one does: to another host
            return self._answer(302, b"", {"Location": f"{fake.url}/cdn/{name}"})
        return self._send_file(name)

    def _send_file(self, name: str) -> None:
        size = len(self.fake.served[name]) if name in self.fake.served else self.fake.size(name)
        asked = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        if asked is None or not self.fake.ranges:
            return self._answer(200, self.fake.piece(name, 0, size), {}, name)
        start, end = int(asked[1]), min(int(asked[2]), size - 1)
        if start >= size:
            return self._answer(416, b"", {})
        data = self.fake.piece(name, start, end + 1)
        return self._answer(206, data, {"Content-Range": f"bytes {start}-{end}/{size}"}, name)

    def _answer(self, status: int, body: bytes, headers: dict[str, str], name: str = "") -> None:
        cuts = self.fake.cuts.get(name)
        end = cuts.pop(0) if cuts else len(body)
        sent = Sent(self.path.split("?")[0], self.headers.get("Range", ""), status, 0)
        self.fake.sent.append(sent)
        self.send_response(status)
        for key, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(key, value)
        try:
            self.end_headers()
            for offset in range(0, min(end, len(body)), CHUNK):
                if self.fake.slow_s:
                    time.sleep(self.fake.slow_s)
                chunk = body[offset : min(offset + CHUNK, end)]
                self.wfile.write(chunk)
                sent.body += len(chunk)
            if end < len(body):
                self.close_connection = True
        except OSError:  # the other side has had enough
            self.close_connection = True


def use(hub: FakeHub, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have huggingface_hub talk to `hub`, and keep files in `root`."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", hub.url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", hub.url + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(root))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(root / "no-token"))
    monkeypatch.delenv("HF_TOKEN", raising=False)


def folder_files(folder: Path) -> dict[str, bytes | Path]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.is_file()}
