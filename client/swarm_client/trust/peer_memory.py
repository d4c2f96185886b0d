"""What this client has seen of each peer, across answers and, in one small file, across runs.

Owns the evidence and its file: bounded, written whole, and ignored if it is not what was written. What follows from the
evidence is decided by `swarm.planner.trust`.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

import msgspec

from swarm.config import peer_memory_dir
from swarm.errors import UNDECODABLE, NetworkError
from swarm.planner.trust.evidence import (
    MAX_FILE,
    MAX_PEERS,
    UNKNOWN,
    PeerEvidence,
    PeerFile,
    audited,
    failed,
    finished,
    measured,
    met,
)
from swarm.types import PeerId
from swarm_client.trust.failures import failure_kind

logger = logging.getLogger(__name__)

_decode = msgspec.msgpack.Decoder(PeerFile).decode


class PeerMemory:
    """`file`: None to remember for this run only. Of more than MAX_PEERS those met longest ago are forgotten first,
    cheats last."""

    def __init__(self, file: Path | None = None) -> None:
        self._file = file
        self._known: dict[PeerId, PeerEvidence] = _load(file) if file is not None else {}
        self._causes: dict[PeerId, NetworkError] = {}  # the last failure counted, which may be reported again

    @property
    def known(self) -> Mapping[PeerId, PeerEvidence]:
        return self._known

    def of(self, peer: PeerId) -> PeerEvidence:
        return self._known.get(peer, UNKNOWN)

    def failed(self, peer: PeerId, cause: NetworkError, wall: float, block: str = "") -> None:
        """A session failed at the peer. `wall`: seconds since the epoch."""
        kind = failure_kind(cause)
        if kind is None or self._causes.get(peer) is cause:
            return
        self._causes[peer] = cause
        self._keep(peer, failed(met(self.of(peer), wall, block), kind, wall))

    def served(self, peer: PeerId, rows: int, wall: float, block: str = "", layers: int = 1) -> None:
        """A session ended at a peer that had computed `rows` of it, each through `layers` layers."""
        self._keep(peer, finished(met(self.of(peer), wall, block), float(rows), layers))

    def took(self, peer: PeerId, advertised_ms: float, measured_ms: float, wall: float) -> None:
        """A layer took so long for a step for which the peer's record claims `advertised_ms`."""
        self._keep(peer, measured(met(self.of(peer), wall), advertised_ms, measured_ms))

    def audited(self, peer: PeerId, passed: bool, wall: float) -> None:
        """The result of an audit that this client did, or whose evidence it has checked."""
        self._keep(peer, audited(met(self.of(peer), wall), passed, wall))

    def _keep(self, peer: PeerId, evidence: PeerEvidence) -> None:
        self._known[peer] = evidence
        if len(self._known) > MAX_PEERS:
            for oldest in sorted(self._known, key=self._worth)[: MAX_PEERS // 8]:
                del self._known[oldest]
                self._causes.pop(oldest, None)

    def _worth(self, peer: PeerId) -> tuple[bool, bool, float]:
        evidence = self._known[peer]
        return evidence.audits_failed > 0, evidence.sessions > 0, evidence.last_at

    async def save(self) -> None:
        """Best effort: a client that cannot write its file works without."""
        if self._file is None or not self._known:
            return
        data = msgspec.msgpack.encode(PeerFile(1, dict(self._known)))
        try:
            await asyncio.to_thread(_replace, self._file, data)
        except OSError as error:
            logger.info("what was seen of peers is not kept: %s", error)


def memory_file(model: str, weight_hash: str) -> Path:
    """Times of different models are not compared, so each has a file."""
    name = hashlib.blake2b(f"{model} {weight_hash}".encode(), digest_size=12).hexdigest()
    return peer_memory_dir() / f"{name}.seen"


def _load(file: Path) -> dict[PeerId, PeerEvidence]:
    try:
        with file.open("rb") as opened:
            data = opened.read(MAX_FILE + 1)
        if len(data) > MAX_FILE:
            raise ValueError(f"it is longer than {MAX_FILE} bytes")
        return dict(_decode(data).peers)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, *UNDECODABLE) as error:
        logger.warning("ignoring %s, which is no memory of peers: %s", file, error)
        return {}


def _replace(file: Path, data: bytes) -> None:
    """Raises OSError."""
    file.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=file.parent, prefix=file.name)
    try:
        with os.fdopen(handle, "wb") as opened:
            opened.write(data)
        Path(name).replace(file)
    except BaseException:
        with contextlib.suppress(OSError):
            Path(name).unlink()
        raise
