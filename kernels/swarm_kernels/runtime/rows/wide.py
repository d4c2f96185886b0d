"""Rows between layers that hold more than hidden states (`models.row_layout`), on transformers' modules of Gemma 3n and
Gemma 4.

Owns what goes into a layer beside its hidden states and comes out of it again: the input of each layer (per-layer
embeddings), and the keys and values that layers share. What only the ends of the model compute with is taken out of
other spans, and the table of per-layer embeddings is never in memory: its rows are read as tokens come.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch

from swarm.errors import InvalidRequest, UnsupportedModel
from swarm.types import LayerSpan
from swarm_kernels.models.row_layout import RowLayout
from swarm_kernels.models.source import ModelSource

_TABLE = "embed_tokens_per_layer"
_OF_FIRST = (_TABLE, "per_layer_model_projection", "per_layer_projection_norm", "altup_projections")
_OF_LAST = ("altup_unembed_projections",)
_INPUT, _SHARED = "per_layer_input", "shared_kv_states"


class StoredRows(torch.nn.Module):
    """A scaled embedding whose rows are read from the model's files when they are asked for."""

    def __init__(self, source: ModelSource, name: str, replaced: Any) -> None:
        super().__init__()
        self._matrix = source.sliced(name)
        self._scale = float(replaced.scalar_embed_scale)
        self._dtype: torch.dtype = replaced.weight.dtype

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        wanted = sorted(set(ids.flatten().tolist()))
        places = torch.searchsorted(torch.tensor(wanted, device=ids.device), ids)
        if wanted and not 0 <= wanted[0] <= wanted[-1] < self._matrix.shape[0]:
            raise InvalidRequest(f"a token has no per-layer embedding: there are {self._matrix.shape[0]}")
        rows = torch.cat([self._matrix[row : row + 1] for row in wanted]).to(ids.device, self._dtype)
        return rows[places] * torch.tensor(self._scale, dtype=self._dtype, device=ids.device)


def take_out_unused(causal_lm: Any, decoder: Any, source: ModelSource, layers: LayerSpan) -> None:
    """Of a model, before its weights are loaded, what a span does not compute with. `decoder`: its part without the
    head. Raises UnsupportedModel for a version of transformers that computes otherwise."""
    if source.config.rows.is_plain:
        return
    if not all(hasattr(decoder, name) for name in (*_OF_FIRST[:3], "project_per_layer_inputs", "get_per_layer_inputs")):
        raise UnsupportedModel(f"this version of transformers cannot compute models of type {source.config.model_type}")
    if layers.start == 0:
        name = next(name for name, module in causal_lm.named_modules() if module is getattr(decoder, _TABLE))
        setattr(decoder, _TABLE, StoredRows(source, f"{name}.weight", getattr(decoder, _TABLE)))
    unused = (() if layers.start == 0 else _OF_FIRST) + (() if layers.end == source.config.num_layers else _OF_LAST)
    for name in unused:
        if isinstance(part := getattr(decoder, name, None), torch.nn.ModuleList):
            setattr(decoder, name, torch.nn.ModuleList(torch.nn.Identity() for _ in part))
        elif part is not None:
            setattr(decoder, name, torch.nn.Identity())


