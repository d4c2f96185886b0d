"""What this node has given: tokens, hours and bytes in all, and to whom by the receipts that clients signed.

Owns the ledger and its file. It is the owner's to see; nothing is bought with it. Bounded: the clients that were here
longest ago are forgotten first, their receipts stay in the totals.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from swarm.config import NodeConfig, state_dir
from swarm.errors import UsageError
from swarm.net.security.identity import Identity
from swarm.receipts import Receipt
from swarm.types import PeerId

logger = logging.getLogger(__name__)

MAX_FILE = 4 << 20
_Total = Annotated[int, Meta(ge=0, le=1 << 62)]
_Seconds = Annotated[float, Meta(ge=0.0, le=1e12)]


@dataclass(frozen=True, slots=True)
class LedgerPolicy:
    max_clients: int = 4096
    """Whose receipts are counted apart; memory, and the size of the file."""
    save_interval_s: float = 60.0
    """What a crash may lose against writes."""


class ClientEntry(msgspec.Struct, forbid_unknown_fields=True):
    """The receipts of one client; times in seconds since the epoch, by our clock."""

    first: _Seconds
    last: _Seconds
    receipts: _Total = 0
    layer_tokens: _Total = 0


class Contributions(msgspec.Struct, forbid_unknown_fields=True):
    """The file. `layer_tokens`: rows times layers, as this node counted them; `acknowledged`: those with a receipt."""

    layer_tokens: _Total = 0
    compute_s: _Seconds = 0.0
    sent_bytes: _Total = 0
    acknowledged: _Total = 0
    receipts: _Total = 0
    clients: Annotated[dict[str, ClientEntry], Meta(max_length=1 << 16)] = {}


class ContributionLedger:
    """`file`: None to keep it in memory only, as for a node whose identity is new at every start."""

    def __init__(self, file: Path | None = None, policy: LedgerPolicy = LedgerPolicy()) -> None:
        self._file = file
        self._policy = policy
        self.given = _read(file)
        self._dirty = False

    def served(self, layer_tokens: int = 0, compute_s: float = 0.0, sent_bytes: int = 0) -> None:
        """Count work done since the last call."""
        given = self.given
        given.layer_tokens += layer_tokens
        given.compute_s += compute_s
        given.sent_bytes += sent_bytes
        self._dirty = self._dirty or bool(layer_tokens or compute_s or sent_bytes)

    def acknowledge(self, client: PeerId, receipt: Receipt, now: float) -> None:
        """A receipt that was checked. The order of `clients` is that of their last one."""
        given = self.given
        entry = given.clients.pop(client, None) or ClientEntry(now, now)
        given.clients[client] = entry
        entry.last = max(entry.last, now)
        entry.receipts += 1
        entry.layer_tokens += receipt.layer_tokens
        given.receipts += 1
        given.acknowledged += receipt.layer_tokens
        while len(given.clients) > self._policy.max_clients:
            del given.clients[next(iter(given.clients))]
        self._dirty = True

    async def run(self, update: Callable[[], None]) -> None:
        """Write the file every so often, after `update()` has brought the counts up to date."""
        while True:
            await asyncio.sleep(self._policy.save_interval_s)
            update()
            await asyncio.to_thread(self.save)

    def save(self) -> None:
        """Replace the file, whole or not at all, if something has changed. A full disk is logged, and no more."""
        if self._file is None or not self._dirty:
            return
        self._dirty = False
        data = msgspec.json.encode(self.given)
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            descriptor, temporary = tempfile.mkstemp(dir=self._file.parent, prefix=f".{self._file.name}.")
            with os.fdopen(descriptor, "wb") as file:
                file.write(data)
            os.replace(temporary, self._file)
        except OSError as error:
            logger.warning("cannot write what this node has given to %s: %s", self._file, error.strerror)


def ledger_file(config: NodeConfig, peer: PeerId) -> Path | None:
    """Where the ledger of this identity is kept; None for an identity that is new at every start."""
    return state_dir() / "contributions" / f"{peer}.json" if config.identity is not None else None


def owner_peer(entry: str) -> PeerId:
    """The peer that `--owner` names, by its id or by its identity file. Raises IdentityError, UsageError."""
    path = Path(entry).expanduser()
    if path.is_file():
        return Identity.load(path).peer
    if not re.fullmatch(r"12D3Koo[1-9A-HJ-NP-Za-km-z]{40,50}", entry):
        raise UsageError(f"--owner {entry} is neither a peer id nor the identity file of a client")
    return entry


def _read(file: Path | None) -> Contributions:
    """What the file says; nothing if there is none, or none that can be read."""
    if file is None or not file.exists():
        return Contributions()
    try:
        if file.stat().st_size > MAX_FILE:
            raise msgspec.DecodeError("it is too large")
        return msgspec.json.decode(file.read_bytes(), type=Contributions)
    except (OSError, msgspec.DecodeError) as error:
        logger.warning("the file of what this node has given, %s, is damaged and starts anew: %s", file, error)
        return Contributions()
