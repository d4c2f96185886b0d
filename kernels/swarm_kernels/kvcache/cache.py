"""The two-level paged KV cache of one span: committed blocks, shared between forks, and blocks of uncommitted tree
slots.

Owns the block tables of all sessions, and turns step requests into `AttentionMetadata`. Models and peers are not known
here, and no key or value is read: slot copies are part of the metadata and are done by the backend that runs the batch.

Batches must run in the order in which they were scheduled, each exactly once: `schedule` updates the bookkeeping at
once. If a batch fails half-way, its sessions must be closed.

A session reserves, when it opens, the tokens it may commit, and reservations never exceed the pool: a session that
holds at most `ceil(max_tokens / BLOCK_SIZE)` blocks, tree included, is never refused a block, unless its reservation
was shrunk. Blocks beyond that (a tree on top of a full context) come from unreserved ones."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch

from swarm.errors import InvalidRequest, OutOfMemory
from swarm.types import MAX_SLOTS
from swarm_kernels.batch import BLOCK_SIZE, AttentionMetadata
from swarm_kernels.kvcache.block_pool import BlockPool, KvShape
from swarm_kernels.kvcache.metadata_builder import MetadataBuilder
from swarm_kernels.kvcache.sequence import BlockDelta, SequenceBlocks, SessionKey, StepRequest, blocks_for
from swarm_kernels.ops.base.validate import mark_validated

__all__ = ["KVCacheManager", "KvShape", "StepRequest"]


class KVCacheManager:
    """Keys and values of `shape.layers` layers for at most `max_tokens` tokens in all, rounded up to whole blocks.

    `k[i]`, `v[i]` are the tensors of the span's i-th layer, see `block_pool`. Not thread-safe: one owner calls it.
    """

    def __init__(
        self,
        shape: KvShape,
        max_tokens: int,
        device: torch.device | str = "cpu",
        max_slots: int = MAX_SLOTS,
        pages: Sequence[int | None] | None = None,
    ) -> None:
        """`pages`: of each layer of the span, its index in the block pool, which layers may share; None for one that
        holds no keys and values. By default each has its own."""
        self.shape = shape
        self.device = torch.device(device)
        self.max_slots = max_slots
        self.pool = BlockPool(shape, max(1, blocks_for(max_tokens)), self.device)
        self.k, self.v = self.pool.k, self.pool.v
        self.page_of = list(range(shape.layers)) if pages is None else list(pages)
        if pages is not None:
            none = torch.empty(0, dtype=shape.dtype, device=self.device)
            self.k = [none if page is None else self.pool.k[page] for page in pages]
            self.v = [none if page is None else self.pool.v[page] for page in pages]
        self.top_position = 0  # the largest position scheduled so far
        self._sessions: dict[SessionKey, SequenceBlocks] = {}

    # --- capacity ------------------------------------------------------------------------------------------------

    @property
    def capacity_tokens(self) -> int:
        return self.pool.num_blocks * BLOCK_SIZE

    @property
    def free_tokens(self) -> int:
        """Tokens neither held nor reserved: the largest reservation a new session can get."""
        return (self.pool.free - self._reserved()) * BLOCK_SIZE

    @property
    def session_capacity(self) -> int:
        """The most sessions at a time, whatever their tokens: keys and values alone set no limit."""
        return 1 << 30

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

    def shares(self, layer: int) -> bool:
        """Whether the span's `layer`-th layer has the keys and values of an earlier one."""
        return self.page_of[layer] is not None and self.page_of[layer] in self.page_of[:layer]

    # --- sessions -----------------------------------------------------------------------------------------------

    def open(self, session: SessionKey, max_tokens: int) -> None:
        """Start an empty session that may commit `max_tokens`. Raises OutOfMemory, InvalidRequest."""
        self._check_new(session, max_tokens)
        self._check_reservation(blocks_for(max_tokens))
        self._sessions[session] = SequenceBlocks(max_tokens)

    def fork(self, parent: SessionKey, child: SessionKey, max_tokens: int, length: int | None = None) -> None:
        """Start `child` with committed tokens of `parent`; the blocks are shared until one of the two writes.

        `length`: how many of them, all by default. `max_tokens` includes them. The parent's tree is not copied.
        Raises OutOfMemory, InvalidRequest.
        """
        source = self._get(parent)
        self._check_new(child, max_tokens)
        length = source.length if length is None else length
        if not 0 <= length <= min(source.length, max_tokens):
            raise InvalidRequest(f"{length} of {source.length} tokens cannot be shared by a session of {max_tokens}")
        count, partial = blocks_for(length), length % BLOCK_SIZE != 0
        own = blocks_for(max_tokens) - (count - partial)
        shares_last = (
            partial and count == source.count
        )  # the parent's last block is shared, and the parent may append to it
        held = source.count - shares_last + len(source.tree_blocks)
        self._check_reservation(
            own + max(0, source.reserved_blocks - held) - source.unallocated_reservation(self.pool)
            if shares_last
            else own
        )
        forked = SequenceBlocks(max_tokens)
        forked.table = source.table[:count].copy()
        forked.length, forked.count = length, count
        for block in source.table[:count].tolist():
            self.pool.incref(block)
        self._sessions[child] = forked

    def reusable(self, session: SessionKey, length: int, multiple: int) -> int:
        """The most of the first `length` committed tokens that `fork` can share, a multiple of `multiple`."""
        return length // multiple * multiple

    def freeze_prefix(self, session: SessionKey, length: int) -> None:
        """Keep the first `length` committed tokens as a read-only cached prefix for later forks.

        The rest of the reservation is released. Raises InvalidRequest.
        """
        sequence = self._get(session)
        if not 0 < length <= sequence.length:
            raise InvalidRequest(f"{length} of {sequence.length} committed tokens cannot be kept")
        self.drop_tree(session)
        sequence.truncate(length, self.pool)
        sequence.max_tokens = length

    def shrink(self, session: SessionKey, tokens: int) -> None:
        """Reserve only `tokens` from now on. The session may still commit as many as before, from unreserved blocks:
        it is refused them, by OutOfMemory, when there are none. Raises InvalidRequest."""
        sequence = self._get(session)
        sequence.reserved_tokens = min(sequence.reserved_tokens, max(tokens, sequence.length))

    def close(self, session: SessionKey) -> None:
        """Give back all sequence. Closing what is not open does nothing."""
        sequence = self._sessions.pop(session, None)
        if sequence is not None:
            sequence.release_tree_blocks((), self.pool)
            sequence.truncate(0, self.pool)

    def prune(self, session: SessionKey, slots: Collection[int]) -> None:
        """Drop tree slots and their descendants; unknown slots are ignored. Raises InvalidRequest."""
        self._get(session).prune(slots, self.pool)

    def drop_tree(self, session: SessionKey) -> None:
        """Drop every uncommitted slot."""
        sequence = self._get(session)
        sequence.tree = {}
        sequence.release_tree_blocks((), self.pool)

    def rollback(self, session: SessionKey, length: int) -> None:
        """Drop the tree and all committed tokens from `length` on.

        Raises InvalidRequest, or OutOfMemory when shared blocks would have to be reserved again.
        """
        sequence = self._get(session)
        if not 0 <= length <= sequence.length:
            raise InvalidRequest(f"cannot roll {sequence.length} committed tokens back to {length}")
        kept = blocks_for(length)
        refs = self.pool.refs
        freed = sum(refs[block] == 1 for block in sequence.table[kept : sequence.count].tolist())
        unusable = length % BLOCK_SIZE != 0 and refs[sequence.table[kept - 1]] > 1
        deficit = max(0, sequence.reserved_blocks - (kept - unusable))
        self._check_reservation(
            deficit - sequence.unallocated_reservation(self.pool) - freed - len(sequence.tree_blocks)
        )
        self.drop_tree(session)
        sequence.truncate(length, self.pool)

    # --- KV transfer --------------------------------------------------------------------------------------------

    def block_ids(self, session: SessionKey, tokens: int) -> list[int]:
        """The blocks that hold its first `tokens` committed tokens, for `pool.read`. Raises InvalidRequest."""
        sequence = self._get(session)
        if not 0 <= tokens <= sequence.length:
            raise InvalidRequest(f"{tokens} of {sequence.length} committed tokens were requested")
        return [int(block) for block in sequence.table[: blocks_for(tokens)]]

    def import_blocks(self, session: SessionKey, tokens: int) -> list[int]:
        """Mark `tokens` of an empty session as committed. -> the blocks to fill by `pool.write`. Raises InvalidRequest.

        No batch of the session may run before they are filled.
        """
        sequence = self._get(session)
        if sequence.length or sequence.tree or tokens > sequence.max_tokens:
            raise InvalidRequest(f"{tokens} tokens can be imported only into an empty session that reserved as many")
        if tokens > sequence.reserved_tokens:
            raise InvalidRequest(f"{tokens} tokens are not reserved any more: others needed the memory")
        sequence.grow(tokens, self.pool)
        return self.block_ids(session, tokens)

    # --- scheduling ---------------------------------------------------------------------------------------------

    def schedule(self, requests: Sequence[StepRequest]) -> AttentionMetadata:
        """Allocate slots for the rows of `requests`, at most one per session, in their order.

        Raises InvalidRequest (a step that its session does not allow) or OutOfMemory (no blocks left) before anything
        has changed in any session.
        """
        checked = self._check(requests)
        builder = MetadataBuilder(sum(request.rows for request in requests))
        moved = []
        for sequence, request, delta in checked:  # committed slots are addressed before their blocks are released
            moved.append([sequence.slot_address(slot) for slot in request.commit_slots])
            if delta.release:
                sequence.release_tree_blocks(delta.tree_blocks, self.pool)
        for index, (sequence, request, delta) in enumerate(checked):
            self._apply(sequence, request, delta, moved[index], builder, index)
        self.top_position = max(self.top_position, builder.top)
        metadata = builder.finish([sequence for sequence, _, _ in checked], self.device)
        if self.device.type != "cpu":
            mark_validated(metadata, self.pool.num_blocks)
        return metadata

    def _check(self, requests: Sequence[StepRequest]) -> list[tuple[SequenceBlocks, StepRequest, BlockDelta]]:
        checked = []
        allocates = False
        for request in requests:
            sequence = self._get(request.session)
            delta = sequence.check(request, self.pool, self.max_slots)
            allocates = allocates or delta.allocate > 0
            checked.append((sequence, request, delta))
        if len(checked) > 1 and len({request.session for request in requests}) < len(checked):
            raise InvalidRequest("a batch may hold one step of a session")
        if allocates:
            needed = sum(
                delta.allocate - delta.release + sequence.unallocated_after(delta, self.pool)
                for sequence, _, delta in checked
            )
            self._check_reservation(
                needed - sum(sequence.unallocated_reservation(self.pool) for sequence, _, _ in checked)
            )
        return checked

    def _apply(
        self,
        sequence: SequenceBlocks,
        request: StepRequest,
        delta: BlockDelta,
        moved: list[int],
        builder: MetadataBuilder,
        index: int,
    ) -> None:
        if delta.copy_last:
            old, new = sequence.copy_on_write_last(self.pool)
            builder.copy_block(old, new, sequence.length % BLOCK_SIZE)
        start = sequence.length
        causal_start = start + len(moved)
        sequence.grow(delta.new_length, self.pool)
        sequence.allocate_tree_blocks(delta.tree_blocks, self.pool)
        sequence.tree = delta.tree
        builder.copy_from.extend(moved)
        builder.copy_to.extend(sequence.address(position) for position in range(start, causal_start))
        builder.add_causal(index, sequence, causal_start, request.causal_rows)
        if request.slots:
            builder.add_tree(index, sequence, request.slots)

    # --- accounting ---------------------------------------------------------------------------------------------

    def _get(self, session: SessionKey) -> SequenceBlocks:
        sequence = self._sessions.get(session)
        if sequence is None:
            raise InvalidRequest("this session is not open here")
        return sequence

    def _check_new(self, session: SessionKey, max_tokens: int) -> None:
        if session in self._sessions:
            raise InvalidRequest("this session is open already")
        if max_tokens < 1:
            raise InvalidRequest(f"a session cannot reserve {max_tokens} tokens")

    def _reserved(self) -> int:
        """Blocks reserved by open sessions and not yet allocated."""
        return sum(sequence.unallocated_reservation(self.pool) for sequence in self._sessions.values())

    def _check_reservation(self, blocks: int) -> None:
        """Raise OutOfMemory unless `blocks` more can be allocated or reserved."""
        if blocks <= 0:
            return
        available = self.pool.free - self._reserved()
        if blocks > available:
            raise OutOfMemory(
                f"{blocks * BLOCK_SIZE} more tokens of KV memory are needed, "
                f"{available * BLOCK_SIZE} of {self.capacity_tokens} free"
            )

    def check_integrity(self) -> None:
        """Recount all blocks from the sessions. Raises RuntimeError naming the first invariant that does not hold."""
        refs = [0] * self.pool.num_blocks
        for sequence in self._sessions.values():
            self._check_session(sequence)
            for block in sequence.table[: sequence.count].tolist():
                refs[block] += 1
            for index in sequence.tree_blocks:
                refs[int(sequence.tree_table[index])] += 1
        free = self.pool.free_blocks()
        _require(refs == self.pool.refs, "reference counts differ from the blocks that sessions hold")
        _require(len(free) == self.pool.free, "a block is twice in the free list")
        _require(
            free == {block for block, count in enumerate(refs) if count == 0},
            "the free list differs from the unreferenced blocks",
        )
        _require(self._reserved() <= self.pool.free, "more blocks are reserved than free")

    def _check_session(self, sequence: SequenceBlocks) -> None:
        held = sequence.table[: sequence.count].tolist()
        _require(
            sequence.count == blocks_for(sequence.length), "a session holds more or fewer blocks than its tokens need"
        )
        _require(len(set(held)) == len(held), "a session holds a block twice")
        _require(sequence.length <= sequence.max_tokens, "a session is longer than its reservation")
        _require(
            set(sequence.tree_blocks) == {slot // BLOCK_SIZE for slot in sequence.tree},
            "a tree holds more or fewer blocks than its slots need",
        )
        for index in sequence.tree_blocks:
            _require(self.pool.refs[int(sequence.tree_table[index])] == 1, "a tree block is shared")
        for slot, node in sequence.tree.items():
            above = sequence.tree.get(node.parent)
            _require(above is not None or node.parent == -1, "a tree slot has no parent")
            mask, position = (above.mask, above.position + 1) if above else (0, sequence.length)
            _require(node.mask == mask | 1 << slot, "an ancestor mask is wrong")
            _require(node.position == position, "a tree slot's position is wrong")


def _require(condition: bool, failure: str) -> None:
    if not condition:
        raise RuntimeError(failure)
