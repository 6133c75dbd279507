"""Fully sharded models: built without a whole matrix, with the initial weights of one rank."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from warm_ranks import run_ranks

from mcore_models.families import GPT_FAMILY, T5_FAMILY
from mcore_parallel.mesh import ParallelContext
from mcore_parallel.random_tiles import TILE_ELEMENTS
from mcore_parallel.testing.ranks import gather_logical
from mcore_train.assembly import assemble
from mcore_train.batches.datasets import Datasets
from mcore_train.composition import T5TrainConfig, TrainConfig, compose
from mcore_train.resolution import resolve

TINY = {
    "num_layers": 2,
    "hidden_size": 40,
    "num_attention_heads": 4,
    "ffn_hidden_size": 104,
    "add_bias_linear": True,
    "seq_length": 8,
    "micro_batch_size": 1,
    "global_batch_size": 4,
    "train_iters": 1,
    "lr": 1e-2,
    "vocab_size": 85,
    "make_vocab_size_divisible_by": 16,  # padded to 96, or less where ranks share it
    "bf16": True,
    "mock_data": True,
}
ZERO3 = {"use_torch_fsdp2": True}
LEARNED = {"position_embedding_type": "learned_absolute", "max_position_embeddings": 56}
EXPERTS = {
    "num_experts": 4,
    "moe_ffn_hidden_size": 72,
    "moe_router_enable_expert_bias": True,
    "moe_router_score_function": "sigmoid",
}
STATEFUL = {
    "num_layers": 6,
    "hybrid_override_pattern": "M-*-G-",
    "mamba_head_dim": 20,
    "mamba_num_groups": 2,
}
SHAPED = {
    "tied": {"num_query_groups": 2, "normalization": "LayerNorm"},
    "positions": LEARNED | {"untie_embeddings_and_output_weights": True},
    "predicting": {"mtp_num_layers": 1, "qk_layernorm": True},
    "experts": EXPERTS,
    "stateful": STATEFUL,
    "t5": {"encoder_num_layers": 2, "decoder_num_layers": 1},
}
LAYOUTS = [
    ("tied", {"data_parallel_sharding_strategy": "optim_grads", "use_torch_fsdp2": False}),
    ("predicting", {"pipeline_model_parallel_size": 2, "optimizer_cpu_offload": True}),
    ("experts", {"expert_model_parallel_size": 2, "main_grads_dtype": "bf16"}),
    ("t5", {}),
]
FURTHER = [
    ("positions", {"num_distributed_optimizer_instances": 2}),
    ("experts", {"expert_model_parallel_size": 4}),  # each is one rank's, in buckets
    ("stateful", {"tensor_model_parallel_size": 2, "sequence_parallel": True}),
]
DRAWN = 16 * TILE_ELEMENTS
"""Tiles of random numbers that a thread holds."""


class Made(TorchDispatchMode):
    """Notes how many elements the tensors have that operations make in memory."""

    def __init__(self):
        super().__init__()
        self.sizes = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            tensor = getattr(leaf, "_local_tensor", leaf)  # what a DTensor holds
            if isinstance(tensor, torch.Tensor) and not tensor.is_meta:
                self.sizes.add(tensor.untyped_storage().nbytes() // tensor.itemsize)
        self.sizes.discard(DRAWN)
        return out


def build(flags, world_size):
    is_t5 = "encoder_num_layers" in flags
    config = compose(TINY | flags, T5TrainConfig if is_t5 else TrainConfig)
    plan = resolve(config, world_size, family=T5_FAMILY if is_t5 else GPT_FAMILY)
    ctx = ParallelContext.build(config.parallelism)
    with Made() as made:
        run = assemble(plan, ctx, datasets=Datasets())
    return run, made.sizes


def state(run):
    return {
        **gather_logical(run.data_parallel.weight_shards(), run.ctx.world),
        **gather_logical(run.optimizer.named_shards(), run.ctx.world),
    }


def check_layouts(wanted, layouts):
    for shape, layout in layouts:
        run, made = build(SHAPED[shape] | ZERO3 | layout, 4)
        found = state(run)
        assert found.keys() == wanted[shape].keys(), (shape, layout)
        for name, tensor in wanted[shape].items():
            assert found[name].dtype == tensor.dtype
            assert torch.equal(found[name], tensor), (shape, layout, name)
        rows = max(len(unit.own_weights()) for unit in run.data_parallel.units)
        assert max(made) <= rows, (shape, layout)
        run.ctx.destroy()


@pytest.mark.parametrize(
    "layouts", [LAYOUTS, pytest.param(FURTHER, marks=pytest.mark.parity_long)]
)
def test_no_rank_makes_a_whole_matrix_and_the_weights_are_those_of_one_rank(layouts):
    wanted = {shape: state(build(SHAPED[shape], 1)[0]) for shape, _ in layouts}
    run_ranks(check_layouts, 4, wanted, layouts, check_shapes=False)
