"""The tensors of a decoder on the fast path, and their shapes. Owns Hugging Face's names for them, and the ways
to store experts: a matrix each, as on hubs and in GGUF files, or all in one tensor. Reads no file."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

from swarm.errors import CorruptModel
from swarm_kernels.models.config import DecoderSpec, MixtureSpec, ModelConfig

SINKS = "self_attn.sinks"

Has = Callable[[str], bool]
"""Whether a model's files have a tensor of this name."""

_BLOCKS = ("mlp", "block_sparse_moe")
_ROUTERS = ("gate", "router", "router.layer")
_CORRECTIONS = ("gate.e_score_correction_bias", "e_score_correction_bias")
_APART = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"))
_TOGETHER = (("experts.gate_up_proj", "experts.down_proj"), ("input_linear.weight", "output_linear.weight"))
_SHARED = ("shared_expert", "shared_experts")


class _Shaped(Protocol):
    @property
    def shape(self) -> tuple[int, ...]: ...


@dataclass(frozen=True, slots=True)
class LinearTensors:
    """One of a layer's linear layers: the projections it stacks by output, and their biases."""

    names: tuple[str, ...]  # within the layer, without ".weight"
    rows: tuple[int, ...]  # of each
    columns: int
    bias: bool


def layer_linears(config: ModelConfig, layer: int) -> dict[str, LinearTensors]:
    """By the fields of `layer_weights.Attention`, and of `GatedMlp` where the layer has no mixture of experts. The
    config has a fast path."""
    c, spec = config, _spec(config)
    queries, keys, inner = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim, c.intermediate_size
    hidden = c.hidden_size
    if spec.fused:
        qkv = LinearTensors(("self_attn.qkv_proj",), (queries + 2 * keys,), hidden, c.qkv_bias)
        gate_up = LinearTensors(("mlp.gate_up_proj",), (2 * inner,), hidden, c.mlp_bias)
    else:
        names = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
        qkv = LinearTensors(names, (queries, keys, keys), hidden, c.qkv_bias)
        gate_up = LinearTensors(("mlp.gate_proj", "mlp.up_proj"), (inner, inner), hidden, c.mlp_bias)
    linears = {"qkv": qkv, "o": LinearTensors(("self_attn.o_proj",), (hidden,), queries, c.o_bias)}
    if not spec.layers[layer].mixture:
        linears |= {"gate_up": gate_up, "down": LinearTensors(("mlp.down_proj",), (hidden,), inner, c.mlp_bias)}
    return linears


def layer_norms(config: ModelConfig) -> dict[str, tuple[str, int]]:
    """Names within the layer, without ".weight", and sizes, by the fields of `layer_weights.LayerWeights` and
    `Attention`. The config has a fast path."""
    c, spec = config, _spec(config)
    names = spec.norms
    found = {
        "attn_norm": names.attn, "attn_post_norm": names.attn_post, "mlp_norm": names.mlp,
        "mlp_post_norm": names.mlp_post,
    }  # fmt: skip
    sizes = {field: (name, c.hidden_size) for field, name in found.items() if name}
    if c.qk_norm:
        queries, keys = (c.num_heads, c.num_kv_heads) if spec.whole_qk_norm else (1, 1)
        sizes["q_norm"] = "self_attn.q_norm", queries * c.head_dim
        sizes["k_norm"] = "self_attn.k_norm", keys * c.head_dim
    return sizes


def _spec(config: ModelConfig) -> DecoderSpec:
    assert config.decoder is not None  # it has a fast path
    return config.decoder


def check_shapes(config: ModelConfig, tensors: Mapping[str, _Shaped], where: str) -> None:
    """Check the weights against the config. Raises CorruptModel naming the first mismatch.

    Models outside the fast path have other tensor names and are checked when they are loaded.
    """
    if not config.has_fast_path:
        return
    for name, shape in expected_shapes(config, tensors.__contains__):
        if name not in tensors:
            raise CorruptModel(f"{where} has no tensor '{name}'; fetch the model again")
        if tensors[name].shape != shape:
            found = list(tensors[name].shape)
            raise CorruptModel(f"{where}: '{name}' has the shape {found}, but its config needs {list(shape)}")


