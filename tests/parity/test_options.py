"""Options that only some layouts can get wrong, each under such a layout, against one rank."""

import pytest
from parity.any_layout import check, plan_of

from mcore_parallel.mesh import ParallelContext
from mcore_train.layout_check.trial import rows_of, run_trial

TP2 = {"tensor_model_parallel_size": 2}
CP2 = {"context_parallel_size": 2}
PP2 = {"pipeline_model_parallel_size": 2}
SAVED_PIECES = {"recompute_granularity": "full", "distribute_saved_activations": True}
CASES = {
    "head_norms_tp2": (2, TP2 | {"qk_layernorm": True}),
    "documents_pp2": (2, PP2 | {"reset_position_ids": True}),
    "documents_apart_pp2": (
        2,
        PP2 | {"reset_position_ids": True, "reset_attention_mask": True},
    ),
    "window_cp2": (2, CP2 | {"window_size": (5, 0)}),
    "tied_pp2_zero": (2, PP2 | {"use_distributed_optimizer": True}),
    "saved_pieces_tp2_cp2": (4, TP2 | CP2 | SAVED_PIECES),
}


@pytest.mark.parametrize("name", list(CASES))
def test_an_option_under_a_layout_computes_what_one_rank_computes(name):
    world_size, draw = CASES[name]
    check([draw | {"micro_batch_size": 1, "global_batch_size": 2}], world_size)


def test_noise_of_routers_continues_where_a_run_stopped(tmp_path):
    noisy = {"num_experts": 4, "moe_ffn_hidden_size": 8, "moe_input_jitter_eps": 0.1}
    plan = plan_of(noisy | {"micro_batch_size": 1, "global_batch_size": 2}, 1)
    single = ParallelContext.single()
    trial = run_trial(plan, single, rows_of(plan), folder=tmp_path, saved_step=1)
    quiet = plan_of(noisy | {"moe_input_jitter_eps": 0.0, "global_batch_size": 2}, 1)
    assert trial.resumed == trial.final
    assert trial.losses != run_trial(quiet, single, rows_of(quiet)).losses
