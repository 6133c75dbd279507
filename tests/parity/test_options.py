"""Options that only some layouts can get wrong, each under such a layout, against one rank."""

import pytest
from parity.any_layout import check

TP2 = {"tensor_model_parallel_size": 2}
CP2 = {"context_parallel_size": 2}
PP2 = {"pipeline_model_parallel_size": 2}
SAVED_PIECES = {"recompute_granularity": "full", "distribute_saved_activations": True}
CASES = {
    "head_norms_tp2": (2, TP2 | {"qk_layernorm": True}),
    "documents_pp2": (2, PP2 | {"reset_position_ids": True}),
    "window_cp2": (2, CP2 | {"window_size": (5, 0)}),
    "tied_pp2_zero": (2, PP2 | {"use_distributed_optimizer": True}),
    "saved_pieces_tp2_cp2": (4, TP2 | CP2 | SAVED_PIECES),
}


@pytest.mark.parametrize("name", list(CASES))
def test_an_option_under_a_layout_computes_what_one_rank_computes(name):
    world_size, draw = CASES[name]
    check([draw | {"micro_batch_size": 1, "global_batch_size": 2}], world_size)
