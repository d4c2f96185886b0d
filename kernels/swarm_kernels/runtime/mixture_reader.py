"""Reads and packs the mixture of experts of a compiled layer, one expert after another.

`models.tensor_shapes` knows the names, `weight_reader` the number formats. `StackedExperts` serves transformers' layers
too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from swarm.errors import CorruptModel
from swarm_kernels.device.allocator import release_free_memory
from swarm_kernels.models.config import MixtureSpec, ModelConfig
from swarm_kernels.models.tensor_shapes import MixtureTensors, mixture_tensors
from swarm_kernels.ops import dispatch
from swarm_kernels.ops.base.experts import Gating, GatingKind
from swarm_kernels.ops.base.layer_weights import Activation, Linear
from swarm_kernels.ops.base.matrix import Matrix
from swarm_kernels.ops.base.routing import Routing, Scores
from swarm_kernels.ops.base.stored_weights import StoredWeights
from swarm_kernels.runtime.weight_reader import Packs, WeightReader


def read_mixture(
    reader: WeightReader, config: ModelConfig, spec: MixtureSpec, prefix: str, packs: Packs, activation: Activation
) -> dispatch.Mixture:
    """Of the layer with this prefix ("model.layers.3."). Raises CorruptModel."""
    found, hidden = mixture_tensors(spec, prefix, reader.source.has), config.hidden_size
    bias = found.router.removesuffix("weight") + "bias"
    router = packs.wide(
        reader.wide(found.router, spec.experts, hidden), reader.vector(bias, spec.experts) if spec.router_bias else None
    )
    first, second = (
        _apart(reader, spec, found, hidden, packs) if found.are_apart else _together(reader, spec, found, hidden, packs)
    )
    return dispatch.Mixture(
        router,
        _routing(spec),
        dispatch.pack_experts(first, second, _gating(spec, activation)),
        reader.vector(found.correction, spec.experts) if found.correction else None,
        _shared(reader, spec, found, hidden, packs, activation) if found.shared else None,
        packs.wide(reader.wide(found.shared_gate, 1, hidden), None) if found.shared_gate else None,
    )


def _apart(
    reader: WeightReader, spec: MixtureSpec, found: MixtureTensors, hidden: int, packs: Packs
) -> tuple[list[Linear], list[Linear]]:
    first, second, width = [], [], spec.width
    for expert in range(spec.experts):
        gate, up, down = (name.format(expert) for name in (found.gate, found.up, found.down))
        first.append(reader.linear([gate, up], [width, width], hidden, False, packs))
        second.append(reader.linear([down], [hidden], width, False, packs))
    return first, second


def _together(
    reader: WeightReader, spec: MixtureSpec, found: MixtureTensors, hidden: int, packs: Packs
) -> tuple[list[Linear], list[Linear]]:
    sizes = {found.first: (2 * spec.width, hidden), found.second: (hidden, spec.width)}
    linears = []
    for name, (outputs, inputs) in sizes.items():
        stored = (inputs, outputs) if spec.interleaved else (outputs, inputs)
        experts = StackedExperts(
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
        linears.append(experts.packed(reader, packs))
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

    def packed(self, reader: WeightReader, packs: Packs) -> list[Linear]:
        """Raises CorruptModel."""
        order = _gates_first(self.outputs) if self.interleaved else None
        pack, last = reader.pack_of(packs, self.names), _LastRead()
        linears = []
        for expert in range(self.count):
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
