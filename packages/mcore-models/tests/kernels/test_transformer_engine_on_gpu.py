"""Transformer Engine's GEMMs, norms, attention and experts on a GPU, against this package's."""

from itertools import pairwise

import pytest
import torch

from mcore_models.kernels.attention_backends import attend
from mcore_models.kernels.transformer_engine import (
    TransformerEngineAttention,
    transformer_engine_norm,
)
from mcore_models.layers.norm import LayerNorm, RMSNorm
from mcore_moe.experts.grouped_gemm import grouped_linear
from mcore_moe.experts.transformer_engine import transformer_engine_linear
from mcore_parallel.autograd.grad_slot import grad_slot
from mcore_parallel.context_parallel.packed_sequences import Documents
from mcore_parallel.optional_kernels import both_passes
from mcore_parallel.precision.delayed_scaling import DelayedScales
from mcore_parallel.precision.fp8 import Fp8Gemm, WeightCasts
from mcore_parallel.precision.fp8_recipes import Blockwise, Delayed, Tensorwise
from mcore_parallel.precision.gemm import PLAIN_GEMM
from mcore_parallel.precision.transformer_engine import by_transformer_engine, refusal
from mcore_parallel.tensor_parallel.linear import ColumnParallelLinear

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(bool(refusal()), reason=refusal() or "-"),
    pytest.mark.filterwarnings("ignore"),  # of the library's own imports
]

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
BF16 = 2e-2
T, D, F = 512, 256, 384


def draw(*shape, seed=0):
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(*shape, device="cuda", generator=generator).bfloat16()


def distance(got, want):
    return ((got.double() - want.double()).norm() / want.double().norm()).item()


def passes(gemm, grad_rows=T):
    """Output, both gradients, and the main gradient after a stale and an added pass."""
    layer = ColumnParallelLinear(D, F, device="cuda", dtype=torch.bfloat16)
    layer.gemm = gemm
    with torch.no_grad():
        layer.weight.copy_(draw(F, D, seed=1))
    x, dy = draw(grad_rows, 1, D).requires_grad_(), draw(grad_rows, 1, F, seed=2)
    y = layer(x)
    found = [y, *torch.autograd.grad(y, [x, layer.weight], dy)]
    slot = grad_slot(layer.weight)
    slot.main, slot.is_stale = torch.full((F, D), float("nan"), device="cuda"), True
    for _ in range(2):
        layer(x).backward(dy)
    return [*found, slot.main / 2]


@pytest.mark.parametrize(
    ("recipe", "grad_dtype"),
    [(Tensorwise(), E5M2), (Tensorwise(), E4M3), (Blockwise(), E4M3), (None, None)],
)
def test_linears_are_multiplied_as_here(recipe, grad_dtype):
    own = PLAIN_GEMM if recipe is None else Fp8Gemm(grad_dtype=grad_dtype, recipe=recipe)
    exact = passes(PLAIN_GEMM)
    ours, theirs = passes(own), passes(by_transformer_engine(own))
    for want, a, b in zip(exact, ours, theirs, strict=True):
        far, near = distance(b, want), distance(b, a)
        print(f"{recipe} {grad_dtype}: ours {distance(a, want):.4f}, theirs {far:.4f}")
        assert far < (
            1e-5 if want is exact[3] and recipe is None else BF16 if recipe is None else 0.07
        )
        # The same scales and roundings; sums in another order.
        assert near < (BF16 if recipe is None or isinstance(recipe, Tensorwise) else 0.06)
    if recipe is not None:  # 7 tokens fit no tensor core
        for want, b in zip(
            passes(PLAIN_GEMM, 7), passes(by_transformer_engine(own), 7), strict=True
        ):
            assert distance(b, want) < BF16


def test_delayed_scales_are_those_of_this_packages_histories():
    found = []
    for convert in (lambda gemm: gemm, by_transformer_engine):
        scales = DelayedScales(2, takes_max=True, device="cuda")
        recipe = Delayed(scales, "layer").claim(E5M2)
        gemm = convert(Fp8Gemm(grad_dtype=E5M2, recipe=recipe, casts=WeightCasts()))
        for _ in range(3):
            with scales.noting():
                results = passes(gemm)
            scales.move_on()
        found.append([*results, scales._all.history])
    for ours, theirs in zip(*found, strict=True):
        assert distance(theirs, ours) < BF16
    assert torch.equal(found[0][-1], found[1][-1])


@pytest.mark.parametrize("kind", [RMSNorm, LayerNorm])
@pytest.mark.parametrize("zero_centered", [False, True])
def test_norms_are_computed_as_here(kind, zero_centered):
    norm = kind(1024, zero_centered=zero_centered, device="cuda", dtype=torch.bfloat16)
    inputs = [draw(64, 2, 1024), *(draw(1024, seed=n) for n, _ in enumerate(norm.parameters()))]

    def run(x, *parameters):
        named = zip((name for name, _ in norm.named_parameters()), parameters, strict=True)
        return torch.func.functional_call(norm, dict(named), (x,))

    want = both_passes(run, *inputs)
    norm.kernel = transformer_engine_norm
    for got, expected in zip(both_passes(run, *inputs), want, strict=True):
        assert distance(got, expected) < BF16


@pytest.mark.parametrize(
    ("heads", "width", "rules"),
    [
        ((8, 8), (64, 64), {}),
        ((8, 2), (128, 128), {}),
        ((8, 2), (128, 128), {"window": 100}),
        ((8, 2), (64, 64), {"softcap": 20.0}),
        ((8, 8), (192, 128), {"scale": 0.05}),
        ((8, 2), (128, 128), {"documents": True}),
        ((8, 2), (128, 128), {"documents": True, "window": 40}),
    ],
)
def test_attention_is_computed_as_here(heads, width, rules, monkeypatch):
    monkeypatch.setenv("NVTE_FLASH_ATTN_V4", "0")  # as the launcher does
    if rules.get("documents"):
        rules = rules | {"documents": Documents([[0, 100, 512], [0, 311, 512]])}
    (N, G), (H, J) = heads, width
    inputs = draw(T, 2, N, H), draw(T, 2, G, H, seed=1), draw(T, 2, G, J, seed=2)
    theirs = TransformerEngineAttention()
    got = both_passes(lambda *qkv: theirs(*qkv, **rules), *inputs)
    assert all(theirs._modules.values())  # none was replaced
    wide = [t.float() for t in inputs]
    want = both_passes(lambda *qkv: attend(*qkv, **rules, backend="unfused"), *wide)
    for a, b in zip(got, want, strict=True):
        assert distance(a, b) < BF16


def test_experts_are_multiplied_as_here():
    offsets = torch.tensor([0, 100, 100, 300, 448], dtype=torch.int32, device="cuda")
    x, weight = draw(T, D), draw(4, F, D, seed=1)
    want = both_passes(lambda x, w: grouped_linear(x, w, offsets)[:448], x, weight)
    got = both_passes(lambda x, w: transformer_engine_linear(x, w, offsets)[:448], x, weight)
    for a, b in zip(got, want, strict=True):
        assert distance(a, b) < BF16
    slot = grad_slot(leaf := weight.clone().requires_grad_())
    slot.main, slot.is_stale = torch.full(weight.shape, float("nan"), device="cuda"), True
    y = transformer_engine_linear(x, leaf, offsets)
    dy = draw(T, F, seed=3)
    y.backward(dy)
    whole = torch.stack(
        [dy[a:b].float().t() @ x[a:b].float() for a, b in pairwise(offsets.tolist())]
    )
    assert distance(slot.main, whole) < 1e-5
    assert not slot.main[1].any()
