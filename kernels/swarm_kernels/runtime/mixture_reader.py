"""Mixtures of experts of compiled layers, read and packed one expert after another: whole, in part, or without the rest
of their layers.

Owns which experts are read, spans of experts alone, and the number format in which rows travel to those.
`models.tensor_shapes` knows the names, `weight_reader` the number formats. `StackedExperts` serves transformers' layers
too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from swarm.errors import CorruptModel, InvalidRequest, OutOfMemory
from swarm.types import LayerSpan
from swarm_kernels.device.allocator import release_free_memory
from swarm_kernels.models.config import MixtureSpec, ModelConfig
from swarm_kernels.models.source import ModelSource
from swarm_kernels.models.tensor_shapes import MixtureTensors, mixture_tensors
from swarm_kernels.ops import dispatch
from swarm_kernels.ops.base.experts import Gating, GatingKind
from swarm_kernels.ops.base.layer_weights import Activation, Experts, Linear
from swarm_kernels.ops.base.matrix import Matrix
from swarm_kernels.ops.base.routing import Routing, Scores
from swarm_kernels.ops.base.split_experts import HeldExperts, outputs_of
from swarm_kernels.ops.base.stored_weights import StoredWeights
from swarm_kernels.runtime.span import Progress
from swarm_kernels.runtime.weight_reader import Packs, WeightReader, packs_of


def read_mixture(
    reader: WeightReader,
    config: ModelConfig,
    spec: MixtureSpec,
    layer: int,
    packs: Packs,
    activation: Activation,
    held: HeldExperts | None = None,
) -> dispatch.Mixture:
    """Of a layer, with all its experts or those that are held. Raises CorruptModel."""
    found, hidden = mixture_tensors(spec, prefix_of(layer), reader.source.has), config.hidden_size
    bias = found.router.removesuffix("weight") + "bias"
    router = packs.wide(
        reader.wide(found.router, spec.experts, hidden), reader.vector(bias, spec.experts) if spec.router_bias else None
    )
    own = None
    if held is None or held.experts:
        own = _experts(reader, config, spec, found, packs, activation, held.experts if held else range(spec.experts))
    if held is None:
        assert own is not None
        experts: dispatch.Experts = own
    else:
        experts = dispatch.split_experts(own, held.experts, spec.experts, hidden, layer, held.elsewhere)
    return dispatch.Mixture(
        router,
        _routing(spec),
        experts,
        reader.vector(found.correction, spec.experts) if found.correction else None,
        _shared(reader, spec, found, hidden, packs, activation) if found.shared else None,
        packs.wide(reader.wide(found.shared_gate, 1, hidden), None) if found.shared_gate else None,
    )


def read_experts(
    reader: WeightReader, config: ModelConfig, layer: int, packs: Packs, experts: range
) -> dispatch.Experts:
    """Some experts of a layer that has a mixture, and nothing else of it. Raises CorruptModel."""
    spec = config.decoder
    assert spec is not None  # the caller has looked
    assert spec.mixture is not None
    found = mixture_tensors(spec.mixture, prefix_of(layer), reader.source.has)
    return _experts(reader, config, spec.mixture, found, packs, Activation[spec.activation.upper()], experts)


def prefix_of(layer: int) -> str:
    """Of its tensors' names."""
    return f"model.layers.{layer}."


def _experts(
    reader: WeightReader,
    config: ModelConfig,
    spec: MixtureSpec,
    found: MixtureTensors,
    packs: Packs,
    activation: Activation,
    experts: range,
) -> dispatch.Experts:
    read = _apart if found.are_apart else _together
    first, second = read(reader, spec, found, config.hidden_size, packs, experts)
    return dispatch.pack_experts(first, second, _gating(spec, activation))


def _apart(
    reader: WeightReader, spec: MixtureSpec, found: MixtureTensors, hidden: int, packs: Packs, experts: range
) -> tuple[list[Linear], list[Linear]]:
    first, second, width = [], [], spec.width
    for expert in experts:
        gate, up, down = (name.format(expert) for name in (found.gate, found.up, found.down))
        first.append(reader.linear([gate, up], [width, width], hidden, False, packs))
        second.append(reader.linear([down], [hidden], width, False, packs))
    return first, second


