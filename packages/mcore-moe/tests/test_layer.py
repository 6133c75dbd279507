"""One rank against many, for every way of spreading experts: outputs, losses, gradients."""

from dataclasses import replace
from itertools import product

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from warm_ranks import run_ranks

from mcore_moe import ExpertNetwork, MoEAxes, MoEConfig, MoELayer, finish_step, moe_axes
from mcore_moe.axes import ONE_RANK
from mcore_parallel.collectives import all_reduce
from mcore_parallel.config import ParallelConfig
from mcore_parallel.mesh import ParallelContext
from mcore_parallel.rng import fill_parameter_
from mcore_parallel.sharding import named_parameters, named_shards, shards_of

D, F, E = 8, 16, 12
FULL = {
    "num_experts": E,
    "moe_router_topk": 3,
    "moe_aux_loss_coeff": 0.7,
    "moe_z_loss_coeff": 0.3,
    "moe_shared_expert_intermediate_size": 4,
    "moe_shared_expert_gate": True,
}
TOLERANCE = 1e-10  # float64, relative to the largest entry of the tensor compared


def layout(world_size, *, tp=1, cp=1, ep=1, etp=1, node=0, sp=False):
    config = ParallelConfig(
        tensor_model_parallel_size=tp,
        context_parallel_size=cp,
        expert_model_parallel_size=ep,
        expert_tensor_parallel_size=etp,
        hierarchical_expert_parallel_size=node,
        sequence_parallel=sp,
    )
    return world_size, config


LAYOUTS = {
    "ep2": layout(2, ep=2),
    "ep4": layout(4, ep=4),
    "ep2 expert_tp2": layout(4, ep=2, etp=2),
    "tp2, whole experts everywhere": layout(2, tp=2),
    "expert_tp2 under data ranks": layout(2, etp=2),
    "tp2 sp ep2 on four": layout(4, tp=2, ep=2, sp=True),
    "ep4 folded over tp2 and dp2": layout(4, tp=2, ep=4),
    "ep4 folded over tp2 and cp2": layout(4, tp=2, cp=2, ep=4, sp=True),
    "tp2 cp2 expert_tp2 ep2": layout(4, tp=2, cp=2, ep=2, etp=2),
    "tp2 dp3 ep3": layout(6, tp=2, ep=3, sp=True),
    "tp2 dp3 ep3 expert_tp2": layout(6, tp=2, ep=3, etp=2),
}


def tokens(dp_rank, cp_rank, tp_rank, spread):
    """Tokens of one rank; skewed ones are all alike.

    Data and context ranks differ in their number and some have none; tensor ranks hold equal
    numbers, as the sequence-parallel collectives of the shared expert need.
    """
    number = (5, 0, 7, 3)[(2 * dp_rank + cp_rank) % 4]
    generator = torch.Generator().manual_seed(100 * dp_rank + 10 * cp_rank + tp_rank)
    x = torch.randn(number, D, generator=generator, dtype=torch.float64)
    return x if spread == "even" else 0.01 * x + 1


def build(config, axes=ONE_RANK):
    layer = MoELayer(
        D,
        F,
        config,
        ExpertNetwork(bias=True, init_std=0.0),
        axes=axes,
        dtype=torch.float64,
    )
    for named in named_parameters(layer):
        # Biases too: zeros would hide mistakes. The expert bias also changes who is chosen.
        fill_parameter_(named, seed=7, std=0.5)
    return layer


def output_weights(x):
    return torch.linspace(-1, 2, D, dtype=torch.float64) * (1 + x.detach().sum(1, keepdim=True))


def padding_mask(x):
    """True for real tokens, by the token itself, so that it can be told from its neighbours."""
    return x[:, 0] - x[:, 0].round() > -0.003  # about half of them, of skewed ones too


def run(layer, x, masked):
    x = x.clone().requires_grad_()
    y, aux = layer(x, 1, padding_mask(x.detach()) if masked else None)
    ((y * output_weights(x)).sum() + aux).backward()
    return y.detach(), aux.detach(), x.grad


