"""A small run is small, and keeps what makes layouts differ."""

import random

import pytest

from mcore_models.logical_tensors import num_kv_heads
from mcore_parallel.config import ParallelConfig
from mcore_train.composition import compose
from mcore_train.layout_check.relations import relations
from mcore_train.layout_check.small_layout import (
    describe_layout,
    shrink_layout,
    smallest_world,
)
from mcore_train.layout_check.small_run import build_small_run
from mcore_train.resolution import resolve

LLAMA = {
    "num_layers": 32,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_query_groups": 8,
    "ffn_hidden_size": 14336,
    "seq_length": 8192,
    "vocab_size": 128256,
    "mock_data": True,
    "train_iters": 1000,
    "lr": 3e-4,
}
DEEPSEEK = {
    **LLAMA,
    "num_layers": 61,
    "num_query_groups": 0,
    "vocab_size": 129281,
    "num_experts": 256,
    "moe_router_topk": 8,
    "moe_router_score_function": "sigmoid",
    "moe_router_num_groups": 8,
    "moe_router_group_topk": 4,
    "moe_layer_freq": "[0]*3+[1]*58",
    "moe_ffn_hidden_size": 2048,
    "moe_shared_expert_intermediate_size": 2048,
    "expert_model_parallel_size": 8,
    "pipeline_model_parallel_size": 4,
    "pipeline_model_parallel_layout": "Et*15|t*15|t*15|t*16L",
    "global_batch_size": 256,
}


def small_run_of(flags, world_size, max_ranks=8):
    small = build_small_run(resolve(compose(flags), world_size), max_ranks)
    return small, resolve(small.config, small.world_size)


def test_a_layout_that_fits_is_kept_and_everything_else_shrinks():
    flags = {"tensor_model_parallel_size": 4, "sequence_parallel": True, "bf16": True}
    small, plan = small_run_of(LLAMA | flags | {"global_batch_size": 16}, 8)
    assert small.world_size == 8
    assert small.config.parallelism == compose(LLAMA | flags).parallelism
    model = small.config.model
    assert model.hidden_size * model.num_layers < 300
    assert (model.num_attention_heads, num_kv_heads(model)) == (16, 8)
    assert plan.dtype == "bfloat16"
    assert plan.num_microbatches == 2


def test_a_run_that_writes_texts_has_a_small_run_that_writes_none():
    flags = LLAMA | {"sample_interval": 5, "tokenizer_type": "ByteTokenizer"}
    plan = resolve(compose(flags), 1, tokenizer_vocab_size=257)
    assert build_small_run(plan, 8).config.samples.sample_interval == 0


def test_the_drive_of_a_run_is_not_that_of_its_small_run(tmp_path):
    folder = str(tmp_path / "new")
    flags = LLAMA | {"optimizer_cpu_offload": True, "optimizer_offload_dir": folder}
    small, plan = small_run_of(flags, 1)
    assert plan.config.offloading.optimizer_offload_dir not in ("", folder)
    assert not any("offload" in note for note in small.notes)


def test_layers_that_stay_out_of_fp8_leave_one_in_it():
    fp8 = {"fp8_format": "hybrid", "first_last_layers_bf16": True}
    ends = {"num_layers_at_start_in_bf16": 3, "num_layers_at_end_in_bf16": 2}
    for layout, ranks, expected in (
        ({}, 1, (2, 1, 0)),
        ({"pipeline_model_parallel_size": 2, "global_batch_size": 2}, 2, (4, 1, 1)),
    ):
        small, _ = small_run_of(LLAMA | fp8 | ends | layout, ranks)
        found = small.config.fp8
        first, last = found.num_layers_at_start_in_bf16, found.num_layers_at_end_in_bf16
        assert (small.config.model.num_layers, first, last) == expected


def test_fewer_groups_than_tensor_ranks_stay_fewer():
    flags = {"tensor_model_parallel_size": 8, "num_query_groups": 2}
    small, _ = small_run_of(LLAMA | flags, 8)
    assert num_kv_heads(small.config.model) == 2
    assert small.config.model.num_attention_heads % 8 == 0


def test_degrees_shrink_data_ranks_first_and_never_to_one():
    flags = {"tensor_model_parallel_size": 8, "pipeline_model_parallel_size": 4}
    small, _ = small_run_of(LLAMA | flags | {"global_batch_size": 64}, 256)
    assert describe_layout(small.config.parallelism, small.world_size) == "8 ranks: tp2 pp2 dp2"
    assert any("256 ranks: tp8 pp4 dp8 shrank" in note for note in small.notes)


