"""Who sees what of a text along a chain, in a sentence for people: peers, and what an attack of ours made of it.

Owns the sentence and the measured shares (docs/privacy.md, `swarm-privacy measure`). Promises nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from swarm.types import Chain, PeerId
from swarm_client.home.local_layers import foreign

RECOVERED: Mapping[str, Mapping[int, float]] = {
    "smollm2-135m": {0: 1.0, 1: 1.0, 2: 1.0, 4: 1.0, 8: 0.984, 16: 0.964, 30: 0.836}
}
"""Model -> layers that a state has passed -> the share of tokens that the best of our attacks recovered from it."""


def exposure(chain: Chain, model: str, trusted: Collection[PeerId] = ()) -> str:
    """Which peers of `chain` see token ids, which hidden states after how many layers, and what those gave away.
    `trusted`: peers to which ids may go."""
    others = [hop for hop in foreign(chain.hops) if hop.peer not in trusted]
    own = [hop.peer[-6:] for hop in chain.hops if hop.peer in trusted]
    if not others:
        return f"only trusted nodes see the text: {_list(own)}" if own else ""
    names = [hop.peer[-6:] for hop in others]
    if len(others) < len(chain.hops):
        kept = f"token ids go to trusted nodes alone, {_list(own)}" if own else "token ids stay here"
        who = f"{kept}; {_list(names)} {_see(names)} hidden states after {_layers(others[0].start)} or more"
        return f"{who}, {_leaked(model, others[0].start)}"
    ends, between = [*names[:1], *names[1:][-1:]], names[1:-1]
    ids = f"{_list(ends)} {_see(ends)} token ids"
    if not between:
        return f"{ids}, which is all of the text (docs/privacy.md)"
    states = f"{_list(between)} {_see(between)} hidden states, {_leaked(model, others[1].start)}"
    return f"{ids}, which is all of the text; {states}"


def _leaked(model: str, depth: int) -> str:
    """What was recovered from states that have passed `depth` layers, or fewer where so many were not tried."""
    known = RECOVERED.get(model, {})
    from_depth = max((at for at in known if at <= depth), default=None)
    if from_depth is None:
        return "which give most of a text away (docs/privacy.md)"
    return f"from which our own attack recovered {known[from_depth]:.0%} after {_layers(from_depth)} (docs/privacy.md)"


def _layers(count: int) -> str:
    return f"{count} layer" + "s" * (count != 1)


def _list(names: list[str]) -> str:
    return ", ".join(names[:-1]) + f" and {names[-1]}" if len(names) > 1 else names[0]


def _see(names: list[str]) -> str:
    return "see" if len(names) > 1 else "sees"
