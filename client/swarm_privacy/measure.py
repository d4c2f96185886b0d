"""How much of a text four attacks recover from its hidden states, by the number of layers that the states have passed.

Owns the experiment: what is trained on and what is measured on never overlap. Shares count tokens that are recovered
exactly, the first of a text left out, of which every attack would know that it is the same in all texts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from swarm.errors import UsageError
from swarm_kernels.runtime.span import Span
from swarm_privacy.forward_search import ForwardSearchPolicy, forward_search
from swarm_privacy.inversion import linear_inversion, nearest_embedding
from swarm_privacy.states import embeddings, states_of
from swarm_privacy.transformer_inversion import TransformerAttackPolicy, transformer_inversion

WINDOW = 64  # tokens of a text that is attacked by itself
ROWS = 4 * WINDOW  # that are attacked together
DEPTHS = (0, 1, 2, 4, 8, 16)  # and the last
MIN_TRAINING = 4  # times the hidden size: with fewer rows a linear map fits anything


@dataclass(frozen=True, slots=True)
class Leak:
    """Shares of the tokens that each attack recovered from the states after `depth` layers, 0 to 1."""

    depth: int
    nearest: float
    linear: float
    transformer: float
    search: float

    @property
    def most(self) -> float:
        return max(self.nearest, self.linear, self.transformer, self.search)


def measure(
    span: Span,
    training: Sequence[int],
    text: Sequence[int],
    depths: Sequence[int],
    searched: int,
    policy: ForwardSearchPolicy = ForwardSearchPolicy(),
    training_policy: TransformerAttackPolicy = TransformerAttackPolicy(),
    report: Callable[[Leak], None] = lambda leak: None,
) -> list[Leak]:
    """`span`: of the whole model. `training`, `text`: token ids, for the attacker and to be attacked. `searched`:
    tokens of `text` that forward search is tried on; the other attacks take all. Raises UsageError."""
    if not span.config.rows.is_plain:
        raise UsageError("rows of this model hold inputs of its layers, which are a token's own: they hide nothing")
    hidden_size = span.config.hidden_size
    if len(training) < MIN_TRAINING * hidden_size:
        raise UsageError(f"{len(training)} tokens to train on are too few; give {MIN_TRAINING * hidden_size} or more")
    known, attacked = _windows(training), _windows(text)
    if not attacked:
        raise UsageError(f"the text to attack has {len(text)} tokens; give {WINDOW} or more")
    table, leaks = embeddings(span), []
    known_tokens, tokens = (torch.tensor([token for window in of for token in window]) for of in (known, attacked))
    for depth in depths:
        of_known, of_attacked = (_states(span, windows, depth) for windows in (known, attacked))
        linear, nearest = linear_inversion(table, of_known, known_tokens), nearest_embedding(table)
        learned = transformer_inversion(table, of_known, known_tokens, WINDOW, training_policy)
        found: list[int] = []
        for i in range(max(1, searched // WINDOW)):
            rows = of_attacked[i * WINDOW : (i + 1) * WINDOW]
            found += forward_search(span, rows, depth, linear(rows).argsort(dim=1, descending=True), policy)
        by_row = [_share(_best(attack, of_attacked), tokens) for attack in (nearest, linear, learned)]
        by_search = _share(torch.tensor(found), tokens[: len(found)])
        leaks.append(Leak(depth, by_row[0], by_row[1], by_row[2], by_search))
        report(leaks[-1])
    return leaks


def _windows(ids: Sequence[int]) -> list[list[int]]:
    return [list(ids[at : at + WINDOW]) for at in range(0, len(ids) - WINDOW + 1, WINDOW)]


def _states(span: Span, windows: Sequence[Sequence[int]], depth: int) -> torch.Tensor:
    return torch.cat([states_of(span, window, (depth,))[depth] for window in windows])


def _best(scores: Callable[[torch.Tensor], torch.Tensor], hidden: torch.Tensor) -> torch.Tensor:
    return torch.cat([scores(hidden[at : at + ROWS]).argmax(dim=1) for at in range(0, len(hidden), ROWS)])


def _share(found: torch.Tensor, tokens: torch.Tensor) -> float:
    """Of the tokens, but for the first of each window."""
    counted = torch.arange(len(tokens)) % WINDOW != 0
    return float((found == tokens)[counted].float().mean())