def test_a_layout_of_more_axes_than_ranks_says_how_many_it_needs():
    flags = {
        "tensor_model_parallel_size": 2,
        "pipeline_model_parallel_size": 2,
        "context_parallel_size": 2,
    }
    with pytest.raises(ValueError, match="--max-ranks 16"):
        small_run_of(LLAMA | flags | {"global_batch_size": 4}, 16)


@pytest.mark.parametrize(("tp", "pp", "dp"), [(4, 5, 2), (4, 2, 3)])
def test_a_degree_that_is_prime_stays_and_another_shrinks(tp, pp, dp):
    parallel = ParallelConfig(tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp)
    small, world = shrink_layout(parallel, tp * pp * dp, 2 * pp * dp)
    degrees = small.tensor_model_parallel_size, small.pipeline_model_parallel_size, world
    assert degrees == (2, pp, 2 * pp * dp)


def test_uneven_stages_stay_uneven():
    flags = {"pipeline_model_parallel_size": 4, "num_layers": 7}
    flags |= {"decoder_first_pipeline_num_layers": 1}
    small, plan = small_run_of(LLAMA | flags | {"global_batch_size": 8}, 4)
    assert [len(stage.layers) for stage in plan.stages] == [1, 2, 2, 2]
    assert small.config.pipeline.pipeline_model_parallel_layout == "Et|tt|tt|ttL"


@pytest.mark.parametrize(
    ("max_ranks", "layout"), [(16, "Ett|t|m|L"), (8, "Ett|L")], ids=["four stages", "two"]
)
def test_multi_token_prediction_stays_before_the_loss_where_stages_suffice(max_ranks, layout):
    flags = DEEPSEEK | {
        "mtp_num_layers": 1,
        "pipeline_model_parallel_layout": "Et*31|t*30|m|L",
        "tensor_model_parallel_size": 2,
        "expert_model_parallel_size": 2,
        "expert_tensor_parallel_size": 1,
    }
    small, plan = small_run_of(flags, 32, max_ranks)
    assert small.config.pipeline.pipeline_model_parallel_layout == layout
    assert [stage.has_mtp for stage in plan.stages].count(True) == 1
    noted = any("multi-token prediction" in note for note in small.notes)
    assert noted == ("m" not in layout)


def test_experts_keep_groups_choices_and_dense_layers_among_them():
    small, plan = small_run_of(DEEPSEEK, 32)
    experts = small.config.experts
    assert small.config.parallelism.expert_model_parallel_size == 2
    assert experts.num_experts > experts.moe_router_topk == 2
    assert experts.moe_router_num_groups == 2
    assert "0" in experts.moe_layer_freq
    assert "1" in experts.moe_layer_freq
    assert plan.padded_vocab_size > plan.vocab_size


def test_a_vocabulary_that_needs_no_padding_gets_none():
    _, plan = small_run_of(LLAMA, 1)
    assert plan.padded_vocab_size == plan.vocab_size


@pytest.mark.parametrize(
    ("flags", "note"),
    [
        ({"hidden_dropout": 0.1}, "dropout: its numbers"),
        ({"num_experts": 8, "moe_expert_capacity_factor": 1.0}, "capacity"),
        ({"num_experts": 8, "moe_input_jitter_eps": 0.1}, "jitter"),
        ({"num_experts": 8, "moe_router_load_balancing_type": "global_aux_loss"}, "global"),
    ],
)
def test_what_a_small_run_leaves_out_is_told(flags, note):
    small, _ = small_run_of(LLAMA | flags, 2)
    assert any(note in line for line in small.notes)
    assert small.config.model.hidden_dropout == 0


def test_overlapped_reduction_gets_several_buckets_and_interleaving_its_groups():
    flags = {
        "pipeline_model_parallel_size": 2,
        "num_virtual_stages_per_pipeline_rank": 2,
        "overlap_grad_reduce": True,
        "global_batch_size": 16,
        "recompute_granularity": "full",
        "recompute_num_layers": 4,
    }
    v_shaped = {
        "pipeline_model_parallel_size": 4,
        "pipeline_schedule": "dualpipev",
        "global_batch_size": 32,
    }
    assert small_run_of(LLAMA | v_shaped, 4)[1].num_microbatches == 8
    small, plan = small_run_of(LLAMA | flags, 4)
    assert small.config.data_parallelism.ddp_bucket_size > 0
    assert len(plan.stages) == 4
    assert small.config.recomputation.recompute_num_layers == 2
    assert plan.num_microbatches == 4