def check(name, result, expected):
    assert result.shape == expected.shape, name
    if not expected.numel():
        return
    error = (result - expected).abs().max() / expected.abs().max().clamp(min=1e-3)
    assert error < TOLERANCE, f"{name}: {error:.1e}"


def summed_gradients(layer, ctx):
    """This rank's boxes of logical gradients, as finalisation leaves them."""
    tensors = []
    for named in named_parameters(layer):
        if not named.parameter.requires_grad:
            continue
        partial = named.layout.parts[0].partial
        grad = all_reduce(named.parameter.grad, partial)
        tensors.append((named, all_reduce(grad, ctx.data_axes()[named.layout.data])))
    return shards_of(tensors)


def check_layout(name, config, spread, moe, masked, watch=lambda layer: layer):
    ctx = ParallelContext.build(config)
    sp = config.sequence_parallel
    layer = build(moe, moe_axes(ctx))
    watch(layer)
    x = tokens(ctx.dp.rank, ctx.cp.rank, ctx.tp.rank if sp else 0, spread)
    y, aux, x_grad = run(layer, x, masked)
    grads = summed_gradients(layer, ctx)
    aux = all_reduce(aux, ctx.axis("tp", "cp"))

    oracle = build(moe)
    for dp_rank in range(ctx.dp.size):
        places = list(product(range(ctx.cp.size), range(ctx.tp.size if sp else 1)))
        parts = [tokens(dp_rank, c, t, spread) for c, t in places]
        whole_y, whole_aux, whole_grad = run(oracle, torch.cat(parts), masked)
        if dp_rank == ctx.dp.rank:
            here = places.index((ctx.cp.rank, ctx.tp.rank if sp else 0))
            sizes = [len(p) for p in parts]
            check(f"{name} output", y, whole_y.split(sizes)[here])
            check(f"{name} input gradient", x_grad, whole_grad.split(sizes)[here])
            check(f"{name} aux", aux, whole_aux)
    trained = [n for n in named_parameters(oracle) if n.parameter.requires_grad]
    expected = shards_of([(n, n.parameter.grad) for n in trained])
    for key, shard in grads.items():
        whole_grad = expected[key].pieces[0].data
        assert shard.shape == expected[key].shape
        for piece in shard.pieces:
            box = tuple(
                slice(o, o + n) for o, n in zip(piece.offsets, piece.lengths, strict=True)
            )
            check(f"{name} {key}", piece.data, whole_grad[box])
    counts = finish_step(layer, ctx.axis("tp", "cp", "dp"))["router"].counts
    assert torch.equal(counts, finish_step(oracle)["router"].counts), f"{name} counts"
    ctx.destroy()
    return sorted(grads)


def check_layouts(names, spread, fields, masked):
    moe, layouts = MoEConfig(**FULL | fields), LAYOUTS | TWO_STEPS
    return [check_layout(name, layouts[name][1], spread, moe, masked) for name in names]


def run_layouts(names, spread="even", masked=False, check_shapes=True, **fields):
    world_size = (LAYOUTS | TWO_STEPS)[names[0]][0]
    case = names, spread, fields, masked
    logical = run_ranks(check_layouts, world_size, *case, check_shapes=check_shapes)
    names_of_all = named_shards(build(MoEConfig(**FULL | fields)))
    whole = sorted(name for name in names_of_all if not name.endswith("expert_bias"))
    for i in range(len(names)):
        assert sorted(set().union(*(rank[i] for rank in logical))) == whole


TWO_STEPS = {
    "ep4 on two nodes": layout(4, ep=4, node=2),
    "ep4 folded over tp2 and cp2 on two nodes": layout(4, tp=2, cp=2, ep=4, node=2, sp=True),
}
WORLDS = {n: [k for k, v in LAYOUTS.items() if v[0] == n] for n in (2, 4, 6)}


