"""Which drafter `--drafter auto` takes of those at hand, and the sentence that says so.

Owns the order: heads that were made for the model before those that were made for its text, and what needs one pass for
a block before what needs one for a token. The n-gram drafter is always on and no choice. What an offer's drafts are
worth is measured while they are used: the strategy follows that, whatever was taken.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from swarm.planner.speculation.drafter_place import TailOffer
from swarm.planner.speculation.policy import DrafterChoicePolicy


class DrafterKind(StrEnum):
    """Best first."""

    DFLASH = "dflash"
    EAGLE = "eagle"
    MTP = "mtp"
    BUNDLED = "bundled"
    MEDUSA = "medusa"


_WHAT = {
    DrafterKind.DFLASH: ("the DFlash drafter {}", "it drafts a block in one pass from the model's own states"),
    DrafterKind.EAGLE: ("the EAGLE-3 drafter {}", "its one layer reads the model's own states"),
    DrafterKind.MTP: ("the MTP layer of {}", "the model was trained with it"),
    DrafterKind.BUNDLED: ("the trained draft {}", "it comes with swarm for exactly these weights"),
    DrafterKind.MEDUSA: (
        "the last node's Medusa heads",
        "nothing else is at hand; if it has none, that costs nothing",
    ),
}


@dataclass(frozen=True, slots=True)
class DrafterOffer:
    """`name`: of its file, folder or model. `fetch_bytes`: to come from a hub first; `memory_bytes`: what its weights
    take here."""

    kind: DrafterKind
    name: str = ""
    fetch_bytes: int = 0
    memory_bytes: int = 0

    def __str__(self) -> str:
        return _WHAT[self.kind][0].format(self.name)


@dataclass(frozen=True, slots=True)
class DrafterRanking:
    """`offers`: in the order in which they are tried. `left_out`: a clause for each that is not."""

    offers: tuple[DrafterOffer, ...]
    left_out: tuple[str, ...] = ()


def rank_drafters(
    offers: Iterable[DrafterOffer], policy: DrafterChoicePolicy = DrafterChoicePolicy()
) -> DrafterRanking:
    """The same whatever the order of `offers`."""
    order = list(DrafterKind)
    ranked, left_out = [], []
    for offer in sorted(offers, key=lambda offer: (order.index(offer.kind), offer.name)):
        if offer.fetch_bytes > policy.max_fetch_bytes:
            left_out.append(f"{offer}, of which {_size(offer.fetch_bytes)} would have to be fetched first")
        elif offer.memory_bytes > policy.max_memory_bytes:
            left_out.append(f"{offer}, which would take {_size(offer.memory_bytes)} of memory here")
        else:
            ranked.append(offer)
    return DrafterRanking(tuple(ranked), tuple(left_out))


def prefers_tail(tail: TailOffer, here: DrafterOffer | None) -> bool | None:
    """Whether the tail's drafter goes before `here`, the best that is at hand, by their kinds; None where they are of
    one kind, so that `drafter_place` decides. One that few last nodes hold goes before nothing but Medusa heads."""
    order = list(DrafterKind)
    if here is None or here.kind is DrafterKind.MEDUSA:
        return True
    if 2 * tail.tails < tail.of:
        return False
    difference = order.index(DrafterKind(tail.drafter.kind)) - order.index(here.kind)
    return None if difference == 0 else difference < 0


def explain_tail(tail: TailOffer, why: str, left_out: Sequence[str] = ()) -> str:
    """As `explain_choice`, where the tail's drafter is taken."""
    return f"drafting with n-grams and {tail}, because {why}" + "".join(f"; without {clause}" for clause in left_out)


def explain_choice(taken: DrafterOffer | None, left_out: Sequence[str] = ()) -> str:
    """One line. `left_out`: clauses, of what was not tried and of what was tried and failed."""
    if taken is None:
        said = "drafting with n-grams alone: no other drafter is at hand"
    else:
        said = f"drafting with n-grams and {taken}, because {_WHAT[taken.kind][1]}"
    return said + "".join(f"; without {clause}" for clause in left_out)


def _size(count: int) -> str:
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.0f} MiB"