@pytest.mark.parametrize(
    ("flags", "ranks"),
    [
        ({}, 2),
        ({"tensor_model_parallel_size": 4}, 8),
        ({"num_experts": 8, "expert_model_parallel_size": 8}, 8),
        ({"num_distributed_optimizer_instances": 2}, 2),
        (
            {
                "num_experts": 8,
                "expert_model_parallel_size": 2,
                "num_distributed_optimizer_instances": 2,
            },
            4,
        ),
    ],
)
def test_the_smallest_world_has_two_data_ranks_and_fits_the_experts(flags, ranks):
    assert smallest_world(compose(LLAMA | flags)) == ranks


SIZES = {"tiles of an initial weight", "logits of a micro-batch"}
"""Ways that only large numbers take."""
AXES = {
    "tensor_model_parallel_size": (1, 2, 3, 4, 8),
    "context_parallel_size": (1, 2, 3, 4),
    "pipeline_model_parallel_size": (1, 2, 3, 4),
    "cp_comm_type": ("", "p2p", "all_gather", "a2a"),
    "num_attention_heads": (6, 8, 12, 24, 32),
    "num_query_groups": (0, 1, 2, 3, 4, 8),
    "num_distributed_optimizer_instances": (1, 1, 2, 4),
    "use_distributed_optimizer": (True,),
    "rank_order": ("", "", "dp-pp-tp-cp-ep"),
}
EXPERT_AXES = {
    "num_experts": (8, 24),
    "expert_model_parallel_size": (1, 2, 3, 4, 8),
    "expert_tensor_parallel_size": (0, 1, 2),
}


def drawn(source):
    """A run's flags and its world, which need not fit each other."""
    choices = AXES | (EXPERT_AXES if source.random() < 0.5 else {})
    flags = {name: source.choice(values) for name, values in choices.items()}
    if flags["context_parallel_size"] == 1:
        flags["cp_comm_type"] = ""
    world_size = source.choice((1, 2, 3, 4, 8))
    for axis in ("tensor_model", "context", "pipeline_model"):
        world_size *= flags[f"{axis}_parallel_size"]
    return LLAMA | flags | {"seq_length": 9216, "num_layers": 12}, world_size


def test_every_run_that_can_be_resolved_has_a_small_run_that_can():
    source, num_seen = random.Random(3), 0
    while num_seen < 60:
        flags, world_size = drawn(source)
        try:
            plan = resolve(compose(flags), world_size)
            small = build_small_run(plan, 16)
        except ValueError:
            continue  # refused as it is, or more axes than ranks
        again = resolve(small.config, small.world_size)
        assert again.world_size <= 16
        if again.world_size == plan.world_size:
            assert set(small.uncovered) <= SIZES
        num_seen += 1


def test_heads_that_context_ranks_exchange_stay_exchangeable_over_one_group():
    degrees = {"tensor_model_parallel_size": 2, "context_parallel_size": 2}
    small, _ = small_run_of(LLAMA | degrees | {"cp_comm_type": "a2a", "num_query_groups": 1}, 4)
    assert num_kv_heads(small.config.model) == 1
    assert small.config.model.num_attention_heads % 4 == 0


def test_groups_in_a_ring_stay_groups_in_a_ring():
    levels = {"cp_comm_type": "a2a+p2p", "hierarchical_context_parallel_sizes": (2, 4)}
    flags = LLAMA | levels | {"context_parallel_size": 8, "num_query_groups": 1}
    small, plan = small_run_of(flags, 8, 4)
    parallel = small.config.parallelism
    assert parallel.context_parallel_size == 4
    assert parallel.hierarchical_context_parallel_sizes == (2, 2)
    again = resolve(small.config, small.world_size)
    assert relations(again)["kinds of layers"] == relations(plan)["kinds of layers"]


def test_experts_split_even_where_no_room_for_optimizer_instances_is_left():
    flags = DEEPSEEK | {"expert_tensor_parallel_size": 1, "use_distributed_optimizer": True}
    flags |= {"tensor_model_parallel_size": 4, "num_distributed_optimizer_instances": 2}
    flags |= {"pipeline_model_parallel_layout": "", "pipeline_model_parallel_size": 1}
    small, _ = small_run_of(flags, 64, 4)
    parallel = small.config.parallelism
    assert parallel.expert_model_parallel_size > 1
    assert parallel.num_distributed_optimizer_instances <= 2
    assert any("instances" in note for note in small.notes)
