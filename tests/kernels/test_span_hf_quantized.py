"""transformers' layers in 8 and 4 bits: the same tokens wherever spans end, near the model with rounded weights."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from tiny_models import Chain, ModelTensors, on_transformers_layers, tiny_model
from transformers.pytorch_utils import Conv1D
from zoo.compare import all_cuts, text
from zoo.families import FAMILIES
from zoo.shrink import LAYERS, VOCABULARY, tiny_config
from zoo.weights import random_model

from swarm.errors import CorruptModel, UnsupportedModel
from swarm.types import LayerSpan
from swarm_kernels.device.device import INT4
from swarm_kernels.kvcache.cache import StepRequest
from swarm_kernels.ops import dispatch
from swarm_kernels.ops.base.experts import Gating
from swarm_kernels.ops.cpu.cpu_experts import PackedExperts
from swarm_kernels.ops.cpu.cpu_linear import PackedLinear
from swarm_kernels.runtime.hf_linears import PackedModule
from swarm_kernels.runtime.hf_span import HfSpan
from swarm_kernels.runtime.load import load_span

BITS = pytest.mark.parametrize("dtype", [torch.int8, INT4], ids=["int8", "int4"])
MIXTURES = ("mixtral", "gpt_oss", "qwen2_moe", "qwen3_moe", "phimoe", "deepseek_v2", "deepseek_v3", "glm4_moe",
            "minimax_m2", "mimo_v2", "gemma4", "llama4")  # fmt: skip
DENSE = ("llama, partial rotary", "glm4", "cohere2", "gpt2", "gpt_neox")
WIDE = ("gemma3n, shared keys", "gemma4, shared keys")  # rows that are more than hidden states
SOME = [pytest.param(name, marks=() if name in ("mixtral", "gpt_oss", "gpt2") else pytest.mark.slow)
        for name in (*MIXTURES, *DENSE)]  # fmt: skip
NEAR = 0.05
"""Of a layer's output, in the median row: its inputs are rounded to 8 bits, at four places one after another."""


def random_source(name: str) -> tuple[Any, ModelTensors]:
    kind, changes = FAMILIES[name]
    model = random_model(tiny_config(kind, **changes))
    return model, on_transformers_layers(ModelTensors(model))


@BITS
@pytest.mark.parametrize("name", [*SOME, *WIDE])
@pytest.mark.filterwarnings("ignore")
def test_spans_may_end_anywhere(name: str, dtype: torch.dtype) -> None:
    _, source = random_source(name)
    prompt = text(30, 9, VOCABULARY)
    whole = Chain(source, (), dtype)
    expected = whole.greedy(b"a", prompt, 12, (17, 12, 1))
    pieces = {
        (a, b): load_span(source, LayerSpan(a, b), dtype) for a in range(LAYERS) for b in range(a + 1, LAYERS + 1)
    }
    for cuts in itertools.chain.from_iterable(all_cuts(LAYERS, spans) for spans in (2, 3)):
        chain = whole
        borders = (0, *cuts, LAYERS)
        chain.spans = [pieces[a, b] for a, b in itertools.pairwise(borders)]
        chain.caches = [span.new_cache(1024) for span in chain.spans]
        assert chain.greedy(b"a", prompt, 12, (17, 12, 1)) == expected


@BITS
@pytest.mark.parametrize("name", SOME)
@pytest.mark.filterwarnings("ignore")
def test_each_layer_is_near_transformers_with_the_rounded_weights(name: str, dtype: torch.dtype) -> None:
    model, source = random_source(name)
    spans = [load_span(source, LayerSpan(layer, layer + 1), dtype) for layer in range(LAYERS)]
    layers = next(m for m in model.modules() if isinstance(m, torch.nn.ModuleList) and len(m) == LAYERS)
    for index, span in enumerate(spans):
        assert isinstance(span, HfSpan)
        put_rounded_weights(span.layer(index), layers[index], 4 if dtype == INT4 else 8)
    words = text(41, 3, VOCABULARY)
    edges: list[torch.Tensor] = []
    handles = [layer.register_forward_hook(lambda _m, a, out: edges.append(first(a)[0])) for layer in layers]
    handles.append(layers[-1].register_forward_hook(lambda _m, _a, out: edges.append(first(out)[0])))
    with torch.inference_mode():
        model(torch.tensor([words]), use_cache=False)
        edges[0] = model.get_input_embeddings()(torch.tensor(words))  # what comes before the layers is the first span's
    for handle in handles:
        handle.remove()
    for span, before, after in zip(spans, edges, edges[1:], strict=False):
        cache = span.new_cache(64)
        cache.open(b"a", 64)
        got = span.forward(before, cache.schedule([StepRequest(b"a", 0, 41)]), cache)
        distances = (got - after).norm(dim=1) / (after - before).norm(dim=1)
        assert distances.median() < NEAR, (name, span.layers, distances)


