"""Weights gathered in fp8: half the bytes, the same bits in every GEMM."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from warm_ranks import run_ranks

from mcore_parallel.config import DataParallelConfig, ParallelConfig
from mcore_parallel.data_parallel.ddp import DataParallel
from mcore_parallel.data_parallel.distributed_optimizer import DistributedOptimizer
from mcore_parallel.kernels.fp8_cast import cast_plain, dequantized
from mcore_parallel.mesh import ParallelContext
from mcore_parallel.optimizers.adamw import AdamW
from mcore_parallel.optimizers.config import AdamConfig
from mcore_parallel.precision.config import Fp8Config
from mcore_parallel.precision.fp8 import WeightCasts, fp8_gemms
from mcore_parallel.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear

D, F = 32, 64


class Model(nn.Module):
    def __init__(self, ctx):
        super().__init__()
        gemms = fp8_gemms(Fp8Config(fp8_format="hybrid"), ctx, WeightCasts())
        options = {"dtype": torch.bfloat16, "init_std": 0.0}
        self.up = ColumnParallelLinear(D, F, axis=ctx.tp, gemm=gemms.column, **options)
        self.down = RowParallelLinear(F, D, axis=ctx.tp, gemm=gemms.row, **options)
        self.plain = ColumnParallelLinear(D, D, **options)
        torch.manual_seed(3)
        for linear, whole in ((self.up, (F, D)), (self.down, (D, F)), (self.plain, (D, D))):
            weight = torch.randn(whole).mul(0.1)
            if linear is not self.plain:
                weight = weight.chunk(ctx.tp.size, int(linear is self.down))[ctx.tp.rank]
            linear.weight.data.copy_(weight)

    def forward(self, x):
        return self.plain(self.down(torch.tanh(self.up(x))))


def train(ctx, config, steps=3):
    """Return losses, the model, its optimizer and what each gather sent."""
    model = Model(ctx)
    data_parallel = DataParallel([model], ctx, config)
    optimizer = DistributedOptimizer(data_parallel, AdamW(AdamConfig()))
    sent, plain_gather = [], dist.all_gather_into_tensor

    def gather(out, own, **options):
        sent.append((out.dtype, out.numel()))
        return plain_gather(out, own, **options)

    losses = []
    for step in range(steps):
        torch.manual_seed(10 * step + ctx.dp.rank)
        data_parallel.zero_grad()
        x = torch.randn(16, 1, D).to(torch.bfloat16)
        loss = (model(x).float() - x.roll(1, 0)).square().mean()
        loss.backward()
        data_parallel.finish()
        dist.all_gather_into_tensor = gather
        try:
            optimizer.step(0.01, 0.1)
            data_parallel.wait_params()
        finally:
            dist.all_gather_into_tensor = plain_gather
        losses.append(loss.item())
    return losses, model, optimizer, sent


def halves(tp, overlap):
    ctx = ParallelContext.build(ParallelConfig(tensor_model_parallel_size=tp))
    options = {"use_distributed_optimizer": True, "overlap_param_gather": overlap}
    wide = train(ctx, DataParallelConfig(**options))
    losses, model, optimizer, sent = train(
        ctx, DataParallelConfig(**options, fp8_param_gather=True)
    )
    assert losses == wide[0]
    narrow = [count for dtype, count in sent if dtype == torch.uint8]
    assert sum(narrow) == 3 * 2 * F * D // tp
    assert sum(count for dtype, count in sent if dtype == torch.bfloat16) == 3 * D * D
    torch.testing.assert_close(model.plain.weight, wide[1].plain.weight, rtol=0, atol=0)
    # Main weights went on in full: what is held is their cast by the whole tensor's scale.
    for name in ("up", "down"):
        weight = getattr(model, name).weight.detach()
        expected = getattr(wide[1], name).weight.detach()
        assert not torch.equal(weight, expected)
        amax = expected.abs().amax().float().view(1)
        if tp > 1:
            dist.all_reduce(amax, dist.ReduceOp.MAX)
        fp8 = cast_plain(expected, amax, torch.float8_e4m3fn)
        held = dequantized(fp8.rows, fp8.scale_inv).to(torch.bfloat16)
        torch.testing.assert_close(weight, held, rtol=0, atol=0)
    # What a save does: all bits of the model's dtype, and the same numbers in every GEMM.
    x = torch.ones(16, 1, D, dtype=torch.bfloat16)
    seen = model(x)
    rounded = [p.detach().clone() for p in model.parameters()]
    optimizer.refresh_in_full()
    for ours, theirs in zip(model.parameters(), wide[1].parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
    torch.testing.assert_close(model(x), seen, rtol=0, atol=0)
    # What a load does: the same bits from the main weights again.
    optimizer.refresh()
    assert all(torch.equal(a, b) for a, b in zip(rounded, model.parameters(), strict=True))
    optimizer.data_parallel.check_weights()


def of_data_ranks():
    for overlap in (False, True):
        halves(1, overlap)


def of_tensor_and_data_ranks():
    halves(2, overlap=False)


def test_weights_travel_in_fp8_and_no_gemm_sees_a_difference():
    run_ranks(of_data_ranks, 2)
    run_ranks(of_tensor_and_data_ranks, 4)


def test_weights_that_travel_nowhere_are_not_cast_for_it():
    options = {"use_distributed_optimizer": True}
    ctx = ParallelContext.single("cpu")
    wide = train(ctx, DataParallelConfig(**options))
    losses, model, *_ = train(ctx, DataParallelConfig(**options, fp8_param_gather=True))
    assert losses == wide[0]
    assert all(map(torch.equal, model.parameters(), wide[1].parameters()))


def test_without_the_distributed_optimizer_there_is_no_gather():
    with pytest.raises(ValueError, match="add --use-distributed-optimizer"):
        DataParallelConfig(fp8_param_gather=True)
