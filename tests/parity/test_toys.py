"""An optimizer and a GEMM precision from outside: one class each, and layouts hold."""

from types import MappingProxyType

import pytest
import torch
from parity.case import NUM_STEPS, LayoutCase, build_case, train_one

from mcore_parallel.data_parallel.distributed_optimizer import DistributedOptimizer
from mcore_parallel.precision.gemm import PlainGemm
from mcore_parallel.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear
from mcore_parallel.testing.ranks import run_ranks
from mcore_train.batches import train_batches

LAYOUTS = (
    {
        "tensor_model_parallel_size": 2,
        "sequence_parallel": True,
        "use_distributed_optimizer": True,
    },
    {
        "pipeline_model_parallel_size": 2,
        "context_parallel_size": 2,
        "pipeline_schedule": "zb-h1",
    },
)


class Lion:
    """Chen et al. 2023, arXiv:2302.06675: the sign of an interpolated momentum."""

    moments = MappingProxyType({"momentum": "fp32"})

    def update(
        self, main, grad, moments, parameter, *, num_steps, lr, weight_decay, grad_scale
    ):
        grad, mean = grad * grad_scale, moments["momentum"]
        direction = torch.lerp(grad, mean, 0.9).sign()
        mean.lerp_(grad, 0.01)
        main.mul_(1 - lr * weight_decay).sub_(direction, alpha=lr)
        assert parameter.data_ptr() == main.data_ptr()


class RoundedGemm(PlainGemm):
    """Every factor rounded to bfloat16 on its way into a product of the wide dtype."""

    def forward(self, x, weight, bias):
        kept = self.keep(x)
        y = kept[0] @ rounded(weight).t()
        return (y if bias is None else y + bias), kept

    def keep(self, x):
        return (rounded(x),)

    def prepare(self, grad):
        return (rounded(grad),)

    def input_grad(self, grad, weight):
        return grad[0] @ rounded(weight)


def rounded(x):
    return x.bfloat16().to(x.dtype)


def losses_of(world_size, flags):
    run = build_case(LayoutCase(world_size, 2 if world_size > 1 else 4, flags))
    run.optimizer = DistributedOptimizer(run.data_parallel, Lion())
    for chunk in run.chunks:
        for module in chunk.modules():
            if isinstance(module, ColumnParallelLinear | RowParallelLinear):
                module.gemm = RoundedGemm()
    batches = train_batches(run)
    return [train_one(run, next(batches)) for _ in range(NUM_STEPS)]


def losses_of_layouts():
    return [losses_of(4, flags) for flags in LAYOUTS]


def test_a_toy_optimizer_and_a_toy_precision_train_alike_under_layouts():
    expected = losses_of(1, {})
    plain = build_case(LayoutCase(1, 4, {}))
    batches = train_batches(plain)
    usual = [train_one(plain, next(batches)) for _ in range(NUM_STEPS)]
    assert usual[0] != expected[0]
    assert usual[0] == pytest.approx(expected[0], rel=1e-2)
    for found in run_ranks(losses_of_layouts, 4, check_shapes=False):
        for losses in found:
            assert losses == pytest.approx(expected, rel=1e-10)
