"""Attacks that read a token off its own hidden state alone: the nearest embedding, and a learned linear map.

Owns both. Each gives scores for all tokens, so that a search can go through the likeliest first.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

Scores = Callable[[torch.Tensor], torch.Tensor]
"""Hidden states `[n, hidden]` -> `[n, vocab]`, the likeliest token's the largest."""

RIDGE = 1e-3  # of the mean variance: without it few rows would be fitted exactly


def nearest_embedding(embedding: torch.Tensor) -> Scores:
    """By the cosine to each token's embedding. `embedding [vocab, hidden]`."""
    table = torch.nn.functional.normalize(embedding, dim=1)
    return lambda hidden: torch.nn.functional.normalize(hidden.float(), dim=1) @ table.T


@dataclass(frozen=True, slots=True)
class LinearInversion:
    """By the embedding that a linear map makes of the state. `weights [hidden + 1, hidden]`; `table [vocab, hidden]`:
    embeddings of length 1."""

    weights: torch.Tensor
    table: torch.Tensor

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.directions(hidden) @ self.table.T

    def directions(self, hidden: torch.Tensor) -> torch.Tensor:
        """Of the embeddings that belong to the states, `[n, hidden]`, of length 1."""
        return torch.nn.functional.normalize((_with_bias(hidden) @ self.weights).float(), dim=1)


def linear_inversion(embedding: torch.Tensor, hidden: torch.Tensor, tokens: torch.Tensor) -> LinearInversion:
    """Ridge regression from states `hidden [n, hidden]` to the embeddings of known `tokens [n]`. States are scaled by
    their norm, as a few of them are far larger than the others."""
    table = torch.nn.functional.normalize(embedding, dim=1)
    inputs = _with_bias(hidden)
    gram = inputs.T @ inputs
    gram += RIDGE * gram.diagonal().mean() * torch.eye(len(gram), dtype=gram.dtype)
    weights = torch.linalg.solve(gram, inputs.T @ table[tokens].double())
    return LinearInversion(weights, table)


def _with_bias(hidden: torch.Tensor) -> torch.Tensor:
    scaled = torch.nn.functional.normalize(hidden.double(), dim=1)
    return torch.cat([scaled, torch.ones(len(scaled), 1, dtype=torch.float64)], dim=1)
