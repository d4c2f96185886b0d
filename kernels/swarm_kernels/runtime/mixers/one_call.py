"""transformers' mixers with a state, every row of a batch in one call: their own forward, with our ops in place of the
functions that see more than one row.

Owns which mixers run so. What they compute of each row by itself stays transformers' code, but for gated norms, and
reads its weights once, whatever tree the rows are of. Recurrences are computed row by row along each path, so that a
row's numbers do not depend on how a text was cut. Knows no batches and no cache: `hf_states` does.
"""

from __future__ import annotations

import functools
import inspect
import math
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch

from swarm_kernels.kvcache.state_plan import LayerState
from swarm_kernels.ops import dispatch
from swarm_kernels.ops.base.gated_norm import GatedNorm
from swarm_kernels.ops.base.recurrence import MAX_TAPS, Convolution, Recurrence, StateRows

_DELTA, _KIMI = ("causal_conv1d_fn", "torch_chunk_gated_delta_rule"), ("causal_conv1d_fn", "chunk_kimi_delta_attention")
_MAMBA2 = ("causal_conv1d_fn", "mamba2_chunk_scan")
_FUNCTIONS = {
    "Qwen3NextGatedDeltaNet": _DELTA,
    "Qwen3_5GatedDeltaNet": _DELTA,
    "Qwen3_5MoeGatedDeltaNet": _DELTA,
    "OlmoHybridGatedDeltaNet": _DELTA,
    "KimiLinearDeltaAttention": _KIMI,
    "BailingHybridDeltaAttention": _KIMI,
    "Lfm2ShortConv": ("causal_conv1d_fn",),
    "Lfm2MoeShortConv": ("causal_conv1d_fn",),
    "BambaMixer": _MAMBA2,
    "GraniteMoeHybridMambaLayer": _MAMBA2,
    "NemotronHMamba2Mixer": _MAMBA2,
}
"""By mixer: all functions of transformers in which its rows see others, when it finds no earlier state."""

_LIGHTNING = "MiniMaxLightningAttention"  # has its recurrence in its forward, which is written here anew

_NORM = "RMSNormGated"  # how the classes of gated norms end

_L2_EPS = 1e-6  # of transformers' `l2norm` of queries and keys


class NotComputed(Exception):
    """Our ops have no such arithmetic. Never leaves `hf_states`."""


class _NoState:
    """Quacks like `transformers.Cache`: nothing came before, and nothing is kept, for the functions below do that."""

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> None:
        return None

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> None:
        return None

    def update_conv_state(self, rows: torch.Tensor, layer_idx: int, **_: Any) -> torch.Tensor:
        return rows

    def update_recurrent_state(self, states: Any, layer_idx: int, **_: Any) -> Any:
        return states

    def is_recording_past(self, layer_idx: int) -> bool:
        return False


class _Nothing:
    """In place of a state that is kept elsewhere: some mixers cast it."""

    def to(self, *_: Any) -> _Nothing:
        return self


class _Functional:
    """`torch.nn.functional` for a mixer."""

    softplus = staticmethod(dispatch.softplus)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.nn.functional, name)