def expected_shapes(c: ModelConfig, has: Has) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes of all tensors; the config has a fast path. `has`: which names the files have for experts.
    Raises CorruptModel for experts that they do not have."""
    yield "model.embed_tokens.weight", (c.vocab_size, c.hidden_size)
    yield "model.norm.weight", (c.hidden_size,)
    if not c.tie_word_embeddings:
        yield "lm_head.weight", (c.vocab_size, c.hidden_size)
    spec, norms = _spec(c), layer_norms(c).values()
    for layer in range(c.num_layers):
        prefix = f"model.layers.{layer}."
        for name, size in norms:
            yield f"{prefix}{name}.weight", (size,)
        for linear in layer_linears(c, layer).values():
            for name, rows in zip(linear.names, linear.rows, strict=True):
                yield f"{prefix}{name}.weight", (rows, linear.columns)
                if linear.bias:
                    yield f"{prefix}{name}.bias", (rows,)
        if spec.sinks:
            yield f"{prefix}{SINKS}", (c.num_heads,)
        if spec.mixture is not None and spec.layers[layer].mixture:
            yield from mixture_shapes(c, spec.mixture, mixture_tensors(spec.mixture, prefix, has))


@dataclass(frozen=True, slots=True)
class MixtureTensors:
    """Names of whole tensors. Of experts that are stored apart, `gate`, `up` and `down` have "{}" for their number;
    `first` and `second` are tensors of all experts. One of the two is given."""

    router: str
    correction: str = ""
    gate: str = ""
    up: str = ""
    down: str = ""
    first: str = ""
    second: str = ""
    shared: str = ""  # before "gate_proj" and so on
    shared_gate: str = ""

    @property
    def are_apart(self) -> bool:
        return not self.first


def mixture_tensors(spec: MixtureSpec, prefix: str, has: Has) -> MixtureTensors:
    """Of the layer with this prefix ("model.layers.3."). Raises CorruptModel for one that the files do not have."""

    def find(what: str, *names: str) -> str:
        found = next((name for name in names if has(name)), None)
        if found is None:
            raise CorruptModel(f"the model's files hold no {what} for {prefix}mlp; fetch the model again")
        return found

    router = find("router", *(f"{prefix}{block}.{name}.weight" for block in _BLOCKS for name in _ROUTERS))
    block = prefix + router.removeprefix(prefix).split(".", 1)[0]
    names: dict[str, str] = {}
    apart = [three for three in _APART if has(f"{block}.experts.0.{three[0]}.weight")]
    if apart:
        for field, name in zip(("gate", "up", "down"), apart[0], strict=True):
            names[field] = f"{block}.experts.{{}}.{name}.weight"
    else:
        first = find("experts", *(f"{block}.{two[0]}" for two in _TOGETHER))
        names["first"] = first
        names["second"] = next(f"{block}.{two[1]}" for two in _TOGETHER if first == f"{block}.{two[0]}")
    if spec.correction:
        names["correction"] = find("correction of scores", *(f"{block}.{name}" for name in _CORRECTIONS))
    if spec.shared_width:
        shared = find("shared expert", *(f"{block}.{name}.gate_proj.weight" for name in _SHARED))
        names["shared"] = shared.removesuffix("gate_proj.weight")
    if spec.shared_gate:
        names["shared_gate"] = f"{block}.shared_expert_gate.weight"
    return MixtureTensors(router, **names)


def mixture_shapes(
    config: ModelConfig, spec: MixtureSpec, found: MixtureTensors
) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes of all its tensors."""
    hidden, width, count = config.hidden_size, spec.width, spec.experts
    yield found.router, (count, hidden)
    if spec.router_bias:
        yield found.router.removesuffix("weight") + "bias", (count,)
    if found.correction:
        yield found.correction, (count,)
    if found.are_apart:
        for expert in range(count):
            yield found.gate.format(expert), (width, hidden)
            yield found.up.format(expert), (width, hidden)
            yield found.down.format(expert), (hidden, width)
    else:
        first, second = (2 * width, hidden), (hidden, width)
        yield found.first, (count, *(reversed(first) if spec.interleaved else first))
        yield found.second, (count, *(reversed(second) if spec.interleaved else second))
        if spec.expert_bias:
            yield f"{found.first}_bias", (count, 2 * width)
            yield f"{found.second}_bias", (count, hidden)
    if found.shared:
        yield f"{found.shared}gate_proj.weight", (spec.shared_width, hidden)
        yield f"{found.shared}up_proj.weight", (spec.shared_width, hidden)
        yield f"{found.shared}down_proj.weight", (hidden, spec.shared_width)
    if found.shared_gate:
        yield found.shared_gate, (1, hidden)