def first(value: Any) -> torch.Tensor:
    tensor: torch.Tensor = value[0] if isinstance(value, tuple) else value
    return tensor


def put_rounded_weights(ours: torch.nn.Module, theirs: torch.nn.Module, bits: int) -> None:
    """Copy what our packed layers multiply with into transformers' layer."""
    for name, module in ours.named_modules():
        target = theirs.get_submodule(name)
        if isinstance(module, PackedModule):
            weight = whole(module.linear)
            target.weight.data = weight.T.contiguous() if isinstance(target, Conv1D) else weight  # type: ignore[assignment]
        elif name.endswith("kv_b_proj"):  # latent attention has absorbed it
            target.weight.data = whole(dispatch.quantize_linear(target.weight.data, bits=bits))  # type: ignore[assignment,arg-type]
        elif hasattr(module, "swarm_experts"):
            up = torch.stack([whole(linear) for linear in module.swarm_experts.first])
            down = torch.stack([whole(linear) for linear in module.swarm_experts.second])
            if not module.is_concatenated:
                up = torch.stack(up.chunk(2, 1), 2).flatten(1, 2)
            if module.is_transposed:
                up, down = up.transpose(1, 2), down.transpose(1, 2)
            target.gate_up_proj.data, target.down_proj.data = up.contiguous(), down.contiguous()


def whole(linear: dispatch.Linear) -> torch.Tensor:
    return linear.embedding_rows(torch.arange(linear.out_features))


@BITS
@pytest.mark.parametrize("name", ["mixtral", "gpt_oss", "gpt2"])
def test_batches_change_no_token_and_memory_shrinks(name: str, dtype: torch.dtype) -> None:
    _, source = random_source(name)
    prompt = text(25, 4, VOCABULARY)
    chain = Chain(source, (1,), dtype)
    expected = chain.greedy(b"a", prompt, 8)
    for session, chunks in ((b"b", (1,) * 25), (b"c", (8, 1, 16))):
        assert chain.greedy(session, prompt, 8, chunks) == expected
    wide = load_span(source, LayerSpan(0, 1), torch.bfloat16)
    assert chain.spans[0].dtype is torch.bfloat16
    assert chain.spans[0].layer_bytes < {torch.int8: 0.65, INT4: 0.45}[dtype] * wide.layer_bytes
    assert chain.spans[0].edge_bytes < wide.edge_bytes


@pytest.mark.parametrize("tied", [True, False])
def test_a_tied_embedding_is_held_once(tied: bool) -> None:
    source = ModelTensors(tiny_model("olmo2", tie_word_embeddings=tied))
    span = load_span(source, LayerSpan(0, 6), torch.int8)
    one = 131 * 96
    assert one * (1 if tied else 2) < span.edge_bytes < one * (1.3 if tied else 2.3)
    ends = [load_span(source, layers, torch.int8) for layers in (LayerSpan(0, 3), LayerSpan(3, 6))]
    ids = list(range(131))
    assert torch.equal(ends[0].embed(ids), span.embed(ids))
    hidden = span.embed([5, 6])
    assert torch.equal(ends[1].logits(hidden), span.logits(hidden))
    assert all(one < end.edge_bytes < 1.3 * one for end in ends)


def test_scaled_embeddings_stay_scaled() -> None:
    model, source = random_source("gemma3")
    wide = model.get_input_embeddings()(torch.tensor([3, 9]))
    got = load_span(source, LayerSpan(0, 1), torch.int8).embed([3, 9])
    assert (got - wide).norm() < 0.02 * wide.norm()


def modules_of(source: ModelTensors, dtype: torch.dtype, layer: int = 1) -> dict[str, torch.nn.Module]:
    span = load_span(source, LayerSpan(layer, layer + 1), dtype)
    assert isinstance(span, HfSpan)
    return dict(span.layer(layer).named_modules())


