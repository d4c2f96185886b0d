"""Layers with a mixture of experts: routing against transformers' routers, the compiled layer against plain torch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from kernel_cases import random_blocks, take_rows
from test_ops_experts import packed_by
from test_ops_layer import Shape, batch, compiled, random_layer, rotary

from swarm.errors import KernelError
from swarm_kernels.device.device import INT4
from swarm_kernels.ops import dispatch
from swarm_kernels.ops.base.experts import Gating
from swarm_kernels.ops.base.layer_weights import GatedMlp, LayerWeights, Linear, Mixture, plain_linear
from swarm_kernels.ops.base.routing import Routing, Scores
from swarm_kernels.ops.base.torch_reference import decoder_layer

HIDDEN, WIDTH, SHARED, COUNT = 128, 40, 48, 12
SHAPE = Shape(HIDDEN, 4, 2, 32, 256)
ROUTINGS: dict[str, Routing] = {
    "qwen": Routing(3),
    "qwen, normalized": Routing(3, normalized=True),
    "gpt-oss": Routing(4, Scores.SOFTMAX_OF_CHOSEN),
    "minimax": Routing(2, Scores.SIGMOID, normalized=True),
    "glm": Routing(4, Scores.SIGMOID, True, 1e-20, scale=2.5, groups=4, used_groups=2),
    "all": Routing(COUNT, normalized=True),
    "one": Routing(1),
}
CORRECTED = ("minimax", "glm")
DTYPES = [torch.float32, torch.bfloat16, torch.int8, INT4]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.int8: 1e-2, INT4: 1e-2}


def mixture_layer(
    routing: Routing, dtype: torch.dtype, *, corrected: bool = False, shared: str = "", ties: bool = False
) -> LayerWeights:
    """Attention in fp32, so that rounding before the router sends no row elsewhere. `shared`: "", plain or gated."""
    generator = torch.Generator().manual_seed(5)
    layer, _ = random_layer(SHAPE, torch.float32, generator)

    def weight(outputs: int, inputs: int) -> torch.Tensor:
        return torch.randn(outputs, inputs, generator=generator) / inputs**0.5

    def linear(outputs: int, inputs: int) -> Linear:
        return packed_by(dtype, weight(outputs, inputs), torch.randn(outputs, generator=generator) * 0.3)

    router = 3 * weight(COUNT, HIDDEN)
    bias = torch.randn(COUNT, generator=generator) * 0.1
    if ties:
        router[1::2], bias[1::2] = router[::2], bias[::2]
    first = [linear(2 * WIDTH, HIDDEN) for _ in range(COUNT)]
    second = [linear(HIDDEN, WIDTH) for _ in range(COUNT)]
    correction = torch.randn(COUNT, generator=generator) * 0.2
    if ties:
        correction[1::2] = correction[::2]
    mixture = Mixture(
        dispatch.pack_linear(router, bias),
        routing,
        dispatch.pack_experts(first, second, Gating(alpha=1.702, limit=1.5, shift=1.0)),
        correction if corrected else None,
        GatedMlp(linear(2 * SHARED, HIDDEN), linear(HIDDEN, SHARED)) if shared else None,
        dispatch.pack_linear(weight(1, HIDDEN)) if shared == "gated" else None,
    )
    return replace(layer, mlp=mixture)


class Rows:
    """A batch for a layer, and what a layer makes of it."""

    def __init__(self, seed: int = 11) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.plan, blocks = batch(generator)
        self.blocks = random_blocks(blocks, SHAPE.kv_heads, SHAPE.dim, torch.float32, generator)
        self.hidden = torch.randn(self.plan.rows, HIDDEN, generator=generator)

    def run(self, layer: LayerWeights, run: Any, rows: list[int] | None = None) -> torch.Tensor:
        plan = self.plan if rows is None else take_rows(self.plan, rows)
        hidden = self.hidden if rows is None else self.hidden[rows]
        assert compiled(layer, *self.blocks)
        out: torch.Tensor = run(hidden, layer, *rotary(plan, SHAPE), *self.blocks, plan)
        return out


def check_both_agree(layer: LayerWeights, dtype: torch.dtype, rows: Rows) -> torch.Tensor:
    ours, theirs = rows.run(layer, dispatch.decoder_layer), rows.run(layer, decoder_layer)
    distances = (ours - theirs).norm(dim=-1) / theirs.norm(dim=-1)
    assert distances.max() < TOLERANCE[dtype], distances
    return ours


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ROUTINGS)
def test_a_compiled_mixture_is_that_of_plain_torch(isa: str, name: str, dtype: torch.dtype) -> None:
    layer = mixture_layer(ROUTINGS[name], dtype, corrected=name in CORRECTED)
    check_both_agree(layer, dtype, Rows())


@pytest.mark.parametrize("shared", ["plain", "gated"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_shared_experts(isa: str, dtype: torch.dtype, shared: str) -> None:
    rows, routing = Rows(), ROUTINGS["qwen"]
    out = check_both_agree(mixture_layer(routing, dtype, shared=shared), dtype, rows)
    others = [mixture_layer(routing, dtype, shared=other) for other in ("", "plain", "gated") if other != shared]
    assert all((out - rows.run(other, dispatch.decoder_layer)).norm() > 0.01 * out.norm() for other in others)


def test_norms_and_scales_around_a_mixture(isa: str) -> None:
    layer = mixture_layer(ROUTINGS["qwen"], torch.float32)
    norm = torch.rand(HIDDEN, generator=torch.Generator().manual_seed(3)) + 0.5
    for changes in ({"residual_scale": 0.3}, {"mlp_post_norm": norm}, {"mlp_norm": None, "mlp_post_norm": norm}):
        check_both_agree(replace(layer, **changes), torch.float32, Rows())


@pytest.mark.parametrize("name", ROUTINGS)
def test_of_experts_that_are_as_good_the_first_is_taken(isa: str, name: str) -> None:
    """Experts of even number and the next have the same router, and other weights."""
    layer = mixture_layer(ROUTINGS[name], torch.float32, corrected=name in CORRECTED, ties=True)
    check_both_agree(layer, torch.float32, Rows())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ["qwen", "glm"])
def test_rows_do_not_depend_on_each_other_or_on_threads(isa: str, name: str, dtype: torch.dtype) -> None:
    layer, rows = mixture_layer(ROUTINGS[name], dtype, corrected=name in CORRECTED, shared="gated"), Rows()
    together = rows.run(layer, dispatch.decoder_layer)
    for count in (1, 2, 3):
        dispatch.set_threads(count)
        assert torch.equal(rows.run(layer, dispatch.decoder_layer), together)
        for row in range(0, rows.plan.rows, 9):
            assert torch.equal(rows.run(layer, dispatch.decoder_layer, [row])[0], together[row])


def test_a_row_that_is_no_number_spoils_no_other(isa: str) -> None:
    for name, routing in ROUTINGS.items():
        layer, rows = mixture_layer(routing, torch.int8, corrected=name in CORRECTED, shared="gated"), Rows()
        expected = rows.run(layer, dispatch.decoder_layer)
        rows.hidden[4, 7] = float("nan")
        out = rows.run(layer, dispatch.decoder_layer)
        assert out[4].isnan().any()
        of_others = rows.plan.sequence_index != rows.plan.sequence_index[4]
        assert torch.equal(out[of_others], expected[of_others])


def test_layers_with_a_mixture_and_without_make_a_stack(isa: str) -> None:
    rows = Rows()
    mixed = mixture_layer(ROUTINGS["glm"], torch.bfloat16, corrected=True, shared="plain")
    dense, _ = random_layer(SHAPE, torch.bfloat16, torch.Generator().manual_seed(9))
    layers = [dense, mixed, dense]
    caches = [tuple(part.clone() for part in rows.blocks) for _ in layers]
    cos, sin = rotary(rows.plan, SHAPE)
    out = dispatch.decoder_layers(rows.hidden, layers, cos, sin, caches, rows.plan)  # type: ignore[arg-type]
    hidden = rows.hidden
    for layer, (k_blocks, v_blocks) in zip(layers, (rows.blocks,) * 3, strict=True):
        hidden = dispatch.decoder_layer(hidden, layer, cos, sin, k_blocks.clone(), v_blocks.clone(), rows.plan)
    assert torch.equal(out, hidden)


# --- routing --------------------------------------------------------------------------------------------------------


def _router(kind: str, module: str, config: dict[str, Any]) -> Any:
    import importlib

    from transformers import AutoConfig

    sizes = {"hidden_size": HIDDEN, "num_experts_per_tok": 4, **config}
    modeling = importlib.import_module(f"transformers.models.{kind}.modeling_{kind}")
    router = getattr(modeling, module)(AutoConfig.for_model(kind, **sizes))
    generator = torch.Generator().manual_seed(2)
    for tensor in (*router.parameters(), *router.buffers()):
        tensor.data.normal_(0, 0.3, generator=generator)
    return router


THEIRS: dict[str, tuple[str, str, dict[str, Any], Routing]] = {
    "qwen3": ("qwen3_moe", "Qwen3MoeTopKRouter", {"num_experts": COUNT, "norm_topk_prob": True},
              Routing(4, normalized=True)),
    "qwen2": ("qwen2_moe", "Qwen2MoeTopKRouter", {"num_experts": COUNT, "norm_topk_prob": False}, Routing(4)),
    "mixtral": ("mixtral", "MixtralTopKRouter", {"num_local_experts": COUNT}, Routing(4, normalized=True)),
    "gpt-oss": ("gpt_oss", "GptOssTopKRouter", {"num_local_experts": COUNT}, Routing(4, Scores.SOFTMAX_OF_CHOSEN)),
    "granite": ("granitemoe", "GraniteMoeTopKRouter", {"num_local_experts": COUNT},
                Routing(4, Scores.SOFTMAX_OF_CHOSEN)),
    "glm": ("glm4_moe", "Glm4MoeTopkRouter",
            {"n_routed_experts": COUNT, "n_group": 3, "topk_group": 2, "routed_scaling_factor": 1.7},
            Routing(4, Scores.SIGMOID, True, 1e-20, 1.7, 3, 2)),
    "minimax": ("minimax_m2", "MiniMaxM2TopKRouter", {"num_local_experts": COUNT},
                Routing(4, Scores.SIGMOID, normalized=True)),
}  # fmt: skip


@pytest.mark.parametrize("name", THEIRS)
def test_routing_is_that_of_the_families_own_routers(name: str) -> None:
    kind, module, config, routing = THEIRS[name]
    router = _router(kind, module, config)
    x = torch.randn(64, HIDDEN, generator=torch.Generator().manual_seed(1))
    correction = getattr(router, "e_score_correction_bias", None)
    arguments = [x]
    if name == "minimax":
        correction = torch.randn(COUNT, generator=torch.Generator().manual_seed(4)) * 0.3
        arguments.append(correction)
    with torch.inference_mode():
        logits, their_scores, their_index = router(*arguments)
        index, scores = routing(logits, correction)
    order = their_scores.argsort(-1, descending=True) if correction is None else None
    if order is None:  # theirs are in no order: compare by expert
        theirs = torch.zeros(64, COUNT).scatter_(1, their_index, their_scores)
        assert torch.equal(torch.zeros(64, COUNT).scatter_(1, index, 1.0), (theirs != 0).float())
        torch.testing.assert_close(torch.zeros(64, COUNT).scatter_(1, index, scores), theirs)
    else:
        assert torch.equal(index, their_index)
        torch.testing.assert_close(scores, their_scores)


def test_routings_and_mixtures_that_cannot_be_are_refused() -> None:
    layer = mixture_layer(ROUTINGS["qwen"], torch.float32, shared="gated")
    mixture, rows = layer.mlp, Rows()
    assert isinstance(mixture, Mixture)
    narrow = plain_linear(torch.zeros(COUNT, 8))
    for changes in (
        {"routing": Routing(COUNT + 1)},
        {"routing": Routing(0)},
        {"routing": Routing(2, groups=5, used_groups=1)},
        {"routing": Routing(2, groups=4, used_groups=5)},
        {"routing": Routing(4, groups=4, used_groups=1)},
        {"routing": Routing(1, groups=COUNT, used_groups=1)},
        {"router": narrow},
        {"router": plain_linear(torch.zeros(COUNT - 1, HIDDEN))},
        {"correction": torch.zeros(COUNT - 1)},
        {"shared_gate": narrow},
        {"shared": GatedMlp(plain_linear(torch.zeros(64, HIDDEN)), plain_linear(torch.zeros(HIDDEN, 16)))},
    ):
        broken = replace(layer, mlp=replace(mixture, **changes))
        with pytest.raises(KernelError, match=r"cannot be chosen|do not fit|correction of scores"):
            dispatch.decoder_layer(rows.hidden, broken, *rotary(rows.plan, SHAPE), *rows.blocks, rows.plan)


def test_mixtures_whose_shared_expert_has_an_odd_width_run_in_plain_torch(isa: str) -> None:
    layer, rows = mixture_layer(ROUTINGS["qwen"], torch.float32), Rows()
    mixture = layer.mlp
    assert isinstance(mixture, Mixture)
    generator = torch.Generator().manual_seed(8)
    up, down = torch.randn(2 * 20, HIDDEN, generator=generator), torch.randn(HIDDEN, 20, generator=generator)
    odd = replace(mixture, shared=GatedMlp(dispatch.pack_linear(up), dispatch.pack_linear(down)))
    odd_layer = replace(layer, mlp=odd)
    assert not compiled(odd_layer, *rows.blocks)
    cos, sin = rotary(rows.plan, SHAPE)
    ours = dispatch.decoder_layer(rows.hidden, odd_layer, cos, sin, *(p.clone() for p in rows.blocks), rows.plan)
    theirs = decoder_layer(rows.hidden, odd_layer, cos, sin, *(p.clone() for p in rows.blocks), rows.plan)
    assert torch.equal(ours, theirs)
