"""The two-level paged KV cache of one span: committed pages, shared between forks, and of uncommitted tree slots.

Owns which page belongs to whom, and turns requests for rows into a `AttentionMetadata`. Knows neither models nor peers, and
never reads a key or a value: copies are part of the plan and are carried out by whoever runs it.

Plans must be run in the order they were made, each exactly once: `plan` updates the bookkeeping at once, on the promise
that the batch follows. If a batch fails half-way, its sessions are to be closed.

Reservations are promises. A session is opened with the tokens it may commit, and the cache never promises more pages
than it has: as long as a session holds no more than `ceil(max_tokens / PAGE)` pages, tree included, it is not refused.
Pages beyond that (a tree on top of a full context) come from what nobody was promised.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
import numpy.typing as npt
import torch

from swarm.errors import InvalidRequest, OutOfMemory
from swarm_kernels.batch import BLOCK_SIZE, AttentionMetadata
from swarm_kernels.device.transfer import upload
from swarm_kernels.kvcache.block_pool import BlockPool, KvShape
from swarm_kernels.kvcache.sequence import BlockDelta, SequenceBlocks, SessionKey, StepRequest, blocks_for
from swarm_kernels.ops.base.validate import mark_validated

__all__ = ["DEFAULT_MAX_SLOTS", "KVCacheManager", "KvShape", "StepRequest"]

DEFAULT_MAX_SLOTS = 4096  # tree slots a session may number, as `messages.MAX_SLOTS`


class KVCacheManager:
    """Keys and values of `shape.layers` layers for at most `max_tokens` tokens in all, rounded up to whole pages.

    `k[i]`, `v[i]` are the tensors of the span's i-th layer, see `kv_pool`. Not thread-safe: one owner calls it.
    """

    def __init__(
        self,
        shape: KvShape,
        max_tokens: int,
        device: torch.device | str = "cpu",
        max_slots: int = DEFAULT_MAX_SLOTS,
    ) -> None:
        self.shape = shape
        self.device = torch.device(device)
        self.max_slots = max_slots
        self.pool = BlockPool(shape, max(1, blocks_for(max_tokens)), self.device)
        self.k, self.v = self.pool.k, self.pool.v
        self.top_position = 0  # the largest position any plan has held
        self._sessions: dict[SessionKey, SequenceBlocks] = {}

    # --- what there is ------------------------------------------------------------------------------------------

    @property
    def capacity_tokens(self) -> int:
        return self.pool.pages * BLOCK_SIZE

    @property
    def free_tokens(self) -> int:
        """Tokens nobody holds or was promised: the largest reservation a new session can get."""
        return (self.pool.free - self._reserved()) * BLOCK_SIZE

    @property
    def nbytes(self) -> int:
        return self.pool.nbytes

    def __len__(self) -> int:
        return len(self._sessions)

    def __contains__(self, session: object) -> bool:
        return session in self._sessions

    def length(self, session: SessionKey) -> int:
        """Committed tokens of a session. Raises InvalidRequest if it is not open."""
        return self._get(session).length

    def slots(self, session: SessionKey) -> Collection[int]:
        """The live tree slots of a session."""
        return self._get(session).tree.keys()

    # --- sessions -----------------------------------------------------------------------------------------------

    def open(self, session: SessionKey, max_tokens: int) -> None:
        """Start an empty session that may commit `max_tokens`. Raises OutOfMemory, InvalidRequest."""
        self._check_new(session, max_tokens)
        self._check_reservation(blocks_for(max_tokens))
        self._sessions[session] = SequenceBlocks(max_tokens)

    def fork(self, parent: SessionKey, child: SessionKey, max_tokens: int, length: int | None = None) -> None:
        """Start `child` with committed tokens of `parent`; the pages are shared until one of them writes.

        `length`: how many of them, all by default. `max_tokens` counts them too. The parent's tree is not inherited.
        Raises OutOfMemory, InvalidRequest.
        """
        source = self._get(parent)
        self._check_new(child, max_tokens)
        length = source.length if length is None else length
        if not 0 <= length <= min(source.length, max_tokens):
            raise InvalidRequest(f"{length} of {source.length} tokens cannot be shared by a session of {max_tokens}")
        count, partial = blocks_for(length), length % BLOCK_SIZE != 0
        own = blocks_for(max_tokens) - (count - partial)
        last = partial and count == source.count  # the parent's last page is shared, and it may want to go on in it
        holds = source.count - last + len(source.tree_pages)
        self._check_reservation(
            own + max(0, source.reserved_blocks - holds) - source.unallocated_reservation(self.pool) if last else own
        )
        forked = SequenceBlocks(max_tokens)
        forked.table = source.table[:count].copy()
        forked.length, forked.count = length, count
        for page in source.table[:count].tolist():
            self.pool.incref(page)
        self._sessions[child] = forked

    def freeze_prefix(self, session: SessionKey, length: int) -> None:
        """Keep the first `length` committed tokens for others to share; nothing more will be written.

        What was promised to the session is free again. Raises InvalidRequest.
        """
        pages = self._get(session)
        if not 0 < length <= pages.length:
            raise InvalidRequest(f"{length} of {pages.length} committed tokens cannot be kept")
        self.drop_tree(session)
        pages.truncate(length, self.pool)
        pages.max_tokens = length

    def close(self, session: SessionKey) -> None:
        """Give back all pages. Closing what is not open does nothing."""
        pages = self._sessions.pop(session, None)
        if pages is not None:
            pages.release_tree_pages((), self.pool)
            pages.truncate(0, self.pool)

    def prune(self, session: SessionKey, slots: Collection[int]) -> None:
        """Drop tree slots and all that hang on them; slots that are not alive are ignored. Raises InvalidRequest."""
        self._get(session).prune(slots, self.pool)

    def drop_tree(self, session: SessionKey) -> None:
        """Drop every uncommitted slot."""
        pages = self._get(session)
        pages.tree = {}
        pages.release_tree_pages((), self.pool)

    def rollback(self, session: SessionKey, length: int) -> None:
        """Forget the tree and all committed tokens from `length` on.

        Raises InvalidRequest, or OutOfMemory when pages shared with others would have to be promised again.
        """
        pages = self._get(session)
        if not 0 <= length <= pages.length:
            raise InvalidRequest(f"cannot roll {pages.length} committed tokens back to {length}")
        kept = blocks_for(length)
        refs = self.pool.refs
        freed = sum(refs[page] == 1 for page in pages.table[kept : pages.count].tolist())
        unusable = length % BLOCK_SIZE != 0 and refs[pages.table[kept - 1]] > 1
        debt = max(0, pages.reserved_blocks - (kept - unusable))
        self._check_reservation(debt - pages.unallocated_reservation(self.pool) - freed - len(pages.tree_pages))
        self.drop_tree(session)
        pages.truncate(length, self.pool)

    # --- from one machine to another ----------------------------------------------------------------------------

    def pages(self, session: SessionKey, tokens: int) -> list[int]:
        """Where its first `tokens` committed tokens lie: pages of `pool.read`. Raises InvalidRequest."""
        pages = self._get(session)
        if not 0 <= tokens <= pages.length:
            raise InvalidRequest(f"{tokens} of {pages.length} committed tokens were asked for")
        return [int(page) for page in pages.table[: blocks_for(tokens)]]

    def import_blocks(self, session: SessionKey, tokens: int) -> list[int]:
        """Count `tokens` of an empty session as committed. -> the pages to fill by `pool.write`. Raises InvalidRequest.

        Nothing may be computed for the session before they are.
        """
        pages = self._get(session)
        if pages.length or pages.tree or tokens > pages.max_tokens:
            raise InvalidRequest(f"{tokens} tokens cannot be put into a session of {pages.max_tokens} that has begun")
        pages.grow(tokens, self.pool)
        return self.pages(session, tokens)

    # --- the main call ------------------------------------------------------------------------------------------

    def schedule(self, requests: Sequence[StepRequest]) -> AttentionMetadata:
        """Place the rows of `requests`, one a session at most, in their order.

        Raises InvalidRequest (a step its session does not allow) or OutOfMemory (no pages left), and then nothing has
        changed for any of the sessions.
        """
        checked = self._check(requests)
        writer = _MetadataBuilder(sum(request.rows for request in requests))
        moved = []
        for pages, request, draft in checked:  # a slot that moves is addressed before its page is given back
            moved.append([pages.slot_address(slot) for slot in request.commit_slots])
            if draft.give:
                pages.release_tree_pages(draft.tree_pages, self.pool)
        for index, (pages, request, draft) in enumerate(checked):
            self._apply(pages, request, draft, moved[index], writer, index)
        self.top_position = max(self.top_position, writer.top)
        plan = writer.finish([pages for pages, _, _ in checked], self.device)
        if self.device.type != "cpu":
            mark_validated(plan, self.pool.pages)
        return plan

    def _check(self, requests: Sequence[StepRequest]) -> list[tuple[SequenceBlocks, StepRequest, BlockDelta]]:
        checked = []
        beyond = False
        for request in requests:
            pages = self._get(request.session)
            draft = pages.check(request, self.pool, self.max_slots)
            beyond = beyond or draft.take > 0
            checked.append((pages, request, draft))
        if len(checked) > 1 and len({request.session for request in requests}) < len(checked):
            raise InvalidRequest("a batch may hold one step of a session")
        if beyond:
            needed = sum(
                draft.take - draft.give + pages.unallocated_after(draft, self.pool) for pages, _, draft in checked
            )
            self._check_reservation(needed - sum(pages.unallocated_reservation(self.pool) for pages, _, _ in checked))
        return checked

    def _apply(
        self,
        pages: SequenceBlocks,
        request: StepRequest,
        draft: BlockDelta,
        moved: list[int],
        writer: _MetadataBuilder,
        index: int,
    ) -> None:
        if draft.copy_last:
            old, new = pages.copy_on_write_last(self.pool)
            writer.copy_page(old, new, pages.length % BLOCK_SIZE)
        start = pages.length
        line_start = start + len(moved)
        pages.grow(draft.new_length, self.pool)
        pages.take_tree_pages(draft.tree_pages, self.pool)
        pages.tree = draft.tree
        writer.copy_from.extend(moved)
        writer.copy_to.extend(pages.address(position) for position in range(start, line_start))
        writer.add_line(index, pages, line_start, request.causal_rows)
        if request.slots:
            writer.add_tree(index, pages, request.slots)

    # --- accounting ---------------------------------------------------------------------------------------------

    def _get(self, session: SessionKey) -> SequenceBlocks:
        pages = self._sessions.get(session)
        if pages is None:
            raise InvalidRequest("this session is not open here")
        return pages

    def _check_new(self, session: SessionKey, max_tokens: int) -> None:
        if session in self._sessions:
            raise InvalidRequest("this session is open already")
        if max_tokens < 1:
            raise InvalidRequest(f"a session cannot reserve {max_tokens} tokens")

    def _reserved(self) -> int:
        """Pages promised to open sessions and not yet taken."""
        return sum(pages.unallocated_reservation(self.pool) for pages in self._sessions.values())

    def _check_reservation(self, pages: int) -> None:
        """Raise OutOfMemory unless `pages` more can be taken or promised."""
        if pages <= 0:
            return
        available = self.pool.free - self._reserved()
        if pages > available:
            raise OutOfMemory(
                f"{pages * BLOCK_SIZE} more tokens of KV memory are needed, {available * BLOCK_SIZE} of {self.capacity_tokens} free"
            )

    def check_integrity(self) -> None:
        """Recount every page from the sessions. Raises RuntimeError, naming the first rule that is broken: our bug."""
        refs = [0] * self.pool.pages
        for pages in self._sessions.values():
            self._check_session(pages)
            for page in pages.table[: pages.count].tolist():
                refs[page] += 1
            for index in pages.tree_pages:
                refs[int(pages.tree_table[index])] += 1
        free = self.pool.free_blocks()
        _require(refs == self.pool.refs, "reference counts are not what the sessions hold")
        _require(len(free) == self.pool.free, "a page is free twice")
        _require(free == {page for page, count in enumerate(refs) if count == 0}, "the free list is not what is free")
        _require(self._reserved() <= self.pool.free, "more pages are promised than there are")

    def _check_session(self, pages: SequenceBlocks) -> None:
        held = pages.table[: pages.count].tolist()
        _require(pages.count == blocks_for(pages.length), "a session's pages are not what its tokens need")
        _require(len(set(held)) == len(held), "a session holds a page twice")
        _require(pages.length <= pages.max_tokens, "a session is longer than its reservation")
        _require(
            set(pages.tree_pages) == {slot // BLOCK_SIZE for slot in pages.tree}, "a tree's pages are not what it needs"
        )
        for index in pages.tree_pages:
            _require(self.pool.refs[int(pages.tree_table[index])] == 1, "a tree page is shared")
        for slot, node in pages.tree.items():
            above = pages.tree.get(node.parent)
            _require(above is not None or node.parent == -1, "a tree slot hangs on nothing")
            mask, position = (above.mask, above.position + 1) if above else (0, pages.length)
            _require(node.mask == mask | 1 << slot, "an ancestor mask is wrong")
            _require(node.position == position, "a tree slot's position is wrong")


class _MetadataBuilder:
    """Collects the rows of a plan in numpy arrays, which become tensors without a copy."""

    __slots__ = ("copy_from", "copy_to", "masks", "past", "positions", "row", "rows", "session", "top", "write")

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self.row = 0
        self.top = 0
        self.positions = np.empty(rows, np.int64)
        self.write = np.empty(rows, np.int64)
        self.past = np.empty(rows, np.int32)
        self.session = np.zeros(rows, np.int32)
        self.masks: list[tuple[int, int]] = []  # (row, mask)
        self.copy_from: list[int] = []
        self.copy_to: list[int] = []

    def copy_page(self, old: int, new: int, tokens: int) -> None:
        self.copy_from.extend(range(old * BLOCK_SIZE, old * BLOCK_SIZE + tokens))
        self.copy_to.extend(range(new * BLOCK_SIZE, new * BLOCK_SIZE + tokens))

    def add_line(self, index: int, pages: SequenceBlocks, start: int, rows: int) -> None:
        row = self.row
        if rows == 1:
            self.positions[row] = start
            self.write[row] = pages.address(start)
            self.past[row] = start + 1
            self.session[row] = index
        elif rows:
            part = slice(row, row + rows)
            positions = np.arange(start, start + rows, dtype=np.int64)
            self.positions[part] = positions
            self.write[part] = (
                pages.table[positions // BLOCK_SIZE].astype(np.int64) * BLOCK_SIZE + positions % BLOCK_SIZE
            )
            self.past[part] = positions + 1
            self.session[part] = index
        self.row += rows
        self.top = max(self.top, start + rows - 1)

    def add_tree(self, index: int, pages: SequenceBlocks, slots: Sequence[int]) -> None:
        row = self.row
        for slot in slots:
            node = pages.tree[slot]
            self.positions[row] = node.position
            self.write[row] = pages.slot_address(slot)
            self.masks.append((row, node.mask))
            self.top = max(self.top, node.position)
            row += 1
        self.past[self.row : row] = pages.length
        self.session[self.row : row] = index
        self.row = row

    def finish(self, sessions: Sequence[SequenceBlocks], device: torch.device) -> AttentionMetadata:
        tree_sessions = sessions if self.masks else ()
        words = max((pages.tree_words() for pages in tree_sessions), default=0)
        tree_mask = np.zeros((self.rows, words), np.int64)
        for row, mask in self.masks:
            tree_mask[row] = np.frombuffer(mask.to_bytes(words * 8, "little"), np.int64)
        tensors = (
            self.positions,
            self.session,
            self.past,
            self.write,
            _table([pages.table[: pages.count] for pages in sessions]),
            _table([pages.tree_table[: words * (64 // BLOCK_SIZE)] for pages in sessions]),
            tree_mask,
            np.array(self.copy_from, np.int64),
            np.array(self.copy_to, np.int64),
        )
        return AttentionMetadata(*upload(tensors, device))


def _table(rows: Sequence[npt.NDArray[np.int32]]) -> npt.NDArray[np.int32]:
    """`[S, longest row]`, padded with 0. A single row is not copied."""
    if len(rows) == 1:
        return rows[0][None]
    table = np.zeros((len(rows), max((len(row) for row in rows), default=0)), np.int32)
    for index, row in enumerate(rows):
        table[index, : len(row)] = row
    return table


def _require(condition: bool, rule: str) -> None:
    if not condition:
        raise RuntimeError(rule)
