"""What one layer of a span holds of a session, as bytes for another machine: keys and values, or a recurrent state.

Owns the format. A layer with keys and values is cut into its blocks, see `BlockPool.read`. A state is one string of
bytes: how many rows follow it (4 bytes, little-endian), its tensors by name in alphabetical order, then the inputs of
those rows and zeros up to `MAX_ROWS`, filled up with zeros to whole units of `STATE_UNIT` bytes. Tensors are in memory
order, elements little-endian.

What comes in was sent by a stranger: its length, number of rows and every number in a state are checked.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from swarm.errors import InvalidRequest
from swarm.types import LayerSpan
from swarm_kernels.batch import BLOCK_SIZE
from swarm_kernels.kvcache.cache import KVCacheManager
from swarm_kernels.kvcache.recurrent_states import MAX_ROWS, Segment, SequenceStates
from swarm_kernels.kvcache.sequence import SessionKey, blocks_for
from swarm_kernels.kvcache.state_plan import RowInput, StateSnapshot
from swarm_kernels.kvcache.stateful_cache import StatefulCache, StateSpec, TensorSpec

STATE_UNIT = 1 << 16
_COUNT_BYTES = 4


class LayerTransfer:
    """Of one cache; layers are those of the model, `span` the cache's."""

    def __init__(self, cache: KVCacheManager, span: LayerSpan) -> None:
        self._cache = cache
        self._span = span
        self._stateful = cache if isinstance(cache, StatefulCache) else None

    def unit_bytes(self, layer: int) -> int:
        return STATE_UNIT if self._spec(layer) is not None else self._cache.shape.bytes_per_token_per_layer * BLOCK_SIZE

    def units(self, layer: int, tokens: int) -> int:
        """Of `unit_bytes` each, of a session's first `tokens`."""
        spec = self._spec(layer)
        if spec is not None:
            return -(-state_bytes(spec) // STATE_UNIT)
        return 0 if self._page(layer) is None else blocks_for(tokens)

    def distinct(self, layers: LayerSpan) -> list[int]:
        """Those of `layers` whose parts of a session are all there is: others share one of theirs."""
        pages = [self._page(layer) for layer in layers]
        return [layer for at, layer in enumerate(layers) if pages[at] is None or pages[at] not in pages[:at]]

    def reader(self, session: SessionKey, tokens: int) -> Callable[[int, int, int], bytes]:
        """-> (layer, first unit, number of units) -> their bytes. Raises InvalidRequest; ActivationLogEvicted if the
        states after `tokens` are not kept any more."""
        block_ids = self._cache.block_ids(session, tokens)
        segment = None
        if self._stateful is not None:
            segment = self._stateful.states_of(session).fork(tokens).segments[-1]
            if len(segment.rows) > MAX_ROWS:
                raise InvalidRequest("too many rows follow the newest state")

        def read(layer: int, first: int, count: int) -> bytes:
            spec, page = self._spec(layer), self._page(layer)
            if spec is not None and segment is not None:
                return packed(spec, layer, segment)[first * STATE_UNIT : (first + count) * STATE_UNIT]
            if page is None:
                raise InvalidRequest(f"layer {layer} holds nothing of a session")
            part = block_ids[first : first + count]
            return self._cache.pool.read(page, part, min(tokens - first * BLOCK_SIZE, len(part) * BLOCK_SIZE))

        return read

    def writer(self, session: SessionKey, tokens: int, layers: LayerSpan) -> LayerWriter:
        """For a session that has imported `tokens`, whose layers are `layers`."""
        states = {layer: IncomingState(spec) for layer in layers if (spec := self._spec(layer)) is not None}
        blocks = {layer: page for layer in layers if (page := self._page(layer)) is not None}
        return LayerWriter(self._cache, session, tokens, states, blocks)

    def _spec(self, layer: int) -> StateSpec | None:
        return None if self._stateful is None else self._stateful.states.get(layer)

    def _page(self, layer: int) -> int | None:
        return self._cache.page_of[layer - self._span.start]


class LayerWriter:
    """Puts the units of a session's layers where they belong, in any order."""

    def __init__(
        self,
        cache: KVCacheManager,
        session: SessionKey,
        tokens: int,
        states: dict[int, IncomingState],
        pages: dict[int, int],
    ) -> None:
        """`pages`: by layer of the model, its index in the block pool."""
        self._cache = cache
        self._session = session
        self._tokens = tokens
        self._states = states
        self._pages = pages
        self._block_ids = cache.block_ids(session, tokens)
        self._segments: list[Segment] = []

    def __call__(self, layer: int, first: int, body: bytes) -> None:
        """`body`: of units from `first` on. Raises InvalidRequest for what is no state."""
        if (state := self._states.get(layer)) is not None:
            if state.add(first, body):
                unpack(state.spec, layer, state.body, self._tokens, self._segments)
                del self._states[layer]
        elif (page := self._pages.get(layer)) is not None:
            count = len(body) // (self._cache.shape.bytes_per_token_per_layer * BLOCK_SIZE)
            self._cache.pool.write(page, self._block_ids[first : first + count], body)

    def finish(self) -> None:
        """Everything has come. Raises InvalidRequest if a state has not."""
        if self._states:
            raise InvalidRequest(f"the states of {len(self._states)} layers are missing")
        if self._segments and isinstance(self._cache, StatefulCache):
            self._cache.import_states(self._session, SequenceStates(self._segments))


class IncomingState:
    """A state whose units come in any order."""

    def __init__(self, spec: StateSpec) -> None:
        self.spec = spec
        units = -(-state_bytes(spec) // STATE_UNIT)
        self.body = bytearray(units * STATE_UNIT)
        self._missing = set(range(units))

    def add(self, first: int, body: bytes) -> bool:
        """Whether it is whole now. Raises InvalidRequest for units that it does not have."""
        count, rest = divmod(len(body), STATE_UNIT)
        if rest or not 0 <= first < first + count <= len(self.body) // STATE_UNIT:
            raise InvalidRequest(f"{len(body)} bytes at unit {first} are no part of a state")
        self.body[first * STATE_UNIT : (first + count) * STATE_UNIT] = body
        self._missing.difference_update(range(first, first + count))
        return not self._missing


def state_bytes(spec: StateSpec) -> int:
    return _COUNT_BYTES + spec.nbytes + MAX_ROWS * spec.row.nbytes


def packed(spec: StateSpec, layer: int, segment: Segment) -> bytes:
    """The state of a layer at the start of `segment`, and the inputs of its rows. Raises InvalidRequest if they are not
    computed yet."""
    state = segment.start.layers.get(layer)
    if (state is None and segment.start.position) or not all(layer in row.layers for row in segment.rows):
        raise InvalidRequest(f"the state of layer {layer} is not computed yet")
    tensors = [
        spec.tensors[name].zeros(torch.device("cpu")) if state is None else state[name] for name in sorted(spec.tensors)
    ]
    parts = [_bytes(tensor) for tensor in (*tensors, *(row.layers[layer] for row in segment.rows))]
    body = len(segment.rows).to_bytes(_COUNT_BYTES, "little") + b"".join(parts)
    return body.ljust(-(-state_bytes(spec) // STATE_UNIT) * STATE_UNIT, b"\0")


def unpack(spec: StateSpec, layer: int, body: bytearray, tokens: int, segments: list[Segment]) -> None:
    """Add a layer's state to the one segment of `segments`, which is made by the first layer. Raises InvalidRequest."""
    count = int.from_bytes(body[:_COUNT_BYTES], "little")
    if not segments and count <= min(tokens, MAX_ROWS):
        segments.append(Segment(StateSnapshot(tokens - count), [RowInput() for _ in range(count)]))
    if not segments or count != len(segments[0].rows):
        raise InvalidRequest(f"a state of {tokens} tokens with {count} rows after it")
    at = _COUNT_BYTES
    found = {}
    for name in sorted(spec.tensors):
        found[name], at = _tensor(spec.tensors[name], body, at)
    rows = []
    for _ in range(count):
        row, at = _tensor(spec.row, body, at)
        rows.append(row)
    if not all(bool(torch.isfinite(tensor).all()) for tensor in (*found.values(), *rows)):
        raise InvalidRequest("a state that is not finite")
    segments[0].start.layers[layer] = found
    for kept, row in zip(segments[0].rows, rows, strict=True):
        kept.layers[layer] = row


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def _tensor(spec: TensorSpec, body: bytearray, at: int) -> tuple[torch.Tensor, int]:
    end = at + spec.nbytes
    return torch.frombuffer(body[at:end], dtype=spec.dtype).view(spec.shape), end
