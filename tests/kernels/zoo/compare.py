"""A model served in spans against transformers: tokens and hidden states, however its layers are cut.

Owns the comparisons; `report` makes a table of them. Any difference is a wrong answer, whatever its size: models are
fp32, so that what agrees agrees to 1e-4.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from tiny_models import ModelTensors, hf_greedy, hf_logits, on_transformers_layers
from transformers import PretrainedConfig

from swarm.errors import ModelError
from swarm.types import LayerSpan
from swarm_kernels.kvcache.cache import StepRequest
from swarm_kernels.kvcache.layer_transfer import LayerTransfer
from swarm_kernels.runtime.load import load_span
from swarm_kernels.runtime.span import Span
from zoo.weights import random_model

TOLERANCE = 1e-4  # relative, of fp32 hidden states and logits
ROUNDINGS = 1e-6  # relative
PROMPT, TOKENS = 37, 64
TREE = (-1, -1, 0, 0, 2, 1, 5, 6, 4)  # parents; paths as long as the windows of the zoo are not, so the prompt is


@dataclass(slots=True)
class Verdict:
    """What came of one model. `refused`: the sentence, if it is not served."""

    refused: str = ""
    fast: bool = False
    wrong: list[str] = field(default_factory=list)
    edges: list[float] = field(default_factory=list)  # maximum relative difference after each layer
    logits: float = 0.0  # likewise
    tolerance: float = TOLERANCE

    @property
    def word(self) -> str:
        return "refused" if self.refused else "WRONG" if self.wrong else "equal"


class Pieces:
    """The spans of one model, each loaded once, as chains by cuts."""

    def __init__(self, source: Any) -> None:
        self.source = source
        self._spans: dict[tuple[int, int], Span] = {}

    def span(self, start: int, end: int) -> Span:
        if (start, end) not in self._spans:
            self._spans[start, end] = load_span(self.source, LayerSpan(start, end), torch.float32)
        return self._spans[start, end]

    def chain(self, cuts: Sequence[int]) -> Chain:
        borders = (0, *cuts, self.source.config.num_layers)
        return Chain([self.span(a, b) for a, b in itertools.pairwise(borders)])


class Chain:
    """Spans with new caches, one session, and what each hop was sent so far."""

    def __init__(self, spans: list[Span]) -> None:
        self.spans = spans
        self.caches = [span.new_cache(256) for span in spans]
        self.sent: list[list[torch.Tensor]] = [[] for _ in spans]
        self.edges: list[torch.Tensor] = []  # after each span, of the last run
        for cache in self.caches:
            cache.open(b"a", 240)

    def run(self, request: StepRequest, tokens: Sequence[int]) -> torch.Tensor:
        """Logits of every row."""
        hidden = self.spans[0].embed(tokens)
        self.edges = []
        for i, span in enumerate(self.spans):
            self.sent[i].append(hidden)
            hidden = span.forward(hidden, self.caches[i].schedule([request]), self.caches[i])
            self.edges.append(hidden)
        return self.spans[-1].logits(hidden)

    def greedy(
        self, prompt: Sequence[int], count: int, disturb: Callable[[Chain, int], None] | None = None
    ) -> list[int]:
        """`count` tokens after a prompt in three chunks. `disturb` is called before each token with its number."""
        done = 0
        for size in (len(prompt) - 17, 16, 1):
            logits = self.run(StepRequest(b"a", done, size), prompt[done : done + size])
            done += size
        answer = [int(logits[-1].argmax())]
        while len(answer) < count:
            if disturb:
                disturb(self, len(answer))
            logits = self.run(StepRequest(b"a", done), answer[-1:])
            answer.append(int(logits[-1].argmax()))
            done += 1
        return answer

    def replay(self, hop: int, pieces: Pieces) -> None:
        """Lose a hop with its cache; another one with the same layers gets the inputs of all tokens again."""
        layers = self.spans[hop].layers
        self.spans[hop] = load_span(pieces.source, layers, torch.float32)
        self.caches[hop] = self.spans[hop].new_cache(256)
        self.caches[hop].open(b"a", 240)
        inputs = torch.cat(self.sent[hop])
        self.spans[hop].forward(
            inputs, self.caches[hop].schedule([StepRequest(b"a", 0, len(inputs))]), self.caches[hop]
        )

    def transfer(self, hop: int) -> None:
        """Hand a hop's keys, values and states over to another cache."""
        old, new = self.caches[hop], self.spans[hop].new_cache(256)
        new.open(b"a", 240)
        tokens = old.length(b"a")
        new.import_blocks(b"a", tokens)
        layers = self.spans[hop].layers
        source = LayerTransfer(old, layers)
        read, write = source.reader(b"a", tokens), LayerTransfer(new, layers).writer(b"a", tokens, layers)
        for layer in layers:
            for unit in range(source.units(layer, tokens)):
                write(layer, unit, read(layer, unit, 1))
        write.finish()
        self.caches[hop] = new


