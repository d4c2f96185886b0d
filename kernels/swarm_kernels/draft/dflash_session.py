"""Draft tokens of a drafter that fills blocks (DFlash), for one text.

Owns the keys and values of the text, made of the target's hidden states as they come, and the block below it. The block
gives a distribution for each place, whatever stands before it: all paths of one length share their candidates, and the
tree is made of the likeliest paths. Rows that have not come leave a gap, which costs acceptance alone; without that of
the last token but one there are no draft tokens, for the block would be drafted blindly.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from swarm.types import TappedRows, Taps
from swarm_kernels.draft.session import DraftCachePolicy, DraftCandidates, Path
from swarm_kernels.draft.tapped import decode_rows


@dataclass(frozen=True, slots=True, eq=False)
class Context:
    """Of the text: `keys`, `values` `[n, layers, kv_heads, head_dim]`, `positions [n]` int64, in any order."""

    keys: torch.Tensor
    values: torch.Tensor
    positions: torch.Tensor


class BlockDraft(Protocol):
    """Many texts may share one, each from its own thread."""

    @property
    def context_length(self) -> int: ...

    @property
    def block_size(self) -> int: ...

    @property
    def taps(self) -> Taps: ...

    def project(self, tapped: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The target's `[n, taps * hidden]` at `positions [n]` -> `Context.keys` and `values`."""
        ...

    def fill(self, last_token: int, position: int, context: Context) -> torch.Tensor:
        """The block that begins with the text's last token, at `position` -> `[block_size - 1, hidden]`: a row for each
        place after it."""
        ...

    def propose(self, hidden: torch.Tensor, width: int) -> list[DraftCandidates]:
        """For each row of `fill` the `width` likeliest tokens. Raises DrafterFailed if these are no numbers."""
        ...


class DFlashSession:
    """See `TappedSession`."""

    def __init__(
        self, model: BlockDraft, max_tokens: int | None = None, policy: DraftCachePolicy = DraftCachePolicy()
    ) -> None:
        """`max_tokens`: of the longest text; by default, and at most, the drafter's context."""
        self._model, self._policy = model, policy
        self._limit = min(max_tokens or model.context_length, model.context_length)
        self._tokens: list[int] = []
        self._waiting: list[TappedRows] = []  # not decoded yet: that is for the thread that proposes
        self._rows: dict[int, torch.Tensor] = {}  # [taps * hidden] by position, not computed yet
        self._done: set[int] = set()  # positions whose keys and values are in the context
        self._room: Context | None = None  # the context, and room for what follows
        self._block: torch.Tensor | None = None
        self._places: list[DraftCandidates] = []  # of the block, `_width` for each
        self._width = 0

    def reset(self, tokens: Sequence[int]) -> None:
        self._tokens, self._waiting, self._rows = list(tokens), [], {}
        self._done, self._room = set(), None
        self._forget_block()

    def extend(self, tokens: Sequence[int]) -> None:
        self._tokens += tokens
        if tokens:
            self._forget_block()

    def add(self, rows: TappedRows) -> None:
        self._waiting.append(rows)

    def propose(self, paths: Sequence[Path], width: int) -> list[DraftCandidates]:
        if not paths or len(self._tokens) - 1 + self._model.block_size > self._limit or not self._follow_text():
            return [[] for _ in paths]
        if self._block is None:
            assert self._room is not None  # `_follow_text` says so
            count = len(self._done)
            context = Context(self._room.keys[:count], self._room.values[:count], self._room.positions[:count])
            self._block = self._model.fill(self._tokens[-1], len(self._tokens) - 1, context)
        if self._width < width:
            self._places, self._width = self._model.propose(self._block, width), width
        return [self._place(path, width) for path in paths]

    def known(self, paths: Sequence[Path], width: int) -> list[DraftCandidates | None]:
        ready = self._block is not None and not self._waiting and self._width >= width
        return [self._place(path, width) if ready else None for path in paths]

    def _place(self, path: Path, width: int) -> DraftCandidates:
        """None beyond the block."""
        return self._places[len(path)][:width] if len(path) < len(self._places) else []

    def _follow_text(self) -> bool:
        """Compute the rows of the text that have come. -> whether there is one of the last token but one."""
        self._rows.update(decode_rows(self._waiting, self._model.taps))
        self._waiting = []
        last = len(self._tokens) - 2
        ready = sorted(at for at in self._rows if 0 <= at <= last and at not in self._done)
        for start in range(0, len(ready), self._policy.prefill_chunk):
            part = ready[start : start + self._policy.prefill_chunk]
            positions = torch.tensor(part)
            self._append(positions, *self._model.project(torch.stack([self._rows[at] for at in part]), positions))
        self._rows = {at: row for at, row in self._rows.items() if at > last}
        if ready:
            self._forget_block()
        return last in self._done

    def _append(self, positions: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        count, new = len(self._done), len(positions)
        if self._room is None or count + new > len(self._room.positions):
            room = max(2 * (count + new), self._policy.prefill_chunk)
            grown = Context(
                keys.new_empty(room, *keys.shape[1:]),
                values.new_empty(room, *values.shape[1:]),
                positions.new_empty(room),
            )
            if self._room is not None:
                for old, fresh in zip(_parts(self._room), _parts(grown), strict=True):
                    fresh[:count] = old[:count]
            self._room = grown
        for kept, added in zip(_parts(self._room), (keys, values, positions), strict=True):
            kept[count : count + new] = added
        self._done.update(positions.tolist())

    def _forget_block(self) -> None:
        self._block, self._places, self._width = None, [], 0


def _parts(context: Context) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return context.keys, context.values, context.positions
