"""The physical pages of one span's cache: the tensors, the free list and the reference counts.

Owns memory; knows neither sessions nor trees. A page is the same index in the key and value tensors of every layer.
"""

from __future__ import annotations

import mmap
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from swarm.errors import OutOfMemory
from swarm_kernels.batch import BLOCK_SIZE


@dataclass(frozen=True, slots=True)
class KvShape:
    """What one token costs: `layers` times a key and a value of `kv_heads * head_dim` elements."""

    layers: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @property
    def bytes_per_token_per_layer(self) -> int:
        return 2 * self.kv_heads * self.head_dim * self.dtype.itemsize

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one page in all layers."""
        return BLOCK_SIZE * self.layers * self.bytes_per_token_per_layer


class BlockPool:
    """`pages` pages; `k[layer]` is `[pages, G, D, PAGE]`, `v[layer]` is `[pages, G, PAGE, D]`, zero until written.

    On a CPU the tensors are a private anonymous mapping, so a page costs physical memory once it is first written.
    Raises OutOfMemory when the device cannot hold `pages`.
    """

    def __init__(self, shape: KvShape, pages: int, device: torch.device) -> None:
        self.shape = shape
        self.pages = pages
        self.k, self.v = _allocate(shape, pages, device)
        self.refs = [0] * pages
        self._free = list(range(pages - 1, -1, -1))  # a stack: low pages first, and those just freed again

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def nbytes(self) -> int:
        """Bytes of address space; what is resident is at most this."""
        return self.pages * self.shape.bytes_per_block

    def allocate(self) -> int:
        """A free page with one reference. Callers count before they take: an empty pool is a bug of ours."""
        page = self._free.pop()
        self.refs[page] = 1
        return page

    def incref(self, page: int) -> None:
        self.refs[page] += 1

    def decref(self, page: int) -> None:
        """Give up one reference; the last one frees the page."""
        self.refs[page] -= 1
        if self.refs[page] == 0:
            self._free.append(page)

    def read(self, layer: int, pages: Sequence[int], tokens: int) -> bytes:
        """Keys, then values, of the first `tokens` of those that lie in `pages`, as `write` takes them.

        What follows them in the last page is zeroed: it may have been another session's.
        """
        at = torch.tensor(pages, dtype=torch.long, device=self.k[layer].device)
        k, v = self.k[layer][at], self.v[layer][at]  # copies
        used = tokens - (len(pages) - 1) * BLOCK_SIZE
        k[-1, :, :, used:] = 0
        v[-1, :, used:] = 0
        return b"".join(part.cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes() for part in (k, v))

    def write(self, layer: int, pages: Sequence[int], body: bytes | bytearray | memoryview) -> None:
        """`body` must be of `block_bytes` for each of `pages`."""
        at = torch.tensor(pages, dtype=torch.long, device=self.k[layer].device)
        both = torch.frombuffer(bytearray(body), dtype=self.shape.dtype).view(2, -1).to(at.device)
        self.k[layer][at] = both[0].view(-1, *self.k[layer].shape[1:])
        self.v[layer][at] = both[1].view(-1, *self.v[layer].shape[1:])

    def free_blocks(self) -> frozenset[int]:
        return frozenset(self._free)


def _allocate(shape: KvShape, pages: int, device: torch.device) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    k_size = (pages, shape.kv_heads, shape.head_dim, BLOCK_SIZE)
    v_size = (pages, shape.kv_heads, BLOCK_SIZE, shape.head_dim)
    total = pages * shape.bytes_per_block
    try:
        flat = _lazy_zeros(total, device)
    except (OSError, RuntimeError, MemoryError, OverflowError):
        raise OutOfMemory(
            f"{total / 2**20:.0f} MiB for keys and values do not fit on {device}; serve fewer layers or fewer tokens"
        ) from None
    halves = flat.view(shape.dtype).view(shape.layers, 2, -1)
    return [layer[0].view(k_size) for layer in halves], [layer[1].view(v_size) for layer in halves]


def _lazy_zeros(nbytes: int, device: torch.device) -> torch.Tensor:
    if device.type != "cpu" or sys.platform == "win32" or nbytes == 0:
        return torch.zeros(nbytes, dtype=torch.uint8, device=device)
    mapping = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(mapping, dtype=torch.uint8)
