"""The tensors of a layer's mixture of experts, by what a model's files call them, and their shapes. Reads no file.

Owns the ways to store experts: a matrix each, as on hubs and in GGUF files, or all in one tensor, as in some
checkpoints and in transformers' own models.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from swarm.errors import CorruptModel
from swarm_kernels.models.config import MixtureSpec, ModelConfig

Has = Callable[[str], bool]
"""Whether a model's files have a tensor of this name."""

_BLOCKS = ("mlp", "block_sparse_moe")
_ROUTERS = ("gate", "router", "router.layer")
_CORRECTIONS = ("gate.e_score_correction_bias", "e_score_correction_bias")
_APART = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"))
_TOGETHER = (("experts.gate_up_proj", "experts.down_proj"), ("input_linear.weight", "output_linear.weight"))
_SHARED = ("shared_expert", "shared_experts")


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
