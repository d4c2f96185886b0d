"""Whose nodes have worked for the people at this machine: the memories of their clients, read from time to time.

Owns the reading, within bounds, and the last outcome. What it is worth is decided by `planner.trust.contribution`. Only
files of this user are read: what other clients say they got, they may have made up.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from swarm.errors import UNDECODABLE, NetworkError
from swarm.planner.trust.contribution import (
    POLICY,
    ContributionPolicy,
    Contributor,
    client_weight,
    contributors,
    credits,
)
from swarm.planner.trust.evidence import MAX_FILE, PeerEvidence, PeerFile
from swarm.types import PeerId, Snapshot

logger = logging.getLogger(__name__)

_decode = msgspec.msgpack.Decoder(PeerFile).decode
_Memory = Mapping[PeerId, PeerEvidence]


@dataclass(frozen=True, slots=True)
class ContributorPolicy:
    interval_s: float = 60.0  # between two looks: how soon thanks are felt against reading
    max_files: int = 16  # models whose clients' memories are read, those used last


class Contributors:
    """`folder`: of the clients' memories. `snapshot`: the nodes that are seen. `wall_clock`: since the epoch."""

    def __init__(
        self,
        folder: Path,
        snapshot: Callable[[], Awaitable[Snapshot]],
        wall_clock: Callable[[], float],
        policy: ContributorPolicy = ContributorPolicy(),
        worth: ContributionPolicy = POLICY,
    ) -> None:
        self._folder = folder
        self._snapshot = snapshot
        self._wall_clock = wall_clock
        self._policy = policy
        self._worth = worth
        self._nodes: tuple[Contributor, ...] = ()
        self._read: dict[Path, tuple[int, _Memory]] = {}  # file -> when it was changed, what it says

    def __len__(self) -> int:
        """Nodes whose owners' clients are thanked."""
        return len(self._nodes)

    def weight(self, client: PeerId) -> float:
        """Of its work here, against 1."""
        return client_weight(client, self._nodes, self._worth)

    async def run(self) -> None:
        while True:
            try:
                await self.update()
            except NetworkError as error:
                logger.debug("helpers are those of before: %s", error)
            await asyncio.sleep(self._policy.interval_s)

    async def update(self) -> None:
        """Look now. Raises NetworkError."""
        memories = await asyncio.to_thread(self._memories)
        worth = credits(memories, self._wall_clock(), self._worth)
        self._nodes = contributors(await self._snapshot(), worth) if worth else ()

    def _memories(self) -> list[_Memory]:
        self._read = {file: self._memory(file, changed) for changed, file in self._newest()}
        return [memory for _, memory in self._read.values()]

    def _newest(self) -> list[tuple[int, Path]]:
        try:
            found = [(file.stat().st_mtime_ns, file) for file in self._folder.glob("*.seen")]
        except OSError:
            return []
        return sorted(found, reverse=True)[: self._policy.max_files]

    def _memory(self, file: Path, changed: int) -> tuple[int, _Memory]:
        """Nothing of a file that is no memory: its client says so to its user."""
        before = self._read.get(file)
        if before is not None and before[0] == changed:
            return before
        try:
            with file.open("rb") as opened:
                data = opened.read(MAX_FILE + 1)
            return changed, _decode(data).peers if len(data) <= MAX_FILE else {}
        except (OSError, *UNDECODABLE) as error:
            logger.debug("%s is no memory of peers: %s", file, error)
            return changed, {}
