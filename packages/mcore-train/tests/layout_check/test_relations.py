"""Relations of numbers that decide branches: a small run keeps them, or reports them."""

import pytest

from mcore_base.options import rules_of
from mcore_parallel import random_tiles
from mcore_parallel.data_parallel import buckets
from mcore_parallel.tensor_parallel import linear_cross_entropy
from mcore_train.composition import compose, flat
from mcore_train.layout_check import relations
from mcore_train.layout_check.relations import head_relations
from mcore_train.layout_check.rows import build_rows
from mcore_train.layout_check.shrinking import SLOT_MULTIPLE
from mcore_train.layout_check.small_run import build_small_run
from mcore_train.resolution import resolve

REAL = {
    "num_layers": 8,
    "hidden_size": 768,
    "num_attention_heads": 12,
    "seq_length": 4096,
    "vocab_size": 50304,
    "mock_data": True,
    "train_iters": 1000,
    "lr": 3e-4,
    "global_batch_size": 16,
}
SIZES = {"tiles of an initial weight"}
TP4 = {"tensor_model_parallel_size": 4}
CP2 = {"context_parallel_size": 2}
SIX = {"num_attention_heads": 6, "num_query_groups": 3}
WINDOW = {"window_size": (512, 0), "window_attn_skip_freq": "4"}
EXPERTS = {"num_experts": 8, "expert_model_parallel_size": 2}
FLAGS = {
    "six heads of three groups": (CP2 | SIX | {"cp_comm_type": "a2a"}, 2),
    "groups that go to several ranks": ({"num_query_groups": 2, "context_parallel_size": 4}, 4),
    "windows and full layers": (CP2 | WINDOW, 2),
    "windows, full layers and experts": (
        WINDOW | EXPERTS | {"moe_layer_freq": "[1]*3+[0]*2+[1]*3"},
        4,
    ),
    "a rank of padding alone": (TP4 | {"vocab_size": 257}, 4),
    "padding on one rank": (TP4 | {"vocab_size": 50257}, 4),
    "cut vectors": ({"use_distributed_optimizer": True}, 4),
    "dropped attention weights": (CP2, 2),
    "sinkhorn": (CP2 | EXPERTS | {"moe_router_load_balancing_type": "sinkhorn"}, 4),
    "instances": (
        EXPERTS | {"use_distributed_optimizer": True, "num_distributed_optimizer_instances": 2},
        8,
    ),
    "a ramp and validation": (
        {
            "rampup_batch_size": (8, 8, 64),
            "train_iters": 0,
            "train_samples": 640,
            "eval_interval": 10,
            "pipeline_model_parallel_size": 2,
        },
        4,
    ),
}


def plans(flags, world_size, max_ranks=8):
    plan = resolve(compose(REAL | flags), world_size)
    small_run = build_small_run(plan, max_ranks)
    return small_run, resolve(small_run.config, small_run.world_size)


@pytest.mark.parametrize("name", list(FLAGS))
def test_a_small_run_takes_the_branches_of_the_real_one(name):
    small_run, _ = plans(*FLAGS[name])
    assert set(small_run.uncovered) <= SIZES
    assert not any("in the small run" in n for n in small_run.notes if "tiles" not in n)


def test_a_branch_that_a_smaller_layout_cannot_take_is_reported():
    flags = {"context_parallel_size": 4, "num_query_groups": 2}
    small_run, small = plans(flags, 8, 4)
    notes = small_run.notes
    assert small.config.parallelism.context_parallel_size == 2
    way = "each for several in the run"
    assert any(note.startswith("key/value heads over context ranks: " + way) for note in notes)
    assert "context ranks: more than 2 in the run, 2 in the small run" in notes


def test_options_that_no_size_depends_on_are_those_of_the_real_run():
    flags = {"logits_multiplier": 2.0, "softmax_scale": 0.1, "clip_grad": 0.0}
    small_run, small = plans(flags, 1)
    real, found = flat(compose(REAL | flags)), flat(small.config)
    differing = {name for name in real if found[name] != real[name]}
    assert differing <= small_run.chosen
    assert not set(flags) & differing
    assert not {f"--{name.replace('_', '-')}" for name in flags} & set(small_run.uncovered)


def test_options_that_are_on_take_the_small_value_of_their_metadata():
    on = {"hidden_dropout": 0.1, "clip_grad": 2.0, "weight_decay": 0.0}
    _, small = plans(on, 1)
    found, own = flat(small.config), rules_of(type(small.config.optimizer))
    assert (found["hidden_dropout"], found["clip_grad"]) == (0.0, own["clip_grad"].shrinks_to)
    assert (found["lr"], found["weight_decay"]) == (own["lr"].shrinks_to, 0.0)


def test_dropped_attention_weights_take_the_same_way_over_context_ranks():
    small_run, small = plans(CP2 | {"attention_dropout": 0.1}, 2)
    assert set(small_run.uncovered) <= SIZES | {"--attention-dropout"}
    assert small.config.model.window_size[0] >= small.config.batch.seq_length


def test_rows_pack_three_documents_or_more_with_two_borders_in_a_chunk():
    _, small = plans(CP2 | {"dataloader_inter_document_masking": True, **CP2}, 2)
    rows = build_rows(small)
    borders = rows[0]["cu_seqlens"].tolist()
    chunk = small.config.batch.seq_length // 4
    assert len(borders) > 3
    assert sum(1 for b in borders if 3 * chunk < b < 4 * chunk) == 2


def test_heads_divide_over_tensor_and_context_ranks_in_words():
    parallel = compose(REAL | CP2).parallelism
    assert head_relations(6, 3, parallel) == {
        "query heads of a key/value head": "several",
        "key/value heads of a tensor rank": "several",
        "query heads over context ranks": "divide",
        "key/value heads over context ranks": "neither divides the other",
    }


def test_the_numbers_that_change_a_branch_are_those_of_the_code():
    assert relations.HEAD_CHUNK_TOKENS == linear_cross_entropy.CHUNK_TOKENS
    assert relations.TILE_COLUMNS == random_tiles.TILE_COLUMNS
    assert relations.TILE_ROWS * random_tiles.TILE_COLUMNS == random_tiles.TILE_ELEMENTS
    assert relations.BUCKET_MULTIPLE == buckets.END_MULTIPLE
    assert SLOT_MULTIPLE == buckets.ALIGNMENT