def _together(
    reader: WeightReader, spec: MixtureSpec, found: MixtureTensors, hidden: int, packs: Packs, experts: range
) -> tuple[list[Linear], list[Linear]]:
    sizes = {found.first: (2 * spec.width, hidden), found.second: (hidden, spec.width)}
    linears = []
    for name, (outputs, inputs) in sizes.items():
        stored = (inputs, outputs) if spec.interleaved else (outputs, inputs)
        stacked = StackedExperts(
            name,
            [name],
            name,
            spec.experts,
            outputs,
            inputs,
            reader.parts(name, spec.experts, *stored),
            reader.wide(f"{name}_bias", spec.experts, outputs) if spec.expert_bias else None,
            transposed=spec.interleaved,
            interleaved=spec.interleaved and name == found.first,
        )
        linears.append(stacked.packed(reader, packs, experts))
    return linears[0], linears[1]


def _shared(
    reader: WeightReader, spec: MixtureSpec, found: MixtureTensors, hidden: int, packs: Packs, activation: Activation
) -> dispatch.GatedMlp:
    width, names = spec.shared_width, [f"{found.shared}{name}.weight" for name in ("gate_proj", "up_proj")]
    gate_up = reader.linear(names, [width, width], hidden, False, packs)
    down = reader.linear([f"{found.shared}down_proj.weight"], [hidden], width, False, packs)
    return dispatch.GatedMlp(gate_up, down, activation)


def _routing(spec: MixtureSpec) -> Routing:
    scores = Scores[spec.scores.upper()]
    return Routing(spec.chosen, scores, spec.normalized, spec.epsilon, spec.scale, spec.groups, spec.used_groups)


def _gating(spec: MixtureSpec, activation: Activation) -> Gating:
    if activation is Activation.GELU_TANH:
        return Gating(GatingKind.GEGLU_TANH)
    return Gating(GatingKind.SWIGLU, *spec.gating)


@dataclass(frozen=True, slots=True)
class StackedExperts:
    """One projection of all experts. `names`: the stored tensors that it is made of; `sole`: the one that it is, or
    None; `read`: of an expert's number, its matrix as the parameter has it. `interleaved`: outputs are gates and values
    in turns, and become gates before values."""

    name: str
    names: Sequence[str]
    sole: str | None
    count: int
    outputs: int
    inputs: int
    read: Callable[[int], torch.Tensor]
    biases: torch.Tensor | None  # [count, outputs]
    transposed: bool = False
    interleaved: bool = False

    def packed(self, reader: WeightReader, packs: Packs, experts: range | None = None) -> list[Linear]:
        """All, or some `experts`. Raises CorruptModel."""
        order = _gates_first(self.outputs) if self.interleaved else None
        pack, last = reader.pack_of(packs, self.names), _LastRead()
        linears = []
        for expert in range(self.count) if experts is None else experts:
            bias = None if self.biases is None else self.biases[expert]
            bias = bias if bias is None or order is None else bias[order]
            linear = self._as_stored(reader, packs, expert, order, bias)
            if linear is None:
                matrix: Matrix = _ExpertMatrix(self, expert, order, reader.dtype, last)
                linear = pack(matrix if reader.device.type == "cpu" else matrix[:].to(reader.device), bias)
            linears.append(linear)
            release_free_memory()  # what reading an expert leaves behind adds up to a tenth of a span otherwise
        return linears

    def matrix(self, expert: int) -> torch.Tensor:
        """`[outputs, inputs]`, its outputs in the order of the files. Raises CorruptModel."""
        weight = self.read(expert)
        weight = weight.T if self.transposed else weight
        if tuple(weight.shape) != (self.outputs, self.inputs):
            raise CorruptModel(
                f"expert {expert} of {self.name} has shape {tuple(weight.shape)}, not {(self.outputs, self.inputs)}"
            )
        return weight

    def _as_stored(
        self,
        reader: WeightReader,
        packs: Packs,
        expert: int,
        order: torch.Tensor | None,
        bias: torch.Tensor | None,
    ) -> Linear | None:
        """An expert as the checkpoint holds it; None if it must be rounded."""
        if packs.stored is None or self.sole is None or not packs.keeps(reader.source.native(self.sole)):
            return None
        sole = self.sole

        def read() -> StoredWeights | None:
            weights = reader.source.as_stored(sole, expert)
            return weights if weights is None or order is None else weights.rows(order)

        weights = read()
        if weights is None:
            return None
        if weights.out_features != self.outputs or weights.padded_inputs != self.inputs:
            raise CorruptModel(
                f"expert {expert} of {sole} does not have the shape {(self.outputs, self.inputs)} of its config"
            )
        if packs.on_demand is not None:
            return packs.on_demand(read, bias, self.inputs)
        return packs.stored(weights.to(reader.device), bias, self.inputs)


