"""One session's share of the cache: its committed blocks, its tree of uncommitted slots, its reservation.

Owns the host bookkeeping of a single session and the validation of a step (see `Step` in `swarm.messages`). No tensors
and no other sessions are known here.

A tree slot lives in tree block `slot // BLOCK_SIZE` at offset `slot % BLOCK_SIZE`. Its ancestor mask is a Python
int: bit j is slot j, its own bit included.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from swarm.errors import InvalidRequest
from swarm_kernels.batch import BLOCK_SIZE
from swarm_kernels.kvcache.block_pool import BlockPool

SessionKey = bytes
ROOT = -1  # parent of a child of the last committed token
_NO_BLOCKS: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class StepRequest:
    """New rows of one session, fields as in `messages.Step`: first slots are committed, then causal rows, then tree
    rows."""

    session: SessionKey
    committed_before: int
    causal_rows: int = 1
    parents: Sequence[int] = ()
    slots: Sequence[int] = ()
    commit_slots: Sequence[int] = ()

    @property
    def rows(self) -> int:
        return self.causal_rows + len(self.slots)


class TreeNode(NamedTuple):
    """An uncommitted slot."""

    parent: int  # a slot, or ROOT
    mask: int  # its ancestors and itself, by slot
    position: int


@dataclass(slots=True)
class BlockDelta:
    """What a checked request will change in its session."""

    tree: dict[int, TreeNode]  # the whole tree afterwards
    tree_blocks: frozenset[int] | set[int]  # indices of tree blocks in use afterwards
    new_length: int
    copy_last: bool  # the last block is shared and partly filled: copy before writing
    allocate: int  # blocks to allocate ...
    release: int  # ... and tree blocks to release first


class SequenceBlocks:
    """Mutable bookkeeping of one session. `check` changes nothing; what it accepted cannot fail later."""

    __slots__ = ("count", "length", "max_tokens", "reserved_tokens", "table", "tree", "tree_blocks", "tree_table")

    def __init__(self, max_tokens: int) -> None:
        self.max_tokens = max_tokens
        self.reserved_tokens = max_tokens  # fewer after `KVCacheManager.shrink`
        self.length = 0  # committed tokens
        self.count = 0  # committed blocks
        # Entries below `count` are never changed in place: earlier metadata holds views of this array.
        self.table: npt.NDArray[np.int32] = np.zeros(8, np.int32)
        self.tree: dict[int, TreeNode] = {}
        self.tree_blocks: frozenset[int] | set[int] = _NO_BLOCKS  # indices into tree_table that hold a block
        self.tree_table: npt.NDArray[np.int32] = np.zeros(0, np.int32)

    # --- reservation --------------------------------------------------------------------------------------------

    @property
    def reserved_blocks(self) -> int:
        return blocks_for(min(self.reserved_tokens, self.max_tokens))

    def unallocated_reservation(self, pool: BlockPool) -> int:
        """Blocks reserved and not allocated yet. A shared last block, which must be copied before the next write, is
        not counted as held."""
        return max(0, self.reserved_blocks - (self.count - self._last_is_shared(pool) + len(self.tree_blocks)))

    def unallocated_after(self, delta: BlockDelta, pool: BlockPool) -> int:
        still_shared = delta.new_length == self.length and self._last_is_shared(pool)
        return max(0, self.reserved_blocks - (blocks_for(delta.new_length) - still_shared + len(delta.tree_blocks)))

    def _last_is_shared(self, pool: BlockPool) -> bool:
        """Whether the last block is partly filled and shared."""
        return self.length % BLOCK_SIZE != 0 and pool.refs[self.table[self.count - 1]] > 1

    # --- checking a request -------------------------------------------------------------------------------------

    def check(self, request: StepRequest, pool: BlockPool, max_slots: int) -> BlockDelta:
        """What `request` would change; nothing is changed yet. Raises InvalidRequest."""
        if request.committed_before != self.length:
            raise InvalidRequest(
                f"the step starts at {request.committed_before} committed tokens, this session has {self.length}"
            )
        if request.causal_rows < 0 or request.rows + len(request.commit_slots) == 0:
            raise InvalidRequest("the step has no rows and commits nothing")
        if len(request.parents) != len(request.slots):
            raise InvalidRequest(f"the step names {len(request.parents)} parents for {len(request.slots)} tree rows")
        new_length = self.length + len(request.commit_slots) + request.causal_rows
        if new_length > self.max_tokens:
            raise InvalidRequest(f"the step needs {new_length} tokens, the session reserved {self.max_tokens}")
        copy_last = new_length > self.length and self._last_is_shared(pool)
        allocate = blocks_for(new_length) - self.count + copy_last
        if not (self.tree or request.slots or request.commit_slots):
            return BlockDelta(self.tree, _NO_BLOCKS, new_length, copy_last, allocate, 0)
        tree = self._tree_after_commit(request)
        if request.slots:
            tree = self._with_rows(tree, request, new_length, max_slots)
        blocks = {slot // BLOCK_SIZE for slot in tree}
        release = len(self.tree_blocks - blocks)
        return BlockDelta(tree, blocks, new_length, copy_last, allocate + len(blocks - self.tree_blocks), release)

    def _tree_after_commit(self, request: StepRequest) -> dict[int, TreeNode]:
        """The slots that descend from the last committed token once `commit_slots` and causal rows are committed."""
        parent, moved = ROOT, 0
        for slot in request.commit_slots:
            node = self.tree.get(slot)
            if node is None or node.parent != parent:
                raise InvalidRequest(f"tree slot {slot} cannot be committed: it is not a child of the token before it")
            parent, moved = slot, moved | 1 << slot
        if request.causal_rows:
            return {}
        if not moved:
            return self.tree
        tip = 1 << parent
        return {
            slot: TreeNode(ROOT if node.parent == parent else node.parent, node.mask & ~moved, node.position)
            for slot, node in self.tree.items()
            if node.mask & tip and slot != parent
        }

    @staticmethod
    def _with_rows(tree: dict[int, TreeNode], request: StepRequest, length: int, max_slots: int) -> dict[int, TreeNode]:
        tree = dict(tree)
        for parent, slot in zip(request.parents, request.slots, strict=True):
            if not 0 <= slot < max_slots:
                raise InvalidRequest(f"tree slot {slot} is not within 0..{max_slots - 1}")
            if slot in tree:
                raise InvalidRequest(f"tree slot {slot} is in use")
            if parent == ROOT:
                tree[slot] = TreeNode(ROOT, 1 << slot, length)
            elif (above := tree.get(parent)) is not None:
                tree[slot] = TreeNode(parent, above.mask | 1 << slot, above.position + 1)
            else:
                raise InvalidRequest(f"parent slot {parent} of tree slot {slot} does not exist")
        return tree

    # --- changing -----------------------------------------------------------------------------------------------

    def slot_address(self, slot: int) -> int:
        """Flat address of an existing tree slot."""
        return int(self.tree_table[slot // BLOCK_SIZE]) * BLOCK_SIZE + slot % BLOCK_SIZE

    def address(self, position: int) -> int:
        """Flat address of a committed position."""
        return int(self.table[position // BLOCK_SIZE]) * BLOCK_SIZE + position % BLOCK_SIZE

    def release_tree_blocks(self, keep: Collection[int], pool: BlockPool) -> None:
        """Free the tree blocks whose index is not in `keep`."""
        for index in sorted(self.tree_blocks - set(keep)):
            pool.decref(int(self.tree_table[index]))
        self.tree_blocks = self.tree_blocks & set(keep)

    def allocate_tree_blocks(self, needed: Collection[int], pool: BlockPool) -> None:
        missing = set(needed) - self.tree_blocks
        if not missing:
            return
        top = max(missing) + 1
        table = np.zeros(
            max(top, len(self.tree_table)), np.int32
        )  # a copy: earlier metadata holds views of the old table
        table[: len(self.tree_table)] = self.tree_table
        for index in sorted(missing):
            table[index] = pool.allocate()
        self.tree_table = table
        self.tree_blocks = set(needed) | self.tree_blocks

    def copy_on_write_last(self, pool: BlockPool) -> tuple[int, int]:
        """Replace the shared last block by an own one. -> (old block, new block); the caller copies the contents."""
        old, new = int(self.table[self.count - 1]), pool.allocate()
        table = self.table.copy()
        table[self.count - 1] = new
        self.table = table
        pool.decref(old)
        return old, new

    def grow(self, length: int, pool: BlockPool) -> None:
        """Allocate blocks up to `length` committed tokens."""
        count = blocks_for(length)
        if count > len(self.table):
            table = np.zeros(max(count, 2 * len(self.table)), np.int32)
            table[: self.count] = self.table[: self.count]
            self.table = table
        for index in range(self.count, count):
            self.table[index] = pool.allocate()
        self.count, self.length = count, length

    def truncate(self, length: int, pool: BlockPool) -> None:
        """Drop all committed tokens from `length` on."""
        count = blocks_for(length)
        for index in range(count, self.count):
            pool.decref(int(self.table[index]))
        self.table = self.table.copy()
        self.count, self.length = count, length

    def prune(self, slots: Collection[int], pool: BlockPool) -> None:
        """Drop those of `slots` that exist, and all their descendants."""
        dropped = 0
        for slot in slots:
            if slot in self.tree:
                dropped |= 1 << slot
        if dropped:
            self.tree = {slot: node for slot, node in self.tree.items() if not node.mask & dropped}
            self.release_tree_blocks({slot // BLOCK_SIZE for slot in self.tree}, pool)

    def tree_words(self) -> int:
        """64-bit words of a mask over its tree slots."""
        return (max(self.tree) >> 6) + 1 if self.tree else 0


def blocks_for(tokens: int) -> int:
    return -(-tokens // BLOCK_SIZE)
