"""transformers' layers with a recurrent state (gated delta nets, Mamba, short convolutions, Lightning attention) on the
states of our sessions.

Owns how their mixers run on packed rows of many sessions and trees. Which rows follow which, and what is kept, is in
the batch's `StatePlan`. Where our ops are compiled and have a mixer's arithmetic, one call computes all rows
(`mixers.one_call`). Elsewhere the mixer is called for each run and each level of the trees, with a `_StateCache` in
place of transformers' cache, which has the states of its rows' parents along the batch dimension; transformers computes
long runs by chunks and single rows by a recurrence, and these agree up to rounding.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from swarm.errors import UnsupportedModel
from swarm_kernels.kvcache.block_pool import KvShape
from swarm_kernels.kvcache.state_plan import (
    LayerState,
    Level,
    OneCall,
    RowInput,
    RowRun,
    Source,
    StatefulMetadata,
    StateSnapshot,
)
from swarm_kernels.kvcache.stateful_cache import StatefulCache, StateSpec, TensorSpec
from swarm_kernels.ops import dispatch
from swarm_kernels.ops.base.recurrence import StateRows
from swarm_kernels.runtime.hf_attention import ProbedLayer, Visibility, running
from swarm_kernels.runtime.hf_linears import PackedModule, replace_module
from swarm_kernels.runtime.mixers.one_call import NO_STATE, NotComputed, OneCallMixer

_MIXERS = frozenset({
    "Qwen3NextGatedDeltaNet", "Qwen3_5GatedDeltaNet", "Qwen3_5MoeGatedDeltaNet", "Lfm2ShortConv", "Lfm2MoeShortConv",
    "BambaMixer", "GraniteMoeHybridMambaLayer", "NemotronHMamba2Mixer", "JambaMambaMixer", "MiniMaxLightningAttention",
    "KimiLinearDeltaAttention", "OlmoHybridGatedDeltaNet", "BailingHybridDeltaAttention",
})  # fmt: skip
"""transformers' modules that are known to touch their cache in no other way than `_StateCache` allows."""

_SCANS_FROM_ZERO = frozenset({"JambaMambaMixer"})
"""Those that forget an earlier state when they are given several rows: these run row by row."""

_CACHE_ARGUMENTS = ("cache_params", "past_key_values")
_NOT_USED = ("position_embeddings", "attention_mask")  # arguments without a default that these modules do not read


class _StateCache:
    """Quacks like `transformers.Cache` towards one mixer: a state of each sequence in the batch."""

    def __init__(self, tensors: dict[str, torch.Tensor] | None = None) -> None:
        """`tensors`: `[batch, ...]` each, may be changed in place; None: nothing came before."""
        self.tensors = tensors or {}

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        return self._get("conv", state_idx)

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        return self._get("recurrent", state_idx)

    def get_linear_cache(self, layer_idx: int) -> torch.Tensor | None:
        return self._get("linear", 0)

    def set_linear_cache(self, layer_idx: int, state: torch.Tensor) -> None:
        self.tensors["linear"] = state

    def update_recurrent_state(self, states: torch.Tensor, layer_idx: int, state_idx: int = 0) -> torch.Tensor:
        self._only_one(state_idx)
        self.tensors["recurrent"] = states
        return states

    def update_conv_state(
        self, rows: torch.Tensor, layer_idx: int, state_idx: int = 0, conv_kernel_size: int | None = None
    ) -> torch.Tensor:
        """`rows [batch, width, n]` -> these after those before them; the last `conv_kernel_size` of them are kept."""
        self._only_one(state_idx)
        before = self.tensors.get("conv")
        full = rows if before is None else torch.cat((before, rows), dim=-1)
        size = rows.shape[-1] if conv_kernel_size is None else conv_kernel_size
        self.tensors["conv"] = torch.nn.functional.pad(full, (max(0, size - full.shape[-1]), 0))[..., -size:]
        return full

    def is_recording_past(self, layer_idx: int) -> bool:
        return False

    def _get(self, name: str, state_idx: int) -> torch.Tensor | None:
        self._only_one(state_idx)
        return self.tensors.get(name)

    @staticmethod
    def _only_one(state_idx: int) -> None:
        if state_idx:
            raise UnsupportedModel("its layers have several states of one kind")