@pytest.mark.parametrize(
    ("world_size", "dispatcher"),
    [
        *((2, "alltoall"), (4, "alltoall"), (2, "allgather")),
        pytest.param(6, "alltoall", marks=pytest.mark.parity_long),
        *(pytest.param(n, "allgather", marks=pytest.mark.parity_long) for n in (4, 6)),
    ],
)
def test_every_layout_gives_the_gradients_of_one_rank(world_size, dispatcher):
    fields = {
        "moe_token_dispatcher_type": dispatcher,
        "moe_shared_expert_overlap": world_size == 4,
        "moe_split_batch_overlap": world_size < 6 and dispatcher == "alltoall",
    }
    # More ranks run the code of two: their shapes are checked once.
    run_layouts(WORLDS[world_size], check_shapes=world_size == 2, **fields)


@pytest.mark.parametrize("spread", ["even", "skewed"])
def test_tokens_that_cross_nodes_once_give_the_gradients_of_one_rank(spread):
    dtype, masked = ("fp8", False) if spread == "even" else ("", True)
    fields = {"moe_dispatch_dtype": dtype, "moe_shared_expert_overlap": not masked}
    run_layouts(list(TWO_STEPS), spread, masked, **fields)


def test_all_tokens_on_few_experts_leave_ranks_without_rows():
    names = ["ep4", "tp2 cp2 expert_tp2 ep2"]
    run_layouts(names, "skewed", check_shapes=False)
    fields = {"moe_token_dispatcher_type": "allgather"}
    run_layouts(names, "skewed", masked=True, check_shapes=False, **fields)


@pytest.mark.parametrize(
    "fields",
    [
        {
            "moe_router_score_function": "sigmoid",
            "moe_router_enable_expert_bias": True,
            "moe_router_num_groups": 4,
            "moe_router_group_topk": 3,
            "moe_router_topk_scaling_factor": 2.5,
            "moe_router_load_balancing_type": "seq_aux_loss",
        },
        {"moe_router_load_balancing_type": "sinkhorn", "moe_aux_loss_coeff": 0.0},
        {"moe_latent_size": 6},
    ],
    ids=["sigmoid with bias and groups", "sinkhorn", "latent"],
)
def test_other_routings_do_not_depend_on_the_layout(fields):
    masked = fields.get("moe_router_load_balancing_type") == "sinkhorn"
    names = ["ep4 folded over tp2 and cp2", "tp2 cp2 expert_tp2 ep2"]
    run_layouts(names, masked=masked, **fields)


@pytest.mark.parametrize("dispatcher", ["alltoall", "allgather"])
def test_experts_and_tokens_in_fp8_do_not_depend_on_which_rank_holds_them(dispatcher):
    fields = {
        "moe_experts_dtype": "fp8",
        "moe_dispatch_dtype": "fp8",
        "moe_token_dispatcher_type": dispatcher,
        "moe_split_batch_overlap": dispatcher == "alltoall",
        "moe_expert_rows_limit": 3.0,
    }
    run_layouts(["ep4", "ep4 folded over tp2 and cp2"], **fields)


