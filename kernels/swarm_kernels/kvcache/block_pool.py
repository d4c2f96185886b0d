"""The physical blocks of one span's cache: the tensors, the free list and the reference counts.

Owns the memory; sessions and trees are not known here. A block is the same index in the key and value tensors of every
layer."""

from __future__ import annotations

import math
import mmap
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from swarm.errors import InvalidRequest, OutOfMemory
from swarm_kernels.batch import BLOCK_SIZE


@dataclass(frozen=True, slots=True)
class KvShape:
    """Size of one token: in each of `layers`, a key of `kv_heads * head_dim` elements and a value of `kv_heads *
    value_dim`, by default as many."""

    layers: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    value_dim: int = -1  # 0: no values of their own, as in a latent cache (`ops.base.latent_attention`)

    def __post_init__(self) -> None:
        if self.value_dim < 0:
            object.__setattr__(self, "value_dim", self.head_dim)

    @property
    def bytes_per_token_per_layer(self) -> int:
        return self.kv_heads * (self.head_dim + self.value_dim) * self.dtype.itemsize

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one block in all layers."""
        return BLOCK_SIZE * self.layers * self.bytes_per_token_per_layer


class BlockPool:
    """`num_blocks` reference-counted blocks, zero until written.

    `k[layer]` is `[blocks, G, D, BLOCK_SIZE]`, `v[layer]` is `[blocks, G, BLOCK_SIZE, value_dim]`.

    On a CPU the tensors are a private anonymous mapping, so a block costs physical memory once it is first written.
    Raises OutOfMemory when the device cannot hold `num_blocks`.
    """

    def __init__(self, shape: KvShape, num_blocks: int, device: torch.device) -> None:
        self.shape = shape
        self.num_blocks = num_blocks
        self.k, self.v = _allocate(shape, num_blocks, device)
        self.refs = [0] * num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))  # a stack: low blocks first, then the most recently freed

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def nbytes(self) -> int:
        """Bytes of address space; what is resident is at most this."""
        return self.num_blocks * self.shape.bytes_per_block

    def allocate(self) -> int:
        """A free block with one reference. Callers check `free` first: an empty pool here is a bug."""
        block = self._free.pop()
        self.refs[block] = 1
        return block

    def incref(self, block: int) -> None:
        self.refs[block] += 1

    def decref(self, block: int) -> None:
        """Drop one reference; the last one frees the block."""
        self.refs[block] -= 1
        if self.refs[block] == 0:
            self._free.append(block)

    def read(self, layer: int, block_ids: Sequence[int], tokens: int) -> bytes:
        """Keys, then values, of the first `tokens` tokens stored in `block_ids`, in the format of `write`.

        The rest of the last block is zeroed: it may hold another session's data.
        """
        index = torch.tensor(block_ids, dtype=torch.long, device=self.k[layer].device)
        k, v = self.k[layer][index], self.v[layer][index]  # copies
        used = tokens - (len(block_ids) - 1) * BLOCK_SIZE
        k[-1, :, :, used:] = 0
        v[-1, :, used:] = 0
        return b"".join(part.cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes() for part in (k, v))

    def write(self, layer: int, block_ids: Sequence[int], body: bytes | bytearray | memoryview) -> None:
        """`body`: keys of all `block_ids`, then their values, as `read` returns them. Raises InvalidRequest for a body
        of another size, which a node with another layout of the cache may send."""
        size = len(block_ids) * BLOCK_SIZE * self.shape.bytes_per_token_per_layer
        if len(body) != size:
            raise InvalidRequest(f"{len(body)} bytes are not {len(block_ids)} blocks of {size} bytes in all")
        index = torch.tensor(block_ids, dtype=torch.long, device=self.k[layer].device)
        both = torch.frombuffer(bytearray(body), dtype=self.shape.dtype).to(index.device)
        keys, values = both.tensor_split([len(block_ids) * self.k[layer][0].numel()])
        self.k[layer][index] = keys.view(-1, *self.k[layer].shape[1:])
        self.v[layer][index] = values.view(len(block_ids), *self.v[layer].shape[1:])

    def free_blocks(self) -> frozenset[int]:
        return frozenset(self._free)


def _allocate(shape: KvShape, num_blocks: int, device: torch.device) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    k_size = (num_blocks, shape.kv_heads, shape.head_dim, BLOCK_SIZE)
    v_size = (num_blocks, shape.kv_heads, BLOCK_SIZE, shape.value_dim)
    total = num_blocks * shape.bytes_per_block
    try:
        flat = _lazy_zeros(total, device)
    except (OSError, RuntimeError, MemoryError, OverflowError):
        raise OutOfMemory(
            f"{total / 2**20:.0f} MiB for keys and values do not fit on {device}; serve fewer layers or fewer tokens"
        ) from None
    layers = flat.view(shape.dtype).view(shape.layers, -1) if shape.layers else ()
    keys = math.prod(k_size)
    return [layer[:keys].view(k_size) for layer in layers], [layer[keys:].view(v_size) for layer in layers]


def _lazy_zeros(nbytes: int, device: torch.device) -> torch.Tensor:
    if device.type != "cpu" or sys.platform == "win32" or nbytes == 0:
        return torch.zeros(nbytes, dtype=torch.uint8, device=device)
    mapping = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(mapping, dtype=torch.uint8)
