"""An optimizer, a GEMM precision, a data-parallel engine from outside: one table entry each."""

from dataclasses import replace
from types import MappingProxyType
from typing import get_args

import pytest
import torch
from parity.case import NUM_STEPS, ROWS, LayoutCase, build_plan, train_one
from warm_ranks import run_ranks

from mcore_models.families import FAMILIES
from mcore_parallel.data_parallel.engines import ENGINES
from mcore_parallel.data_parallel.gradient_sync import Copy, GradientSync, OwnedRange
from mcore_parallel.data_parallel.grads import sum_views
from mcore_parallel.data_parallel.replica_checks import check_replicas, check_weights
from mcore_parallel.kernels.fp8_fine_cast import FineFp8
from mcore_parallel.mesh import ParallelContext
from mcore_parallel.precision.fp8 import RECIPES
from mcore_parallel.precision.fp8_recipes import Recipe
from mcore_parallel.sharding import named_parameters, shards_of
from mcore_train.assembly import Tables
from mcore_train.batches.micro_batches import train_batches
from mcore_train.checkpoints.resuming import save_run
from mcore_train.composition import FAMILY_COMMANDS, field_types
from mcore_train.config import SaveConfig
from mcore_train.layout_check.trial import build_run, fingerprint, load_folder
from mcore_train.updating.optimizers import OPTIMIZERS

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


class Rounded(Recipe):
    """Every factor of a GEMM rounded to bfloat16, and multiplied in the wide dtype."""

    multiple = 1

    def _cast(self, x, options):
        numbers, one = x.bfloat16().to(x.dtype), x.new_ones(())
        return FineFp8(numbers, one, numbers.t().contiguous(), one)

    def _matmul(self, a, b, dtype, _fast_accum):
        return (a.numbers @ b.numbers.t()).to(dtype)

    def _dequantized(self, numbers, _scales):
        return numbers


TABLES = Tables(
    optimizers={**OPTIMIZERS, "sgd": lambda _config: Lion()},
    recipes={**RECIPES, "tensorwise": Rounded},
)
NAMES = {"optimizer": "sgd", "fp8_format": "e4m3", "fp8_recipe": "tensorwise"}


def losses_of(world_size, flags):
    plan = build_plan(LayoutCase(world_size, 2 if world_size > 1 else 4, flags))
    ctx = ParallelContext.build(plan.config.parallelism)
    run = build_run(plan, ctx, ROWS, dtype=torch.float64, tables=TABLES)
    batches = train_batches(run)
    return [train_one(run, next(batches)) for _ in range(NUM_STEPS)]


def losses_of_layouts():
    return [losses_of(4, {**NAMES, **flags}) for flags in LAYOUTS]


@pytest.mark.parity_long
def test_a_toy_optimizer_and_a_toy_precision_train_alike_under_layouts():
    expected, usual = losses_of(1, NAMES), losses_of(1, {"optimizer": "sgd"})
    assert usual[0] != expected[0]
    assert usual[0] == pytest.approx(expected[0], rel=1e-2)
    for found in run_ranks(losses_of_layouts, 4, check_shapes=False):
        for losses in found:
            assert losses == pytest.approx(expected, rel=1e-10)


def test_flags_offer_what_their_tables_have():
    offered = {"optimizer": {*OPTIMIZERS}, "fp8_recipe": {*RECIPES, "delayed"}}
    for name, names in offered.items():
        assert set(get_args(field_types()[name])) == names
    shardings = get_args(field_types()["data_parallel_sharding_strategy"])
    assert {*shardings} - {""} == {*ENGINES}  # empty: as the other flags say
    assert {command.family.name for command in FAMILY_COMMANDS.values()} == {*FAMILIES}


class Plain:
    """A parameter whose gradient autograd keeps."""

    def __init__(self, named, data):
        self.named, self.data, self.members = named, data, (named,)
        self.dtype = named.parameter.dtype
        named.parameter.grad = torch.zeros_like(named.parameter)

    def owned_ranges(self):
        return [OwnedRange(self.named, 0, self.named.parameter.numel(), 0)]

    def own_weights(self):
        return self.named.parameter.detach().view(-1)

    def own_main(self):
        return None

    def own_grads(self):
        return self.named.parameter.grad.view(-1)

    def copies(self):
        yield Copy(self.named.name, self.data, self.own_weights(), True)


class SumsAtTheEnd(GradientSync):
    """Every parameter is a unit, and its gradient one all-reduce in ``finish``."""

    units, is_finished = (), False

    def __init__(self, chunks, ctx, config):
        self.ctx, self.config = ctx, config
        named = [each for chunk in chunks for each in named_parameters(chunk)]
        self.units = [Plain(each, ctx.data_axes()[each.layout.data]) for each in named[::-1]]

    def zero_grad(self):
        self.is_finished = False
        for unit in self.units:
            unit.own_grads().zero_()

    def finish(self):
        grads = [(unit.named.layout, unit.named.parameter.grad) for unit in self.units]
        parts = [(part, grad) for layout, grad in grads for part in layout.parts]
        sum_views([(part.partial, part.view(grad)) for part, grad in parts])
        sum_views([(layout.tied, grad) for layout, grad in grads])
        sum_views([(unit.data, unit.own_grads()) for unit in self.units])
        check_replicas(self.units, self.ctx)
        self.is_finished = True

    def weight_shards(self):
        weights = [(unit.named, unit.named.parameter.detach()) for unit in self.units]
        return shards_of(weights, self.ctx.data_axes())

    def check_weights(self):
        check_weights(self.units, self.ctx)


TOY_ENGINE = Tables(engines={**ENGINES, "no_shard": SumsAtTheEnd})


def train_with(is_toy, world_size, flags, folder):
    """Train, save after two steps, load that with other weights in memory, and train on."""
    plan = build_plan(LayoutCase(world_size, 2 if world_size > 1 else 4, flags))
    ctx = ParallelContext.build(plan.config.parallelism)
    run = build_run(plan, ctx, ROWS, dtype=torch.float64, tables=TOY_ENGINE if is_toy else None)
    batches = train_batches(run)
    losses = [train_one(run, next(batches)) for _ in range(2)]
    save_run(replaced(run, save=folder))
    run.data_parallel.check_weights()
    saved = fingerprint(run)
    train_one(run, next(batches))
    run = load_folder(run, folder)
    assert fingerprint(run) == saved
    batches = train_batches(run)
    return [*losses, *(train_one(run, next(batches)) for _ in range(NUM_STEPS - 2))]


def replaced(run, *, save):
    config = replace(run.plan.config, saving=SaveConfig(save=str(save)))
    return replace(run, plan=replace(run.plan, config=config))


def test_a_toy_data_parallel_engine_trains_and_saves_like_ours(tmp_path):
    expected = train_with(False, 1, {}, tmp_path / "ours")
    layouts = (
        {"tensor_model_parallel_size": 2, "sequence_parallel": True},
        {"pipeline_model_parallel_size": 2},
    )
    for place, flags in enumerate(layouts):
        folder = tmp_path / str(place)
        ranks = run_ranks(train_with, 4, True, 4, flags, folder, check_shapes=False)
        for losses in ranks:
            assert losses == pytest.approx(expected, rel=1e-10)
