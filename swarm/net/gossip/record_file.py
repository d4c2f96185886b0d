"""The records of one swarm in a file, so that a program finds the swarm again when the peers it was given are gone.

Owns the file: its place, bounds and mode 0600; it is replaced as a whole. What it holds are hints: records are verified
again, and those that have expired only say whom to ask.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from swarm import records
from swarm.errors import UNDECODABLE
from swarm.gossip_messages import RecordBytes
from swarm.net.base.tls_addresses import is_direct
from swarm.net.gossip.policy import RecordFilePolicy
from swarm.net.security.identity import verify
from swarm.records import InvalidRecord

logger = logging.getLogger(__name__)

_Saved = Annotated[list[tuple[RecordBytes, float]], Meta(max_length=4096)]
_decoder: msgspec.msgpack.Decoder[list[tuple[bytes, float]]] = msgspec.msgpack.Decoder(_Saved)


class RecordFile:
    """`of` a swarm; `load` once, `save` when `due` and at the end."""

    def __init__(self, path: Path, policy: RecordFilePolicy = RecordFilePolicy()) -> None:
        self.path = path
        self._policy = policy
        self._next_save: float | None = None

    @classmethod
    def of(cls, folder: Path, model: str, peers: Sequence[str], network: str = "", secret: str = "") -> RecordFile:
        """Of the swarm that a program is to find through `peers` (multiaddrs): two swarms never share a file, even if
        they serve the same model."""
        ids = sorted({address.rpartition("/p2p/")[2] for address in peers})
        digest = hashlib.sha256("\0".join((model, network, hashlib.sha256(secret.encode()).hexdigest(), *ids)).encode())
        return cls(folder / f"{digest.hexdigest()[:32]}.records")

    @property
    def max_records(self) -> int:
        return self._policy.max_records

    def due(self, now: float) -> bool:
        """Whether to save again; `now` of any steady clock. The first time is soon after the start."""
        if self._next_save is None:
            self._next_save = now + self._policy.save_interval_s / 12
        if now < self._next_save:
            return False
        self._next_save = now + self._policy.save_interval_s
        return True

    def load(self) -> list[tuple[bytes, float]]:
        """(record, since when its peer is known), not verified; none if there is no file or it is damaged."""
        try:
            with self.path.open("rb") as file:
                content = file.read(self._policy.max_bytes + 1)
        except FileNotFoundError:
            return []
        except OSError as error:
            logger.warning("cannot read the nodes known before, in %s: %s", self.path, error.strerror)
            return []
        try:
            if len(content) > self._policy.max_bytes:
                raise ValueError("it is too long")
            return _decoder.decode(content)[: self._policy.max_records]
        except (*UNDECODABLE, ValueError) as error:
            logger.warning("the file of nodes known before is damaged and ignored (%s): %s", error, self.path)
            return []

    def addresses(self, model: str, count: int) -> tuple[str, ...]:
        """Multiaddrs of up to `count` peers of `model` by which to join: of each the first, and the first direct one.
        Only what they signed."""
        found: list[tuple[str, ...]] = []
        for data, _ in self.load():
            try:
                peer, at = records.claim(data)
                addresses = records.decode(data, peer, model, at, verify).addrs
            except InvalidRecord:
                continue
            direct = next(filter(is_direct, addresses), "")
            found.append(tuple(dict.fromkeys(filter(None, (*addresses[:1], direct)))))
        return tuple(address for of in found[:count] for address in of)

    def save(self, kept: Sequence[tuple[bytes, float]]) -> None:
        """Replace the file, unless nothing is known; what cannot be written is left."""
        if not kept:
            return
        folder = self.path.parent
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            descriptor, temporary = tempfile.mkstemp(dir=folder, prefix=f".{self.path.name}.")  # mkstemp: mode 0600
            try:
                with os.fdopen(descriptor, "wb") as file:
                    file.write(msgspec.msgpack.encode(kept))
                os.replace(temporary, self.path)
            except BaseException:
                os.unlink(temporary)
                raise
            self._remove_oldest(folder)
        except OSError as error:
            logger.warning("cannot write the nodes known now to %s: %s", self.path, error.strerror)

    def _remove_oldest(self, folder: Path) -> None:
        files = sorted(folder.glob("*.records"), key=lambda path: path.stat().st_mtime)
        for path in files[: max(0, len(files) - self._policy.max_files)]:
            with contextlib.suppress(FileNotFoundError):
                path.unlink()
