"""Which conversation a prompt goes on with, and which stranger was the first hop of each (`--vary-first`).

A prompt that begins with an earlier one is the same conversation. Owns digests of the latest prompts and no text, for
as long as the client runs.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from swarm.types import PeerId

MAX_PROMPTS = 256
TURN_TOKENS = 5  # at a prompt's end, the template's, which may be written differently once there is an answer
MIN_TOKENS = 2 * TURN_TOKENS  # of a prompt that may have such an end


@dataclass(slots=True)
class Conversations:
    """Of one client."""

    _prompts: OrderedDict[tuple[int, bytes], PeerId] = field(default_factory=OrderedDict)  # the latest last
    _last: PeerId = ""  # the first stranger of the latest

    def first_hop(self, prompt: Sequence[int]) -> tuple[PeerId, PeerId]:
        """(the first stranger of this conversation so far, that of the conversation before); "" for none."""
        for length, digest in reversed(self._prompts):
            if length <= len(prompt) and _digest(prompt[:length]) == digest:
                return self._prompts[length, digest], ""
        return "", self._last

    def note(self, prompt: Sequence[int], peer: PeerId) -> None:
        """`peer`: the first stranger of the chain that this prompt went to."""
        length = len(prompt) - TURN_TOKENS if len(prompt) > MIN_TOKENS else len(prompt)
        key = length, _digest(prompt[:length])
        self._prompts.pop(key, None)
        self._prompts[key] = self._last = peer
        if len(self._prompts) > MAX_PROMPTS:
            self._prompts.popitem(last=False)


def _digest(tokens: Sequence[int]) -> bytes:
    return hashlib.blake2b(repr(tuple(tokens)).encode(), digest_size=16).digest()
