"""The optimizer: against torch's AdamW, in every dtype, sharded, saved, loaded and refused."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from warm_ranks import run_ranks

from mcore_parallel.autograd.grad_slot import grad_slot
from mcore_parallel.config import DataParallelConfig, ParallelConfig
from mcore_parallel.data_parallel.ddp import DataParallel
from mcore_parallel.data_parallel.distributed_optimizer import (
    DistributedOptimizer,
)
from mcore_parallel.data_parallel.optimizer_segments import has_weight_decay
from mcore_parallel.mesh import ParallelContext
from mcore_parallel.optimizers.adamw import AdamW
from mcore_parallel.optimizers.config import AdamConfig, SGDConfig
from mcore_parallel.optimizers.sgd import SGD
from mcore_parallel.sharding import (
    ParamLayout,
    Part,
    named_parameters,
    named_shards,
    whole_layout,
)
from mcore_parallel.testing.ranks import gather_logical

SHARDED = DataParallelConfig(use_distributed_optimizer=True)


def small_model(dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.LayerNorm(7), nn.Linear(7, 3)).to(dtype)


def wrapped(model, config=SHARDED, adam=None, ctx=None):
    ctx = ctx or ParallelContext.single()
    data_parallel = DataParallel([model], ctx, config)
    return data_parallel, DistributedOptimizer(data_parallel, AdamW(adam or AdamConfig()))


def backward(model, step, rank=0):
    generator = torch.Generator().manual_seed(10 * step + rank)
    dtype = next(model.parameters()).dtype
    x = torch.randn(6, 5, generator=generator).to(dtype)
    model(x).square().sum().backward()


def adamw_by_hand(parameters, moments, step, lr, weight_decay, adam):
    """Algorithm 2 of Loshchilov and Hutter, one tensor at a time."""
    for parameter, (mean, square) in zip(parameters, moments, strict=True):
        gradient = parameter.grad
        mean.mul_(adam.adam_beta1).add_(gradient, alpha=1 - adam.adam_beta1)
        square.mul_(adam.adam_beta2).add_(gradient**2, alpha=1 - adam.adam_beta2)
        mean_hat = mean / (1 - adam.adam_beta1 ** (step + 1))
        square_hat = square / (1 - adam.adam_beta2 ** (step + 1))
        decay = weight_decay if parameter.dim() > 1 else 0.0
        update = mean_hat / (square_hat.sqrt() + adam.adam_eps) + decay * parameter.detach()
        parameter.data.sub_(update, alpha=lr)


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)]
)
def test_one_rank_is_adamw_of_the_paper(dtype, tolerance):
    model, reference = small_model(dtype), small_model(dtype)
    moments = [[torch.zeros_like(p) for _ in range(2)] for p in reference.parameters()]
    adam = AdamConfig(adam_beta1=0.8, adam_beta2=0.95, adam_eps=1e-6)
    data_parallel, optimizer = wrapped(model, adam=adam)
    for step in range(4):
        data_parallel.zero_grad()
        backward(model, step)
        data_parallel.finish()
        optimizer.step(0.02, 0.3)
        reference.zero_grad()
        backward(reference, step)
        adamw_by_hand(reference.parameters(), moments, step, 0.02, 0.3, adam)
    for found, expected in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_sgd_is_that_of_torch(momentum):
    model, reference = small_model(torch.float64), small_model(torch.float64)
    data_parallel = DataParallel([model], ParallelContext.single(), SHARDED)
    optimizer = DistributedOptimizer(data_parallel, SGD(SGDConfig(sgd_momentum=momentum)))
    decayed, others = reference[::2], reference[1]
    weights = [layer.weight for layer in decayed]
    rest = [*[layer.bias for layer in decayed], *others.parameters()]
    groups = [{"params": weights, "weight_decay": 0.3}, {"params": rest}]
    torch_sgd = torch.optim.SGD(groups, lr=0.02, momentum=momentum)
    for step in range(3):
        data_parallel.zero_grad()
        backward(model, step)
        data_parallel.finish()
        optimizer.step(0.02, 0.3, torch.tensor(0.5))
        torch_sgd.zero_grad()
        backward(reference, step)
        for parameter in reference.parameters():
            parameter.grad *= 0.5
        torch_sgd.step()
    for found, expected in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)
    kinds = {name.split(".")[0] for name in optimizer.named_shards()}
    assert kinds == ({"momentum"} if momentum else set())


def test_half_precision_weights_follow_float32_main_weights():
    model, exact = small_model(torch.bfloat16), small_model(torch.bfloat16).float()
    moments = [[torch.zeros_like(p) for _ in range(2)] for p in exact.parameters()]
    data_parallel, optimizer = wrapped(model)
    lr = 1e-4  # so small that bfloat16 weights alone would never move
    for step in range(8):
        data_parallel.zero_grad()
        backward(model, step)
        data_parallel.finish()
        for p, q in zip(model.parameters(), exact.parameters(), strict=True):
            q.grad = grad_slot(p).main.clone()
        optimizer.step(lr, 0.0)
        adamw_by_hand(exact.parameters(), moments, step, lr, 0.0, AdamConfig())
    main = gather_logical(
        {n: s for n, s in optimizer.named_shards().items() if n.startswith("main.")},
        ParallelContext.single().world,
    )
    for name, expected in exact.named_parameters():
        torch.testing.assert_close(main[f"main.{name}"], expected, rtol=1e-6, atol=1e-7)
        compute = dict(model.named_parameters())[name]
        assert torch.equal(compute, main[f"main.{name}"].bfloat16())


def test_float32_weights_are_their_own_main_weights():
    _, optimizer = wrapped(small_model())
    kinds = {name.split(".")[0] for name in optimizer.named_shards()}
    assert kinds == {"exp_avg", "exp_avg_sq"}


def test_moments_may_be_kept_in_half_precision():
    adam = AdamConfig(adam_beta2=0.95, exp_avg_dtype="bf16", exp_avg_sq_dtype="bf16")
    trained = []
    for options in (adam, AdamConfig(adam_beta2=0.95)):
        model = small_model(torch.bfloat16)
        data_parallel, optimizer = wrapped(model, adam=options)
        for step in range(4):
            data_parallel.zero_grad()
            backward(model, step)
            data_parallel.finish()
            optimizer.step(1e-2, 0.1)
        trained.append(optimizer.named_shards())
    half, full = trained
    for name, shard in half.items():
        moments = name.startswith("exp_avg")
        for piece, twin in zip(shard.pieces, full[name].pieces, strict=True):
            assert piece.data.dtype == (torch.bfloat16 if moments else torch.float32)
            # Each step rounds by half of bfloat16's last bit, 2^-9, and most of it decays.
            close = {"rtol": 2**-7, "atol": 1e-3}
            torch.testing.assert_close(piece.data.float(), twin.data, **close)


def test_parameters_that_decay_alike_are_updated_together():
    model = nn.Sequential(*[nn.Linear(4, 4, bias=False) for _ in range(3)], nn.LayerNorm(4))
    _, optimizer = wrapped(model)
    # Bias and weight of the norm come last, so first in a bucket; then three matrices.
    (works,) = optimizer._work.values()
    assert [(work.run.main.numel(), work.run.group.decay_factor) for work in works] == [
        (64 + 4, 0.0),
        (64 + 64 + 16, 1.0),
    ]


class Stacked(nn.Module):
    """Parameters whose local shape hides what they are: a stack of norms, a fused bias."""

    def __init__(self):
        super().__init__()
        self.norms = nn.Parameter(torch.ones(2, 4))
        self.fused = nn.Parameter(torch.ones(6))
        self.matrix = nn.Parameter(torch.ones(4, 3))
        self.wide_bias = nn.Parameter(torch.ones(2, 3))

    def layouts(self):
        def rows(name):
            return tuple(Part(f"{i}.{name}", (4,), (0,), (i, 0), (1, 4)) for i in range(2))

        return {
            "norms": ParamLayout(rows("norm.weight")),
            "fused": ParamLayout(
                (
                    Part("q.bias", (4,), (0,), (0,), (4,)),
                    Part("k.bias", (2,), (0,), (4,), (2,)),
                )
            ),
            "wide_bias": whole_layout("bias", (2, 3)),
        }


@pytest.mark.parametrize("use_distributed_optimizer", [True, False])
def test_only_logical_matrices_decay(use_distributed_optimizer):
    model = Stacked()
    assert [has_weight_decay(p) for p in named_parameters(model)] == [False, False, True, False]
    config = DataParallelConfig(use_distributed_optimizer=use_distributed_optimizer)
    data_parallel, optimizer = wrapped(model, config)
    data_parallel.finish()
    optimizer.step(0.1, 0.5)
    for name, parameter in model.named_parameters():
        expected = 1.0 - 0.1 * 0.5 if name == "matrix" else 1.0
        assert parameter.eq(expected).all(), name


def train_in_half_precision(num_steps, reload_at=None):
    """Weights and state after steps of a sharded bfloat16 model, perhaps reloaded midway."""
    ctx = ParallelContext.build(ParallelConfig())
    model = small_model(torch.bfloat16)
    data_parallel, optimizer = wrapped(model, SHARDED, ctx=ctx)
    for step in range(num_steps):
        if step == reload_at:
            saved = gather_logical(optimizer.named_shards(), ctx.world)
            model = small_model(torch.bfloat16)
            nn.init.zeros_(model[0].weight)  # what load must not leave behind
            data_parallel, optimizer = wrapped(model, SHARDED, ctx=ctx)
            for name, shard in optimizer.named_shards().items():
                for piece in shard.pieces:
                    place = tuple(
                        slice(o, o + n)
                        for o, n in zip(piece.offsets, piece.lengths, strict=True)
                    )
                    piece.data.copy_(saved[name][place])
            optimizer.num_steps = step
            optimizer.refresh()
        data_parallel.zero_grad()
        backward(model, step, ctx.dp.rank)
        data_parallel.finish()
        optimizer.step(0.02, 0.1)
    weights = gather_logical(named_shards(model, ctx.data_axes()), ctx.world)
    return weights, gather_logical(optimizer.named_shards(), ctx.world)


def test_state_loaded_into_fresh_shards_goes_on_to_the_last_bit():
    straight = run_ranks(train_in_half_precision, 3, 4)[0]
    resumed = run_ranks(train_in_half_precision, 3, 4, 2)[0]
    for expected, found in zip(straight, resumed, strict=True):
        assert expected.keys() == found.keys()
        assert all(torch.equal(expected[name], found[name]) for name in expected)


def test_weights_loaded_alone_become_the_main_weights():
    model = small_model(torch.bfloat16)
    data_parallel, optimizer = wrapped(model)
    with torch.no_grad():
        model[0].weight.fill_(0.25)
    optimizer.refresh(from_parameters=True)
    data_parallel.finish()
    optimizer.step(0.1, 0.0)
    assert model[0].weight.eq(0.25).all()


def set_weights_of_one_rank(refreshes):
    ctx = ParallelContext.build(ParallelConfig())
    model = small_model(torch.bfloat16)
    data_parallel, optimizer = wrapped(model, SHARDED, ctx=ctx)
    data_parallel.finish()
    if ctx.dp.rank == 1:  # after the ranks' weights were compared
        data_parallel.buckets[0].owned(data_parallel.buckets[0].params)[0] += 1.0
    if refreshes:
        optimizer.refresh(from_parameters=True)
    try:
        optimizer.step(0.1, 0.0)
    except RuntimeError as error:
        return str(error)
    return "nothing"


@pytest.mark.parametrize("refreshes", [False, True])
def test_weights_set_behind_their_main_weights_are_told_on_every_rank(refreshes):
    told = run_ranks(set_weights_of_one_rank, 2, refreshes)
    assert told[0] == told[1]
    assert ("call refresh(from_parameters=True)" in told[0]) != refreshes


def bytes_of_state(config):
    ctx = ParallelContext.build(ParallelConfig())
    _, optimizer = wrapped(nn.Linear(64, 64, dtype=torch.bfloat16), config, ctx=ctx)
    return sum(
        piece.data.numel() * piece.data.element_size()
        for shard in optimizer.named_shards().values()
        for piece in shard.pieces
    )


def test_each_rank_keeps_its_share_of_the_state():
    whole_bytes = (64 * 64 + 64) * 3 * 4
    assert sum(run_ranks(bytes_of_state, 2, SHARDED)) == whole_bytes
    assert run_ranks(bytes_of_state, 2, DataParallelConfig()) == [whole_bytes] * 2


def gradients_in_half_precision():
    ctx = ParallelContext.build(ParallelConfig())
    model = small_model(torch.bfloat16)
    config = replace(SHARDED, grad_reduce_in_bf16=True)
    data_parallel, optimizer = wrapped(model, config, ctx=ctx)
    backward(model, 0, ctx.dp.rank)
    data_parallel.finish()
    norm = optimizer.grad_norm().item()
    grads = gather_logical(data_parallel.grad_shards(), ctx.world)
    optimizer.step(0.1, 0.1, 0.5)
    gather_logical(named_shards(model, ctx.data_axes()), ctx.world)
    return norm, grads


def test_gradients_may_travel_in_half_precision():
    expected = {}
    for rank in range(2):
        model = small_model(torch.bfloat16).double()
        backward(model, 0, rank)
        for name, parameter in model.named_parameters():
            expected[name] = expected.get(name, 0.0) + parameter.grad
    for norm, grads in run_ranks(gradients_in_half_precision, 2):
        total = torch.cat([g.double().flatten() for g in grads.values()]).norm().item()
        assert norm == pytest.approx(total, rel=1e-6)
        for name, grad in grads.items():
            assert grad.dtype == torch.bfloat16
            scale = expected[name].abs().max()
            assert ((grad - expected[name]).abs().max() / scale).item() < 1.6e-2, name


def test_steps_and_norms_of_unfinished_gradients_are_refused():
    model = small_model()
    data_parallel, optimizer = wrapped(model)
    backward(model, 0)
    with pytest.raises(RuntimeError, match="call finish"):
        optimizer.grad_norm()
    with pytest.raises(RuntimeError, match="call finish"):
        optimizer.step(0.1, 0.0)
    data_parallel.finish()
    optimizer.step(0.1, 0.0)


def test_a_scale_multiplies_the_gradients():
    models = [small_model(torch.float64) for _ in range(3)]
    scales = [0.25, torch.tensor(0.25, dtype=torch.float64), 1.0]
    adam = AdamConfig(adam_beta1=0.0, adam_beta2=0.0, adam_eps=1e9)
    for model, scale in zip(models, scales, strict=True):
        data_parallel, optimizer = wrapped(model, adam=adam)
        backward(model, 0)
        data_parallel.finish()
        optimizer.step(1e7 if scale != 1.0 else 0.25e7, 0.0, scale)
    for first, second, third in zip(*(m.parameters() for m in models), strict=True):
        assert torch.equal(first, second)
        torch.testing.assert_close(first, third, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"adam_beta1": 1.0}, r"--adam-beta1 1\.0 must be at least 0"),
        ({"adam_beta2": -0.1}, r"--adam-beta2 -0\.1 must be at least 0"),
        ({"adam_eps": 0.0}, r"--adam-eps 0\.0 must be above 0"),
    ],
)
def test_constants_out_of_range_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        AdamConfig(**options)