class _GatedNorm:
    """In place of one of transformers' gated norms."""

    def __init__(self, norm: Any) -> None:
        self._norm = norm
        self._how: GatedNorm | None = None  # at the first call the weight is loaded

    def __call__(self, hidden_states: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        if self._how is None:
            groups, sigmoid = (
                getattr(self._norm, "group_size", None),
                getattr(self._norm, "activation", "") == "sigmoid",
            )
            weight = self._norm.weight.detach().float().contiguous()
            rounds, eps = groups is None and not sigmoid, self._norm.variance_epsilon
            self._how = GatedNorm(weight, groups or len(weight), eps, groups is not None, sigmoid, rounds)
        width = hidden_states.shape[-1]
        normed = dispatch.norm_gated(hidden_states.reshape(-1, width), gate.reshape(-1, width), self._how)
        return normed.view(hidden_states.shape)


class _View:
    """A module with some of its attributes replaced."""

    def __init__(self, module: torch.nn.Module, replaced: dict[str, Any]) -> None:
        self._module, self._replaced = module, replaced

    def __getattr__(self, name: str) -> Any:
        found = self._replaced.get(name)
        return getattr(self._module, name) if found is None else found


class OneCallMixer:
    """Of one layer. Its functions are called while `__call__` runs, with the rows and states of that call."""

    def __init__(self) -> None:
        self._forward: Callable[..., Any] = self._convolve
        self._rows = StateRows.of((), (), 0, ())
        self._starts: Sequence[LayerState | None] = ()
        self._saved: dict[str, list[torch.Tensor]] = {}
        self._convolution: tuple[torch.Tensor, Convolution] | None = None  # of this weight

    @classmethod
    def of(cls, module: torch.nn.Module) -> OneCallMixer | None:
        """None where its forward is not the one that is known."""
        mixer = cls()
        if type(module).__name__ == _LIGHTNING:
            mixer._forward = functools.partial(mixer._lightning_attention, module)
            return mixer
        names = _FUNCTIONS.get(type(module).__name__, ())
        plain: Any = inspect.unwrap(getattr(type(module), "forward", None) or module.forward)
        if not names or not isinstance(plain, types.FunctionType) or not set(names) <= set(plain.__code__.co_names):
            return None
        with_ours: dict[str, Any] = dict(plain.__globals__)
        forward = types.FunctionType(plain.__code__, with_ours, plain.__name__, plain.__defaults__, plain.__closure__)
        forward.__kwdefaults__ = plain.__kwdefaults__
        norms = {name: _GatedNorm(x) for name, x in module.named_children() if type(x).__name__.endswith(_NORM)}
        mixer._forward = types.MethodType(forward, _View(module, norms))
        ours = {
            "causal_conv1d_fn": mixer._convolve,
            "torch_chunk_gated_delta_rule": mixer._delta_rule,
            "chunk_kimi_delta_attention": mixer._delta_rule,
            "mamba2_chunk_scan": mixer._state_space,
        }
        with_ours |= {name: ours[name] for name in names} | {"F": _Functional()}
        return mixer

    def __call__(
        self, inputs: torch.Tensor, rows: StateRows, starts: Sequence[LayerState | None], arguments: dict[str, Any]
    ) -> tuple[torch.Tensor, list[LayerState]]:
        """`inputs [n, hidden]` -> likewise, and the states after the rows that are saved. `arguments`: of the forward;
        those that are None and are called as transformers' caches get one. Raises NotComputed."""
        self._rows, self._starts, self._saved = rows, starts, {}
        returned = self._forward(inputs[None], **arguments)
        output: torch.Tensor = returned[0] if isinstance(returned, tuple) else returned
        saved = [dict(zip(self._saved, states, strict=True)) for states in zip(*self._saved.values(), strict=True)]
        self._starts, self._saved = (), {}
        return output[0], list(saved)

    def _before(self, name: str) -> list[torch.Tensor | None]:
        return [None if state is None else state[name] for state in self._starts]

    # --- in place of transformers' functions ------------------------------------------------------------------------

    def _convolve(
        self,
        hidden_states: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        activation: str | None = None,
        **_: Any,
    ) -> torch.Tensor:
        """`[1, C, n]` -> likewise."""
        rows = hidden_states[0].T
        if (
            activation not in (None, "silu", "swish")
            or weight.shape[1] > MAX_TAPS
            or not dispatch.compiles_states(rows)
        ):
            raise NotComputed
        if self._convolution is None or self._convolution[0].data_ptr() != weight.data_ptr():
            wide = None if bias is None else bias.float().contiguous()
            self._convolution = weight, Convolution(weight.float().T.contiguous(), wide, activation is not None)
        output, self._saved["conv"] = dispatch.convolve(rows, self._convolution[1], self._rows, self._before("conv"))
        return output.T[None]

    def _delta_rule(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        g: torch.Tensor,
        beta: torch.Tensor,
        use_qk_l2norm_in_kernel: bool = False,
        **_: Any,
    ) -> tuple[torch.Tensor, _Nothing]:
        """`[1, n, heads, size]` each, decays `[1, n, heads]` or by key -> `[1, n, heads, size]` of values."""
        eps, scale = _L2_EPS if use_qk_l2norm_in_kernel else None, query.shape[-1] ** -0.5
        how = Recurrence(query[0], key[0], value[0], g[0], beta[0], None, scale, eps, corrects=True)
        output, self._saved["recurrent"] = dispatch.recur(how, self._rows, self._before("recurrent"))
        return output[None].to(query.dtype), _Nothing()

    def _state_space(
        self,
        hidden_states: torch.Tensor,
        dt: torch.Tensor,
        A: torch.Tensor,
        B: torch.Tensor,
        C: torch.Tensor,
        D: torch.Tensor | None = None,
        dt_bias: torch.Tensor | None = None,
        dt_softplus: bool = False,
        dt_limit: Sequence[float] = (0.0, math.inf),
        **_: Any,
    ) -> tuple[torch.Tensor, _Nothing]:
        """Mamba-2 (Dao and Gu, 2024): values `[1, n, heads, size]`, time steps `[1, n, heads]`, A `[heads]`, B and C
        `[1, n, groups, states]` -> like values, fp32. Time steps are bounded in every row: transformers bounds them in
        long runs, and not where it decodes a single row."""
        if not dt_softplus:
            raise NotComputed
        if dt_bias is not None:
            dt = dt + dt_bias.to(dt.dtype)
        step = dispatch.softplus(dt[0]).clamp(*dt_limit).float()
        how = Recurrence(C[0], B[0], hidden_states[0], A.float() * step, step, D, values_first=True)
        output, self._saved["recurrent"] = dispatch.recur(how, self._rows, self._before("recurrent"))
        return output[None], _Nothing()

    def _lightning_attention(self, module: Any, hidden_states: torch.Tensor, **_: Any) -> torch.Tensor:
        """The forward of MiniMax's mixer (Qin et al., 2024): `[1, n, hidden]` -> likewise."""
        rows = hidden_states[0]
        heads, size = module.num_attention_heads, module.head_dim
        query, key, value = module.act_fn(module.qkv_proj(rows)).view(len(rows), heads, 3 * size).split(size, -1)
        decay = -module.slope_rate.view(1, heads).expand(len(rows), heads)
        how = Recurrence(query, key, value, decay)
        output, self._saved["linear"] = dispatch.recur(how, self._rows, self._before("linear"))
        normed = module.norm(output.to(rows.dtype).flatten(1))
        projected: torch.Tensor = module.out_proj(torch.sigmoid(module.output_gate(rows)) * normed)
        return projected[None]


NO_STATE = _NoState()
