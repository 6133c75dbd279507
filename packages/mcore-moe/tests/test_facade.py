import copy

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from warm_ranks import run_ranks

from mcore_moe import MixtureOfExperts, moe_axes
from mcore_parallel import ParallelConfig, ParallelContext


class Block(torch.nn.Module):
    """A plain module that knows nothing of mcore."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        self.norm = torch.nn.LayerNorm(16, dtype=dtype)
        self.experts = MixtureOfExperts(
            hidden_size=16, ffn_hidden_size=32, num_experts=4, top_k=2, dtype=dtype
        )

    def forward(self, x):
        return x + self.experts(self.norm(x))


def block(dtype=torch.float32):
    torch.manual_seed(0)
    return Block(dtype)


def inputs(dtype=torch.float32):
    return torch.randn(4, 6, 16, generator=torch.Generator().manual_seed(1)).to(dtype)


def gradients(module, x, run=None):
    y = (module if run is None else run)(x)
    (y.square().sum() + module.experts.aux_loss).backward()
    return y.detach(), {name: p.grad for name, p in module.named_parameters()}


def test_it_keeps_shapes_and_gives_an_aux_loss_in_training_only():
    module = MixtureOfExperts(hidden_size=16, ffn_hidden_size=32, num_experts=8, top_k=2)
    assert module(inputs()).shape == (4, 6, 16)
    assert module.aux_loss.requires_grad
    assert 0.009 < module.aux_loss.item() < 0.05
    module.eval()(inputs())
    assert module.aux_loss.item() == 0


def split_over_two(x):
    ctx = ParallelContext.build(ParallelConfig(expert_model_parallel_size=2))
    torch.manual_seed(0)
    module = MixtureOfExperts(16, 32, num_experts=4, top_k=2, axes=moe_axes(ctx))
    return sum(p.numel() for p in module.parameters()), module(x).detach()


def test_axes_spread_the_experts_over_ranks():
    torch.manual_seed(0)
    single = MixtureOfExperts(16, 32, num_experts=4, top_k=2)
    for size, y in run_ranks(split_over_two, 2, inputs()):
        assert size - 4 * 16 == (sum(p.numel() for p in single.parameters()) - 4 * 16) // 2
        torch.testing.assert_close(y, single(inputs()))


def step_over_two(layout, sums_gradients):
    ctx = ParallelContext.build(ParallelConfig(**layout))
    torch.manual_seed(0)
    module = MixtureOfExperts(16, 32, num_experts=4, top_k=2, axes=moe_axes(ctx))
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    for _ in range(3):
        y = module(inputs()[ctx.dp.rank :: ctx.dp.size])
        (y.square().sum() + module.aux_loss).backward()
        if sums_gradients:
            dist.all_reduce(module.moe.router.weight.grad)
        optimizer.step()
    return True


@pytest.mark.parametrize(
    "layout", [{"tensor_model_parallel_size": 2}, {"expert_model_parallel_size": 2}]
)
def test_routers_that_a_plain_optimizer_lets_drift_apart_are_an_error(layout):
    assert run_ranks(step_over_two, 2, layout, True) == [True, True]
    with pytest.raises(Exception, match="is a term of a sum, which a plain optimizer"):
        run_ranks(step_over_two, 2, layout, False)


def test_one_expert_a_token_works():
    module = MixtureOfExperts(hidden_size=16, ffn_hidden_size=32, num_experts=8, top_k=1)
    module(inputs()).sum().backward()
    assert module.moe.router.weight.grad.abs().sum() > 0


def test_it_learns():
    torch.manual_seed(0)
    module = Block()
    optimizer = torch.optim.Adam(module.parameters(), lr=1e-2)
    x, target = inputs(), inputs().roll(1, 0)
    losses = []
    for _ in range(30):
        optimizer.zero_grad()
        loss = (module(x) - target).square().mean()
        (loss + module.experts.aux_loss).backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]


def check_compiled(dtype):
    x = inputs(dtype)
    expected_y, expected = gradients(block(dtype), x)
    module = block(dtype)
    # One graph where the grouped product exists; else a break to learn the rows of experts.
    whole = dtype == torch.bfloat16
    compiled = torch.compile(module, backend="aot_eager", fullgraph=whole)
    y, grads = gradients(module, x, run=compiled)
    torch.testing.assert_close(y, expected_y)
    for name, grad in expected.items():
        torch.testing.assert_close(grads[name], grad, msg=name)
    return module.experts.moe.router.step_counts


@pytest.mark.parity_long  # tests/alacarte compiles these experts by default
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=["grouped", "in turn"])
def test_compiled_and_eager_agree(dtype):
    (counts,) = run_ranks(check_compiled, 1, dtype, check_shapes=False)
    assert counts.sum() == 4 * 6 * 2


def check_ddp():
    module = block(torch.float64)
    parallel = torch.compile(DistributedDataParallel(module), backend="aot_eager")
    rank = dist.get_rank()
    x = inputs(torch.float64)[2 * rank : 2 * rank + 2]
    (parallel(x).square().sum()).backward()
    return {name: p.grad for name, p in module.named_parameters()}


@pytest.mark.parity_long
def test_compiled_under_ddp_gradients_are_the_mean_over_ranks():
    module = block(torch.float64)
    module(inputs(torch.float64)).square().sum().backward()
    for grads in run_ranks(check_ddp, 2, check_shapes=False):
        for name, parameter in module.named_parameters():
            torch.testing.assert_close(grads[name], parameter.grad / 2, msg=name)


def test_its_shapes_can_be_asked_without_memory():
    module = MixtureOfExperts(16, 32, 4, device="meta", dtype=torch.bfloat16)
    y = module(torch.empty(3, 16, device="meta", dtype=torch.bfloat16))
    (y.sum() + module.aux_loss).backward()
    assert y.shape == (3, 16)
    assert module.moe.experts.fc1_weight.grad.shape == (4, 64, 16)


def test_it_can_be_copied_in_the_middle_of_a_step():
    module = block()
    y = module(inputs())
    twin = copy.deepcopy(module)
    assert twin.experts.aux_loss == module.experts.aux_loss
    assert torch.equal(twin(inputs()), y)
    (y.sum() + module.experts.aux_loss).backward()
    assert module.experts.moe.router.weight.grad is not None
