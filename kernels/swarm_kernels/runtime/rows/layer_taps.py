"""Running a slice of a model's layers by the whole model's forward.

Each decoder layer of a transformers model is wrapped by a `LayerTap`: taps before the slice pass their input through,
the one right before it injects our hidden states, and the last one of the slice stops the forward. So whatever a model
does around its layers (positions, scales, logit caps) stays transformers' code.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from swarm_kernels.runtime.rows.wide import WideRows


class StopForward(Exception):
    """Stops transformers' forward after the last requested layer."""

    def __init__(self, hidden: torch.Tensor) -> None:
        super().__init__()
        self.hidden = hidden


@dataclass(slots=True)
class TapState:
    """State shared by the taps of one model during a forward."""

    start: int = 0
    end: int = 0
    hidden: torch.Tensor | None = None  # injected before layer `start`
    indexed: bool = False  # layers hand on which keys their indexer chose: all of them, see `_limited_context`
    parts: int = 0  # of the tuples that this model's layers return; 0: no tuples
    wide: WideRows | None = None  # what rows hold beside hidden states, which `hidden` has only
    rounding: torch.dtype | None = None  # of what comes out of each layer, so that it is the same wherever spans end


class LayerTap(torch.nn.Module):
    """Replaces layer `index`; attributes that the model reads from its layers are the wrapped layer's."""

    def __init__(self, layer: torch.nn.Module, index: int, state: TapState) -> None:
        super().__init__()
        self.layer = layer
        self.index = index
        self.state = state

    def forward(self, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        state = self.state
        if state.start == self.index == state.end:  # an embedding
            raise StopForward(hidden)
        if state.start <= self.index < state.end:
            if state.wide is not None:
                hidden = state.hidden if self.index == 0 and state.hidden is not None else hidden
                args = state.wide.arguments(self.index, args, kwargs)
            output = _rounded(self.layer(hidden, *args, **kwargs), state.rounding)
            if self.index == state.end - 1:
                state.parts = len(output) if isinstance(output, tuple) else 0
                hidden = output[0] if state.parts else output
                raise StopForward(hidden if state.wide is None else state.wide.pack(hidden, state.end))
            return output
        if self.index == state.start - 1 and state.hidden is not None:
            hidden = state.hidden
        if not state.parts:
            return hidden
        rest = _all_keys(hidden.shape[1], hidden.device) if state.parts > 1 and state.indexed else None
        return (hidden, *(rest,) * (state.parts - 1))

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("layer"), name)


def _all_keys(rows: int, device: torch.device) -> torch.Tensor:
    """`[1, rows, rows]`: every row chooses every key of its batch."""
    return torch.arange(rows, dtype=torch.int32, device=device).expand(1, rows, rows)


def _rounded(output: Any, to: torch.dtype | None) -> Any:
    """What a layer returns, its hidden states rounded."""
    if to is None:
        return output
    if isinstance(output, tuple):
        return (_rounded(output[0], to), *output[1:])
    return output.to(to).to(output.dtype)
