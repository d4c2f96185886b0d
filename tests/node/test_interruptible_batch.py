"""A batch pauses between two layers when it is told to, never within one, and its outputs come once."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence

import pytest

from swarm_hop.serving.compute_device import InlineDevice, ThreadDevice
from swarm_hop.serving.interruptible_batch import InterruptibleBatch, Ran

LAYERS = 10


class Layers:
    """Counts what runs; like a tail's it has something left to do after its last layer."""

    def __init__(self) -> None:
        self.parts: list[int] = []
        self.at = 0

    def run_layers(self, count: int) -> Sequence[str] | None:
        if self.at == LAYERS:
            return ["tokens"]
        self.parts.append(min(count, LAYERS - self.at))
        self.at += self.parts[-1]
        return None

    def __call__(self) -> Sequence[str]:
        while (outputs := self.run_layers(LAYERS)) is None:
            """Until the last."""
        return outputs


def batch(compute: Layers) -> InterruptibleBatch[str, str]:
    return InterruptibleBatch(["step"], compute, LAYERS, 0.0)


def finish(part: object) -> Ran[str]:
    while (ran := part()) is None:  # type: ignore[operator]
        """The next one."""
    return ran  # type: ignore[no-any-return]


@pytest.mark.parametrize("stop_at", [0, 1, 2, 5, 9, 10])
def test_it_pauses_after_the_layers_that_it_may_run_and_goes_on_later(stop_at: int) -> None:
    layers = Layers()
    under_way = batch(layers)
    assert finish(under_way.begin(2, stop_at)).outputs is None
    assert under_way.done == layers.at == max(2, stop_at + stop_at % 2), "some run in any case, and whole parts only"
    assert not under_way.final
    assert finish(under_way.begin(3)).outputs == ["tokens"]
    assert sum(layers.parts) == LAYERS
    assert under_way.done_fraction == 1.0


def test_it_can_be_told_to_stop_while_it_runs() -> None:
    layers = Layers()
    under_way = batch(layers)
    part = under_way.begin(1)
    for _ in range(4):
        assert part() is None
    under_way.stop_at = 2  # that was long ago: at once
    assert part() == Ran(None)
    assert layers.at == 4


def test_what_nothing_may_stop_runs_whole() -> None:
    layers = Layers()
    under_way = batch(layers)
    under_way.begin(4, 4)()
    part = under_way.begin(None, 5)
    assert under_way.final
    assert part() == Ran(["tokens"])


def test_what_has_no_layers_is_final() -> None:
    under_way = InterruptibleBatch[str, str](["step"], lambda: ["whole"], LAYERS, 0.0)
    assert under_way.begin(1, 1)() == Ran(["whole"])
    assert under_way.final


async def test_a_thread_sees_that_it_is_to_stop() -> None:
    begun, told = threading.Event(), threading.Event()

    class Waiting(Layers):
        def run_layers(self, count: int) -> Sequence[str] | None:
            begun.set()
            assert told.wait(30)
            return super().run_layers(count)

    layers, device = Waiting(), ThreadDevice()
    under_way = batch(layers)
    running = device.run_parts(under_way.begin(1))
    await asyncio.to_thread(begun.wait, 30)
    under_way.stop_at = 0
    told.set()
    ran, took_ms = await running
    assert ran == Ran(None)
    assert layers.at == 1
    assert took_ms >= 0.0
    device.close()


async def test_a_part_that_fails_fails_the_batch() -> None:
    class Broken(Layers):
        def run_layers(self, count: int) -> Sequence[str] | None:
            raise RuntimeError("out of everything")

    for device in (ThreadDevice(), InlineDevice()):
        with pytest.raises(RuntimeError, match="out of everything"):
            await device.run_parts(batch(Broken()).begin(1))
        device.close()
