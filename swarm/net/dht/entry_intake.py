"""What a reader takes from the replies of others: what is new and signed, at a bounded cost.

Owns the order of checks. First what costs under a microsecond: bounds, and whether we hold that entry or a later one;
then signatures, as many as the budget allows, each reply in its turn, so that a replica of hostile entries takes a turn
and no more. Knows no network.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from typing import TypeVar

from swarm.net.dht import entries
from swarm.net.dht.entries import Entry
from swarm.net.dht.entry_store import EntryStore
from swarm.net.dht.verification_budget import VerificationBudget

_Source = TypeVar("_Source")

CHECKS_AT_ONCE = 16  # some 2 ms, after which the event loop gets its turn


async def take_in(
    key: bytes, replies: Sequence[tuple[_Source, Sequence[Entry]]], store: EntryStore, budget: VerificationBudget
) -> list[_Source]:
    """Put the new entries of `replies` into `store`; whose replies held an entry that its peer has not signed.

    No honest replica has such an entry, so the rest of that reply is not read.
    """
    liars: list[_Source] = []
    turns = [(source, _unchecked(key, reply, store, budget)) for source, reply in replies]
    checks = 0
    while turns:
        again = []
        for source, unchecked in turns:
            entry = next(unchecked, None)
            if entry is None:
                continue
            if not entries.is_signed(key, entry):
                liars.append(source)
                continue
            store.put(key, entry)
            again.append((source, unchecked))
            checks += 1
            if checks % CHECKS_AT_ONCE == 0:
                await asyncio.sleep(0)
        turns = again
    return liars


def _unchecked(key: bytes, reply: Sequence[Entry], store: EntryStore, budget: VerificationBudget) -> Iterator[Entry]:
    """The entries of one reply that are worth a check, as long as the budget lasts."""
    now = time.time()
    for entry in reply:
        held_until = store.expires_at(key, entry.peer)
        if entry.expires_at <= held_until or not entries.is_plausible(entry, now):
            continue
        if budget.take_known(held_until - now) if held_until > now else budget.take_new():
            yield entry