def test_routers_stay_floats_and_experts_run_on_the_compiled_op() -> None:
    for name, gating in (("qwen2_moe", Gating()), ("gpt_oss", Gating(alpha=1.702, limit=7.0, shift=1.0))):
        _, source = random_source(name)
        for dtype in (torch.int8, torch.float32, torch.bfloat16):
            modules = modules_of(source, dtype)
            experts = modules["mlp.experts"].swarm_experts.compiled
            assert isinstance(experts, PackedExperts)
            assert experts.gating == gating
        modules = modules_of(source, torch.int8)
        router = modules["mlp.gate" if name == "qwen2_moe" else "mlp.router"]
        assert next(router.parameters()).dtype is torch.float32
        assert isinstance(modules["self_attn.q_proj"], PackedModule)
    assert isinstance(modules_of(random_source("qwen2_moe")[1], INT4)["mlp.shared_expert_gate"], torch.nn.Linear)


def test_4_bits_of_a_checkpoint_are_taken_over_expert_by_expert() -> None:
    """Experts apart, as checkpoints have them: native 4 bits stay, 8 bits become 8."""
    source = apart(random_source("mixtral")[1])
    source.native = lambda name: INT4 if ".w1." in name or ".w3." in name else torch.int8  # type: ignore[method-assign]
    asked: list[str] = []
    source.as_stored = lambda name: asked.append(name)  # type: ignore[method-assign,func-returns-value]
    experts = modules_of(source, INT4)["mlp.experts"].swarm_experts
    assert {name.rsplit(".", 2)[1] for name in asked} == {"w1", "w3"} or len(asked) >= 8
    assert all(isinstance(linear, PackedLinear) for linear in (*experts.first, *experts.second))
    assert experts.first[0].nbytes < experts.first[0].out_features * experts.first[0].in_features
    assert experts.second[0].scale is not None  # 8 bits


def apart(source: ModelTensors) -> ModelTensors:
    """A mixtral source with the names and tensors that its checkpoints have."""
    for name in [name for name in source.names() if ".experts." in name]:
        tensor, prefix = source.tensor(name), name.split("mlp.experts.")[0] + "block_sparse_moe.experts"
        for expert, weight in enumerate(tensor):
            parts = {"w1": weight.chunk(2)[0], "w3": weight.chunk(2)[1]} if "gate_up" in name else {"w2": weight}
            for part, matrix in parts.items():
                source.replace(f"{prefix}.{expert}.{part}.weight", matrix.clone())
        source.forget(name)
    for name in [name for name in source.names() if ".mlp.gate." in name]:
        source.replace(name.replace("mlp.gate", "block_sparse_moe.gate"), source.tensor(name))
        source.forget(name)
    return source


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8, INT4], ids=str)
def test_experts_that_are_stored_apart_are_read_one_by_one(dtype: torch.dtype) -> None:
    _, fused = random_source("mixtral")
    _, other = random_source("mixtral")
    source = apart(other)
    words = text(20, 2, VOCABULARY)
    chains = [Chain(each, (2,), dtype) for each in (fused, source)]
    logits = []
    for chain in chains:
        chain.open(b"a")
        logits.append(chain.run([StepRequest(b"a", 0, 20)], words))
    assert torch.equal(*logits)


def test_missing_and_misshapen_experts_are_named() -> None:
    source = apart(random_source("mixtral")[1])
    name = "model.layers.1.block_sparse_moe.experts.3.w1.weight"
    kept = source.tensor(name)
    for dtype in (torch.float32, torch.int8):
        source.forget(name)
        with pytest.raises(CorruptModel):
            load_span(source, LayerSpan(1, 2), dtype)
        source.replace(name, torch.zeros(3, 5))
        with pytest.raises(CorruptModel):
            load_span(source, LayerSpan(1, 2), dtype)
        source.replace(name, kept)
    load_span(source, LayerSpan(1, 2), torch.int8)


def test_layers_that_are_mostly_neither_linear_nor_experts_are_refused() -> None:
    source = ModelTensors(random_model(tiny_config("jetmoe")))
    with pytest.raises(UnsupportedModel, match="in no linear layers; use bf16"):
        load_span(source, LayerSpan(0, 1), torch.int8)