class Launches(TorchDispatchMode):
    """Notes every GEMM, and every exchange of rows when it begins and when it is waited for."""

    def __init__(self):
        super().__init__()
        self.seen, self.travelling = [], {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        name = function.name()
        if "all_to_all" in name and args[0].dim() == 2:
            self.travelling[result.untyped_storage().data_ptr()] = "arrive"
            self.seen.append("depart")
        elif "wait_tensor" in name:
            place = args[0].untyped_storage().data_ptr()
            self.seen += [self.travelling.pop(place)] if place in self.travelling else []
        elif name in ("aten::mm", "aten::addmm") and self.seen[-1:] != ["gemm"]:
            self.seen.append("gemm")
        return result


def check_order():
    ctx = ParallelContext.build(ParallelConfig(expert_model_parallel_size=2))
    moe = MoEConfig(num_experts=E, moe_router_topk=3, moe_split_batch_overlap=True)
    layer = build(moe, MoEAxes(ep=ctx.ep))
    layer(torch.ones(4, D, dtype=torch.float64))  # compares routers
    x = tokens(ctx.global_rank, 0, 0, "even").requires_grad_()
    with Launches() as forward:
        y, _ = layer(x)
    with Launches() as backward:
        y.sum().backward()
    shared = {"moe_shared_expert_intermediate_size": 4, "moe_shared_expert_overlap": True}
    layer = build(replace(moe, moe_split_batch_overlap=False, **shared), MoEAxes(ep=ctx.ep))
    layer(torch.ones(4, D, dtype=torch.float64))
    with Launches() as beside:
        layer(x)
    ctx.destroy()
    return forward.seen, backward.seen, beside.seen


def test_halves_of_a_batch_and_the_shared_expert_compute_while_tokens_travel():
    half = ["depart", "depart", "arrive", "gemm", "depart", "arrive", "gemm", "depart"]
    for forward, backward, beside in run_ranks(check_order, 2):
        begin = forward.index("depart")  # the router's GEMM is before
        assert forward[begin:] == [*half, "arrive", "arrive"]
        assert backward[: backward.index("gemm") + 5] == half
        assert backward.count("depart") == backward.count("arrive") == 4
        apart = ["depart", "gemm", "arrive", "gemm", "depart", "arrive"]
        assert beside[beside.index("depart") :] == apart


def test_padding_stays_with_its_tokens_on_strided_groups():
    names = ["ep4 folded over tp2 and cp2", "tp2 cp2 expert_tp2 ep2"]
    run_layouts(names, masked=True, check_shapes=False)


def check_bounded(names, limit, dispatcher="alltoall"):
    """Compare with one rank; return tokens and rows of every call of experts, by layout."""
    calls = []
    for name in names:
        moe = MoEConfig(
            **FULL, moe_expert_rows_limit=limit, moe_token_dispatcher_type=dispatcher
        )
        seen = []

        def watch(layer, seen=seen):
            layer.experts.register_forward_pre_hook(
                lambda _, inputs: seen.append((len(inputs[0]), inputs[2].choices.numel()))
            )
            return layer

        check_layout(name, LAYOUTS[name][1], "skewed", moe, masked=True, watch=watch)
        calls.append(seen)
    return calls


def test_the_worst_routing_costs_parts_and_never_memory():
    names = ["ep4", "ep2 expert_tp2", "ep4 folded over tp2 and cp2", "tp2 cp2 expert_tp2 ep2"]
    bounded, free = (run_ranks(check_bounded, 4, names, limit) for limit in (1.0, 0.0))
    for i, name in enumerate(names):
        most, without = (
            max(rows for ranks in found for _, rows in ranks[i]) for found in (bounded, free)
        )
        parallel = LAYOUTS[name][1]
        ranks = parallel.expert_model_parallel_size
        sources = ranks * (parallel.expert_tensor_parallel_size or 1)
        # All tokens choose the same three experts, so one rank may get all rows.
        total = sum(ranks[i][0][1] for ranks in free) // (sources // ranks)
        assert most <= total / ranks + sources, name
        assert without > most, name


def test_rows_read_in_parts_give_the_gradients_of_one_rank():
    names = ["ep4", "ep4 folded over tp2 and cp2"]
    for calls in run_ranks(check_bounded, 4, names, 1.0, "symmetric"):
        for seen in calls:  # three parts at worst, all but the first once more in backward
            assert len(seen) in (3, 5, 7)
            assert all(tokens == rows for tokens, rows in seen)
    run_layouts(names, "even", check_shapes=False, moe_token_dispatcher_type="symmetric")


def test_rows_of_fixed_number_do_not_depend_on_routing():
    names = ["ep4", "tp2 cp2 expert_tp2 ep2"]
    topk = FULL["moe_router_topk"]
    for calls in run_ranks(check_bounded, 4, names, 1.0, "allgather"):
        for name, seen in zip(names, calls, strict=True):
            ranks = LAYOUTS[name][1].expert_model_parallel_size
            worst = seen[0][0] * topk
            part = -(-worst // ranks)
            # The worst case in parts, all but the first of them once more in backward.
            parts = [min(part, worst - begin) for begin in range(0, worst, part)]
            again = parts[:0:-1]
            assert [rows for _, rows in seen] == [*parts, *again], name