class StateMixer:
    """Runs in place of a mixer's `forward`."""

    def __init__(self, module: torch.nn.Module, layer: int) -> None:
        self.module = module
        self.layer = layer
        self.spec: StateSpec | None = None  # once probed
        self._forward: Callable[..., Any] = module.forward
        parameters = inspect.signature(module.forward).parameters
        self._cache_argument = next(name for name in _CACHE_ARGUMENTS if name in parameters)
        self._arguments: dict[str, Any] = dict.fromkeys(name for name in _NOT_USED if name in parameters)
        self._row_by_row = type(module).__name__ in _SCANS_FROM_ZERO
        self.one_call = OneCallMixer.of(module)
        self._in_tuple = False  # whether it returns its output in a tuple

    def __call__(self, hidden_states: torch.Tensor, *_: Any, **__: Any) -> Any:
        """`[1, n, hidden]` of packed rows."""
        batch = running()
        if batch is None:  # transformers' own, on the rows of one sequence
            return self._returned(hidden_states, None)
        if batch.cache is None:
            return self._probe(hidden_states)
        assert isinstance(batch.metadata, StatefulMetadata)
        plan, rows = batch.metadata.states, hidden_states[0]
        if self.one_call is not None and dispatch.compiles_states(rows):
            output = self._run_all(self.one_call, plan.in_one_call(len(rows)), rows)
            self._keep(plan.kept, rows)
            return self._like_module(output[None])
        output = torch.empty_like(rows)
        for run in plan.runs:
            self._run_rows(run, rows, output)
        states: dict[str, torch.Tensor] = {}
        for level in plan.levels:
            states = self._run_level(level, states, rows, output)
        self._keep(plan.kept, rows)
        return self._like_module(output[None])

    def _run(self, rows: torch.Tensor, cache: _StateCache) -> torch.Tensor:
        """`[batch, n, hidden]` to the same."""
        returned = self._returned(rows, cache)
        self._in_tuple = isinstance(returned, tuple)
        output: torch.Tensor = returned[0] if self._in_tuple else returned
        return output

    def _returned(self, rows: torch.Tensor, cache: _StateCache | None) -> Any:
        return self._forward(rows, **self._arguments, **{self._cache_argument: cache})

    def _like_module(self, output: torch.Tensor) -> Any:
        return (output, None) if self._in_tuple else output

    def _probe(self, hidden: torch.Tensor) -> Any:
        batch = running()
        assert batch is not None
        cache = _StateCache()
        output = self._run(hidden.expand(1, 2, -1) if hidden.shape[1] == 1 else hidden, cache)
        if not cache.tensors:
            raise UnsupportedModel("its layers keep no state where they should")
        specs = {name: TensorSpec(tuple(x.shape[1:]), x.dtype) for name, x in cache.tensors.items()}
        self._try_one_call(hidden, specs)
        self.spec = StateSpec(specs, TensorSpec(tuple(hidden.shape[2:]), hidden.dtype))
        batch.probed.append(ProbedLayer(self.layer - batch.first_layer, 0, 0, 0, Visibility(), self.module))
        return self._like_module(output[:, : hidden.shape[1]])

    def _try_one_call(self, hidden: torch.Tensor, specs: Mapping[str, TensorSpec]) -> None:
        """Whether our ops have its arithmetic, and its states."""
        if self.one_call is None or not dispatch.compiles_states(hidden):
            return
        inputs, rows = hidden[0, :1].expand(2, -1), StateRows.of((0, 1), (-1, 0), 1, (1,))
        try:
            _, (state,) = self.one_call(inputs, rows, (None,), self._arguments | {self._cache_argument: NO_STATE})
        except NotComputed:
            self.one_call = None
        else:
            if {name: TensorSpec(tuple(x.shape), x.dtype) for name, x in state.items()} != specs:
                self.one_call = None

    # --- batches ------------------------------------------------------------------------------------------------

    def _run_all(self, mixer: OneCallMixer, call: OneCall, rows: torch.Tensor) -> torch.Tensor:
        inputs = rows
        if call.kept:
            inputs = torch.cat((rows, torch.stack([row.layers[self.layer] for row in call.kept])))
        starts = [start.layers.get(self.layer) for start in call.starts]
        assert all(state is not None or start.position == 0 for state, start in zip(starts, call.starts, strict=True))
        output, states = mixer(inputs, call.rows, starts, self._arguments | {self._cache_argument: NO_STATE})
        for snapshot, state in zip(call.saved, states, strict=True):
            snapshot.layers[self.layer] = state
        return output[: len(rows)]

    def _run_rows(self, run: RowRun, rows: torch.Tensor, output: torch.Tensor) -> None:
        done, state = 0, run.start.layers.get(self.layer)
        inputs = self._inputs(run.sources, rows)
        for count, snapshot in run.saves:
            for part in self._parts(done, count, state is None):
                cache = _StateCache({name: x[None].clone() for name, x in state.items()} if state else None)
                result = self._run(inputs[None, part], cache)[0]
                _put(output, run.sources[part], result)
                state = {name: x[0] for name, x in cache.tensors.items()}
            assert state is not None
            snapshot.layers[self.layer] = state
            done = count

    def _parts(self, start: int, end: int, from_zero: bool) -> Iterator[slice]:
        """Rows `[start, end)` of a run as what the module computes in one call."""
        if not self._row_by_row or from_zero:
            yield slice(start, end)
        else:
            yield from (slice(row, row + 1) for row in range(start, end))

    def _run_level(
        self, level: Level, before: dict[str, torch.Tensor], rows: torch.Tensor, output: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        """`before`: the states after the rows of the level before, `[batch, ...]`. -> those after this one's."""
        if level.starts:
            found = [self._state_of(snapshot, rows.device) for snapshot in level.starts]
            states = {name: torch.stack([state[name] for state in found]) for name in found[0]}
        else:
            parents = torch.tensor(level.parents, device=rows.device)
            states = {name: x.index_select(0, parents) for name, x in before.items()}
        cache = _StateCache(states)
        _put(output, level.sources, self._run(self._inputs(level.sources, rows)[:, None], cache)[:, 0])
        for place, snapshot in level.saves:
            snapshot.layers[self.layer] = {name: x[place].clone() for name, x in cache.tensors.items()}
        return cache.tensors

    def _state_of(self, snapshot: StateSnapshot, device: torch.device) -> LayerState:
        assert self.spec is not None
        state = snapshot.layers.get(self.layer)
        if state is None:
            assert snapshot.position == 0  # else a batch of the session has failed half-way
            return {name: tensor.zeros(device) for name, tensor in self.spec.tensors.items()}
        return state

    def _inputs(self, sources: Sequence[Source], rows: torch.Tensor) -> torch.Tensor:
        first = sources[0]
        if isinstance(first, int) and list(sources) == list(range(first, first + len(sources))):
            return rows[first : first + len(sources)]
        return torch.stack([rows[s] if isinstance(s, int) else s.layers[self.layer] for s in sources])

    def _keep(self, kept: Sequence[tuple[int, RowInput]], rows: torch.Tensor) -> None:
        if kept:
            copies = rows[torch.tensor([row for row, _ in kept], device=rows.device)]
            for (_, where), copy in zip(kept, copies.unbind(), strict=True):
                where.layers[self.layer] = copy


def _put(output: torch.Tensor, sources: Sequence[Source], results: torch.Tensor) -> None:
    """Results of rows of the batch into `output`; of others, only the state is wanted."""
    places = [(place, source) for place, source in enumerate(sources) if isinstance(source, int)]
    if places:
        index = torch.tensor([source for _, source in places], device=output.device)
        output[index] = results[torch.tensor([place for place, _ in places], device=output.device)]


def in_order(
    probed: Sequence[ProbedLayer], plain: Mapping[int, torch.nn.Module], first_layer: int
) -> list[ProbedLayer]:
    """What was probed, and the layers of the model that are `plain`, which have nothing to probe; by layer."""
    others = [ProbedLayer(index - first_layer, 0, 0, 0, Visibility(), module) for index, module in plain.items()]
    return sorted((*probed, *others), key=lambda layer: layer.layer)


def state_cache(
    shape: KvShape,
    max_tokens: int,
    device: torch.device,
    blocks: Sequence[bool],
    mixers: Mapping[int, StateMixer],
    state_bytes: int,
    sessions: int,
) -> StatefulCache:
    """`state_bytes`: for the recurrent states of all sessions; those of so many sessions fit in any case."""
    specs = {layer: mixer.spec for layer, mixer in mixers.items() if mixer.spec is not None}
    each = sum(spec.session_bytes for spec in specs.values())
    return StatefulCache(shape, max_tokens, device, blocks, specs, max(state_bytes, sessions * each))


def install(layer: torch.nn.Module, index: int, packs: bool) -> StateMixer | None:
    """Let the mixer of a layer of the model, if it has one with a state, run on our states. `packs`: where linear
    layers are packed, those of the mixer that keep their floats are too, for torch's round a row by the number of rows.
    """
    found = [module for module in layer.modules() if type(module).__name__ in _MIXERS]
    if not found:
        return None
    if len(found) > 1:
        raise UnsupportedModel("its layers have several states")
    mixer = StateMixer(found[0], index)
    if packs and mixer.one_call is not None:
        for name, module in list(found[0].named_modules()):
            if isinstance(module, torch.nn.Linear) and module.weight.device.type == "cpu":
                replace_module(found[0], name, PackedModule(dispatch.pack_linear(module.weight, module.bias)))
    found[0].forward = mixer
    return mixer
