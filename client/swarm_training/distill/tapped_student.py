"""A student that reads hidden states of its target, and in their place its own beyond the text (EAGLE-3).

Owns its arithmetic with gradients, as `draft.tapped_draft` has it without, and the training-time test: level s of a
forward stands s tokens behind the text, reads what level s - 1 gave out, and attends to the text's rows up to its own
and then to the rows of the levels before it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import nn

from swarm_kernels.draft.file import FINAL_NORM, DraftMetadata, layer_tensors
from swarm_kernels.draft.tapped_draft import EMBEDDING_NORM, FUSE, PROJECTION, STATE_NORM, TAP_SCALE
from swarm_kernels.models.source import ModelSource
from swarm_kernels.runtime.llama_span import EMBEDDING
from swarm_kernels.runtime.rope import RopeTable
from swarm_training.distill.corpus import ANSWER
from swarm_training.distill.draft_layer import DraftLayer, rotated
from swarm_training.distill.features import TrainingExample
from swarm_training.distill.student import Student
from swarm_training.distill.tap_rows import read_taps

_Rows = tuple[torch.Tensor, torch.Tensor]  # keys and values `[b, kv heads, n, dim]`
_FIRST_ROWS = 60_000  # from which the first weights are computed
_RIDGE = 3e-3  # of each feature's mean square


class TappedStudent(Student):
    """Token and state in, projected to what the model's last state at that token may be, then layers of its own.

    The last tap is the model's output.
    """

    def __init__(self, source: ModelSource, taps: Sequence[int], copied: Sequence[int], levels: int) -> None:
        """Layers copied from the target's. Learns `levels` tokens ahead."""
        super().__init__()
        config = source.config
        hidden = config.hidden_size
        self.base, self.ahead = 0, tuple(range(2, 2 + levels))
        self.config, self.taps = config, tuple(taps)
        self.own = [
            DraftLayer(config, {n: source.tensor(f"model.layers.{layer}.{n}") for n in layer_tensors(source, layer)})
            for layer in copied
        ]
        self._registered = nn.ModuleList(self.own)
        self.norm = nn.Parameter(source.tensor(FINAL_NORM).float().clone())
        self.fuse = nn.Parameter(torch.zeros(hidden, len(taps) * hidden))
        self.embedding_norm, self.state_norm = nn.Parameter(torch.ones(hidden)), nn.Parameter(torch.ones(hidden))
        self.projection = nn.Parameter(torch.zeros(hidden, 2 * hidden))  # of token and state
        self.tap_scale = nn.Parameter(torch.ones(len(taps) * hidden), requires_grad=False)
        self._embedding: torch.Tensor
        self.register_buffer("_embedding", source.tensor(EMBEDDING).bfloat16(), persistent=False)
        self._rope = RopeTable(config.rope, config.head_dim, config.context_length, torch.device("cpu"))

    @torch.no_grad()
    def initialize(self, examples: Sequence[TrainingExample]) -> None:
        """In closed form: the least-squares prediction of the model's last state at t + 1 from that at t and the token
        at t + 1, which drafts as well as a draft that was trained on tokens for an hour.

        Channels differ in size by a factor of hundreds, so each is brought to a mean square of 1. The layers read what
        the target's did, and add nothing before the first step.
        """
        hidden, parts, count = self.config.hidden_size, [], 0
        for example in examples:
            tapped, tokens = read_taps(example.chat.taps, hidden), example.chat.tokens.long()
            kept = (example.chat.origin == ANSWER)[2:]  # and not the first row, which is unlike all others
            parts.append((tapped[1:-1][kept], tapped[2:, -hidden:][kept], tokens[2:][kept]))
            if (count := count + len(parts[-1][0])) >= _FIRST_ROWS:
                break
        tapped, following, tokens = (torch.cat(column) for column in zip(*parts, strict=True))
        sizes = tapped.square().mean(0).clamp_min(1e-6).sqrt()
        self.tap_scale.copy_(1 / sizes)
        final = self._normed(following, self.norm)
        final_sizes = final.square().mean(0).clamp_min(1e-6).sqrt()
        self.fuse[:, -hidden:] = torch.diag(self.norm * sizes[-hidden:] / final_sizes)
        states = self._normed(F.linear(tapped * self.tap_scale, self.fuse), self.state_norm)
        read = torch.cat((self._normed(self._embedding[tokens].float(), self.embedding_norm), states), -1)
        gram = read.T @ read
        gram += torch.eye(len(gram)) * _RIDGE * len(read)
        self.projection.copy_(torch.linalg.solve(gram, read.T @ (final / final_sizes)).T)
        self.norm.copy_(final_sizes)
        gains = sizes[-hidden:] / sizes[-hidden:].square().mean().sqrt()
        for layer in self.own:
            for name, weight in layer.named_weights():
                if name in ("input_layernorm.weight", "post_attention_layernorm.weight"):
                    weight.mul_(gains)
                elif name in ("self_attn.o_proj.weight", "mlp.down_proj.weight"):
                    weight.zero_()

    def inputs(self, examples: Sequence[TrainingExample], device: torch.device) -> tuple[torch.Tensor, ...]:
        pad = torch.nn.utils.rnn.pad_sequence
        tokens = pad([example.chat.tokens.long() for example in examples], batch_first=True)
        tapped = pad([read_taps(e.chat.taps, self.config.hidden_size) for e in examples], batch_first=True)
        return tokens.to(device), tapped.to(device)

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        """`tokens [b, n]`, `tapped [b, n, taps * hidden]` -> `[levels, b, n, hidden]`."""
        tokens, tapped = inputs
        count = tokens.shape[1]
        cos, sin = self._rope.at(torch.arange(count + len(self.ahead)), count + len(self.ahead) - 1)
        cos, sin = cos.to(tapped.device), sin.to(tapped.device)
        states = F.linear(tapped * self.tap_scale, self.fuse)
        embedding = self._normed(self._embedding[tokens].float(), self.embedding_norm)
        embedding = F.pad(embedding, (0, 0, 0, len(self.ahead)))
        before: list[list[_Rows]] = [[] for _ in self.own]  # by layer, then by level
        levels = []
        for level in range(len(self.ahead)):
            read = (embedding[:, level + 1 : level + 1 + count], self._normed(states.float(), self.state_norm))
            hidden = F.linear(torch.cat(read, -1), self.projection)
            tables = cos[level : level + count], sin[level : level + count]
            for layer, rows in zip(self.own, before, strict=True):
                hidden = _run(layer, hidden, *tables, rows)
            states = hidden
            levels.append(self._normed(hidden.float(), self.norm))
        return torch.stack(levels)

    def scale_logits(self, scale: float) -> None:
        with torch.no_grad():
            self.norm.mul_(scale)

    def metadata(self, model: str, weight_hash: str) -> DraftMetadata:
        return DraftMetadata(model, weight_hash, 0, len(self.own), taps=self.taps)

    def weights(self) -> dict[str, torch.Tensor]:
        tensors: dict[str, torch.Tensor] = {
            FINAL_NORM: self.norm,
            EMBEDDING_NORM: self.embedding_norm,
            STATE_NORM: self.state_norm,
            TAP_SCALE: self.tap_scale,
        }
        tensors |= {FUSE: self.fuse, PROJECTION: self.projection}
        for number, layer in enumerate(self.own):
            tensors.update({f"model.layers.{number}.{name}": weight for name, weight in layer.named_weights()})
        return {name: tensor.detach() for name, tensor in tensors.items()}

    def _normed(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, weight.shape, weight, self.config.rms_norm_eps)


def _run(
    layer: DraftLayer, hidden: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, before: list[_Rows]
) -> torch.Tensor:
    """Row i of level s attends to rows 0 to i of level 0, and to rows i of levels 1 to s. Adds its keys and values to
    `before`."""
    q, k, v = layer.heads(hidden)
    q, k = rotated(q, cos, sin), rotated(k, cos, sin)
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    before.append((k, v))
    if len(before) == 1:
        return layer.rest(hidden, F.scaled_dot_product_attention(q, k, v, is_causal=True))
    (first, first_values), later = before[0], before[1:]
    scores = q @ first.transpose(-1, -2)
    count = scores.shape[-1]
    future = torch.ones(count, count, dtype=torch.bool, device=scores.device).triu(1)
    scores = scores.masked_fill(future, float("-inf"))
    own = torch.stack([(q * keys).sum(-1) for keys, _ in later], -1)
    probs = (torch.cat((scores.float(), own.float()), -1) * q.shape[-1] ** -0.5).softmax(-1).to(v.dtype)
    mixed = probs[..., :count] @ first_values
    for at, (_, values) in enumerate(later):
        mixed = mixed + probs[..., count + at, None] * values
    return layer.rest(hidden, mixed)