def all_cuts(layers: int, spans: int) -> list[tuple[int, ...]]:
    return list(itertools.combinations(range(1, layers), spans - 1))


def text(length: int, seed: int, vocabulary: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, vocabulary) for _ in range(length)]


def distance(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    if not torch.isfinite(ours).all():
        return float("inf")
    return float((ours - theirs).abs().max() / theirs.abs().max().clamp_min(1e-30))


def compare(
    config: PretrainedConfig, *, thorough: bool, stored: dict[str, Any] | None = None, general: bool = False
) -> Verdict:
    """`thorough`: greedy tokens over every cut into 1, 2 and 3 spans, trees, rollback, a kill with replay, a transfer;
    otherwise logits and hidden states of one text, and a tree. `stored`: the config.json, by default what transformers
    would save. `general`: on transformers' layers, whatever the family."""
    model = random_model(config)
    verdict = Verdict()
    try:
        source = ModelTensors(model, stored)
        if general:
            on_transformers_layers(source)
        verdict.fast = source.config.has_fast_path
        pieces = Pieces(source)
        pieces.chain(())
        verdict.tolerance = max(TOLERANCE, 2 * _own_difference(model))
        _edges(model, pieces, verdict)
        _tree(model, pieces, verdict)
        if thorough:
            _tokens(model, pieces, verdict)
            _rollback(model, pieces, verdict)
    except ModelError as error:
        verdict.refused = str(error)
    return verdict


def _vocabulary(model: Any) -> int:
    return int(model.get_input_embeddings().weight.shape[0])


@torch.inference_mode()
def _own_difference(model: Any) -> float:
    """Of the logits of transformers' own model, where layers have a state: between a text at once and token by token,
    and between embeddings and the same with noise of some roundings.

    Random weights may make such layers enlarge rounding a thousandfold, which those of attention alone do not."""
    if not {"linear_attention", "conv"} & set(getattr(model.config, "layer_types", None) or ()):
        return 0.0
    words = text(PROMPT + 40, 3, _vocabulary(model))
    found, cache, done = [], None, 0
    for size in (40, *[1] * (len(words) - 40)):
        output = model(torch.tensor([words[done : done + size]]), past_key_values=cache, use_cache=True)
        cache, done = output.past_key_values, done + size
        found.append(output.logits[0])
    embeddings = model.get_input_embeddings()(torch.tensor([words]))
    noise = torch.randn(embeddings.shape, generator=torch.Generator().manual_seed(1))
    shaken = model(inputs_embeds=embeddings * (1 + ROUNDINGS * noise), use_cache=False).logits[0]
    still = model(inputs_embeds=embeddings, use_cache=False).logits[0]
    return max(distance(torch.cat(found), hf_logits(model, words)), distance(shaken, still))


@torch.inference_mode()
def _edges(model: Any, pieces: Pieces, verdict: Verdict) -> None:
    """Hidden states after every layer, and logits, of a text longer than windows and chunks."""
    layers = pieces.source.config.num_layers
    words = text(PROMPT + 40, 3, _vocabulary(model))
    expected, logits = _hidden_states(model, words, layers)
    chain = pieces.chain(range(1, layers))
    done = 0
    outputs, edges = [], []
    for size in (40, 17, 1, 1, len(words) - 59):
        outputs.append(chain.run(StepRequest(b"a", done, size), words[done : done + size]))
        edges.append(chain.edges)
        done += size
    verdict.logits = distance(torch.cat(outputs), logits)
    for layer in range(layers):
        ours = torch.cat([part[layer] for part in edges])[:, : expected[layer].shape[1]]
        verdict.edges.append(distance(ours, expected[layer]))
    if not max(*verdict.edges, verdict.logits) <= verdict.tolerance:
        verdict.wrong.append("hidden states")


def _hidden_states(model: Any, words: Sequence[int], layers: int) -> tuple[list[torch.Tensor], torch.Tensor]:
    """transformers' hidden states `[n, hidden]` after each layer, and logits `[n, vocab]`."""
    found: list[torch.Tensor] = []

    def hook(_module: Any, _args: Any, output: Any) -> None:
        hidden = output[0] if isinstance(output, tuple) else output
        found.append((hidden[:, 0].transpose(0, 1).flatten(1) if hidden.dim() == 4 else hidden[0]).clone())

    modules = next(m for m in model.modules() if isinstance(m, torch.nn.ModuleList) and len(m) == layers)
    handles = [layer.register_forward_hook(hook) for layer in modules]
    logits = hf_logits(model, words)
    for handle in handles:
        handle.remove()
    return found, logits


def _tree(model: Any, pieces: Pieces, verdict: Verdict) -> None:
    """Every row of a tree, and of what grows on a part of it that was committed."""
    words = text(PROMPT, 5, _vocabulary(model))
    tokens = text(len(TREE), 7, _vocabulary(model))
    chain = pieces.chain((pieces.source.config.num_layers // 2,))
    chain.run(StepRequest(b"a", 0, PROMPT), words)
    first = chain.run(StepRequest(b"a", PROMPT, 0, TREE[:4], (0, 1, 2, 3)), tokens[:4])
    rest = chain.run(StepRequest(b"a", PROMPT, 0, TREE[4:], tuple(range(4, len(TREE)))), tokens[4:])
    ours = torch.cat((first, rest))
    for row in (1, 3, 7, 8):
        path, at = [], row
        while at >= 0:
            path.insert(0, tokens[at])
            at = TREE[at]
        if distance(ours[row], hf_logits(model, [*words, *path])[-1]) > verdict.tolerance:
            verdict.wrong.append("a tree")
            return
    line = chain.run(StepRequest(b"a", PROMPT, 1, commit_slots=(0, 2)), [9])
    if distance(line[0], hf_logits(model, [*words, tokens[0], tokens[2], 9])[-1]) > verdict.tolerance:
        verdict.wrong.append("a committed path")


def _tokens(model: Any, pieces: Pieces, verdict: Verdict) -> None:
    layers = pieces.source.config.num_layers
    prompt = text(PROMPT, 9, _vocabulary(model))
    expected = hf_greedy(model, prompt, TOKENS)
    for spans in (1, 2, 3):
        for cuts in all_cuts(layers, spans):
            if pieces.chain(cuts).greedy(prompt, TOKENS) != expected:
                verdict.wrong.append(f"tokens over {spans} spans")
                break
    middle = (1, layers - 1)

    def kill(chain: Chain, token: int) -> None:
        if token == 20:
            chain.replay(1, pieces)

    def transfer(chain: Chain, token: int) -> None:
        if token == 31:
            chain.transfer(1)

    if pieces.chain(middle).greedy(prompt, TOKENS, kill) != expected:
        verdict.wrong.append("tokens after a kill")
    if pieces.chain(middle).greedy(prompt, TOKENS, transfer) != expected:
        verdict.wrong.append("tokens after a transfer")


def _rollback(model: Any, pieces: Pieces, verdict: Verdict) -> None:
    words = text(60, 11, _vocabulary(model))
    chain = pieces.chain((2,))
    chain.run(StepRequest(b"a", 0, 60), words)
    for cache in chain.caches:
        cache.rollback(b"a", 41)
    again = chain.run(StepRequest(b"a", 41, 3), [5, 6, 7])
    if distance(again, hf_logits(model, [*words[:41], 5, 6, 7])[-3:]) > verdict.tolerance:
        verdict.wrong.append("after a rollback")
