"""``MoELayer`` over ranks inside torch's own wrappers, and ranks that were seeded apart."""

import copy
import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from warm_ranks import run_ranks

from mcore_moe import (
    ExpertNetwork,
    MoEConfig,
    MoELayer,
    average_expert_gradients,
    finish_step,
    moe_axes,
    rank_local_names,
)
from mcore_moe.axes import ONE_RANK
from mcore_parallel.config import ParallelConfig
from mcore_parallel.mesh import ParallelContext
from mcore_parallel.sharding import named_parameters, shards_of

D, T = 8, 6
CONFIG = MoEConfig(
    num_experts=4,
    moe_router_topk=2,
    moe_router_score_function="sigmoid",
    moe_router_enable_expert_bias=True,
)


class Model(torch.nn.Module):
    def __init__(self, axes=ONE_RANK):
        super().__init__()
        torch.manual_seed(3)
        self.first = torch.nn.Linear(D, D, dtype=torch.float64)
        self.moe = MoELayer(
            D, 16, CONFIG, ExpertNetwork(init_std=0.3), axes=axes, dtype=torch.float64
        )

    def forward(self, x):
        y, aux = self.moe(self.first(x))
        return y.square().mean() + aux


def tokens(rank):
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(T, D, generator=generator, dtype=torch.float64)


def logical_gradients(model):
    found = []
    for named in named_parameters(model):
        grad = named.parameter.grad
        if grad is not None:
            found.append((named, grad.full_tensor() if isinstance(grad, DTensor) else grad))
    return shards_of(found)


def check_wrapped(wrapper, layout):
    ctx = ParallelContext.build(ParallelConfig(**layout))
    size = dist.get_world_size()
    model = Model(moe_axes(ctx))
    names = rank_local_names(model)
    if wrapper == "ddp":
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names)
        wrapped = DistributedDataParallel(model)
    else:
        ignored = {p for n, p in model.named_parameters() if n in names}
        wrapped = fully_shard(
            model, mesh=init_device_mesh("cpu", (size,)), ignored_params=ignored
        )
    wrapped(tokens(ctx.global_rank)).backward()
    average_expert_gradients(model, ctx)

    oracle = Model()
    sum(oracle(tokens(rank)) / size for rank in range(size)).backward()
    expected = {name: s.pieces[0].data for name, s in logical_gradients(oracle).items()}
    for name, shard in logical_gradients(model).items():
        for piece in shard.pieces:
            box = tuple(
                slice(o, o + n) for o, n in zip(piece.offsets, piece.lengths, strict=True)
            )
            torch.testing.assert_close(piece.data, expected[name][box], msg=name)
    counts = finish_step(model, ctx.axis("tp", "cp", "dp"))["moe.router"].counts
    assert torch.equal(counts, finish_step(oracle)["moe.router"].counts)
    assert torch.equal(model.moe.router.expert_bias, oracle.moe.router.expert_bias)
    ctx.destroy()


LAYOUTS = [
    {"expert_model_parallel_size": 2},
    {"expert_model_parallel_size": 2, "expert_tensor_parallel_size": 2},
]


def reset(module):
    """Make a module's memory, as full of old numbers as memory may be, and fill it."""
    module.to_empty(device="cpu")
    with torch.no_grad():
        for tensor in (*module.parameters(), *module.buffers()):
            tensor.fill_(7)
    torch.manual_seed(5)
    for part in module.modules():
        if hasattr(part, "reset_parameters"):
            part.reset_parameters()


def whole_layer(device=None):
    config = MoEConfig(
        num_experts=4,
        moe_router_bias=True,
        moe_router_enable_expert_bias=True,
        moe_latent_size=4,
        moe_shared_expert_intermediate_size=4,
        moe_shared_expert_gate=True,
    )
    torch.manual_seed(5)
    return MoELayer(D, 16, config, ExpertNetwork(bias=True, init_std=0.3), device=device)


def check_made_on_meta(is_sharded):
    layer = whole_layer("meta")
    if is_sharded:
        fully_shard(layer, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    reset(layer)
    expected = dict(whole_layer().named_parameters()) | dict(whole_layer().named_buffers())
    for name, tensor in (*layer.named_parameters(), *layer.named_buffers()):
        found = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        assert torch.equal(found, expected[name]), name


def check_copied():
    ctx = ParallelContext.build(ParallelConfig(expert_model_parallel_size=2))
    model = Model(moe_axes(ctx))
    loss = model(tokens(ctx.global_rank))
    assert torch.equal(copy.deepcopy(model)(tokens(ctx.global_rank)), loss)
    ctx.destroy()


def check_all_wrapped():
    check_copied()
    check_made_on_meta(is_sharded=True)
    for wrapper in ("ddp", "fsdp"):
        for layout in LAYOUTS:
            check_wrapped(wrapper, layout)


def test_what_is_made_on_the_meta_device_is_filled_as_if_it_had_been_made_here():
    check_made_on_meta(is_sharded=False)


def test_under_ddp_and_fsdp2_every_gradient_is_the_mean_over_ranks():
    run_ranks(check_all_wrapped, 4)


def check_seeded_apart():
    ctx = ParallelContext.build(ParallelConfig(expert_model_parallel_size=2))
    layers = []
    for is_apart in (True, False):
        torch.manual_seed(dist.get_rank() if is_apart else 0)
        layers.append(MoELayer(D, 16, CONFIG, axes=moe_axes(ctx)))
    with pytest.raises(
        ValueError, match=r"the router of ranks \[1\] of axis .* different seeds"
    ):
        layers[0](tokens(0).float())
    layers[0].router.reset_parameters(seed=1)  # as DDP would make them equal
    for layer in layers:
        sum(layer(tokens(0).float())).sum().backward()
    with pytest.raises(
        ValueError, match=r"experts.fc1_weight of ranks \[1\] .* different seeds"
    ):
        average_expert_gradients(layers[0], ctx)
    average_expert_gradients(layers[1], ctx)
    ctx.destroy()


def test_ranks_that_were_seeded_apart_are_refused():
    run_ranks(check_seeded_apart, 4)


def check_tensor_ranks():
    ctx = ParallelContext.build(ParallelConfig(tensor_model_parallel_size=2))
    layer = MoELayer(D, 16, CONFIG, axes=moe_axes(ctx))
    with pytest.raises(ValueError, match="--tensor-model-parallel-size 2 need"):
        average_expert_gradients(layer, ctx)
    ctx.destroy()


def run_readme(code):
    exec(compile(code, "README.md", "exec"), {})
    check_tensor_ranks()


def test_the_readme_runs_over_two_ranks():
    text = Path(__file__).parents[1].joinpath("README.md").read_text()
    (code,) = re.findall(r"two_ranks -->\n```python\n(.*?)```", text, re.DOTALL)
    run_ranks(run_readme, 2, code, check_shapes=False)