@dataclass(slots=True)
class _LastRead:
    """The one expert of a projection that is in memory."""

    expert: int = -1
    weight: torch.Tensor | None = None

    def of(self, experts: StackedExperts, expert: int) -> torch.Tensor:
        if self.weight is None or self.expert != expert:
            self.weight = None  # before the next is read
            self.weight, self.expert = experts.matrix(expert), expert
        return self.weight


@dataclass(frozen=True, slots=True, eq=False)
class _ExpertMatrix:
    """A Matrix: one expert, which is read when its rows are asked for and kept until those of another one are."""

    experts: StackedExperts
    expert: int
    order: torch.Tensor | None
    to: torch.dtype | None
    last: _LastRead

    @property
    def shape(self) -> torch.Size:
        return torch.Size((self.experts.outputs, self.experts.inputs))

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    @property
    def dtype(self) -> torch.dtype:
        return self.to or self.last.of(self.experts, self.expert).dtype

    def __getitem__(self, rows: slice, /) -> torch.Tensor:
        weight = self.last.of(self.experts, self.expert)
        some = weight[rows] if self.order is None else weight[self.order[rows]]
        return some.to(self.dtype).contiguous()


def _gates_first(outputs: int) -> torch.Tensor:
    """The order of rows that alternate between gates and values."""
    return torch.arange(outputs).view(-1, 2).T.flatten()


def rows_dtype(weights: torch.dtype) -> torch.dtype:
    """In which rows travel to experts of this format without changing a bit of their outputs: what is multiplied with
    bf16 is rounded to it anyway; what is quantized to 8 bits is so from fp32."""
    return torch.bfloat16 if weights == torch.bfloat16 else torch.float32


def mixture_layers(config: ModelConfig, layers: LayerSpan) -> list[int]:
    """Those of `layers` whose MLP is a mixture of experts, on the fast path."""
    return [layer for layer in layers if config.decoder is not None and config.decoder.layers[layer].mixture]


@dataclass(frozen=True, slots=True)
class ExpertSpan:
    """Use `load.load_experts`. Calls must not overlap."""

    layers: LayerSpan
    experts: range
    hidden: int
    weight_dtype: torch.dtype
    by_layer: Mapping[int, Experts]

    @classmethod
    def load(
        cls, source: ModelSource, layers: LayerSpan, experts: range, dtype: torch.dtype, progress: Progress
    ) -> ExpertSpan:
        """See `load.load_experts`."""
        reader = WeightReader(source, dtype if dtype.is_floating_point else None, torch.device("cpu"))
        packs, found, mixtures = packs_of(dtype), {}, mixture_layers(source.config, layers)
        try:
            for layer in mixtures:
                found[layer] = read_experts(reader, source.config, layer, packs, experts)
                progress(len(found) / len(mixtures))
        except MemoryError:
            raise OutOfMemory(f"experts {experts.start}:{experts.stop} of layers {layers} do not fit") from None
        progress(1.0)
        return cls(layers, experts, source.config.hidden_size, dtype, found)

    @property
    def nbytes(self) -> int:
        return sum(experts.nbytes for experts in self.by_layer.values())

    @torch.inference_mode()
    def outputs(self, layer: int, x: torch.Tensor, rows: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        """Of expert `experts[i]` of a layer for row `rows[i]` of `x [n, hidden]`, `[pairs, hidden]` fp32. Raises
        InvalidRequest for what is not here."""
        held = self.by_layer.get(layer)
        if held is None:
            raise InvalidRequest(f"layer {layer} has no experts here; those of layers {self.layers} are")
        outside = (experts < self.experts.start) | (experts >= self.experts.stop)
        if bool(outside.any()) or bool(((rows < 0) | (rows >= len(x))).any()):
            raise InvalidRequest(f"experts {self.experts.start}:{self.experts.stop} are here, others were asked for")
        return outputs_of(held, x[rows], experts - self.experts.start)
