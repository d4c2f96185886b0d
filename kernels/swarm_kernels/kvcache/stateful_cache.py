"""The cache of a span some of whose layers have a recurrent state: keys and values of the others, and the states.

Owns the memory that states may take. Layers with a state have no blocks. What is kept of each session's states is
chosen by `recurrent_states`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from swarm.errors import InvalidRequest, OutOfMemory
from swarm_kernels.batch import AttentionMetadata
from swarm_kernels.kvcache.cache import KVCacheManager, KvShape
from swarm_kernels.kvcache.recurrent_states import MAX_ROWS, MAX_SEGMENTS, MAX_STATES, MAX_TREE_ROWS, SequenceStates
from swarm_kernels.kvcache.sequence import SessionKey, StepRequest
from swarm_kernels.kvcache.state_plan import StatefulMetadata, StatePlan
from swarm_kernels.ops.base.validate import mark_validated

MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Of one tensor of a state, without a batch dimension."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def zeros(self, device: torch.device) -> torch.Tensor:
        return torch.zeros(self.shape, dtype=self.dtype, device=device)


@dataclass(frozen=True, slots=True)
class StateSpec:
    """The state of one layer, and the input of its mixer, from which states are computed again."""

    tensors: Mapping[str, TensorSpec]
    row: TensorSpec

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())

    @property
    def session_bytes(self) -> int:
        """The most that a session keeps."""
        return MAX_STATES * self.nbytes + (MAX_SEGMENTS * MAX_ROWS + MAX_TREE_ROWS) * self.row.nbytes

    @property
    def retained_bytes(self) -> int:
        """The most that a cached prefix keeps."""
        return self.nbytes + MAX_ROWS * self.row.nbytes


class StatefulCache(KVCacheManager):
    """`states`: by layer of the model; `blocks[i]`: whether the span's i-th layer has keys and values."""

    def __init__(
        self,
        shape: KvShape,
        max_tokens: int,
        device: torch.device,
        blocks: Sequence[bool],
        states: Mapping[int, StateSpec],
        state_bytes: int,
    ) -> None:
        """`shape.layers` counts the layers with blocks. `state_bytes`: for the states of all sessions."""
        pages = iter(range(shape.layers))
        super().__init__(shape, max_tokens, device, pages=[next(pages) if has else None for has in blocks])
        self.states = states
        self.state_bytes = state_bytes
        self.session_bytes = sum(spec.session_bytes for spec in states.values())
        self.retained_bytes = sum(spec.retained_bytes for spec in states.values())
        self._states: dict[SessionKey, SequenceStates] = {}
        self._retained: set[SessionKey] = set()

    @property
    def free_tokens(self) -> int:
        """0 if there is no room for the states of another session, even without the cached prefixes."""
        live = (len(self._states) - len(self._retained) + 1) * self.session_bytes
        return super().free_tokens if live <= self.state_bytes else 0

    @property
    def nbytes(self) -> int:
        return super().nbytes + self.state_bytes

    @property
    def session_capacity(self) -> int:
        return self.state_bytes // self.session_bytes if self.session_bytes else super().session_capacity

    def states_of(self, session: SessionKey) -> SequenceStates:
        """Raises InvalidRequest."""
        self._get(session)
        return self._states[session]

    def open(self, session: SessionKey, max_tokens: int) -> None:
        self._check_new(session, max_tokens)
        self._check_room()
        super().open(session, max_tokens)
        self._states[session] = SequenceStates()

    def fork(self, parent: SessionKey, child: SessionKey, max_tokens: int, length: int | None = None) -> None:
        """See `KVCacheManager.fork`. Raises ActivationLogEvicted for a length that is not `reusable`."""
        states = self.states_of(parent).fork(self.length(parent) if length is None else length)
        self._check_new(child, max_tokens)
        self._check_room()
        super().fork(parent, child, max_tokens, length)
        self._states[child] = states

    def reusable(self, session: SessionKey, length: int, multiple: int) -> int:
        states = self.states_of(session)
        return next(
            tokens for tokens in range(length // multiple * multiple, -1, -multiple) if states.reachable(tokens)
        )

    def freeze_prefix(self, session: SessionKey, length: int) -> None:
        states = self.states_of(session)
        kept = states.fork(length)
        super().freeze_prefix(session, length)
        self._states[session] = kept
        self._retained.add(session)

    def close(self, session: SessionKey) -> None:
        super().close(session)
        self._states.pop(session, None)
        self._retained.discard(session)

    def rollback(self, session: SessionKey, length: int) -> None:
        """See `KVCacheManager.rollback`. Raises ActivationLogEvicted if the state is not kept any more."""
        states = self.states_of(session)
        if length <= states.length:
            states.fork(length)
        super().rollback(session, length)
        states.truncate(length)

    def import_states(self, session: SessionKey, states: SequenceStates) -> None:
        """Of the tokens that `import_blocks` has counted as committed."""
        if states.length != self.length(session):
            raise InvalidRequest(f"states of {states.length} tokens for a session of {self.length(session)}")
        self._states[session] = states

    def schedule(self, requests: Sequence[StepRequest]) -> AttentionMetadata:
        for request in requests:
            if len(self._get(request.session).tree) + len(request.slots) > MAX_TREE_ROWS:
                raise InvalidRequest(
                    f"{len(request.slots)} more draft rows; a session has {MAX_TREE_ROWS} at most here"
                )
        metadata = super().schedule(requests)
        plan, row = StatePlan(), 0
        for request in requests:
            self._states[request.session].plan(request, self._get(request.session).tree, row, plan)
            row += request.rows
        stateful = StatefulMetadata.of(metadata, plan)
        if self.device.type != "cpu":
            mark_validated(stateful, self.pool.num_blocks)
        return stateful

    def _check_room(self) -> None:
        live = len(self._states) - len(self._retained)
        held = live * self.session_bytes + len(self._retained) * self.retained_bytes
        if held + self.session_bytes > self.state_bytes:
            raise OutOfMemory(
                f"the recurrent states of a session take {self.session_bytes / MIB:.1f} MiB, "
                f"{(self.state_bytes - held) / MIB:.1f} of {self.state_bytes / MIB:.1f} MiB are free"
            )