class WideRows:
    """Of one loaded model. In and out go rows `[n, width]`; `rounding`: the dtype that what is handed on is rounded to,
    so that it is the same wherever spans end."""

    def __init__(self, decoder: Any, layer: torch.nn.Module, layout: RowLayout, rounding: torch.dtype | None) -> None:
        """`layer`: one of transformers' layers of the model."""
        self._layout = layout
        self._rounding = rounding
        self._kinds: list[str] = list(decoder.config.layer_types)
        self._input_at = _argument(layer, _INPUT)
        self._embedding = False
        self._inputs = torch.empty(0)  # [n, layers, per layer]: of all layers, or those from `_from` on
        self._from = 0
        self._shared = _SharedStates(rounding)
        self._project = decoder.project_per_layer_inputs
        self._look_up = decoder.get_per_layer_inputs
        decoder.project_per_layer_inputs = self._per_layer_inputs
        decoder.get_per_layer_inputs = self._looked_up

    def begin_embedding(self) -> None:
        """The model's forward comes from token ids, and ends before its first layer."""
        self._embedding = True

    def embedded(self, hidden: torch.Tensor) -> torch.Tensor:
        """`hidden`: what the first layer reads -> rows before it, `[1, n, width]`."""
        self._embedding, self._from = False, 0
        self._inputs = self._rounded(self._inputs)
        self._shared.clear()
        return self.pack(hidden, 0)

    def begin(self, rows: torch.Tensor, cut: int) -> torch.Tensor:
        """Rows before layer `cut` -> hidden states as transformers has them; the rest is kept for `arguments`."""
        n, layout = rows.shape[0], self._layout
        if rows.shape[1] != layout.width(cut):
            raise InvalidRequest(f"rows before layer {cut} have {layout.width(cut)} numbers, not {rows.shape[1]}")
        self._from = cut
        self._inputs = rows[:, layout.per_layer_inputs(cut)].reshape(n, -1, layout.per_layer)
        self._shared.clear()
        for keys in layout.shared_keys(cut):
            both = rows[:, keys.start : keys.start + 2 * keys.size].view(n, 2, keys.heads, keys.dim)
            of_layer = both.permute(1, 2, 0, 3)[:, None]
            self._shared[self._kinds[keys.layer]] = of_layer[0], of_layer[1]
        return self.states(rows)

    def states(self, rows: torch.Tensor) -> torch.Tensor:
        """The hidden states of rows at any cut: `[streams, 1, n, hidden]`, or `[1, n, hidden]` where there is one."""
        layout = self._layout
        streams = rows[:, : layout.states].reshape(-1, layout.streams, layout.hidden_size).transpose(0, 1)
        return streams[:, None].contiguous() if layout.streams > 1 else streams.contiguous()

    def arguments(self, index: int, args: tuple[Any, ...], others: dict[str, Any]) -> tuple[Any, ...]:
        """Those of layer `index` after its hidden states; `others`, by name, are changed."""
        mine = self._inputs[None, :, index - self._from]
        others[_SHARED] = self._shared
        if self._input_at < len(args):
            return (*args[: self._input_at], mine, *args[self._input_at + 1 :])
        others[_INPUT] = mine
        return args

    def pack(self, hidden: torch.Tensor, cut: int) -> torch.Tensor:
        """What layer `cut` reads, after those before it have run -> rows, `[1, n, width]`."""
        layout = self._layout
        streams = hidden[:, 0] if layout.streams > 1 else hidden
        rows = streams.shape[1]
        parts = [streams.transpose(0, 1).reshape(rows, -1), self._inputs[:, cut - self._from :].reshape(rows, -1)]
        for keys in layout.shared_keys(cut):
            parts += [part[0].transpose(0, 1).reshape(rows, -1) for part in self._shared[self._kinds[keys.layer]]]
        packed = torch.cat(parts, dim=1)
        if packed.shape[1] != layout.width(cut):
            raise UnsupportedModel("its layers share other keys and values than the config says")
        return packed[None]

    def _per_layer_inputs(self, embedded: torch.Tensor, looked_up: torch.Tensor | None = None) -> torch.Tensor:
        """In place of transformers' `project_per_layer_inputs`."""
        if self._embedding:
            inputs: torch.Tensor = self._project(embedded, looked_up)
            self._inputs = inputs[0]
            return inputs
        unused = embedded.new_zeros(1, 1, 1, 1)
        return unused.expand(1, embedded.shape[1], self._layout.num_layers, self._layout.per_layer)

    def _looked_up(self, ids: torch.Tensor | None, *others: Any) -> Any:
        return self._look_up(ids, *others) if self._embedding else None

    def _rounded(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor if self._rounding is None else tensor.to(self._rounding).to(tensor.dtype)


class _SharedStates(dict[str, tuple[torch.Tensor, torch.Tensor]]):
    """Keys and values of a batch's rows by the kind of layer, rounded as they are in caches and on the wire."""

    def __init__(self, rounding: torch.dtype | None) -> None:
        super().__init__()
        self._rounding = rounding

    def __setitem__(self, kind: str, states: tuple[torch.Tensor, torch.Tensor]) -> None:
        key, value = states
        if self._rounding is not None:
            key, value = (tensor.to(self._rounding).to(tensor.dtype) for tensor in states)
        super().__setitem__(kind, (key, value))


def _argument(layer: torch.nn.Module, name: str) -> int:
    """Which one after the hidden states. Raises UnsupportedModel."""
    parameters = list(inspect.signature(layer.forward).parameters)
    if name not in parameters or _SHARED not in parameters:
        raise UnsupportedModel("this version of transformers hands other arguments to its layers")
    return parameters.index(name) - 1
