"""What norms and rotation leave for fp8 linears on a GPU reaches them, and changes no bit."""

from contextlib import nullcontext

import pytest
import torch

from mcore_models.config import KernelConfig, RecomputeConfig, TransformerConfig
from mcore_models.gpt import GPT
from mcore_models.kernels.rope import fused_rotary_split
from mcore_models.layers.norm import RMSNorm
from mcore_models.layers.normed_fp8 import NORMED_CAST_KERNEL
from mcore_parallel.mesh import ParallelContext
from mcore_parallel.optional_kernels import kernel_failure
from mcore_parallel.precision.config import Fp8Config
from mcore_parallel.precision.fp8 import (
    WeightCasts,
    delayed_scales,
    fp8_gemms,
    layer_gemms,
)
from mcore_parallel.precision.fp8_cast import uncast_of
from mcore_parallel.precision.fp8_recipes import Delayed
from mcore_parallel.precision.noted_largest import noted_largest
from mcore_parallel.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear

pytestmark = pytest.mark.gpu

T, D, N, G, H = 144, 528, 4, 2, 64


def look(found):
    def hook(grad):
        found.append(noted_largest(grad))
        assert found[-1] is None or found[-1] == grad.abs().max()

    return hook


def pass_through(notes, casts, recipe="tensorwise"):
    """Two steps of linear, addition, norm, linear, rotation: what was left, and all results."""
    ctx = ParallelContext.single("cuda")
    config = Fp8Config(fp8_format="hybrid", fp8_recipe=recipe)
    scales = delayed_scales(config, ctx)
    own = None if scales is None else Delayed(scales, "layer")
    gemms = fp8_gemms(config, ctx, WeightCasts(), own)
    placed = {"device": "cuda", "dtype": torch.bfloat16}
    torch.manual_seed(0)
    first = RowParallelLinear(D, D, gemm=gemms.row, **placed)
    norm = RMSNorm(D, **placed)
    second = ColumnParallelLinear(D, (N + 2 * G) * H, gemm=gemms.column, **placed)
    norm.notes_largest = notes
    angle = torch.randn(T, H // 2, device="cuda")
    left, results = [], []
    for _ in range(2):
        x = torch.randn(T, 1, D, **placed).requires_grad_()
        with nullcontext() if scales is None else scales.noting():
            branch = first(x)
            branch.register_hook(look(left))
            normed, total = norm.add_and_norm(x, branch, second.takes_uncast if casts else None)
            assert (uncast_of(normed) is not None) == casts
            left.append(noted_largest(normed))
            qkv = second(normed)
            qkv.register_hook(look(left))
            tables = angle.cos(), angle.sin()
            heads = fused_rotary_split(qkv, *tables, N, G, notes_largest=notes)
            sum(y.float().cos().sum() for y in (*heads, total)).backward()
        if scales is not None:
            scales.move_on()
        results += [*heads, total, x.grad]
    weights = first.weight, norm.weight, second.weight
    return left, results + [weight.grad for weight in weights]


def test_magnitudes_left_with_tensors_reach_the_linears_and_change_no_bit():
    without, want = pass_through(notes=False, casts=False)
    left, got = pass_through(notes=True, casts=False)
    assert without == [None] * 6
    assert not [largest for largest in left if largest is None]
    assert all(map(torch.equal, got, want))


@pytest.mark.parametrize("recipe", ["tensorwise", "delayed"])
def test_a_norm_cast_as_it_is_computed_changes_no_bit(recipe):
    assert kernel_failure(NORMED_CAST_KERNEL, torch.device("cuda"), torch.bfloat16) == ""
    _, want = pass_through(notes=False, casts=False, recipe=recipe)
    _, got = pass_through(notes=True, casts=True, recipe=recipe)
    assert all(map(torch.equal, got, want))


def train_gpt(fused, recipe, modules=()):
    """Losses of two passes through a small GPT, and all gradients."""
    ctx, config = (
        ParallelContext.single("cuda"),
        Fp8Config(fp8_format="hybrid", fp8_recipe=recipe),
    )
    scales, casts = delayed_scales(config, ctx), WeightCasts()
    recomputing = RecomputeConfig()
    if modules:
        options = {"recompute_granularity": "selective", "recompute_modules": modules}
        recomputing = RecomputeConfig(**options)
    model = GPT(
        TransformerConfig(
            num_layers=2, hidden_size=256, num_attention_heads=4, ffn_hidden_size=384
        ),
        ctx,
        vocab_size=512,
        kernels=KernelConfig(attention_backend="unfused"),
        recomputing=recomputing,
        gemms=layer_gemms(config, ctx, 2, casts, scales),
        device="cuda",
        dtype=torch.bfloat16,
    )
    for module in () if fused else model.modules():
        if isinstance(module, RMSNorm):  # whose result a hook reads
            module.register_forward_hook(lambda *_: None)
    losses = []
    for seed in range(2):
        torch.manual_seed(seed)
        ids = torch.randint(0, 512, (2, 128), device="cuda")
        with casts.keeping(), nullcontext() if scales is None else scales.noting():
            loss, _ = model.loss(model(ids)[0], ids, torch.ones(2, 128, device="cuda"))
            loss.backward()
        if scales is not None:
            scales.move_on()
        losses.append(loss.detach())
    return losses, [parameter.grad for parameter in model.parameters()]


@pytest.mark.parametrize("recipe", ["tensorwise", "delayed"])
@pytest.mark.parametrize("modules", [(), ("mlp", "core_attn")])
def test_a_model_computes_the_same_by_norms_that_its_linears_cast(recipe, modules):
    losses, grads = train_gpt(False, recipe, modules)
    own = train_gpt(True, recipe, modules)
    assert all(map(torch.equal, own[0], losses))
    for got, want in zip(own[1], grads, strict=True):
        distance = (got.double() - want.double()).norm() / want.double().norm()
        assert distance < 5e-3, distance  # atomics of other kernels add in any order
