"""A small transformer that is trained to read tokens off a text's hidden states, all of them at once.

Unlike the attacks of `inversion` it sees the states around a token as well, before and after it. It begins as the
linear map and learns what that misses, so that it is the stronger of the two wherever its training helped on text that
it was not trained on. Owns the network and its training, which is seeded and bounded.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

from swarm_privacy.inversion import Scores, linear_inversion


@dataclass(frozen=True, slots=True)
class TransformerAttackPolicy:
    """More of anything makes a stronger attacker, who takes longer."""

    width: int = 192
    layers: int = 2
    heads: int = 4
    max_steps: int = 400
    batch: int = 8  # windows of a step
    rate: float = 1e-3  # of learning, at its most
    warmup: int = 20  # steps
    held_out: float = 0.15  # of the training text, by which it is judged when to stop
    judged_every: int = 25  # steps
    patience: int = 4  # times in a row that it may be judged no better
    negatives: int = 2048  # tokens that the training text does not have, among those to tell apart
    sharpness: float = 20.0  # of the softmax over cosines
    seed: int = 1


class _Inverter(nn.Module):
    """States `[n, window, hidden]` -> directions `[n, window, hidden]` in the space of embeddings."""

    def __init__(self, hidden: int, window: int, policy: TransformerAttackPolicy) -> None:
        super().__init__()
        self.into = nn.Linear(hidden, policy.width)
        self.places = nn.Parameter(0.3 * torch.randn(window, policy.width))
        layer = nn.TransformerEncoderLayer(
            policy.width, policy.heads, 4 * policy.width, dropout=0.1, batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, policy.layers, enable_nested_tensor=False)
        self.out = nn.Linear(policy.width, hidden)
        nn.init.zeros_(self.out.weight)
        nn.init.zeros_(self.out.bias)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        directions: torch.Tensor = self.out(self.layers(self.into(states) + self.places))
        return directions


def transformer_inversion(
    embedding: torch.Tensor,
    hidden: torch.Tensor,
    tokens: torch.Tensor,
    window: int,
    policy: TransformerAttackPolicy = TransformerAttackPolicy(),
) -> Scores:
    """`embedding [vocab, hidden]`; `hidden [n * window, hidden]` of known `tokens [n * window]`, two windows or more.
    The scores take whole windows as well. The same arguments give the same attack."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(policy.seed)
        return _Training(embedding, hidden, tokens, window, policy).run()


class _Training:
    """One training: what is trained on, what is judged by, and the network."""

    def __init__(
        self,
        embedding: torch.Tensor,
        hidden: torch.Tensor,
        tokens: torch.Tensor,
        window: int,
        policy: TransformerAttackPolicy,
    ) -> None:
        self._policy, self._window = policy, window
        self._table = nn.functional.normalize(embedding.float(), dim=1)
        count = len(tokens) // window
        self._held = max(1, round(policy.held_out * count))  # windows, of all parts of the text
        held = torch.zeros(count, dtype=torch.bool)
        held[torch.linspace(0, count - 1, self._held).long()] = True
        rows = held.repeat_interleave(window)
        self._linear = linear_inversion(embedding, hidden[~rows], tokens[~rows])
        self._center, self._scale = _moments(hidden[~rows])
        self._net = _Inverter(hidden.shape[1], window, policy)
        self._known, self._known_tokens = self._windows(hidden[~rows]), tokens[~rows].view(-1, window)
        self._judged, self._judged_tokens = hidden[rows], tokens[rows]
        self._choices, self._targets = self._candidates(self._known_tokens)
        self._bases = self._linear.directions(hidden[~rows]).view(*self._known.shape)

    def _windows(self, hidden: torch.Tensor) -> torch.Tensor:
        return ((hidden.float() - self._center) / self._scale).view(-1, self._window, hidden.shape[1])

    def _candidates(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The tokens to tell apart in training, `[c]`, and each known token's place among them."""
        used = torch.tensor(sorted(set(tokens.flatten().tolist())))
        others = torch.randperm(len(self._table))[: self._policy.negatives]
        return torch.cat([used, others[~torch.isin(others, used)]]), torch.searchsorted(used, tokens)

    def run(self) -> Scores:
        policy, net = self._policy, self._net
        optimizer = torch.optim.AdamW(net.parameters(), lr=policy.rate, weight_decay=0.05)
        best, kept, since = self._judge(), copy.deepcopy(net.state_dict()), 0
        candidates = self._table[self._choices]
        for step, batch in enumerate(self._batches(), 1):
            for group in optimizer.param_groups:
                group["lr"] = policy.rate * min(1.0, step / policy.warmup)
            net.train()
            found = nn.functional.normalize(self._bases[batch] + net(self._known[batch]), dim=-1)
            logits = policy.sharpness * found.flatten(0, 1) @ candidates.T
            optimizer.zero_grad()
            nn.functional.cross_entropy(logits, self._targets[batch].flatten()).backward()  # type: ignore[no-untyped-call]
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
            if step % policy.judged_every == 0:
                share, since = self._judge(), since + 1
                if share > best:
                    best, kept, since = share, copy.deepcopy(net.state_dict()), 0
                elif since >= policy.patience:
                    break
        net.load_state_dict(kept)
        return self.scores

    def _batches(self) -> Iterator[torch.Tensor]:
        """Windows of each step, in an order of their own each time round."""
        left, size = torch.empty(0, dtype=torch.long), min(self._policy.batch, len(self._known))
        for _ in range(self._policy.max_steps):
            if len(left) < size:
                left = torch.randperm(len(self._known))
            yield left[:size]
            left = left[size:]

    def _judge(self) -> float:
        """The share of the held-out tokens that it reads now."""
        parts = range(0, len(self._judged), 4 * self._window)
        found = torch.cat([self.scores(self._judged[at : at + 4 * self._window]).argmax(dim=1) for at in parts])
        return float((found == self._judged_tokens).float().mean())

    def scores(self, hidden: torch.Tensor) -> torch.Tensor:
        self._net.eval()
        with torch.inference_mode():
            learned = self._net(self._windows(hidden)).flatten(0, 1)
            return nn.functional.normalize(self._linear.directions(hidden) + learned, dim=1) @ self._table.T


def _moments(hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and standard deviation of each number of a state, `[hidden]`: a few are far larger than the others."""
    rows = hidden.float()
    return rows.mean(dim=0), rows.std(dim=0).clamp_min(1e-6)
