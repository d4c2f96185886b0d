"""Memory and descriptors of the nodes while they are attacked."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import psutil
from process_swarm import NodeProcess

SAMPLE_S = 0.25
MIB = 1 << 20


@dataclass
class NodeWatch:
    """Samples of each node with its p2p daemon: (when, MiB, descriptors)."""

    nodes: Sequence[NodeProcess]
    samples: list[list[tuple[float, float, int]]] = field(default_factory=list)

    async def run(self) -> None:
        """Until cancelled."""
        self.samples = [[] for _ in self.nodes]
        while True:
            for node, samples in zip(self.nodes, self.samples, strict=True):
                if (sample := _sample(node)) is not None:
                    samples.append((time.monotonic(), *sample))
            await asyncio.sleep(SAMPLE_S)

    def growth(self, begin: float, end: float) -> tuple[float, int]:
        """The most that a node grew between `begin` and `end` over what it had just before: (MiB, descriptors)."""
        most_mib, most_descriptors = 0.0, 0
        for samples in self.samples:
            before = [sample for sample in samples if sample[0] < begin][-4:]
            after = [sample for sample in samples if begin <= sample[0] < end]
            if before and after:
                most_mib = max(most_mib, max(s[1] for s in after) - max(s[1] for s in before))
                most_descriptors = max(most_descriptors, max(s[2] for s in after) - max(s[2] for s in before))
        return most_mib, most_descriptors


def _sample(node: NodeProcess) -> tuple[float, int] | None:
    assert node.process is not None
    try:
        process = psutil.Process(node.process.pid)
        daemons = [child for child in node.children() if child.name().startswith("p2pd")]  # not its proof of work
        family = [process, *daemons]
        return sum(p.memory_info().rss for p in family) / MIB, sum(p.num_fds() for p in family)
    except psutil.Error:
        return None


def alive(nodes: Sequence[NodeProcess]) -> bool:
    return all(node.process is not None and node.process.returncode is None for node in nodes)
